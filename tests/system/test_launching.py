"""Worker processes: where they meet, and that none survives the failure of another. All of them are real.

`launch` spawns its workers, as train.py does; `warm.launch` forks them, where their start is not what is tested.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import warm
from support.runs import ROOT, assert_gone, make_environment

from dpo.errors import InputError
from dpo.system import launching
from dpo.system.launching import End, WorkerFailed, launch
from dpo.system.rank_env import RankEnv, find_rank_env
from dpo.system.signals import Stopped

TESTS = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'system'}"  # where processes find this file
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def note_pid(folder: Path, rank: int) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))


def assert_all_gone(folder: Path, count: int = 2, within: float = 10) -> None:
    assert_gone([int((folder / f"pid{rank}").read_text()) for rank in range(count)], within)


# --- what workers do in these tests --------------------------------------------------------------------------------


def add_up(rank, world_size, folder):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    (folder / f"rank{rank}").write_text(f"{total.item():g} of {world_size}")


def abort_at_the_end(rank, world_size, folder):
    atexit.register(os.abort)
    add_up(rank, world_size, folder)


def fail_on_rank_1(rank, world_size, folder, how):
    note_pid(folder, rank)
    dist.barrier()
    if rank == 1:
        {"raise": divide_by_zero, "bad input": refuse, "kill": kill_self, "leave": leave_quietly, "hang": hang}[how]()
    dist.barrier()  # where rank 0 waits for it


def divide_by_zero():
    return 1 / 0


def refuse():
    raise InputError("beta=-1 must be above 0")


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_quietly():
    os._exit(0)


def hang():
    time.sleep(600)


def abort_on_rank_1(rank, world_size, folder, secs):
    note_pid(folder, rank)
    dist.barrier()
    if rank == 1:  # waits for rank 0
        time.sleep(secs)
        os.abort()
    hang()


def load_on_rank_0(rank, world_size, folder):
    """Rank 1 waits for the weights where no signal interrupts it."""
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid(folder, rank)
    hang()


class StalledOnArrival:
    """Keeps the first process that unpickles it from ever joining the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict) -> None:
        try:
            (state["folder"] / "stalled").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(600)


def do_nothing(rank, world_size, argument):
    pass


def finish_without_rank_1(rank, world_size, folder):
    note_pid(folder, rank)
    if rank == 1:
        hang()


# --- meeting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "total"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
def test_workers_meet_in_one_group(world_size, total, tmp_path):
    launch(add_up, world_size, tmp_path, process_group=True)
    assert {(tmp_path / f"rank{r}").read_text() for r in range(world_size)} == {f"{total} of {world_size}"}


def test_a_port_that_is_taken_is_one_sentence(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} is in use; fsdp_port=null"):
            launch(add_up, 2, None, process_group=True, port=port)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InputError, match=f"port {port} is in use"):
            launch(add_up, 2, None, process_group=True)


@pytest.mark.slow
def test_what_goes_wrong_while_a_workers_interpreter_ends_fails_no_run(tmp_path):
    warm.launch(abort_at_the_end, 2, tmp_path, process_group=True)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["3 of 2"] * 2


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
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, RankEnv(0, 8, 0, "node0", 29500, hosts=True)),
        ({**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, RankEnv(0, 8, 1, "node0", 29500)),
        (SLURM, RankEnv(5, 8, 2, "gpu03", 23456)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1"}, RankEnv(5, 8, 2, "head", 1)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # the batch script itself, before any srun
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun of one task that starts its own workers
        ({**SLURM, **TORCHRUN}, RankEnv(3, 8, 1, "node0", 29500)),
    ],
)
def test_a_launcher_gives_a_seat(environ, rank_env):
    assert find_rank_env(environ) == rank_env


