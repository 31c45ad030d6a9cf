"""States of sharded models and optimizers: gathered, sharded again, and updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dpo.parallel.mesh import Mesh, from_rank_0, is_rank_0
from dpo.parallel.sharding import broadcast

PIECE_BYTES = 2**26  # bytes that are copied from a GPU at a time


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
        is_on_host = gathered.device.type == "cpu"
        if is_on_host and not copy:
            return gathered
        if gathered.untyped_storage().data_ptr() != local_tensor(tensor).untyped_storage().data_ptr():
            return gathered if is_on_host else copy_to_host(gathered)  # gathering has made a copy already
        identity = (gathered.data_ptr(), gathered.shape, gathered.stride(), gathered.dtype)  # equal for tied tensors
        if identity not in copies:
            copies[identity] = gathered.clone() if is_on_host else copy_to_host(gathered)
        return copies[identity]

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return gather(value)
        if isinstance(value, Mapping):
            return {key: visit(item) for key, item in value.items()}
        return value

    return visit(state)


def copy_to_host(tensor: torch.Tensor, *, pinned: bool = True) -> torch.Tensor:
    """A GPU's tensor in host memory, copied through a `pinned` buffer that all threads empty."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    buffer = torch.empty(min(PIECE_BYTES, tensor.nbytes), dtype=torch.uint8, pin_memory=pinned)
    source, target = (values.contiguous().view(-1).view(torch.uint8) for values in (tensor, whole))
    for piece, place in zip(source.split(PIECE_BYTES), target.split(PIECE_BYTES), strict=True):
        place.copy_(buffer[: len(piece)].copy_(piece))
    return whole


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
    for shards in shards_by_groups.values():
        torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


@torch.no_grad()
def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's step on local shards; before and after, its parameters and states are DTensors."""
    groups, states = optimizer.param_groups, optimizer.state
    shards = {parameter: local_tensor(parameter) for group in groups for parameter in group["params"]}
    if all(parameter is shard for parameter, shard in shards.items()):
        optimizer.step()
        return
    for parameter, shard in shards.items():
        shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    local_states = defaultdict(dict)  # by shard
    for parameter, state in states.items():
        local_states[shards[parameter]] = {key: local_tensor(value) for key, value in state.items()}
    optimizer.state = local_states
    optimizer.param_groups = [group | {"params": [shards[p] for p in group["params"]]} for group in groups]
    try:
        optimizer.step()
    finally:
        optimizer.state, optimizer.param_groups = states, groups
        for shard in shards.values():
            shard.grad = None
    for parameter, shard in shards.items():
        for key, value in local_states[shard].items():
            if local_tensor(states[parameter].get(key)) is value:  # updated in place
                continue
            if torch.is_tensor(value) and value.shape == shard.shape:  # sharded, unlike a counter of steps
                sizes = {"shape": parameter.shape, "stride": parameter.stride()}
                value = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False, **sizes)
            states[parameter][key] = value


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
