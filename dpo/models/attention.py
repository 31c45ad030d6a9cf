"""Two attention functions for transformers: by segments on a GPU, and in bfloat16 on a CPU.

The second replaces torch's kernel, which on a CPU multiplies bfloat16 no faster than float32, and computes even the
columns that the mask excludes.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import vjp
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask

from dpo.errors import InputError
from dpo.models.packing import Segments
from dpo.settings.keys import VARLEN
from dpo.system.arithmetic import find_compute_dtype
from dpo.system.host import is_cpu, is_gpu

# With this option, several query heads may share a key head. Torch 2.11 lacks it, and allows that anyway.
GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of some models' layers; s_aux: attention sinks
QUERIES_AT_ONCE = 128  # queries at a time on a CPU: their scores stay in the processor's cache

# These are transformers' own functions; `choose_attention` replaces the second.
_sdpa, _use_gqa_in_sdpa = sdpa_attention.sdpa_attention_forward, sdpa_attention.use_gqa_in_sdpa


def choose_attention(wanted: str) -> str | None:
    """Register this module's attention with transformers, and return the `attn_implementation` to load a model with.

    For "sdpa" that is None: transformers then uses sdpa, or eager attention for models without it, such as Gemma 2.
    """
    AttentionInterface.register(VARLEN, attend_by_segments)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
    sdpa_attention.use_gqa_in_sdpa = _use_grouped_heads
    return None if wanted == "sdpa" else wanted


def _use_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Return whether torch gets grouped heads: fewer key heads than query heads, instead of a copy for each query head.

    Transformers decides, except for float32 on GPUs, for which only torch's slowest kernel supports grouped heads.
    """
    if is_gpu(key.device) and key.dtype == torch.float32:
        return False
    return _use_gqa_in_sdpa(mask, key, value)


# --- by segments, on a GPU -------------------------------------------------------------------------------------------


def attend_by_segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by `segments` in bfloat16 or float16, or without segments as transformers' "sdpa".

    With segments there is one row: query is (1, heads H, tokens L, D), key and value are (1, key heads K, L, D), and
    the output is (1, L, H, D). Attention weights are not returned. Raises InputError for a layer with a mask of its own
    or another change of the scores.
    """
    has_own_mask = segments is not None and attention_mask.numel() != 1  # the usual mask is a dummy of one element
    if has_own_mask or any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise InputError(
            f"model.attn_implementation={VARLEN} does not support {type(module).__name__}, which changes attention "
            f"scores: use sdpa"
        )
    if segments is None:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    dtype = find_compute_dtype(query.device.type, value.dtype)

    def by_token(tensor: Tensor) -> Tensor:
        return tensor[0].transpose(0, 1).to(dtype)  # (L, heads, D)

    out: Any = varlen_attn(
        by_token(query),
        by_token(key).index_select(0, segments.columns),
        by_token(value).index_select(0, segments.columns),
        segments.queries,
        segments.keys,
        *segments.longest,
        scale=kwargs.get("scaling"),
        # A query sees this many tokens to the left and right; the last query of a segment is at the segment's last key.
        window_size=((kwargs.get("sliding_window") or 0) - 1, 0),  # -1: all tokens
        **GROUPED,
    )
    return out[None], None


# --- in bfloat16, on a CPU -------------------------------------------------------------------------------------------


def attend_in_bfloat16(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend in bfloat16 on a CPU, more than twice as fast as torch; leave all other cases to transformers' "sdpa".

    The query is (rows R, heads H, tokens L, D), key and value (R, key heads K, L, D), and the output (R, L, H, D).
    """
    dtype = find_compute_dtype(query.device.type, query.dtype)
    is_cpu_bfloat16 = is_cpu(query.device) and dtype == torch.bfloat16
    # Packed rows have an additive mask; `masked_attention` computes no gradient for the mask.
    has_mask = attention_mask is not None and attention_mask.is_floating_point() and not attention_mask.requires_grad
    has_options = kwargs.get("dropout") or any(kwargs.get(name) is not None for name in UNSUPPORTED)
    if not (is_cpu_bfloat16 and has_mask) or has_options:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = masked_attention(query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(reason="it would be compiled anew for every row length")
def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale * query @ key.T + mask) @ value; the mask is (R or 1, 1, L, L), the output (R, H, L, D).

    Like torch's kernel, it saves nothing of the mask's size for the backward pass.
    """
    n_sharing = query.shape[1] // key.shape[1]  # consecutive query heads that share a key head
    key = key.repeat_interleave(n_sharing, dim=1)
    value = value.repeat_interleave(n_sharing, dim=1)
    return _MaskedAttention.apply(query.contiguous(), key, value, mask, scale)


class _MaskedAttention(torch.autograd.Function):
    """Attention of (R, H, L, D) tensors in blocks of queries, which the backward pass computes again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        blocks = _list_blocks(query, key, value, mask)
        return torch.cat([_attend(*block, scale=scale) for _, block in blocks], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        query, key, value, mask = ctx.saved_tensors
        sums = [torch.zeros(tensor.shape) for tensor in (query, key, value)]  # in float32
        for (queries, keys), block in _list_blocks(query, key, value, mask):
            *inputs, block_mask = block
            attend = partial(_attend, mask=block_mask, scale=ctx.scale)
            _, gradients = vjp(attend, tuple(inputs), grad[:, :, queries])
            for total, columns, gradient in zip(sums, (queries, keys, keys), gradients, strict=True):
                total[:, :, columns] += gradient
        return *(total.to(grad.dtype) for total in sums), None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        scores = (query @ key.mT).float().mul_(scale).add_(mask)  # (R, H, queries, keys)
        return scores.softmax(-1).to(value.dtype) @ value


def _list_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Iterator[tuple]:
    """Cut the inputs of attention into blocks of QUERIES_AT_ONCE queries.

    Yields the slices of queries and of keys, and the parts of the inputs there. The keys are the shortest slice that
    has all keys of these queries; without any key it is the whole.
    """
    is_allowed = mask.amax((0, 1)) > torch.finfo(mask.dtype).min / 2  # (L, L): true if any row of the batch allows it
    for start in range(0, len(is_allowed), QUERIES_AT_ONCE):
        queries = slice(start, start + QUERIES_AT_ONCE)
        columns = is_allowed[queries].any(0).nonzero().flatten().tolist()
        keys = slice(columns[0], columns[-1] + 1) if columns else slice(None)
        block = (query[:, :, queries], key[:, :, keys], value[:, :, keys], mask[:, :, queries, keys])
        yield (queries, keys), block
