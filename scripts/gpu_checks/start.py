"""`python -m scripts.gpu_checks.start FIRST OVERRIDES...`: calls a function of the checks (`module:function`), which
modifies the process, then runs train.py."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def start(first: str | None, overrides: Sequence[str]) -> None:
    if first:
        module, name = first.split(":")
        getattr(importlib.import_module(module), name)()
    sys.argv = [str(TRAIN), *overrides]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2:])
