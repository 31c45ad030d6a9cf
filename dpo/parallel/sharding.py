"""A model distributed over the processes of a mesh, and the states of its parameters.

FSDP shards the model in units: each transformer block is one, and the root unit has all other modules. A unit is
gathered while its weights are whole on every process, from `unshard` to `reshard`.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter, tree_map_only, tree_map_with_path

from dpo.errors import InputError
from dpo.parallel.mesh import AXES, Mesh
from dpo.parallel.tensor_parallel import cut_modules, find_plan, make_dtensor
from dpo.system.host import count_gpus, is_gpu, release_freed_memory
from dpo.system.users_code import hash_files
from dpo.system.waiting import check_alike, from_rank_0, is_rank_0

Receive = Callable[[str, Tensor], Tensor]  # returns the value of a model's parameter or buffer, by its name
Parts = dict[str, tuple[tuple[int, ...], Tensor]]  # by a tensor's name: where its part begins in each dim, and the part
SAMPLED_WEIGHTS = 10**6  # about how many weights of a process `step_and_count_changes` compares at most


def distribute(
    model: Any,
    mesh: Mesh,
    *,
    block_name: str | None,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    frozen_whole: bool = False,
    receive: Receive | None = None,
) -> Any:
    """Distribute rank 0's weights in place, one FSDP unit per transformer block, and return the model.

    Embeddings and head are in the root unit. Other ranks' weights may be on the meta device. Units are broadcast one by
    one, so that a process never holds more than its shards and one unit. Forward and backward passes compute in
    `compute_dtype`, and gradients are summed in `reduce_dtype`. With `reshard_after_forward`, a block is gathered again
    for its backward pass. With `frozen_whole`, FSDP does not shard parameters that are not trained: every process has
    them whole, or its slices of them under tensor parallelism, in `compute_dtype`. `receive(name, tensor)` returns the
    value of a parameter or buffer, by default rank 0's. Raises InputError for a model without blocks.
    """
    receive = receive or _make_receiver(model, mesh)
    blocks = find_blocks(model, block_name)
    tensor_parallel_plan = find_plan(model) if mesh.tensor_size > 1 else {}
    # A single tensor-parallel group that computes in the weights' own dtype does not need FSDP.
    uses_fsdp = mesh.tensor_size == 1 or mesh.data_size > 1 or compute_dtype != model.dtype
    fsdp_mesh = mesh.device_mesh[("replicate", "shard") if mesh.data_size > mesh.shard_size else "shard"]
    names = {module: name for name, module in model.named_modules()}
    distributed = set()
    whole = set()
    n_gathered = 0  # elements that a process holds when all units are gathered
    # A block inside another block must come first, and the root unit last: a unit takes the modules that earlier units
    # have left. `modules()` lists the outer block first, so the order is reversed.
    for unit in (*reversed(blocks), model):
        modules = {names[module]: module for module in unit.modules() if module not in distributed}
        _replace_tensors(modules, receive, frozen_dtype=compute_dtype if frozen_whole else None)
        if tensor_parallel_plan:
            cut_modules(modules, tensor_parallel_plan, mesh.device_mesh["tensor"])
        parameters = {parameter for module in modules.values() for parameter in module.parameters(recurse=False)}
        if frozen_whole:
            whole |= {parameter for parameter in parameters if not parameter.requires_grad}
        sharded = parameters - whole
        n_gathered += sum(local_tensor(parameter).numel() for parameter in sharded)
        # If blocks are FSDP units, the root must be one too, even without parameters of its own.
        if uses_fsdp and (sharded or (unit is model and n_gathered > 0)):
            fully_shard(
                unit,
                mesh=fsdp_mesh,
                # The root casts no inputs, as they are integers. To cast, FSDP would copy a `Packed` batch, and the
                # masks cached in the copy would be lost.
                mp_policy=MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=unit is not model),
                reshard_after_forward=None if reshard_after_forward else False,  # None: all but the root unit
                ignored_params=whole,
            )
        elif uses_fsdp and unit is not model:  # cast the inputs of a block without FSDP too, for the same numbers
            unit.register_forward_pre_hook(partial(_cast_inputs, compute_dtype), prepend=True, with_kwargs=True)
        distributed.update(modules.values())
        release_freed_memory()  # that is, the parts of this unit that other processes keep
    if isinstance(model, FSDPModule):
        model.gathered_bytes = n_gathered * compute_dtype.itemsize
        model.reshards_after_forward = reshard_after_forward
        # Once `call_with_self`, which `run_as_forward` calls, is registered, FSDP gathers the root unit for it as for
        # a forward pass.
        model.call_with_self = lambda function, *args: function(model, *args)
        register_fsdp_forward_method(model, "call_with_self")
    return model


def _make_receiver(model: Any, mesh: Mesh) -> Receive:
    """Return the default `receive` of `distribute`, which broadcasts rank 0's tensor of the same name: a collective.

    Raises InputError on every rank if the models differ. Other ranks also get rank 0's generation config.
    """
    # Code, names, ties and shapes must be alike. Dtypes may differ, as every rank uses rank 0's.
    facts = {"the model's code": hash_files(Path(inspect.getfile(type(model))).parent.glob("*.py"))}
    for name, first in list_ties(model).items():
        facts[f"the weight {name}"] = f"{first} {tuple(model.get_parameter(name).shape)}"
    check_alike(facts)
    # Keep only shapes and dtypes: a variable that held the tensors would keep those of each unit from being freed.
    specs = {name: tensor.detach().to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    specs, model.generation_config = from_rank_0((specs, getattr(model, "generation_config", None)))
    return lambda name, tensor: broadcast(read_weight(tensor), specs[name], mesh)


def list_ties(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the parameter's first name; a tied parameter has several names."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(weight, name) for name, weight in model.named_parameters(remove_duplicate=False)}


def untie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Untie parameters that are tied here but separate in rank 0's model, of which `list_ties` returned `ties`.

    Ranks may differ, as rank 0 alone reads the files, which tell whether a head is tied.
    """
    for name, first in list_ties(model).items():
        if first != name and ties.get(name) == name:  # tied here, separate on rank 0
            owner, _, attribute = name.rpartition(".")
            # No values are copied, as this rank will receive rank 0's.
            setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.empty_like(model.get_parameter(name))))


