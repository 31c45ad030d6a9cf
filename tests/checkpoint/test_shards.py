"""A sharded checkpoint has all parts of all tensors once, however they are divided."""

import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from support.elastic import wait_until
from support.models import build
from support.warm import launch

from dpo.checkpoint import files, saver
from dpo.checkpoint.files import find_checkpoints, read_state, write_checkpoint
from dpo.checkpoint.saver import Checkpoints, ModelPart, Part
from dpo.checkpoint.shards import write_parts
from dpo.errors import RunError
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute, full_state
from dpo.settings.plan import ParallelDims


def save_and_read(rank: int, world_size: int, dims: ParallelDims, trained: bool, folder: Path) -> None:
    mesh = Mesh(rank, dims)
    model = build("llama, tied", on_meta=rank > 0).requires_grad_(trained)
    model = distribute(model, mesh, block_name=None, compute_dtype=torch.float32, frozen_whole=not trained)
    checkpoints = Checkpoints(folder, mesh, keep=None, log=print, sharded=True)
    checkpoints.save([ModelPart("policy", model)], step_idx=8, metrics=None, facts={})
    checkpoints.finish()
    expected = full_state(model.state_dict())
    if rank == 0:
        found = read_state(folder / "step-8" / "policy.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def fail(error: Exception, *_: Any) -> NoReturn:
    raise error


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, Mesh(), keep=None, log=print, sharded=True)


def save(checkpoints: Checkpoints, step: int, **options: Any) -> None:
    part = ModelPart("policy", torch.nn.Linear(2, 3))
    checkpoints.save([part], **{"step_idx": step, "metrics": None, "facts": {}, **options})


def test_training_goes_on_while_files_are_written_and_a_second_save_waits(checkpoints, monkeypatch, tmp_path, printed):
    events, allowed = [], threading.Event()

    def write_late(directory: Path, states: Any, **content: Any) -> None:
        assert allowed.wait(60)
        events.append(directory.name)
        write_checkpoint(directory, states, **content)

    monkeypatch.setattr(saver, "write_checkpoint", write_late)
    save(checkpoints, 8, quality=1.0)
    checkpoints.check()  # nothing is said of it yet, and no link leads to it
    assert (events, printed(), list(tmp_path.iterdir())) == ([], "", [])
    allowed.set()
    save(checkpoints, 16, quality=0.5)
    assert events[0] == "step-8"
    assert printed() == f"saved {tmp_path}/step-8\n"
    checkpoints.finish()
    assert (tmp_path / "BEST").readlink() == Path("step-8")
    assert (tmp_path / "LATEST").readlink() == Path("step-16")


@pytest.mark.parametrize("is_always_whole", [False, True])
def test_what_is_saved_is_the_state_at_the_time_of_the_save(is_always_whole, checkpoints, tmp_path, monkeypatch):
    state = {"counts": [1], "weight": torch.zeros(2)}
    allowed = threading.Event()
    monkeypatch.setattr(
        saver, "write_checkpoint", lambda *args, **options: allowed.wait(60) and write_checkpoint(*args, **options)
    )
    part = Part("trainer", SimpleNamespace(state_dict=lambda: state))
    monkeypatch.setattr(part, "is_always_whole", is_always_whole)
    checkpoints.save([part], step_idx=8, metrics=None, facts={})
    state["counts"].append(2)
    state["weight"] += 1
    allowed.set()
    checkpoints.finish()
    saved = read_state(tmp_path / "step-8" / "trainer.pt")
    assert saved["counts"] == [1]
    assert saved["weight"].tolist() == [0, 0]


class ConvertedPart(Part):
    is_always_whole = True

    def convert(self, state: Any) -> dict[str, bytes]:
        return {"adapter.txt": state["text"].encode()}


def test_a_whole_part_has_its_further_files(checkpoints, tmp_path):
    part = ConvertedPart("policy", SimpleNamespace(state_dict=lambda: {"text": "as PEFT has it"}))
    checkpoints.save([part], step_idx=8, metrics=None, facts={})
    checkpoints.finish()
    assert (tmp_path / "step-8" / "adapter.txt").read_text() == "as PEFT has it"


class State:
    """A state, or a copy of one, that is counted while it is held."""

    held: ClassVar = weakref.WeakSet()

    def __new__(cls) -> "State":
        state = super().__new__(cls)
        cls.held.add(state)
        return state


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_without_memory_holds_one_part_at_a_time(sharded, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "host_memory", lambda: (100, -1))
    checkpoints.sharded = sharded

    def state_dict() -> State:
        assert not State.held
        return State()

    parts = [Part(name, SimpleNamespace(state_dict=state_dict)) for name in ("policy", "optimizer", "trainer")]
    checkpoints.save(parts, step_idx=8, metrics=None, facts={})
    assert len(list((tmp_path / "step-8").glob("*.pt"))) == 3


def test_whole_parts_are_gathered_in_the_main_thread_also_without_memory(checkpoints, monkeypatch, tmp_path):
    monkeypatch.setattr(saver, "host_memory", lambda: (100, -1))
    threads = []
    part = ConvertedPart("random", SimpleNamespace(state_dict=lambda: threads.append(threading.current_thread())))
    monkeypatch.setattr(part, "convert", lambda state: {})
    checkpoints.save([part], step_idx=8, metrics=None, facts={})
    assert (tmp_path / "step-8" / "random.pt").exists()
    assert threads == [threading.main_thread()]


def test_a_save_that_fails_ends_the_run_at_its_next_update(checkpoints, monkeypatch, tmp_path):
    save(checkpoints, 8)
    checkpoints.finish()
    monkeypatch.setattr(files, "sync", partial(fail, OSError(28, "No space left on device")))
    save(checkpoints, 16)
    with pytest.raises(RunError, match=r"step-16 could not be written: .*; earlier ones are intact"):
        wait_until(checkpoints.check, 60)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-8"]


def test_without_memory_for_a_copy_training_waits_and_a_line_says_so(checkpoints, monkeypatch, tmp_path, printed):
    monkeypatch.setattr(saver, "host_memory", lambda: (100, 35))
    save(checkpoints, 8)
    assert (tmp_path / "step-8").exists()
    assert printed() == (
        f"saved {tmp_path}/step-8\ntraining waited for the save, as copies take 3.6e-08 GB of memory per machine\n"
    )


def test_who_may_read_other_new_files_may_read_a_shard(tmp_path):
    folder = tmp_path / "step-8"
    folder.mkdir()
    (folder / "policy.pt").touch()
    write_parts(folder / "shard", {"weight": ((0,), torch.zeros(2))})
    assert (folder / "shard").stat().st_mode == (folder / "policy.pt").stat().st_mode


DIVISIONS = {
    "uneven rows, cut and sharded": (ParallelDims(6, shard_size=3, tensor_size=2), True),
    "hybrid": (ParallelDims(4, shard_size=2), True),
    "frozen weights whole, cut": (ParallelDims(4, shard_size=2, tensor_size=2), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_what_is_read_is_what_was_saved(division, tmp_path):
    dims, trained = DIVISIONS[division]
    launch(save_and_read, dims.world_size, dims, trained, tmp_path, process_group=True)
