"""States of sharded models and optimizers: gathered, sharded again, and updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
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
    """This process's part of a tensor, gathered as far as `other` is.

    `other` has no mesh, or the tensor's mesh without some of the first axes, along which `other` is whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    n_axes_of_other = other.device_mesh.ndim if isinstance(other, DTensor) else 0
    n_gathered = tensor.device_mesh.ndim - n_axes_of_other
    placements = [Replicate()] * n_gathered + [*tensor.placements[n_gathered:]]
    return tensor.redistribute(placements=placements).to_local()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, copy: bool = False) -> Any:
    """A state dict with every sharded tensor gathered, on the CPU; on ranks other than 0 every tensor is None.

    Every process must call it. Gathers one tensor at a time. With `copy` the result does not change while training
    continues; tied tensors stay tied.
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


@torch.no_grad()
def clip_gradient(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip a gradient by its global norm; return the norm before clipping.

    As torch does it, but on local shards: DTensor is slow, as it plans every operation anew for every tensor.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    # this process's gradient shards, by the process groups over which their parameters are sharded
    shards_by_groups = defaultdict(list)
    for parameter in parameters:
        # with tensor parallelism and no FSDP, a gradient may still have to be summed over processes
        if parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        mesh = parameter.device_mesh
        axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        groups = tuple(mesh.get_group(axis) for axis in axes)
        shards_by_groups[groups].append(parameter.grad.to_local())
    total = torch.zeros((), device=parameters[0].device)
    for groups, shards in shards_by_groups.items():
        squares = torch.nn.utils.get_total_norm(shards).float().square()  # float32, as float16 could overflow
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for shard in chain.from_iterable(shards_by_groups.values()):
        shard.mul_(scale)
    return norm


def optimized(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """What an optimizer updates: this process's shards of sharded parameters, and other parameters themselves.

    DTensor is slow, as it plans every operation anew for every tensor. A shard has its parameter as `whole`.
    """
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
