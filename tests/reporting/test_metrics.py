"""Metrics are means over examples, written where nothing is lost."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import make_weights
from support.records import context_in, start
from support.runs import read_json, read_rows

from dpo.reporting.events import Callback, Callbacks, Evaluation, Sample, Update
from dpo.reporting.files import FileLogger
from dpo.training.objective import MicrobatchMetrics, Objective, Reduced


def reduce(metrics: MicrobatchMetrics, n: int, mesh: SimpleNamespace, **scalars: torch.Tensor) -> Reduced:
    objective = SimpleNamespace(mesh=mesh, loss=SimpleNamespace(reference=False))
    return Objective.reduce(objective, metrics, n, (), **scalars)


def test_metrics_are_means_over_the_examples_of_all_microbatches_and_processes_in_one_collective():
    first = {"loss": torch.tensor([1.0, 2.0, 3.0]), "accuracy": torch.tensor([1.0, 0.0, 1.0])}
    ours = [
        (torch.tensor([4, 0, 2]), first),
        (torch.tensor([3]), {"loss": torch.tensor([10.0]), "accuracy": torch.tensor([0.0])}),  # a smaller microbatch
    ]
    added = []

    def add(values: torch.Tensor) -> torch.Tensor:
        added.append(1)
        values[2:4] += torch.tensor([4.0, 1.0])  # another process has example 1
        return values

    reduced = reduce(ours, 5, SimpleNamespace(add=add, counts=True), grad_norm=torch.tensor(7.0))
    assert reduced.examples["loss"].tolist() == [2, 4, 3, 10, 1]  # in the order of the examples
    assert reduced.examples["accuracy"].tolist() == [0, 1, 1, 0, 1]
    assert reduced.means() == {"loss": (2 + 4 + 3 + 10 + 1) / 5, "accuracy": 3 / 5}
    assert reduced.scalars == {"grad_norm": 7.0}
    assert added == [1]


def test_of_processes_that_see_the_same_rows_one_counts_and_the_scalars_of_all_are_summed():
    part = [(torch.tensor([0]), {"loss": torch.tensor([3.0])})]
    mesh = SimpleNamespace(add=lambda values: values, counts=False)
    peer = reduce(part, 1, mesh, stop=torch.tensor(1.0))
    assert peer.examples["loss"].tolist() == [0]
    assert peer.scalars == {"stop": 1}


def files_in(run_dir: Path, state: dict | None = None) -> FileLogger:
    return start(FileLogger(context_in(run_dir)), state)


def test_what_is_trained_and_when_it_ended_are_in_the_record(tmp_path):
    facts = {"packages": {}, "git_commit": None, "started": "2026-11-22T07:00:00+00:00"}
    (tmp_path / "env.json").write_text(json.dumps(facts))
    start(FileLogger(context_in(tmp_path, policy=make_weights(12, 333)))).on_end()
    record = read_json(tmp_path / "env.json")
    assert record["parameters"] == {"trainable": 12, "total": 345}
    assert record["started"] < record["ended"]


def update(number: int, metrics: dict[str, float]) -> Update:
    return Update(number, 4 * number, [], {}, metrics)


def evaluation(number: int, metrics: dict[str, float]) -> Evaluation:
    return Evaluation(number, 4 * number, metrics)


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = files_in(tmp_path)
    for n in (1, 2):
        logger.on_update(update(n, {"loss/train": 0.5 / n, "lr": math.inf if n == 1 else math.nan}))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == n
    logger.on_evaluation(evaluation(2, {"loss/eval": 0.1}))

    files_in(tmp_path, logger.state_dict()).on_evaluation(evaluation(2, {"loss/eval": 0.2}))  # another one appends

    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"split": "train", "examples": 4, "updates": 1, "loss/train": 0.5, "lr": None},
        {"split": "train", "examples": 8, "updates": 2, "loss/train": 0.25, "lr": None},
        {"split": "eval", "examples": 8, "updates": 2, "loss/eval": 0.1},
        {"split": "eval", "examples": 8, "updates": 2, "loss/eval": 0.2},
    ]


def test_samples_are_kept_for_programs_and_for_eyes(tmp_path):
    samples = [
        Sample("\n\nHuman: Où?\n\nAssistant:", " Là,\nsur la table.", " Non."),
        Sample("\n\nHuman: Hi\n\nAssistant:", " Hello.", None),  # SFT has no reference
    ]
    files_in(tmp_path).on_samples(32, samples)

    rows = read_rows(tmp_path / "samples.jsonl")
    assert rows == [{"examples": 32, **s._asdict()} for s in samples]
    assert (tmp_path / "samples.txt").read_text().splitlines() == [
        f"{'=' * 30} after 32 examples {'=' * 30}",
        "Human: Où?",
        "",
        "Assistant:",
        "--- policy ---",
        "Là,",
        "sur la table.",
        "--- reference ---",
        "Non.",
        "",
        f"{'=' * 30} after 32 examples {'=' * 30}",
        "Human: Hi",
        "",
        "Assistant:",
        "--- policy ---",
        "Hello.",
        "",
    ]


def test_a_state_that_a_checkpoint_would_not_give_back_is_refused_when_it_is_saved():
    class Odd(Callback):
        def state_dict(self):
            return {"seen": Path("somewhere")}

    callbacks = Callbacks({"odd": Odd}, context_in(Path()))
    with pytest.raises(TypeError, match=r"state_dict\(\) must have only tensors, numbers, texts"):
        callbacks.state_dict()
