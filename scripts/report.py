"""Report on one run or several: curves, and one page.

    python -m scripts.report RUN [RUN ...] [--out DIR]

RUN is the directory of a run that is complete, still trains, or crashed; or of a sweep: its runs. The page has the
curves, findings and warnings, samples of policy and reference, differences between the runs, hardware, time and cost.
Without --out it is in RUN/report, or, for several runs, in report. The texts of a ledger's pairs are in the report of
one run if its data is on this machine; a comparison loads no data, as that can take minutes. Exit status: 0 written, 2
bad input. Changes nothing else, and uses no network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dpo.errors import InputError
from dpo.system.run_directory import REPORT, SWEEP
from scripts.trust import add_trust_option


def runs_in(path: Path) -> list[Path]:
    """Directories of the runs that a path names: perhaps a sweep's."""
    if not (path / SWEEP).is_file():
        return [path]
    return sorted(file.parent for file in path.glob("*/config.yaml"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/report; of several runs: report")
    add_trust_option(parser)
    asked = parser.parse_args(arguments)
    from dpo.analysis.page import write_report  # here, so that --help need not wait a second for matplotlib
    from scripts.ledger import find_texts

    runs = [run for named in asked.runs for run in runs_in(named.expanduser())]
    find = partial(find_texts, trust_remote_code=asked.trust_remote_code)
    default = (runs[0] / REPORT if len(runs) == 1 else REPORT).parent
    texts = find if len(runs) == 1 else None
    try:
        page = write_report(runs, (asked.out or default).expanduser(), find_texts=texts)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when the libraries are imported
    sys.exit(main())
