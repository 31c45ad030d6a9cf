"""Tables of prompts: their content, and when they are used again."""

import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.formats import TOOLS, user
from support.pytests import refused
from support.records import plan_of_data
from support.runs import GOLDEN, TINY, append_text, flip_a_bit, read_json, write_rows
from support.trainers import compose

from dpo.data import loading, preflight, report
from dpo.data.custom import DataOptions
from dpo.data.preflight import make_key, prepare_data
from dpo.data.schema import Prompt
from dpo.data.table import PromptTable, is_whole, write_prompts
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import RunError
from dpo.settings.keys import SECTIONS, ChatPlan, DataPlan
from dpo.settings.plan import resolve
from dpo.system.launching import launch

ODD = [
    Prompt("a", [" b", " c", " b"], [{"chosen": 0, "rejected": 1}, {"chosen": 2, "rejected": 1}], "keep_end", False, 0),
    Prompt('"\\\n\u2028\0é漢🙂', ["", "\r\n"], [{"chosen": 1, "rejected": 0}], "keep_start", True, 1, "mine"),
    Prompt("no pair", [" alone"], [], "keep_start", False, 2),
    Prompt(
        "<user>é",
        [" b"],
        [{"chosen": 0}],
        "keep_start",
        True,
        3,
        **{"messages": [user("é")], "tools": TOOLS, "cuts": [[0, 1]], "apart": False},
    ),
]


@pytest.fixture
def source(tmp_path) -> Path:
    """Twelve training pairs and one test pair in HH's format."""
    for split, n in (("train", 12), ("test", 1)):
        rows = [{side: f"\n\nHuman: {i}?\n\nAssistant: {side}" for side in ("chosen", "rejected")} for i in range(n)]
        write_rows(tmp_path / "source" / f"{split}.jsonl", rows)
    return tmp_path / "source"


def prepare(folder: Path, sources: dict[str, str] | None = None, **values) -> Path:
    """The table of the training data of `source`, or of these datasets, in `folder / FOLDER`."""
    plan = plan_of_data(folder, sources or {"hh": str(folder / "source")}, **values)
    tokenizer = load_tokenizer(str(TINY))
    return prepare_data(plan, tokenizer, scratch=folder / "scratch")


def list_tables(folder: Path) -> set[Path]:
    return {*folder.glob("*/dpo-examples/*")}


def test_prompts_come_back_as_they_were(tmp_path):
    write_prompts(tmp_path / "odd.jsonl", iter(ODD))
    stored = PromptTable(tmp_path / "odd.jsonl")

    assert list(stored) == ODD
    assert (stored[-1], stored[1:], stored.counts.tolist()) == (ODD[3], ODD[1:], [2, 1, 0, 1])


def test_the_same_data_is_read_once_and_says_the_same(source, tmp_path, monkeypatch):
    sources = {"mine": str(source / "train.jsonl")}  # whose columns, and test split, deserve a note
    first = prepare(tmp_path, sources)
    columns, split = read_json(first / "facts.json")["notes"]
    assert "columns chosen=chosen, rejected=rejected" in columns
    assert split.startswith("test split of mine")

    monkeypatch.setattr(loading, "load_rows", lambda *_, **__: pytest.fail("read again"))
    assert prepare(tmp_path, sources) == first
    assert list_tables(tmp_path) == {first}


def test_a_file_that_is_edited_makes_another(source, tmp_path):
    first, file = prepare(tmp_path), source / "test.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace("0?", "1?"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert prepare(tmp_path) != first


SOURCES = {"hh": str(GOLDEN / "words")}
OTHER_VALUES = {  # of the fields of the data and chat sections
    "datasets": ["demo"],
    "dataset_sources": {**SOURCES, "unused": "elsewhere"},
    "holdout": 3,
    "bad_records": "skip",
    "unpair": True,
    "list_pairs": "best_worst",
    "batch_size": 2,
    "eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "microbatch_size": 1,
    "max_length": 63,
    "max_prompt_length": 31,
    "truncation": "drop",
    "n_epochs": 1,
    "n_examples": 2,
    "n_eval_examples": 2,
    "num_workers": 5,
    "layout": "padded",
    "chat": "always",
    "chat_template": "other.jinja",
    "chat_template_args": {"thinks": True},
    "chat_template_date": "2026-01-31",
}


@pytest.mark.parametrize("field", [*DataPlan._fields, *ChatPlan._fields])
def test_a_tables_key_depends_on_every_field_that_is_not_excepted(field, tmp_path, tokenizer):
    assert field in OTHER_VALUES, f"add another value of {field} to OTHER_VALUES"
    plan = plan_of_data(tmp_path, SOURCES)
    other = plan_of_data(tmp_path, SOURCES, **{field: OTHER_VALUES[field]})
    assert (plan.data, plan.chat) != (other.data, other.chat)
    is_same = make_key(plan, tokenizer) == make_key(other, tokenizer)
    assert is_same == (field not in ("datasets", *DataOptions._fields))


def test_a_tables_key_depends_on_what_the_loss_trains_on_and_on_the_length_of_drawn_answers(tmp_path, tokenizer):
    values, keys = {}, []
    for name, value in (
        ("loss", "dpo"),
        ("loss.offset_by_margin", True),
        ("loss", "sft"),
        ("loss", "kto"),
        ("loss", "plackett_luce"),
        ("online.name", "online"),
        ("online.max_new_tokens", 3),
    ):
        values[name] = value
        keys.append(make_key(plan_of_data(tmp_path, SOURCES, **values), tokenizer))
    assert len({*keys}) == len(keys)


class Reading:
    """Stands for a plan, or a section of one, and notes the names of the values that are read."""

    def __init__(self, values: Any, names: set[str], prefix: str = ""):
        self._values, self._names, self._prefix = values, names, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._values, name)
        if name in (*SECTIONS, "loss"):
            return value and Reading(value, self._names, f"{name}.")
        self._names.add(self._prefix + name)
        return value


