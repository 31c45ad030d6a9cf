"""Time of an update outside forward, backward and optimizer.

    python -m benchmarks.step_overhead model.name_or_path=DIR dataset_sources.hh=DIR batch_size=16 n_examples=64 ...

Takes the overrides of train.py (datasets, loss, batch size, ...; W&B is off) and trains through the real loop, after
one warm-up update. Prints seconds per update and the overhead as a fraction.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import train
from benchmarks.harness import compose
from dpo.reporting.events import Callback, Update
from dpo.reporting.table import CALLBACKS
from dpo.training.objective import Objective
from trainers import BasicTrainer

PARTS: dict[str, float] = defaultdict(float)  # seconds of the current update, by part


def timed(part: str, function: Callable) -> Callable:
    """Wrap a function so that its seconds count for a part."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        PARTS[part] += time.perf_counter() - start
        return result

    return wrapper


class Stopwatch(Callback):
    """Recorder of the seconds of each update, and of its parts."""

    def on_start(self) -> None:
        self.totals: list[float] = []  # seconds of each update
        self.parts: list[dict[str, float]] = []
        self.last_update = time.perf_counter()

    def on_update(self, update: Update) -> None:
        now = time.perf_counter()
        self.totals.append(now - self.last_update)
        self.parts.append(dict(PARTS))
        PARTS.clear()
        self.last_update = now

    def on_end(self) -> None:
        totals, parts = self.totals[1:], self.parts[1:]  # the first update includes the self-test
        overheads = [1 - sum(part.values()) / total for total, part in zip(totals, parts, strict=True)]
        medians = {"update": median(totals)} | {name: median(part[name] for part in parts) for name in parts[0]}
        print(f"\n{len(totals)} updates, medians: " + ", ".join(f"{k} {v:.4f} s" for k, v in medians.items()))
        print(f"outside forward, backward and optimizer: {median(overheads):.3%} (worst {max(overheads):.3%})")


if __name__ == "__main__":
    CALLBACKS["stopwatch"] = Stopwatch
    Objective.losses = timed("forward", Objective.losses)
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)
    BasicTrainer.clip_gradient = timed("optimizer", BasicTrainer.clip_gradient)
    with tempfile.TemporaryDirectory() as folder:
        config = compose([f"local_run_dir={folder}", *sys.argv[1:]])
        optimizer = getattr(torch.optim, config.optimizer)
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, timed("optimizer", getattr(optimizer, name)))
        train.work(0, 1, config)
