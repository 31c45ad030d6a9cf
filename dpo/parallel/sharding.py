"""Distribution of a finished model over the processes of a mesh.

The trainers call these functions on a model: weights come from rank 0, FSDP shards and gathers them. With one process
every collective is skipped, and transformers' `device_map` may spread the model's layers over several GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from dpo.errors import InputError
from dpo.parallel.mesh import Mesh
from dpo.parallel.tensor_parallel import cut_modules, find_plan
from dpo.system.host import host_memory

OR_DECLARED = "or set model.block_name=null, for the blocks that the model's class declares"


def distribute(
    model: Any,
    mesh: Mesh,
    *,
    block_name: str | None,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    frozen_whole: bool = False,
) -> Any:
    """Distribute a model's weights, one FSDP unit per transformer block.

    Rank 0's weights are broadcast; those of other ranks may be on the meta device. Each unit is broadcast, sharded
    along `tensor` and then by FSDP before the next one, so that a process never holds more than its shards and one
    unit. Blocks are the modules of class `block_name`, or those the model declares unsplittable; embeddings and head,
    tied or not, belong to the root unit. Computes in `compute_dtype` and reduces gradients in `reduce_dtype`. Raises
    InputError for a class that the model does not have, and for a model that cannot be sharded along `tensor`.

    Without `reshard_after_forward` blocks stay gathered until their backward pass, as the root unit always does. With
    `frozen_whole` FSDP leaves parameters alone that are not trained: they are whole on every process (or slices along
    `tensor`), in `compute_dtype`, and a model in which all are frozen has no units.
    """
    blocks = find_blocks(model, block_name)
    plan = find_plan(model) if mesh.tensor_size > 1 else {}
    fsdp_mesh = (
        mesh.device_mesh["replicate", "shard"] if mesh.data_size > mesh.shard_size else mesh.device_mesh["shard"]
    )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    # a single tensor-parallel group that computes in the weights' own dtype does not need FSDP
    sharded = mesh.tensor_size == 1 or mesh.data_size > 1 or compute_dtype != model.dtype
    specs = _agree_on_tensors(model)
    names = {module: name for name, module in model.named_modules()}
    done: set[torch.nn.Module] = set()
    whole: set[torch.nn.Parameter] = set()
    n_gathered = 0  # elements that a process holds when all units are gathered
    for unit in (*reversed(blocks), model):  # reversed, so that a block inside another one comes before it
        remaining = {*unit.modules()} - done
        modules = {names[module]: module for module in unit.modules() if module in remaining}
        _receive(modules, specs, mesh, frozen_dtype=compute_dtype if frozen_whole else None)
        if plan:
            cut_modules(modules, plan, mesh.device_mesh["tensor"])
        own = {parameter for module in remaining for parameter in module.parameters(recurse=False)}
        whole |= {parameter for parameter in own if frozen_whole and not parameter.requires_grad}
        n_gathered += sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in own - whole)
        if sharded and (own - whole or (unit is model and n_gathered)):  # the root joins the units below it
            keep = None if reshard_after_forward else False  # None: all but the root reshard
            fully_shard(unit, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=keep, ignored_params=whole)
        elif sharded:  # the policy's units cast their inputs too
            unit.register_forward_pre_hook(partial(_cast_inputs, compute_dtype), prepend=True, with_kwargs=True)
        done |= remaining
    if isinstance(model, FSDPModule):
        model.gathered_bytes, model.reshards_after_forward = n_gathered * compute_dtype.itemsize, reshard_after_forward
        model.apply_to_itself = lambda function, *args: function(model, *args)
        register_fsdp_forward_method(model, "apply_to_itself")
    return model


@torch.compiler.disable
def _cast_inputs(dtype: torch.dtype, unit: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Cast the floating-point inputs of a unit, as FSDP does."""
    return tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))


def run_as_forward(model: Any, function: Callable, *args: Any) -> Any:
    """`function(model, *args)`, with the root unit gathered once."""
    return model.apply_to_itself(function, *args) if isinstance(model, FSDPModule) else function(model, *args)


def find_blocks(model: Any, block_name: str | None) -> list[torch.nn.Module]:
    """The modules of class `block_name`, or those the model declares unsplittable.

    Raises InputError for a class that the model does not have.
    """
    names = [block_name] if block_name else sorted(model._no_split_modules or ())
    if not names:
        raise InputError(f"{type(model).__name__} does not declare its blocks; set model.block_name to their class")
    classes = tuple(get_block_class_from_model(model, name) for name in names)
    if isinstance(model, classes):
        raise InputError(f"model.block_name={block_name} is the whole model; name a class within it, {OR_DECLARED}")
    return [module for module in model.modules() if isinstance(module, classes)]


