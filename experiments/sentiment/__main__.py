"""Reward against KL with a known reward of language.

    python -m experiments.sentiment --model DIR [--quick] [--methods NAMES] [--out DIR] [OVERRIDES OF train.py ...]

The true reward is the sentiment of a continuation by VADER's lexicon (pip install vaderSentiment). This reward labels a
language model's own continuations, and DPO, online DPO, IPO and SFT on the chosen train adapters on these labels.
docs/language.md describes the task and the estimates.

Writes `sentiment.json` (a row for each policy, after every run), `sentiment.png` and `sentiment-dark.png` to DIR
(.cache/sentiment), and prints tables. The same command continues an experiment that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.runs import check_overrides, choose_directory, choose_methods, make_parser, run_command, write_rows
from experiments.sentiment.sweep import METHODS, Size, Sweep

FULL = Size(pairs=2000, validation=64, held_out=500, samples=4, reference_samples=16, kl_samples=500, knobs=4)
QUICK = Size(pairs=64, validation=16, held_out=16, samples=2, reference_samples=4, kl_samples=16, knobs=1)


def run(out: Path, sweep: Sweep, methods: Sequence[str]) -> None:
    """Make all runs; write rows and pictures after each, and print tables."""
    from experiments.sentiment.reading import draw, format_tables

    sweep.prepare()
    rows = sweep.list_known()
    for run_rows in sweep.train_all(methods):
        rows += run_rows
        write_rows(out / "sentiment.json", rows)
        for name, dark in (("sentiment.png", False), ("sentiment-dark.png", True)):
            (out / name).write_bytes(draw(rows, dark=dark))
    print(f"\n{format_tables(rows)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("sentiment", __doc__)
    options = parser.parse_intermixed_args(arguments)
    check_overrides(options.overrides)
    methods = choose_methods(parser, [*METHODS], options.methods)
    out = choose_directory("sentiment", options)
    root = out / "sentiment-runs"
    sweep = Sweep(root, options.model.expanduser().resolve(), QUICK if options.quick else FULL, options.overrides)
    return run_command(lambda: run(out, sweep, methods), out)


if __name__ == "__main__":
    sys.exit(main())
