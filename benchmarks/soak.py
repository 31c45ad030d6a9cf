"""Kill runs at random moments, and compare them with an uninterrupted one.

    python -m benchmarks.soak model.name_or_path=DIR [--kills 50] [--seed 0] [overrides of train.py ...]

A kill is a SIGKILL of the run or of one of its two ranks: some time after the start, during training or during a save.
The seed decides on victim and moment. Then the run is continued with `resume=auto`. Runs are started until the number
of kills is reached. The benchmark counts lost runs, which could not be resumed, and runs that differ from an
uninterrupted one in a metric, or in a bit of weights, optimizer state or counters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dpo.checkpoint.files import find_checkpoints, read_state

ROOT = Path(__file__).resolve().parents[1]
WALL_CLOCK = (  # metrics that differ between equal runs
    "examples_per_second", "tokens_per_second", "memory/peak_gb", "online/sampling_share", "online/scoring_share",
    "online/seconds_per_token",
)  # fmt: skip
TRAINERS = {"BasicTrainer": (), "FSDPTrainer": ("trainer=FSDPTrainer", "world_size=2")}


# --- comparing two runs ----------------------------------------------------------------------------------------------


def read_log(run_dir: Path) -> list[dict]:
    """Read the lines of `metrics.jsonl` without values that depend on time."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in WALL_CLOCK} for line in lines]


def find_differences(expected: Path, actual: Path) -> list[str]:
    """List the bitwise differences between the directories of two complete runs."""
    differences = [] if read_log(expected) == read_log(actual) else ["metrics.jsonl"]
    for name in ("samples.jsonl", "samples.txt"):
        if _read_text(expected / name) != _read_text(actual / name):
            differences.append(name)
    expected_last, *_ = find_checkpoints(expected)  # newest first
    actual_last, *_ = find_checkpoints(actual)
    if expected_last.name != actual_last.name:
        return [*differences, f"the last checkpoint is {expected_last.name} and {actual_last.name}"]
    for part in sorted(path.name for path in expected_last.glob("*.pt")):
        keys = _find_unequal_keys(read_state(expected_last / part), read_state(actual_last / part))
        differences += [f"{part.removesuffix('.pt')}{key}" for key in keys]
    for link in ("LATEST", "BEST"):
        if os.readlink(expected / link) != os.readlink(actual / link):
            differences.append(link)
    return differences


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _find_unequal_keys(a: Any, b: Any, key: str = "") -> list[str]:
    """Find the dotted keys at which two nested states differ.

    The sizes of logs do not count: they depend on the digits of times.
    """
    if key.endswith(".log_bytes"):
        return []
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return [key]
        both_nan = (a != a) & (b != b)
        return [] if ((a == b) | both_nan).all() else [key]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        names = [*a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        names = [*range(len(a))]
    else:
        return [] if repr(a) == repr(b) else [key]
    return [unequal for name in names for unequal in _find_unequal_keys(a[name], b[name], f"{key}.{name}")]


# --- killing a run ---------------------------------------------------------------------------------------------------


def find_workers(parent: int) -> list[int]:
    """List the process ids of the ranks that a run has started."""
    workers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # the fields after the name: state, parent, ...
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"spawn_main" in (folder / "cmdline").read_bytes():
                workers.append(int(folder.name))
    return workers


def start(overrides: list[str], run_dir: Path) -> subprocess.Popen:
    # without W&B, as its ids differ between runs and are in checkpoints
    overrides = ["wandb.enabled=false", *overrides, f"local_run_dir={run_dir}", "resume=auto"]
    command = [sys.executable, "train.py", *overrides]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def kill_at_random(process: subprocess.Popen, run_dir: Path, draw: random.Random) -> str | None:
    """Kill a run or one of its ranks at a random moment.

    Returns a description of the kill, or None if the run ended before.
    """

    def count_lines() -> int:
        log = run_dir / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def count_saved_files() -> int:
        with contextlib.suppress(FileNotFoundError):  # the save has just been completed
            return max((len([*folder.iterdir()]) for folder in run_dir.glob(".step-*.tmp")), default=0)
        return 0

    n_lines = count_lines()
    phase = draw.choice(("update", "save", "start"))
    n_files = draw.randrange(1, 7)
    delays = {"update": draw.uniform(0, 2), "save": 0, "start": draw.uniform(0, 8)}  # seconds, once the phase has begun
    has_begun = {
        "update": lambda: count_lines() != n_lines,
        "save": lambda: count_saved_files() >= n_files,
        "start": lambda: True,
    }
    while process.poll() is None and not has_begun[phase]():
        time.sleep(0.002)  # a save of a tiny model is short
    time.sleep(delays[phase])
    if process.poll() is not None:
        return None
    victim = draw.choice([process.pid, *find_workers(process.pid)])
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return None
    process.wait()
    if process.returncode == 0:  # a worker was killed after it had finished
        return None
    process.stderr.close()
    return f"kills ({phase}, {'a rank' if victim != process.pid else 'the run'})"


def soak(uninterrupted: Path, run_dir: Path, overrides: list[str], kills: int, draw: random.Random) -> Counter[str]:
    """Kill a run up to `kills` times, let it complete, and compare."""
    tally = Counter(runs=1)
    process = start(overrides, run_dir)
    while count_kills(tally) < kills and (kill := kill_at_random(process, run_dir, draw)):
        tally[kill] += 1
        process = start(overrides, run_dir)
    _, errors = process.communicate()
    if process.returncode:
        tally["lost"] += 1
        print(f"LOST {run_dir}: {errors[:5000]}", flush=True)
    elif differences := find_differences(uninterrupted, run_dir):
        tally["different"] += 1
        print(f"DIFFERENT {run_dir}: {differences[:10]}", flush=True)
    return tally


def count_kills(tally: Counter[str]) -> int:
    return sum(count for event, count in tally.items() if event.startswith("kills"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="total number of kills")
    parser.add_argument("--seed", type=int, default=0)
    options, overrides = parser.parse_known_args()
    draw, total = random.Random(options.seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        for n_trainers, (trainer, trainer_overrides) in enumerate(TRAINERS.items(), start=1):
            settings = [*overrides, *trainer_overrides, f"exp_name=soak_{trainer}"]
            uninterrupted = Path(folder, trainer)
            process = start(settings, uninterrupted)
            _, errors = process.communicate()
            if process.returncode:
                sys.exit(f"the uninterrupted run failed:\n{errors}")
            # kills of this trainer and those before it, with equal shares
            n_wanted = options.kills * n_trainers // len(TRAINERS)
            while (n_left := n_wanted - count_kills(total)) > 0:
                run_dir = Path(folder, f"{trainer}-{total['runs']}")
                total += soak(uninterrupted, run_dir, settings, min(5, n_left), draw)
                print(f"{trainer}: {dict(total)}", flush=True)
    print(
        f"{count_kills(total)} kills in {total['runs']} runs: {total['lost']} lost, {total['different']} different; "
        + ", ".join(f"{count} {event}" for event, count in sorted(total.items()) if event.startswith("kills"))
    )
    sys.exit(1 if total["lost"] or total["different"] else 0)


if __name__ == "__main__":
    main()
