"""Gathering the state of sharded models and optimizers into whole tensors, and sharding it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import _from_rank_0


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered from all processes; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hold_the_same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], mesh: Mesh) -> bool:
    """Whether all weights of `ours` equal `theirs`, in order, compared in the dtype of `theirs`.

    Every process compares its own shards.
    """
    mine, others = (list(map(local_tensor, weights)) for weights in (ours, theirs))
    same = len(mine) == len(others) and all(torch.equal(a.to(b), b) for a, b in zip(mine, others, strict=True))
    return not mesh.any(not same)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, copy: bool = False) -> Any:
    """A state dict with every sharded tensor gathered, on the CPU; every process must call it.

    Gathers one tensor at a time, so that no device holds the whole model; ranks other than 0 drop them. With `copy` the
    result does not change while training continues; tied tensors stay tied.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    copies: dict[tuple, torch.Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            gathered = full_tensor(value).detach()
            if not keep:
                return None
            if not copy or gathered.device.type != "cpu":
                return gathered.cpu()
            own = value.to_local() if isinstance(value, DTensor) else value
            if gathered.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
                return gathered  # new memory; without gathering it would be the parameter's own
            place = (gathered.data_ptr(), gathered.shape, gathered.stride(), gathered.dtype)
            if place not in copies:
                copies[place] = gathered.clone()
            return copies[place]
        return {key: visit(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    return visit(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, mesh: Mesh) -> None:
    """Load an optimizer's whole state dict from rank 0 (None on other ranks); each process keeps its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        state = _cut_optimizer_state(parameters, state, mesh)
    else:
        state = from_rank_0(state)
    optimizer.load_state_dict(state)
    for values in optimizer.state.values():  # on a CPU these may still be mapped from the file
        values.update({key: v.clone() for key, v in values.items() if type(v) is torch.Tensor and v.is_cpu})


def _cut_optimizer_state(
    parameters: Sequence[torch.Tensor], state: dict[str, Any] | None, mesh: Mesh
) -> dict[str, Any]:
    """This process's shards of rank 0's state dict of whole tensors."""
    whole = {} if state is None else {i: dict(values) for i, values in state["state"].items()}
    for i, values in whole.items():  # tensors as large as their parameter are sent one by one
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameters[i].shape:
                state["state"][i][key] = _Shaped(value.dtype)
    sent = from_rank_0(state)
    for i, values in sent["state"].items():
        for key, value in values.items():
            if isinstance(value, _Shaped):
                own = whole[i][key].to(mesh.device, copy=True) if mesh.rank == 0 else None
                values[key] = _place_like(parameters[i], own, value.dtype, mesh)
    return sent


class _Shaped(NamedTuple):
    """A placeholder for a tensor of its parameter's shape."""

    dtype: torch.dtype


def _place_like(parameter: DTensor, whole: torch.Tensor | None, dtype: torch.dtype, mesh: Mesh) -> DTensor:
    """Rank 0's `whole` tensor, sharded like `parameter`."""
    data = _from_rank_0(whole, parameter.shape, dtype, mesh)
    device_mesh = parameter.device_mesh
    replicated = DTensor.from_local(data, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)
