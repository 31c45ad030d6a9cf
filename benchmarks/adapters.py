"""Memory and time of an update with adapters: all weights, then each kind of reference, on one process and on two.

    python -m benchmarks.adapters model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR loss=dpo loss.beta=0.1 ...

Takes the overrides of train.py (W&B is off; all weights are float32). First, an SFT adapter is trained for one update,
from which `lora.reference=adapter` starts. Each row trains on the same batches in fresh processes, after one warm-up
update, and in turn with the others, `--rounds` times. The columns: seconds of an update on the clock, and those of the
CPU, which other work on the machine changes less; the process's peak memory, and the part of it added by models and
updates. With several processes, each value is the largest of any.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import train
from benchmarks.harness import COMMON, Failed, compose, make_trainer, measure_afresh, measure_in_turns, print_row
from dpo.system.host import resident_memory, set_allocators
from dpo.training.metrics import peak_memory_gb

PROCESSES = {"1 process": ("trainer=BasicTrainer",), "2 processes": ("trainer=FSDPTrainer", "world_size=2")}
SETTINGS = {
    "lora=none": ("lora=none",),
    "lora.reference=model": ("lora=lora", "lora.reference=model"),
    "lora.reference=base": ("lora=lora", "lora.reference=base"),
    "lora=qlora": ("lora=qlora", "lora.reference=base"),
    "lora.reference=adapter": ("lora=lora", "lora.reference=adapter", "model.archive={adapter}"),
}
COLUMNS = {"wall": "s", "cpu": "s", "peak": "GB", "grown": "GB"}


def measure(rank: int, world_size: int, config: Any, updates: int) -> dict[str, float]:
    """Median seconds of a few updates in this process, and memory in GB."""
    config.n_examples, before = (updates + 1) * config.batch_size, resident_memory() / 1e9
    times = []
    trainer = make_trainer(config, rank, world_size)
    for batch in trainer.train_iterator:
        start, cpu = time.perf_counter(), time.process_time()
        trainer.train_step(batch)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    wall, cpu = zip(*times[1:], strict=True)
    peak = peak_memory_gb()
    grown = peak - (0 if torch.cuda.is_available() else before)
    return {"wall": median(wall), "cpu": median(cpu), "peak": peak, "grown": grown}


def train_adapter(overrides: list[str], run_dir: Path) -> Path:
    """Train an SFT adapter for one update."""
    own = [o for o in overrides if not o.startswith(("loss", "trainer", "world_size", "lora.reference"))]
    config = compose(
        [*COMMON, f"local_run_dir={run_dir}", *own, "loss=sft", "lora=lora", "debug=false", "export=false"]
    )
    config.n_examples = config.batch_size
    train.work(0, 1, config)
    return run_dir / "LATEST"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=3, help="number of counted updates")
    parser.add_argument("--rounds", type=int, default=1, help="how often each row is measured")
    arguments, overrides = parser.parse_known_args()

    def run(name: str, processes: str) -> dict[str, float]:
        """Measure in fresh processes; each value is the largest of any process."""
        own = [override.format(adapter=adapter) for override in SETTINGS[name]]
        settings = [*COMMON, *overrides, *own, *PROCESSES[processes]]
        ranks = measure_afresh("harness:measure_on_ranks", "adapters:measure", settings, arguments.updates)
        print(f"measured {name}, {processes}: {ranks}", file=sys.stderr, flush=True)
        return {key: max(rank[key] for rank in ranks) for key in COLUMNS}

    with tempfile.TemporaryDirectory() as folder:
        adapter = train_adapter(overrides, Path(folder) / "sft")
        rows = [(name, processes) for processes in PROCESSES for name in SETTINGS]
        found = measure_in_turns({row: lambda _, row=row: run(*row) for row in rows}, arguments.rounds)
    print_row("", [title for key in COLUMNS for title in (key, "of first")], first=38, width=10)
    for name, processes in rows:
        cells = []
        for key, unit in COLUMNS.items():
            value, first = (median(result[key] for result in found[row, processes]) for row in (name, "lora=none"))
            cells += [f"{value:.2f} {unit}", f"{value / first:.0%}"]
        print_row(f"{name}, {processes}", cells, first=38, width=10)


if __name__ == "__main__":
    set_allocators(os.environ)
    try:
        main()
    except Failed as error:
        sys.exit(str(error))
