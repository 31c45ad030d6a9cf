"""Shared by the checks: their setting, their outcome, runs of the command line, and the real loop in-process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from scripts.gpu_checks.start import start

ROOT = Path(__file__).resolve().parents[2]
WORDS = ROOT / "tests" / "golden" / "words"
TINY = ROOT / "tests" / "golden" / "tiny-llama"
Choice = TypeVar("Choice")


class Skipped(Exception):
    """The check cannot run here; the message is one sentence that says why."""


class CheckFailed(Exception):
    """The check failed before it could measure; the message is one sentence."""


class Outcome(NamedTuple):
    """The result of a check: its verdict, its figure in words, and the numbers (`lines` are printed too).

    A verdict of None: it ran small without a GPU, which only shows that it runs.
    """

    passed: bool | None
    figure: str
    details: dict[str, Any]


class Setting(NamedTuple):
    """Where a check runs: on a GPU or small on the CPU, in which folder."""

    gpu: bool
    quick: bool
    folder: str

    def pick(self, full: Choice, quick: Choice, small: Choice) -> Choice:
        """The value for this run's size; `small` is for a CPU."""
        return (quick if self.quick else full) if self.gpu else small

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"


# --- processes beside a check ----------------------------------------------------------------------------------------


class Process:
    """A command that runs in the background of its check, its output in `NAME.log`. Without a GPU `work` is called
    instead, in a process forked from this one, because the imports of a fresh one would take most of the time."""

    def __init__(
        self,
        setting: Setting,
        name: str,
        command: Sequence[str],
        *,
        work: Callable[[], object] | None = None,
        **environment: str,
    ) -> None:
        self.name, self.directory = name, Path(setting.folder) / name
        self.log = Path(setting.folder) / f"{name}.log"
        self.process: Any
        if work is not None and not setting.gpu:
            self.process = get_context("fork").Process(target=_work_forked, args=(work, self.log, environment))
            self.process.start()
            return
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return find_status(self.process)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, limit: float = 600) -> int | None:
        """The exit status; None, with the process killed, if it takes longer than `limit` seconds."""
        deadline = time.monotonic() + limit
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.02)
        status = self.status
        if status is None:
            self.signal(signal.SIGKILL)
        return status

    def done(self) -> Self:
        """Wait for it and return it. Raises CheckFailed if it failed."""
        status = self.wait()
        if status != 0:
            print(self.text()[-3000:], flush=True)  # into the check's own log
            raise CheckFailed(f"{self.name} ended with status {status}: {self.last_line()}")
        return self

    def last_line(self) -> str:
        lines = [line for line in self.text().splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "no output"

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


class Run(Process):
    """`python train.py OVERRIDES`; its process first calls the function `first` of the checks, if given."""

    def __init__(
        self, setting: Setting, name: str, *overrides: str, first: str | None = None, **environment: str
    ) -> None:
        fixed = (f"local_run_dir={setting.folder}/{name}", f"local_dirs=[{setting.folder}]", f"exp_name={name}")
        arguments = [*fixed, "wandb.enabled=false", *overrides]
        script = ["-m", "scripts.gpu_checks.start", first] if first else [str(ROOT / "train.py")]
        command, work = [sys.executable, *script, *arguments], partial(start, first, arguments)
        super().__init__(setting, name, command, work=work, **environment)

    def records(self, file: str = "metrics.jsonl", split: str | None = None) -> list[dict]:
        """The complete lines of a log of the run, of one split if given."""
        path = self.directory / file
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [line for line in found if split in (None, line.get("split"))]


def find_status(process: subprocess.Popen | BaseProcess) -> int | None:
    """The exit status of either kind of process, negative for a signal; None while it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _work_forked(work: Callable[[], object], log: Path, environment: Mapping[str, str]) -> None:
    redirect(log)
    os.environ.update(environment)
    work()


def redirect(log: Path) -> None:
    """Redirect all output of this process to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)


def few_words(setting: Setting, n: int) -> Path:
    """The first `n` pairs of the golden runs' data, as a dataset of its own; its directory."""
    directory = Path(setting.folder) / f"words-{n}"
    directory.mkdir(exist_ok=True)
    for file in ("train.jsonl", "test.jsonl"):
        lines = (WORDS / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (directory / file).write_text("".join(lines[:n]), encoding="utf-8")
    return directory


# --- the real loop in this process -----------------------------------------------------------------------------------


def train_here(setting: Setting, name: str, base: str, watch: Callable[[type], type], *overrides: str) -> None:
    """`train.work` in this process; `watch` turns the trainer class of that name into one that the check observes."""
    import torch.distributed as dist

    import train
    from benchmarks.step_overhead import compose
    from dpo.system.launching import _backend
    from dpo.system.process_group import init_distributed
    from trainers import TRAINERS

    directory, original = Path(setting.folder) / name, TRAINERS[base]
    config = compose([f"local_run_dir={directory}", f"local_dirs=[{setting.folder}]", f"trainer={base}", *overrides])
    if original.spec.multi_process and not dist.is_initialized():
        init_distributed(0, 1, backend=_backend(0), store=dist.FileStore(f"{directory}.store", 1))
    TRAINERS[base] = watch(original)
    try:
        train.work(0, 1, config)
    finally:
        TRAINERS[base] = original


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def measure_seconds(device: str, action: Callable[[], Any]) -> float:
    """The seconds that an action takes, including the device's work."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def prepare_torch(*, compiles: bool = False) -> None:
    """Apply the settings that `train.py` applies at its start."""
    from dpo.system.arithmetic import set_up_torch

    set_up_torch(deterministic=False, compiles=compiles)
