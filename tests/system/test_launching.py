"""Worker processes meet, and none survives the failure of another.

`launch` spawns its workers, as train.py does; `warm.launch` forks them, where their start is not what is tested.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import warm
from support.pytests import slow, succeeded
from support.runs import ROOT, make_environment, run_python

from dpo.errors import InputError, RunError
from dpo.system.host import python_process_options
from dpo.system.launching import BAD_INPUT, LOST_CONTACT, PATIENCE, RankEnv, find_rank_env, get_open_port, launch
from dpo.system.pool import map_chunks

TESTS = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'system'}"  # where processes find this file
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def note_pid(folder: Path, rank: int) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))


def assert_all_gone(folder: Path) -> None:
    """Wait until neither worker runs; fail if one stays."""
    deadline = time.monotonic() + 10
    for rank in range(2):
        pid = (folder / f"pid{rank}").read_text()
        with suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < deadline, f"rank {rank} is still there"
                time.sleep(0.1)


# --- what workers do in these tests --------------------------------------------------------------------------------


def add_up(rank, world_size, folder):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    (folder / f"rank{rank}").write_text(f"{total.item():g} of {world_size}")


def fail_on_rank_1(rank, world_size, folder, fail):
    note_pid(folder, rank)
    dist.barrier()
    if rank == 1:
        fail()
    dist.barrier()  # where rank 0 waits for it


def divide_by_zero():
    return 1 / 0


def refuse():
    raise InputError("beta=-1 must be above 0")


def kill():
    signal.raise_signal(signal.SIGKILL)


def leave():
    os._exit(0)


def hang():
    time.sleep(600)


def finish_without_rank_1(rank, world_size, folder):
    note_pid(folder, rank)
    if rank == 1:
        hang()


# --- meeting -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_spawned_workers_prints_no_warning_of_a_library(command):
    overrides = command("run", "trainer=FSDPTrainer", "world_size=2", "n_examples=8", "sample_during_eval=true")
    result = succeeded(run_python("train.py", *overrides))
    assert "UserWarning" not in result.stderr  # of FSDP, that a forward pass returned a view; of Python, of semaphores


SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "rank_env"),
    [
        ({}, None),
        (TORCHRUN, RankEnv(3, 8, 1, "node0", 29500)),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, RankEnv(0, 8, 0, "node0", 29500)),
        ({**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4"}, RankEnv(3, 8, 1, "node0", 29500, 1, 4)),
        (SLURM, RankEnv(5, 8, 2, "gpu03", 23456)),
        (
            {**SLURM, "SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": "4"},
            RankEnv(5, 8, 2, "gpu03", 23456, machine=2, n_machines=4),
        ),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1"}, RankEnv(5, 8, 2, "head", 1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun of one task that starts its own workers
        ({**SLURM, "SLURM_STEP_NODELIST": "n-1-[12,15]"}, RankEnv(5, 8, 2, "n-1-12", 23456)),
    ],
)
def test_the_rank_that_a_launcher_assigns(environ, rank_env, monkeypatch):
    monkeypatch.setattr(os, "environ", environ)  # replaced, as `datasets` does it
    assert find_rank_env() == rank_env


# --- failing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (divide_by_zero, RunError, r"(?s)^rank 1 failed:.*in divide_by_zero.*ZeroDivisionError"),
        (refuse, InputError, r"^beta=-1 must be above 0$"),
        (kill, RunError, "^rank 1 was killed by SIGKILL"),
        (leave, RunError, "^rank 1 exited with status 0 before it was done"),
    ],
)
def test_a_worker_that_fails_ends_all_and_is_named(fail, error, message, tmp_path):
    with pytest.raises(error, match=message):
        warm.launch(fail_on_rank_1, 2, tmp_path, fail, process_group=True)
    assert_all_gone(tmp_path)


@pytest.mark.slow  # 19 s of waiting; the same where NCCL aborts the victims is quicker
def test_a_worker_that_hangs_ends_all_within_the_timeout_and_shows_where_it_was(tmp_path, capfd):
    start = time.monotonic()
    options = {"timeout_secs": 4, "constants": {"PATIENCE": PATIENCE | {LOST_CONTACT: 10}}}
    with pytest.raises(RunError, match="rank 1 did not answer within collective_timeout_secs=4") as error:
        warm.launch(fail_on_rank_1, 2, tmp_path, hang, process_group=True, **options)
    assert time.monotonic() - start < 60
    assert "rank 0 lost contact" in str(error.value)
    assert "because rank 1 failed, was killed, or did not answer in time" in str(error.value)
    assert "in fail_on_rank_1" in str(error.value)
    assert "in hang" in capfd.readouterr().err
    assert_all_gone(tmp_path)


@pytest.mark.slow
def test_a_worker_that_hangs_after_the_others_have_finished_is_not_waited_for(tmp_path):
    with pytest.raises(RunError, match="rank 1 did not answer"):
        warm.launch(finish_without_rank_1, 2, tmp_path, process_group=True, timeout_secs=8)
    assert_all_gone(tmp_path)


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    parent = warm.Python("-c", FAILING_RANK, str(tmp_path), "hang", environment=make_environment(PYTHONPATH=TESTS))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    assert_all_gone(tmp_path)


FAILING_RANK = """
import pathlib, sys
import test_launching as tests
fail = getattr(tests, sys.argv[2])
tests.launch(tests.fail_on_rank_1, 2, pathlib.Path(sys.argv[1]), fail, process_group=True, timeout_secs=5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fail", ["divide_by_zero", "kill"])
def test_a_rank_of_another_machine_that_fails_is_named(fail, tmp_path):
    meet = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_open_port())}
    started = [
        warm.Python(
            "-c",
            FAILING_RANK,
            str(tmp_path),
            fail,
            environment=make_environment(PYTHONPATH=TESTS, RANK=str(rank), **meet),
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert all(process.returncode for process in started)
    assert "rank 0 lost contact" in errors[0]
    assert "because rank 1 failed, was killed, or did not answer in time" in errors[0]


def count_items(folder: Path) -> None:
    list(map_chunks(len, range(3000), 3000, "count", 1000, silent=True))


def meet(folder: Path) -> None:
    launch(add_up, 2, folder, process_group=True, timeout_secs=100)


@pytest.mark.parametrize("start", [count_items, slow(meet)])
def test_no_child_runs_what_lies_in_the_current_directory(start, tmp_path, monkeypatch):
    (tmp_path / "socket.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')")  # multiprocessing imports it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(filter(None, sys.path)))  # which begins with '' after python -m
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert subprocess.run(**python_process_options("-c", "import socket, dpo")).returncode == 0
    resource_tracker._resource_tracker._stop()  # an earlier test may have started it
    start(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_port_that_is_taken_is_one_sentence_at_once(tmp_path, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"fsdp_port={port} cannot be used: .*in use.*; choose another port"):
            launch(add_up, 2, tmp_path, process_group=True, port=port)
        environment = make_environment(
            PYTHONPATH=TESTS, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        rank_0 = warm.run("-c", FAILING_RANK, str(tmp_path), "leave", timeout=60, environment=environment)
    said = rf"error: MASTER_PORT={port} cannot be used: .*in use.*; choose another port\n"
    assert re.fullmatch(said, rank_0.stderr)
    assert rank_0.returncode == BAD_INPUT
