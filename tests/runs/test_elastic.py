"""A job of torchrun goes on when it loses machines, and ends as if it had lost none."""

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.elastic import Job, list_descendants, wait_until
from support.faults import SHARDED, start_interpreter
from support.runs import assert_alike, list_updates

from dpo.analysis.ledger import read_ledger
from dpo.system.launching import get_open_port
from dpo.system.run_directory import LOCK

pytestmark = pytest.mark.slow
N_UPDATES = 24
SETTINGS = (
    *(setting for setting in SHARDED if not setting.startswith(("world_size", "n_examples"))),
    *(f"n_examples={8 * N_UPDATES}", "batch_size=8", "save_every=16", "eval_every=64", "ledger=true"),
    "lr_scaling=linear",
)
# A run on the CPUs of one machine takes milliseconds for an update.
SLOWLY = """
import time
from dpo.plugins import add_callback
from dpo.reporting.events import Callback

class Slowly(Callback):
    def on_update(self, update):
        time.sleep(0.4)

add_callback("slowly", Slowly)
"""


@pytest.fixture
def overrides(command, tmp_path) -> list[str]:
    """A run in the directory `run`, whose updates take long enough for faults."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    plugin = f"plugins=[{tmp_path / 'slowly.py'}]"
    return command("run", *SETTINGS, "heartbeat_timeout_secs=6", plugin, "resume=auto")


@pytest.fixture
def start(overrides, tmp_path):
    jobs = []

    def start() -> Job:
        jobs.append(Job(overrides, tmp_path / "jobs.txt"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
def whole(finished) -> Path:
    """The run of three processes that lost nothing."""
    return finished(*SETTINGS, "world_size=3")


def assert_ends_alike(run_dir: Path, whole: Path) -> None:
    assert_alike(run_dir, whole)
    assert read_ledger(run_dir)["example"].to_pylist() == read_ledger(whole)["example"].to_pylist()


def count_updates(run_dir: Path) -> int:
    return len(list_updates(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize(("index", "number"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)], ids=["stopped", "killed"])
def test_a_run_goes_on_without_a_machine_that_is_lost(index, number, start, whole, run_dir):
    job = start()
    wait_until(lambda: count_updates(run_dir) > 4, 90)
    job.signal(job.machines[index], number)
    job.wait(without=index)
    assert_ends_alike(run_dir, whole)


def test_machines_that_are_lost_and_come_back_change_nothing(start, whole, run_dir):
    rng = random.Random(0)
    job = start()
    for _ in range(5):
        n_before = count_updates(run_dir)
        wait_until(lambda n=n_before: count_updates(run_dir) > n, 90)
        time.sleep(rng.random())  # in an update, in a save, or while the run is evaluated
        index = rng.randrange(3)
        job.signal(job.machines[index], signal.SIGKILL)
        job.replace(index)
    job.wait()
    assert_ends_alike(run_dir, whole)
    assert job.log.read_text().count("FSDPTrainer: 3 processes") > 1


def test_a_machine_that_gets_its_power_back_writes_nothing_more(start, whole, run_dir):
    job = start()
    wait_until(lambda: count_updates(run_dir) > 4, 90)
    [stopped] = [m for m in job.machines if holds_lock(run_dir, m)]
    job.signal(stopped, signal.SIGSTOP)
    wait_until(lambda: count_updates(run_dir) > 8, 90)
    job.signal(stopped, signal.SIGCONT)  # torchrun starts its process again, which joins the others
    job.wait()
    assert re.search(r"rank \d ends: for \d+ s it did not run", job.log.read_text())
    assert_ends_alike(run_dir, whole)


@pytest.fixture
def start_tasks(overrides, tmp_path):
    """Start a task on each of n nodes, as `srun` does."""
    tasks = []

    def start_tasks(n: int) -> list[subprocess.Popen]:
        job = {"SLURM_STEP_NUM_TASKS": f"{n}", "SLURM_STEP_NUM_NODES": f"{n}", "SLURM_LOCALID": "0"}
        job |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": f"{get_open_port()}"}
        with (tmp_path / "tasks.txt").open("a") as log:
            for rank in map(str, range(n)):
                task = start_interpreter(
                    "train.py", *overrides, output=log, **job, SLURM_PROCID=rank, SLURM_NODEID=rank
                )
                tasks.append(task)
        return tasks[-n:]

    yield start_tasks
    for task in tasks:
        task.kill()
        task.wait()


def test_a_job_that_slurm_starts_again_goes_on_with_fewer_nodes(start_tasks, whole, run_dir, tmp_path):
    tasks = start_tasks(3)
    wait_until(lambda: count_updates(run_dir) > 4, 90)
    for task in tasks:  # one node fails, so Slurm ends all of the job
        task.kill()
        task.wait()
    for task in start_tasks(2):
        assert task.wait(180) == 0, (tmp_path / "tasks.txt").read_text()
    assert "FSDPTrainer: 2 processes" in (tmp_path / "tasks.txt").read_text()
    assert_ends_alike(run_dir, whole)


def holds_lock(run_dir: Path, machine: subprocess.Popen) -> bool:
    holder = re.match(r"process (\d+) ", (run_dir / LOCK).read_text())
    return int(holder[1]) in list_descendants(machine.pid)
