"""Peak host memory of rank 0 while models are loaded, in excess of the memory still in use afterwards.

    python -m benchmarks.loading model.name_or_path=DIR [overrides of train.py ...]

A run of one update writes an archive and a checkpoint. Then fresh processes load as a run does: without an archive,
with one, and resumed, with each trainer. The measurement starts when the data is loaded and ends before training.

Only anonymous pages are counted (RssAnon in /proc/PID/status). VmHWM would include pages of mapped files, which the
system reads on demand and reclaims when memory is short. RssAnon has no high-water mark, so another process reads it
every millisecond.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import preference_datasets
import train
from benchmarks.step_overhead import compose
from dpo.settings.plan import resolve
from dpo.system.launching import launch
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
SAMPLER = """
import sys, threading, time
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), asked.set()), daemon=True).start()
most = 0
print("ready", flush=True)
while not asked.wait(0.001):
    with open(f"/proc/{sys.argv[1]}/status") as file:
        most = max(most, next(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
print(most * 1024)
"""


class Sampler:
    """Recorder of the peak of this process's anonymous memory, from its creation on."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SAMPLER, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process.stdout.readline()

    def stop(self) -> int:
        return int(self._process.communicate()[0])


def anonymous_memory() -> int:
    """Bytes in this process's anonymous pages, without freed memory that its allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measure(rank: int, world_size: int, config: Any, result: Path) -> None:
    """Load models as a run does, without training; rank 0 writes the memory used."""
    load_data, samplers = preference_datasets.load_data, []

    def load_data_and_watch(*arguments: Any, **options: Any) -> Any:
        data = load_data(*arguments, **options)
        anonymous_memory()
        samplers.append(Sampler())
        return data

    def end(trainer: BasicTrainer) -> None:
        most = samplers[0].stop()
        sizes = (sum(p.numel() * p.element_size() for p in m.parameters()) for m in make_models(trainer))
        if rank == 0:
            result.write_text(json.dumps({"most": most, "stays": anonymous_memory(), "larger": max(sizes)}))

    preference_datasets.load_data, BasicTrainer.train = load_data_and_watch, end
    train.work(rank, world_size, config)


def make_models(trainer: BasicTrainer) -> tuple[Any, Any]:
    return trainer.policy, trainer.reference_model


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main(overrides: list[str]) -> None:
    print(f"{'':28}{'':20}{'peak':>10}{'after':>10}{'excess':>10}{'/ larger model':>16}")
    with tempfile.TemporaryDirectory() as folder:
        common = [*COMMON, *overrides, f"local_dirs=[{folder}]", "exp_name=loading", "wandb.enabled=false"]
        root = Path(train.__file__).parent
        run(str(root / "train.py"), *common, "n_examples=2", "do_first_eval=false", f"local_run_dir={folder}/first")
        cases = {
            "without archive": (),
            "with archive": (f"model.archive={folder}/first/LATEST",),
            "resumed": (f"resume={folder}/first/LATEST",),
        }
        for name, trainer in TRAINERS.items():
            for case, given in cases.items():
                result, run_dir = Path(folder) / "result.json", f"local_run_dir={folder}/{case} {name}".replace(",", "")
                more = (run_dir, "n_examples=4", *trainer, *given)
                run("-m", "benchmarks.loading", "--measure", str(result), *common, *more)
                facts = json.loads(result.read_text())
                beyond = facts["most"] - facts["stays"]
                cells = "".join(f"{n / 1e6:7.0f} MB" for n in (facts["most"], facts["stays"], beyond))
                print(f"{name:28}{case:20}{cells}{beyond / facts['larger']:16.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        config = compose(sys.argv[3:])
        plan = resolve(config)
        arguments = (plan.dims.world_size, config, Path(sys.argv[2]))
        launch(measure, *arguments, process_group=plan.trainer.multi_process)
    else:
        main(sys.argv[1:])
