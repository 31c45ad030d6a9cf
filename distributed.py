"""Models over processes: which process holds which shard and which rows, weights from rank 0, gathering.

The trainers call these as functions on a finished model. With one process every collective is skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from host_memory import host_memory
from tensor_parallelism import cut_modules, find_plan
from utils import InputError, get_block_class_from_model


class Grid:
    """How the processes of a run share its models and its rows.

    Ranks fill a grid of `replicate` x `shard` x `tensor`, the last axis fastest, so that neighbours (usually on one
    machine) share most. Along `tensor` a layer is cut (tensor parallelism); along `shard` parameters, gradients and
    optimizer state are (FSDP); along `replicate` whole copies of these are kept equal. Processes that differ in
    `tensor` only see the same rows.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        shard_size: int | None = None,
        tensor_size: int = 1,
        timeout_secs: float = 1800,
    ) -> None:
        self.rank, self.world_size, self.tensor_size = rank, world_size, tensor_size
        self.data_rank, self.data_size = rank // tensor_size, world_size // tensor_size
        self.counts = rank % tensor_size == 0  # one of those that see the same rows does
        self.shard_size = shard_size or self.data_size
        self._data_group = None  # all processes
        if tensor_size > 1:
            groups = [dist.new_group(range(t, world_size, tensor_size)) for t in range(tensor_size)]
            self._data_group = groups[rank % tensor_size]
        self.device = torch.device("cpu")
        if dist.is_initialized():
            if torch.cuda.is_available():
                self.device = torch.device("cuda", torch.cuda.current_device())
            # its advice, to flatten axes, does not apply to shards of slices
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            grid = (self.data_size // self.shard_size, self.shard_size, tensor_size)
            self.mesh = init_device_mesh(self.device.type, grid, mesh_dim_names=("replicate", "shard", "tensor"))
            for group in (*self.mesh.get_all_groups(), self._data_group):  # which do not take after the group of all
                _set_pg_timeout(timedelta(seconds=timeout_secs), group)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the values of all processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process."""
        if self.world_size == 1:
            return here
        answer = torch.tensor(int(here), device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return bool(answer.item())

    def gather_all(self, value: Any) -> list:
        """The values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_list(self, values: list) -> list:
        """The lists of all rows, in the order of the rows."""
        if self.data_size == 1:
            return values
        parts: list[Any] = [None] * self.data_size
        dist.all_gather_object(parts, values, group=self._data_group)
        return [value for part in parts for value in part]


def from_rank_0(value: Any) -> Any:
    """What rank 0 gives; `value` in a process that is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def distribute(model: Any, grid: Grid, *, block_name: str | None, compute_dtype: torch.dtype) -> Any:
    """Spread a model over the processes of a grid, one unit per transformer block.

    Rank 0's weights are the ones that count; the other ranks' may be on the meta device. Each unit is sent by rank 0,
    cut along `tensor` and sharded before the next, so that a process never holds more than its shards and one unit.
    Blocks are the modules of class `block_name`, or what the model itself says must not be split; embeddings and head,
    tied or not, share the root's unit. Computes in `compute_dtype` and reduces gradients in float32. Raises InputError
    for a class that the model does not have, and for a model that cannot be cut along `tensor`.
    """
    blocks = find_blocks(model, block_name)
    plan = find_plan(model) if grid.tensor_size > 1 else {}
    mesh = grid.mesh["replicate", "shard"] if grid.data_size > grid.shard_size else grid.mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # one group of tensor-parallel processes in the weights' own dtype needs nothing of FSDP
    sharded = grid.tensor_size == 1 or grid.data_size > 1 or compute_dtype != model.dtype
    specs = _agree_on_tensors(model)
    names = {module: name for name, module in model.named_modules()}
    done: set[torch.nn.Module] = set()
    for unit in (*reversed(blocks), model):  # a block inside a block comes first
        within = {*unit.modules()} - done
        modules = {names[module]: module for module in unit.modules() if module in within}
        _receive(modules, specs, grid)
        if plan:
            cut_modules(modules, plan, grid.mesh["tensor"])
        if sharded:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        done |= within
    if sharded:
        model.compute_dtype = compute_dtype
        model.apply_to_itself = MethodType(_apply, model)
        register_fsdp_forward_method(model, "apply_to_itself")
    return model


def _apply(model: Any, function: Callable, *args: Any) -> Any:
    return function(model, *args)


def run_as_forward(model: Any, function: Callable, *args: Any) -> Any:
    """`function(model, *args)`, with the weights of the root's unit gathered once, as in the model's own forward."""
    return model.apply_to_itself(function, *args) if isinstance(model, FSDPModule) else function(model, *args)


def find_blocks(model: Any, block_name: str | None) -> list[torch.nn.Module]:
    """The transformer blocks: of class `block_name`, or what the model itself says must not be split.

    Raises InputError for a class that the model does not have.
    """
    names = [block_name] if block_name else sorted(model._no_split_modules or ())
    if not names:
        raise InputError(f"{type(model).__name__} does not name its blocks; set model.block_name to their class")
    classes = tuple(get_block_class_from_model(model, name) for name in names)
    if isinstance(model, classes):
        raise InputError(f"model.block_name={block_name} is the whole model; null takes the blocks it names itself")
    return [module for module in model.modules() if isinstance(module, classes)]


def _agree_on_tensors(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of rank 0's parameters and buffers by name; with them come its settings for sampling."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    sent = [own, getattr(model, "generation_config", None)]
    dist.broadcast_object_list(sent, src=0)
    theirs, model.generation_config = sent
    odd = sorted(n for n in own.keys() | theirs.keys() if own.get(n, (None,))[0] != theirs.get(n, (None,))[0])
    if odd:
        raise InputError(
            f"rank {dist.get_rank()} and rank 0 see different models at the same name ({', '.join(odd[:3])}); "
            f"give every machine the same files"
        )
    return theirs


def _receive(modules: Mapping[str, torch.nn.Module], specs: Mapping[str, tuple], grid: Grid) -> None:
    """Parameters and buffers of these modules become rank 0's, on this process's device; tied ones stay tied."""
    received: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in modules.items():
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is None:
                    continue
                if tensor not in received:
                    shape, dtype = specs[f"{prefix}.{key}".lstrip(".")]
                    received[tensor] = _from_rank_0(tensor, shape, dtype, grid)
                kind[key] = received[tensor]


def _from_rank_0(tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, grid: Grid) -> torch.Tensor:
    if grid.rank == 0:
        data = tensor.detach().to(grid.device).contiguous()
    else:
        data = torch.empty(shape, dtype=dtype, device=grid.device)
    if grid.world_size > 1:
        dist.broadcast(data, src=0)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def accumulate(model: torch.nn.Module, *, last: bool) -> None:
    """Say whether the next backward is the `last` of an update: once per update is enough for gathering the root's
    unit, embeddings and head, and for adding up the gradients of copies (`replicate`)."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last, recurse=False)
        model.set_requires_all_reduce(last)


def release_gathered(model: torch.nn.Module | None) -> None:
    """Keep the shards alone of what a forward without a backward left gathered: the root's unit."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def gathered_weights(model: torch.nn.Module) -> Iterator[bool]:
    """Inside, every process holds the weights of all shards, if they fit into its memory; whether they do.

    Sampling runs a forward per token: without this each of them would gather every block anew.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        yield True
        return
    if not _fits(model):
        yield False
        return
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield True
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not model, recurse=False)  # the root's are wanted again at once


