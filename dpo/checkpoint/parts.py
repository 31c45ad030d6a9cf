"""The parts of a checkpoint, and how a run continues from each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dpo.checkpoint.files import DamagedCheckpoint, read_state
from dpo.errors import InputError
from dpo.parallel.mesh import Mesh, from_rank_0, is_rank_0
from dpo.parallel.state import full_state, load_optimizer

COUNTERS = ("example_counter", "batch_counter", "evaluated_at", "samples_due", "saved_at")  # attributes of `RunState`


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Part:
    """The whole state of `source`, in a file NAME.pt of rank 0; every process must call `gather` and `restore`."""

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
        state = from_rank_0(read_state(file) if is_rank_0() else None)
        own = vars(self.source)
        if odd := [name for name, value in state.items() if name in own and not _is_alike(own[name], value)]:
            raise DamagedCheckpoint(f"{file} does not hold the state of a run: {odd[0]} is of another form")
        self.source.load_state_dict(state)


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether a saved value may replace a part's own."""
    if own is None:  # as a counter is before the first time
        return not isinstance(saved, torch.Tensor)
    if type(own) is int:
        return type(saved) is int and saved >= 0  # all integers are counts
    return isinstance(saved, (int, float) if type(own) is float else type(own))


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
        return sum(tensor.nbytes for state in self.source.state.values() for tensor in state.values())

    def restore(self, file: Path) -> None:
        state = None
        if is_rank_0():
            state = read_state(file)
            # an older torch may have written the file: options missing there keep this optimizer's values
            pairs_of_groups = zip(self.source.state_dict()["param_groups"], state["param_groups"], strict=True)
            state = {**state, "param_groups": [own_group | dict(group) for own_group, group in pairs_of_groups]}
        load_optimizer(self.source, state, self.mesh)


class RandomPart(Part):
    """The random states of all processes; another number of processes continues without them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("random", None)
        self.mesh = mesh

    def gather(self, *, copy: bool) -> dict[str, Any]:
        generator, keys, position, *gauss = np.random.get_state()
        state = {  # without arrays, which `read_file` would refuse
            "python": random.getstate(),
            "numpy": [generator, keys.tolist(), position, *gauss],
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
        generator, keys, position, *gauss = state["numpy"]
        if not 0 <= position <= len(keys):  # from a forged file; numpy would accept it
            raise ValueError(f"{position} is not a position in {len(keys)} keys")
        np.random.set_state((generator, np.array(keys, dtype=np.uint32), position, *gauss))
        torch.set_rng_state(state["torch"])
        for device, gpu_state in enumerate(state["cuda"][: torch.cuda.device_count()]):  # maybe fewer GPUs now
            torch.cuda.set_rng_state(gpu_state, device)


class ReferenceState(Protocol):
    digest: str | None
    logps: Stateful


class RunState:
    """The counters of a run, and states without their own file: together the part `trainer`.

    Frozen weights (the reference's, or without a reference the base under an adapter) are not saved. The checkpoint has
    their digest, and a resumed run refuses other weights. `base_digest` is the digest of the base on rank 0; None
    without an adapter.
    """

    def __init__(
        self, reference: ReferenceState | None, base_digest: str | None, *, rank: int, **states: Stateful
    ) -> None:
        self.example_counter = 0  # examples trained on
        self.batch_counter = 0  # updates applied or skipped
        self.evaluated_at: int | None = None  # example_counter at the last evaluation
        self.samples_due = False  # evaluated, but not sampled yet: samples are drawn after the checkpoint is saved
        self.saved_at: int | None = None  # example_counter at the last checkpoint; None after a later evaluation
        self._rank, self._states = rank, dict(states)
        self._frozen_digest, self._frozen_name = base_digest, "base"
        if reference:
            self._frozen_digest, self._frozen_name = reference.digest, "reference"
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
                f"the {self._frozen_name} model has changed since the checkpoint: restore the files that "
                f"model.name_or_path or model.archive names, or start a new run"
            )
        for counter in COUNTERS:
            setattr(self, counter, state[counter])
        for name, stateful in self._states.items():
            stateful.load_state_dict(state[name])
