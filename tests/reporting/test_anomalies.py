"""Numbers that are none never reach the weights, and say where they come from."""

from __future__ import annotations

import json

import pytest
import torch
from support.runs import metrics_of, train

from dpo.checkpoint.files import read_state
from dpo.errors import RunError
from dpo.reporting.anomalies import MAX_SKIPPED, SpikeWarner
from dpo.reporting.events import RunContext, Update
from dpo.training.objective import Objective

SPOILT = ("optimizer=SGD", "lr=1e30", "warmup_steps=0", "max_grad_norm=1e30")  # after one update


@pytest.fixture
def spoil(monkeypatch):
    """Make the loss of one example of training batch `update` not a number, or its gradient."""

    def arm(update: int, what: str = "loss") -> None:
        losses_of, seen = Objective.losses, []

        def spoilt(self, *arguments, split, **options):
            losses, metrics = losses_of(self, *arguments, split=split, **options)
            if split == "train":
                seen.append(1)
                if len(seen) == update:
                    if what == "loss":
                        losses = losses * float("nan")
                        metrics = {**metrics, "loss/train": losses.detach()}
                    else:
                        losses.register_hook(lambda gradient: gradient * float("inf"))
            return losses, metrics

        monkeypatch.setattr(Objective, "losses", spoilt)

    return arm


@pytest.mark.parametrize("what", ["loss", pytest.param("gradient", marks=pytest.mark.slow)])
def test_it_stops_before_the_update_and_keeps_the_batch_for_replay(what, run, spoil, tmp_path):
    run("whole", "save_every=12")
    spoil(4, what)
    with pytest.raises(RunError, match=r"update 4 has loss .*; its examples are in .*nonfinite-4;"):
        run("run", "save_every=4")

    assert len(metrics_of(tmp_path / "run", "train")) == 3
    last, whole = (read_state(tmp_path / name / "step-12" / "policy.pt") for name in ("run", "whole"))
    assert all(torch.equal(last[name], whole[name]) for name in last)
    rows = [json.loads(line) for line in (tmp_path / "run" / "nonfinite-4" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0].keys() >= {"prompt", "chosen", "rejected", "prompt_number", "loss/train"}

    reference = read_state(tmp_path / "run" / "step-12" / "trainer.pt")["reference_logps"]["logps"]
    assert reference.isfinite().all()
    run(
        "replay",
        "datasets=[bad]",
        f"++dataset_sources.bad={tmp_path}/run/nonfinite-4",
        "n_examples=4",
        "eval_batch_size=4",
    )


def test_skipped_the_update_does_not_happen_and_the_run_goes_on(run, spoil, tmp_path, capsys):
    run("whole", "save_every=4")
    spoil(4)
    run("run", "save_every=4", "nan_policy=skip")

    assert "warning: update 4 has loss nan" in capsys.readouterr().out
    assert [line["examples"] for line in metrics_of(tmp_path / "run", "train")] == [4, 8, 12, 16, 20, 24]
    states = [
        read_state(tmp_path / "run" / f"step-{n}" / f"{part}.pt") for n in (12, 16) for part in ("policy", "optimizer")
    ]
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert states[1]["state"][0]["step"] == states[3]["state"][0]["step"] == 3
    assert all(value.isfinite().all() for value in read_state(tmp_path / "run" / "step-24" / "policy.pt").values())
    assert read_state(tmp_path / "run" / "step-24" / "trainer.pt")["callbacks"]["nonfinite"]["skipped"] == 1


def test_the_batch_of_an_sft_run_can_be_replayed_too(run, spoil, tmp_path):
    spoil(2)
    with pytest.raises(RunError):
        run("run", "loss=sft")
    sources = ("datasets=[bad]", f"++dataset_sources.bad={tmp_path}/run/nonfinite-2")
    run("replay", "loss=sft", *sources, "n_examples=4", "eval_batch_size=4")


def test_skipping_has_an_end(run, tmp_path):
    with pytest.raises(RunError, match=f"{MAX_SKIPPED} updates were skipped before"):
        run("run", *SPOILT, "nan_policy=skip", "n_examples=80", "eval_every=80", "self_test=false")
    assert len(list((tmp_path / "run").glob("nonfinite-*"))) == MAX_SKIPPED + 1


def test_every_rank_stops(command, tmp_path):
    sharded = ("trainer=FSDPTrainer", "world_size=2", "eval_batch_size=8", "n_eval_examples=8")
    result = train(*command("run", *SPOILT, *sharded))

    assert result.returncode == 1
    assert "error: rank" in result.stderr
    assert "update 2 has loss" in result.stderr
    assert "Traceback" not in result.stderr
    assert len((tmp_path / "run" / "nonfinite-2" / "train.jsonl").read_text().splitlines()) == 4


def test_a_spike_is_a_warning():
    logged = []
    warner = SpikeWarner(RunContext(None, None, 0, None, logged.append))

    def update(number: int, grad_norm: float) -> None:
        warner.on_update(Update(number, 4 * number, [], {}, {"loss/train": 0.7, "grad_norm": grad_norm}))

    for number in range(30):
        update(number, 1.0 + 0.01 * number)
    assert logged == []
    update(30, 25.0)
    assert logged == ["warning: update 30: grad_norm 25 is 22 times its median before"]
