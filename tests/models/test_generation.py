"""Samples depend on their seed alone and end where the config says."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support.models import FAMILIES, GROUPED, build
from torch._dynamo.utils import counters

from dpo.data.collation import get_collate_fn, tokenize_batch_element
from dpo.data.examples import Example
from dpo.data.table import Prompt
from dpo.models import generation
from dpo.models.adapters import add_adapter, make_adapter_config
from dpo.models.answers import Sampling, answer


@pytest.fixture(scope="module")
def batch(tokenizer):
    pairs = [
        ("\n\nHuman: Where?\n\nAssistant:", " Here, on the desk.", " No."),
        ("\n\nHuman: Who has seen the red umbrella?\n\nAssistant:", " I.", " Nobody has seen it, and who cares?"),
    ]
    return get_collate_fn(tokenizer)([tokenize_batch_element(*p, "keep_start", tokenizer, 64, 32) for p in pairs])


class IdsInsteadOfText:
    """Stands in for the tokenizer, to see how many tokens were sampled."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, ids, **options):
        return ids


def test_sampling_depends_on_its_seed_alone_and_leaves_the_random_state(tiny_llama, tokenizer, batch):
    def texts(seed: int) -> list[str]:
        said = generation.sample(tiny_llama, batch, tokenizer, Sampling(32, seed=seed))
        return [continuation.text for continuation in said]

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = texts(5)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(2)
    assert texts(5) == first
    assert texts(6) != first
    assert len(first) == len(batch["prompt"])
    assert not any(prompt in text for prompt, text in zip(batch["prompt"], first, strict=True))


@pytest.mark.parametrize("models_own_limit", [None, 2])
def test_a_sample_has_at_most_so_many_tokens(models_own_limit, tiny_llama, batch):
    model = copy.deepcopy(tiny_llama)
    model.generation_config.max_new_tokens = models_own_limit  # some published models come with one

    said = generation.sample(model, batch, IdsInsteadOfText(), Sampling(6))

    assert [len(continuation.text) for continuation in said] == [6, 6]


def test_a_sample_says_whether_it_ended(tiny_llama, batch):
    model = copy.deepcopy(tiny_llama)

    def sample(eos: int | None) -> list[generation.Continuation]:
        model.generation_config.eos_token_id = eos
        return generation.sample(model, batch, IdsInsteadOfText(), Sampling(6))

    first, second = sample(eos=None)
    assert [first.ended, second.ended] == [False, False]
    [end] = set(first.text[2:3]) - set(second.text)
    assert [said.ended for said in sample(eos=end)] == [True, False]


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
def test_the_users_value_comes_before_the_models_and_the_models_before_a_default(wanted, published, chat, chosen):
    config = transformers.GenerationConfig()
    for name, value in published.items():
        setattr(config, name, value)
    wanted = {**dict.fromkeys(generation.DEFAULTS), **wanted}
    assert tuple(generation.choose_sampling(config, wanted, chat=chat).values()) == chosen


@pytest.mark.parametrize(
    "published",
    [
        {"stop_strings": ["e"]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6, 7]},
        {"forced_eos_token_id": 3, "min_new_tokens": 10, "num_beams": 3, "use_cache": False},
        {"cache_implementation": "offloaded", "prompt_lookup_num_tokens": 3, "guidance_scale": 2.0},
    ],
    ids=str,
)
def test_nothing_else_of_a_generation_config_is_used(published, tiny_llama, tokenizer, batch):
    expected = generation.sample(tiny_llama, batch, tokenizer, Sampling(12, top_k=50))
    for name, value in published.items():
        setattr(tiny_llama.generation_config, name, value)
    assert generation.sample(tiny_llama, batch, tokenizer, Sampling(12, top_k=50)) == expected


def test_texts_end_at_the_tokenizers_end_token_and_at_those_of_the_model(tiny_llama, tokenizer, batch):
    [first, _] = generation.sample(tiny_llama, batch, IdsInsteadOfText(), Sampling(12))
    for ends in ({"eos": first.text[3]}, {"model_eos": first.text[3]}):
        tokens = IdsInsteadOfText()
        tokens.eos_token_id = ends.get("eos", 1023)
        tiny_llama.generation_config.eos_token_id = ends.get("model_eos", 1022)
        [cut, _] = generation.sample(tiny_llama, batch, tokens, Sampling(12))
        assert cut == (first.text[: first.text.index(first.text[3]) + 1], True)


