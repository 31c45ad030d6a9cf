"""`python -m scripts.convert` writes data in another format."""

from __future__ import annotations

import gzip
import json
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.formats import ASK, CALL, PAIR, ROWS, SKY, TURNS, assistant, user
from support.runs import write_rows

from dpo.data.sources import load_rows
from dpo.settings.places import SUFFIXES, Source
from scripts.convert import main


@pytest.fixture
def convert(tmp_path, capsys):
    """A function that converts a file, and returns status, output and error."""

    def run(source: Path | str, out: str, to: str, *options: str) -> tuple[int, str, str]:
        status = main([str(source), str(tmp_path / out), "--to", to, *options])
        return status, *capsys.readouterr()

    return run


def read(file: Path) -> list:
    return list(load_rows(Source(str(file)), "train"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_is_written_and_read_back(suffix, convert, tmp_path):
    rows = [{**ROWS["alpaca"][0], "note": 'a "b",\n\u4e2d'}, {**ROWS["alpaca"][1], "note": "\t"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)

    assert convert(source, f"out{suffix}", "axolotl_argilla")[0] == 0

    argilla = {"instruction": "Who is right?", "chosen_response": "A is right.", "rejected_response": "B is right."}
    [joined, plain] = read(tmp_path / f"out{suffix}")
    assert joined == {**argilla, "instruction": "Sum it up.\n\nA long text.", "note": 'a "b",\n\u4e2d'}
    assert plain == {**argilla, "note": "\t"}


def test_there_and_back_keeps_every_column(convert, tmp_path):
    rows = [{"id": i, "tags": ["x", "y"], "of": {"y": i}, **ROWS["sharegpt"][0]} for i in range(3)]
    source = write_rows(tmp_path / "rows.jsonl", rows)

    status, said, warned = convert(source, "there.jsonl.gz", "ms_swift")
    assert (status, warned) == (0, "")
    assert said == f"3 records of {source} (sharegpt) written to {tmp_path}/there.jsonl.gz (ms_swift)\n"
    with gzip.open(tmp_path / "there.jsonl.gz", "rt") as file:
        assert json.loads(file.readline())["rejected_response"] == "B."
    assert convert(tmp_path / "there.jsonl.gz", "back.parquet", "sharegpt")[0] == 0
    assert read(tmp_path / "back.parquet") == rows


def test_what_cannot_be_held_is_named_in_one_warning(convert, tmp_path):
    keyed = [{**ASK[0], "name": "Eve"}]
    rows = [
        {"prompt": TURNS, "chosen": SKY, "rejected": SKY, "instruction": "mine"},
        {"prompt": keyed, "chosen": SKY, "rejected": SKY, "instruction": "mine"},
        {"prompt": ASK, "chosen": SKY, "rejected": SKY},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)

    status, said, warned = convert(source, "out.csv", "axolotl_argilla")

    assert status == 0
    assert said.startswith("2 records of ")
    assert warned == (
        f"warning: {tmp_path}/out.csv does not hold all of {source}: records are left out because of several turns "
        f"before the response (1 record, first record 1 of {source} (line 1)); chat messages are now text (2 records, "
        f"first record 2 of {source} (line 2)); the key name of messages is left out (1 record, first record 2 of "
        f"{source} (line 2)); the column instruction is left out (1 record, first record 2 of {source} (line 2))\n"
    )
    answers = {"chosen_response": "Blue.", "rejected_response": "Blue."}
    assert read(tmp_path / "out.csv") == [{"instruction": "Which colour?", **answers}] * 2


def test_values_that_a_file_cannot_hold_are_named(convert, tmp_path):
    source = tmp_path / "rows.parquet"
    row = {"prompt": "Q?", **PAIR, "day": date(2026, 1, 2), "tags": ["a"]}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), source)

    _, _, warned = convert(source, "out.jsonl", "axolotl_intel")
    assert "the column day is now text (1 record, first " in warned
    assert read(tmp_path / "out.jsonl") == [{"question": "Q?", **PAIR, "day": "2026-01-02", "tags": ["a"]}]
    _, _, warned = convert(source, "out.tsv", "axolotl_intel")
    assert "the column tags is left out (1 record, first " in warned
    source = write_rows(tmp_path / "mixed.jsonl", [{"prompt": "Q?", **PAIR, "tags": ["a", 1]}])
    status, _, error = convert(source, "out.parquet", "axolotl_intel")
    assert status == 2
    assert "a Parquet file cannot hold these columns (" in error


RANKED = {"prompt": "Q one:", "responses": [" a", " b"]}
PAIRED = {"prompt": "Q one:", "chosen": " b", "rejected": " a"}
ALPACA = {"instruction": "Q one:", "rejected": " a"}


@pytest.mark.parametrize(
    ("row", "to", "columns", "written", "warned"),
    [
        (
            {"prompt": "Q one:", "cands": [" a", " b"], "rating": [1, 2]},
            "ranked",
            "{prompt: prompt, responses: cands, scores: rating}",
            {**RANKED, "scores": [1, 2]},
            "",
        ),
        (
            {**PAIRED, "imp": 2, "gap": 3},
            "openrlhf",
            "{weight: imp, margin: gap}",
            {**PAIRED, "weight": 2, "margin": 3},
            "",
        ),
        (
            {**PAIRED, "scores": [1, 2]},
            "ranked",
            None,
            {**RANKED, "responses": [" b", " a"]},
            "the column scores is left out",
        ),
        ({**RANKED, "scores": [1, 2]}, "openrlhf", None, PAIRED, "the column scores is left out"),
        ({**RANKED, "responses": [" b", " a"]}, "openrlhf", None, PAIRED, ""),
        (
            {"prompt": ASK, "responses": [[{**SKY[0], "name": "Eve"}], SKY]},
            "axolotl_intel",
            None,
            {"question": "Which colour?", "chosen": "Blue.", "rejected": "Blue."},
            "the key name of messages is left out",
        ),
        (
            {"messages": [*ASK, *SKY], "rejected_messages": [*ASK, {**SKY[0], "reasoning_content": "hm"}]},
            "ms_swift",
            None,
            {"messages": [*ASK, *SKY], "rejected_response": "Blue."},
            "the key reasoning_content of messages is left out",
        ),
        (
            {"prompt": TURNS, "chosen": SKY, "rejected": SKY, "system": "Be short."},
            "trl_conversational",
            None,
            {"prompt": TURNS, "chosen": SKY, "rejected": SKY},
            "the column system is left out",
        ),
        ({**PAIRED, "kto_tag": False}, "alpaca", None, {**ALPACA, "chosen": " b"}, "the column kto_tag is left out"),
        # pandas writes such a column for its index
        ({**PAIRED, "": "0"}, "trl_standard", None, {**PAIRED, "": "0"}, ""),
        (
            ROWS["ultrafeedback"][0],  # its messages repeat chosen
            "ultrafeedback",
            None,
            {key: value for key, value in ROWS["ultrafeedback"][0].items() if key != "messages"},
            "",
        ),
    ],
)  # fmt: skip
def test_numbers_lists_and_keys_are_kept_or_named(row, to, columns, written, warned, convert, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [row])
    status, _, error = convert(source, "out.jsonl", to, *(["--columns", columns] if columns else []))
    assert status == 0, error
    assert read(tmp_path / "out.jsonl") == [written]
    assert (warned in error) if warned else not error


@pytest.mark.parametrize(("middle", "as_json"), [("trl_implicit", False), ("sharegpt", True)])
def test_nulls_of_json_are_kept(middle, as_json, convert, tmp_path):
    function = {"name": "look", "arguments": {"at": None, "n": 1}}
    chosen = [{**CALL, "tool_calls": [{"type": "function", "function": function}]}]
    tools = [{"name": "look", "parameters": {"n": {"default": None, "type": "integer"}}}]
    row = {"prompt": ASK, "chosen": chosen, "rejected": SKY, "tools": json.dumps(tools) if as_json else tools}
    source = write_rows(tmp_path / "rows.jsonl", [row])
    assert convert(source, "there.jsonl", middle)[::2] == (0, "")
    assert convert(tmp_path / "there.jsonl", "back.jsonl", "trl_conversational")[::2] == (0, "")
    assert read(tmp_path / "back.jsonl") == [row]


def test_nulls_that_parquet_adds_are_dropped(convert, tmp_path):
    rows = [{"prompt": ASK, "chosen": [CALL], "rejected": SKY}, {"prompt": ASK, "chosen": SKY, "rejected": SKY}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert convert(source, "there.parquet", "trl_implicit")[::2] == (0, "")
    assert convert(tmp_path / "there.parquet", "back.jsonl", "trl_conversational")[::2] == (0, "")
    assert read(tmp_path / "back.jsonl") == rows


@pytest.mark.parametrize(
    "values",
    [
        [{"at": None, "n": 1}, {"at": "sky"}],
        [{}, {}],  # Arrow has no objects without fields in a file
        [{"n": 1}, {"n": 1.5}],
        [{"n": 1}, {"n": "one"}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    ],
)
def test_parquet_keeps_tools_and_arguments(values, convert, tmp_path):
    def make_row(value):
        calls = [{"type": "function", "function": {"name": "look", "arguments": value}}]
        tools = [{"type": "function", "function": {"name": "look", "parameters": value}}]
        return {"prompt": ASK, "chosen": [{**CALL, "tool_calls": calls}], "rejected": SKY, "tools": tools}

    source = write_rows(tmp_path / "rows.jsonl", map(make_row, values))
    assert convert(source, "there.parquet", "trl_conversational")[::2] == (0, "")
    assert convert(tmp_path / "there.parquet", "back.jsonl", "trl_conversational")[::2] == (0, "")
    for value, row in zip(values, read(tmp_path / "back.jsonl"), strict=True):
        [tool] = json.loads(row["tools"])
        function = row["chosen"][0]["tool_calls"][0]["function"]
        assert [json.dumps(tool["function"]["parameters"]), function["arguments"]] == [json.dumps(value)] * 2


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_lone_carriage_return_is_read_back_from_a_table(suffix, convert, tmp_path):
    row = {"prompt": "Q\rone:", "chosen": " a\r", "rejected": " b\r\nc"}
    assert convert(write_rows(tmp_path / "rows.jsonl", [row]), f"out{suffix}", "openrlhf")[0] == 0
    assert read(tmp_path / f"out{suffix}") == [row]


@pytest.mark.parametrize(
    ("rows", "out", "options", "message"),
    [
        (ROWS["hh"], "rows.jsonl", (), "{dir}/rows.jsonl exists: give another file, or remove it"),
        (ROWS["hh"], "no/out.jsonl", (), "{dir}/no/out.jsonl: there is no directory {dir}/no"),
        (ROWS["hh"], "out.txt", (), "{dir}/out.txt must end in one of .jsonl, .jsonl.gz, "),
        (ROWS["hh"], "out.csv", (), "a .csv file cannot hold chat messages or turns (record 1 of {dir}/rows.jsonl "),
        (ROWS["hh"], "out.jsonl", ("--format", "trl"), "--format=trl is not one of hh, trl_standard, "),
        (ROWS["hh"], "out.jsonl", ("--columns", "{best: a}"), "--columns={{'best': 'a'}} must map some of prompt, "),
        (ROWS["hh"], "out.jsonl", ("--split=test",), "{dir}/rows.jsonl has no splits: leave --split=test out"),
        ([{**RANKED, "scores": [1]}], "out.jsonl", (), "must have a finite number for each of the 2 in responses"),
        ([{**PAIRED, "id": 2**70}], "out.parquet", (), "a Parquet file cannot hold these columns ("),
        ([{**PAIRED, "id": "\ud83d"}], "out.csv", (), "field 'id' has an unpaired UTF-16 surrogate"),
        ([{**PAIRED, "id": [["\ud83d"]]}], "out.parquet", (), "field 'id' has an unpaired UTF-16 surrogate"),
        ([{**PAIRED, "\ud83d": 1}], "out.csv", (), "the name of a field has an unpaired UTF-16 surrogate"),
        ([PAIRED], "out.jsonl", ("--format=alpaca",), "prompt, chosen, rejected, which lack what converting needs: "),
        ([{"a": 1}], "out.jsonl", (), "name them with '--columns={{messages: COLUMN}}', or add them"),
        ([{"prompt": "a", **PAIR, "chosen": 3}], "out.jsonl", (), "(line 1): chosen must be text or a list of "),
        ([{"prompt": [{"role": "bot", "content": "3"}], "chosen": SKY, "rejected": SKY}], "out.jsonl", (),
         "sharegpt holds no record of {dir}/rows.jsonl: records are left out because of messages of bot (1 record, "),
    ],
)  # fmt: skip
def test_bad_input_is_refused_and_nothing_is_written(rows, out, options, message, convert, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", rows)

    status, _, error = convert(source, out, "sharegpt", *options)

    assert status == 2
    assert message.format(dir=tmp_path) in error
    assert list(tmp_path.iterdir()) == [source]


def test_an_empty_source_is_refused_without_keys_of_a_config(convert, capsys):
    with pytest.raises(SystemExit):
        convert("", "out.jsonl", "hh")
    assert "IN is empty: give a file, a directory or a Hub id" in capsys.readouterr().err


def test_columns_and_splits_may_be_given(convert, tmp_path):
    for split in ("train", "test"):
        write_rows(tmp_path / "data" / f"{split}.jsonl", [{"ask": f"{split}?", "yes": "A is.", "no": "B is."}])
    columns = "{prompt: ask, chosen: yes, rejected: no}"

    status, said, _ = convert(tmp_path / "data", "o.json", "trl_conversational", "--split=test", "--columns", columns)

    assert (status, said.split(" of ")[0]) == (0, "1 record")
    answers = {"chosen": [assistant("A is.")], "rejected": [assistant("B is.")]}
    assert read(tmp_path / "o.json") == [{"prompt": [user("test?")], **answers}]
