"""Records of files in every format and layout, and of the Hub."""

import gzip
import json
import os

import datasets
import huggingface_hub
import pandas as pd
import pytest
from support.formats import user
from support.pytests import refused
from support.runs import write_rows

from dpo.data.custom import get_custom
from dpo.data.loading import load_splits
from dpo.data.sources import FIRST_BYTES_OF_SHEETS, identify_source, load_rows
from dpo.errors import InputError
from dpo.models.paths import find_model
from dpo.plugins import DATASETS
from dpo.settings.places import SUFFIXES, Source, check_exists, find_local
from dpo.system.host import go_offline_without_hub

ROWS = [{"chosen": 'a\u2028b, "c"', "rejected": "é"}, {"chosen": "c\td", "rejected": "d\nd\r\nd"}]
TABLE = "question,good,bad\nHow?,So,Or “so”\n"
PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}


def write(path, rows: list) -> None:
    """In the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == "":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif ".csv" in path.name or ".tsv" in path.name:  # pandas compresses if the name says so
        pd.DataFrame(rows).to_csv(path, sep="\t" if ".tsv" in path.name else ",", index=False)
    else:
        pd.DataFrame(rows).to_json(path, orient="records", lines=".jsonl" in path.name, force_ascii=False)


def read(path, split: str = "train") -> list:
    return list(load_rows(Source(str(path)), split))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub is this directory; the calls that load datasets from it."""
    calls = []
    load_dataset = datasets.load_dataset

    def load(path, subset, **options):
        calls.append((path, subset, options))
        return load_dataset(str(tmp_path / path), subset, **options | {"revision": None})

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


