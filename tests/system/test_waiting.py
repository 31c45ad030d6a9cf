"""Ranks wait for one that works alone, while it makes progress."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import append_text, read_json
from support.warm import launch

from dpo.checkpoint import files, saver
from dpo.checkpoint.files import check_complete, describe_file
from dpo.errors import RunError
from dpo.parallel.mesh import Mesh
from dpo.settings.plan import ParallelDims
from dpo.system import waiting
from dpo.system.launching import FAILED, LOST_CONTACT, PATIENCE
from dpo.system.waiting import after_rank_0, once_per_machine

TIMEOUT = 5.0  # seconds that a collective may take


# --- for rank 0 ----------------------------------------------------------------------------------------------------


def hang_on_a_disk(rank: int, world_size: int) -> None:
    waiting.LONGEST_WORK = 0.5
    after_rank_0("a place", lambda: time.sleep(60 * (rank == 0)))


@pytest.mark.slow
def test_a_rank_0_that_hangs_while_it_works_alone_ends_the_run_after_a_stated_time_and_is_named():
    options = {"timeout_secs": TIMEOUT, "constants": {"PATIENCE": PATIENCE | {LOST_CONTACT: 10}}}
    with pytest.raises(RunError, match=r"rank 0 did not answer within collective_timeout_secs=5") as raised:
        launch(hang_on_a_disk, 2, process_group=True, **options)
    assert "timed out after 2.5 s of waiting for rank 0 at a place" in str(raised.value)


def stop_on_rank_0(rank: int, world_size: int, wait: Callable) -> None:
    torch.distributed.barrier()  # until rank 1 has joined the group: joining has no time limit of its own
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait("a place")


@pytest.mark.slow
@pytest.mark.parametrize("wait", [waiting.meet_rank_0, waiting.from_rank_0])
def test_a_rank_0_that_is_stopped_ends_the_run_though_its_store_never_answers(wait):
    options = {"timeout_secs": TIMEOUT, "constants": {"PATIENCE": PATIENCE | {LOST_CONTACT: 5}}}
    with pytest.raises(RunError, match=r"rank 0 did not answer within collective_timeout_secs=5"):
        launch(stop_on_rank_0, 2, wait, process_group=True, **options)


def fail_alone(rank: int, world_size: int) -> None:
    """Rank 0 fails while it works alone, with an hour for the others to wait."""
    after_rank_0("a place", lambda: 1 / 0)


def test_those_that_wait_for_a_rank_that_fails_give_up_soon():
    began = time.monotonic()
    with pytest.raises(RunError, match=r"(?s)^rank 0 failed:.*ZeroDivisionError"):
        launch(fail_alone, 2, process_group=True, timeout_secs=3600, constants={"PATIENCE": PATIENCE | {FAILED: 120}})
    assert time.monotonic() - began < 100  # the parent did not have to end rank 1


class Ones:
    """A state that is a tensor."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"a": torch.ones(3)}


def save_slowly(rank: int, world_size: int, run_dir: Path) -> None:
    def describe_slowly(path: Path) -> dict[str, Any]:
        time.sleep(TIMEOUT / 3)
        return describe_file(path)

    files.describe_file = describe_slowly
    mesh = Mesh(rank, ParallelDims(world_size, shard_size=world_size))
    checkpoints = saver.Checkpoints(run_dir, mesh, keep=None, log=print)
    parts = [saver.Part(name, Ones()) for name in ("policy", "optimizer", "scheduler", "trainer")]
    started = time.monotonic()
    checkpoints.save(parts, step_idx=8, metrics=None, quality=0.0, facts={})
    checkpoints.finish()
    assert time.monotonic() - started > 1.2 * TIMEOUT
    check_complete(run_dir / "step-8")


@pytest.mark.slow
def test_a_save_may_take_longer_than_a_collective(tmp_path):
    launch(save_slowly, 2, tmp_path, process_group=True, timeout_secs=TIMEOUT)


# --- for one process of each machine ---------------------------------------------------------------------------------


def share_a_word(rank: int, world_size: int, folder: Path) -> None:
    def make() -> str:
        append_text(folder / "makers", f"{rank} ")
        return f"{rank}'s"

    got = [once_per_machine(make)]
    waiting.identify_machine = f"machine {rank // 2}".format
    got.append(once_per_machine(make))
    (folder / f"{rank}.json").write_text(json.dumps(got))


def test_the_first_process_of_each_machine_makes_it_for_all(tmp_path):
    launch(share_a_word, 3, tmp_path, process_group=True)

    got = [read_json(tmp_path / f"{rank}.json") for rank in range(3)]
    assert got == [["0's", "0's"], ["0's", "0's"], ["0's", "2's"]]
    assert sorted((tmp_path / "makers").read_text().split()) == ["0", "0", "2"]
