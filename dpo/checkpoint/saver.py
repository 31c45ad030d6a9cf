"""Saving and restoring the state of a run during training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from dpo.checkpoint.files import (
    FOLLOWING,
    WRONG_FORM,
    BackgroundWriter,
    DamagedCheckpoint,
    point,
    prune,
    read_state,
    tensors_in,
    write_checkpoint,
)
from dpo.checkpoint.optimizer_state import find_misfit
from dpo.errors import InputError
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.state import full_state, load_optimizer
from dpo.system.host_memory import host_memory
from dpo.system.waiting import made_progress, meet_rank_0


@runtime_checkable
class HasFiles(Protocol):
    """A part whose state is also saved in another format, as bytes by file name."""

    def files(self, state: Mapping[str, Any]) -> Mapping[str, bytes]: ...


def random_state() -> dict[str, Any]:
    """The random states of Python, numpy and torch in this process, in types allowed in a checkpoint."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a `random_state()`, for as many GPUs as this process has now."""
    random.setstate(state["python"])
    kind, keys, place, *rest = state["numpy"]
    if not 0 <= place <= len(keys):  # numpy would accept it
        raise ValueError(f"{place} is not an index into {len(keys)} keys")
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, *rest))
    torch.set_rng_state(state["torch"])
    for device, gpu_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(gpu_state, device)


def _count_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The size in bytes of an optimizer's state and its parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return sum(t.numel() * t.element_size() for t in (*parameters, *tensors_in(list(optimizer.state.values()))))


def _of_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Add settings that an older torch lacked to an optimizer's state. Raises DamagedCheckpoint if it does not fit."""
    if misfit := find_misfit(optimizer, state):
        raise DamagedCheckpoint(f"{checkpoint / 'optimizer.pt'} does not fit {type(optimizer).__name__}: {misfit}")
    ours = optimizer.state_dict()["param_groups"]
    groups = [our | dict(their) for our, their in zip(ours, state["param_groups"], strict=True)]
    return {**state, "param_groups": groups}


@contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except WRONG_FORM as error:
        raise DamagedCheckpoint(f"{path} does not hold the state of a run: {type(error).__name__} {error}") from error


class Checkpoints:
    """Saves of a run's state, gathered on rank 0, and written in the background if a copy fits in its memory."""

    def __init__(self, run_dir: Path, mesh: Mesh, *, keep: int | None, log: Callable[[str], None]) -> None:
        self.run_dir, self.mesh, self.keep, self.log = run_dir, mesh, keep, log
        self.best_at = -1  # number of examples
        self.best = -math.inf  # quality of BEST
        self.latest = math.nan  # quality of LATEST, if it was evaluated
        self._writer = BackgroundWriter()
        self._n_meetings = 0

    def save(
        self,
        stateful: Mapping[str, Any],
        *,
        step_idx: int,
        metrics: Mapping | None,
        quality: float | None,
        facts: Callable[[], Mapping],
        elsewhere: Path | None = None,
    ) -> None:
        """Save each part's state dict and the random states of all processes; every process must call it.

        The directory is `step-N`, which becomes LATEST, and BEST if its quality is the highest; or `elsewhere`, without
        such links.
        """
        self._writer.wait()  # hold at most one copy in memory
        links = []
        if elsewhere is None:
            links, self.latest = ["LATEST"], math.nan if quality is None else quality
            if quality is not None and quality > self.best:  # false for NaN
                self.best, self.best_at = quality, step_idx
                links.append("BEST")
        size = _count_bytes(stateful["optimizer"])
        if FOLLOWING in stateful:
            size += sum(parameter.nbytes for parameter in stateful[FOLLOWING].parameters())
        background = self.mesh.rank == 0 and 2 * size < host_memory().available
        states = self._gather(stateful, copy=background)
        if self.mesh.rank != 0:
            for _ in states:  # take part in the collectives
                pass
            return
        directory = elsewhere or self.run_dir / f"step-{step_idx}"
        content = {"step_idx": step_idx, "metrics": metrics, "facts": {**facts(), "best_at": self.best_at}}
        write = partial(self._commit, directory, links=links, **content)
        if background:
            self._writer.start(partial(write, list(states)))
            if elsewhere:  # the caller may read it at once
                self._writer.wait()
        else:
            write(states)

    def _meet(self) -> None:
        """Wait for rank 0, which may be writing."""
        self._n_meetings += 1
        meet_rank_0(f"meeting {self._n_meetings} over checkpoints")

    def _gather(self, stateful: Mapping[str, Any], *, copy: bool) -> Iterator[tuple[str, Any]]:
        for name, part in stateful.items():
            self._meet()  # rank 0 may still be writing the previous part
            state = full_state(part.state_dict(), copy=copy)
            yield name, state
            if isinstance(part, HasFiles) and self.mesh.rank == 0:
                yield from part.files(state).items()
        self._meet()
        yield "random", {"states": self.mesh.gather_all(random_state())}

    def restore(self, checkpoint: Path, stateful: Mapping[str, Any]) -> None:
        """Load each part's state, then the random states; models were loaded before they were distributed.

        Every process must call it. Raises DamagedCheckpoint if a file does not hold the state of its part.
        """
        for name, part in stateful.items():
            if name not in ("policy", FOLLOWING):
                with _as_damage(checkpoint / f"{name}.pt"):
                    self._restore_part(name, part, checkpoint)
        with _as_damage(checkpoint / "random.pt"):
            states = self._read(checkpoint, "random")["states"]
            if len(states) == self.mesh.world_size:
                set_random_state(states[self.mesh.rank])

    def _restore_part(self, name: str, part: Any, checkpoint: Path) -> None:
        if name == "optimizer":
            state = read_state(checkpoint / "optimizer.pt") if self.mesh.rank == 0 else None
            load_optimizer(part, state and _of_optimizer(part, state, checkpoint), self.mesh)
            return
        state = self._read(checkpoint, name)
        if name == "scheduler":  # the scheduler would set any key of the state as an attribute
            known = part.state_dict()
            state = {key: value for key, value in state.items() if key in known}
        part.load_state_dict(state)

    def _read(self, checkpoint: Path, name: str) -> Any:
        """The state of a part, read by rank 0 alone."""
        return from_rank_0(read_state(checkpoint / f"{name}.pt") if self.mesh.rank == 0 else None)

    def _commit(self, directory: Path, states: Iterable[tuple[str, Any]], *, links: list[str], **content: Any) -> None:
        write_checkpoint(directory, states, progress=made_progress, **content)
        for link in links:
            point(self.run_dir / link, directory)
        if self.keep is not None:
            prune(self.run_dir, self.keep)
        self.log(f"saved {directory}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_at": self.best_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`. The best checkpoint of a run in another directory does not count here."""
        if (self.run_dir / f"step-{state['best_at']}").exists():
            self.best, self.best_at = state["best"], state["best_at"]

    def check(self) -> None:
        """Raise the error of the background write, if any."""
        self._writer.check()

    def wait(self) -> None:
        """Wait until this process is not writing."""
        self._writer.wait()

    def finish(self) -> None:
        """Wait on every process until none is writing."""
        self.wait()
        self._meet()
        self.mesh.any(False)
