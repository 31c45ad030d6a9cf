"""What becomes of examples that are too long, by the key `truncation`.

The tiny tokenizer gives " a" and other short words of its own one token each.
"""

from pathlib import Path

import pytest
from support.formats import assistant, system, user
from support.records import plan_of_data
from support.runs import write_rows

from dpo.data.examples import Example, encode_examples, list_examples
from dpo.data.preflight import build_table
from dpo.data.report import SplitReport
from dpo.data.schema import Prompt
from dpo.data.table import PromptTable
from dpo.data.tokenization import TextEncoder

CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TURNS = [
    system("Be kind."),
    user("What was the first question of all?" * 3),
    assistant("That one." * 3),
    user("And the second?"),
]
LIMITS = {"max_length": 60, "max_prompt_length": 40}


def build(tmp_path: Path, tokenizer, rows: list[dict], **values) -> tuple[list[Example], dict]:
    """Return the encoded training examples, and the counts."""
    for split in ("train", "test"):
        write_rows(tmp_path / "mine" / f"{split}.jsonl", rows)
    plan = plan_of_data(tmp_path, {"mine": str(tmp_path / "mine")}, **LIMITS, **values)
    facts = build_table(tmp_path, plan, tokenizer)
    examples = [example for prompt in PromptTable(tmp_path / "train.jsonl") for example in list_examples(prompt)]
    return encode_examples(examples, TextEncoder(tokenizer), **LIMITS), facts["train"]


def chat_row(turns: list[dict], n_words: int = 9) -> dict:
    chosen, rejected = ([assistant(word * n_words)] for word in ("good ", "bad "))
    return {"prompt": turns, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("prompt", "responses", "mode", "apart", "expected"),  # to 6 tokens, and 2 of the prompt; EOS is one
    [
        # what fits exactly is not cut, even if the prompt exceeds its limit
        (" a b c", (" d e", " d"), "keep_end", True, (" a b c", " d e.", " d.")),
        # one token too many cuts the prompt to its limit and no less; the longer response decides for both
        (" a b c d", (" d e", " d"), "keep_start", True, (" a b", " d e.", " d.")),
        (" a b c d", (" d", " d e"), "keep_end", True, (" c d", " d.", " d e.")),
        # a long response loses its EOS, in the reference code whatever room a short prompt leaves
        (" a", (" a b c d e", " d"), "keep_end", True, (" a", " a b c d", " d.")),
        (" a", (" a b c d e", " d"), "keep_end", False, (" a", " a b c d e", " d.")),
    ],
)
def test_first_the_prompt_is_cut_to_its_limit_and_then_the_responses(
    prompt, responses, mode, apart, expected, tokenizer
):
    text = Prompt(prompt, list(responses), [{"chosen": 0, "rejected": 1}], mode, False, apart=apart)
    limits = {"max_length": 6, "max_prompt_length": 2}
    [example] = encode_examples(list_examples(text), TextEncoder(tokenizer), **limits)
    texts = map(tokenizer.decode, (example.prompt, *example.responses))
    assert tuple(text.replace("<|endoftext|>", ".") for text in texts) == expected


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        (TURNS, "[system] Be kind.\n[user] And the second?\n[assistant] "),  # the newest turn
        # of a question that is too long alone, the end
        ([TURNS[0], user("Read this. " * 40 + "Why?")], "Why?\n[assistant] "),
        ([*TURNS[:3], user("No " * 60 + "Yes?")], "Yes?\n[assistant] "),
    ],
)
def test_a_chat_keeps_the_system_turn_the_newest_turns_and_the_header(tmp_path, chat, turns, kept):
    tokenizer = chat(CHAT)
    [example], report = build(tmp_path, tokenizer, [chat_row(turns, n_words=20)])
    text = tokenizer.decode(example.prompt)
    assert text.startswith("[system] Be kind.\n[user] ")
    assert text.endswith(kept)
    assert len(example.prompt) <= LIMITS["max_prompt_length"]
    assert (report["truncated_prompts"], example.prompt_is_truncated) == (1, True)
    # the same prompt before an answer for which there is room is whole
    room = {"max_length": 999, "max_prompt_length": 40}
    [whole] = encode_examples(list_examples(PromptTable(tmp_path / "train.jsonl")[0]), TextEncoder(tokenizer), **room)
    assert not whole.truncated


LONG = "first " + "word " * 60 + "last"
OF_HH = f"\n\nHuman: {LONG}\n\nAssistant:"


@pytest.mark.parametrize(
    ("truncation", "begins", "ends"),
    [("auto", False, True), ("keep_end", False, True), ("keep_start", True, False)],
)
@pytest.mark.parametrize(
    ("row", "start", "end"),
    [
        (chat_row([user(LONG)], n_words=20), "[user] first", "last\n[assistant] "),
        ({"prompt": LONG, "chosen": " good" * 20, "rejected": " bad"}, "first", "last"),
        ({"chosen": OF_HH + " good" * 50, "rejected": OF_HH + " bad"}, "\n\nHuman: first", "last\n\nAssistant:"),
    ],
    ids=["chat", "text", "hh"],
)
def test_a_key_chooses_the_side_of_every_kind_of_prompt(row, start, end, tmp_path, chat, truncation, begins, ends):
    tokenizer = chat(CHAT)
    [example], _ = build(tmp_path, tokenizer, [row], truncation=truncation, chat="never")
    text = tokenizer.decode(example.prompt)
    assert (text.startswith(start), text.endswith(end)) == (begins, ends)
    if start == "\n\nHuman: first":  # the reference's rule for responses
        assert len(example.responses[0]) == LIMITS["max_length"] - LIMITS["max_prompt_length"]


def test_examples_that_are_too_long_are_left_out_counted_and_said(tmp_path, tokenizer):
    short = {"prompt": "a b", "chosen": " c", "rejected": " d", "margin": 1}
    long = {"prompt": "a b", "chosen": " c" * 70, "rejected": " d", "margin": 2}
    other = {"prompt": "a b c" * 30, "chosen": " c", "rejected": " d", "margin": 3}
    values = {"truncation": "drop", "loss.offset_by_margin": True}
    examples, report = build(tmp_path, tokenizer, [other, long, short], **values)
    assert [(e.truncated, e.margin, len(e.responses[0])) for e in examples] == [(False, 1, 2)]
    assert examples[0].id == (0, 0)  # its place in the table
    assert (report["too_long"], report["examples"], report["prompts"]) == (2, 1, 1)
    _, warning = SplitReport(**report).describe("train")
    assert warning.startswith("warning: in 2 of 3 examples (train) the example is too long")


def test_the_cache_of_reference_scores_knows_how_prompts_are_cut(tmp_path, tokenizer):
    row = {"prompt": "a b c" * 30, "chosen": " c" * 20, "rejected": " d"}
    _, start = build(tmp_path, tokenizer, [row], truncation="keep_start")
    _, end = build(tmp_path, tokenizer, [row], truncation="keep_end")
    assert start["digest"] != end["digest"]
