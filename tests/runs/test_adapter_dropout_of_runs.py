"""Runs with lora.dropout: the same losses in any layout and in several processes, and no dropout in evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import read_metrics, train

# with an update that is minus the gradient, rounding stays rounding
SETTINGS = ("lora=lora", "lora.dropout=0.3", "optimizer=SGD", "lr=1", "warmup_steps=0", "export=false", "n_examples=16")


def assert_the_same(one: Path, other: Path) -> None:
    for split, key in (("train", "loss/train"), ("train", "grad_norm"), ("eval", "loss/eval")):
        wanted, found = ([line[key] for line in read_metrics(run_dir, split)] for run_dir in (one, other))
        assert found == pytest.approx(wanted, rel=1e-4)
        assert len(set(wanted)) == len(wanted)


# aot scores the batch once more before its microbatches
@pytest.mark.parametrize("loss", ["dpo", pytest.param("aot", marks=pytest.mark.slow)])
def test_a_run_has_the_same_losses_in_another_layout(loss, run, tmp_path, capsys):
    run("plain", *SETTINGS, f"loss={loss}", "loss.beta=0.1")
    run("padded", *SETTINGS, f"loss={loss}", "loss.beta=0.1", "layout=padded", "gradient_accumulation_steps=2")
    assert_the_same(tmp_path / "plain", tmp_path / "padded")
    assert (
        capsys.readouterr().out.count(
            "self-test: was without lora.dropout=0.3, which is on in updates alone and was not checked"
        )
        == 2
    )


@pytest.mark.slow
def test_a_run_has_the_same_losses_in_two_processes(command, tmp_path):
    for name, way in (("plain", ()), ("two", ("trainer=FSDPTrainer", "world_size=2", "activation_checkpointing=true"))):
        done = train(*command(name, *SETTINGS, *way))
        assert done.returncode == 0, done.stderr
    assert_the_same(tmp_path / "plain", tmp_path / "two")


def test_dropout_is_on_in_updates_and_off_in_evaluations(run, tmp_path):
    """At a learning rate that leaves the weights of an SFT adapter as they are."""
    short = ("lora=lora", "n_examples=8", "warmup_steps=0", "export=false")
    run("sft", *short, "loss=sft", "lr=0.01")
    for dropout in ("0", "0.3"):
        same = ("lora.reference=adapter", f"model.archive={tmp_path / 'sft'}", "optimizer=SGD", "lr=1e-12")
        run(dropout, *short, *same, f"lora.dropout={dropout}")

    of = {split: [read_metrics(tmp_path / dropout, split) for dropout in ("0", "0.3")] for split in ("train", "eval")}
    assert all(a["loss/eval"] == b["loss/eval"] for a, b in zip(*of["eval"], strict=True))
    assert all(a["rewards_train/margins"] == 0 for a in of["train"][0])
    assert all(b["rewards_train/margins"] != 0 for b in of["train"][1])
