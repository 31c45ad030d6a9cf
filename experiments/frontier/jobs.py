"""Jobs of a sweep: processes, results, and what is continued.

A policy is trained by the command line of train.py, in a process that is forked after all imports, and measured in the
same process.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from dpo.errors import InputError, RunError
from dpo.numbers import duration
from dpo.system.signals import handling_signals

ROOT = Path(__file__).resolve().parents[2]
QUIET = (
    "do_first_eval=false", "sample_during_eval=false", "export=false", "wandb.enabled=false", "num_workers=0",
    "optimizer=AdamW", "schedule=cosine",
)  # fmt: skip
IMPORTED = (
    "datasets", "hydra", "transformers.models.llama", "transformers.trainer_utils", "dpo.checkpoint.resume",
    "dpo.training.memory", "experiments.frontier.plain", "train", "trainers",
)  # fmt: skip
BAD_INPUT = 2  # exit status of train.py
LAST_LINES = 15  # number of lines shown of a failed run's log
OUTPUT = "output.txt"  # in a job's directory: what its process prints
Row = dict[str, Any]


class Job(NamedTuple):
    """A run in `directory`, made by train.py if there are `overrides`."""

    directory: Path
    overrides: tuple[str, ...] = ()

    @property
    def result(self) -> Path:
        """The file that `finish` writes last; with it the job is done."""
        return self.directory / "rows.json"


def import_all() -> None:
    """Import modules before runs are forked from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # every core has a run
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warn of every fork
    from dpo.system.host import silence_bitsandbytes

    silence_bitsandbytes()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


# --- files ------------------------------------------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or absent after a kill."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_whole(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_records(directory: Path, **splits: Sequence[Mapping[str, Any]]) -> None:
    """Write a dataset that train.py reads: a JSON lines file per split."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        write_whole(directory / f"{split}.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def keep_settings(root: Path, settings: Mapping[str, Any]) -> None:
    """Record a sweep's settings in its directory.

    Raises InputError if the directory has runs of other settings.
    """
    written, text = root / "sweep.json", json.dumps(settings, indent=1)
    if written.exists() and written.read_text(encoding="utf-8") != text:
        raise InputError(f"{root} has runs with other settings (sweep.json): remove this folder, or give another --out")
    root.mkdir(parents=True, exist_ok=True)
    write_whole(written, text)


# --- runs -------------------------------------------------------------------------------------------------------------


def run_all(jobs: Sequence[Job], finish: Callable[[Job], None], *, at_once: int) -> Iterator[Job]:
    """Run jobs, `at_once` at a time, and yield each when done.

    Jobs that were done before come first. `finish` is called in the process that trained, and writes `job.result`.

    Raises InputError if train.py refuses its input, RunError if a run fails for another reason.
    """
    yield from (job for job in jobs if job.result.exists())
    waiting = [job for job in jobs if not job.result.exists()]
    running = {}  # a process's sentinel: (job, process)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                # forked: a fresh interpreter would import for longer than a short run trains
                process = get_context("fork").Process(target=_run_job, args=(job, finish))
                process.start()
                running[process.sentinel] = job, process
            for sentinel in wait(running):
                job, process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise _make_error(job, process.exitcode)
                yield job
    finally:
        with handling_signals(signal.SIG_IGN):  # another signal must not leave runs behind
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()


def iterate_rows(
    jobs: Sequence[Job], finish: Callable[[Job], None], describe: Callable[[Job, list[Row]], str], *, name: str
) -> Iterator[tuple[Job, list[Row]]]:
    """Run jobs on all cores, and yield each with its rows.

    A line is printed for each job that was not done before, with the time left.
    """
    started, n_before = time.perf_counter(), sum(job.result.exists() for job in jobs)
    if n_before:
        print(f"{name}: {n_before} of {len(jobs)} runs were done before", flush=True)
    for n_done, job in enumerate(run_all(jobs, finish, at_once=len(os.sched_getaffinity(0))), start=1):
        rows = read_rows(job.result)
        if n_done > n_before:
            secs_left = (time.perf_counter() - started) / (n_done - n_before) * (len(jobs) - n_done)
            text = f"{n_done}/{len(jobs)}  {name} {job.directory.name}: {describe(job, rows)}"
            print(f"{text}  {secs_left:.0f} s left", flush=True)
        yield job, rows


def _make_error(job: Job, status: int) -> Exception:
    lines = (job.directory / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
    text = "\n".join([f"{job.directory.name} ended with status {status}:", *lines[-LAST_LINES:]])
    return InputError(text) if status == BAD_INPUT else RunError(text)


def _run_job(job: Job, finish: Callable[[Job], None]) -> None:
    """Run a job in this process, with its output in `OUTPUT`."""
    if (job.directory / OUTPUT).exists():
        shutil.rmtree(job.directory, ignore_errors=True)  # left by a run that was killed
    job.directory.mkdir(parents=True, exist_ok=True)
    with (job.directory / OUTPUT).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.overrides:
        train_py = str(ROOT / "train.py")
        sys.argv = [train_py, *job.overrides, f"local_run_dir={job.directory}", f"exp_name={job.directory.name}"]
        runpy.run_path(train_py, run_name="__main__")
    print(f"CPU seconds of this process: {time.process_time():.0f} before the policy is measured", flush=True)
    finish(job)
    print(f"{time.process_time():.0f} in all", flush=True)
    for checkpoint in job.directory.glob("step-*"):  # only the records of the run are kept
        shutil.rmtree(checkpoint)


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(command: Callable[[], None], out: Path | None = None) -> int:
    """Run an experiment's command, which writes to `out`; return its exit status.

    Every stop signal ends it as Ctrl-C does, with the processes of its runs.
    """
    started = time.perf_counter()
    try:
        with handling_signals(signal.default_int_handler):
            command()
    except (OSError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if out is not None:
        print(f"\n{duration(time.perf_counter() - started)}; written to {os.path.relpath(out)}")
    return 0


def check_overrides(overrides: Sequence[str]) -> None:
    """Exit, before the first run, if train.py would refuse these overrides."""
    from dpo.settings.command_line import check_command_line

    check_command_line(["exp_name=experiment", "model.name_or_path=MODEL", *overrides])
