"""Processes of an experiment's runs."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.runs import ROOT

SWEEP = """
import os, sys, time
from pathlib import Path
from experiments.frontier.jobs import Job, run_all, run_command

folder = Path(sys.argv[1])

def finish(job):
    (job.directory / "pid").write_text(str(os.getpid()))
    time.sleep(600)

def sweep():
    os.sched_getaffinity = lambda pid: {0, 1}
    list(run_all([Job(folder / "a"), Job(folder / "b")], finish))

sys.exit(run_command(sweep))
"""


@pytest.mark.usefixtures("hangups_are_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_experiment_ends_its_runs(number, tmp_path):
    with subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path)], cwd=ROOT) as sweep:
        files = [tmp_path / name / "pid" for name in "ab"]
        while not all(file.exists() and file.read_text() for file in files):
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.send_signal(number)
        assert sweep.wait(timeout=30) == 130
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
