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

    Every process compares the parts that it has of `theirs`, in the dtype of `theirs`.
    """
    own_weights, other_weights = list(ours), list(theirs)
    if mesh.any(len(own_weights) != len(other_weights)):  # if on one, then on all, as all must take part in gathering
        return False
    pairs = (
        (gather_like(own, other), local_tensor(other)) for own, other in zip(own_weights, other_weights, strict=True)
    )
    return not mesh.any(not all(torch.equal(own.to(other), other) for own, other in pairs))


def gather_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, gathered as far as `other` is.

    The axes of the mesh along which `other` is not sharded come first.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    n_axes = tensor.device_mesh.ndim - (other.device_mesh.ndim if isinstance(other, DTensor) else 0)
    return tensor.redistribute(placements=[Replicate()] * n_axes + [*tensor.placements[n_axes:]]).to_local()


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
            own = local_tensor(value)
            if gathered.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
                return gathered  # gathering has made a copy; otherwise it is the parameter itself
            identity = (gathered.data_ptr(), gathered.shape, gathered.stride(), gathered.dtype)  # the same if tied
            if identity not in copies:
                copies[identity] = gathered.clone()
            return copies[identity]
        return {key: visit(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    return visit(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, mesh: Mesh) -> None:
    """Load rank 0's whole state dict; each process keeps its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole_states = {} if state is None else state["state"]  # by the parameter's number; on rank 0 only

    def outline(i: int, value: Any) -> Any:
        """Reduce a tensor that is sharded like its parameter to its shape.

        Its values are sent below.
        """
        is_sharded = isinstance(parameters[i], DTensor) and torch.is_tensor(value)
        return value.to("meta") if is_sharded and value.shape == parameters[i].shape else value

    outlines = {i: {key: outline(i, value) for key, value in values.items()} for i, values in whole_states.items()}
    sent = from_rank_0(None if state is None else {**state, "state": outlines})
    for i, values in sent["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.is_meta:
                whole = whole_states[i][key].to(mesh.device, copy=True) if mesh.rank == 0 else None
                whole = broadcast(whole, value.shape, value.dtype, mesh)
                grid, placements = parameters[i].device_mesh, parameters[i].placements
                replicated = DTensor.from_local(whole, grid, [Replicate()] * grid.ndim, run_check=False)
                values[key] = replicated.redistribute(placements=placements)
    optimizer.load_state_dict(sent)
    for values in optimizer.state.values():  # on a CPU tensors may still be mapped from the checkpoint: copy them
        values.update({key: v.clone() for key, v in values.items() if type(v) is torch.Tensor and v.is_cpu})