@pytest.mark.parametrize(
    ("mode", "fed"),
    [("keep_start", "\n\nHuman: Who has seen the red [...]"), ("keep_end", "[...] d umbrella?\n\nAssistant:")],
)
def test_prompts_are_shown_as_they_were_fed(mode, fed, tokenizer):
    prompts = ("\n\nHuman: Where?\n\nAssistant:", "\n\nHuman: Who has seen the red umbrella?\n\nAssistant:")
    rows = [tokenize_batch_element(prompt, " I.", " No.", mode, tokenizer, 20, 12) for prompt in prompts]
    ids = [tuple(row["prompt_input_ids"]) for row in rows]
    examples = [Example(prompt, (), id=(i, 0), prompt_is_cut=i == 1) for i, prompt in enumerate(ids)]
    stored = [Prompt(text, [], [], mode, False) for text in prompts]
    assert generation.fed_prompts(examples, stored, tokenizer) == [prompts[0], fed]


@pytest.mark.parametrize(
    ("messages", "fed", "turns"),
    [
        (None, "<|endoftext|>[I] Why?<|endoftext|>", "[I] Why?"),  # a user's own text
        ([{"role": "user", "content": "Why </s>?"}], "<|endoftext|>[I] Why?<|endoftext|>", "user: Why </s>?"),
        ([{"role": "user", "content": "Why?"}], "[...] y?<|endoftext|>", "[...] y?"),  # truncated
    ],
)
def test_readers_see_turns_and_no_control_tokens(messages, fed, turns, tokenizer):
    prompt = Prompt("<|endoftext|>[I] Why?<|endoftext|>", [], [], "keep_end", bool(messages), messages=messages)
    assert generation.write_turns(prompt, fed, tokenizer) == turns


# --- a static cache ---------------------------------------------------------------------------------------------------

WINDOWED = {**GROUPED, "sliding_window": 6}
CACHED = {**FAMILIES, "mistral, all layers windowed": lambda: transformers.MistralConfig(**WINDOWED)}


def answer_greedily(model, tokenizer, length: int, cache: str | None) -> list[tuple[int, ...]]:
    """Tokens of the answers to two prompts, of `length` tokens and of half as many."""
    prompts = [tuple(range(5, 5 + n)) for n in (length, length // 2)]
    sampling = Sampling(12, temperature=0, cache_implementation=cache)
    return [given.tokens for given in answer(model, tokenizer, prompts, [0, 1], sampling)]


@pytest.mark.parametrize("family", CACHED)
def test_a_static_cache_gives_the_same_answers(family, tokenizer):
    model = build(CACHED[family]).eval()
    for length in (20, 9):
        growing = answer_greedily(model, tokenizer, length, None)
        assert answer_greedily(model, tokenizer, length, "static") == growing


def test_a_static_cache_gives_the_same_samples(tiny_llama, tokenizer, batch):
    growing, static = (
        generation.sample(tiny_llama, batch, tokenizer, Sampling(12, seed=3, cache_implementation=cache))
        for cache in (None, "static")
    )
    assert static == growing


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_compiled_decoding_follows_the_weights_and_compiles_twice(adapter, tiny_llama, tokenizer, monkeypatch):
    """On a CPU, where transformers would not compile. The second time is for prompts of any length."""
    monkeypatch.setattr(
        transformers.GenerationMixin,
        "_valid_auto_compile_criteria",
        lambda self, kwargs, config: config.cache_implementation == "static",
    )
    torch._dynamo.reset()
    model = copy.deepcopy(tiny_llama)
    if adapter:
        add_adapter(model, make_adapter_config(4, 8, "auto"), dropout=0.1)
        model.eval()  # the adapter's dropout too
    graphs, steps = counters["stats"]["unique_graphs"], []
    for round_index, length in enumerate((20, 9, 31, 14, 26)):
        with torch.no_grad():  # as an update does
            for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                torch.manual_seed(100 * round_index + i)
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        with generation.before_each_forward(model, steps.append):
            compiled = answer_greedily(model, tokenizer, length, "static")
        assert steps == list(range(12))
        steps.clear()
        assert compiled == answer_greedily(model, tokenizer, length, None)
    assert 1 <= counters["stats"]["unique_graphs"] - graphs <= 2
