"""The acceptance run on a GPU: the tests in `tests/gpu`.

    python -m scripts.gpu_check [--quick] [--minutes 30] [--only NAME,NAME] [options of pytest]

`make gpu-check` runs it. Each test has its own process. The measured numbers are printed, and written to
`.cache/gpu-check.xml` (JUnit). Without a GPU, the tests that make sense on a CPU run on small models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# in the order of their value, so that a run that is cut short has done what matters most
NAMES = ("layouts", "features", "syncs", "demo", "memory", "fsdp", "repeats", "compile")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer models, shapes and updates")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30,
        help="limit of the whole check (default: 30); tests that might exceed it are skipped",
    )
    parser.add_argument("--only", metavar="NAME,NAME", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    options, pytest_options = parser.parse_known_args()
    names = options.only.replace("-", "_").split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--only: unknown checks {', '.join(unknown)}; the checks are {', '.join(NAMES)}")
    if options.quick:
        os.environ["GPU_CHECK_QUICK"] = "1"
    os.environ["GPU_CHECK_DEADLINE"] = str(time.time() + 60 * options.minutes)
    os.chdir(Path(__file__).resolve().parents[1])
    import pytest

    selection = ["-m", "gpu", "-k", " or ".join(f"test_{name}" for name in names)]
    return pytest.main(["tests/gpu", *selection, "-v", "-s", "-rs", "--junitxml=.cache/gpu-check.xml", *pytest_options])


if __name__ == "__main__":
    sys.exit(main())