@pytest.mark.parametrize("online", ["none", "online"])
def test_a_table_is_built_of_nothing_that_its_key_lacks(online, source, tmp_path, tokenizer):
    values = {"truncation": "drop", "online.name": online, "online.max_new_tokens": 3}
    plan = plan_of_data(tmp_path, {"hh": str(source)}, **values)
    names = set()
    preflight.build_table(tmp_path, Reading(plan, names), tokenizer)

    # `DataOptions` has copied the values that it names out of whole sections
    in_key = {"data._asdict", "chat._asdict", "loss.trains_on", "loss.needs_margins", "online.max_new_tokens"}
    # the key has a digest of each source, wherever it is
    assert names - in_key == {"data.datasets", "data.dataset_sources", "run.cache_dir"}


def test_a_file_that_changes_while_it_is_read_makes_no_table(source, tmp_path, monkeypatch):
    load_rows = loading.load_rows

    def edit_and_load(place, split, cache_dir):
        append_text(source / "train.jsonl", "\n")
        return load_rows(place, split, cache_dir)

    monkeypatch.setattr(loading, "load_rows", edit_and_load)
    with refused("the data of hh has changed while it was read: start again"):
        prepare(tmp_path)
    assert list_tables(tmp_path) == set()


def test_data_of_unknown_origin_is_read_each_time_and_its_table_is_not_kept(tmp_path, monkeypatch):
    calls = []

    def load_own(split):
        calls.append(split)
        return [{"prompt": "Why?", "chosen": " Because.", "rejected": " So."}]

    monkeypatch.setitem(loading.DATASETS, "own", load_own)
    first, second = (prepare(tmp_path, {"own": None}) for _ in range(2))
    assert {*calls} == {"train", "test"}
    assert {first.parent, second.parent} == {tmp_path / "scratch"}


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_folder(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("mine")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train.jsonl", flip_a_bit),
        ("train.jsonl", Path.unlink),
        ("train.jsonl", make_fifo),
        ("facts.json", lambda file: file.write_text("[]")),
        ("facts.json", replace_folder),
    ],
)
def test_a_damaged_table_is_left_and_another_is_built(source, tmp_path, name, damage):
    place = prepare(tmp_path)
    expected = list(PromptTable(place / "train.jsonl"))
    damage(place / name)
    assert not is_whole(place)

    another = prepare(tmp_path)
    assert list(PromptTable(another / "train.jsonl")) == expected
    assert list_tables(tmp_path) == {place, another}
    assert prepare(tmp_path) == another


def build_slowly(folder: Path, started) -> None:
    """Build a table, for seconds once its first split is written."""

    def build(place: Path, *_):
        write_prompts(place / "train.jsonl", ODD)
        started.set()
        time.sleep(2)
        write_prompts(place / "test.jsonl", ODD)
        return {}

    preflight.build_table = build
    assert is_whole(prepare(folder, SOURCES))


@pytest.mark.slow
def test_a_killed_builder_leaves_no_table_and_two_that_build_at_once_leave_whole_ones(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    killed, *builders = [context.Process(target=build_slowly, args=(tmp_path, started)) for _ in range(3)]
    killed.start()
    assert started.wait(120)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    [left] = tmp_path.glob("*/dpo-examples/.*")
    assert left.name.startswith(".dpo-table-")

    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert [builder.exitcode for builder in builders] == [0, 0]
    tables = list_tables(tmp_path) - {left}
    assert [is_whole(table) for table in tables] in ([True], [True, True])


def test_a_full_disk_is_one_sentence(source, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError, match=rf"cannot be written to {tmp_path}/.*dpo-examples .*File too large.*free"):
            prepare(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_tables(tmp_path) == set()


def load_and_weigh(rank, world_size, config, folder):
    def own_memory() -> int:
        """Bytes that neither another process nor a file has."""
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))

    calls, load_rows = [], loading.load_rows
    loading.load_rows = lambda *arguments: calls.append(arguments) or load_rows(*arguments)
    report.SAMPLE_SIZE = 10  # or it would mostly tokenize
    load_tokenizer(str(TINY))("a")
    before = own_memory()
    data = preflight.load_data(resolve(config), silent=True)
    first = next(iter(data.train))
    found = [len(calls), own_memory() - before, data.identity, data.updates, first.text, first.texts(0)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_processes_load_once_and_hold_no_texts_of_their_own(tmp_path):
    n_rows, dialogue = 2000, "\n\nHuman: {}\n\nAssistant:{}"
    texts = {key: f" {key} " + "x" * 10_000 for key in ("chosen", "rejected")}  # 40 MB in all
    for split, n in (("train", n_rows), ("test", 4)):
        rows = [{key: dialogue.format(i, text) for key, text in texts.items()} for i in range(n)]
        write_rows(tmp_path / "rows" / f"{split}.jsonl", rows)
    settings = ("trainer=FSDPTrainer", "batch_size=4", "max_length=64", "max_prompt_length=32", "n_epochs=1")
    config = compose(tmp_path, "run", f"dataset_sources.hh={tmp_path / 'rows'}", *settings, "n_examples=null")
    launch(load_and_weigh, 2, config, tmp_path, process_group=True)

    (loads_0, bytes_0, *found_0), (loads_1, bytes_1, *found_1) = (
        read_json(tmp_path / f"{rank}.json") for rank in (0, 1)
    )
    assert (loads_0, loads_1) == (2, 0)  # two splits
    assert max(bytes_0, bytes_1) < n_rows * 20_000
    assert found_0 == found_1
    assert found_0[1:] == [500, dialogue.format(0, ""), texts]
