"""Tensor parallelism: every process of a group computes with slices of layers.

A plan maps the names of modules to styles, which say how to shard a module. It comes from the model itself or from
`PLANS`. Parameters become DTensors, so that clipping, optimizer and checkpoints account for the slices. Inside a
module's forward, parameters are plain local tensors, so that a layer costs no more than its one collective (Shoeybi et
al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dpo.errors import InputError

WHOLE, SUMMED, LAST = Replicate(), Partial(), Shard(-1)

# conversions of activations: (placement before, placement after, placement of the gradient after)
COPIED = (WHOLE, WHOLE, SUMMED)  # processes compute different features from the whole input, so gradients are summed
SLICED = (WHOLE, LAST, LAST)
ADDED = (SUMMED, WHOLE, WHOLE)
JOINED = (LAST, WHOLE, WHOLE)
OWN_HEADS = (LAST, WHOLE, SUMMED)  # for GPT-2, where one matrix gives queries, keys and values side by side


class Style(NamedTuple):
    """How one module is sharded over the group.

    Activations are (..., features).
    """

    cut: str | None  # the sharded dim: "out" features, "in" features, the "rows" of an embedding, or None
    enter: tuple | None = None  # the conversion of the module's input, before its local forward
    leave: tuple | None = None  # the conversion of the output, after the local forward
    grad_is_partial: bool = False  # for a replicated parameter that sees only this process's slice of the activations
    divided: str | None = None  # an attribute of the module that holds a size, to be divided by the group's size


def _convert(x: torch.Tensor, mesh: DeviceMesh, conversion: tuple, *, width: int = 0) -> Any:
    """Convert a local tensor, (..., features) before and after.

    `width` is the number of features of the whole tensor if `x` is a slice. It is needed, as slices may differ in
    width. 0 if `x` has all features.
    """
    before, after, grad = (Shard(x.ndim - 1) if placement == LAST else placement for placement in conversion)
    shape = (*x.shape[:-1], width) if width else None
    stride = torch.empty(shape, device="meta").stride() if shape else None
    distributed = DTensor.from_local(x, mesh, [before], run_check=False, shape=shape, stride=stride)
    local = distributed.redistribute(placements=[after]).to_local(grad_placements=[grad])
    if conversion is OWN_HEADS:  # (..., 3 * heads * head size) to (..., 3 * own heads * head size)
        return local.unflatten(-1, (3, mesh.size(), -1))[..., mesh.get_local_rank(), :].flatten(-2)
    return local


class _SharedInput:
    """An input that queries, keys and values share, converted once for all.

    In the backward pass their gradients are summed before the collective, so there is one collective.
    """

    def __init__(self) -> None:
        self.n_modules = 0  # modules that share the input
        self._original: Any = None
        self._converted: Any = None
        self._n_waiting = 0  # modules that have not received the converted input yet

    def convert(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Convert `x` for the first module; return the same to others."""
        if self._original is not x:
            self._original, self._converted = x, _convert(x, mesh, COPIED)
            self._n_waiting = self.n_modules
        converted = self._converted
        self._n_waiting -= 1
        if self._n_waiting == 0:
            self._original = self._converted = None  # free both tensors
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

# the styles of an adapter's A and B, by the `cut` of the matrix that they adapt
ADAPTER_STYLES: dict[str | None, tuple[Style, Style]] = {
    "out": (STYLES["replicated_with_grad_allreduce"], Style("out")),
    "in": (Style("in"), STYLES["replicated_with_grad_allreduce"]),
}

