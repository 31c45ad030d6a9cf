"""Records of all formats: recognized, and read as one form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.formats import ASK, CALL, LOOK, PAIR, RESULT, SKY, TOOLS, TURNS, assistant, gpt, human

from dpo.data.columns import ColumnsError, find_columns, recognize_columns
from dpo.data.custom import get_custom
from dpo.data.records import Record, read_record, recognize_format
from dpo.data.schema import read_message
from dpo.errors import InputError
from dpo.settings.choices import REMOVED_FORMATS
from dpo.settings.places import Source

GREEN = [assistant("Green.")]
WHOLE = {"chosen": ASK + SKY, "rejected": ASK + GREEN}
SAID = {"chosen": gpt("A."), "rejected": gpt("B.")}


def read(row: dict[str, Any], data_format: str | None = None) -> tuple[Record, str | None]:
    """Read a row on its own; return the record and its format."""
    options: dict[str, Any] = {"name": "mine", "origin": "rows", "data_format": data_format}
    for trains_on in ("pairs", "labels", "targets"):
        try:
            used = recognize_columns(find_columns([row]), {}, trains_on=trains_on, **options).used
        except ColumnsError:
            continue
        record = read_record(row, used, "record 1 of rows", name="mine")
        return record, recognize_format(row, used, record)
    raise AssertionError(f"{row} is not recognized")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("hh", {key: f"\n\nHuman: Hi!\n\nAssistant: {key}." for key in PAIR}),
        ("trl_standard", {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}),
        ("trl_standard", {"prompt": "The sky is", "completion": " blue.", "label": True}),
        ("trl_conversational", {"prompt": TURNS, "chosen": SKY, "rejected": GREEN}),
        ("trl_conversational", {"prompt": ASK, "completion": [CALL, RESULT, *SKY], "tools": json.dumps(TOOLS)}),
        ("trl_implicit", {"chosen": "The sky is blue.", "rejected": "The sky is green."}),
        ("trl_implicit", WHOLE),
        ("trl_implicit", {"messages": [*TURNS, *SKY], "label": True}),
        ("ultrafeedback", {"prompt": "Which colour?", **WHOLE, "messages": ASK + SKY, "score_chosen": 8.5}),
        ("alpaca", {"instruction": "Sum it up.", "input": "A long text.", **PAIR}),
        ("alpaca", {"instruction": "And who?", "history": [["Hi!", "Yes?"]], "system": "Be kind.", **PAIR}),
        ("alpaca", {"instruction": "Sum it up.", "input": "", "output": "Short.", "kto_tag": False}),
        ("sharegpt", {"conversations": [human("Hi!"), gpt("Yes?"), human("Who?")], **SAID, "system": "Be kind."}),
        ("sharegpt", {"conversations": [human("Q"), {"from": "function_call", "value": LOOK}], "kto_tag": True}),
        ("sharegpt", {"conversations": [human("Q")], **{key: [value] for key, value in SAID.items()}}),
        ("ranked", {"prompt": "Who?", "responses": [" A.", " B.", " C."], "scores": [3, 1, 2], "weight": 0.5}),
        ("ranked", {"prompt": ASK, "responses": [SKY, GREEN]}),
        # other columns, or other values than the format's
        (None, {"question": "Who?", **PAIR}),
        (None, {"messages": TURNS, "chosen": SKY[0], "rejected": GREEN[0]}),
        (None, {"prompt": ASK, **PAIR}),
        (None, {"prompt": "Which colour?", "chosen": SKY, "rejected": GREEN}),
        (None, {"conversations": [*ASK, *SKY], "kto_tag": True}),
        (None, {"conversations": [human("Q"), gpt("A")], "label": True}),
        (None, {"good": "\n\nHuman: Hi!\n\nAssistant: a", "bad": "\n\nHuman: Hi!\n\nAssistant: b"}),
    ],
)
def test_a_format_is_recognized_by_its_columns_and_the_kind_of_their_values(name, row):
    record, recognized = read(row)
    assert recognized == name
    if name:
        assert read(row, name) == (record, name)


def test_a_given_format_decides_which_columns_are_read(tokenizer):
    rows = [{"instruction": "Sum up.", "input": "Text", "prompt": "Who?", "question": "And who?", **PAIR}]
    for name, prompt in (("alpaca", "Sum up.\n\nText"), ("trl_standard", "Who?")):
        data = get_custom(rows, "mine", tokenizer, data_format=name)
        assert list(data) == [prompt]
        assert data.notes[0].startswith(f"mine: format {name}; columns prompt=")
    with pytest.raises(InputError) as error:
        get_custom(rows, "mine", tokenizer, data_format="sharegpt")
    assert str(error.value) == (
        "dataset_sources.mine.format reads the columns conversations, chosen, rejected, kto_tag, tools, system; mine "
        "has instruction, input, prompt, question, chosen, rejected, which lack what training on pairs needs: give "
        "another format, or none"
    )


@pytest.mark.parametrize("name", REMOVED_FORMATS)
def test_a_format_that_was_removed_is_refused_with_what_to_do(name):
    with pytest.raises(InputError, match=f"format={name} was removed after af2ec09b: leave it out, as columns are "):
        Source.parse("mine", {"path": "rows.jsonl", "format": name})


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
    assert read({**given, "rejected": gpt("B is.")})[0].responses == [[thought], [assistant("B is.")]]


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
        record, _ = read(row)
        read_prompt, *answers = [
            [read_message(message, "") for message in part] for part in (record.prompt, *record.responses)
        ]
        assert (read_prompt, answers) == ([*ASK, CALL, RESULT], [last, [assistant("Green.")]])


def test_a_call_and_its_result_may_be_in_the_form_that_openai_had_before():
    function = CALL["tool_calls"][0]["function"]
    answers = {"chosen": [{"role": "assistant", "content": None, "function_call": function}], "rejected": SKY}
    record, _ = read({"prompt": [*ASK, CALL, {**RESULT, "role": "function"}], **answers})
    assert record.prompt[-1] == RESULT
    assert read_message(record.responses[0][0], "") == CALL


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "Hi"}]', "[{'from': 'human', 'value': 'Hi'}]\n"])
def test_messages_in_a_text_are_refused(text):
    with pytest.raises(InputError, match="prompt is a text that holds chat messages: write them as a list"):
        read({"prompt": text, **PAIR})


def test_a_content_of_text_parts_is_their_text_and_other_parts_are_refused():
    part = {"type": "text", "text": "Which "}
    asked = {"role": "user", "content": [part, {**part, "text": "colour?"}]}
    row = {"prompt": [asked], "chosen": SKY, "rejected": SKY}
    assert read(row)[0].prompt == ASK
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
        record, _ = read({"prompt": messages, "chosen": SKY, "rejected": SKY})
        assert record.prompt == [*ASK, *turns]
