"""Models whose layers transformers' `device_map` spreads over several GPUs of one process.

accelerate's hooks move each layer's inputs to its GPU. By default they also move the logits of all tokens back to the
first GPU, and copy the attention mask to another GPU once for every layer on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary


def choose_device_map(gpus: int) -> str | dict[str, int] | None:
    """The `device_map` for loading weights: spread over all GPUs, on the only GPU, or on the CPU."""
    return None if gpus == 0 else {"": 0} if gpus == 1 else "balanced"


def move_less(model: Any, blocks: list[torch.nn.Module]) -> None:
    """Keep a spread model's outputs where they are computed, and copy its blocks' shared inputs once per GPU."""
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
        hidden, *others = args
        return (hidden, *tree_map(lambda v: copied(v, device), others)), tree_map(lambda v: copied(v, device), kwargs)

    for block in blocks:
        block.register_forward_pre_hook(share, with_kwargs=True)
