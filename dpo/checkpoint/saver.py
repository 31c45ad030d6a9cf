"""The parts of a checkpoint, gathered from all processes and restored on them."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_any
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dpo import __version__
from dpo.checkpoint.files import (
    DamagedCheckpoint,
    WrittenFile,
    prune,
    read_state,
    set_link,
    write_checkpoint,
    write_shard,
)
from dpo.checkpoint.shards import SHARD
from dpo.errors import explaining_library, one_sentence
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import Parts, count_own_bytes, full_state, load_optimizer, optimizer_state, take_parts
from dpo.system.host import host_memory
from dpo.system.launching import count_machines
from dpo.system.run_directory import read_run_facts
from dpo.system.waiting import announce, from_rank_0, gather_all, meet_rank_0, name_call, wait_for

COMPLETION_SECS = 60  # how long a process that fails waits for a save that needs other processes, which may fail too
COUNTERS = ("example_counter", "batch_counter", "evaluated_at", "samples_due", "saved_at")  # attributes of `RunState`

# --- the parts of a checkpoint -------------------------------------------------------------------------------------


@dataclass
class Part:
    """A state that rank 0 writes to NAME.pt; every process must call `gather` and `restore`."""

    name: str
    source: Any  # the object that has the state; a RandomPart has the mesh here
    is_always_whole: ClassVar[bool] = False  # also in sharded checkpoints

    def find_state(self) -> Any:
        """Return this process's state."""
        return self.source.state_dict()

    def gather(self) -> Any:
        """Return the whole state on rank 0."""
        return full_state(self.find_state())

    def convert(self, state: Any) -> Mapping[str, bytes]:
        """Return the contents of further files of the checkpoint, by name, made of the state that rank 0 gathered."""
        return {}

    def restore(self, state: Any) -> None:
        """Load a state, which rank 0 has read for all processes; on other ranks `state` is None."""
        self.source.load_state_dict(from_rank_0(state))


class ModelPart(Part):
    """A model's weights. `restore` does nothing: `dpo.models.loading` read them before the model was distributed."""

    def find_state(self) -> dict:
        return dict(self.source.state_dict())  # files have plain dicts

    def restore(self, state: Any) -> None:
        pass


@dataclass
class OptimizerPart(Part):
    """An optimizer's state. Its file has whole tensors; each process restores its shards of them."""

    mesh: Mesh

    def find_state(self) -> Any:
        return optimizer_state(self.source)

    def restore(self, state: Any) -> None:
        load_optimizer(self.source, state, self.mesh)


class RandomPart(Part):
    """The states of the random generators of all processes."""

    is_always_whole = True

    def gather(self) -> dict:
        """Gather the states of all processes' generators, by rank."""
        generator, keys, *others = np.random.get_state()
        state = {  # without arrays, which `read_file` would refuse
            "python": random.getstate(),
            "numpy": [generator, keys.tolist(), *others],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        }
        return {"states": gather_all(state)}

    def restore(self, state: Any) -> None:
        """Restore this process's generators, unless the number of processes has changed."""
        states = from_rank_0(state)["states"]
        if len(states) != self.source.world_size:
            return
        state = states[self.source.rank]
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])  # maybe fewer GPUs now


