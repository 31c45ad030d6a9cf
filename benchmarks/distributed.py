"""Time, communication and host memory of an update: one process, FSDP on two, tensor parallelism on two.

    python -m benchmarks.distributed model.name_or_path=DIR datasets=[hh] dataset_sources.hh=DIR loss=dpo ...

Takes the overrides of train.py (W&B is off). Each mesh runs the same updates in a fresh process tree, after one warm-up
update. On a CPU only the ratios are meaningful: the processes share the cores. Meshes that the model or the machine
does not support are printed with the reason.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Failed, make_trainer, measure_afresh, print_row

MESHES = {
    "one process": (),
    "FSDPTrainer, 1 process": ("trainer=FSDPTrainer", "world_size=1"),
    "FSDPTrainer, 2 processes": ("trainer=FSDPTrainer", "world_size=2"),
    "TensorParallelTrainer, 2 processes": ("trainer=TensorParallelTrainer", "world_size=2"),
}
UPDATES = 4  # the first is a warm-up


def measure(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    """Seconds of an update, and its collectives: their number, elements sent, and seconds in them, waiting too."""
    trainer = make_trainer(config, rank, world_size)
    batches, seconds = iter(trainer.train_iterator), []
    for _ in range(UPDATES):
        start = time.perf_counter()
        trainer.train_step(next(batches))
        seconds.append(time.perf_counter() - start)
    with torch.profiler.profile(record_shapes=True) as profile:
        trainer.train_step(next(batches))
    events = [event for event in profile.events() if event.name.startswith(("gloo:", "nccl:"))]
    return {
        "seconds": median(seconds[1:]),
        "collectives": len(events),
        "elements": sum(math.prod(event.input_shapes[0]) for event in events if event.input_shapes),
        "seconds_in_them": sum(event.cpu_time_total for event in events) / 1e6,
        "cuda_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def measure_tree_memory(pid: int) -> int:
    """Memory of a process and its descendants in bytes, counting shared memory once (PSS)."""
    try:
        fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        own = int(fields["Pss"].split()[0]) * 1024
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:  # it has just ended
        return 0
    return own + sum(measure_tree_memory(child) for child in children)


def main(overrides: list[str]) -> None:
    columns = ("update", "ratio", "collectives", "elements", "time in them", "host memory", "ratio", "CUDA")
    print_row("", columns, first=36)
    first: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        memory = [0]

        def watch(pid: int, memory: list[int] = memory) -> None:
            memory.append(measure_tree_memory(pid))

        try:
            command = ("harness:measure_on_ranks", "distributed:measure", [*overrides, *mesh])
            facts = measure_afresh(*command, watch=watch)[0] | {"host_bytes": max(memory)}
        except Failed as error:
            print(f"{name:36}  {error}")
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
        print_row(name, cells, first=36)


if __name__ == "__main__":
    main(sys.argv[1:])
