"""A run whose last checkpoint is not its best says so at its end, and so does its report."""

from __future__ import annotations

from support.runs import read_metrics

from dpo.analysis.findings import find_all
from dpo.analysis.runs import read_run


def accuracies(run) -> dict[int, float]:
    return {line["examples"]: line["rewards_eval/accuracies"] for line in read_metrics(run, "eval") if line["examples"]}


def test_best_is_named_with_its_value_if_it_is_better_than_latest(run, tmp_path, capsys):
    run("run", "optimizer=SGD", "lr=10", "max_grad_norm=100", "warmup_steps=0", "eval_every=4", "save_every=4")

    found = accuracies(tmp_path / "run")
    best = max(found, key=found.get)
    assert found[best] > found[max(found)], found  # as it happens with this seed
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BEST")]
    assert said == [
        f"BEST is {tmp_path}/run/step-{best}, with rewards_eval/accuracies {found[best]:.4g}; that of LATEST is "
        f"{found[max(found)]:.4g}"
    ]
    assert "BEST is better than the last evaluation" in {f.title for f in find_all(read_run(tmp_path / "run"))}


def test_nothing_is_said_if_the_last_is_the_best(run, tmp_path, capsys):
    run("run", "eval_every=24", "save_every=24")
    assert len(accuracies(tmp_path / "run")) == 1
    assert "BEST" not in capsys.readouterr().out
    assert "BEST is better than the last evaluation" not in {f.title for f in find_all(read_run(tmp_path / "run"))}
