"""Cross-fitted accuracy on HH, balanced over lengths, and at equal KL.

    python -m experiments.hh --model DIR --pairs FILE [FILE ...] [--quick] [--methods NAMES] [--out DIR]
        [OVERRIDES OF train.py ...]

Each pair is ranked by a policy that was trained on the other folds; pairs with the same first turn are in one fold.
FILE has JSON lines in the form of hh-rlhf, and may be gzipped. docs/language.md describes the design.

Writes `hh.json` (rows of each run's policies, after every run), `hh.png` and `hh-dark.png` to DIR (.cache/hh), and
prints tables. The same command continues an experiment that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.hh.pairs import read_pairs
from experiments.hh.sweep import METHODS, Size, Sweep
from experiments.runs import check_overrides, choose_directory, choose_methods, make_parser, run_command, write_rows

FULL = Size(folds=5, pairs=None, batch=16, kl_prompts=24, kl_tokens=64)
QUICK = Size(folds=1, pairs=60, batch=8, kl_prompts=4, kl_tokens=16)


def run(
    out: Path, model: Path, files: Sequence[Path], size: Size, methods: Sequence[str], overrides: Sequence[str]
) -> None:
    """Make all runs; write rows and pictures after each, and print tables."""
    from experiments.hh.reading import draw, format_tables, make_data

    sweep = Sweep(out / "hh-runs", model, read_pairs(files)[: size.pairs], size, overrides)
    rows = sweep.prepare()
    data = make_data(sweep, rows)
    for run_rows in sweep.train_all(methods):
        rows += run_rows
        write_rows(out / "hh.json", rows)
        for name, dark in (("hh.png", False), ("hh-dark.png", True)):
            (out / name).write_bytes(draw(rows, data, dark=dark))
    print(f"\n{format_tables(rows, data)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("hh", __doc__)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True, metavar="FILE", help="JSON lines of hh-rlhf")
    options = parser.parse_intermixed_args(arguments)
    check_overrides(options.overrides)
    methods = choose_methods(parser, [*METHODS], options.methods)
    out = choose_directory("hh", options)
    model, size = options.model.expanduser().resolve(), QUICK if options.quick else FULL
    return run_command(lambda: run(out, model, options.pairs, size, methods, options.overrides), out)


if __name__ == "__main__":
    sys.exit(main())
