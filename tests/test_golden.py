"""The published reference's own numbers, reproduced by the real command line: every metric of 16 updates and both
evaluations. `words` runs anywhere; `llama` needs data that the project does not ship."""

from __future__ import annotations

import json

import pytest
from conftest import GOLDEN, SHARED, metrics_of, train


def command_of(golden: dict, data: str, run_dir: str) -> list[str]:
    """The overrides that repeat a golden run: its `config`, a float32 reference, the tiny Llama."""
    settings = {k: v for k, v in golden["config"].items() if k != "loss"}
    loss = dict(golden["config"]["loss"])
    name = loss.pop("name")
    if name == "ipo":  # the reference reads dpo's keys there and does not use them
        loss = {"beta": loss["beta"]}
    return [
        f"loss={name}",
        *(f"loss.{k}={v}" for k, v in loss.items()),
        *(f"{k}={v}" for k, v in settings.items()),
        f"model.name_or_path={GOLDEN / 'tiny-llama'}",
        "model.reference_dtype=float32",
        "datasets=[hh]",
        f"dataset_sources.hh={data}",
        "sample_during_eval=false",
        "exp_name=golden",
        f"local_run_dir={run_dir}",
    ]


def close(ours: float, theirs: float, name: str, tolerance: float) -> bool:
    if name.endswith("accuracies"):
        return ours == theirs
    scale = max(abs(theirs), 1.0) if name.startswith("rewards") else abs(theirs)
    return abs(ours - theirs) <= tolerance * scale


def assert_same(ours: dict, theirs: dict, tolerance: float, where: str) -> None:
    wrong = [
        f"{where} {name}: {ours[name]} instead of {value}"
        for name, value in theirs.items()
        if not close(ours[name], value, name, tolerance)
    ]
    assert not wrong, "\n".join(wrong)


SHARDED = ("trainer=FSDPTrainer", "world_size=2")


@pytest.mark.parametrize(
    ("run", "overrides"),
    [
        *((f"{data}-{loss}", ()) for data in ("words", "llama") for loss in ("sft", "dpo", "ipo")),
        ("words-dpo", SHARDED),
        ("words-sft", (*SHARDED, "gradient_accumulation_steps=2")),
    ],
)
def test_every_metric_of_the_published_reference(run, overrides, tmp_path):
    words = run.startswith("words")
    file = (GOLDEN if words else SHARED / "golden") / f"{run}.json"
    if not file.exists():
        pytest.skip(f"{file} is on the maintainers' machines only")
    golden = json.loads(file.read_text())
    data = GOLDEN / "words" if words else SHARED / "data" / "hh"

    settings = {o.split("=")[0] for o in overrides}
    command = [o for o in command_of(golden, str(data), str(tmp_path / "run")) if o.split("=")[0] not in settings]
    result = train(*command, *overrides)

    assert result.returncode == 0, result.stderr
    tolerance = 5e-3 if run.endswith("ipo") else 2e-3
    updates, evaluations = metrics_of(tmp_path / "run", "train"), metrics_of(tmp_path / "run", "eval")
    assert [u["examples"] for u in updates] == [4 * (i + 1) for i in range(16)]
    for i, (ours, theirs) in enumerate(zip(updates, golden["updates"], strict=True)):
        assert_same(ours, theirs, 3e-5 if i == 0 else tolerance, f"update {i + 1}")
    assert [e["examples"] for e in evaluations] == [0, 32, 64]  # the reference never evaluates its final weights
    for ours, theirs in zip(evaluations, golden["evals"], strict=False):
        assert ours["examples"] == theirs["examples"]
        assert_same(
            ours, theirs["metrics"], 3e-5 if ours["examples"] == 0 else tolerance, f"evaluation {ours['examples']}"
        )
