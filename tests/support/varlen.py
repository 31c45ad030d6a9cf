"""Torch's attention by segments on a CPU, for which it has no kernel: a plain loop, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen

from dpo.models import varlen_attention


def run_varlen_on_cpu() -> None:
    """Let `varlen_attn` run on a CPU in this process, in any dtype."""
    varlen_attention.register()
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)


def list_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    window_size: list[int],
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
    """Yield each segment's slices of queries and keys, its keys (m, H, D), and probabilities (H, n, m).

    A segment's last query and last key are of the same token, as in FlashAttention.
    """
    for (start, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        n, m = end - start, last - first
        assert 0 < n <= longest[0]
        assert n <= m <= longest[1]
        queries, keys = slice(start, end), slice(first, last)
        k = key[keys].float().repeat_interleave(query.shape[1] // key.shape[1], 1)  # (m, H, D)
        back = torch.arange(m - n, m)[:, None] - torch.arange(m)  # places from a query back to a key, (n, m)
        left, right = window_size
        seen = (back >= -right) & ((back <= left) | (left < 0))
        scores = torch.einsum("nhd,mhd->hnm", query[queries].float(), k) * scale
        yield queries, keys, k, scores.masked_fill(~seen, -torch.inf).softmax(-1)
    assert (end, last) == (len(query), len(key))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    window_size: list[int],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (L, H, D); the statistics that the backward pass of a real kernel needs are empty."""
    out, scale = torch.empty_like(query), query.shape[-1] ** -0.5 if scale is None else scale
    longest, heads_per_key = (max_q, max_k), query.shape[1] // key.shape[1]
    for queries, keys, _, p in list_segments(query, key, cu_seq_q, cu_seq_k, longest, scale, window_size):
        v = value[keys].float().repeat_interleave(heads_per_key, 1)
        out[queries] = torch.einsum("hnm,mhd->nhd", p, v).to(out.dtype)
    return out, torch.empty(0), torch.empty(0)


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None,
    window_size: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    longest, kv_heads = (max_q, max_k), key.shape[1]
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for queries, keys, k, p in list_segments(query, key, cu_seq_q, cu_seq_k, longest, scale, window_size):
        q, g = query[queries].float(), grad[queries].float()
        v = value[keys].float().repeat_interleave(q.shape[1] // kv_heads, 1)
        grad_p = torch.einsum("nhd,mhd->hnm", g, v)
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
        grads[0][queries] = torch.einsum("hnm,mhd->nhd", grad_scores, k).to(query.dtype)
        # summed over the query heads that share a key
        for grad_of, of_head in zip(
            grads[1:], (torch.einsum("hnm,nhd->mhd", grad_scores, q), torch.einsum("hnm,nhd->mhd", p, g)), strict=True
        ):
            grad_of[keys] = of_head.unflatten(1, (kv_heads, -1)).sum(2).to(grad_of.dtype)
    return grads[0], grads[1], grads[2]
