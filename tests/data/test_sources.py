"""Records of files in every format and layout, and of the Hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re

import datasets
import pytest
from support.runs import write_rows

from dpo.data.sources import FIRST_BYTES_OF_SHEETS, identify_source, load_rows
from dpo.errors import InputError
from dpo.settings.places import SUFFIXES, Source
from preference_datasets import get_dataset

ROWS = [{"chosen": 'a\u2028b, "c"', "rejected": "é"}, {"chosen": "c\td", "rejected": "d\nd\r\nd"}]


def read_all(path) -> None:
    """A record that cannot be parsed is an error in its place."""
    for row in load_rows(Source(str(path)), "train"):
        if isinstance(row, InputError):
            raise row


def write(path, rows: list) -> None:
    """In the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path)
        return
    if path.suffix == "":
        datasets.Dataset.from_list(rows).save_to_disk(path)
        return
    if ".csv" in path.name or ".tsv" in path.name:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, rows[0], dialect="excel" if ".csv" in path.name else "excel-tab")
        writer.writeheader()
        writer.writerows(rows)
        lines = table.getvalue()
    text = (
        json.dumps(rows, indent=1, ensure_ascii=False) if ".json" in path.name and ".jsonl" not in path.name else lines
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("suffix", [*SUFFIXES, ""], ids=lambda suffix: suffix or "save_to_disk")
def test_a_directory_holds_one_file_per_split_in_any_format(tmp_path, suffix):
    write(tmp_path / f"train{suffix}", ROWS)
    write(tmp_path / f"test{suffix}", ROWS[:1])
    assert list(load_rows(Source(str(tmp_path)), "train")) == ROWS
    assert list(load_rows(Source(str(tmp_path)), "test")) == ROWS[:1]
    assert list(load_rows(Source(str(tmp_path / f"train{suffix}")), "test")) == ROWS  # one file is both splits


@pytest.mark.parametrize("place", ["saved", "train.parquet", "hub"])
def test_class_labels_have_their_names(place, tmp_path, monkeypatch):
    """`class_encode_column` numbers classes by their names in order, so desirable is 0."""
    labels = ["desirable", "undesirable", "desirable", None]
    rows = [{"prompt": "a", "completion": f" {i}", "label": label} for i, label in enumerate(labels)]
    dataset = datasets.Dataset.from_list(rows).class_encode_column("label")
    nested = datasets.Features({**dataset.features, "more": datasets.List({"kind": dataset.features["label"]})})
    dataset = dataset.map(lambda row: {"more": [{"kind": row["label"]}]}, features=nested)
    assert dataset["label"][:3] == [0, 1, 0]
    source = Source(str(tmp_path / place))
    if place == "saved":
        dataset.save_to_disk(tmp_path / place)
    elif place == "hub":
        dataset.to_parquet(tmp_path / "somebody" / "labelled" / "train.parquet")
        load_dataset, source = datasets.load_dataset, Source("somebody/labelled")
        monkeypatch.setattr(
            datasets, "load_dataset", lambda path, **options: load_dataset(str(tmp_path / path), **options)
        )
    else:
        dataset.to_parquet(tmp_path / place)
    expected = [{**row, "more": [{"kind": row["label"]}]} for row in rows]
    assert list(load_rows(source, "train", str(tmp_path / "cache"))) == expected
    assert identify_source(source, str(tmp_path / "cache")) == identify_source(source, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("split", "names", "found"),
    [
        (
            "train",
            ["data/train-1-of-2.jsonl", "data/train-0-of-2.jsonl", "README.jsonl"],
            ["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl"],
        ),
        ("test", ["train.jsonl", "validation.jsonl"], ["validation.jsonl"]),
        ("test", ["dev.jsonl", "test.csv"], ["test.csv"]),
        ("test", ["train", "eval"], ["eval"]),  # a saved `DatasetDict`
        ("train", ["train_sft.jsonl", "test_sft.jsonl"], ["train_sft.jsonl"]),
        ("train", ["train_sft", "train_prefs"], ["train_prefs"]),
    ],
)
def test_a_split_is_found_by_its_name_and_its_shards_are_read_in_order(tmp_path, split, names, found):
    for name in names:
        write(tmp_path / name, [{"name": name}])
    before = sorted(tmp_path.rglob("*"))
    assert list(load_rows(Source(str(tmp_path)), split)) == [{"name": name} for name in found]
    assert sorted(tmp_path.rglob("*")) == before  # no cache and no lock


TABLE = "question,good,bad\nHow?,So,Or “so”\n"


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("prompt\tchosen\na;, b\tc\n", {"prompt": "a;, b", "chosen": "c"}),
        ('\ufeffprompt;chosen\r\na;"b; c"\r\n', {"prompt": "a", "chosen": "b; c"}),
        ('"ask; if; any",good\nHow?,So\n', {"ask; if; any": "How?", "good": "So"}),
        *(
            (text, {"question": "How?", "good": "So", "bad": "Or “so”"})
            for text in (
                TABLE.replace("\n", "\n,,\n"),
                TABLE.replace("\n", ",,\n"),
                ",," + TABLE.replace("\n", "\n0,,", 1),  # the numbers that pandas writes, and another unnamed column
            )
        ),
    ],
)
def test_a_table_may_have_other_separators_empty_rows_and_columns_without_a_name(tmp_path, text, row):
    for name, data in (("a.csv", text.encode()), ("a.CSV.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert list(load_rows(Source(str(tmp_path / name)), "train")) == [row]


@pytest.mark.parametrize(
    ("content", "records"),
    [
        ({"data": ROWS}, ROWS),
        ({"version": "1.1", "tags": ["a"], "data": ROWS}, ROWS),
        # one record, as one line of JSON: chats are its fields, and not lists of records
        ({"messages": [{"role": "user", "content": "a"}]}, [{"messages": [{"role": "user", "content": "a"}]}]),
        ({"prompt": "a", "tools": [{"name": "look"}]}, [{"prompt": "a", "tools": [{"name": "look"}]}]),
    ],
)
def test_an_object_may_hold_the_list_of_records(tmp_path, content, records):
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
        assert list(load_rows(Source(str(tmp_path / "a.json")), "train")) == records


def test_a_json_file_may_hold_lines_and_only_newlines_end_them(tmp_path):
    # U+2028 is a line separator to str.splitlines, but an ordinary character in JSON
    file = tmp_path / "train.json"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS), encoding="utf-8")
    assert list(load_rows(Source(str(file)), "train")) == ROWS


