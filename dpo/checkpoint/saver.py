"""What a checkpoint consists of, and saving and restoring it while a run trains."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpo.checkpoint.files import DamagedCheckpoint, point, prune, read_state, write_checkpoint
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.parallel.mesh import Mesh, from_rank_0, is_rank_0
from dpo.parallel.state import full_state, load_optimizer, whole_parameter, whole_states
from dpo.system.host import host_memory
from dpo.system.run_directory import read_record
from dpo.system.waiting import meet_rank_0

COUNTERS = ("example_counter", "batch_counter", "evaluated_at", "samples_due", "saved_at")  # attributes of `RunState`

# --- the parts of a checkpoint -------------------------------------------------------------------------------------


class Part:
    """The whole state of `source`, in a file NAME.pt of rank 0; every process must call `gather` and `restore`.

    `source` has `state_dict()` and `load_state_dict(state)`.
    """

    n_bytes = 0  # size of a copy of the state; 0 if it is small

    def __init__(self, name: str, source: Any) -> None:
        self.name, self.source = name, source

    def gather(self, *, copy: bool) -> Any:
        """The whole state, on rank 0; a copy does not change while training continues."""
        return full_state(self.source.state_dict(), copy=copy)

    def convert(self, state: Any) -> Mapping[str, bytes]:
        """Further files made from a gathered state: content by file name."""
        return {}

    def restore(self, file: Path) -> None:
        """Continue from the part's file, which rank 0 reads."""
        self.source.load_state_dict(from_rank_0(read_state(file) if is_rank_0() else None))


class ModelPart(Part):
    """A model's weights, which were read before the model was distributed (`dpo.models.loading`)."""

    @property
    def n_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.source.parameters())

    def restore(self, file: Path) -> None:
        pass


class OptimizerPart(Part):
    """An optimizer's state, saved whole; each process restores its shards."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        super().__init__("optimizer", optimizer)
        self.mesh = mesh

    @property
    def n_bytes(self) -> int:
        return sum(
            value.nbytes * whole_parameter(tensor).numel() // max(1, tensor.numel())
            for tensor, state in self.source.state.items()
            for value in state.values()
        )

    def gather(self, *, copy: bool) -> Any:
        return full_state(whole_states(self.source), copy=copy)

    def restore(self, file: Path) -> None:
        state = None
        if is_rank_0():
            state = read_state(file)
            own_groups, groups = self.source.state_dict()["param_groups"], state["param_groups"]
            if [len(group["params"]) for group in own_groups] != [len(group["params"]) for group in groups]:
                raise InputError(
                    f"{file} is the state of other tensors: a run with tensor_parallel.backend=tensor_parallel "
                    f"continues with the same tensor_parallel_size, and no other run continues it"
                )
            # an older torch may have written the file: options missing there keep this optimizer's values
            state = {
                **state,
                "param_groups": [own | dict(group) for own, group in zip(own_groups, groups, strict=True)],
            }
        load_optimizer(self.source, state, self.mesh)


class RandomPart(Part):
    """The random states of all processes; another number of processes continues without them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("random", None)
        self.mesh = mesh

    def gather(self, *, copy: bool) -> dict[str, Any]:
        generator, keys, *others = np.random.get_state()
        state = {  # without arrays, which `read_file` would refuse
            "python": random.getstate(),
            "numpy": [generator, keys.tolist(), *others],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        }
        return {"states": self.mesh.gather_all(state)}

    def restore(self, file: Path) -> None:
        states = from_rank_0(read_state(file)["states"] if is_rank_0() else None)
        if len(states) != self.mesh.world_size:
            return
        state = states[self.mesh.rank]
        random.setstate(state["python"])
        generator, keys, *others = state["numpy"]
        np.random.set_state((generator, np.array(keys, dtype=np.uint32), *others))
        torch.set_rng_state(state["torch"])
        for device, gpu_state in enumerate(state["cuda"][: torch.cuda.device_count()]):  # maybe fewer GPUs now
            torch.cuda.set_rng_state(gpu_state, device)


