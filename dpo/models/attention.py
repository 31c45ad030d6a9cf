"""Two attention functions for transformers: by segments on a GPU, and in bfloat16 on a CPU.

The second replaces torch's kernel, which on a CPU multiplies bfloat16 no faster than float32, and computes even the
columns that the mask excludes.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
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
QUERIES_AT_ONCE = 96  # queries at a time on a CPU: their scores stay in the processor's cache

# These are transformers' own functions; `choose_attention` replaces the second.
_sdpa, _use_gqa_in_sdpa = sdpa_attention.sdpa_attention_forward, sdpa_attention.use_gqa_in_sdpa


def find_attention(config: Any) -> str:
    return config._attn_implementation


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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in bfloat16 on a CPU, more than twice as fast as torch; leave all other cases to transformers' "sdpa".

    The query is (rows R, heads H, tokens L, D), key and value (R, key heads K, L, D), and the output (R, L, H, D).
    """
    dtype = find_compute_dtype(query.device.type, query.dtype)
    is_cpu_bfloat16 = is_cpu(query.device) and dtype == torch.bfloat16
    # Packed rows have an additive mask; `masked_attention` computes no gradient for the mask.
    is_additive = attention_mask is not None and attention_mask.dtype != torch.bool
    has_fixed_mask = is_additive and not attention_mask.requires_grad
    # Transformers passes `cache` in continuous batching.
    has_options = kwargs.get("dropout") or any(kwargs.get(name) is not None for name in (*UNSUPPORTED, "cache"))
    if not (is_cpu_bfloat16 and has_fixed_mask) or has_options:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = masked_attention(query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(reason="it would be compiled anew for every row length")
def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Compute softmax(scale * query @ key.T + mask) @ value; the mask is (R or 1, 1, L, L), the output (R, H, L, D).

    Like torch's kernel, it saves nothing of the mask's size for the backward pass.
    """
    n_sharing = query.shape[1] // key.shape[1]  # consecutive query heads that share a key head
    key = key.repeat_interleave(n_sharing, dim=1)
    value = value.repeat_interleave(n_sharing, dim=1)
    by_head = [tensor.flatten(0, 1) for tensor in (query, key, value)]
    return _MaskedAttention.apply(*by_head, mask, scale).unflatten(0, query.shape[:2])


class _MaskedAttention(torch.autograd.Function):
    """Attention of (R * H, L, D) tensors, in blocks of queries whose probabilities the backward pass recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Any,
        value: Any,
        mask: Tensor,
        scale: float,
    ) -> Tensor:
        out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=value.dtype)
        with torch.autocast("cpu", enabled=False):
            for queries, keys in _list_blocks(mask):
                mask_block = mask[:, :, queries, keys]
                probs = _softmax(query[:, queries], key[:, keys], mask_block, scale)
                out[:, queries] = probs.to(value.dtype) @ value[:, keys]
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        query, key, value, mask, out = ctx.saved_tensors
        # The sums are in float32.
        grad_query = torch.zeros(query.shape)
        grad_key = torch.zeros(key.shape)
        grad_value = torch.zeros(value.shape)
        # This is the sum over keys of p * (grad @ value.T), as in FlashAttention: (R * H, L, 1).
        delta = (grad.float() * out).sum(-1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            for queries, keys in _list_blocks(mask):
                q = query[:, queries]
                k = key[:, keys]
                grad_out = grad[:, queries]
                probs = _softmax(q, k, mask[:, :, queries, keys], ctx.scale)
                grad_probs = (grad_out @ value[:, keys].mT).float()
                grad_scores = grad_probs.sub_(delta[:, queries]).mul_(probs).to(query.dtype)
                grad_query[:, queries] = (grad_scores @ k).float().mul_(ctx.scale)
                grad_key[:, keys] += (grad_scores.mT @ q).float().mul_(ctx.scale)
                grad_value[:, keys] += probs.to(grad.dtype).mT @ grad_out
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _softmax(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Compute probabilities, (R * H, queries, keys) in float32; the mask is (R or 1, 1, queries, keys)."""
    scores = (q @ k.mT).float().mul_(scale)
    # The view is (R, H, queries, keys), or (1, R * H, queries, keys) if all rows share a mask.
    scores.view(len(mask), -1, *mask.shape[2:]).add_(mask)
    return scores.softmax(-1)


def _list_blocks(mask: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of QUERIES_AT_ONCE queries, each with the shortest slice of columns that has all their keys.

    Queries without any key get all columns.
    """
    is_allowed = mask.amax((0, 1)) > torch.finfo(mask.dtype).min / 2  # (L, L): true if any row of the batch allows it
    for start in range(0, len(is_allowed), QUERIES_AT_ONCE):
        queries = slice(start, start + QUERIES_AT_ONCE)
        keys = is_allowed[queries].any(0).nonzero().flatten().tolist()
        yield queries, slice(keys[0], keys[-1] + 1) if keys else slice(None)
