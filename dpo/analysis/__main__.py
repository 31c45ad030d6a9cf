"""The report that a run keeps of itself.

    python -m dpo.analysis RUN OUT [--ended]

People use `scripts.report`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dpo.analysis.page import write_report
from dpo.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dpo.analysis", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the report is written")
    parser.add_argument("--ended", action="store_true", help="the run has ended, though it may hold its lock")
    asked = parser.parse_args()
    os.nice(10)  # the run comes first
    try:
        write_report([asked.run], asked.out, ended=asked.ended)
    except InputError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