def test_one_file_is_split_by_prompt_and_together_the_parts_are_everything(tmp_path):
    # 20 prompts of two rows each: a tenth, 2 prompts, is test
    rows = [{"prompt": f"{i % 20}:", "chosen": f" {i} yes", "rejected": f" {i} no"} for i in range(40)]
    path = write_rows(tmp_path / "all.jsonl", rows)
    train, test = (get_dataset("mine", split, dataset_sources={"mine": str(path)}) for split in ("train", "test"))

    assert len(test) == 2
    assert not set(train) & set(test)
    assert set(train) | set(test) == {f"{i}:" for i in range(20)}
    assert all(len(entry["pairs"]) == 2 for entry in (*train.values(), *test.values()))
    said = f"test split of mine: a tenth of the prompts of {path}, at least one: 2 of 20"
    assert test.notes.count(said) == 1


def test_a_file_with_one_prompt_has_nothing_left_to_train_on(tmp_path):
    source = {"mine": str(write_rows(tmp_path / "all.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}]))}
    assert len(get_dataset("mine", "test", dataset_sources=source)) == 1
    with pytest.raises(InputError, match=r"mine \(.*all.jsonl\) has no examples in its train split; of one file"):
        get_dataset("mine", "train", dataset_sources=source)


@pytest.mark.parametrize(
    ("files", "messages"),
    [
        ({"mine.csv": "a\n1\n"}, ["it holds mine.csv. datasets={dir}/FILE takes both splits from one file"]),
        (
            {"train.jsonl": "{}", "train.parquet": ""},
            ["several files of its train split (train.jsonl, train.parquet)", "keep one of them"],
        ),
        (
            {"train.jsonl": '{"a": 1}\n\n{"a": \n'},
            ["line 3 of {dir}/train.jsonl is not JSON: Expecting value at column 6"],
        ),
        ({"train.json": '[{"a": 1}, {]'}, ["{dir}/train.json cannot be read", "line 1 column"]),
        ({"train.jsonl": '{"a": 1}\n7\n'}, ["record 2 of {dir}/train.jsonl (line 2) is int, not an object"]),
        ({"train.jsonl": ""}, ["{dir}/train.jsonl holds no records"]),
        ({"train.jsonl.gz": gzip.compress(b"{}" * 99)[:-9]}, ["{dir}/train.jsonl.gz cannot be read"]),  # cut short
        ({"train.parquet": "not parquet"}, ["{dir}/train.parquet cannot be read"]),
        ({"train/state.json": "{"}, ["{dir}/train cannot be read"]),  # a saved dataset, cut off
        (
            {"train.json": '{"a": [{"b": 1}], "c": [{"b": 1}]}'},
            ["{dir}/train.json holds 2 lists of records"],
        ),
        (
            {"train.csv": "a,b\n1,2\n\n1,2,3\n"},
            ["record 2 of {dir}/train.csv (line 4) has 3 fields", "names 2", "commas"],
        ),
        ({"train.tsv": "a\tb\n1\n"}, ["record 1 of {dir}/train.tsv (line 2) has 1 fields", "names 2", "tabs"]),
        (
            {"train.csv": 'a,b\n1,"2\n3"\n4,"5\n6,7\n'},
            ["{dir}/train.csv cannot be read", "unexpected end of data, in the record that begins on line 4:"],
        ),
        (
            {"train.tsv": 'a\tb\n1\t"2" 3\n4\t5\n'},
            ["expected after '\"', in the record that begins on line 2: quote a field that contains"],
        ),
        ({"train.csv": "a,b,a\n1,2,3\n"}, ["{dir}/train.csv: the first line names a column twice: a, b, a"]),
        *(
            (
                {"train.csv": start + b"\xb5\0"},
                ["train.csv is a spreadsheet or another ZIP archive: save the sheet as CSV"],
            )
            for start in FIRST_BYTES_OF_SHEETS
        ),
    ],
)
def test_a_directory_that_cannot_be_read_says_which_file_and_why(tmp_path, files, messages):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        read_all(tmp_path)
    for message in messages:
        assert message.format(dir=tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TABLE.encode("utf-16"), "is not UTF-8 (byte 0xff): save it as UTF-8 (in a spreadsheet as CSV UTF-8), or"),
        (TABLE.encode("cp1252"), "is not UTF-8 (byte 0x93): save it as UTF-8"),
        (b"My questions,,\n" + TABLE.encode(), "names 1: put fields with commas or newlines in quotes, and let the f"),
        (TABLE.replace("\n", ",,\n").replace("Or", "Or,").encode(), "has 6 fields, and the first line names 3: put"),
        (TABLE.replace("good", "bad").encode(), "the first line names a column twice: question, bad, bad"),
    ],
)
def test_a_table_that_a_spreadsheet_wrote_otherwise_is_refused_with_the_fix(tmp_path, data, message):
    for name, content in (("a.csv", data), ("a.csv.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=re.escape(message)):
            read_all(tmp_path / name)


def test_a_fifo_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")
    for path in (tmp_path, tmp_path / "train.jsonl"):
        with pytest.raises(InputError, match=r"train\.jsonl is not a regular file"):
            load_rows(Source(str(path)), "train")
    end, other = os.pipe()  # as `<(...)` of a shell gives
    with pytest.raises(InputError, match=f"/dev/fd/{end} is not a regular file"):
        load_rows(Source(f"/dev/fd/{end}"), "train")
    os.close(end)
    os.close(other)


def test_a_path_that_is_not_there_or_not_data_is_an_error(tmp_path):
    with pytest.raises(InputError, match="missing does not exist"):
        load_rows(Source(str(tmp_path / "missing")), "train")
    (tmp_path / "notes.txt").write_text("{}")
    with pytest.raises(InputError, match=r"notes\.txt is not one of \*\.jsonl"):
        load_rows(Source(str(tmp_path / "notes.txt")), "train")


@pytest.mark.parametrize("path", ["./pairs", "/data/pairs", "~/pairs", "data/mine/pairs", "mine/pairs.jsonl"])
def test_the_hub_is_never_asked_for_a_path(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match="does not exist"):
        load_rows(Source(path), "train")


def test_a_hub_id_is_loaded_with_its_split_revision_and_cache(monkeypatch):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        return datasets.Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = {"path": "somebody/pairs", "revision": "v2"}
    data = get_dataset("mine", "test", cache_dir="/cache", dataset_sources={"mine": source})
    assert data["a"]["responses"] == [" b", " c"]
    assert calls == [("somebody/pairs", {"split": "test", "cache_dir": "/cache", "revision": "v2"})]


def test_a_hub_datasets_validation_is_its_test_split_if_it_has_no_test(monkeypatch, tmp_path):
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(  # a directory, in place of the Hub: its splits are found as the Hub's are
        datasets, "load_dataset", lambda path, **options: load_dataset(str(tmp_path / path), **options)
    )
    write(tmp_path / "somebody" / "pairs" / "train.jsonl", ROWS)
    with pytest.raises(InputError, match=r"somebody/pairs \(split test\).*Unknown split.*train"):
        load_rows(Source("somebody/pairs"), "test", str(tmp_path / "cache"))
    write(tmp_path / "somebody" / "other" / "train.jsonl", ROWS)
    write(tmp_path / "somebody" / "other" / "validation.jsonl", ROWS[1:])
    assert list(load_rows(Source("somebody/other"), "test", str(tmp_path / "cache"))) == ROWS[1:]


def test_no_network_suggests_a_local_directory(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'Anthropic/hh-rlhf' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"Anthropic/hh-rlhf \(split train\).*Couldn't reach.*point dataset_sources"):
        get_dataset("hh", "train", silent=True)
