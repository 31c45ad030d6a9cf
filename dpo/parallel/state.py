"""Whole states of sharded models and optimizers: gathered, and sharded again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dpo.parallel.mesh import Mesh, from_rank_0, is_rank_0
from dpo.parallel.sharding import broadcast


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered from all processes; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hold_the_same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], mesh: Mesh) -> bool:
    """Return whether two models hold equal weights.

    Every process compares its own shards, in the dtype of `theirs`.
    """
    mine, others = (list(map(local_tensor, weights)) for weights in (ours, theirs))
    same = len(mine) == len(others) and all(torch.equal(a.to(b), b) for a, b in zip(mine, others, strict=True))
    return not mesh.any(not same)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, copy: bool = False) -> Any:
    """A state dict with every sharded tensor gathered, on the CPU.

    Every process must call it. Gathers one tensor at a time, so that no device holds the whole model; ranks other than
    0 drop them. With `copy` the result does not change while training continues; tied tensors stay tied.
    """
    keep = is_rank_0()
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
    """Load rank 0's whole state dict; each process keeps its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {} if state is None else state["state"]

    def outline(i: int, value: Any) -> Any:
        """The shape alone, if a tensor is sent and sharded by itself."""
        is_cut = isinstance(parameters[i], DTensor) and torch.is_tensor(value) and value.shape == parameters[i].shape
        return value.to("meta") if is_cut else value

    outlines = {i: {key: outline(i, value) for key, value in values.items()} for i, values in own.items()}
    sent = from_rank_0(None if state is None else {**state, "state": outlines})
    for i, values in sent["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.is_meta:
                whole = own[i][key].to(mesh.device, copy=True) if mesh.rank == 0 else None
                whole = broadcast(whole, value.shape, value.dtype, mesh)
                grid, placements = parameters[i].device_mesh, parameters[i].placements
                replicated = DTensor.from_local(whole, grid, [Replicate()] * grid.ndim, run_check=False)
                values[key] = replicated.redistribute(placements=placements)
    optimizer.load_state_dict(sent)
    for values in optimizer.state.values():  # on a CPU these may still be mapped from the file
        values.update({key: v.clone() for key, v in values.items() if type(v) is torch.Tensor and v.is_cpu})