def _agree_on_tensors(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of rank 0's parameters and buffers, by name.

    Also copies its generation config.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    sent = [own, getattr(model, "generation_config", None)]
    dist.broadcast_object_list(sent, src=0)
    specs, model.generation_config = sent
    own_shapes, shapes = ({name: shape for name, (shape, _) in each.items()} for each in (own, specs))
    different = sorted(name for name in own.keys() | specs.keys() if own_shapes.get(name) != shapes.get(name))
    if different:
        raise InputError(
            f"rank {dist.get_rank()} and rank 0 load different models under the same name "
            f"({', '.join(different[:3])}); put the same files on every machine"
        )
    return specs


def _receive(
    modules: Mapping[str, torch.nn.Module], specs: Mapping[str, tuple], mesh: Mesh, *, frozen_dtype: torch.dtype | None
) -> None:
    """Replace the modules' parameters and buffers with rank 0's.

    Frozen parameters get the dtype `frozen_dtype`; None keeps their own.
    """
    received: dict[torch.Tensor, torch.Tensor] = {}  # by the tensor replaced: tied ones are sent once, and stay tied
    for module_name, module in modules.items():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in received:
                    shape, dtype = specs[f"{module_name}.{name}".lstrip(".")]  # the model itself has the name ""
                    data = broadcast(tensor, shape, dtype, mesh)
                    if isinstance(tensor, torch.nn.Parameter):
                        data = data if tensor.requires_grad else data.to(frozen_dtype)  # as FSDP does; not buffers
                        data = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
                    received[tensor] = data
                tensors[name] = received[tensor]


def broadcast(tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, mesh: Mesh) -> torch.Tensor:
    """Rank 0's tensor, which others may not have, on this process's device."""
    if mesh.rank == 0:
        data = tensor.detach().to(mesh.device).contiguous()
    else:
        data = torch.empty(shape, dtype=dtype, device=mesh.device)
    if mesh.world_size > 1:
        dist.broadcast(data, src=0)
    return data


def accumulate(model: torch.nn.Module, *, last: bool, reduce_once: bool = False) -> None:
    """Declare whether the next backward is the `last` of an update.

    The root unit (embeddings and head) is resharded, and gradients are reduced over `replicate`, only after the last.
    With `reduce_once` they are reduced over `shard` only then too, and every process adds up whole gradients until it.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last, recurse=False)
        if reduce_once:
            model.set_requires_gradient_sync(last)
        else:
            model.set_requires_all_reduce(last)


def release_gathered(model: Any) -> None:
    """Reshard what a forward without a backward leaves gathered.

    Also empties the list of the units that such forwards have run, which FSDP keeps for a backward to prefetch them.
    """
    units = _list_units(model)
    for unit in units:
        unit.reshard()
    # of torch 2.13 on; it needs a model that has run
    if units and hasattr(model, "reset_iter_state") and model._get_fsdp_state()._is_root:
        model.reset_iter_state()


def _list_units(model: Any) -> list[Any]:
    """The FSDP units of a model, the root first."""
    return [] if model is None else [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered_weights(model: Any) -> Iterator[bool]:
    """Inside, every process holds all weights, if they fit.

    Yields whether they do. Sampling runs a forward per token, and each would otherwise gather every block again.
    """
    units = _list_units(model)
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
            # the root stays gathered, as the backward pass starts with it
            unit.set_reshard_after_forward(unit is not model and model.reshards_after_forward, recurse=False)


def _fits(model: Any) -> bool:
    """Return whether all processes have twice the memory that gathering takes."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that the allocator caches does not count as free
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = host_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    answer = torch.tensor(int(model.gathered_bytes <= free / 2), device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def get_block_class_from_model(model: torch.nn.Module, block_class_name: str) -> type[torch.nn.Module]:
    """The class named `block_class_name` among the model's modules.

    Raises InputError that lists the classes of repeated modules, the candidates for a transformer block.
    """
    for module in model.modules():
        if type(module).__name__ == block_class_name:
            return type(module)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    repeated = {type(modules[0]).__name__ for modules in lists}
    raise InputError(
        f"model.block_name={block_class_name} is not a module class of {type(model).__name__}; "
        f"its repeated blocks are {', '.join(sorted(repeated))}; use one of these classes, {OR_DECLARED}"
    )


# --- one process with several GPUs ---------------------------------------------------------------------------------


def choose_device_map(gpus: int) -> str | dict[str, int] | None:
    """The `device_map` for loading weights; "" stands for the whole model."""
    if gpus == 0:
        return None
    return {"": 0} if gpus == 1 else "balanced"


def move_less(model: Any, blocks: list[torch.nn.Module]) -> None:
    """Move fewer tensors between the GPUs of a spread model.

    accelerate's hooks move each layer's inputs to its GPU. By default they also move the logits of all tokens back to
    the first GPU, and copy the attention mask to another GPU once for every layer on it. Here outputs stay where they
    are computed, and inputs that blocks share are copied once per GPU.
    """
    model._hf_hook.io_same_device = False
    copies: Any = WeakTensorKeyDictionary()  # {tensor still in use: {device: copy}}

    def copied(value: Any, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device or value.requires_grad:
            return value
        by_device = copies.setdefault(value, {})
        if device not in by_device:
            by_device[device] = value.to(device, non_blocking=True)
        return by_device[device]

    @torch.compiler.disable
    def share(block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        device = next(block.parameters()).device
        hidden, *others = args  # hidden states are of this block alone: accelerate's hook moves them
        return (hidden, *tree_map(lambda v: copied(v, device), others)), tree_map(lambda v: copied(v, device), kwargs)

    for block in blocks:
        block.register_forward_pre_hook(share, with_kwargs=True)
