"""One check in a process of its own: `python -m scripts.gpu_checks.child MODULE:FUNCTION SETTING` (JSON)."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from scripts.gpu_checks.common import CheckFailed, Outcome, Setting, Skipped

STATES = {True: "passed", False: "failed", None: "skipped"}


def run_check(run: str, setting: Setting) -> None:
    """Write the check's result to `result.json` atomically and exit immediately, without finalizing the interpreter:
    threads of a process group or of a compiler could abort it then."""
    try:
        outcome = call(run, setting)._asdict()
        result = {"state": STATES[outcome.pop("passed")], "judged": True, **outcome}
    except Skipped as reason:
        result = {"state": "skipped", "figure": str(reason), "details": {}}
    except CheckFailed as failure:
        result = {"state": "failed", "figure": str(failure), "details": {}}
    except BaseException as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:300]
        result = {"state": "failed", "figure": f"{type(error).__name__}: {said}", "details": {}}
    file = Path(setting.folder) / "result.json"
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(result, default=str), encoding="utf-8")
    beside.replace(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def call(run: str, setting: Setting) -> Outcome:
    """The outcome of the check `module:function`."""
    module, name = run.split(":")
    return getattr(importlib.import_module(module), name)(setting)


if __name__ == "__main__":
    run_check(sys.argv[1], Setting(**json.loads(sys.argv[2])))
