"""Rows in memory become files that a config can name."""

import copy
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from support.pytests import refused
from support.runs import TINY, list_updates

import train
from dpo.data.loading import load_splits
from dpo.data.sources import load_rows
from dpo.settings.places import Source, store_rows
from trainers import BasicTrainer

PAIRS = [{"prompt": f"Is {i} even?", "chosen": f"It is {i}.", "rejected": "Who knows?"} for i in range(20)]
DATASET = datasets.Dataset.from_list(PAIRS)


def store(tmp_path: Path, **values: object) -> dict:
    return {**store_rows({"local_dirs": [str(tmp_path)], **values})}


def read_prompts(values: dict, name: str, split: str) -> set[str]:
    return set(load_splits(name, None, values["dataset_sources"], splits=[split])[0])


@pytest.mark.parametrize("rows", [PAIRS, DATASET, DATASET.with_format("torch")], ids=["list", "Dataset", "view"])
def test_rows_are_read_as_those_of_a_file_under_a_name_or_without(rows, tmp_path):
    for name, values in {
        "mine": store(tmp_path, dataset_sources={"mine": rows, "hh": None}, datasets=["mine"]),
        "rows": store(tmp_path, datasets=rows),
    }.items():
        values = OmegaConf.to_container(OmegaConf.create(values))
        train_prompts, test_prompts = (read_prompts(values, name, split) for split in ("train", "test"))
        assert train_prompts | test_prompts == {row["prompt"] for row in PAIRS}
        assert (len(train_prompts), len(test_prompts)) == (14, 6)  # a third
        assert values["datasets"] == [name]
    assert len(list(tmp_path.rglob("*.*"))) == 1  # written once


def test_values_and_classes_are_kept_as_they_are(tmp_path):
    chosen = [{"role": "user", "content": None}]
    odd = {"prompt": "é\u2028 ${b}", "chosen": chosen, "weight": np.float32(0.5), "x": None}
    [row, *_] = load_rows(Source(store(tmp_path, datasets=[odd])["dataset_sources"]["rows"]), "train")
    assert row == {**odd, "weight": 0.5}
    labels = DATASET.add_column("label", [i % 2 for i in range(20)])
    labels = labels.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    [row, *_] = load_rows(Source(store(tmp_path, datasets=labels)["dataset_sources"]["rows"]), "train")
    assert row == {**PAIRS[0], "label": "good"}


def test_values_that_json_lacks_are_written_as_text(tmp_path):
    day = datetime(2026, 1, 2)
    odd = {
        "day": day,
        "stamp": pd.Timestamp(day),
        "price": Decimal("1.50"),
        "path": Path("/a"),
        "bytes": b"a",
        "ids": {2, 1},
        "count": np.int64(3),
        "vector": np.array([1.5]),
        "lost": pd.NaT,
        "nested": [{"day": day}],
    }
    [row] = load_rows(Source(store(tmp_path, datasets=[odd])["dataset_sources"]["rows"]), "train")
    said = str(day)
    assert [*row.values()] == [said, said, "1.50", "/a", "a", [1, 2], 3, [1.5], None, [{"day": said}]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (PAIRS, "does not hold the rows that were written: move it away"),  # once they are changed
        ([PAIRS[0], "x"], "dataset_sources.mine: its rows cannot be written: dictionary update sequence"),
        ([{"prompt": object()}], "dataset_sources.mine: its rows cannot be written: <object object at"),
    ],
    ids=["foreign", "text", "object"],
)
def test_what_cannot_be_rows_is_refused_and_nothing_is_overwritten(rows, message, tmp_path):
    path = Path(store(tmp_path, datasets=PAIRS)["dataset_sources"]["rows"])
    path.write_text("{}\n")
    with refused(re.escape(message)):
        store(tmp_path, dataset_sources={"mine": rows})
    assert path.read_text() == "{}\n"
    assert [*path.parent.iterdir()] == [path]


def test_a_run_on_rows_continues_and_refuses_an_unknown_key(tiny_llama, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "exp_name": "test",
        "datasets": PAIRS,
        "local_dirs": [str(tmp_path)],
        "local_run_dir": str(run_dir),
        "loss": {"name": "sft"},
        "model": {"name_or_path": str(TINY)},
        "wandb": {"enabled": False},
        "batch_size": 4,
        "max_length": 64,
        "max_prompt_length": 32,
        "sample_during_eval": False,
        "export": False,
    }
    for n_examples in (4, 8):
        change = {"n_examples": n_examples, "resume": "auto"}
        train.worker_main(0, 1, {**config, **change}, copy.deepcopy(tiny_llama))
    assert list_updates(run_dir) == [4, 8]
    with refused("unknown key learning_rate: here it is lr"):
        BasicTrainer(tiny_llama, {**config, "learning_rate": 1}, 0, tmp_path / "r")
