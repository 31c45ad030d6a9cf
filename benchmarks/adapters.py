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
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import train
from benchmarks.compare import COMMON
from benchmarks.step_overhead import compose
from dpo.models.loading import model_loaders
from dpo.settings.plan import resolve
from dpo.system.host_memory import resident_memory
from dpo.system.launching import launch
from dpo.system.malloc import set_allocators
from dpo.training.metrics import peak_memory_gb

PROCESSES = {"1 process": ("trainer=BasicTrainer",), "2 processes": ("trainer=FSDPTrainer", "world_size=2")}
SETTINGS = {
    "lora=none": ("lora=none",),
    "lora.reference=model": ("lora=lora", "lora.reference=model"),
    "lora.reference=base": ("lora=lora", "lora.reference=base"),
    "lora=qlora": ("lora=qlora", "lora.reference=base"),
    "lora.reference=adapter": ("lora=lora", "lora.reference=adapter", "model.archive={adapter}"),
}


def measure(rank: int, world_size: int, config: Any, folder: Path, updates: int) -> None:
    """Run a few updates in this process, and write their median seconds, and memory in GB."""
    config.n_examples, before = (updates + 1) * config.batch_size, resident_memory() / 1e9
    plan = resolve(config, world_size=world_size)
    policy, reference = model_loaders(plan, rank=rank)
    trainer = train.find_trainer(plan)(policy, config, config.seed, folder / "run", reference, rank, world_size)
    times = []
    for batch in trainer.train_iterator:
        start, cpu = time.perf_counter(), time.process_time()
        trainer.train_step(batch)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    wall, cpu = zip(*times[1:], strict=True)
    peak = peak_memory_gb()
    grown = peak - (0 if torch.cuda.is_available() else before)
    facts = {"wall": median(wall), "cpu": median(cpu), "peak": peak, "grown": grown}
    (folder / f"{rank}.json").write_text(json.dumps(facts))


def run_setting(overrides: list[str], updates: int) -> dict[str, float]:
    """Measure in fresh processes; each value is the largest of any process. Exits if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.adapters", f"--measure={folder}", f"--updates={updates}"]
        done = subprocess.run(
            [*command, f"local_run_dir={folder}/run", *overrides], capture_output=True, text=True, check=False
        )
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if done.returncode:
        sys.exit(f"{' '.join(overrides)}: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def train_adapter(overrides: list[str], run_dir: Path) -> Path:
    """Train an SFT adapter for one update."""
    own = [o for o in overrides if not o.startswith(("loss", "trainer", "world_size", "lora.reference"))]
    config = compose(
        [*COMMON, f"local_run_dir={run_dir}", *own, "loss=sft", "lora=lora", "debug=false", "export=false"]
    )
    config.n_examples = config.batch_size
    train.work(0, 1, config)
    return run_dir / "LATEST"


COLUMNS = {"wall": "s", "cpu": "s", "peak": "GB", "grown": "GB"}


def print_row(name: str, rows: list[dict[str, float]], first: list[dict[str, float]]) -> None:
    cells = []
    for key, unit in COLUMNS.items():
        value, before = (median(row[key] for row in r) for r in (rows, first))
        cells += [f"{value:.2f} {unit}", f"{value / before:.0%}"]
    print(f"{name:38}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=3, help="number of counted updates")
    parser.add_argument("--rounds", type=int, default=1, help="how often each row is measured")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.measure:
        config = compose([*COMMON, *overrides])
        plan = resolve(config)
        own = (config, arguments.measure, arguments.updates)
        launch(measure, plan.dims.world_size, *own, process_group=plan.trainer.multi_process)
        return
    with tempfile.TemporaryDirectory() as folder:
        adapter = train_adapter(overrides, Path(folder) / "sft")
        rows = {(name, processes): [] for processes in PROCESSES for name in SETTINGS}
        for _ in range(arguments.rounds):
            for (name, processes), found in rows.items():
                own = [override.format(adapter=adapter) for override in SETTINGS[name]]
                found.append(run_setting([*overrides, *own, *PROCESSES[processes]], arguments.updates))
                print(f"measured {name}, {processes}: {found[-1]}", file=sys.stderr, flush=True)
    print(" " * 38 + "".join(f"{title:>10}{'of first':>10}" for title in COLUMNS))
    for (name, processes), found in rows.items():
        print_row(f"{name}, {processes}", found, rows["lora=none", processes])


if __name__ == "__main__":
    set_allocators(os.environ)
    main()