@pytest.mark.parametrize("suffix", [*SUFFIXES, ""], ids=lambda suffix: suffix or "save_to_disk")
def test_a_directory_holds_one_file_per_split_in_any_format(tmp_path, suffix):
    write(tmp_path / f"train{suffix}", ROWS)
    write(tmp_path / f"test{suffix}", ROWS[:1])
    assert read(tmp_path) == ROWS
    assert read(tmp_path, "test") == ROWS[:1]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ('\ufeffprompt;chosen\r\na;"b; c"\r\n', {"prompt": "a", "chosen": "b; c"}),
        ('"ask; if; any",good\nHow?,So\n', {"ask; if; any": "How?", "good": "So"}),
        (TABLE.replace("\n", ",,\n") + ",,\n\n", {"question": "How?", "good": "So", "bad": "Or “so”"}),
        (
            'question, good, bad\n"How?", "So", "Or “so”, yes"\n',
            {"question": "How?", "good": "So", "bad": "Or “so”, yes"},
        ),
        # the numbers that pandas writes
        ("," + TABLE.replace("\n", "\n0,", 1), {"question": "How?", "good": "So", "bad": "Or “so”"}),
    ],
)
def test_a_table_may_have_semicolons_empty_rows_and_columns_without_a_name(tmp_path, text, row):
    for name, data in (("a.csv", text.encode()), ("a.CSV.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == [row]


@pytest.mark.parametrize("place", ["saved", "train.parquet", "somebody/labelled"])
def test_class_labels_have_their_names(place, tmp_path, hub):
    """`class_encode_column` numbers classes by their names in order, so desirable is 0."""
    labels = ["desirable", "undesirable", "desirable", None]
    rows = [{"prompt": "a", "completion": f" {i}", "label": label} for i, label in enumerate(labels)]
    dataset = datasets.Dataset.from_list(rows).class_encode_column("label")
    assert dataset["label"][:3] == [0, 1, 0]
    if place == "saved":
        dataset.save_to_disk(tmp_path / place)
    else:
        dataset.to_parquet(tmp_path / (place if place.endswith("parquet") else f"{place}/train.parquet"))
    source = Source(place if "/" in place else str(tmp_path / place))
    assert list(load_rows(source, "train", str(tmp_path / "cache"))) == rows
    assert identify_source(source, str(tmp_path / "cache")) == identify_source(source, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("split", "names", "found"),
    [
        ("train", ["data/train-1-of-2.jsonl", "data/train-0-of-2.jsonl", "README.jsonl"], [1, 0]),  # shards in order
        ("test", ["train.jsonl", "validation.jsonl"], [1]),
        ("test", ["dev.jsonl", "test.csv"], [1]),
        ("test", ["train", "eval"], [1]),  # a saved `DatasetDict`
        ("train", ["train_sft.jsonl", "train_prefs.jsonl", "test_sft.jsonl"], [1]),
    ],
)
def test_a_split_is_found_by_its_name(tmp_path, split, names, found):
    for name in names:
        write(tmp_path / name, [{"name": name}])
    before = sorted(tmp_path.rglob("*"))
    assert read(tmp_path, split) == [{"name": names[i]} for i in found]
    assert sorted(tmp_path.rglob("*")) == before  # no cache and no lock


@pytest.mark.parametrize(
    ("holdout", "n_prompts", "n_test"),
    [
        (None, 3, 1),
        (None, 30, 10),
        (None, 60, 20),
        (None, 300, 30),  # a tenth, at least 20 and at most a third
        (0.1, 2, 1),
        (0.1, 70, 7),
        (0.25, 20, 5),
        (1, 20, 1),
        (12.0, 20, 12),
    ],
)
def test_one_file_is_split_by_prompt_and_together_the_parts_are_everything(tmp_path, holdout, n_prompts, n_test):
    rows = [{"prompt": f"{i}:", "chosen": f" {i} {k}", "rejected": " no"} for k in range(2) for i in range(n_prompts)]
    source = {"mine": str(write_rows(tmp_path / "all.jsonl", rows))}
    train, test = load_splits("mine", None, source, holdout=holdout)

    assert len(test) == n_test
    assert not set(train) & set(test)
    assert set(train) | set(test) == {f"{i}:" for i in range(n_prompts)}
    assert all(len(prompt.examples) == 2 for prompt in (*train.values(), *test.values()))
    assert any(f": {n_test} of {n_prompts} prompts; holdout=NUMBER gives another" in note for note in test.notes)


def test_holdout_that_leaves_nothing_to_train_on_is_refused_and_without_an_effect_it_is_said(tmp_path, run, printed):
    source = {"mine": str(write_rows(tmp_path / "all.jsonl", [PAIR]))}
    with refused(r"mine \(.*all.jsonl\) has 1 different prompt, and the test split takes all: add some"):
        load_splits("mine", None, source)
    with refused("has 1 different prompt, .* or set a smaller holdout"):
        load_splits("mine", None, source, holdout=2)
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", [PAIR])
    run("run", f"datasets={tmp_path}", "holdout=2", "dry_run=true", "chat=never", "batch_size=1")
    assert "holdout=2 has no effect on" in printed()


@pytest.mark.parametrize("place", ["somebody/pairs", "{dir}/somebody/pairs"])
def test_without_a_test_split_some_prompts_are_held_out(place, hub, tmp_path):
    rows = [{**PAIR, "prompt": text} for text in "abcd"]
    write(tmp_path / "somebody" / "pairs" / "train.jsonl", rows)
    sources = {"mine": place.format(dir=tmp_path)}
    train, test = load_splits("mine", None, sources, cache_dir=str(tmp_path / "cache"))
    assert (len(train), len(test)) == (3, 1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_plugin_that_makes_no_rows_of_a_split_is_refused(split, monkeypatch):
    monkeypatch.setitem(DATASETS, "own", lambda wanted: [] if wanted == split else [PAIR])
    with refused(f"dataset 'own' \\(own\\) has no examples in its {split} split: add some"):
        load_splits("own", None, {})


SHEET = "{dir}/train.csv is a spreadsheet or another ZIP archive: save the sheet as CSV"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"mine.csv": "a\n1\n"}, "datasets={dir}/FILE takes both splits from one"),
        ({"train.jsonl": "{}", "train.csv": ""}, "several files of its train split (train.csv, train.jsonl)"),
        ({"notes.txt": "{}"}, "{dir} has no train split"),
        ({"train.jsonl": ""}, "{dir}/train.jsonl holds no records"),
        ({"train.jsonl": '{"a": 1}\n\n{"a": \n'}, "line 3 of {dir}/train.jsonl is not JSON: Expecting value: column 6"),
        ({"train.jsonl": '{"a": 1}\n7\n'}, "record 2 of {dir}/train.jsonl is 7, not an object"),
        ({"train.json": '[{"a": 1}, {]'}, "{dir}/train.json cannot be read: "),
        ({"train.json": '{"a": [{}], "b": [{}]}'}, "several lists of records, a, b"),
        ({"train.tsv": "a, b; c\td\n1\n"}, "has 1 fields, and the first line names 2"),
        ({"train.jsonl.gz": gzip.compress(b"{}" * 99)[:-9]}, "{dir}/train.jsonl.gz cannot be read"),  # cut short
        ({"train.parquet": "not parquet"}, "{dir}/train.parquet cannot be read"),
        ({"train/state.json": "{"}, "{dir}/train cannot be read"),  # a saved dataset, cut off
        ({"train.csv": "a,b\n1,2\n\n1,2,3\n"}, "the record on line 4 of {dir}/train.csv has 3 fields"),
        ({"train.csv": "My table,,\n" + TABLE}, "names 1: put fields with ','"),
        ({"train.csv": 'a,b\n1,"2\n3"\n4,"5\n6,7\n'}, "in the record that begins on line 4:"),
        ({"train.csv": 'a;b\n1;"2" 3\n4;5\n'}, "in the record that begins on line 2: quote"),
        ({"train.csv": "a,b,a\n1,2,3\n"}, "{dir}/train.csv: the first line names a column twice: a,"),
        *(({"train.csv": start + b"\xb5\0"}, SHEET) for start in FIRST_BYTES_OF_SHEETS),
        ({"train.csv": TABLE.encode("cp1252")}, "in position 29: invalid start byte (save it as UTF-8"),
    ],
)
def test_data_that_cannot_be_read_says_which_file_and_why(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        [said, *_] = [row for row in read(tmp_path) if isinstance(row, InputError)]
    except InputError as error:
        said = error
    assert message.format(dir=tmp_path) in str(said)


def test_a_fifo_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")
    end, other = os.pipe()  # as `<(...)` of a shell gives
    for path in (tmp_path, tmp_path / "train.jsonl", f"/dev/fd/{end}"):
        with refused("is not a regular file"):
            read(path)
    os.close(end)
    os.close(other)


@pytest.mark.parametrize("path", ["./pairs", "/data/pairs", "~/pairs", "data/mine/pairs", "mine/pairs.jsonl"])
def test_the_hub_is_never_asked_for_a_path(path, monkeypatch, tmp_path, hub):
    monkeypatch.chdir(tmp_path)
    with refused("does not exist"):
        read(path)
    assert hub == []


def test_a_hub_id_is_loaded_with_its_split_revision_and_cache(hub, tmp_path):
    for split, row in (("train", PAIR), ("test", {**PAIR, "chosen": " d"})):
        write(tmp_path / "somebody" / "pairs" / f"{split}.jsonl", [row])
    source, cache = {"path": "somebody/pairs", "revision": "v2"}, str(tmp_path / "cache")
    _, data = load_splits("mine", None, {"mine": source}, cache_dir=cache)
    assert data["a"].responses == [" d", " c"]
    assert hub[-1] == ("somebody/pairs", None, {"split": "test", "cache_dir": cache, "revision": "v2"})


CONFIGS = "---\nconfigs:\n- {config_name: a, data_files: a/*.jsonl}\n- {config_name: b, data_files: b.jsonl}\n---\n"


@pytest.mark.parametrize("place", ["clone", "somebody/pairs"])
def test_a_subset_is_one_of_the_data_sets_of_a_repository(hub, tmp_path, place):
    write(tmp_path / place / "a" / "1.jsonl", [PAIR])
    write(tmp_path / place / "b.jsonl", ROWS)
    (tmp_path / place / "README.md").write_text(CONFIGS)
    path, cache = place if "/" in place else str(tmp_path / place), str(tmp_path / "cache")
    a, b = (Source.parse("mine", {"path": path, "subset": subset}) for subset in "ab")
    assert [list(load_rows(source, "train", cache)) for source in (a, b)] == [[PAIR], ROWS]
    assert identify_source(a, cache) != identify_source(b, cache)  # the key of a table has the subset
    for source in (Source(path), Source(path, subset="c")):
        with refused("has the subsets 'a', 'b': choose one with dataset_"):
            load_rows(source, "train", cache)
    with refused(r"dataset_sources.mine has the unknown key name: it may have .*subset"):
        Source.parse("mine", {"path": path, "name": "a"})


CHAT = {"messages": [user("Hi")], "tools": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (json.dumps({"version": 1, "authors": ["a"], "data": ROWS}, indent=1), ROWS),
        (json.dumps(PAIR, indent=1), [PAIR]),
        (json.dumps(CHAT), [CHAT]),
        # U+2028 is a line separator to str.splitlines, but an ordinary character in JSON
        ("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS), ROWS),
    ],
)
def test_a_json_file_may_hold_lines_a_record_or_records_in_an_object(tmp_path, text, rows):
    file = tmp_path / "train.json"
    file.write_text(text, encoding="utf-8")
    assert read(file) == rows


SCHEMA = {"properties": {"at": {"type": "string", "default": None}, "default": {"const": None}}}
CALLS = [  # objects without and with a field, and nulls that say something
    {"messages": [{"arguments": arguments}], "tools": [{"parameters": SCHEMA}], "written": '{"at": null}'}
    for arguments in ({"at": "sky"}, {"default": 5})
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_only_what_arrow_adds_to_objects_goes(tmp_path, suffix):
    rows = [*CALLS, {**CALLS[0], "messages": [{"arguments": {"at": None}}]}]
    write(tmp_path / f"train{suffix}", rows)
    [*calls, null] = read(tmp_path)
    assert calls == CALLS
    assert (null == rows[-1]) == (suffix == ".jsonl")


def test_what_datasets_keeps_as_json_is_read_as_it_was_written(tmp_path):
    rows = [{"messages": [{"at": at}, {"role": "tool"}]} for at in (1, "x")]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(tmp_path / "train")
    assert read(tmp_path) == rows


def test_a_hub_datasets_validation_is_its_test_split_if_it_has_no_test(hub, tmp_path):
    for name in ("pairs", "other"):
        write(tmp_path / "somebody" / name / "train.jsonl", ROWS)
    write(tmp_path / "somebody" / "other" / "validation.jsonl", ROWS[1:])
    with refused(r"^dataset somebody/pairs has no test split: Unknown split \"test\"\. Should be one of \['train'\]"):
        load_rows(Source("somebody/pairs"), "test", str(tmp_path / "cache"))
    assert list(load_rows(Source("somebody/other"), "test", str(tmp_path / "cache"))) == ROWS[1:]


def test_a_path_that_is_not_there_is_said_not_to_exist_with_a_similar_name_before_a_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "mine.csv", [PAIR])
    with refused("^data/nine.csv does not exist in .*: did you mean mine.csv"):
        check_exists(find_local("data/nine.csv"))
    (tmp_path / "RUNS" / "mine").mkdir(parents=True)
    (tmp_path / "RUNS" / "mine" / "env.json").touch()
    with refused("^RUNS/min does not exist in .*: did you mean mine"):
        find_model("RUNS/min", hub=True)
    check_exists(find_local("Qwen/Other"))  # it may be on the Hub
    long = "a" * 300  # no directory can have such a name
    check_exists(find_local(f"{long}/pairs"))
    with refused("does not exist"):
        check_exists(find_local(f"/{long}/pairs"))


def test_a_hub_whose_name_is_not_known_is_given_up_at_once(monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: (_ for _ in ()).throw(OSError("no such name")))
    go_offline_without_hub.cache_clear()
    go_offline_without_hub()
    go_offline_without_hub.cache_clear()
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert "is not known here (no such name): only its cache is used" in capsys.readouterr().err


def test_a_csv_without_names_of_columns_is_told_so_and_rows_have_the_numbers_of_the_sheet(tmp_path, tokenizer):
    file = tmp_path / "mine.csv"
    file.write_text("How do I reset my password?,Click it.,No.\nWho are you then?,Me.,Nobody.\n")
    with refused("the first line of .* names columns, and 'How do I reset my password"):
        get_custom(read(file), str(file), tokenizer)
    file.write_text("prompt,chosen,rejected\nWho?,Me.,You.\n,,\n\nWhy?,,No.\n")
    with refused("row 5 of .*: the response to learn is empty: fill in chosen"):
        get_custom(read(file), str(file), tokenizer)
    data = get_custom([PAIR], "mine", tokenizer, trains_on="targets")
    assert "mine: loss=sft learns chosen and does not use rejected; loss=dpo trains on such pairs" in data.notes
