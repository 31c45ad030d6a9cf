"""The ledger holds what the loss saw, whatever becomes of the run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.records import context_in, start
from support.runs import read_json, read_metrics

from dpo.analysis.ledger import PARQUET, read_ledger
from dpo.data.examples import Example
from dpo.reporting.events import Update
from dpo.reporting.ledger import Ledger

DRAWN = {"tie", "prompt", "chosen", "rejected", "others", "score_chosen", "score_rejected", "score_others"}


def rows_of(run_dir: Path) -> list[dict]:
    return pq.read_table(run_dir / PARQUET).to_pylist()


def mean(rows: Sequence[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.fixture
def two_epochs(finished) -> Path:
    """The directory of a run of two epochs, of 7 batches of 6 pairs each."""
    settings = ("ledger=true", "cache_reference_logps=all", "n_examples=84", "eval_every=36", "lr=1e-2")
    return finished(*settings, "datasets=[hh,more]", "batch_size=6", "do_first_eval=false")


def test_the_rows_are_what_the_loss_saw(two_epochs):
    rows = rows_of(two_epochs)
    for row in rows:
        h = (row["policy_chosen"] - row["policy_rejected"]) - (row["reference_chosen"] - row["reference_rejected"])
        assert row["loss"] == pytest.approx(math.log1p(math.exp(-0.1 * h)), abs=1e-4)
        assert row["margin"] == pytest.approx(0.1 * h, abs=1e-4)
    assert max(abs(row["margin"]) for row in rows) > 0.1
    names = {"loss": "loss/{}", "margin": "rewards_{}/margins", "policy_chosen": "logps_{}/chosen"}
    for split in ("train", "eval"):
        lines = read_metrics(two_epochs, split)
        assert {row["update"] for row in rows if row["split"] == split} == {line["updates"] for line in lines}
        for line in lines:
            visited = [row for row in rows if (row["split"], row["update"]) == (split, line["updates"])]
            assert len(visited) == (6 if split == "train" else 4)
            for column, name in names.items():
                assert mean(visited, column) == pytest.approx(line[name.format(split)], rel=1e-12)
    assert {row["dataset"] for row in rows} == {"hh", "more"}


def test_epochs_are_counted_and_pairs_that_an_epoch_drops_are_not_there(two_epochs):
    rows = rows_of(two_epochs)
    trained = [(row["update"], row["epoch"]) for row in rows if row["split"] == "train"]
    assert trained == [(update, (update - 1) // 7) for update in range(1, 15) for _ in range(6)]
    evaluated = {(row["update"], row["epoch"]) for row in rows if row["split"] == "eval"}
    assert evaluated == {(6, 0), (12, 1), (14, 2)}
    for epoch in (0, 1):
        seen = [row["example"] for row in rows if (row["split"], row["epoch"]) == ("train", epoch)]
        assert len(set(seen)) == 42


def test_a_pair_has_the_same_id_in_every_run(two_epochs, finished, rows):
    other = finished("ledger=true", "datasets=[mine]", f"dataset_sources.mine={rows / 'hh'}", "seed=1", "layout=padded")
    here, there = (
        {row["example"]: row["dataset"] for row in rows_of(folder) if row["split"] == "train"}
        for folder in (two_epochs, other)
    )
    assert set(there.values()) == {"mine"}
    assert there.keys() <= {example for example, dataset in here.items() if dataset == "hh"}


def test_under_sft_there_is_nothing_rejected_and_no_reference(finished):
    run_dir = finished("loss=sft", "ledger=true", "max_length=28", "max_prompt_length=12", "n_examples=44")
    rows = rows_of(run_dir)
    assert {row["update"] for row in rows} == set(range(12))  # 44 examples are trained, in 11 updates
    for row in rows:
        absent = {name for name, value in row.items() if value is None}
        nothing = {"policy_rejected", "reference_chosen", "reference_rejected", "rejected_tokens", "margin", "offset"}
        assert absent == nothing | DRAWN
        assert row["loss"] == -row["policy_chosen"] > 0
    of_train = {row["example"]: row["truncated"] for row in rows if row["split"] == "train"}
    report = read_json(run_dir / "preflight.json")["train"]
    assert len(of_train) == report["examples"]
    assert 0 < sum(of_train.values()) == report["truncated_prompts"] < len(of_train)


def test_a_labelled_response_is_chosen_or_rejected(finished):
    by_role = {}
    for row in rows_of(finished("loss=kto", "unpair=true", "ledger=true")):
        [role] = (role for role in ("chosen", "rejected") if row[f"policy_{role}"] is not None)
        absent = {name for name, value in row.items() if value is None}
        other = "rejected" if role == "chosen" else "chosen"
        assert absent == {f"policy_{other}", f"reference_{other}", f"{other}_tokens", "margin", "offset"} | DRAWN
        by_role.setdefault(role, []).append(row[f"{role}_tokens"])
    assert by_role.keys() == {"chosen", "rejected"}


# --- the callback --------------------------------------------------------------------------------------------------

EXAMPLES = [Example((1,), ((2, 3), (4,)), (i, 0), "hh", f"{i}") for i in range(4)]


def ledger_in(run_dir: Path, state: Mapping[str, Any] | None = None) -> Ledger:
    split = SimpleNamespace(columns=())
    data = SimpleNamespace(examples_per_epoch=8, train=split, test=split)
    return start(Ledger(context_in(run_dir, data=data, batch_size=4)), state)


def table_of(split: str, loss: float = 0.5) -> dict[str, torch.Tensor]:
    return {f"logps_{split}/chosen": torch.full((4,), -1.0), f"loss/{split}": torch.full((4,), loss)}


def test_a_skipped_update_has_its_rows_what_is_nan_is_not_null_and_float64_is_kept(tmp_path):
    ledger, third = ledger_in(tmp_path), torch.full((4,), 1 / 3, dtype=torch.float64)
    ledger.on_update(Update(1, 4, EXAMPLES, {"logps_train/chosen": -third, "loss/train": third}, {}))
    assert read_ledger(tmp_path)["loss"].to_pylist() == [1 / 3] * 4
    ledger.on_update(Update(2, 8, EXAMPLES, table_of("train", math.nan), {}))
    ledger.on_end()

    losses = pq.read_table(tmp_path / PARQUET)["loss"]
    assert losses.null_count == 0
    assert all(map(math.isnan, losses.to_pylist()[4:]))
