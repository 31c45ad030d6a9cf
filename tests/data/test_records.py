"""Formats of records: recognized, read as one form, and written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.formats import ASK, CALL, LOOK, PAIR, RESULT, ROWS, SKY, TOOLS, TURNS, assistant, gpt, human, system, user

from dpo.data.columns import ColumnsError, find_columns, recognize_columns
from dpo.data.custom import get_custom
from dpo.data.records import (
    FORMATS,
    MESSAGES,
    SHAREGPT,
    SWIFT,
    CannotHoldError,
    Record,
    read_record,
    recognize_format,
    write_record,
)
from dpo.data.schema import read_message, read_tools
from dpo.errors import InputError
from dpo.settings.choices import DATA_FORMATS

EVERY_ROW = [(name, row) for name, rows in ROWS.items() for row in rows]


def read(row: dict[str, Any], data_format: str | None = None) -> tuple[Record, str | None]:
    """Read a row on its own; return the record and its format."""
    format_columns = FORMATS[data_format].columns if data_format else None
    options: dict[str, Any] = {"name": "mine", "origin": "rows", "format_columns": format_columns}
    for trains_on in ("pairs", "labels", "targets"):
        try:
            used = recognize_columns(find_columns([row]), {}, trains_on=trains_on, **options).used
        except ColumnsError:
            continue
        record = read_record(row, used, "record 1 of rows", name="mine")
        return record, recognize_format(row, used, record)
    raise AssertionError(f"{row} is not recognized")


def test_the_table_has_the_names_that_the_config_accepts():
    assert tuple(FORMATS) == DATA_FORMATS
    assert {*FORMATS} - {*ROWS} == {"openrlhf"}  # its rows are TRL's


@pytest.mark.parametrize(("name", "row"), EVERY_ROW)
def test_a_row_is_recognized_and_read_alike_if_its_format_is_given(name, row):
    record, recognized = read(row)
    assert recognized == name
    assert read(row, name)[0] == record


@pytest.mark.parametrize(
    ("name", "index", "record"),
    [
        ("hh", 0, Record("\n\nHuman: Hi!\n\nAssistant:", [" Yes?", " No."])),
        ("trl_standard", 1, Record("The sky is", [" blue."], label=True)),
        ("trl_conversational", 1, Record(TURNS, [SKY, [assistant("Green.")]])),
        ("trl_implicit", 0, Record("The sky is", [" blue.", " green."])),
        ("trl_implicit", 2, Record(TURNS, [[assistant("A.")]])),
        ("ultrafeedback", 0, Record(ASK, [SKY, [assistant("Green.")]])),
        ("alpaca", 0, Record("Sum it up.", ["A is right.", "B is right."], input="A long text.")),
        ("alpaca", 3, Record("Sum it up.", ["Short."], system="Be kind.", input="A long text.")),
        ("sharegpt", 1, Record([user("Hi!")], [[assistant("A.")], [assistant("B.")]], system="Be kind.")),
        ("sharegpt", 2, Record([user("Hi!")], [[assistant("Yes?")]], label=False)),
        ("axolotl_chat_template", 0, Record(TURNS, [[assistant("A.")], [assistant("B.")]])),
        ("axolotl_intel", 0, Record("Who is right?", ["A is right.", "B is right."], system="Be kind.")),
        ("ms_swift", 0, Record(TURNS, [[assistant("A.")], [assistant("B.")]])),
        ("ms_swift_messages", 0, Record(TURNS, [[assistant("A.")], [assistant("B.")]])),
        ("ranked", 0, Record("Who is right?", [" A.", " B.", " C."], is_list=True)),
    ],
)
def test_all_formats_are_read_as_one_form(name, index, record):
    assert read(ROWS[name][index])[0] == record


@pytest.mark.parametrize("target", FORMATS)
def test_a_record_that_a_format_holds_as_it_is_comes_back_from_it(target):
    """A change is named, and made once."""
    reasons = set()
    for name, row in EVERY_ROW:
        record, _ = read(row)
        try:
            written, changes = write_record(record, FORMATS[target])
        except CannotHoldError as error:
            reasons.add(str(error))
            continue
        again, _ = read(written, target)
        if not changes:
            assert (again.join_prompt(), again.responses) == (record.join_prompt(), record.responses), (name, target)
        assert again.label == record.label
        if "the tools are left out" not in changes:
            assert read_tools({"": again.tools}, "", "") == read_tools({"": record.tools}, "", "")
        assert write_record(again, FORMATS[target]) == (written, []), (name, target)
        is_chat = FORMATS[target].values in (MESSAGES, SHAREGPT, SWIFT)
        assert ("text is now chat messages" in changes) == (is_chat and not record.is_chat)
        if name == target:
            assert not changes
            assert all(row[column] == value for column, value in written.items())
    assert reasons <= {
        "texts that are not dialogues of Human and Assistant",
        "chat messages",
        "labels",
        "pairs",
        "ranked lists",
        "single responses",
        "several turns before the response",
        "turns of other roles than user and assistant",
        "prompts that are not the common beginning",
        "tool calls",
        "responses of several messages",
    }


@pytest.mark.parametrize(
    ("record", "target", "written"),
    [
        (  # the turns of a dialogue become messages, and back
            Record("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [" d", " e"]),
            "trl_conversational",
            {
                "prompt": [user("a"), assistant("b"), user("c")],
                "chosen": [assistant("d")],
                "rejected": [assistant("e")],
            },
        ),
        (
            Record([user("a"), assistant("b"), user("c")], [[assistant("d")], [assistant("e")]]),
            "hh",
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
                "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e",
            },
        ),
        (
            Record("Sum up.", [" A"], system="Be kind.", input="Text"),
            "ms_swift",
            {"system": "Be kind.", "messages": [user("Sum up.\n\nText"), assistant("A")]},
        ),
        (
            Record("Q", ["A"], system="Be kind.", input="T"),
            "trl_standard",
            {"prompt": "Be kind.\n\nQ\n\nT", "completion": "A"},
        ),
        (
            Record("\n\nHuman: a\n\nAssistant:", [" b", " c"]),
            "alpaca",
            {"instruction": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            Record([system("Be kind."), *ASK], [SKY], label=True),
            "alpaca",
            {"system": "Be kind.", "instruction": "Which colour?", "output": "Blue.", "kto_tag": True},
        ),
    ],
)
def test_texts_and_messages_become_each_other(record, target, written):
    assert write_record(record, FORMATS[target])[0] == written


@pytest.mark.parametrize(
    ("record", "target", "reason"),
    [
        (
            Record("It is A", [" bit of a, b", " bit of a, c"]),
            "trl_implicit",
            "prompts that are not the common beginning",
        ),
        (Record(ASK, [[*SKY, user("Why?"), assistant("So.")]] * 2), "ms_swift", "responses of several messages"),
        (Record(ASK, [[*SKY, user("Why?"), assistant("So.")]]), "sharegpt", "responses of several messages"),
        (Record([*TURNS[:3], {"role": "critic", "content": "3"}], [SKY]), "sharegpt", "messages of critic"),
        (Record([*ASK, CALL, RESULT], [SKY]), "alpaca", "tool calls"),
        (Record(ASK, [SKY, [CALL]]), "ms_swift", "tool calls"),
        (Record(ASK, [[{**CALL, "content": "I look."}]]), "sharegpt", "text beside tool calls"),
        (Record([system("Be kind.")], [SKY, SKY]), "ultrafeedback", "prompts without a user"),
    ],
)
def test_what_a_format_cannot_hold_is_named(record, target, reason):
    with pytest.raises(CannotHoldError, match=reason):
        write_record(record, FORMATS[target])


def test_a_system_turn_is_part_of_the_prompt(tokenizer):
    data = get_custom(ROWS["axolotl_intel"][:1], "mine", tokenizer)
    assert list(data) == ["Be kind.\n\nWho is right?"]
    assert data.notes == [
        "mine: format axolotl_intel; columns prompt=question, chosen=chosen, rejected=rejected, system=system"
    ]
    # a column without words may have the name of a model, unless the format of the others has one for the system turn
    named = {"prompt": "Who is right?", **PAIR, "system": "gpt-4"}
    assert list(get_custom([named], "mine", tokenizer)) == ["Who is right?"]
    short = {**ROWS["axolotl_intel"][0], "system": "/no_think"}
    assert list(get_custom([short], "mine", tokenizer)) == ["/no_think\n\nWho is right?"]
    # one that is given with the prompt alone is left out
    assert list(get_custom(ROWS["axolotl_intel"][:1], "mine", tokenizer, {"prompt": "question"})) == ["Who is right?"]
    given = {"prompt": "prompt", "system": "system"}
    assert list(get_custom([named], "mine", tokenizer, given)) == ["gpt-4\n\nWho is right?"]
    # in a chat it is a message, unless the chat has one
    row = {"prompt": ASK, "chosen": SKY, "rejected": SKY, "system": "Be kind."}
    assert read(row)[0].join_prompt() == [system("Be kind."), *ASK]
    assert read({**row, "prompt": TURNS})[0].join_prompt() == TURNS


def test_responses_to_a_chat_may_be_texts_and_a_prompt_before_messages_too():
    expected = Record(ASK, [[assistant("A is right.")], [assistant("B is right.")]])
    assert read({"conversations": [human("Which colour?")], **PAIR})[0] == expected
    assert read({"prompt": "Which colour?", **{key: [assistant(text)] for key, text in PAIR.items()}})[0] == expected
    assert read({"prompt": ASK, "responses": [*PAIR.values()]})[0] == expected._replace(is_list=True)


def test_messages_keep_their_other_keys():
    thought = {**assistant("A is."), "reasoning_content": "hm", "name": "Eve"}
    given = {"conversations": [human("Who?")], "chosen": {**gpt("A is."), "reasoning_content": "hm", "name": "Eve"}}
    record, recognized = read({**given, "rejected": gpt("B is.")})
    assert (record.responses, recognized) == ([[thought], [assistant("B is.")]], "sharegpt")
    calling = {**CALL, "reasoning_content": "hm"}
    result = {**RESULT, "tool_call_id": "1"}
    record = Record([user("Who?"), calling, result], [[thought], [{**CALL, "reasoning_content": "so"}]])
    assert read(write_record(record, FORMATS["sharegpt"])[0])[0] == record


def test_keys_of_calls_that_sharegpt_has_no_place_for_are_named():
    call = {**CALL["tool_calls"][0], "id": "1", "index": 0}
    _, changes = write_record(Record(ASK, [[{**CALL, "tool_calls": [call]}], SKY]), FORMATS["sharegpt"])
    assert changes == ["the id of calls is left out", "the index of calls is left out"]
    with pytest.raises(CannotHoldError, match="tool calls after another turn of the assistant"):
        write_record(Record([*ASK, assistant("Hm."), CALL, RESULT], [SKY, SKY]), FORMATS["sharegpt"])


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
        {"messages": chosen, "rejected_messages": rejected},
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


def test_calls_are_written_and_recognized_whatever_their_arguments():
    as_text = {**CALL, "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "sky"}'}}]}
    written, _ = write_record(Record(ASK, [[as_text]]), FORMATS["sharegpt"])
    assert written["conversations"][1] == {"from": "function_call", "value": LOOK}
    empty = {**SKY[0], "tool_calls": []}
    assert write_record(Record(ASK, [[empty]]), FORMATS["sharegpt"])[0]["conversations"][1] == gpt("Blue.")
    function = {"name": "look", "arguments": {"at": "sky", "far": None}}  # as Arrow has it
    row = {
        "prompt": ASK,
        "chosen": [{**CALL, "tool_calls": [{"type": "function", "function": function}]}],
        "rejected": SKY,
    }
    record, recognized = read(row)
    assert (read_message(record.responses[0][0], ""), recognized) == (CALL, "trl_conversational")


CALLS = [{"name": "look", "arguments": {"at": text}} for text in ("sky", "s\u00e9a")]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        # JSON of calls without spaces, or with other escapes than ours
        ({"conversations": [human("Q"), {"from": "function_call", "value": text}], "kto_tag": True}, "sharegpt")
        for text in (json.dumps(CALLS[0], separators=(",", ":")), json.dumps(CALLS[1]), json.dumps(CALLS))
    ]
    + [
        ({"conversations": [human("Q")], "chosen": [gpt("A")], "rejected": [gpt("B")]}, "sharegpt"),
        ({"prompt": ASK, "responses": ["A", "B", "C"]}, "ranked"),
        ({"prompt": ASK, "responses": [SKY, [assistant("B")], [assistant("C")]]}, "ranked"),
        ({"messages": [*ASK, CALL, RESULT, *SKY], "rejected_response": "B"}, "ms_swift"),
        ({"messages": [*ASK, {"role": "tool_call", "content": LOOK}], "label": True}, "ms_swift"),
        ({"conversations": [*ASK, *SKY], "kto_tag": True}, None),
        ({"conversations": [human("Q"), gpt("A")], "label": True}, None),
    ],
)
def test_a_format_is_recognized_however_its_messages_are_written(row, name):
    assert read(row)[1] == name


def test_calls_and_results_of_ms_swift_are_messages_of_their_own():
    two = {**CALL, "content": "I look.", "reasoning": "So.", "tool_calls": CALL["tool_calls"] * 2}
    record = Record([*ASK, two, RESULT], [SKY, [assistant("Green.")]], tools=TOOLS)
    written, changes = write_record(record, FORMATS["ms_swift"])
    call = {"role": "tool_call", "content": LOOK}
    turns = [{**assistant("I look."), "reasoning": "So."}, call, call, {**RESULT, "role": "tool_response"}]
    expected = {"messages": [*ASK, *turns, *SKY], "rejected_response": "Green.", "tools": json.dumps(TOOLS)}
    assert (written, changes) == (expected, [])
    again, name = read(written)
    assert (again.prompt, again.responses, name) == (record.prompt, record.responses, "ms_swift")


def test_a_given_format_decides_which_columns_are_read(tokenizer):
    rows = [{"instruction": "Sum up.", "input": "Text", "question": "Who?", **PAIR}]
    with pytest.raises(InputError, match="the column of prompt may be instruction or input or question"):
        get_custom(rows, "mine", tokenizer)
    for name, prompt in (("alpaca", "Sum up.\n\nText"), ("axolotl_icr", "Text"), ("axolotl_intel", "Who?")):
        data = get_custom(rows, "mine", tokenizer, data_format=name)
        assert list(data) == [prompt]
        assert data.notes[0].startswith(f"mine: format {name}; columns prompt=")
    with pytest.raises(InputError) as error:
        get_custom(rows, "mine", tokenizer, data_format="trl_standard")
    assert str(error.value) == (
        "dataset_sources.mine.format reads the columns prompt, chosen, rejected, completion, label, tools; mine has "
        "instruction, input, question, chosen, rejected, which lack what training on pairs needs: give another "
        "format, or none"
    )
