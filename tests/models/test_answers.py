"""Answers depend on weights, settings, seed and number alone, and end where they should."""

import copy

import pytest
import torch
import transformers
from support.formats import user
from support.models import FAMILIES, GROUPED, build

from dpo.data.examples import Example
from dpo.data.schema import Prompt
from dpo.models.answers import DEFAULTS, Sampling, choose_sampling, format_for_readers, generate, mark_truncation

PROMPTS = [tuple(range(5, 15)), (20, 21, 22), (30,)]


def test_an_answer_depends_on_its_seed_and_number_and_not_on_its_batch_or_the_random_state(tiny_llama, tokenizer):
    def tokens(prompts: list, numbers: list, seed: int) -> list:
        return [one.tokens for one in generate(tiny_llama, tokenizer, prompts, numbers, Sampling(32, seed=(seed, 8)))]

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tokens(PROMPTS, [0, 1, 2], 5)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(2)
    assert [tokens([prompt], [i], 5)[0] for i, prompt in enumerate(PROMPTS)] == first
    assert tokens(PROMPTS, [0, 1, 2], 6) != first
    assert tokens(PROMPTS[:1] * 2, [0, 1], 5)[1] != first[0]


@pytest.mark.parametrize(
    ("wanted", "published", "chat", "chosen"),
    [
        ({}, {}, False, (1.0, 1.0, 50)),  # the reference code's, which are transformers' own
        ({}, {}, True, (0.7, 0.9, 50)),
        ({}, {"temperature": 0.6, "top_k": 20, "do_sample": False}, True, (0.6, 0.9, 20)),
        ({"temperature": 0.0, "top_k": 0}, {"temperature": 0.6, "top_p": 0.8, "top_k": 20}, True, (0.0, 0.8, 0)),
        ({}, {"temperature": -1.0, "top_p": 0.0, "top_k": "all"}, False, (1.0, 1.0, 50)),  # nonsense
    ],
)
def test_the_users_value_comes_before_the_models_and_the_models_before_a_default(
    wanted, published, chat, chosen, tiny_llama, tokenizer
):
    for name, value in published.items():
        setattr(tiny_llama.generation_config, name, value)
    found = choose_sampling(tiny_llama, tokenizer, {**dict.fromkeys(DEFAULTS), **wanted}, chat=chat, max_new_tokens=1)
    assert (found.temperature, found.top_p, found.top_k) == chosen


@pytest.mark.parametrize(
    "published",
    [
        {"stop_strings": ["e"], "max_new_tokens": 2, "return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6, 7]},
        {"forced_eos_token_id": 3, "min_new_tokens": 10, "num_beams": 3, "use_cache": False},
        {"cache_implementation": "offloaded", "prompt_lookup_num_tokens": 3, "guidance_scale": 2.0},
    ],
    ids=str,
)
def test_nothing_else_of_a_generation_config_is_used(published, tiny_llama, tokenizer):
    expected = generate(tiny_llama, tokenizer, PROMPTS, [0, 1, 2], Sampling(12))
    for name, value in published.items():
        setattr(tiny_llama.generation_config, name, value)
    assert generate(tiny_llama, tokenizer, PROMPTS, [0, 1, 2], Sampling(12)) == expected


def test_an_answer_ends_at_the_tokenizers_end_token_and_at_those_of_the_model(tiny_llama, tokenizer):
    [whole] = generate(tiny_llama, tokenizer, PROMPTS[:1], [0], Sampling(12))
    last = whole.tokens[3]
    until_last = whole.tokens[: whole.tokens.index(last) + 1]
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for of_tokenizer, of_model in ((last, 1022), (1023, last), (1023, [1022, last]), (None, last)):
        ending = copy.deepcopy(tokenizer)
        ending.eos_token = None if of_tokenizer is None else tokenizer.convert_ids_to_tokens(of_tokenizer)
        tiny_llama.generation_config.eos_token_id = of_model
        sampling = choose_sampling(tiny_llama, ending, wanted, max_new_tokens=12)
        [cut] = generate(tiny_llama, tokenizer, PROMPTS[:1], [0], sampling)
        assert (cut.tokens, cut.ended) == (until_last, True)


def test_draws_follow_the_models_distribution(tokenizer, tiny_llama):
    ids = tuple(tokenizer("Where is")["input_ids"])
    with torch.no_grad():
        probabilities = tiny_llama(torch.tensor([ids])).logits[0, -1].float().div(0.5).softmax(-1)
    numbers = range(4000)
    drawn = generate(tiny_llama, tokenizer, [ids] * 4000, numbers, Sampling(1, temperature=0.5, top_p=0.5, seed=(1,)))
    counts = torch.zeros_like(probabilities)
    for one in drawn:
        counts[one.tokens[0]] += 1
    order = probabilities.argsort(descending=True)
    kept = order[: int((probabilities[order].cumsum(0) < 0.5).sum()) + 1]  # until half of the mass is reached
    assert counts[kept].sum() == 4000
    expected = probabilities[kept] / probabilities[kept].sum()
    assert (counts[kept] / 4000 - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("mode", "fed"),
    [("keep_start", "\n\nHuman: Who has seen the red [...]"), ("keep_end", "[...] d umbrella?\n\nAssistant:")],
)
def test_prompts_are_shown_as_they_were_fed(mode, fed, tokenizer):
    prompt = Prompt("\n\nHuman: Who has seen the red umbrella?\n\nAssistant:", [], [], mode)
    ids = tokenizer(prompt.text)["input_ids"]
    cut = tuple(ids[:12] if mode == "keep_start" else ids[-12:])
    assert mark_truncation(Example(cut, (), prompt_is_truncated=True), prompt, tokenizer) == fed
    assert mark_truncation(Example(tuple(ids), ()), prompt, tokenizer) == prompt.text


@pytest.mark.parametrize(
    ("messages", "fed", "turns"),
    [
        (None, "<|endoftext|>[I] Why?<|endoftext|>", "[I] Why?"),  # a user's own text
        ([user("Why </s>?")], "<|endoftext|>[I] Why?<|endoftext|>", "user: Why </s>?"),
        ([user("Why?")], "[...] y?<|endoftext|>", "[...] y?"),  # truncated
    ],
)
def test_readers_see_turns_and_no_control_tokens(messages, fed, turns, tokenizer):
    prompt = Prompt("<|endoftext|>[I] Why?<|endoftext|>", [], [], rendered=bool(messages), messages=messages)
    assert format_for_readers(prompt, fed, tokenizer) == turns


# --- a static cache ---------------------------------------------------------------------------------------------------

WINDOWED = {**GROUPED, "sliding_window": 6}
CACHED = {**FAMILIES, "mistral, all layers windowed": lambda: transformers.MistralConfig(**WINDOWED)}


def answer_two(model, tokenizer, length: int, cache: str | None, temperature: float = 0) -> list[tuple[int, ...]]:
    """Tokens of the answers to two prompts, of `length` tokens and of half as many."""
    prompts = [tuple(range(5, 5 + n)) for n in (length, length // 2)]
    sampling = Sampling(12, temperature, cache_implementation=cache)
    return [given.tokens for given in generate(model, tokenizer, prompts, [0, 1], sampling)]


@pytest.mark.parametrize("family", CACHED)
def test_a_static_cache_gives_the_same_answers(family, tokenizer):
    model = build(CACHED[family]).eval()
    for length, temperature in ((20, 0), (9, 1)):
        growing = answer_two(model, tokenizer, length, None, temperature)
        assert answer_two(model, tokenizer, length, "static", temperature) == growing
