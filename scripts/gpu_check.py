"""The acceptance run on a GPU, in at most 10 minutes: 11 checks, the most valuable first, on models made here.

    python -m scripts.gpu_check [--quick] [--only NAME,NAME] [--json]

Each check runs in its own process with a time limit; whatever happens to one, the others run. Without a GPU, checks
that make sense on a CPU run small, and the others report that they were skipped. Exit status: 1 if a check failed, else
0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scripts.gpu_checks.common import Setting
from scripts.gpu_checks.jobs import Job
from scripts.gpu_checks.table import BUDGET, CHECKS, Check
from scripts.probes import ChildError, ask

SLOWER = 4  # factor on time limits without a GPU: several checks share few cores with other work
STATES = ("passed", "failed", "skipped")


class Result(NamedTuple):
    """Result of a check. `figure` has it in words, `details` in numbers; `log` is the log's end without a verdict."""

    number: int
    name: str
    title: str
    state: str
    seconds: float
    figure: str
    details: Mapping[str, Any]
    log: str


def run_checks(
    checks: Mapping[str, Check], setting: Setting, *, at_once: int = 1, budget: float = BUDGET
) -> Iterator[Result]:
    """Run checks, and yield results in their order, each once it and all before it are done.

    Checks start in that order, up to `at_once` at a time; on a GPU some run alone.
    """
    deadline = time.monotonic() + budget
    waiting, running, done = list(checks), {}, {}
    order = list(checks)
    try:
        while order:
            while waiting and may_start(waiting[0], running, checks, setting, at_once):
                name = waiting.pop(0)
                folder = Path(setting.folder) / name
                folder.mkdir()
                limit = min(checks[name].limit, deadline - time.monotonic())
                running[name] = Job(checks[name].run, setting._replace(folder=str(folder)), limit=limit)
            for name in [name for name, job in running.items() if job.is_over()]:
                done[name] = running.pop(name).result()
            while order and order[0] in done:
                name = order.pop(0)
                yield Result([*CHECKS, *checks].index(name) + 1, name, checks[name].title, **done[name])
            time.sleep(0.05)
    finally:
        for job in running.values():
            job.end()


def may_start(name: str, running: Mapping[str, Job], checks: Mapping[str, Check], setting: Setting, most: int) -> bool:
    alone = setting.gpu and any(checks[other].alone for other in (name, *running))
    return len(running) < (1 if alone else most)


def as_text(result: Result) -> str:
    """Format a result in lines of at most 120 columns."""
    head = f"{result.number:>2} {result.name:<10} {result.state:<8}{result.seconds:>5.0f} s  "
    lines = textwrap.wrap(head + result.figure, 120, subsequent_indent=" " * len(head), break_on_hyphens=False)
    for line in result.details.get("lines", ()):
        lines += textwrap.wrap(f"    {line}", 120, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join([*lines, *(f"    | {line}".rstrip() for line in result.log.splitlines())])


def describe_machine(gpu: bool) -> dict[str, str]:
    import platform

    import torch
    import transformers

    try:
        devices = ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").strip()
    except ChildError as error:
        devices = f"unknown: nvidia-smi: {error}"
    return {
        "device": devices if gpu else f"none but {len(os.sched_getaffinity(0))} CPU cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def import_all() -> None:
    """Import the checks' modules before they are forked from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny
    import datasets  # noqa: F401
    import hydra  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401

    import dpo.checkpoint.resume  # noqa: F401
    import train  # noqa: F401
    import trainers  # noqa: F401

    torch.set_num_threads(1)


def at_once(gpu: bool) -> int:
    """Number of checks at a time: on a GPU, of those that do not measure time or memory; on a CPU, they mostly wait."""
    return max(1, min(3, len(os.sched_getaffinity(0)) // 4)) if gpu else 4


def choose(parser: argparse.ArgumentParser, only: str | None) -> dict[str, Check]:
    names = only.split(",") if only else [*CHECKS]
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"--only: unknown checks {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    return {name: check for name, check in CHECKS.items() if name in names}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer models, shapes and updates")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    arguments = parser.parse_args()
    checks = choose(parser, arguments.only)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled")
    import torch

    gpu = torch.cuda.device_count() > 0
    if not gpu:
        import_all()
        checks = {name: check._replace(limit=SLOWER * check.limit) for name, check in checks.items()}
    machine, results = describe_machine(gpu), []
    if not arguments.json:
        print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        setting = Setting(gpu=gpu, quick=arguments.quick, folder=folder)
        for result in run_checks(checks, setting, at_once=at_once(gpu), budget=BUDGET if gpu else SLOWER * BUDGET):
            results.append(result)
            if not arguments.json:
                print(as_text(result), flush=True)
    counts = {state: sum(result.state == state for result in results) for state in STATES}
    if arguments.json:
        print(json.dumps({**machine, **counts, "checks": [result._asdict() for result in results]}, indent=2))
    else:
        print(", ".join(f"{n} {state}" for state, n in counts.items()))
        if not gpu:
            print("torch sees no GPU: checks that passed on this CPU say little about one")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
