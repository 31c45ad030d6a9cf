"""Checks that go wrong in every way, for `test_gpu_check.py`; imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_checks.common import CheckFailed, Outcome, Setting, Skipped


def passes(setting: Setting) -> Outcome:
    return Outcome(True, "as it should be", {"number": 1, "lines": ["a line"]})


def finds_a_fault(setting: Setting) -> Outcome:
    return Outcome(False, "3 of 2", {"number": 3})


def gives_up(setting: Setting) -> Outcome:
    print("what its run said last")
    raise CheckFailed("the run ended with status 1")


def raises(setting: Setting) -> Outcome:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crashes(setting: Setting) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(setting: Setting) -> Outcome:
    sys.exit(0)


def needs_more(setting: Setting) -> Outcome:
    raise Skipped("not possible: there is one device")


def hangs(setting: Setting) -> Outcome:
    """With a process in a session of its own, as torchrun starts its workers; their ids are in `pids`."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    pids = Path(setting.folder).parent / "pids"
    pids.write_text(f"{os.getpid()} {other.pid}")
    time.sleep(300)
    return Outcome(True, "", {})
