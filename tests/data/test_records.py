"""Rows of every format, read as records."""

from __future__ import annotations

from typing import Any

import pytest
from support.formats import ASK, CALL, LOOK, PAIR, RESULT, SKY, assistant, gpt, human

from dpo.data.columns import recognize
from dpo.data.custom import get_custom
from dpo.data.records import read_record, split_shared_prompt
from dpo.data.schema import Record
from dpo.errors import InputError


def read(row: dict[str, Any]) -> Record:
    used = recognize([row], {}, name="mine", origin="rows", trains_on="pairs").used
    return read_record(row, used, "record 1 of rows", name="mine")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # the shared beginning ends in the middle of "there" / "then"; the prompt ends at the word before
        ("Is it there", "Is it then", ("Is it", " there", " then")),
        # one text is the beginning of the other
        ("Go on", "Go on now", ("Go", " on", " on now")),
        # a dialogue is cut at its last shared marker, though " I " is shared beyond it
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I do",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I don't",
            ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " I do", " I don't"),
        ),
        # dialogues that part at the first answer are cut there, whatever follows
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: e",
            ("\n\nHuman: a\n\nAssistant:", " b\n\nHuman: c\n\nAssistant: d", " e"),
        ),
    ],
)
def test_texts_without_a_prompt_share_their_beginning(chosen, rejected, expected):
    assert split_shared_prompt(chosen, rejected) == expected
    record = read({"chosen": chosen, "rejected": rejected})
    assert (record.prompt, *record.responses) == expected


def test_a_system_turn_is_part_of_the_prompt(tokenizer):
    # a column without words may have the name of a model, unless the format of the others has one for the system turn
    named = {"prompt": "Who is right?", **PAIR, "system": "gpt-4"}
    assert list(get_custom([named], "mine", tokenizer)) == ["Who is right?"]
    short = {"instruction": "Who is right?", **PAIR, "system": "/no_think"}
    assert list(get_custom([short], "mine", tokenizer)) == ["/no_think\n\nWho is right?"]
    # one that is given with the prompt alone is left out
    assert list(get_custom([short], "mine", tokenizer, {"prompt": "instruction"})) == ["Who is right?"]
    given = {"prompt": "prompt", "system": "system"}
    assert list(get_custom([named], "mine", tokenizer, given)) == ["gpt-4\n\nWho is right?"]


def test_messages_keep_their_other_keys():
    thought = {**assistant("A is."), "reasoning_content": "hm", "name": "Eve"}
    given = {"conversations": [human("Who?")], "chosen": {**gpt("A is."), "reasoning_content": "hm", "name": "Eve"}}
    assert read({**given, "rejected": gpt("B is.")}).responses == [[thought], [assistant("B is.")]]


@pytest.mark.parametrize("last", [[{**SKY[0], "reasoning_content": "hm"}], [CALL, RESULT, *SKY]])
def test_the_shared_prompt_does_not_depend_on_nulls_or_on_how_arguments_are_written(last):
    """Arrow gives all messages of a column the keys that any has."""
    as_json = {**CALL, "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "sky"}'}}]}
    keys = {key: None for message in (CALL, *last) for key in message}
    chosen = [{**keys, **message} for message in [*ASK, CALL, RESULT, *last]]
    rejected = [*ASK, as_json, RESULT, assistant("Green.")]
    for row in (
        {"chosen": chosen, "rejected": rejected},
        {"prompt": "Which colour?", "chosen": chosen, "rejected": rejected},
    ):
        record = read(row)
        assert (record.prompt, record.responses) == ([*ASK, CALL, RESULT], [last, [assistant("Green.")]])


def test_a_call_and_its_result_may_be_in_the_form_that_openai_had_before():
    function = CALL["tool_calls"][0]["function"]
    answers = {"chosen": [{"role": "assistant", "content": None, "function_call": function}], "rejected": SKY}
    record = read({"prompt": [*ASK, CALL, {**RESULT, "role": "function"}], **answers})
    assert (record.prompt[-1], record.responses[0]) == (RESULT, [CALL])


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "Hi"}]', "[{'from': 'human', 'value': 'Hi'}]\n"])
def test_messages_in_a_text_are_refused(text):
    with pytest.raises(InputError, match="prompt is a text that holds chat messages: write them as a list"):
        read({"prompt": text, **PAIR})


def test_a_content_of_text_parts_is_their_text_and_other_parts_are_refused():
    part = {"type": "text", "text": "Which "}
    asked = {"role": "user", "content": [part, {**part, "text": "colour?"}]}
    row = {"prompt": [asked], "chosen": SKY, "rejected": SKY}
    assert read(row).prompt == ASK
    asked["content"].append({"type": "image_url"})
    with pytest.raises(InputError, match="record 1 of rows: content has a part of type 'image_url', and must be text"):
        read(row)


@pytest.mark.parametrize("arguments", ["[1]", "3", '"sky"', '"{}"', [1]])
def test_arguments_other_than_an_object_are_refused(arguments):
    call = {**CALL, "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    with pytest.raises(InputError, match="the arguments of look must be an object or JSON of one, and are "):
        read({"prompt": ASK, "chosen": [call], "rejected": SKY})


def test_successive_calls_are_one_turn():
    calls = {"tool_calls": CALL["tool_calls"] * 2}
    swift = {"role": "tool_call", "content": LOOK}
    for messages, turns in (
        ([*ASK, swift, swift, {**RESULT, "role": "tool_response"}], [{**CALL, **calls}, RESULT]),
        ([*ASK, assistant("I look."), swift, swift], [{**assistant("I look."), **calls}]),
        ([human("Which colour?"), *[{"from": "function_call", "value": LOOK}] * 2], [{**CALL, **calls}]),
        ([*ASK, swift, RESULT, swift], [CALL, RESULT, CALL]),
    ):
        record = read({"prompt": messages, "chosen": SKY, "rejected": SKY})
        assert record.prompt == [*ASK, *turns]
