"""The parts of a checkpoint, and how a run continues from each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dpo.checkpoint.files import DamagedCheckpoint, read_state
from dpo.errors import InputError
from dpo.parallel.mesh import Mesh, from_rank_0, is_rank_0
from dpo.parallel.state import full_state, load_optimizer

COUNTERS = ("example_counter", "batch_counter", "evaluated_at", "saved_at")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Part:
    """The whole state of `source`, in a file NAME.pt.

    Every process must call `gather` and `restore`; rank 0 has the file.
    """

    n_bytes = 0  # taken by a copy of the state; 0: little

    def __init__(self, name: str, source: Any) -> None:
        self.name, self.source = name, source

    def gather(self, *, copy: bool) -> Any:
        """The whole state, on rank 0.

        With `copy` it does not change while training continues.
        """
        return full_state(self.source.state_dict(), copy=copy)

    def convert(self, state: Any) -> Mapping[str, bytes]:
        """Further files made from a gathered state: their content by name."""
        return {}

    def restore(self, file: Path) -> None:
        """Continue from the part's file, which rank 0 reads."""
        self.source.load_state_dict(from_rank_0(read_state(file) if is_rank_0() else None))


class ModelPart(Part):
    """A model's weights, which are read before the model is distributed (`dpo.models.loading`)."""

    @property
    def n_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.source.parameters())

    def restore(self, file: Path) -> None:
        pass


class OptimizerPart(Part):
    """An optimizer's state, whole: each process takes its shards."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        super().__init__("optimizer", optimizer)
        self.mesh = mesh

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for state in self.source.state.values() for tensor in state.values())

    def restore(self, file: Path) -> None:
        """Load this process's shards.

        Raises DamagedCheckpoint if the state does not fit.
        """
        state = None
        if is_rank_0():
            state = read_state(file)
            if misfit := find_misfit(self.source, state):
                raise DamagedCheckpoint(f"{file} does not fit {type(self.source).__name__}: {misfit}")
            groups = zip(self.source.state_dict()["param_groups"], state["param_groups"], strict=True)
            # a newer torch may have options that the file lacks
            state = {**state, "param_groups": [own | dict(saved) for own, saved in groups]}
        load_optimizer(self.source, state, self.mesh)


class RandomPart(Part):
    """The random states of all processes.

    A run with another number of processes continues without them.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("random", None)
        self.mesh = mesh

    def gather(self, *, copy: bool) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()
        state = {  # in types allowed in a checkpoint
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *rest],
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
        kind, keys, place, *rest = state["numpy"]
        if not 0 <= place <= len(keys):  # numpy would accept it
            raise ValueError(f"{place} is not an index into {len(keys)} keys")
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, *rest))
        torch.set_rng_state(state["torch"])
        for device, gpu_state in enumerate(state["cuda"][: torch.cuda.device_count()]):  # there may be fewer now
            torch.cuda.set_rng_state(gpu_state, device)


class ReferenceState(Protocol):
    digest: str | None
    logps: Stateful


class RunState:
    """The counters of a run, and states without own files.

    They are the part `trainer`. Such states are those of the callbacks, with the lengths of their log files, of the
    saver (what BEST is), of the loss (a running average), of the scorer, and the cached reference log-probabilities.

    A checkpoint holds digests in place of weights that are not saved: the reference's, or, without a reference, that of
    the base under an adapter. The latter is `frozen`; rank 0 has it.
    """

    def __init__(self, reference: ReferenceState | None, frozen: str | None, *, rank: int, **states: Stateful) -> None:
        self.example_counter = 0  # examples trained on
        self.batch_counter = 0  # updates applied or skipped
        self.evaluated_at: int | None = None  # example_counter at the last evaluation
        self.saved_at: int | None = None  # at the last checkpoint, unless an evaluation came after it
        self._rank, self._states = rank, dict(states)
        self._frozen, self._frozen_name = frozen, "base"
        if reference:
            self._frozen, self._frozen_name = reference.digest, "reference"
            self._states["reference_logps"] = reference.logps

    def count(self, n_examples: int) -> tuple[int, int]:
        """Count one more update of `n_examples`. Returns (updates, examples) including it."""
        self.batch_counter += 1
        self.example_counter += n_examples
        return self.batch_counter, self.example_counter

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "reference": self._frozen,
            **{name: state.state_dict() for name, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`. Raises InputError if the reference has changed."""
        if self._rank == 0 and state["reference"] != self._frozen:
            name = self._frozen_name
            raise InputError(f"the {name} model has changed since the checkpoint: model.name_or_path or model.archive")
        for name in COUNTERS:
            setattr(self, name, state[name])
        for name, part in self._states.items():
            part.load_state_dict(state[name])


def find_misfit(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """The reason why a state does not fit this optimizer, if any."""
    # the state dict numbers the parameters of the whole model, even if the optimizer has several slices of each
    own_numbers, numbers = (
        [list(group["params"]) for group in state_dict["param_groups"]]
        for state_dict in (optimizer.state_dict(), state)
    )
    if own_numbers != numbers:
        return f"it has {sum(map(len, numbers))} parameters, not {sum(map(len, own_numbers))}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_whole = len(parameters) == sum(map(len, own_numbers))  # shapes of slices cannot be compared
    for number, values in state["state"].items():
        shape = parameters[number].shape if is_whole else None
        keys = _list_state_keys(type(optimizer), 2 if shape is None else len(shape))
        if set(values) != keys:
            return f"parameter {number}: its keys are {', '.join(values)}, not {', '.join(sorted(keys))}"
        for key, value in values.items():
            if shape is not None and isinstance(value, torch.Tensor) and not _spreads_to(value.shape, shape):
                return f"parameter {number}: {key} has shape {tuple(value.shape)}, not {tuple(shape)}"
    return None


@cache
def _list_state_keys(kind: Callable[..., torch.optim.Optimizer], ndim: int) -> set[str]:
    """The keys of an optimizer's state per parameter, found by an update."""
    parameter = torch.nn.Parameter(torch.zeros((2,) * ndim))
    parameter.grad = torch.zeros_like(parameter)
    probe = kind([parameter], lr=1.0)
    probe.step()
    return set(probe.state[parameter])


def _spreads_to(shape: torch.Size, whole: torch.Size) -> bool:
    """Return whether a shape broadcasts to a parameter's.

    Adafactor's row and column statistics do.
    """
    sizes = zip(reversed(shape), reversed(whole), strict=False)  # from the last dim, as broadcasting aligns them
    return len(shape) <= len(whole) and all(size in (1, whole_size) for size, whole_size in sizes)