class RunState:
    """The base class of a trainer, with what a checkpoint saves of it as the part `trainer`: counters and other states.

    Of frozen weights, those of the reference or of an adapted base, only a digest is saved.
    """

    example_counter = 0  # examples trained on
    batch_counter = 0  # updates applied or skipped
    evaluated_at: int | None = None  # example_counter at the last evaluation
    samples_due = False  # evaluated, but not sampled yet: samples are drawn after the checkpoint is saved
    saved_at: int | None = None  # example_counter at the last checkpoint; None after a later evaluation

    def __init__(self, reference: Any, base_digest: str | None, **states: Any):
        """`states` are objects with `state_dict` and `load_state_dict`, by their names in the checkpoint.

        `base_digest` is the digest of an adapted base, which counts only if there is no reference.
        """
        self._states = states
        self._frozen_digest = reference.digest if reference else base_digest
        if reference:
            self._states["reference_logps"] = reference.logps

    def state_dict(self) -> dict:
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "reference": self._frozen_digest,
            **{name: state.state_dict() for name, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restore all but the digest, which `dpo.models.loading` compares."""
        for counter in COUNTERS:
            setattr(self, counter, state[counter])
        for name, stateful in self._states.items():
            stateful.load_state_dict(state[name])


def read_frozen_digest(checkpoint: Path) -> str | None:
    """Return the digest of frozen weights that a `RunState` has saved; raise DamagedCheckpoint if it has not."""
    file = checkpoint / "trainer.pt"
    with _explaining_state(file):
        return read_state(file)["reference"]


def _explaining_state(file: Path) -> AbstractContextManager:
    return explaining_library(
        lambda why: DamagedCheckpoint(f"{file} does not hold the state of a run: {one_sentence(why)}")
    )


# --- saving and restoring ------------------------------------------------------------------------------------------


@dataclass
class Checkpoints:
    """A run's checkpoints. BEST is chosen among those that were evaluated on the same `n_evaluated` examples."""

    run_dir: Path
    mesh: Mesh
    keep: int | None  # newest checkpoints to keep; None: all
    log: Callable  # prints a message
    n_evaluated: int = 0
    sharded: bool = False  # every process writes its parts of the tensors
    best_at: int | None = None  # number of examples at BEST
    best: float = -math.inf  # quality of BEST; higher is better

    def __post_init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._saving: Future | None = None
        self.run = read_run_facts(self.run_dir).get("run")  # the id of the run, by which it knows its checkpoints

    def save(
        self,
        parts: Sequence[Part],
        *,
        step_idx: int,
        metrics: Mapping | None,
        facts: Mapping,
        quality: float = math.nan,
        elsewhere: Path | None = None,
    ) -> None:
        """Save to `step-N`, and point LATEST to it, and BEST if its quality is the highest so far.

        With `elsewhere`, save to that directory, and set no links. `step_idx`, the reference code's name of N, is the
        number of examples trained on. `metrics` are those of an evaluation at this point, if there was one. `quality`
        is the value that ranks checkpoints, where higher is better, or NaN, and `facts` are for the manifest. Every
        process must call it; unless the checkpoint is sharded, rank 0 alone writes.
        """
        self.wait()
        links = [] if elsewhere else ["LATEST"]
        if links and quality > self.best:  # false for NaN
            self.best = quality
            self.best_at = step_idx
            links.append("BEST")
        directory = elsewhere or self.run_dir / f"step-{step_idx}"
        facts = {**facts, "version": __version__, "run": self.run, "best_at": self.best_at}

        def write(states: Iterable[tuple]) -> str:
            """Write the checkpoint on rank 0, set its links and prune; return a message for the user."""
            write_checkpoint(directory, states, step_idx=step_idx, metrics=metrics, facts=facts)
            for link in links:
                set_link(self.run_dir / link, directory)
            if self.keep:
                prune(self.run_dir, self.keep, self.run)
            return f"saved {directory}"

        if self.sharded:
            self._save_shards(parts, directory, write)
            if elsewhere:  # the caller may use it at once
                self.wait()
        else:
            states = self._gather(parts)  # a generator: each part is gathered when taken from it
            if self.mesh.rank == 0:
                self.log(write(states))
            else:
                for _ in states:  # gathering is collective, so the other ranks take part
                    pass

    def _gather(self, parts: Sequence[Part]) -> Iterator[tuple]:
        """Yield the parts' names and states, which are whole on rank 0 alone."""
        for part in parts:
            # Rank 0 may still be writing the previous part, which may take longer than a collective waits.
            meet_rank_0("a checkpoint's part")
            state = part.gather()
            yield part.name, state
            if self.mesh.rank == 0:
                yield from part.convert(state).items()
            del state  # freed before the next one is gathered

    # --- sharded checkpoints ---------------------------------------------------------------------------------------

    def _save_shards(self, parts: Sequence[Part], directory: Path, write: Callable[[Iterable], str]) -> None:
        """Copy this process's parts of the tensors to the host, and write the copies while training goes on.

        Without memory for the copies of all parts, training waits, and one part at a time is copied and written.
        """
        call = name_call("a checkpoint")
        # Whole parts are gathered here, as another thread must call no collective.
        whole_parts = [part for part in parts if part.is_always_whole]
        whole = copy.deepcopy(list(self._gather(whole_parts)))  # what was whole before is not a copy yet
        others = [part for part in parts if not part.is_always_whole]
        n_bytes = sum(count_own_bytes(part.find_state()) for part in others)
        n_bytes *= math.ceil(self.mesh.world_size / count_machines())  # for all processes of a machine
        _, n_free = host_memory()
        copies: Iterable[tuple] = map(self._copy, others)  # lazy: a part is copied when the next copy is taken
        has_memory = not self.mesh.any(n_bytes > n_free)
        if has_memory:
            copies = list(copies)
        self._saving = self._thread.submit(self._write_shards, call, directory, whole, copies, write)
        if not has_memory:
            self.wait()
            self.log(f"training waited for the save, as copies take {n_bytes / 1e9:.2g} GB of memory per machine")

    def _copy(self, part: Part) -> tuple[str, Any, Parts]:
        """Copy a part to the host: its name, the state for rank 0's file, and this process's parts of its tensors."""
        state, own = take_parts(part.find_state(), part.name, self.mesh)
        copied = copy.deepcopy(state) if self.mesh.rank == 0 else None
        return part.name, copied, own

    def _write_shards(
        self,
        call: str,
        directory: Path,
        whole: Iterable[tuple],
        copies: Iterable[tuple],
        write: Callable[[Iterable], str],
    ) -> str:
        """Write the `whole` states and the copies, and return a message for the user once the checkpoint is complete.

        Rank 0 alone calls `write`. As the main thread may train, this calls no collective: the ranks communicate
        through the store, under keys that begin with `call` (from `name_call`).
        """
        rank = self.mesh.rank
        size = self.mesh.world_size

        def write_own(name: str, own: Parts) -> list[tuple]:
            """Write this process's tensors of a part; return [(name, WrittenFile)], or [] if there are none."""
            return [write_shard(directory, SHARD.format(name, rank + 1, size), own)] if own else []

        def iterate_states() -> Iterator[tuple]:
            """Yield the `states` for `write_checkpoint`: those that rank 0 has copied, and the shards of every rank."""
            # This runs when `write_checkpoint` takes the first state, once it has made the directory.
            announce(f"{call} begins")
            yield from whole
            for name, state, own in copies:
                yield name, state
                yield from write_own(name, own)
                del state, own  # freed before the next part is copied
            for other in range(1, size):
                for name, facts in json.loads(wait_for(f"{call}, files of rank {other}")):
                    yield name, WrittenFile(facts)

        if rank == 0:
            message = write(iterate_states())
            announce(f"{call} is complete", message)
            return message
        wait_for(f"{call} begins")  # from then on, the directory is there
        written = []
        for name, _, own in copies:
            written += write_own(name, own)
            del own  # as on rank 0
        announce(f"{call}, files of rank {rank}", json.dumps(written))
        return wait_for(f"{call} is complete")

    def check(self) -> None:
        """Raise RunError if a save has failed while training went on, and log a save that is done."""
        if self._saving and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that is being written is complete; raise RunError if it has failed."""
        if self._saving:
            saving, self._saving = self._saving, None
            self.log(saving.result())

    def let_complete(self) -> None:
        """Wait, before an error ends this process, for the save that is being written; its own errors are ignored."""
        if self._saving:
            wait_for_any([self._saving], timeout=COMPLETION_SECS if self.mesh.world_size > 1 else None)

    def finish(self) -> None:
        """Wait on every process until rank 0 has written everything."""
        self.wait()
        meet_rank_0("the end of the checkpoints")
        self.mesh.any(False)  # a barrier, as rank 0 has not waited for the others so far

    def restore(self, checkpoint: Path, parts: Sequence[Part]) -> None:
        """Restore the parts; every process must call it."""
        for part in parts:
            file = checkpoint / f"{part.name}.pt"
            with _explaining_state(file):
                part.restore(read_state(file) if self.mesh.rank == 0 else None)

    def state_dict(self) -> dict:
        return {"best": self.best, "best_at": self.best_at, "n_evaluated": self.n_evaluated}

    def load_state_dict(self, state: Mapping) -> None:
        """Keep BEST if it was evaluated on as many examples and is in this run's directory, which may be a new one."""
        before = state["n_evaluated"]
        if before != self.n_evaluated:
            self.log(f"BEST is chosen again: {self.n_evaluated} test examples are evaluated now, {before} before")
        elif (self.run_dir / f"step-{state['best_at']}").exists():
            self.best = state["best"]
            self.best_at = state["best_at"]
