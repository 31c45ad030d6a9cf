"""Time of an update by phase and by kind of kernel.

    python -m benchmarks.profile model.name_or_path=DIR dataset_sources.hh=DIR batch_size=16 n_examples=64 ...

Takes the overrides of train.py (datasets, loss, batch size, ...; W&B is off), and trains one process through the real
loop. The first update warms up, and in the last one torch.profiler records kernels; the others are timed. Each phase
ends when the device has finished, so the host does not run ahead. `other` is time in no phase: data, metrics, logs.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import train
from benchmarks.harness import compose, print_row
from dpo.settings.plan import resolve
from dpo.system.host import set_allocators
from dpo.training.objective import Objective
from dpo.training.optimization import OPTIMIZERS
from trainers import Trainer

PHASES = ("sampling", "scoring", "reference", "forward", "backward", "clip", "optimizer", "other")
KINDS = {  # kind of a kernel (on a CPU, operator): pattern in its name; the first match counts
    "attention": "attention|attn|fmha|flash",
    "products": "gemm|gemv|cutlass|nvjet|xmma|::mm|::addmm|::bmm|::baddbmm|mkldnn_linear|::_int_mm|4bit|dequant",
    "optimizer": "multi_tensor|foreach|fused_|optimizer",
    "copies": "memcpy|memset|copy_|::cat|index|gather|scatter",
    "collectives": "nccl|gloo|c10d",
    "softmax and sums": "softmax|reduce|::sum|::mean|norm",
    "elementwise": "elementwise|::mul|::add|::sub|::div|silu|gelu|exp|neg|::where|::fill_|::zero_|pow|rsqrt",
}
ON_GPU = torch.cuda.is_available()


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


class Stopwatch:
    """Seconds of each phase of each update."""

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self.is_on = True
        self._phases: dict[str, float] = defaultdict(float)
        self._within = 0.0  # seconds of phases within the running phase
        self._began = time.perf_counter()

    def time(self, phase: str, function: Callable) -> Callable:
        """Wrap a function, to count its seconds to `phase`.

        Seconds of phases that run within the function count only for those phases.
        """

        def timed(*args: Any, **options: Any) -> Any:
            if not self.is_on:
                return function(*args, **options)
            outer, self._within = self._within, 0.0
            synchronize()
            start = time.perf_counter()
            result = function(*args, **options)
            synchronize()
            seconds = time.perf_counter() - start
            self._phases[phase] += seconds - self._within
            self._within = outer + seconds
            return result

        return timed

    def end_update(self, **seconds: float) -> None:
        """Close an update, which began where the last one ended.

        `seconds` are the times of phases that were measured elsewhere, by name.
        """
        now = time.perf_counter()
        phases = {**self._phases, **seconds}
        self.updates.append({**phases, "other": now - self._began - sum(phases.values())})
        self._phases.clear()
        self._began = now


def profile_run(overrides: Sequence[str]) -> dict[str, Any]:
    """Train by the real loop, and measure.

    Returns the median seconds of each phase and of an update, and `profile_kernels` of the last update.
    """
    watch, kernels = Stopwatch(), {}
    with tempfile.TemporaryDirectory() as folder:
        config = compose([f"local_run_dir={folder}", *overrides])
        n_updates = (config.n_examples or 0) // config.batch_size
        if n_updates < 3:
            sys.exit(f"n_examples={config.n_examples} makes {n_updates} updates of {config.batch_size}; 3 are needed")
        phases = [
            (Objective, "reference_forward", "reference"),
            (Objective, "losses", "forward"),
            (torch.Tensor, "backward", "backward"),
            (Trainer, "clip_gradient", "clip"),
            (OPTIMIZERS[config.optimizer], "step", "optimizer"),
            (OPTIMIZERS[config.optimizer], "zero_grad", "optimizer"),
        ]
        step = Trainer.train_step

        def measured_step(trainer: Trainer, batch: Any) -> Any:
            watch.is_on = trainer.batch_counter < n_updates - 1
            if watch.is_on:
                update = step(trainer, batch)
                watch.end_update(**batch.seconds)
                return update
            updates: list[Any] = []
            kernels.update(profile_kernels(lambda: updates.append(step(trainer, batch))))
            return updates[0]

        with ExitStack() as patches:
            for owner, name, phase in phases:
                patches.enter_context(patch.object(owner, name, watch.time(phase, getattr(owner, name))))
            patches.enter_context(patch.object(Trainer, "train_step", measured_step))
            train.work(0, 1, resolve(config))
    counted = watch.updates[1:]
    medians = {phase: median(update.get(phase, 0.0) for update in counted) for phase in PHASES}
    return {"phases": medians, "seconds": median(sum(update.values()) for update in counted), "kernels": kernels}


def profile_kernels(action: Callable[[], Any]) -> dict[str, Any]:
    """Measure an action's seconds, and its kernels' by kind and name."""
    device = torch.profiler.ProfilerActivity.CUDA if ON_GPU else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[device]) as profile:
        start = time.perf_counter()
        action()
        synchronize()
        seconds = time.perf_counter() - start
    by_name: Counter[str] = Counter()
    for event in profile.key_averages():
        by_name[event.key] += (event.self_device_time_total if ON_GPU else event.self_cpu_time_total) / 1e6
    by_kind: Counter[str] = Counter()
    for name, spent in by_name.items():
        kinds = (kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))
        by_kind[next(kinds, "rest")] += spent
    return {"seconds": seconds, "by kind": dict(by_kind.most_common()), "longest": dict(by_name.most_common(10))}


def print_profile(profile: dict[str, Any]) -> None:
    total, kernels = profile["seconds"], profile["kernels"]
    phases = {phase: spent for phase, spent in profile["phases"].items() if spent}
    print(f"\n{total:.4f} s an update, median; {phases['other'] / total:.3%} of it in no phase")
    for phase, spent in phases.items():
        print_row(phase, [f"{spent:.4f} s", f"{spent / total:.1%}"])
    busy = sum(kernels["by kind"].values())
    print(f"\n{kernels['seconds']:.4f} s with the profiler on, {busy / kernels['seconds']:.0%} of it in kernels")
    for name, spent in (*kernels["by kind"].items(), ("", 0.0), *kernels["longest"].items()):
        print_row(name[:60], [f"{spent:.4f} s", f"{spent / busy:.1%}"] if name else [], first=62)


if __name__ == "__main__":
    set_allocators(os.environ)
    print_profile(profile_run(sys.argv[1:]))
