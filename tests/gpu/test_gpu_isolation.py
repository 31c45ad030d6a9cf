"""A test of the acceptance run fails, crashes or hangs alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import ROOT, assert_gone, make_environment

TESTS = """
import os, signal, subprocess, sys, time
import pytest

pytestmark = pytest.mark.gpu
PIDS = os.environ["PIDS"]

def test_that_raises(tmp_path):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_that_crashes(tmp_path):
    print("its last words")
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.timeout(5)
def test_that_hangs(tmp_path, record):
    record("measured before it hung")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(PIDS, "w") as file:
        file.write(f"{os.getpid()} {other.pid}")
    time.sleep(300)

@pytest.mark.timeout(3600)
def test_that_is_too_long(tmp_path):
    pass

def test_that_is_skipped(tmp_path):
    pytest.skip("there is one device")

def test_that_passes(tmp_path, record):
    record("as it should be", speed=3.5)
"""


@pytest.mark.slow
def test_whatever_happens_to_a_test_stays_with_it(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_faults.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: runs in a process of its own\n")
    command = [sys.executable, "-m", "pytest", "-s", "-v", "-rs", "--junitxml=results.xml", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, env=make_environment(PIDS=str(tmp_path / "pids"), PYTHONPATH=str(ROOT),
                             GPU_CHECK_DEADLINE=str(time.time() + 600)),
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip

    assert "3 failed, 1 passed, 2 skipped" in done.stdout
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in done.stdout
    assert "its process ended with status -9" in done.stdout
    assert "its last words" in done.stdout
    assert "Timeout (>5.0s)" in done.stdout
    assert "\n    measured before it hung\n" in done.stdout
    assert "time limits add up to 3605 s; tests that may exceed the 5" in done.stdout  # 599 s or little less
    assert "there is one device" in done.stdout
    assert "may take 3600 s, and" in done.stdout
    assert "\n    as it should be\n" in done.stdout
    assert '<property name="speed" value="3.5" />' in (tmp_path / "results.xml").read_text()
    assert_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