class RunState:
    """The counters of a run, and states without their own file: together the part `trainer`.

    Frozen weights (the reference's, or without a reference the base under an adapter) are not saved. The checkpoint has
    their digest, and a resumed run refuses other weights. `base_digest` is the digest of the base on rank 0; None
    without an adapter. Each of the `states` has `state_dict()` and `load_state_dict(state)`.
    """

    def __init__(self, reference: Any, base_digest: str | None, *, rank: int, **states: Any) -> None:
        self.example_counter = 0  # examples trained on
        self.batch_counter = 0  # updates applied or skipped
        self.evaluated_at: int | None = None  # example_counter at the last evaluation
        self.samples_due = False  # evaluated, but not sampled yet: samples are drawn after the checkpoint is saved
        self.saved_at: int | None = None  # example_counter at the last checkpoint; None after a later evaluation
        self._rank, self._states, self._frozen_digest = rank, dict(states), base_digest
        if reference:
            self._frozen_digest = reference.digest
            self._states["reference_logps"] = reference.logps

    def count_update(self, n_examples: int) -> None:
        self.batch_counter += 1
        self.example_counter += n_examples

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "reference": self._frozen_digest,
            **{name: state.state_dict() for name, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`. Raises InputError if the frozen weights have changed."""
        if self._rank == 0 and state["reference"] != self._frozen_digest:
            raise InputError(
                "the reference or base model has changed since the checkpoint: restore the files that "
                "model.name_or_path or model.archive names, or start a new run"
            )
        for counter in COUNTERS:
            setattr(self, counter, state[counter])
        for name, stateful in self._states.items():
            stateful.load_state_dict(state[name])


# --- saving and restoring ------------------------------------------------------------------------------------------


class Checkpoints:
    """Saves a run's states, gathered on rank 0, which writes them in the background if a copy fits in memory.

    BEST is the best of evaluations of the same `n_evaluated` examples.
    """

    def __init__(
        self, run_dir: Path, mesh: Mesh, *, keep: int | None, log: Callable[[str], None], n_evaluated: int = 0
    ) -> None:
        self.run_dir, self.mesh, self.keep, self.log, self.n_evaluated = run_dir, mesh, keep, log, n_evaluated
        self.run = read_record(run_dir).get("run")  # the id of the run, by which it knows its checkpoints
        self.best_at: int | None = None  # number of examples at BEST
        self.best = -math.inf  # quality of BEST; higher is better
        self.latest = math.nan  # quality of LATEST; NaN if it was not evaluated
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._n_meetings = 0

    def save(
        self,
        parts: Sequence[Part],
        *,
        step_idx: int,
        metrics: Mapping | None,
        quality: float | None,
        facts: Callable[[], Mapping],
        elsewhere: Path | None = None,
    ) -> None:
        """Save the parts to `step-N`, LATEST and, if of the highest quality so far, BEST; every process must call it.

        With `elsewhere`, saves to that directory instead and changes no link.
        """
        self.wait()  # for the previous save, so that at most one copy of the state is in memory
        links = []
        if not elsewhere:
            links = ["LATEST"]
            self.latest = math.nan if quality is None else quality
            if self.latest > self.best:  # false for NaN
                self.best, self.best_at = self.latest, step_idx
                links = ["LATEST", "BEST"]
        n_bytes = sum(part.n_bytes for part in parts)
        # beside the copy, as much memory again must remain for training, which goes on meanwhile
        in_background = self.mesh.rank == 0 and 2 * n_bytes < host_memory().available
        states = self._gather(parts, copy=in_background)  # a generator: each part is gathered when taken from it
        if self.mesh.rank != 0:
            for _ in states:  # take part in the collectives
                pass
            return
        directory = elsewhere or self.run_dir / f"step-{step_idx}"
        all_facts = {**facts(), "run": self.run, "best_at": self.best_at}
        write = partial(self._write, directory, links=links, step_idx=step_idx, metrics=metrics, facts=all_facts)
        if in_background:
            self._writing = self._thread.submit(write, list(states))
            if elsewhere:  # the caller may read the files at once
                self.wait()
        else:
            write(states)  # takes one part at a time from the generator, so that only one is in memory

    def _gather(self, parts: Sequence[Part], *, copy: bool) -> Iterator[tuple[str, Any]]:
        """Yield the name and state of each part, whole on rank 0 alone, then its further files."""
        for part in parts:
            self._wait_for_rank_0()  # it may still write the previous part
            state = part.gather(copy=copy)
            yield part.name, state
            if self.mesh.rank == 0:
                yield from part.convert(state).items()

    def _wait_for_rank_0(self) -> None:
        """Wait until rank 0 has written its file and calls this too."""
        self._n_meetings += 1  # each meeting of the ranks needs a name of its own
        meet_rank_0(f"meeting {self._n_meetings} over checkpoints")

    def _write(self, directory: Path, states: Iterable[tuple[str, Any]], *, links: list[str], **content: Any) -> None:
        write_checkpoint(directory, states, **content)
        for link in links:
            point(self.run_dir / link, directory)
        if self.keep is not None:
            prune(self.run_dir, self.keep, self.run)
        self.log(f"saved {directory}")

    def restore(self, checkpoint: Path, parts: Sequence[Part]) -> None:
        """Continue with the parts as they were saved; every process must call it."""
        for part in parts:
            file = checkpoint / f"{part.name}.pt"

            def explain(error: Exception, file: Path = file) -> DamagedCheckpoint:
                reason = f"{type(error).__name__} {one_sentence(error)}"
                return DamagedCheckpoint(f"{file} does not hold the state of a run: {reason}")

            with explaining_library(explain):
                part.restore(file)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_at": self.best_at, "n_evaluated": self.n_evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()` if its BEST is in this run's directory, which may be a new one."""
        if state["n_evaluated"] != self.n_evaluated:
            evaluated = f"{self.n_evaluated} test examples are evaluated, and were {state['n_evaluated']}"
            self.log(f"BEST is chosen anew from now on, as {evaluated}: their means cannot be compared")
            return
        if (self.run_dir / f"step-{state['best_at']}").exists():
            self.best, self.best_at = state["best"], state["best_at"]

    def check(self) -> None:
        """Raise the error of a background write that has failed."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for a background write to end; raise its error, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Make every process wait until rank 0 has written everything."""
        self.wait()
        self._wait_for_rank_0()
        self.mesh.any(False)  # a barrier
