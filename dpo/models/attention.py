"""Attention by segments on a GPU, and in bfloat16 on a CPU.

There torch's kernel multiplies bfloat16 no faster than float32, and computes all columns whatever the mask.
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

# torch 2.11 does not have this option, and groups heads without it
GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of some models' layers; s_aux is for sinks
BLOCK = 96  # queries at a time on a CPU: their scores stay in the processor's cache

_sdpa, _use_gqa_in_sdpa = sdpa_attention.sdpa_attention_forward, sdpa_attention.use_gqa_in_sdpa


def find_attention(config: Any) -> str:
    return config._attn_implementation


def choose_attention(wanted: str) -> str | None:
    """None for `sdpa`, so that a model that lacks it, such as Gemma 2, gets eager attention."""
    AttentionInterface.register(VARLEN, attend_by_segments)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
    sdpa_attention.use_gqa_in_sdpa = _use_grouped_heads
    return None if wanted == "sdpa" else wanted


def _use_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """transformers' rule, but not in float32 on GPUs, where only torch's slowest kernel takes grouped heads."""
    return not (is_gpu(key.device) and key.dtype == torch.float32) and _use_gqa_in_sdpa(mask, key, value)


# --- by segments, on a GPU -------------------------------------------------------------------------------------------


def attend_by_segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by `segments` in bfloat16 or float16; without them, transformers' "sdpa".

    With them query is (1, H, L, D), key and value are (1, K, L, D), the output is (1, L, H, D). Raises InputError for
    layers that need more, such as a mask.
    """
    has_own_mask = segments is not None and attention_mask.numel() != 1  # the usual mask is a dummy of one element
    if has_own_mask or any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise InputError(
            f"model.attn_implementation={VARLEN} does not support {type(module).__name__}, which changes the scores "
            f"of attention: use sdpa"
        )
    if segments is None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    dtype = find_compute_dtype(query.device.type, value.dtype)
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # (L, H, D), (L, K, D)
    out: Any = varlen_attn(
        query,
        key.index_select(0, segments.columns),
        value.index_select(0, segments.columns),
        segments.queries,
        segments.keys,
        *segments.longest,
        scale=scaling,
        # tokens to the left and right that a query sees; the last query of a segment is at the segment's last key
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
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
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over twice as fast as torch's, in bfloat16 on a CPU; else transformers' "sdpa".

    The query is (rows R, heads H, tokens L, D), key and value (R, K, L, D), and the output (R, L, H, D).
    """
    dtype = find_compute_dtype(query.device.type, query.dtype)
    is_cpu_bfloat16 = is_cpu(query.device) and dtype == torch.bfloat16
    has_fixed_mask = getattr(attention_mask, "dtype", torch.bool) != torch.bool and not attention_mask.requires_grad
    is_plain = not dropout and all(kwargs.get(option) is None for option in ("position_bias", "cache", "softcap"))
    if not (is_cpu_bfloat16 and has_fixed_mask and is_plain):
        return _sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return masked_attention(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None


@torch.compiler.disable(reason="it would be compiled anew for every row length")
def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * query @ key.T + mask) @ value; the mask is (R or 1, 1, L, L), the output (R, H, L, D).

    Like torch's kernel, it saves nothing of the mask's size for the backward pass.
    """
    # H / K consecutive query heads share a key head
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return _MaskedAttention.apply(query, key, value, mask, scale)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Any, value: Any, mask: Tensor, scale: float) -> Tensor:
        out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=value.dtype)
        q, k, v, o = (x.flatten(0, 1) for x in (query, key, value, out))  # (R * H, L, D)
        with torch.autocast("cpu", enabled=False):
            for queries, keys in _blocks(mask):
                p = _probabilities(q[:, queries], k[:, keys], mask[:, :, queries, keys], scale)
                o[:, queries] = p.to(v.dtype) @ v[:, keys]
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*inputs, mask, out), scale = ctx.saved_tensors, ctx.scale
        sums = [torch.zeros(x.shape) for x in inputs]  # over queries, in float32
        q, k, v, g, grad_q, grad_k, grad_v = (x.flatten(0, 1) for x in (*inputs, grad, *sums))  # (R * H, L, D)
        # the sum over keys of p * (grad @ value.T), as in FlashAttention: (R * H, L, 1)
        delta = (grad.float() * out).sum(-1, keepdim=True).flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            for queries, keys in _blocks(mask):
                p = _probabilities(q[:, queries], k[:, keys], mask[:, :, queries, keys], scale)
                grad_scores = (g[:, queries] @ v[:, keys].mT).float().sub_(delta[:, queries]).mul_(p).to(q.dtype)
                grad_q[:, queries] = (grad_scores @ k[:, keys]).float().mul_(scale)
                grad_k[:, keys] += (grad_scores.mT @ q[:, queries]).float().mul_(scale)
                grad_v[:, keys] += p.to(g.dtype).mT @ g[:, queries]
        return *(total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)), None, None


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(R * H, queries, keys) in float32."""
    scores = (q @ k.mT).float().mul_(scale)
    scores.view(len(mask), -1, *mask.shape[2:]).add_(mask)  # (R or 1, all heads, queries, keys)
    return scores.softmax(-1)


def _blocks(mask: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield queries, and the shortest range with all their keys."""
    is_allowed = mask.amax((0, 1)) > torch.finfo(mask.dtype).min / 2  # (L, L): true if any row of the batch allows it
    for start in range(0, len(is_allowed), BLOCK):
        queries = slice(start, start + BLOCK)
        keys = is_allowed[queries].any(0).nonzero()
        yield queries, slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(None)
