"""Attention of a packed row by segments, without a mask: `model.attn_implementation=varlen`.

One call of torch's variable-length FlashAttention computes all trees of a microbatch (`Segments`), in bfloat16
or float16, on a GPU; key and value heads that queries share are not copied. Padded rows and sampling use SDPA.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dpo.errors import InputError
from dpo.models.packing import Segments
from dpo.settings.keys import VARLEN
from dpo.system.arithmetic import find_compute_dtype

# torch 2.11 does not have this option, and groups heads without it
GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options that some models' layers pass; s_aux is for sinks


def register() -> None:
    """Let transformers build models with `attn_implementation="varlen"`."""
    AttentionInterface.register(VARLEN, attention_forward)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by `segments`; without them, transformers' "sdpa".

    With `segments` there is one row: query is (1, H, L, D), key and value are (1, K, L, D), the output is (1, L, H, D).
    Raises InputError for layers that need more than this, such as a mask.
    """
    # with segments, the usual mask is a dummy of one element
    has_own_mask = segments is not None and attention_mask.numel() != 1
    if has_own_mask or any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise InputError(
            f"model.attn_implementation={VARLEN} does not support {type(module).__name__}, which changes the scores "
            f"of attention: use sdpa"
        )
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
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
