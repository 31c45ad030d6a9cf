"""Jobs of a sweep: each trains and measures a policy in a process of its own, which is forked after all imports.

A job writes rows, one for each policy that is measured. After a stop, the same sweep does only the other jobs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from dpo.commands import main
from dpo.errors import InputError, RunError
from dpo.system.signals import handling_signals

IMPORTED = (
    "datasets",
    "hydra",
    "transformers.models.llama",
    "dpo.checkpoint.resume",
    "dpo.training.memory",
    "experiments.frontier.plain",
    "dpo.train",
    "dpo.trainers",
)
BAD_INPUT = 2  # exit status of train.py for a wrong command line or wrong data
OUTPUT = "output.txt"  # in a job's directory: what its process prints
Row = dict[str, Any]


class Job(NamedTuple):
    """A run in `directory`, made by train.py if there are `overrides`."""

    directory: Path
    overrides: tuple[str, ...] = ()

    @property
    def result(self) -> Path:
        """The file of rows that is written last; with it the job is done."""
        return self.directory / "rows.json"


def import_all() -> None:
    """Import what runs need before they are forked from this process, and give each of them one thread on the CPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # every core has a run
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warn of every fork
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or absent after a kill."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a JSON list with a row per line."""
    write_whole(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def run_all(jobs: Sequence[Job], finish: Callable[[Job], list[Row]]) -> Iterator[tuple[Job, list[Row]]]:
    """Run jobs, one per core at a time, and yield each with its rows once it is done.

    `finish(job)` returns a job's rows, and is called in the job's process once train.py has run there. Jobs that were
    done before come first. Raises InputError if train.py refuses its input, RunError if a run fails for another reason.
    """
    done = [job for job in jobs if job.result.exists()]
    waiting = [job for job in jobs if job not in done]
    yield from ((job, _read_rows(job)) for job in done)
    running = {}  # a process's sentinel: (job, process)
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                job = waiting.pop(0)
                # The process is forked: a fresh interpreter would import for longer than a short run trains.
                process = get_context("fork").Process(target=_run_job, args=(job, finish))
                process.start()
                running[process.sentinel] = job, process
            for sentinel in wait(running):
                job, process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    lines = (job.directory / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
                    text = "\n".join([f"{job.directory.name} ended with status {process.exitcode}:", *lines[-15:]])
                    raise (InputError if process.exitcode == BAD_INPUT else RunError)(text)
                n_done = len(jobs) - len(waiting) - len(running)
                print(f"{n_done}/{len(jobs)}  {job.directory.name}", flush=True)
                yield job, _read_rows(job)
    finally:
        with handling_signals(signal.SIG_IGN):  # another signal must not leave runs behind
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()


def _read_rows(job: Job) -> list[Row]:
    return json.loads(job.result.read_text(encoding="utf-8"))


def _run_job(job: Job, finish: Callable[[Job], list[Row]]) -> None:
    """Run a job in this process, which is forked for it: train, write its rows, and print to the file OUTPUT."""
    if (job.directory / OUTPUT).exists():
        shutil.rmtree(job.directory, ignore_errors=True)  # left by a run that was killed
    job.directory.mkdir(parents=True, exist_ok=True)
    with (job.directory / OUTPUT).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.overrides:
        main(["train", *job.overrides, f"local_run_dir={job.directory}", f"exp_name={job.directory.name}"])
    write_rows(job.result, finish(job))
    for checkpoint in job.directory.glob("step-*"):  # only the records of the run are kept
        shutil.rmtree(checkpoint)


def run_command(command: Callable[[], None]) -> int:
    """Run a command, which any stop signal ends as Ctrl-C does; return its exit status."""
    try:
        with handling_signals(signal.default_int_handler):
            command()
    except (OSError, InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else BAD_INPUT
    except KeyboardInterrupt:
        return 130
    return 0