@torch.compiler.disable
def _cast_inputs(dtype: torch.dtype, unit: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Cast the floating-point inputs of a unit, as FSDP does: a forward pre-hook, whose result replaces the inputs."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, (args, kwargs))


def find_class_before_fsdp(model: Any) -> type[nn.Module]:
    """Find the class that a model had before FSDP, which makes a subclass of whatever it shards."""
    return next(parent for parent in type(model).__mro__ if not issubclass(parent, FSDPModule))


def run_as_forward(model: Any, function: Callable, *args: Any) -> Any:
    """Return `function(model, *args)`, which FSDP runs as if it were the model's forward.

    So FSDP gathers the root unit once for the whole call, in which the function may use embeddings, blocks and head.
    """
    return model.call_with_self(function, *args) if isinstance(model, FSDPModule) else function(model, *args)


def find_blocks(model: Any, block_name: str | None) -> list[nn.Module]:
    """List the transformer blocks: modules of class `block_name`, by default of the classes in `_no_split_modules`.

    Raises InputError if there are none.
    """
    names = [block_name] if block_name else model._no_split_modules or ()
    # A text model may declare blocks of the images' or the sound's part, which it lacks.
    blocks = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    if not blocks:
        # what lists of modules begin with
        classes = sorted({type(module).__name__ for name, module in model.named_modules() if name.endswith(".0")})
        raise InputError(
            f"model.block_name={block_name or 'null'} names no transformer blocks of {type(model).__name__}: set it to "
            f"their class: {' or '.join(classes)}"
        )
    return blocks


def get_block_class_from_model(model: nn.Module, block_class_name: str) -> type[nn.Module]:
    """Find the class of this name among the model's modules; InputError if there is none."""
    return type(find_blocks(model, block_class_name)[0])


def _replace_tensors(modules: Mapping[str, nn.Module], receive: Receive, *, frozen_dtype: torch.dtype | None) -> None:
    """Replace the modules' own parameters and buffers by what `receive(name, tensor)` returns.

    All names are full names in the model. Frozen parameters are cast to `frozen_dtype`; None keeps their dtype.
    """
    replacements = {}  # by this rank's tensor: a tied one is received once and stays tied
    only_own = {"recurse": False, "remove_duplicate": False}
    for prefix, module in modules.items():
        named = (*module.named_parameters(prefix, **only_own), *module.named_buffers(prefix, **only_own))
        for name, tensor in named:
            if tensor not in replacements:
                replacement = receive(name, tensor)
                if isinstance(tensor, nn.Parameter):
                    if not tensor.requires_grad:
                        replacement = replacement.to(frozen_dtype)
                    replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
                replacements[tensor] = replacement
            setattr(module, name.rpartition(".")[2], replacements[tensor])


def read_weight(weight: Tensor) -> Tensor:
    """Return the value of a model's parameter or buffer.

    If it has an attribute `stored`, its value is not loaded yet: `stored` is a tensor mapped from a file.
    """
    stored = getattr(weight, "stored", None)
    if stored is None:
        return weight.detach()
    return stored.to(weight.dtype, copy=True)  # a copy, as the mapped file may be replaced


def broadcast(tensor: Tensor | None, spec: Tensor, mesh: Mesh) -> Tensor:
    """Return rank 0's `tensor` on the device of every process; other ranks' tensors are ignored, and may be None.

    `spec` is a tensor of the same shape and dtype, on any device.
    """
    if mesh.rank == 0:
        data = tensor.detach().to(mesh.device).contiguous()
    else:
        data = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
    if mesh.world_size > 1:
        dist.broadcast(data, src=0)
    return data


def announce_backward(model: nn.Module, *, is_last: bool, reduce_once: bool) -> None:
    """Tell FSDP whether the next backward pass is the last of an update.

    Only the last one reshards the root unit, and sums gradients over `replicate`. Every one sums them over `shard`,
    unless `reduce_once`: then only the last one does, and until then a process holds whole gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(is_last, recurse=False)
        if reduce_once:
            model.set_requires_gradient_sync(is_last)
        else:
            model.set_requires_all_reduce(is_last)


def release_gathered(model: Any) -> None:
    """Clear what a forward pass without a backward pass leaves: gathered units, and FSDP's record of their order.

    A model that is None, or not sharded, stays as it is.
    """
    units = _list_units(model)
    for unit in units:
        unit.reshard()
    if not units or not model._get_fsdp_state()._is_root:  # only a forward pass makes the model a root with a record
        return
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:  # torch 2.11
        model._get_fsdp_state()._comm_ctx.post_forward_order.clear()


def _list_units(model: Any) -> list:
    """List FSDP units, with the root if it is one; none for a model that is None or not sharded."""
    return [] if model is None else [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered_weights(model: Any) -> Iterator:
    """Keep all weights gathered inside the context, as sampling needs them for each token; each process must call it.

    GPUs must have twice the memory free that the gathered weights take; otherwise every forward pass gathers the units
    one by one, as in training.
    """
    units = _list_units(model)
    device = next(model.parameters()).device
    if units and is_gpu(device):
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # the allocator reuses it
        fits_everywhere = torch.tensor(int(model.gathered_bytes <= free / 2), device=device)
        dist.all_reduce(fits_everywhere, op=dist.ReduceOp.MIN)  # 1 only if the weights fit on all processes
        if not fits_everywhere.item():
            units = []
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            # The root unit stays gathered after a forward pass in any case, as the backward pass starts with it.
            unit.set_reshard_after_forward(unit is not model and model.reshards_after_forward, recurse=False)


# --- states: gathered, sharded and updated ---------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, which all processes gather; any other tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_part_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the part of `tensor` that corresponds to this process's part of `other`, a tensor of the same shape.

    `other` is sharded along some axes of the mesh of `tensor`, or not at all. Along the other axes the tensor is
    gathered, a collective.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # `other` has no mesh, or the tensor's mesh without some of the first axes, along which `other` is whole
    n_gathered = tensor.device_mesh.ndim
    if isinstance(other, DTensor):
        n_gathered -= other.device_mesh.ndim
    placements = [Replicate()] * n_gathered + [*tensor.placements[n_gathered:]]
    return tensor.redistribute(placements=placements).to_local()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, or a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any) -> Any:
    """Gather every tensor of a state dict, one at a time, on rank 0's CPU; on other ranks, tensors become None."""

    def gather(tensor: Tensor) -> Tensor | None:
        gathered = full_tensor(tensor).detach()
        return gathered.cpu() if is_rank_0() else None

    return tree_map_only(Tensor, gather, state)


def take_parts(state: Any, name: str, mesh: Mesh) -> tuple[Any, Parts]:
    """Return a state with tensors on the meta device in place of DTensors, and this process's parts of these.

    If several processes have the same part, only the first of them returns it. Other tensors are returned on the CPU on
    rank 0, and as None on other ranks. A part's name is `name` and the tensor's path in the state, joined by dots.
    """
    parts = {}

    def take(path: tuple, value: Any) -> Any:
        if isinstance(value, DTensor):
            local = value.to_local().detach()
            if _is_first_owner(value, mesh) and local.numel():  # the last processes may have no rows
                # The copy is needed, as tied weights share memory, which safetensors refuses.
                parts[join_path(name, path)] = (_find_begin(value), local.to("cpu", copy=True))
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return full_state(value)

    return tree_map_with_path(take, state), parts


def join_path(name: str, path: Iterable) -> str:
    """Join the name of a state and the keys, or the [indices] in lists, of a `path` in it by dots."""
    return ".".join([name, *(str(getattr(entry, "key", entry)) for entry in path)])


def count_own_bytes(state: Any) -> int:
    """Count the bytes of the tensors in a state that this process holds."""
    return sum(local_tensor(value).nbytes for value in tree_iter(state) if isinstance(value, Tensor))


def _is_first_owner(tensor: DTensor, mesh: Mesh) -> bool:
    """Return whether this process comes first among those that have the same part of a tensor."""
    copied = set(AXES)  # those along which processes have the same part
    for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
        if not placement.is_replicate():
            copied.remove(axis)
    return all(mesh.device_mesh.get_local_rank(axis) == 0 for axis in copied)


def _find_begin(tensor: DTensor) -> tuple[int, ...]:
    """Return where this process's part of a tensor begins in each dim."""
    begin = [0] * tensor.ndim
    shape = list(tensor.shape)
    mesh = tensor.device_mesh
    # The last axis, that of tensor parallelism, cuts first and FSDP after it; torch's own function would begin with the
    # first axis.
    for axis, placement in reversed([*enumerate(tensor.placements)]):
        if not placement.is_replicate():
            dim = placement.dim
            length = -(-shape[dim] // mesh.size(axis))  # parts are as torch.chunk cuts them
            start = min(mesh.get_local_rank(axis) * length, shape[dim])
            begin[dim] += start
            shape[dim] = min(length, shape[dim] - start)
    assert tuple(shape) == tensor.to_local().shape
    return tuple(begin)


@torch.no_grad()
def clip_gradient(parameters: Iterable[Tensor], max_norm: float, scale: float = 1.0) -> Tensor:
    """Divide gradients by `scale`, then clip their norm, taken over all shards together, to at most `max_norm`.

    Returns the norm between these two steps: a scalar on the device, equal on all processes.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    # Norms of the rows of this process's parts, by the number of processes that have the same part. They are put
    # together before they are converted, as each conversion is another kernel to launch.
    row_norms = defaultdict(list)
    for parameter in parameters:
        n_copies = dist.get_world_size() if dist.is_initialized() else 1  # processes that have the same part
        if isinstance(parameter, DTensor):
            # With tensor parallelism and no FSDP, a gradient may still have to be summed over processes.
            if parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    n_copies /= parameter.device_mesh.size(axis)
        if scale != 1:
            parameter.grad.div_(scale)
        # On a CPU, torch's norm of a whole matrix of 8192 x 4096 is off by 2e-3, which clipping would make a difference
        # between numbers of processes.
        dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
        norms = torch.linalg.vector_norm(local_tensor(parameter.grad), dim=-1, dtype=dtype)
        row_norms[n_copies].append(norms.flatten().to(parameters[0].device))
    square = sum(torch.cat(norms).double().square().sum() / n_copies for n_copies, norms in row_norms.items())
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def local_parameters(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the tensors that an optimizer updates.

    In place of a sharded parameter it is this process's shard, whose attribute `sharded` is the parameter.
    """
    for parameter in parameters:
        tensor = parameter
        if isinstance(parameter, DTensor):
            tensor = nn.Parameter(parameter.detach().to_local())
            tensor.sharded = parameter
        yield tensor


def sharded_parameter(tensor: Tensor) -> Tensor:
    """Return the parameter of which an optimizer's tensor is a shard (`local_parameters`), or the tensor itself."""
    return getattr(tensor, "sharded", tensor)


def step_optimizer(optimizer: Optimizer) -> None:
    """Hand the gradients of sharded parameters to their shards, step, and clear the gradients of the shards.

    The caller clears those of the sharded parameters.
    """
    for tensor in _list_optimized(optimizer):
        grad = sharded_parameter(tensor).grad
        if grad is not None:
            tensor.grad = local_tensor(grad)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def step_and_count_changes(optimizer: Optimizer) -> tuple[int, int]:
    """Step; return how many weights of a sample changed, and how many are in the sample.

    A weight of 16 bits does not change if a step is smaller than its rounding. The sample is every n-th weight of this
    process, without those whose gradient is 0.
    """
    tensors = [tensor for tensor in _list_optimized(optimizer) if sharded_parameter(tensor).grad is not None]
    stride = sum(tensor.numel() for tensor in tensors) // SAMPLED_WEIGHTS + 1
    stride |= 1  # odd: an even stride over rows of even length would only ever reach half of the columns

    def sample(tensor: Tensor) -> Tensor:
        return tensor.flatten()[::stride].clone()

    has_gradient = [sample(local_tensor(sharded_parameter(tensor).grad)) != 0 for tensor in tensors]
    before = [*map(sample, tensors)]
    step_optimizer(optimizer)
    n_changed = 0
    for tensor, weights, counts in zip(tensors, before, has_gradient, strict=True):
        n_changed += int((counts & (sample(tensor) != weights)).sum())
    return n_changed, sum(int(counts.sum()) for counts in has_gradient)


def _list_optimized(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the tensors that an optimizer updates, in the order in which its state dict numbers them."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def optimizer_state(optimizer: Optimizer) -> dict:
    """Return an optimizer's state dict with a DTensor for each state of a shard, so that `full_state` can gather it."""
    saved = optimizer.state_dict()
    states = {i: dict(values) for i, values in saved["state"].items()}  # by the index of the parameter
    tensors = _list_optimized(optimizer)
    for i, values in states.items():
        sharded = sharded_parameter(tensors[i])
        for key, value in values.items():
            is_value = torch.is_tensor(value) and value.shape == tensors[i].shape  # and no counter of steps
            if is_value and sharded is not tensors[i]:
                values[key] = make_dtensor(value, sharded.device_mesh, sharded.placements, like=sharded)
    return {**saved, "state": states}


def load_optimizer(optimizer: Optimizer, state: dict | None, mesh: Mesh) -> None:
    """Load rank 0's state dict, which has whole tensors; each process keeps its shards of them.

    Every process must call it; `state` is None on other ranks.
    """
    tensors = _list_optimized(optimizer)
    whole = {}  # on rank 0: the sharded tensors, by the index of the parameter and the key

    # First send the state without the values of sharded tensors, then these tensors one by one.
    if state is not None:
        state = {**state, "state": {i: dict(values) for i, values in state["state"].items()}}
        for i, values in state["state"].items():
            sharded = sharded_parameter(tensors[i])
            for key, value in values.items():
                if sharded is not tensors[i] and torch.is_tensor(value) and value.shape == sharded.shape:
                    whole[i, key] = value
                    values[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    state = from_rank_0(state)
    for i, values in state["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.is_meta:
                tensor = broadcast(whole.get((i, key)), value, mesh)
                sharded = tensors[i].sharded
                whole_placements = [Replicate()] * sharded.device_mesh.ndim
                tensor = make_dtensor(tensor, sharded.device_mesh, whole_placements, like=sharded)
                values[key] = tensor.redistribute(placements=sharded.placements).to_local()
    optimizer.load_state_dict(state)
    # On a CPU, tensors may still be mapped from the checkpoint's file, which may be deleted: copy them.
    for values in optimizer.state.values():
        for key, value in values.items():
            values[key] = tree_map_only(Tensor, torch.clone, value)


# --- one process with several GPUs ---------------------------------------------------------------------------------


def choose_device_map() -> str | dict[str, int] | None:
    """Choose the `device_map` for `dpo.models.pretrained.load_onto`: all GPUs of this process, or None for the CPU."""
    gpus = count_gpus()
    if gpus > 1:
        return "balanced"
    return {"": 0} if gpus else None  # "" stands for the whole model, 0 for the first GPU
