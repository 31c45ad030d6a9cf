"""Ranks wait for one that works alone, while it makes progress."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.runs import GOLDEN, compose, small_run, train
from support.warm import launch

import train as main
from dpo.checkpoint import resume, saver
from dpo.checkpoint.files import HashedFile, check_complete
from dpo.checkpoint.parts import Part
from dpo.errors import InputError, RunError
from dpo.parallel.mesh import Mesh
from dpo.settings.plan import ParallelDims
from dpo.system import waiting
from dpo.system.host import HostMemory
from dpo.system.signals import Stopped, on_stop_signals
from dpo.system.waiting import check_alike, meet_rank_0, once_per_machine, sending_heartbeats, wait_for
from trainers import Trainer

TIMEOUT = 5.0  # seconds that a collective may take


# --- for rank 0 ----------------------------------------------------------------------------------------------------


def hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)
    meet_rank_0("a place")


@pytest.mark.slow
def test_a_rank_0_that_sends_no_heartbeat_is_named():
    with pytest.raises(RunError, match=r"rank 0 did not answer within collective_timeout_secs=5") as raised:
        launch(hang, 2, process_group=True, timeout_secs=TIMEOUT)
    assert "rank 0 sent no heartbeat for 5 s" in str(raised.value)


class Ones:
    """A state that is a tensor."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"a": torch.ones(3)}


def save_slowly(rank: int, world_size: int, run_dir: Path) -> None:
    saver.host_memory = lambda: HostMemory(0, 0)  # no room for a copy: it writes while the others wait
    write = HashedFile.write

    def write_slowly(self: HashedFile, data: Any) -> int:
        time.sleep(TIMEOUT / 20)
        return write(self, data)

    HashedFile.write = write_slowly
    mesh = Mesh(rank, ParallelDims.of(world_size))
    checkpoints = saver.Checkpoints(run_dir, mesh, keep=None, log=print)
    parts = [Part(name, Ones()) for name in ("policy", "optimizer", "scheduler", "trainer")]
    started = time.monotonic()
    checkpoints.save(parts, step_idx=8, metrics=None, quality=0.0, facts=dict)
    checkpoints.finish()
    assert time.monotonic() - started > 1.2 * TIMEOUT
    check_complete(run_dir / "step-8")


@pytest.mark.slow
def test_a_save_may_take_longer_than_a_collective(tmp_path):
    launch(save_slowly, 2, tmp_path, process_group=True, timeout_secs=TIMEOUT)


def verify_slowly(rank: int, world_size: int, overrides: list[str]) -> None:
    def check_slowly(directory: Path) -> Any:
        time.sleep(1.2 * TIMEOUT)
        return check_complete(directory)

    resume.check_complete = check_slowly
    Trainer.train = lambda self: self.checkpoints.finish()
    main.work(rank, world_size, main.resolve(compose(*overrides)))


@pytest.mark.slow
def test_verifying_a_checkpoint_may_take_longer_than_a_collective(rows, tmp_path):
    settings = ("trainer=FSDPTrainer", "world_size=2", "eval_batch_size=8", "n_eval_examples=8", "n_examples=16")
    first = train(*small_run(rows, tmp_path / "run", *settings, "n_examples=8"))
    assert first.returncode == 0, first.stderr
    again = small_run(rows, tmp_path / "run", *settings, "resume=auto")
    launch(verify_slowly, 2, again, process_group=True, timeout_secs=TIMEOUT)


def check(rank: int, world_size: int, template: Any) -> None:
    facts = {"training data": "the same", "chat template": f"template {rank if template else 0}"}
    if not template:
        check_alike(facts)
        return
    with pytest.raises(InputError, match=r"rank 1 on .* has not the same as rank 0 on .*: chat template; give all"):
        check_alike(facts)


@pytest.mark.parametrize("differs", [False, True])
def test_what_ranks_do_not_have_alike_ends_all_of_them(differs):
    launch(check, 2, differs, process_group=True, timeout_secs=60)


def start_run(rank: int, world_size: int, config: Any) -> None:
    config.model.name_or_path += f"/{rank}"  # the same path on two machines
    main.work(rank, world_size, main.resolve(config))


def test_ranks_whose_models_have_another_config_are_refused_before_the_first_update(rows, tmp_path):
    for rank in range(2):
        shutil.copytree(GOLDEN / "tiny-llama", tmp_path / "model" / str(rank))
    path = tmp_path / "model" / "1" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
    changes = ("trainer=FSDPTrainer", "world_size=2", f"model.name_or_path={tmp_path / 'model'}")
    config = compose(*small_run(rows, tmp_path / "run", *changes))
    with pytest.raises(InputError, match=r"not the same as rank 0 on .*: the model's config\.json; give all machines"):
        launch(start_run, 2, config, process_group=True, timeout_secs=60)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- in one process, as rank 1 ---------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    monkeypatch.setattr(waiting, "is_shared", lambda: True)
    monkeypatch.setattr(waiting, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    return store


def test_a_signal_is_heard_while_waiting(store):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()

    def stop(number: int) -> str:
        raise Stopped(number)

    with pytest.raises(Stopped), on_stop_signals(stop):
        meet_rank_0("a place")


def test_heartbeats_are_waited_for_and_silence_ends_the_wait(store, monkeypatch):
    monkeypatch.setattr(waiting, "BEAT_SECS", 0.05)
    with sending_heartbeats():
        threading.Timer(1.5, store.set, ("key", "done word")).start()
        assert wait_for({1: "key"}, silence_secs=0.5) == {1: "done word"}
    with pytest.raises(dist.DistError, match=r"rank 3 sent no heartbeat for 0\.3 s"):
        wait_for({1: "key", 3: "none"}, silence_secs=0.3)


# --- for one process of each machine ---------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def share_a_word(rank: int, world_size: int, folder: Path) -> None:
    """Four calls, of which one is broken off and one fails."""

    def make(seconds: float = 0.0) -> str:
        with (folder / "makers").open("a") as file:
            file.write(f"{rank} ")
        time.sleep(seconds)
        return f"{rank}'s"

    share = partial(once_per_machine, silence_secs=60)
    got = [share(make)]
    waiting.identify_machine = f"machine {rank // 2}".format
    got.append(share(make))
    signal.signal(signal.SIGALRM, interrupt)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    start = time.monotonic()
    try:
        got.append(share(partial(make, 2.5 if rank == 0 else 0.0)))
    except Interrupted:
        got.append(f"broken off: {time.monotonic() - start < 2}")
    try:
        share(lambda: str(1 // rank))
    except (ZeroDivisionError, dist.DistError) as error:
        got.append(str(error))
    (folder / f"{rank}.json").write_text(json.dumps(got))


def interrupt(number, frame):
    raise Interrupted


def test_the_first_process_of_each_machine_makes_it_and_a_signal_reaches_those_that_wait(tmp_path):
    launch(share_a_word, 3, tmp_path, process_group=True)

    got = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    failed = "rank 0 failed while the others waited for it"
    assert got == [
        ["0's", "0's", "0's", "integer division or modulo by zero"],
        ["0's", "0's", "broken off: True", failed],
        ["0's", "2's", "2's", failed],
    ]
    assert sorted((tmp_path / "makers").read_text().split()) == ["0", "0", "0", "2", "2"]
