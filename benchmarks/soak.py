"""Kill a run again and again, at random moments, until it ends; then compare it with one that nobody disturbed.

    python -m benchmarks.soak model.name_or_path=DIR [--kills 50] [--seed 0] [overrides of train.py ...]

A kill is a SIGKILL of the run's only process, of one of its two ranks, or of everything at a stage of a save, chosen by
the seed; then `resume=auto`. Runs go on until they end, and new ones begin until there were so many kills. The tally:
runs that lost something (no way to continue) and runs that differ (in a metric, a sample or a byte of the last weights,
optimizer state or counters).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from checkpoint import find_checkpoints, read_state

ROOT = Path(__file__).resolve().parents[1]
WALL_CLOCK = ("examples_per_second", "tokens_per_second", "memory/peak_gb")
GRIDS = {"BasicTrainer": (), "FSDPTrainer": ("trainer=FSDPTrainer", "world_size=2")}
STAGES = ("serialized", "fsync", "manifest", "rename", "LATEST")  # of a save, at each of which tests/killer kills


def read_log(run_dir: Path) -> list[dict]:
    """The lines of `metrics.jsonl` without what the clock says."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in WALL_CLOCK} for line in lines]


def find_differences(whole: Path, other: Path) -> list[str]:
    """What of two finished runs is not the same to the bit; empty if all is."""
    logs = [read_log(run_dir) for run_dir in (whole, other)]
    found = [] if repr(logs[0]) == repr(logs[1]) else ["metrics.jsonl"]  # as text: NaN is no NaN's equal
    for name in ("samples.jsonl", "samples.txt"):
        texts = [path.read_text() if (path := run_dir / name).exists() else None for run_dir in (whole, other)]
        found += [name] if texts[0] != texts[1] else []
    last = [find_checkpoints(run_dir)[0] for run_dir in (whole, other)]
    if last[0].name != last[1].name:
        return [*found, f"the last checkpoint is {last[0].name} and {last[1].name}"]
    for part in ("policy", "optimizer", "scheduler", "trainer", "random"):
        states = [read_state(directory, part) for directory in last]
        found += [f"{part}{where}" for where in _unequal(*states)]
    links = [os.readlink(run_dir / "BEST") for run_dir in (whole, other)]
    return found + (["BEST"] if links[0] != links[1] else [])


def _unequal(a: Any, b: Any, where: str = "") -> list[str]:
    """Places at which two nested states differ; bytes of a log depend on the digits of times, and are left out."""
    if where.endswith(".log_bytes"):
        return []
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [place for key in a for place in _unequal(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [place for i, pair in enumerate(zip(a, b, strict=True)) for place in _unequal(*pair, f"{where}.{i}")]
    return [] if repr(a) == repr(b) else [where]
