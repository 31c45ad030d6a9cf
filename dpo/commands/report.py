"""Report on one run or several: curves, and one page.

    dpo report RUN [RUN ...] [--out DIR]

RUN may still train or have crashed, or be a directory of runs, as a sweep makes it. Exit status: 0 written, 2 bad
input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpo.analysis.page import write_report
from dpo.errors import InputError
from dpo.system.run_directory import REPORT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dpo report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/report; for several runs: report")
    options = parser.parse_args(arguments)
    runs = []
    for path in options.runs:
        inside = sorted(file.parent for file in path.glob("*/config.yaml"))
        runs += [path] if not inside or (path / "metrics.jsonl").exists() else inside
    default_out = runs[0] / REPORT.parent if len(runs) == 1 else REPORT.parent
    try:
        print(f"report: {write_report(runs, options.out or default_out)}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
