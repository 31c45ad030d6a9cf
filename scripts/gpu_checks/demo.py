"""Check 2: the demo's two stages through the command line, and the golden runs without TF32."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from scripts.gpu_checks.common import ROOT, TINY, WORDS, Outcome, Run, Setting
from scripts.gpu_checks.table import FIRST_LOSS_TOLERANCE, GOLDEN, GOLDEN_FIRST, GOLDEN_IPO

COMMON = ("model=demo", "datasets=[demo]", "batch_size=32", "eval_batch_size=32", "n_eval_examples=32",
          "warmup_steps=2", "sample_during_eval=false", "trainer=BasicTrainer")  # fmt: skip
UNCLEAN = re.compile(r"Traceback|terminate called|leaked|Segmentation|CUDA error|core dumped")
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # overrides the program's setting in cuBLAS and cuDNN


def check(setting: Setting) -> Outcome:
    names = setting.pick(("words-sft", "words-dpo", "words-ipo"), ("words-dpo",), ("words-dpo",))
    goldens = {name: json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text()) for name in names}
    sft_examples, dpo_examples = setting.pick((2048, 1024), (512, 256), (96, 96))
    sft = Run(setting, "sft", *COMMON, "loss=sft", "optimizer=AdamW", "lr=2e-3", f"n_examples={sft_examples}")
    runs = {name: start_golden(setting, name, golden) for name, golden in goldens.items()}
    archive = sft.done().directory / "LATEST"
    dpo = Run(setting, "dpo", *COMMON, "loss=dpo", "loss.beta=0.1", "lr=1e-4", f"model.archive={archive}",
              "model.reference_dtype=float32", f"n_examples={dpo_examples}").done()  # fmt: skip

    first = dpo.records(split="train")[0]["loss/train"]
    fell = {run.name: measure_fall(run) for run in (sft, dpo)}
    distances = {name: compare(run.done(), goldens[name]) for name, run in runs.items()}
    unclean = [run.name for run in (sft, dpo, *runs.values()) if UNCLEAN.search(run.text())]
    figure = f"first DPO loss ln 2 {first - math.log(2):+.0e}; " + "; ".join(
        f"{name} off by {d['first']:.1e} at the first update (of {GOLDEN_FIRST:g}), {d['worst']:.1e} at most (of "
        f"{d['allowed']:g}, {d['where']})"
        for name, d in distances.items()
    )
    figure += f"; not a clean exit: {', '.join(unclean)}" if unclean else ""
    figure += "".join(f"; the loss of {name} did not fall" for name, by in fell.items() if by <= 0)
    passed = not unclean and abs(first - math.log(2)) <= FIRST_LOSS_TOLERANCE and min(fell.values()) > 0
    passed = passed and all(d["first"] <= GOLDEN_FIRST and d["worst"] <= d["allowed"] for d in distances.values())
    return Outcome(passed, figure, {"first_loss": first, "loss_fell_by": fell, "golden": distances})


def measure_fall(run: Run) -> float:
    """By how much the evaluation loss fell."""
    losses = [line["loss/eval"] for line in run.records(split="eval")]
    return losses[0] - losses[-1]


def start_golden(setting: Setting, name: str, golden: dict[str, Any]) -> Run:
    """The command that repeats a golden run, as tests/runs/test_golden.py has it."""
    settings = {key: value for key, value in golden["config"].items() if key != "loss"}
    loss = dict(golden["config"]["loss"])
    kind = loss.pop("name")
    if kind == "ipo":  # the reference reads dpo's keys there and does not use them
        loss = {"beta": loss["beta"]}
    return Run(
        setting,
        name,
        f"loss={kind}",
        *(f"loss.{key}={value}" for key, value in loss.items()),
        *(f"{key}={value}" for key, value in settings.items()),
        f"model.name_or_path={TINY}",
        "model.reference_dtype=float32",
        "datasets=[hh]",
        f"dataset_sources.hh={WORDS}",
        "sample_during_eval=false",
        **WITHOUT_TF32,
    )


def compare(run: Run, golden: dict[str, Any]) -> dict[str, Any]:
    """The differences of a run from its golden run: at the first update, and the largest with its metric."""
    found: list[tuple[float, str]] = []
    updates = run.records(split="train")
    for number, (ours, theirs) in enumerate(zip(updates, golden["updates"], strict=True), 1):
        found += [(distance(ours[key], value, key), f"{key} of update {number}") for key, value in theirs.items()]
    first = max(d for d, where in found if where.endswith(" of update 1"))
    worst, where = max(found)
    return {"first": first, "worst": worst, "where": where, "allowed": GOLDEN_IPO if "ipo" in run.name else GOLDEN}


def distance(ours: float, theirs: float, key: str) -> float:
    """The relative difference; for rewards below 1 absolute; for accuracies 0 or infinite."""
    if key.endswith("accuracies"):
        return 0.0 if ours == theirs else math.inf
    return abs(ours - theirs) / (max(abs(theirs), 1.0) if key.startswith("rewards") else abs(theirs))