# For model types without a plan in transformers, by pattern of module names. The names of styles are those of
# transformers, and fused_qkv, gpt2_attention and gptj_attention.
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
    """Raise InputError if `size` processes cannot share the heads evenly."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        n_heads = getattr(config, name, None)
        if isinstance(n_heads, int) and n_heads % size:
            divisors = ", ".join(str(n) for n in range(1, n_heads + 1) if n_heads % n == 0)
            raise InputError(
                f"tensor_parallel_size={size} does not divide the model's {name}={n_heads}; "
                f"sizes that do: {divisors}; or use trainer=FSDPTrainer, which shards any model"
            )


def find_plan(model: Any) -> dict[str, Style]:
    """The style of each module to shard, by full name.

    Raises InputError for an unsupported model.
    """
    # names of styles by pattern of module names
    style_names = PLANS.get(model.config.model_type) or dict(getattr(model, "_tp_plan", None) or {})
    if not style_names:
        raise InputError(f"{type(model).__name__} has no tensor-parallel plan; use trainer=FSDPTrainer")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    name_of = {module: name for name, module in model.named_modules()}
    embedding_name, head_name = name_of[embedding], name_of[head]
    style_names = {embedding_name: "embedding_rowwise", **style_names}  # the plan may name another style
    if head.weight is embedding.weight:  # one matrix, which must be sharded in one way
        style_names |= {embedding_name: "embedding_rowwise", head_name: "colwise_gather_output"}
    unknown = sorted(set(style_names.values()) - STYLES.keys())
    if unknown:
        raise InputError(
            f"the tensor-parallel plan of {type(model).__name__} uses {', '.join(unknown)}, "
            f"which is not supported here; use trainer=FSDPTrainer"
        )
    plan: dict[str, Style] = {}
    for pattern, style_name in style_names.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        plan |= {name: STYLES[style_name] for name in name_of.values() if regex.fullmatch(name)}
    _check_cover(model, plan, ignore={embedding_name, head_name})
    return plan | _plan_adapters(model, plan)


def _plan_adapters(model: Any, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of PEFT's LoRA layers and of the modules inside them.

    A layer computes W x + B A x. The style of W in `plan` converts input and output of the whole layer: as the sum is
    linear, one conversion after it does for both terms.
    """
    styles = {}
    for name, module in model.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        style = plan.get(name, STYLES["replicate"])
        w_style = style._replace(enter=None, leave=None)
        a_style, b_style = ADAPTER_STYLES.get(style.cut, (w_style, w_style))
        styles[name] = Style(None, style.enter, style.leave)
        styles[f"{name}.base_layer"] = w_style
        for adapter in module.lora_A:
            styles[f"{name}.lora_A.{adapter}"] = a_style
            styles[f"{name}.lora_B.{adapter}"] = b_style
            styles[f"{name}.lora_dropout.{adapter}"] = a_style  # its output is the input of A
    return styles


def _check_cover(model: Any, plan: Mapping[str, Style], ignore: set[str]) -> None:
    """Raise InputError if a parameter that may see slices has no style.

    Such a parameter would train on wrong gradients. A module may see slices if it is the parent or a sibling of a
    module with sliced outputs. `ignore` names modules whose slices no other module sees.
    """
    slicing_styles = (STYLES["colwise"], STYLES["fused_qkv"])
    slicing_modules = {name for name, style in plan.items() if style in slicing_styles} - ignore
    parents = {name.rpartition(".")[0] for name in slicing_modules}
    for name, module in model.named_modules():
        name = name.removesuffix(".base_layer")  # the plan names an adapted layer as it was before
        has_parameters = next(module.parameters(recurse=False), None) is not None
        may_see_slices = name in parents or name.rpartition(".")[0] in parents
        if has_parameters and may_see_slices and name not in plan:
            raise InputError(
                f"the tensor-parallel plan of {type(model).__name__} does not say how to shard {name}; "
                f"use trainer=FSDPTrainer"
            )


