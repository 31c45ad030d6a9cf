"""The report that a run keeps of itself.

    python -m dpo.analysis RUN OUT [--ended]

A run starts this for itself; people use `scripts.report`. `--ended`: the run has ended, though it may still hold its
lock.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dpo.analysis.page import write_report
from dpo.errors import InputError

if __name__ == "__main__":
    os.nice(10)  # the run has priority
    run, out, *options = sys.argv[1:]
    try:
        write_report([Path(run)], Path(out), ended="--ended" in options)
    except InputError as error:
        sys.exit(f"{error}")
