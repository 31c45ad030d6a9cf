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


def hold_the_same(weights: Iterable[torch.Tensor], other_weights: Iterable[torch.Tensor], mesh: Mesh) -> bool:
    """Return whether two models hold equal weights.

    Every process compares its parts of `other_weights`, in their dtype.
    """
    weights, other_weights = list(weights), list(other_weights)
    if mesh.any(len(weights) != len(other_weights)):  # on all processes alike, since gathering takes all of them
        return False
    are_equal = all(
        torch.equal(gather_like(weight, other).to(local_tensor(other)), local_tensor(other))
        for weight, other in zip(weights, other_weights, strict=True)
    )
    return not mesh.any(not are_equal)


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

    Every process must call it. Gathers one tensor at a time, so that no device holds the whole model. On ranks other
    than 0 every tensor is None. With `copy` the result does not change while training continues; tied tensors stay
    tied.
    """
    copies: dict[tuple, torch.Tensor] = {}

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = full_tensor(tensor).detach()
        if not is_rank_0():
            return None
        if not copy or gathered.device.type != "cpu":
            return gathered.cpu()
        if gathered.untyped_storage().data_ptr() != local_tensor(tensor).untyped_storage().data_ptr():
            return gathered  # gathering has made a copy already
        identity = (gathered.data_ptr(), gathered.shape, gathered.stride(), gathered.dtype)  # equal for tied tensors
        if identity not in copies:
            copies[identity] = gathered.clone()
        return copies[identity]

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return gather(value)
        if isinstance(value, Mapping):
            return {key: visit(item) for key, item in value.items()}
        return value

    return visit(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, mesh: Mesh) -> None:
    """Load rank 0's whole state dict; each process keeps its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole_states = {} if state is None else state["state"]  # by the index of the parameter; empty on other ranks

    def remove_values(i: int, value: Any) -> Any:
        """Remove the values of a tensor that is sharded like parameter `i`."""
        is_sharded = isinstance(parameters[i], DTensor) and torch.is_tensor(value)
        return value.to("meta") if is_sharded and value.shape == parameters[i].shape else value

    # first send the state without the values of sharded tensors, then these tensors one by one
    small_states = {
        i: {key: remove_values(i, value) for key, value in values.items()} for i, values in whole_states.items()
    }
    received = from_rank_0(None if state is None else {**state, "state": small_states})
    for i, values in received["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.is_meta:
                whole = whole_states[i][key].to(mesh.device, copy=True) if mesh.rank == 0 else None
                whole = broadcast(whole, value.shape, value.dtype, mesh)
                device_mesh, placements = parameters[i].device_mesh, parameters[i].placements
                replicated = DTensor.from_local(whole, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
                values[key] = replicated.redistribute(placements=placements)
    optimizer.load_state_dict(received)
    # on a CPU, tensors may still be mapped from the checkpoint's file, which may be deleted: copy them
    for values in optimizer.state.values():
        values.update({key: v.clone() for key, v in values.items() if type(v) is torch.Tensor and v.is_cpu})
