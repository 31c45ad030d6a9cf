"""The acceptance run on a GPU: the tests in `tests/gpu`.

    python -m scripts.gpu_check [--quick] [--minutes 30] [options of pytest, such as -k layouts]

The measured numbers are printed, and written to `.cache/gpu-check.xml`.
"""

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer models, shapes and updates")
    parser.add_argument("--minutes", default="30", help="tests that might not end in time are skipped (default: 30)")
    options, pytest_options = parser.parse_known_args()
    if options.quick:
        os.environ["GPU_CHECK_QUICK"] = "1"
    os.environ["GPU_CHECK_MINUTES"] = options.minutes
    os.chdir(Path(__file__).resolve().parents[1])
    import pytest

    return pytest.main(
        ["tests/gpu", "-m", "gpu", "-v", "-s", "-rs", "--junitxml=.cache/gpu-check.xml", *pytest_options]
    )


if __name__ == "__main__":
    sys.exit(main())