def cut_modules(modules: Mapping[str, Any], plan: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Shard the modules' own parameters, and make forwards compute with slices.

    `modules` maps full names to modules with whole parameters. Modules that share a tied parameter must be in the same
    call, or they do not share it afterwards.
    """
    slices: dict[Any, torch.nn.Parameter] = {}  # by whole parameter; keeps these alive, so that no id is reused
    shared_inputs: dict[str, _SharedInput] = defaultdict(_SharedInput)  # by the parent of the modules that share it
    for name, module in modules.items():
        style = plan.get(name, STYLES["replicate"])
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in slices:
                slices[parameter] = _slice(parameter, _cut_dim(module, key, style), mesh)
            module.register_parameter(key, slices[parameter])
        shared_input = None
        if style.enter is COPIED:
            parent = name.rpartition(".")[0]
            shared_input = shared_inputs[parent]
            shared_input.n_modules += 1
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if style.enter or style.leave or has_parameters:
            _compute_with_slices(module, style, mesh, shared_input)
        n_features = getattr(module, "n_features", 0)  # only `adapter_dropout.Dropout` has it
        if style.cut == "in" and n_features:
            module.first_feature = _first_index(n_features, mesh)
        if style.divided is not None:
            setattr(module, style.divided, getattr(module, style.divided) // mesh.size())


def _first_index(size: int, mesh: DeviceMesh) -> int:
    """Index at which this process's slice of a dim of `size` begins."""
    return mesh.get_local_rank() * -(-size // mesh.size())  # DTensor cuts as torch.chunk does, into rounded-up sizes


def _compute_with_slices(module: Any, style: Style, mesh: DeviceMesh, shared_input: _SharedInput | None) -> None:
    """Replace a module's forward by one that computes with local parameters."""
    forward, rank = module.forward, mesh.get_local_rank()
    out_features = getattr(module, "out_features", 0) or getattr(module, "nf", 0)  # nf: transformers' Conv1D
    width = out_features if style.leave and style.leave[0] == LAST else 0  # of the whole output, if slices leave
    if style.cut == "out" and hasattr(module, "nf"):
        module.nf = module.weight.to_local().shape[1]
    if style.cut == "rows":
        forward = _make_sliced_lookup(module, mesh)

    def local_forward(*args: Any, **kwargs: Any) -> Any:
        if style.enter:
            x = shared_input.convert(args[0], mesh) if shared_input else _convert(args[0], mesh, style.enter)
            args = (x, *args[1:])
        with _local_parameters(module, style, rank):
            y = forward(*args, **kwargs)
        return _convert(y, mesh, style.leave, width=width) if style.leave else y

    module.forward = local_forward


def _cut_dim(module: torch.nn.Module, name: str, style: Style) -> int | None:
    """The dim along which a module's parameter `name` is sharded, or None."""
    if style.cut is None:
        return None
    if name == "bias":
        return None if style.cut == "in" else 0
    if style.cut == "rows":
        return 0
    is_transposed = hasattr(module, "nf")  # weights of Linear are (out, in), those of transformers' Conv1D (in, out)
    in_dim = 0 if is_transposed else 1
    return in_dim if style.cut == "in" else 1 - in_dim


def _slice(parameter: torch.nn.Parameter, dim: int | None, mesh: DeviceMesh) -> torch.nn.Parameter:
    """This process's slice along `dim`, or a replica if None."""
    placement = WHOLE if dim is None else Shard(dim)
    local = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None).to_local()
    if dim is not None:
        local = local.clone(memory_format=torch.contiguous_format)  # a copy, so that the whole can be freed
    sliced = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return torch.nn.Parameter(sliced, requires_grad=parameter.requires_grad)


@contextmanager
def _local_parameters(module: torch.nn.Module, style: Style, rank: int) -> Iterator[None]:
    """Replace a module's DTensors by local tensors inside.

    Gradients flow to the DTensors.
    """
    dtensors = dict(module._parameters)
    for name, parameter in dtensors.items():
        if parameter is None:
            continue
        # where the input is cut, outputs are summed over ranks, and only one rank may add the bias
        is_added_once = name == "bias" and style.cut == "in"
        grad_is_partial = style.grad_is_partial or is_added_once
        local = parameter.to_local(grad_placements=[SUMMED] if grad_is_partial else None)
        module._parameters[name] = local * (rank == 0) if is_added_once else local
    try:
        yield
    finally:
        module._parameters.update(dtensors)


def _make_sliced_lookup(module: torch.nn.Embedding, mesh: DeviceMesh) -> Callable:
    """A forward that embeds the tokens of this process's rows.

    The embeddings of other tokens are 0; the sum over processes has all.
    """
    lookup, n_rows = module.forward, module.weight.to_local().shape[0]
    first_row = _first_index(module.weight.shape[0], mesh)
    if module.padding_idx is not None:
        local_padding_idx = module.padding_idx - first_row
        module.padding_idx = local_padding_idx if 0 <= local_padding_idx < n_rows else None

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        is_here = (token_ids >= first_row) & (token_ids < first_row + n_rows)
        return lookup((token_ids - first_row).where(is_here, 0)) * is_here.unsqueeze(-1)  # (..., features)

    return forward
