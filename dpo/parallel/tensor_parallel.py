"""Tensor parallelism: every process of a group computes with slices of layers.

A plan maps module names to styles, which say how to shard them; it comes from the model itself or from `PLANS`.
Parameters become DTensors, so that gradients, clipping, optimizer and checkpoints account for the slices. Forward and
backward passes use their local tensors alone, so that a layer costs no more than its one collective (Shoeybi et al.
2019, arXiv 1909.08053).
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from dpo.errors import InputError

COLLECTIVES = torch.ops._c10d_functional


def _add(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the tensors of all processes."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x.contiguous(), "sum", mesh.get_group().group_name))


def _own_part(mesh: DeviceMesh, size: int) -> slice:
    """This process's part of a dim, as torch.chunk splits it."""
    length, rank = -(-size // mesh.size()), mesh.get_local_rank()
    return slice(length * rank, length * (rank + 1))


# conversions of a local tensor; the whole one has `width` features


class _Copy(torch.autograd.Function):
    """A whole input, from which processes compute different features (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, width: int) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _add(grad, ctx.mesh), None, None


class _Add(torch.autograd.Function):
    """The sum over processes, whose gradient is whole on each (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, width: int) -> torch.Tensor:
        return _add(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _Join(torch.autograd.Function):
    """The features of all processes side by side, whose gradient is whole on each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, width: int) -> torch.Tensor:
        ctx.own = _own_part(mesh, width)
        length = ctx.own.stop - ctx.own.start
        x = torch.nn.functional.pad(x, (0, length - x.shape[-1])).contiguous()  # the last slices may be narrower
        parts = COLLECTIVES.all_gather_into_tensor(x, mesh.size(), mesh.get_group().group_name)
        parts = enumerate(COLLECTIVES.wait_tensor(parts).chunk(mesh.size()))
        return torch.cat([part[..., : max(0, width - i * length)] for i, part in parts], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[..., ctx.own], None, None


COPIED, ADDED, JOINED = _Copy.apply, _Add.apply, _Join.apply


def SLICED(x: torch.Tensor, mesh: DeviceMesh, width: int) -> torch.Tensor:
    return COPIED(x, mesh, width)[..., _own_part(mesh, x.shape[-1])]


def OWN_HEADS(x: torch.Tensor, mesh: DeviceMesh, width: int) -> torch.Tensor:
    """(..., 3 * heads * head size) to (..., 3 * own heads * head size).

    For GPT-2, where one matrix gives queries, keys and values side by side.
    """
    whole = COPIED(JOINED(x, mesh, width), mesh, width)
    return whole.unflatten(-1, (3, mesh.size(), -1))[..., mesh.get_local_rank(), :].flatten(-2)


class Style(NamedTuple):
    """The sharding of one module over the group. Activations are (..., features)."""

    cut: str | None  # the sharded dim: "out" features, "in" features, the "rows" of an embedding, or None
    enter: Callable | None = None  # the conversion of the input of the local forward
    leave: Callable | None = None  # the conversion of its output
    grad_is_partial: bool = False  # for a replicated parameter that sees only this process's slice of the activations
    divided: str | None = None  # an attribute that holds a size, to be divided by the group's size


class _SharedInput:
    """An input that queries, keys and values share and convert once.

    Their gradients are summed before the one collective.
    """

    def __init__(self) -> None:
        self.takers = 0  # modules that share the input
        self._given: Any = None
        self._converted: Any = None
        self._n_waiting = 0  # takers that have not received the converted input yet

    def convert(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self._given is not x:
            self._given, self._converted, self._n_waiting = x, COPIED(x, mesh, 0), self.takers
        converted, self._n_waiting = self._converted, self._n_waiting - 1
        if self._n_waiting == 0:
            self._given = self._converted = None  # frees both tensors
        return converted


STYLES = {
    "colwise": Style("out", COPIED),
    "rowwise": Style("in", None, ADDED),
    "colwise_gather_output": Style("out", COPIED, JOINED),
    "rowwise_split_input": Style("in", SLICED, ADDED),
    "fused_qkv": Style("out", COPIED, OWN_HEADS),
    "embedding_rowwise": Style("rows", None, ADDED),
    "replicated_with_grad_allreduce": Style(None, grad_is_partial=True),
    "replicate": Style(None),
    "gpt2_attention": Style(None, divided="split_size"),
    "gptj_attention": Style(None, divided="num_attention_heads"),
}

# the styles of an adapter's A and B, by the cut of the matrix that they adapt
BESIDE: dict[str | None, tuple[Style, Style]] = {
    "out": (STYLES["replicated_with_grad_allreduce"], Style("out")),
    "in": (Style("in"), STYLES["replicated_with_grad_allreduce"]),
}

# for families without a plan in transformers; style names are those of transformers, fused_qkv and two attentions
PLANS = {
    "gpt2": {
        "transformer.h.*.attn": "gpt2_attention",
        "transformer.h.*.attn.c_attn": "fused_qkv",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "gptj": {
        "transformer.h.*.attn": "gptj_attention",
        **{f"transformer.h.*.attn.{name}_proj": "colwise" for name in "qkv"},
        "transformer.h.*.attn.out_proj": "rowwise",
        "transformer.h.*.mlp.fc_in": "colwise",
        "transformer.h.*.mlp.fc_out": "rowwise",
        "lm_head": "colwise_gather_output",
    },
}


def check_tensor_parallel(config: Any, size: int) -> None:
    """Raises InputError if `size` processes cannot share the heads evenly."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise InputError(
                f"tensor_parallel_size={size} does not divide the model's {name}={heads}; "
                f"sizes that do: {fitting}; or use trainer=FSDPTrainer, which shards any model"
            )


def find_plan(model: Any) -> dict[str, Style]:
    """The style of each module to shard, by full name.

    Raises InputError for an unsupported model.
    """
    kind = model.config.model_type
    named = PLANS.get(kind) or dict(getattr(model, "_tp_plan", None) or {})
    if not named:
        raise InputError(f"{type(model).__name__} has no tensor-parallel plan; use trainer=FSDPTrainer")
    by_module = {module: name for name, module in model.named_modules()}
    embedding, head = by_module[model.get_input_embeddings()], by_module[model.get_output_embeddings()]
    named = {embedding: "embedding_rowwise", **named}  # unless the plan names another
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # one matrix, sharded one way
        named |= {embedding: "embedding_rowwise", head: "colwise_gather_output"}
    unknown = sorted(set(named.values()) - STYLES.keys())
    if unknown:
        raise InputError(
            f"the tensor-parallel plan of {type(model).__name__} uses {', '.join(unknown)}, "
            f"which is not supported here; use trainer=FSDPTrainer"
        )
    patterns = [(re.compile(re.escape(n).replace(r"\*", r"\d+")), STYLES[style]) for n, style in named.items()]
    plan = {name: style for name in by_module.values() for p, style in patterns if p.fullmatch(name)}
    _check_cover(model, plan, ignore={embedding, head})
    return plan | _plan_adapters(model, plan)


def _plan_adapters(model: Any, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of PEFT's LoRA layers and of their parts.

    A layer computes W x + B A x. As the sum is linear, the style of W converts input and output once, around the sum.
    """
    styles = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            style = plan.get(name, STYLES["replicate"])
            w_style = style._replace(enter=None, leave=None)
            a_style, b_style = BESIDE.get(style.cut, (w_style, w_style))
            styles |= {name: Style(None, style.enter, style.leave), f"{name}.base_layer": w_style}
            for adapter in module.lora_A:
                styles |= {f"{name}.lora_A.{adapter}": a_style, f"{name}.lora_B.{adapter}": b_style}
                styles[f"{name}.lora_dropout.{adapter}"] = a_style  # of A's input
    return styles


def _check_cover(model: Any, plan: Mapping[str, Style], ignore: set[str]) -> None:
    """Raises InputError if a parameter that may see slices has no style.

    Such a parameter would train on wrong gradients.
    """
    slicing = (STYLES["colwise"], STYLES["fused_qkv"])
    beside = {name.rpartition(".")[0] for name, style in plan.items() if style in slicing and name not in ignore}
    for name, module in model.named_modules():
        name = name.removesuffix(".base_layer")  # the plan names an adapted layer as it was before
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and name not in plan and (name in beside or name.rpartition(".")[0] in beside):
            raise InputError(
                f"the tensor-parallel plan of {type(model).__name__} does not say how to shard {name}; "
                f"use trainer=FSDPTrainer"
            )


def cut_modules(modules: Mapping[str, Any], plan: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Shard the modules' own parameters, and make forwards compute with slices.

    `modules` maps full names to modules with whole parameters; tied ones must be in the same call to stay tied.
    """
    slices: dict[Any, torch.nn.Parameter] = {}  # by whole parameter; keeps these alive, so that no id is reused
    inputs: dict[str, _SharedInput] = defaultdict(_SharedInput)  # by the parent of the modules that share one
    for name, module in modules.items():
        style = plan.get(name, STYLES["replicate"])
        shared = inputs[name.rpartition(".")[0]] if style.enter is COPIED else None
        if shared:
            shared.takers += 1
        width = getattr(module, "out_features", 0) or getattr(module, "nf", 0)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in slices:
                slices[parameter] = _slice(parameter, _cut_dim(module, key, style), mesh)
            module.register_parameter(key, slices[parameter])
        if style.enter or style.leave or next(module.parameters(recurse=False), None) is not None:
            _compute_with_slices(module, style, mesh, width, shared)
        if style.cut == "in" and (n := getattr(module, "n_features", 0)):  # only the dropout of A's input has it
            module.first_feature = _own_part(mesh, n).start
        if style.divided is not None:
            setattr(module, style.divided, getattr(module, style.divided) // mesh.size())


def _compute_with_slices(module: Any, style: Style, mesh: DeviceMesh, width: int, shared: _SharedInput | None) -> None:
    forward, rank = module.forward, mesh.get_local_rank()
    if style.cut == "out" and hasattr(module, "nf"):
        module.nf = module.weight.to_local().shape[1]  # the output width of transformers' Conv1D
    if style.cut == "rows":
        forward = _look_up_own_rows(module, mesh)

    def local_forward(*args: Any, **kwargs: Any) -> Any:
        if style.enter:
            x = shared.convert(args[0], mesh) if shared else style.enter(args[0], mesh, width)
            args = (x, *args[1:])
        whole = dict(module._parameters)
        try:
            for name, parameter in whole.items():
                if parameter is not None:
                    module._parameters[name] = _local(parameter, name, style, rank)
            y = forward(*args, **kwargs)
        finally:
            module._parameters.update(whole)
        return style.leave(y, mesh, width) if style.leave else y

    module.forward = local_forward


def _cut_dim(module: torch.nn.Module, name: str, style: Style) -> int | None:
    """The dim along which a parameter is sharded, or None.

    Linear weights are (out, in), those of transformers' Conv1D (in, out).
    """
    if style.cut is None or (name == "bias" and style.cut == "in"):
        return None
    transposed = hasattr(module, "nf")
    return int(name != "bias" and (style.cut == "in") != transposed)


def _slice(parameter: torch.nn.Parameter, dim: int | None, mesh: DeviceMesh) -> torch.nn.Parameter:
    """This process's slice, copied so that the whole can be freed."""
    placement = Replicate() if dim is None else Shard(dim)
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    local = whole.to_local()
    if dim is not None:
        local = local.clone(memory_format=torch.contiguous_format)
    sliced = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return torch.nn.Parameter(sliced, requires_grad=parameter.requires_grad)


def _local(parameter: Any, name: str, style: Style, rank: int) -> torch.Tensor:
    """The local tensor of a parameter, in the graph in its place.

    It shares the parameter's memory and is made once. A gradient becomes the parameter's.
    """
    if not hasattr(parameter, "local"):
        local = parameter.detach().to_local().detach()  # a leaf of its own
        if name == "bias" and style.cut == "in" and rank > 0:
            local = torch.zeros_like(local)  # outputs are added up: only one process may add the bias
        parameter.local = local.requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            placements = [Partial()] if style.grad_is_partial else parameter.placements
            local.register_post_accumulate_grad_hook(partial(_pass_on, weakref.ref(parameter), placements))
    return parameter.local


def _pass_on(owner: weakref.ref, placements: Sequence[Placement], local: torch.Tensor) -> None:
    """Move a local tensor's gradient to its parameter."""
    parameter, grad, local.grad = owner(), local.grad, None
    if parameter.grad is not None:
        parameter.grad.to_local().add_(grad)
        return
    mesh, shape = parameter.device_mesh, parameter.shape
    parameter.grad = DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


def _look_up_own_rows(module: torch.nn.Embedding, mesh: DeviceMesh) -> Callable:
    """Embeddings of the tokens whose rows this process holds, else zeros."""
    lookup, rows = module.forward, module.weight.to_local().shape[0]
    first = _own_part(mesh, module.weight.shape[0]).start
    padding = module.padding_idx
    module.padding_idx = padding - first if padding is not None and 0 <= padding - first < rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        own = (ids >= first) & (ids < first + rows)
        return lookup((ids - first).where(own, 0)) * own.unsqueeze(-1)  # (..., features)

    return forward
