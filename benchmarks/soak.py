"""Kill runs at random moments, and compare them with an uninterrupted one.

    python -m benchmarks.soak model.name_or_path=DIR [--kills 50] [--seed 0] [overrides of train.py ...]

A kill is a SIGKILL of the run or of one of its two ranks, some time after its start, during training or during a save,
drawn from the seed; then the run is resumed with `resume=auto`. Runs are started until the number of kills is reached.
The benchmark counts lost runs (which could not be resumed) and runs that differ in a metric or a bit of weights,
optimizer state or counters.
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
SHARES = ("online/sampling_share", "online/scoring_share")
WALL_CLOCK = ("examples_per_second", "tokens_per_second", "memory/peak_gb", *SHARES)
GRIDS = {"BasicTrainer": (), "FSDPTrainer": ("trainer=FSDPTrainer", "world_size=2")}


# --- comparing two runs ----------------------------------------------------------------------------------------------


def read_log(run_dir: Path) -> list[dict]:
    """Read the lines of `metrics.jsonl` without values that depend on time."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in WALL_CLOCK} for line in lines]


def find_differences(whole: Path, other: Path) -> list[str]:
    """List the bitwise differences between two complete runs."""
    logs = [read_log(run_dir) for run_dir in (whole, other)]
    found = [] if logs[0] == logs[1] else ["metrics.jsonl"]
    for name in ("samples.jsonl", "samples.txt"):
        texts = [path.read_text() if (path := run_dir / name).exists() else None for run_dir in (whole, other)]
        found += [name] if texts[0] != texts[1] else []
    last = [find_checkpoints(run_dir)[0] for run_dir in (whole, other)]
    if last[0].name != last[1].name:
        return [*found, f"the last checkpoint is {last[0].name} and {last[1].name}"]
    for part in sorted(path.name for path in last[0].glob("*.pt")):
        states = [read_state(directory / part) for directory in last]
        found += [f"{part.removesuffix('.pt')}{where}" for where in _unequal(*states)]
    return found + [link for link in ("LATEST", "BEST") if os.readlink(whole / link) != os.readlink(other / link)]


def _unequal(a: Any, b: Any, where: str = "") -> list[str]:
    """Places where two nested states differ.

    The sizes of logs do not count: they depend on the digits of times.
    """
    if where.endswith(".log_bytes"):
        return []
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [place for key in a for place in _unequal(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return [] if alike and ((a == b) | ((a != a) & (b != b))).all() else [where]  # NaN equals NaN
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [place for i, pair in enumerate(zip(a, b, strict=True)) for place in _unequal(*pair, f"{where}.{i}")]
    return [] if repr(a) == repr(b) else [where]


# --- killing a run ---------------------------------------------------------------------------------------------------


def find_workers(parent: int) -> list[int]:
    """Process ids of the ranks that a run has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ancestor = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if ancestor == parent and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def start(overrides: list[str], run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "train.py", *overrides, f"local_run_dir={run_dir}", "resume=auto"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def kill_at_random(process: subprocess.Popen, run_dir: Path, draw: random.Random) -> str | None:
    """Kill a run or one of its ranks at a random moment.

    Returns how, or None if it ended before.
    """

    def count_lines() -> int:
        log = run_dir / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def count_saved() -> int:
        with contextlib.suppress(FileNotFoundError):  # the save has just been completed
            return max((len([*folder.iterdir()]) for folder in run_dir.glob(".step-*.tmp")), default=0)
        return 0

    before, way, n_files = count_lines(), draw.choice(("update", "save", "start")), draw.randrange(1, 7)
    wait = {"update": draw.uniform(0, 2), "save": 0, "start": draw.uniform(0, 8)}[way]
    due = {"update": lambda: count_lines() != before, "save": lambda: count_saved() >= n_files, "start": lambda: True}
    while process.poll() is None and not due[way]():
        time.sleep(0.002)  # a save of a tiny model is short
    time.sleep(wait)
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
    return f"kills ({way}, {'a rank' if victim != process.pid else 'the run'})"


def soak(whole: Path, run_dir: Path, overrides: list[str], kills: int, draw: random.Random) -> Counter[str]:
    """Kill a run up to `kills` times, let it complete, and compare."""
    tally = Counter(runs=1)
    process = start(overrides, run_dir)
    while count_kills(tally) < kills and (how := kill_at_random(process, run_dir, draw)):
        tally[how] += 1
        process = start(overrides, run_dir)
    _, errors = process.communicate()
    if process.returncode:
        tally["lost"] += 1
        print(f"LOST {run_dir}: {errors[:5000]}", flush=True)
    elif found := find_differences(whole, run_dir):
        tally["different"] += 1
        print(f"DIFFERENT {run_dir}: {found[:10]}", flush=True)
    return tally


def count_kills(tally: Counter[str]) -> int:
    return sum(count for what, count in tally.items() if what.startswith("kills"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="total number of kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    draw, total = random.Random(arguments.seed), Counter()
    with tempfile.TemporaryDirectory() as name:
        for number, (trainer, grid) in enumerate(GRIDS.items(), start=1):
            own, whole = [*overrides, *grid, f"exp_name=soak_{trainer}"], Path(name, trainer)
            process = start(own, whole)
            _, errors = process.communicate()
            if process.returncode:
                sys.exit(f"the uninterrupted run failed:\n{errors}")
            while (left := arguments.kills * number // len(GRIDS) - count_kills(total)) > 0:
                total += soak(whole, Path(name, f"{trainer}-{total['runs']}"), own, min(5, left), draw)
                print(f"{trainer}: {dict(total)}", flush=True)
    print(
        f"{count_kills(total)} kills in {total['runs']} runs: {total['lost']} lost, {total['different']} different; "
        + ", ".join(f"{count} {what}" for what, count in sorted(total.items()) if what.startswith("kills"))
    )
    sys.exit(1 if total["lost"] or total["different"] else 0)


if __name__ == "__main__":
    main()
