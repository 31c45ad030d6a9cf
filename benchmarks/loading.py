"""Peak host memory of rank 0 while models load, beside what stays.

    python -m benchmarks.loading model.name_or_path=DIR [overrides of train.py ...]

A run of one update writes an archive and a checkpoint. Then fresh processes load as a run does: without an archive,
with one, and resumed, with each trainer. The measurement starts when the data is loaded and ends before training.

Only anonymous pages are counted (RssAnon in /proc/PID/status). VmHWM would include pages of mapped files, which the
system reads on demand and reclaims when memory is short. RssAnon has no high-water mark, so the benchmark reads RssAnon
every millisecond.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import preference_datasets
import train
from benchmarks.harness import ROOT, measure_afresh, print_row, run_python
from benchmarks.startup import read_memory
from dpo.system.host import release_freed_memory
from trainers import BasicTrainer

COMMON = (
    "loss=dpo", "loss.beta=0.1", "datasets=[demo]", "model.reference_dtype=float32", "batch_size=2",
    "gradient_accumulation_steps=1", "eval_batch_size=2", "n_eval_examples=2", "sample_during_eval=false",
    "max_length=64", "max_prompt_length=32", "self_test=false", "model.block_name=null", "layout=padded",
)  # fmt: skip
TRAINERS = {
    "BasicTrainer": ("trainer=BasicTrainer",),
    "FSDPTrainer, 2 processes": ("trainer=FSDPTrainer", "world_size=2"),
}


def anonymous_memory() -> int:
    """Bytes in this process's anonymous pages, without freed memory."""
    gc.collect()
    release_freed_memory()
    return read_memory("/proc/self/status", "RssAnon")["RssAnon"]


def measure(rank: int, world_size: int, config: Any, marker: str) -> dict[str, int]:
    """Load models as a run does, and measure the memory that stays.

    Returns the bytes of anonymous memory (`loaded`) and of the larger model's weights (`larger`). While models load,
    the file `marker` holds the process id of rank 0, so that `measure_case` can watch rank 0's memory.
    """
    load_data, sizes = preference_datasets.load_data, {}

    def load_data_and_mark(*arguments: Any, **options: Any) -> Any:
        data = load_data(*arguments, **options)
        anonymous_memory()  # frees memory before the measurement
        if rank == 0:
            Path(marker).write_text(str(os.getpid()))
        return data

    def measure_and_end(trainer: BasicTrainer) -> None:
        if rank == 0:
            Path(marker).unlink()
        models = (trainer.policy, trainer.reference_model)
        sizes["larger"] = max(sum(p.numel() * p.element_size() for p in model.parameters()) for model in models)
        sizes["loaded"] = anonymous_memory()

    preference_datasets.load_data, BasicTrainer.train = load_data_and_mark, measure_and_end
    train.work(rank, world_size, config)
    return sizes


def measure_case(settings: list[str], marker: Path) -> tuple[int, dict[str, int]]:
    """Measure rank 0: the peak of its anonymous memory, and `measure`'s sizes."""
    peak = 0

    def watch(_: int) -> None:
        nonlocal peak
        with contextlib.suppress(OSError, ValueError):  # models do not load yet, or no longer
            rank_0 = int(marker.read_text())
            peak = max(peak, read_memory(f"/proc/{rank_0}/status", "RssAnon")["RssAnon"])

    sizes, *_ = measure_afresh("loading:measure", settings, str(marker), watch=watch, every=0.001)
    return peak, sizes


def main(overrides: list[str]) -> None:
    print_row("", ["peak", "loaded", "excess", "/ larger"], first=48, width=10)
    with tempfile.TemporaryDirectory() as folder:
        common = [*COMMON, *overrides]
        first = ("n_examples=2", "do_first_eval=false", "exp_name=loading", "wandb.enabled=false",
                 f"local_run_dir={folder}/first", f"local_dirs=[{folder}]")  # fmt: skip
        run_python(str(ROOT / "train.py"), *common, *first)
        cases = {
            "without archive": (),
            "with archive": (f"model.archive={folder}/first/LATEST",),
            "resumed": (f"resume={folder}/first/LATEST",),
        }
        for name, trainer in TRAINERS.items():
            for case, case_overrides in cases.items():
                settings = [*common, "n_examples=4", *trainer, *case_overrides]
                peak, sizes = measure_case(settings, Path(folder, "loading"))
                excess = peak - sizes["loaded"]
                cells = [f"{n_bytes / 1e6:.0f} MB" for n_bytes in (peak, sizes["loaded"], excess)]
                print_row(f"{name:28}{case:20}", [*cells, f"{excess / sizes['larger']:.2f}"], first=48, width=10)


if __name__ == "__main__":
    main(sys.argv[1:])