def test_a_seat_is_found_in_the_environment_as_it_is_now(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2"})  # as `datasets` does it
    assert find_rank_env().rank == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("gpu[03-05,9]", "gpu03"), ("a1,b[2-3]", "a1"), ("n-1-[12,15]", "n-1-12")],
)
def test_slurm_tasks_meet_on_the_first_node(nodes, first):
    assert find_rank_env({**SLURM, "SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK=x in the environment is not a number"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "but not SLURM_PROCID"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST= names no node: set MASTER_ADDR"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_one_sentence(environ, message):
    with pytest.raises(InputError, match=message):
        find_rank_env(environ)


def test_tasks_of_a_slurm_step_join(tmp_path):
    script = (
        "import pathlib, sys; from dpo.system.launching import launch; from test_launching import add_up;"
        "launch(add_up, 1, pathlib.Path(sys.argv[1]), process_group=True)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = server.getsockname()[1] - 20_000  # a port that is free: 20000 + job number
    if not 0 <= job < 20_000:
        job = 11_311
    tasks = [
        warm.Python(
            "-c",
            script,
            str(tmp_path),
            environment=make_environment(
                PYTHONPATH=TESTS,
                SLURM_STEP_NUM_TASKS="2",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_STEP_NODELIST="localhost",
                SLURM_JOB_ID=str(job),
            ),
        )
        for rank in range(2)
    ]
    assert [task.wait(timeout=60) for task in tasks] == [0, 0]
    assert (tmp_path / "rank0").read_text() == "3 of 2"


# --- failing -------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises_ends_all_and_shows_its_traceback(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 failed") as error:
        launch(fail_on_rank_1, 2, tmp_path, "raise", process_group=True)
    assert "in divide_by_zero" in str(error.value)
    assert "ZeroDivisionError" in str(error.value)
    assert_all_gone(tmp_path)


def test_bad_input_that_a_worker_finds_is_bad_input_of_the_run(tmp_path):
    with pytest.raises(InputError, match=r"^beta=-1 must be above 0$"):
        warm.launch(fail_on_rank_1, 2, tmp_path, "bad input", process_group=True)
    assert_all_gone(tmp_path)


def test_a_worker_that_is_killed_ends_all_and_is_named(tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL"):
        warm.launch(fail_on_rank_1, 2, tmp_path, "kill", process_group=True)
    assert time.monotonic() - start < 60
    assert_all_gone(tmp_path)


def test_a_worker_that_exits_with_status_0_before_it_is_done_has_failed(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 exited with status 0 before it was done"):
        warm.launch(fail_on_rank_1, 2, tmp_path, "leave", process_group=True)
    assert_all_gone(tmp_path)


@pytest.mark.slow  # 19 s of waiting; the same where NCCL aborts the victims is quicker
def test_a_worker_that_hangs_ends_all_within_the_timeout_and_shows_where_it_was(tmp_path, capfd):
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 1 did not answer within collective_timeout_secs=4") as error:
        warm.launch(fail_on_rank_1, 2, tmp_path, "hang", process_group=True, timeout_secs=4)
    assert time.monotonic() - start < 60
    assert "rank 0 lost contact" in str(error.value)
    assert "because rank 1 did not answer" in str(error.value)
    assert "in fail_on_rank_1" in str(error.value)
    assert "in hang" in capfd.readouterr().err
    assert_all_gone(tmp_path)


def test_of_a_hanging_rank_nccl_aborts_the_victims_and_the_one_that_hangs_is_named(tmp_path, capfd):
    constants = {"ABORT_SECS": 2}
    with pytest.raises(WorkerFailed, match=r"^rank 0 did not answer within collective_timeout_secs=3\n") as error:
        warm.launch(abort_on_rank_1, 2, tmp_path, 5, process_group=True, timeout_secs=3, constants=constants)
    assert "rank 1 was killed by SIGABRT, as NCCL does when a collective times out" in str(error.value)
    assert "in hang" in capfd.readouterr().err
    assert_all_gone(tmp_path)


def test_a_worker_that_aborts_before_a_collective_can_time_out_has_crashed(tmp_path):
    with pytest.raises(WorkerFailed, match=r"^rank 1 was killed by SIGABRT"):
        warm.launch(abort_on_rank_1, 2, tmp_path, 0, process_group=True, timeout_secs=600)
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("status", "asked", "timed_out", "end"),
    [
        (0, [], False, End.DONE),
        (143, [], False, End.STOPPED),
        (-signal.SIGTERM, [signal.SIGTERM], False, End.STOPPED),
        (-signal.SIGTERM, [], False, End.FAILED),
        (3, [], False, End.LOST_CONTACT),
        (-signal.SIGABRT, [], False, End.FAILED),
        (-signal.SIGABRT, [], True, End.LOST_CONTACT),
        (-signal.SIGABRT, [signal.SIGTERM], False, End.LOST_CONTACT),  # from a collective that a stopped rank left
        (1, [signal.SIGTERM], True, End.FAILED),
    ],
)
def test_what_an_exit_status_means(status, asked, timed_out, end):
    assert launching._classify(status, reported=True, asked=asked, timed_out=timed_out) == end


def test_a_signal_while_one_rank_loads_ends_those_that_cannot_hear_it(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "STOP_SECS", 2)

    def ask_once_all_work() -> None:
        while len(list(tmp_path.glob("pid*"))) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_once_all_work).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        launch(load_on_rank_0, 2, tmp_path, process_group=True, timeout_secs=600)
    assert time.monotonic() - start < 100
    assert_all_gone(tmp_path)


@pytest.mark.slow
def test_a_worker_that_never_joins_ends_all_and_is_named(tmp_path):
    with pytest.raises(WorkerFailed, match=r"rank [01] did not answer within collective_timeout_secs=4"):
        launch(do_nothing, 2, StalledOnArrival(tmp_path), process_group=True, timeout_secs=4)


def test_a_worker_that_hangs_after_the_others_have_finished_is_not_waited_for(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 did not answer"):
        warm.launch(finish_without_rank_1, 2, tmp_path, process_group=True, timeout_secs=3)
    assert_all_gone(tmp_path)


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    script = (
        "import pathlib, sys; from dpo.system.launching import launch; from test_launching import fail_on_rank_1\n"
        "if __name__ == '__main__':\n"
        "    launch(fail_on_rank_1, 2, pathlib.Path(sys.argv[1]), 'hang', process_group=True)"
    )
    (tmp_path / "parent.py").write_text(script)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)],
        env=make_environment(PYTHONPATH=TESTS),
    )
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"pid{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    parent.kill()
    parent.wait()
    assert_all_gone(tmp_path)


FAILING_RANK = """
import pathlib, sys
from dpo.system.launching import launch
from test_launching import fail_on_rank_1
launch(fail_on_rank_1, 2, pathlib.Path(sys.argv[1]), sys.argv[2], process_group=True, timeout_secs=5)
"""


@pytest.mark.parametrize(
    ("how", "ranks", "said"),
    [
        ("raise", 2, "because rank 1 failed"),
        pytest.param(
            "kill",
            2,
            "because rank 1 did not answer within collective_timeout_secs=5, or was killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # which never comes
            "raise",
            1,
            "because rank 1 did not answer within collective_timeout_secs=5, or was killed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_of_another_machine_that_fails_is_named(how, ranks, said, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meet = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        warm.Python(
            *("-c", FAILING_RANK, str(tmp_path), how),
            environment=make_environment(PYTHONPATH=TESTS, RANK=str(rank), **meet),
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert all(process.returncode for process in started)
    assert "rank 0 lost contact" in errors[0]
    assert said in errors[0]
