"""The published reference's own numbers, from the real command line.

Every metric of 16 updates and both evaluations. `words` runs anywhere; `llama` needs data that the project does not
ship.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pytests import succeeded
from support.runs import BAND, GOLDEN, SHARED, distance, golden_command, read_json, read_metrics, train


def assert_same(ours: dict, theirs: dict, tolerance: float, where: str) -> None:
    wrong = [
        f"{where} {name}: {ours[name]} instead of {value}"
        for name, value in theirs.items()
        if distance(ours[name], value, name) > tolerance
    ]
    assert not wrong, "\n".join(wrong)


GRIDS = {
    "sharded": ("trainer=FSDPTrainer", "world_size=2"),
    "cut": ("trainer=TensorParallelTrainer", "world_size=2"),
    "cut and sharded": ("trainer=TensorParallelTrainer", "world_size=4", "tensor_parallel_size=2"),
    "cut by the package": (
        "trainer=TensorParallelTrainer",
        "tensor_parallel.backend=tensor_parallel",
        "tensor_parallel_size=2",
    ),
}
CORNER = ("words-dpo", "sharded", 1)  # `make test` runs this and the plain runs on `words`, `make test-all` all


def over_grids() -> Iterator[Any]:
    for run in [f"{data}-{loss}" for data in ("words", "llama") for loss in ("sft", "dpo", "ipo")]:
        yield pytest.param(run, (), marks=[pytest.mark.slow] if run.startswith("llama") else [], id=run)
        yield pytest.param(run, ("compile=true",), marks=[pytest.mark.slow], id=f"{run}, compiled")
        for mesh, overrides in GRIDS.items():
            for accumulation in (1, 2):
                marks = [] if (run, mesh, accumulation) == CORNER else [pytest.mark.slow]
                settings = (*overrides, f"gradient_accumulation_steps={accumulation}")
                yield pytest.param(run, settings, marks=marks, id=f"{run}, {mesh}, accumulation {accumulation}")


@pytest.mark.parametrize(("run", "overrides"), over_grids())
def test_every_metric_of_the_published_reference(run, overrides, tmp_path):
    golden = repeat(run, overrides, tmp_path)
    tolerance = 1e-3 if run.endswith("ipo") else 5e-4
    updates, evaluations = read_metrics(tmp_path / "run", "train"), read_metrics(tmp_path / "run", "eval")
    assert [u["examples"] for u in updates] == [4 * (i + 1) for i in range(16)]
    for i, (ours, theirs) in enumerate(zip(updates, golden["updates"], strict=True)):
        assert_same(ours, theirs, 3e-5 if i == 0 else tolerance, f"update {i + 1}")
    assert [e["examples"] for e in evaluations] == [0, 32, 64]  # the reference never evaluates its final weights
    for ours, theirs in zip(evaluations, golden["evals"], strict=False):
        assert ours["examples"] == theirs["examples"]
        assert_same(
            ours, theirs["metrics"], 3e-5 if ours["examples"] == 0 else tolerance, f"evaluation {ours['examples']}"
        )


MIXED = ("model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16")
BFLOAT16 = {
    "sharded": (*GRIDS["sharded"], *MIXED),
    "cut": (*GRIDS["cut"], *MIXED),
    "autocast": ("model.autocast=bfloat16",),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", BFLOAT16)
def test_bfloat16_stays_within_a_band_of_the_published_float32_run(way, tmp_path):
    golden = repeat("words-dpo", BFLOAT16[way], tmp_path)
    for i, (ours, theirs) in enumerate(zip(read_metrics(tmp_path / "run", "train"), golden["updates"], strict=True)):
        for name, value in theirs.items():
            kind = re.match("[a-z]+(_norm)?", name)[0]
            if kind in BAND and not name.endswith("accuracies"):
                assert_same({name: ours[name]}, {name: value}, BAND[kind], f"update {i + 1}")
    first = read_metrics(tmp_path / "run", "train")[0]
    assert first["grad_norm"] != pytest.approx(golden["updates"][0]["grad_norm"], rel=1e-5)  # it was bfloat16


def repeat(run: str, overrides: tuple[str, ...], tmp_path: Path) -> dict:
    """Run a golden run's command with overrides; return its numbers."""
    words = run.startswith("words")
    file = (GOLDEN if words else SHARED / "golden") / f"{run}.json"
    if not file.exists():
        pytest.skip(f"{file} is on the maintainers' machines only")
    golden = read_json(file)
    data = GOLDEN / "words" if words else SHARED / "data" / "hh"

    settings = {o.split("=")[0] for o in overrides}
    command = [o for o in golden_command(golden, str(data), str(tmp_path / "run")) if o.split("=")[0] not in settings]
    succeeded(train(*command, *overrides))

    return golden
