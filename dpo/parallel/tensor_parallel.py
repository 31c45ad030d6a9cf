"""Tensor parallelism after Shoeybi et al. 2019 (arXiv 1909.08053): every process of a group has slices of layers.

A plan maps the names of modules to styles. Parameters become DTensors, so that clipping and checkpoints account for the
slices; forward and backward passes compute with plain tensors, the local parts of the DTensors.
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers.pytorch_utils import Conv1D

from dpo.errors import InputError

COLLECTIVES = torch.ops._c10d_functional  # unlike torch.distributed's, these can be in a compiled block

# Conversions of activations. Each maps a process's tensor (..., features), the mesh of the group, and `width`, the
# number of output features of the whole module, to the process's tensor after the conversion. All have the same
# arguments, though some need no `width`.


class _Copy(torch.autograd.Function):
    """Megatron's f: the identity. As processes compute different features from it, backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)  # a new tensor, to which autograd can attach this function

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _sum(grad, ctx.mesh), None, None  # mesh and width have no gradient


class _Add(torch.autograd.Function):
    """Megatron's g: the sum over processes. Each has the whole gradient of the sum, so backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
        return _sum(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None, None  # mesh and width have no gradient


class _Join(torch.autograd.Function):
    """All processes' slices, joined. Each has the whole gradient, so backward takes this process's slice of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
        ctx.own_slice = _own_slice(width, mesh)
        length = ctx.own_slice.stop - ctx.own_slice.start
        # The last slices may be shorter or empty, and the collective takes slices of equal size.
        x = nn.functional.pad(x, (0, length - x.shape[-1])).contiguous()
        gathered = COLLECTIVES.all_gather_into_tensor(x, mesh.size(), mesh.get_group().group_name)
        slices = COLLECTIVES.wait_tensor(gathered).chunk(mesh.size())
        return torch.cat(slices, dim=-1)[..., :width].contiguous()  # padding is at the end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad[..., ctx.own_slice], None, None  # mesh and width have no gradient


