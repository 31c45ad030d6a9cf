"""States of sharded models and optimizers: gathered, sharded again, and updated."""

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
    """Return whether two models hold equal weights, in the dtype of the other weights."""
    weights, other_weights = list(weights), list(other_weights)
    if mesh.any(len(weights) != len(other_weights)):  # all processes return together, as gathering needs all
        return False
    # `all` stops at a difference; the processes that gather a weight together compare the same part, so stop together
    are_equal = all(
        torch.equal(gather_like(weight, other).to(local_tensor(other)), local_tensor(other))
        for weight, other in zip(weights, other_weights, strict=True)
    )
    return not mesh.any(not are_equal)


def gather_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, gathered as far as `other` is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # `other` has no mesh, or the tensor's mesh without some of the first axes, along which `other` is whole
    n_axes_of_other = other.device_mesh.ndim if isinstance(other, DTensor) else 0
    n_gathered = tensor.device_mesh.ndim - n_axes_of_other
    placements = [Replicate()] * n_gathered + [*tensor.placements[n_gathered:]]
    return tensor.redistribute(placements=placements).to_local()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any) -> Any:
    """A state dict with every sharded tensor gathered, one at a time, on rank 0's CPU; None on the other ranks."""
    if isinstance(state, torch.Tensor):
        gathered = full_tensor(state).detach()
        return gathered.cpu() if is_rank_0() else None
    if isinstance(state, Mapping):
        return {key: full_state(value) for key, value in state.items()}
    return state


@torch.no_grad()
def clip_gradient(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip a gradient by its global norm over all shards; return the norm before clipping."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        # with tensor parallelism and no FSDP, a gradient may still have to be summed over processes
        if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    norm = full_tensor(torch.nn.utils.get_total_norm(parameter.grad for parameter in parameters))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def optimized(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """What an optimizer updates: this process's shards, each with its parameter as `whole`, and other parameters."""
    tensors = []
    for parameter in parameters:
        tensor = parameter
        if isinstance(parameter, DTensor):
            tensor = torch.nn.Parameter(parameter.detach().to_local())
            tensor.whole = parameter
        tensors.append(tensor)
    return tensors


def whole_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that an optimizer's tensor is a shard of, or the tensor itself."""
    return getattr(tensor, "whole", tensor)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's step; it takes the gradients of sharded parameters."""
    tensors = _list_optimized(optimizer)
    for tensor in tensors:
        if (whole := whole_parameter(tensor)) is not tensor and whole.grad is not None:
            tensor.grad = whole.grad.to_local()
    optimizer.step()
    for tensor in tensors:
        tensor.grad = None


def _list_optimized(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def whole_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict, with DTensors for the states of shards."""
    saved = optimizer.state_dict()
    states = dict(saved["state"])  # by the index of the parameter
    for i, tensor in enumerate(_list_optimized(optimizer)):
        whole = whole_parameter(tensor)
        if whole is tensor or i not in states:
            continue
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        states[i] = {
            key: DTensor.from_local(value, whole.device_mesh, whole.placements, run_check=False, **sizes)
            if torch.is_tensor(value) and value.shape == tensor.shape  # unlike a counter of steps
            else value
            for key, value in states[i].items()
        }
    return {**saved, "state": states}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, mesh: Mesh) -> None:
    """Load rank 0's whole state dict; each process keeps its shards."""
    tensors = _list_optimized(optimizer)
    states = {} if state is None else state["state"]  # by the index of the parameter; empty on other ranks

    def remove_values(i: int, value: Any) -> Any:
        """Remove the values of a tensor that is sharded as parameter `i` is."""
        whole = whole_parameter(tensors[i])
        is_sharded = whole is not tensors[i] and torch.is_tensor(value) and value.shape == whole.shape
        return value.to("meta") if is_sharded else value

    # first send the state without the values of sharded tensors, then these tensors one by one
    small_states = {i: {key: remove_values(i, value) for key, value in values.items()} for i, values in states.items()}
    received = from_rank_0(None if state is None else {**state, "state": small_states})
    for i, values in received["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.is_meta:
                tensor = states[i][key].to(mesh.device, copy=True) if mesh.rank == 0 else None
                tensor = broadcast(tensor, value.shape, value.dtype, mesh)
                device_mesh, placements = tensors[i].whole.device_mesh, tensors[i].whole.placements
                replicated = DTensor.from_local(tensor, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
                values[key] = replicated.redistribute(placements=placements).to_local()
    optimizer.load_state_dict(received)
    # on a CPU, tensors may still be mapped from the checkpoint's file, which may be deleted: copy them
    for values in optimizer.state.values():
        values.update({key: v.clone() for key, v in values.items() if torch.is_tensor(v) and v.is_cpu})