def _fits(model: torch.nn.Module) -> bool:
    """Whether the gathered weights take at most half of the free memory of every process's device."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for later does not count as free
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = host_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    answer = torch.tensor(int(gathered_size(model) <= free / 2), device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def gathered_size(model: Any) -> int:
    """Bytes of the weights of a sharded model that a process holds when all shards are gathered: in the dtype that it
    computes in, and of what is cut along `tensor` a slice."""
    return sum(p.numel() // _n_slices(p) for p in model.parameters()) * model.compute_dtype.itemsize


def _n_slices(parameter: torch.Tensor) -> int:
    """In how many slices a parameter is cut along `tensor`; its numel is that of the whole."""
    if not isinstance(parameter, DTensor):  # of a unit that is gathered
        return 1
    axes = zip(parameter.device_mesh.mesh_dim_names, parameter.device_mesh.shape, parameter.placements, strict=True)
    return next((size for axis, size, placement in axes if axis == "tensor" and placement.is_shard()), 1)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered from all processes, any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hold_the_same(model: torch.nn.Module, other: torch.nn.Module, grid: Grid) -> bool:
    """Whether all weights of `other` are those of `model` in its own dtype, on every process; each has its part."""
    ours, theirs = (list(map(_local, m.parameters())) for m in (model, other))
    same = len(ours) == len(theirs) and all(torch.equal(a.to(b), b) for a, b in zip(ours, theirs, strict=True))
    return not grid.any(not same)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, copy: bool = False) -> Any:
    """A state dict with every sharded tensor gathered, on the CPU; every process must call it.

    One tensor at a time, so that no device holds the whole model; ranks other than 0 drop what they gathered. With
    `copy` nothing in it changes when training goes on; tied tensors stay one.
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
                return gathered  # made by gathering, unless one process has all of it
            place = (gathered.data_ptr(), gathered.shape, gathered.stride(), gathered.dtype)
            if place not in copies:
                copies[place] = gathered.clone()
            return copies[place]
        return {key: visit(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    return visit(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, grid: Grid) -> None:
    """Load rank 0's whole state dict, None elsewhere; each process keeps copies of what belongs to its shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        state = _cut_optimizer_state(parameters, state, grid)
    else:
        state = from_rank_0(state)
    optimizer.load_state_dict(state)
    for values in optimizer.state.values():  # on a CPU these may still be pages of the file that was read
        values.update({key: v.clone() for key, v in values.items() if type(v) is torch.Tensor and v.is_cpu})


def _cut_optimizer_state(
    parameters: Sequence[torch.Tensor], state: dict[str, Any] | None, grid: Grid
) -> dict[str, Any]:
    """A state dict of this process's shards, from rank 0's of whole tensors."""
    whole = {} if state is None else {i: dict(values) for i, values in state["state"].items()}
    for i, values in whole.items():  # what is as large as its parameter travels alone
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameters[i].shape:
                state["state"][i][key] = _Shaped(value.dtype)
    sent = from_rank_0(state)
    for i, values in sent["state"].items():
        for key, value in values.items():
            if isinstance(value, _Shaped):
                own = whole[i][key].to(grid.device, copy=True) if grid.rank == 0 else None
                values[key] = _place_like(parameters[i], own, value.dtype, grid)
    return sent


class _Shaped(NamedTuple):
    """Stands for a tensor of the shape of its parameter."""

    dtype: torch.dtype


def _place_like(parameter: DTensor, whole: torch.Tensor | None, dtype: torch.dtype, grid: Grid) -> DTensor:
    """Rank 0's `whole` tensor, cut over the processes as `parameter` is."""
    data = _from_rank_0(whole, parameter.shape, dtype, grid)
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(data, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)