def _take_slice(x: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
    """Take this process's slice of an input; its size follows from the input's features, not from `width`."""
    return _Copy.apply(x, mesh, width)[..., _own_slice(x.shape[-1], mesh)]


def _take_heads(x: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
    """Turn this process's slice of (..., 3 * heads * head size) into the queries, keys and values of its heads.

    GPT-2 has all queries, then all keys, then all values, so a contiguous slice is not a set of heads: the
    slices are joined first.
    """
    whole = _Copy.apply(_Join.apply(x, mesh, width), mesh, width)
    return whole.unflatten(-1, (3, mesh.size(), -1))[..., mesh.get_local_rank(), :].flatten(-2)


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the tensors of all processes of the group."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x.contiguous(), "sum", mesh.get_group().group_name))


def _own_slice(size: int, mesh: DeviceMesh) -> slice:
    """Return this process's slice of a dim of `size` entries; its end may exceed the dim."""
    length = -(-size // mesh.size())  # DTensor cuts as torch.chunk does, into rounded-up sizes
    start = mesh.get_local_rank() * length
    return slice(start, start + length)


class Style(NamedTuple):
    """The sharding of one module over the group; activations are (..., features)."""

    cut: str | None  # the sharded dim: "out" features, "in" features, the "rows" of an embedding, or None
    enter: Callable | None = None  # the conversion of the module's input, before its local forward
    leave: Callable | None = None  # the conversion of the output, after the local forward
    grad_is_partial: bool = False  # for a replicated parameter whose activations are slices: gradients are summed
    divided: str | None = None  # the module's attribute with a size to divide by the group's size


STYLES = {
    "colwise": Style("out", _Copy.apply),
    "rowwise": Style("in", None, _Add.apply),
    "colwise_gather_output": Style("out", _Copy.apply, _Join.apply),
    "rowwise_split_input": Style("in", _take_slice, _Add.apply),
    "fused_qkv": Style("out", _Copy.apply, _take_heads),
    "embedding_rowwise": Style("rows", None, _Add.apply),
    "replicated_with_grad_allreduce": Style(None, grad_is_partial=True),
    "replicate": Style(None),
    "gpt2_attention": Style(None, divided="split_size"),
    "gptj_attention": Style(None, divided="num_attention_heads"),
}

# The styles of an adapter's A and B follow from the `cut` of the matrix that they adapt.
ADAPTER_STYLES: dict[str | None, tuple[Style, Style]] = {
    "out": (STYLES["replicated_with_grad_allreduce"], Style("out")),
    "in": (Style("in"), STYLES["replicated_with_grad_allreduce"]),
}

# For model types that have no plan in transformers: names of styles by pattern of module names.
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
        "transformer.h.*.attn.q_proj": "colwise",
        "transformer.h.*.attn.k_proj": "colwise",
        "transformer.h.*.attn.v_proj": "colwise",
        "transformer.h.*.attn.out_proj": "rowwise",
        "transformer.h.*.mlp.fc_in": "colwise",
        "transformer.h.*.mlp.fc_out": "rowwise",
        "lm_head": "colwise_gather_output",
    },
}


def check_tensor_parallel(config: Any, size: int) -> None:
    """Raise InputError if `size` processes cannot share a model's attention heads evenly."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        n_heads = getattr(config, name, None)
        if isinstance(n_heads, int) and n_heads % size:
            raise InputError(
                f"tensor_parallel_size={size} does not divide {name}={n_heads}: set another, or trainer=FSDPTrainer"
            )


def find_plan(model: Any) -> dict[str, Style]:
    """Return the style of each module to shard, by full name; raise InputError for an unsupported model."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    embedding_name = names[embedding]
    head_name = names.get(head, "")  # a reward model has no such head
    model_plan = PLANS.get(model.config.model_type) or model.tp_plan or {}  # by pattern of module names
    style_names = {embedding_name: "embedding_rowwise", **model_plan}  # it may name another style for the embedding
    if head is not None and head.weight is embedding.weight:  # one matrix, which must be sharded in one way
        style_names |= {embedding_name: "embedding_rowwise", head_name: "colwise_gather_output"}
    if not model_plan:
        raise _refusal(model, "is empty")
    if unknown := sorted(set(style_names.values()) - STYLES.keys()):
        raise _refusal(model, f"uses {', '.join(unknown)}, which is not supported here")
    plan = {}
    for pattern, style_name in style_names.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        plan |= {name: STYLES[style_name] for name in names.values() if regex.fullmatch(name)}

    # A parameter that may see slices and has no style would train on wrong gradients. A module may see slices if it is
    # the parent or a sibling of a module with sliced outputs; embedding and head do not count, as their outputs reach
    # none of these.
    slicing = (STYLES["colwise"], STYLES["fused_qkv"])
    sliced = {name for name, style in plan.items() if style in slicing} - {embedding_name, head_name}
    parents = {name.rpartition(".")[0] for name in sliced}
    for module, name in names.items():
        name = name.removesuffix(".base_layer")  # the plan has a base layer under the name of its adapted layer
        may_see_slices = name in parents or name.rpartition(".")[0] in parents
        if may_see_slices and name not in plan and [*module.parameters(recurse=False)]:
            raise _refusal(model, f"does not say how to shard {name}")

    # An adapted layer computes W x + B A x. Conversions are linear, so W's are done once for the sum: to the input and
    # the output of the whole layer.
    for module, name in names.items():
        if not hasattr(module, "base_layer"):
            continue
        style = plan.get(name, STYLES["replicate"])
        w_style = style._replace(enter=None, leave=None)
        a_style, b_style = ADAPTER_STYLES.get(style.cut, (w_style, w_style))
        plan[name] = Style(None, style.enter, style.leave)
        plan[f"{name}.base_layer"] = w_style
        for adapter in module.lora_A:
            plan[f"{name}.lora_A.{adapter}"] = a_style
            plan[f"{name}.lora_B.{adapter}"] = b_style
            plan[f"{name}.lora_dropout.{adapter}"] = a_style  # its output is the input of A
    return plan


def _refusal(model: Any, problem: str) -> InputError:
    return InputError(f"the tensor-parallel plan of {type(model).__name__} {problem}; use trainer=FSDPTrainer")


def cut_modules(modules: Mapping, plan: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Replace the parameters of `modules` by slices, and make their forwards compute with these.

    `modules` are by full name; only their own parameters are replaced, not those of submodules. Modules that share a
    tied parameter must be in one call. `plan` is from `find_plan`; modules that it lacks are replicated.
    """
    slices = {}  # by whole parameter, so that tied ones stay tied; keeps the keys alive, so that no id is reused
    for name, module in modules.items():
        style = plan.get(name, STYLES["replicate"])
        parameters = dict(module.named_parameters(recurse=False))
        for key, parameter in parameters.items():
            if parameter not in slices:
                slices[parameter] = _slice_parameter(module, key, style.cut, mesh)
            module.register_parameter(key, slices[parameter])
        if style.enter or style.leave or parameters:
            _compute_with_slices(module, style, mesh)
        if style.cut == "in" and isinstance(module, nn.Dropout):  # an adapter's, with sliced features
            width = modules[name.replace(".lora_dropout.", ".lora_A.")].in_features
            module.forward = partial(_drop_own_features, module, mesh, width)
        if style.divided:
            setattr(module, style.divided, getattr(module, style.divided) // mesh.size())


def _compute_with_slices(module: Any, style: Style, mesh: DeviceMesh) -> None:
    """Make a module's forward use its slices, and convert its input and output as the style says."""
    forward = module.forward
    rank = mesh.get_local_rank()
    width = getattr(module, "nf", None) or getattr(module, "out_features", 0)  # Conv1D calls it nf
    if style.cut == "out" and isinstance(module, Conv1D):  # its forward takes the shape of the output from nf
        module.nf = module.weight.to_local().shape[1]
    if style.cut == "rows":
        forward = _make_sliced_lookup(module, mesh)

    def local_forward(*args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on this process's slices, between the conversions of its input and its output."""
        if style.enter:
            args = (style.enter(args[0], mesh, width), *args[1:])
        # The module has local tensors only in the forward pass; optimizer and checkpoints see its DTensors.
        dtensors = dict(module._parameters)
        try:
            for name, parameter in dtensors.items():
                if parameter is not None:
                    module._parameters[name] = _get_local_leaf(parameter, name, style, rank)
            y = forward(*args, **kwargs)
        finally:
            module._parameters.update(dtensors)
        return style.leave(y, mesh, width) if style.leave else y

    module.forward = local_forward


def _drop_own_features(dropout: nn.Dropout, mesh: DeviceMesh, width: int, x: Tensor) -> Tensor:
    """Apply dropout to `x`, this process's slice of `width` features.

    Every process draws the mask of all features, so that the random generators of the processes stay alike.
    """
    mask = nn.functional.dropout(x.new_ones(*x.shape[:-1], width), dropout.p, dropout.training)
    return x * mask[..., _own_slice(width, mesh)]


def _slice_parameter(module: nn.Module, name: str, cut: str | None, mesh: DeviceMesh) -> nn.Parameter:
    """Return a module's parameter as a DTensor: cut in the dim that `cut` names (`Style.cut`), or replicated."""
    parameter = module.get_parameter(name)
    placements: list[Placement] = [Replicate()]
    if cut is not None and (cut, name) != ("in", "bias"):  # a bias has no input features
        # A weight is (out, in) or, of an embedding, (rows, features), but Conv1D's is (in, out).
        is_transposed = isinstance(module, Conv1D) and name == "weight"
        placements = [Shard(int((cut == "in") != is_transposed))]
    # `src_data_rank=None`: every process has the whole parameter, so that nothing has to be sent
    local = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None).to_local()
    if placements[0].is_shard():
        local = local.clone(memory_format=torch.contiguous_format)  # a copy, so that the whole can be freed
    return nn.Parameter(make_dtensor(local, mesh, placements, like=parameter), requires_grad=parameter.requires_grad)


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, like: Tensor) -> DTensor:
    """Return a DTensor whose part on this process is `local`, with the shape and strides of the tensor `like`.

    Nothing is sent.
    """
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _get_local_leaf(parameter: Any, name: str, style: Style, rank: int) -> Tensor:
    """Return a leaf tensor with this rank's part of the DTensor parameter `name`; its gradient goes to the parameter.

    The leaf is made once, and kept as the parameter's attribute `local`.
    """
    if not hasattr(parameter, "local"):
        # With gradients disabled, `to_local` returns the DTensor's own local tensor. Detach it again, so that
        # `requires_grad_` below does not change that one.
        local = parameter.detach().to_local().detach()
        if name == "bias" and style.cut == "in" and rank > 0:
            # Where the input is cut, outputs are summed over ranks, and only one rank may add the bias.
            local = torch.zeros_like(local)
        parameter.local = local.requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            placements = [Partial()] if style.grad_is_partial else parameter.placements
            # The reference is weak, as a strong one would close a cycle: parameter, leaf, hook.
            local.register_post_accumulate_grad_hook(partial(_pass_gradient_on, weakref.ref(parameter), placements))
    return parameter.local


def _pass_gradient_on(owner: weakref.ref, placements: Sequence[Placement], local: Tensor) -> None:
    """Move a local tensor's gradient to the DTensor parameter that owns it, and add it to what is there."""
    parameter = owner()
    grad = local.grad
    local.grad = None
    if parameter.grad is None:
        parameter.grad = make_dtensor(grad, parameter.device_mesh, placements, like=parameter)
    else:
        parameter.grad.to_local().add_(grad)


def _make_sliced_lookup(module: nn.Embedding, mesh: DeviceMesh) -> Callable:
    """Return a forward that embeds the tokens whose rows this process has, and returns zeros for other tokens.

    The sum over processes then has the embeddings of all tokens.
    """
    lookup = module.forward
    n_rows = module.weight.to_local().shape[0]
    first_row = _own_slice(module.weight.shape[0], mesh).start
    if module.padding_idx is not None:  # this row gets no gradient: only the process that has it needs the index
        local_padding_idx = module.padding_idx - first_row
        module.padding_idx = local_padding_idx if 0 <= local_padding_idx < n_rows else None

    def forward(token_ids: Tensor) -> Tensor:
        is_here = (token_ids >= first_row) & (token_ids < first_row + n_rows)
        return lookup((token_ids - first_row).where(is_here, 0)) * is_here.unsqueeze(-1)  # (..., features)

    return forward
