"""A user's conversation is tokenized once, whatever the tokenizer, the template and the kind of data.

Every case is compared with the tokens of the whole text, as anyone who serves the model would compute them.
"""

import copy
from itertools import chain

import pytest
import torch
import transformers
from support.formats import assistant, system, user
from support.models import SMALL, plain_logps
from support.tokenizers import BEFORE_ANSWER, KINDS, TOKENIZERS, make_template
from tokenizers import AddedToken

from dpo.data.custom import get_custom
from dpo.data.examples import encode_examples, list_examples
from dpo.data.table import number_prompts
from dpo.data.tokenization import MARKERS, TextEncoder

LIMITS = {"max_length": 999, "max_prompt_length": 99}


def make_records(kind: str, with_system: bool) -> tuple[str, list[dict]]:
    """What a loss of this kind trains on, and records."""
    prompt = [system("You are kind")] * with_system + [user("What is number 1?")]
    good, bad = [assistant("It is 漢")], [assistant("the cat")]
    longer = [*good, user("Hé?"), assistant("is it"), user("the"), assistant("It is")]
    records = {
        "pairs": {"prompt": prompt, "chosen": good, "rejected": bad},
        "several turns": {"prompt": prompt, "chosen": longer, "rejected": bad},
        "lists": {"prompt": prompt, "responses": [good, bad, longer]},
        "texts": {"prompt": "### Response:\n", "chosen": "It is a cat", "rejected": "the answer"},
        "texts, joined": {"prompt": "the ans", "chosen": "wer is", "rejected": " cat"},
    }
    return "lists" if kind == "lists" else "pairs", [records[kind]]


def read(tokenizer, kind: str, with_system: bool = False):
    trains_on, records = make_records(kind, with_system)
    data = get_custom(records, "mine.jsonl", tokenizer, trains_on=trains_on, chat="never")
    [prompt] = number_prompts([("mine", data)], keep_all=True)
    return prompt


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("before_answer", list(BEFORE_ANSWER))
@pytest.mark.parametrize("tokenizer_kind", KINDS)
def test_scored_tokens_are_those_of_the_whole_conversation(tokenizer_kind, before_answer, with_system):
    tokenizer = TOKENIZERS[tokenizer_kind]
    tokenizer.chat_template = make_template(BEFORE_ANSWER[before_answer])
    for kind in ("pairs", "several turns", "lists", "texts"):
        prompt = read(tokenizer, kind, with_system)
        examples = list_examples(prompt)
        all_encoded = encode_examples(examples, TextEncoder(tokenizer), **LIMITS)
        for (_, index), encoded in zip(examples, all_encoded, strict=True):
            all_pieces = [prompt.pieces[i] for i in prompt.roles(index).values()]
            all_cuts = encoded.cuts or [()] * len(all_pieces)
            for pieces, response, cuts in zip(all_pieces, encoded.responses, all_cuts, strict=True):
                whole = tokenizer(prompt.text + "".join(pieces), add_special_tokens=False)["input_ids"]
                assert [*encoded.prompt, *response] == [*whole, tokenizer.eos_token_id], kind
                limits = [0, *cuts, len(response) - 1]  # before each, the text of the pieces before it
                said = prompt.text
                for piece, limit in zip(["", *pieces], limits, strict=True):
                    said += piece
                    found = tokenizer.decode([*encoded.prompt, *response[:limit]])
                    assert found.replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("kind", ["pairs", "several turns"])
def test_log_probabilities_are_those_of_plain_transformers_on_the_conversation(kind):
    tokenizer = TOKENIZERS["first"]
    tokenizer.chat_template = make_template(BEFORE_ANSWER["newline"])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, vocab_size=len(tokenizer))
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    prompt = read(tokenizer, kind)
    examples = encode_examples(list_examples(prompt), TextEncoder(tokenizer), **LIMITS)
    for response, text, found in zip(
        examples[0].responses, prompt.responses, plain_logps(model, examples), strict=True
    ):
        encoded = tokenizer(prompt.text + text, return_offsets_mapping=True)
        ids = torch.tensor([*encoded["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        # written anew from the letters: the assistant's turns with their ends are scored
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(prompt.text + text)]
        whole, scored, is_scored = prompt.text + text, [], True
        for start in starts[len(ids) - len(response) :]:
            turn_ended = whole[:start].endswith("</s>") and start > len(prompt.text)
            answers = whole[:start].endswith("<A>\n") or start == len(prompt.text)
            is_scored = answers or (is_scored and not turn_ended)
            scored.append(is_scored)
        expected = logps[-len(response) :][torch.tensor(scored)].sum()
        assert found.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("tokenizer_kind", KINDS)
def test_a_token_across_prompt_and_response_is_tokenized_apart_for_both_responses(tokenizer_kind):
    tokenizer = TOKENIZERS[tokenizer_kind]
    prompt = read(tokenizer, "texts, joined")
    [tokens] = TextEncoder(tokenizer).encode_conversations([(prompt.text, prompt.pieces)])
    assert tokens.prompt == tokenizer(prompt.text)["input_ids"]
    marker = tokenizer(MARKERS[0])["input_ids"]
    for text, [ids] in zip(prompt.responses, tokens.responses, strict=True):
        assert ids == tokenizer(MARKERS[0] + text)["input_ids"][len(marker) :]
        if tokenizer_kind.startswith("bytes"):  # without a space to add, exactly as the text alone
            assert ids == tokenizer(text)["input_ids"]
    # a response that alone would not cross gets the same prompt, as all responses of a prompt do
    alone = prompt._replace(examples=[{"rejected": 1}])
    [example] = encode_examples([(alone, 0)], TextEncoder(tokenizer), **LIMITS)
    assert example.prompt == tuple(tokens.prompt)


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_a_control_token_that_takes_the_spaces_beside_it_crosses_no_limit(flags):
    """As Phi-3's <|end|>, which takes the newline behind it."""
    tokenizer = copy.deepcopy(TOKENIZERS["never"])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", **flags)]})
    pieces = ["cat ", "<|end|>", "\n<s>[I] the", "<|end|>\n", "It is"]
    [tokens] = TextEncoder(tokenizer).encode_conversations([("the", [pieces])])
    whole = tokenizer("the" + "".join(pieces), add_special_tokens=False)["input_ids"]
    assert [*tokens.prompt, *chain(*tokens.responses[0])] == whole
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert [end in ids for ids in tokens.responses[0]] == [False, True, False, True, False]


def test_a_tokenizer_without_offsets_drops_a_marker_before_each_part():
    class InPython:
        is_fast, eos_token, eos_token_id = False, "</s>", 2

        def __call__(self, text, add_special_tokens=False):
            return TOKENIZERS["always"](text, add_special_tokens=add_special_tokens)

    prompt, response = "<s><A>\n", "It is"
    [tokens] = TextEncoder(InPython()).encode_conversations([(prompt, [[response]])])
    whole = TOKENIZERS["always"](prompt + response, add_special_tokens=False)["input_ids"]
    assert [*tokens.prompt, *tokens.responses[0][0]] == whole
