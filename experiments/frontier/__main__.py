"""The frontier of reward against KL, where the optimum is known.

    python -m experiments.frontier [--quick | --night] [--out DIR] [OVERRIDES OF train.py ...]

This is figure 2 (left) of the DPO paper on a task of its own, which docs/frontier.md describes. After SFT every method
of `methods.py` is trained with several betas and seeds. Expected true reward and KL(policy || reference) of each policy
are computed by enumeration, and compared with pi* and best-of-N.

Writes `frontier.json` (a row for each policy), `frontier.png` and `frontier-dark.png` to DIR (.cache/frontier), and
prints tables. The default has the paper's comparison with three seeds; --night all methods with ten seeds on each of
five tasks; --quick one seed on two fifths of the pairs. The same command continues a sweep that was stopped.
With `trainer=FSDPTrainer world_size=2` each run of train.py has two processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.frontier.jobs import Row, check_overrides, run_command, write_rows, write_whole
from experiments.frontier.methods import NOISE
from experiments.frontier.sweep import Size, Sweep, list_runs, list_tuning_runs
from experiments.frontier.task import Task

OUT = Path(__file__).resolve().parents[2] / ".cache" / "frontier"
SIZES = {
    "default": Size(pairs=2496, sft_epochs=12, seeds=(0, 1, 2), core=True),
    "night": Size(pairs=2496, sft_epochs=12, seeds=tuple(range(10)), tasks=tuple(range(5)), course=True),
    "quick": Size(pairs=1024, sft_epochs=4, seeds=(0,), core=True, most_passes=2, course=True),
    "tune": Size(pairs=2496, sft_epochs=12, seeds=(100,)),  # a seed that no other run uses
}
QUICKLY_MEASURED = 100  # held-out prompts of --quick
RATES = (5e-4, 1e-3, 2e-3, 4e-3)  # learning rates that --tune tries
PASSES = (1, 2, 4)  # over the pairs, each tried with each rate


def run_sweeps(
    out: Path,
    tasks: Sequence[Task],
    size: Size,
    overrides: Sequence[str],
    *,
    noise: float,
    settings: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Make all runs, write rows and pictures, and print tables."""
    from experiments.frontier.picture import draw
    from experiments.frontier.reading import tables

    rows: list[Row] = []
    for task in tasks:
        sweep = Sweep(out / "frontier-runs" / task.name, task, size, overrides)
        wanted = list_runs(size, task, noise, settings)
        sweep.train_reference()
        sweep.write_preferences(wanted)
        rows += sweep.list_known() + sweep.train_all(wanted)
        write_rows(out / "frontier.json", rows)  # after each task, as --night takes long
    for name, dark in (("frontier.png", False), ("frontier-dark.png", True)):
        (out / name).write_bytes(draw(rows, dark=dark))
    print("\n\n".join(tables(rows)))


def tune(out: Path, size: Size, overrides: Sequence[str]) -> None:
    """Try learning rates and passes for each method, and write the best."""
    from experiments.frontier.reading import choose_settings, format_trials

    sweep = Sweep(out / "frontier-runs" / "tune", Task(), size, overrides, tuning=True)
    wanted = list_tuning_runs(size, RATES, PASSES)
    sweep.train_reference()
    sweep.write_preferences(wanted)
    rows = sweep.list_known() + sweep.train_all(wanted)
    write_rows(out / "trials.json", rows)
    write_whole(out / "settings.json", json.dumps(choose_settings(rows), indent=1) + "\n")
    print(format_trials(rows))


def read_tables(files: Sequence[Path]) -> str:
    """Read the rows of sweeps, and make their tables."""
    from experiments.frontier.reading import tables

    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    return "\n\n".join(tables(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.frontier", description=__doc__.split("\n")[0])
    sizes = parser.add_mutually_exclusive_group()
    for option, description in (
        ("--quick", "smaller: one seed, two fifths of the pairs"),
        ("--night", "larger: all methods, ten seeds on each of five tasks"),
        ("--tune", "only try learning rates and passes, and write the best to settings.json"),
    ):
        sizes.add_argument(option, dest="size", action="store_const", const=option.strip("-"), help=description)
    parser.set_defaults(size="default")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: .cache/frontier, or .cache/frontier-quick, -night or -tune)",
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="learning rates and passes that --tune wrote")
    parser.add_argument(
        "--label-noise",
        type=float,
        default=NOISE,
        metavar="P",
        help=f"the share of labels that is flipped in the noisy runs (default: {NOISE}); 0 leaves these runs out",
    )
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="only print the tables of these files")
    parser.add_argument("overrides", nargs="*", help="of train.py, such as trainer=FSDPTrainer world_size=2")
    options = parser.parse_intermixed_args(arguments)
    if not 0 <= options.label_noise < 0.5:
        parser.error(f"--label-noise {options.label_noise} must be in [0, 0.5): at 0.5 labels say nothing")
    check_overrides(options.overrides)
    default_out = OUT if options.size == "default" else OUT.with_name(f"{OUT.name}-{options.size}")
    out = (options.out or default_out).expanduser().resolve()
    if options.read:
        return run_command(lambda: print(read_tables(options.read)))
    return run_command(lambda: run(out, options), out)


def run(out: Path, options: argparse.Namespace) -> None:
    """Run the sweep or the tuning that the options ask for."""
    size = SIZES[options.size]
    out.mkdir(parents=True, exist_ok=True)
    if options.size == "tune":
        tune(out, size, options.overrides)
        return
    held_out = QUICKLY_MEASURED if options.size == "quick" else Task.held_out
    tasks = [
        Task(seed=seed, fixed_length=fixed_length, held_out=held_out)
        for seed in size.tasks
        for fixed_length in (True, False)
    ]
    settings = json.loads(options.settings.read_text(encoding="utf-8")) if options.settings else None
    run_sweeps(out, tasks, size, options.overrides, noise=options.label_noise, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
