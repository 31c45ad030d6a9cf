"""The frontier of reward against KL, where the optimum is known.

    python -m experiments.frontier [--quick] [--task N] [--out DIR] [OVERRIDES OF train.py ...]
    python -m experiments.frontier --read FILE ...

This is figure 2 (left) of the DPO paper on a task of its own, which docs/frontier.md describes. After SFT every method
of `methods.py` is trained with several betas and seeds. Expected true reward and KL(policy || reference) of each policy
are computed by enumeration, and compared with those of pi*.

Writes `frontier.json` (a row for each policy) and `frontier.png` to DIR (.cache/frontier), and prints tables; --read
only prints the tables of such files. --quick has one seed on two fifths of the pairs. The same command continues a
sweep that was stopped. With `trainer=FSDPTrainer world_size=2` each run of train.py has two processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dpo.settings.command_line import check_command_line
from experiments.frontier.jobs import run_command, write_rows
from experiments.frontier.reading import make_tables
from experiments.frontier.sweep import Size, Sweep, list_runs
from experiments.frontier.task import Task

CACHE = Path(__file__).resolve().parents[2] / ".cache"
PAPER = Size(pairs=2496, sft_epochs=12, seeds=(0, 1, 2))
QUICK = Size(pairs=1024, sft_epochs=4, seeds=(0,), most_passes=2)


def run_sweep(sweep: Sweep) -> None:
    """Make all runs, write rows and a picture, and print tables."""
    from experiments.frontier.picture import draw

    out = sweep.out
    out.mkdir(parents=True, exist_ok=True)
    sweep.train_reference()
    sweep.write_preferences()
    rows = sweep.list_known() + sweep.train_all(list_runs(sweep.size))
    write_rows(out / "frontier.json", rows)
    draw(rows, out / "frontier.png")
    print(f"{make_tables(rows)}\n\nwritten to {out}")


def read_tables(files: Sequence[Path]) -> str:
    """Read the rows of several sweeps, and return their tables as Markdown."""
    rows = []
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8")):
            # In earlier sweeps responses could have free length too.
            if row.get("fixed_length", True):
                rows.append(row)
    return make_tables(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.frontier", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller: one seed, two fifths of the pairs")
    parser.add_argument("--task", type=int, default=0, metavar="N", help="a task with other rewards and prompts")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: .cache/frontier or .cache/frontier-quick")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="only print the tables of these files")
    parser.add_argument("overrides", nargs="*", help="of train.py, such as trainer=FSDPTrainer world_size=2")
    options = parser.parse_intermixed_args(arguments)
    if options.read:
        return run_command(lambda: print(read_tables(options.read)))
    check_command_line(["exp_name=experiment", "model.name_or_path=MODEL", *options.overrides])  # exits if it refuses
    if options.quick:
        size = QUICK
        task = Task(seed=options.task, held_out=100)
        out = CACHE / "frontier-quick"
    else:
        size = PAPER
        task = Task(seed=options.task)
        out = CACHE / "frontier"
    out = (options.out or out).expanduser().resolve()
    sweep = Sweep(out, task, size, options.overrides)
    return run_command(lambda: run_sweep(sweep))


if __name__ == "__main__":
    sys.exit(main())
