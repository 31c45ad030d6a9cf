"""Time, communication and host memory of an update: one process, FSDP on two, tensor parallelism on two.

    python -m benchmarks.distributed model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR loss=dpo ...

Takes the overrides of train.py (W&B is off). Each mesh runs the same updates in a fresh process tree, after one warm-up
update. On a CPU only the ratios are meaningful: the processes share the cores. Meshes that the model or the machine
does not support are printed with the reason.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import train
from benchmarks.step_overhead import compose
from dpo.models.loading import model_loaders
from dpo.settings.plan import resolve
from dpo.system.launching import launch

LAYOUTS = {
    "one process": (),
    "FSDPTrainer, 1 process": ("trainer=FSDPTrainer", "world_size=1"),
    "FSDPTrainer, 2 processes": ("trainer=FSDPTrainer", "world_size=2"),
    "TensorParallelTrainer, 2 processes": ("trainer=TensorParallelTrainer", "world_size=2"),
}
UPDATES = 4  # the first is a warm-up


def count_collectives(profile: Any) -> dict[str, float]:
    """Count the collectives, the tensor elements that they send, and the seconds in them, including waiting."""
    events = [event for event in profile.events() if event.name.startswith(("gloo:", "nccl:"))]
    return {
        "collectives": len(events),
        "elements": sum(math.prod(event.input_shapes[0]) for event in events if event.input_shapes),
        "seconds_in_them": sum(event.cpu_time_total for event in events) / 1e6,
    }


def measure(rank: int, world_size: int, config: Any, result: Path) -> None:
    """Run a few updates in this process; rank 0 writes the seconds and collectives of one update."""
    plan = resolve(config, world_size=world_size)
    policy, reference = model_loaders(plan, rank=rank)
    run_dir = Path(config.local_run_dir)
    trainer = train.find_trainer(plan)(policy, config, config.seed, run_dir, reference, rank, world_size)
    batches, seconds = iter(trainer.train_iterator), []
    for _ in range(UPDATES):
        start = time.perf_counter()
        trainer.train_step(next(batches))
        seconds.append(time.perf_counter() - start)
    with torch.profiler.profile(record_shapes=True) as profile:
        trainer.train_step(next(batches))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if rank == 0:
        facts = {"seconds": median(seconds[1:]), **count_collectives(profile), "cuda_bytes": peak}
        result.write_text(json.dumps(facts))


def measure_tree_memory(pid: int) -> int:
    """Memory of a process and its descendants in bytes, counting shared memory once (PSS)."""
    try:
        fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        own = int(fields["Pss"].split()[0]) * 1024
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:  # it has just ended
        return 0
    return own + sum(measure_tree_memory(child) for child in children)


def run_layout(overrides: list[str]) -> dict[str, Any] | str:
    """Measure a fresh process tree, with its peak host memory, or return the reason of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.distributed", "--measure", str(result)]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen([*command, f"local_run_dir={folder}", *overrides], stdout=log, stderr=log)
            peak = 0
            while process.poll() is None:
                peak = max(peak, measure_tree_memory(process.pid))
                time.sleep(0.05)
            log.seek(0)
            if process.returncode:
                return log.read().strip().splitlines()[-1]
        return {**json.loads(result.read_text()), "host_bytes": peak}


def main(overrides: list[str]) -> None:
    columns = ("update", "ratio", "collectives", "elements", "time in them", "host memory", "ratio", "CUDA")
    print(" " * 36 + "".join(f"{column:>13}" for column in columns))
    first: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        facts = run_layout([*overrides, *layout])
        if isinstance(facts, str):
            print(f"{name:36}  {facts}")
            continue
        first = first or facts
        cells = (
            f"{facts['seconds']:.2f} s",
            f"{facts['seconds'] / first['seconds']:.2f}",
            f"{facts['collectives']}",
            f"{facts['elements'] / 1e6:.1f} M",
            f"{facts['seconds_in_them']:.2f} s",
            f"{facts['host_bytes'] / 1e9:.2f} GB",
            f"{facts['host_bytes'] / first['host_bytes']:.2f}",
            "" if facts["cuda_bytes"] is None else f"{facts['cuda_bytes'] / 1e9:.2f} GB",
        )
        print(f"{name:36}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        config = compose(sys.argv[3:])
        plan = resolve(config)
        arguments = (plan.dims.world_size, config, Path(sys.argv[2]))
        launch(measure, *arguments, process_group=plan.trainer.multi_process)
    else:
        main(sys.argv[1:])
