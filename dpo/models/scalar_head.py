"""The scalar head of a reward model.

A reward model is a sequence classification model of transformers with one output: a linear layer `score` without bias,
applied to the hidden state of a text's last token.
"""

from __future__ import annotations

from typing import Any

import torch

from dpo.errors import InputError

HEAD, HEAD_WEIGHT = "score", "score.weight"  # transformers' names
LM_HEAD = ("lm_head.weight", "lm_head.bias")  # a language model's head, which a reward model lacks


class ScalarHead(torch.nn.Linear):
    """A linear layer with one output, computed in float32 or higher, as rewards in half precision have three digits."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__(weight.shape[1], 1, bias=False, device="meta")
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x.to(dtype) * self.weight.to(dtype)).sum(-1, keepdim=True)  # autocast would round a matrix product


def find_scalar_head(model: Any) -> ScalarHead | None:
    """The scalar head of a reward model; None for a language model."""
    head = getattr(model, HEAD, None)
    return head if isinstance(head, ScalarHead) else None


def install_scalar_head(model: Any) -> None:
    """Make a sequence classification model compute its head as a ScalarHead; InputError for any other model."""
    head = getattr(model, HEAD, None)
    if type(head) is torch.nn.Linear and head.out_features == 1 and head.bias is None:
        setattr(model, HEAD, ScalarHead(head.weight))
    elif not isinstance(head, ScalarHead):
        raise InputError(
            f"loss=bradley_terry needs a sequence classification model whose head is a linear layer `{HEAD}` with one "
            f"output and no bias, and {type(model).__name__} is not one: choose another model"
        )


def draw_head(model: Any, seed: int) -> torch.Tensor:
    """Draw a head's weight, (1, H) in float32, as transformers initializes it."""
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(1, getattr(model, HEAD).in_features, generator=generator)


def reward(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Rewards, (n,), from the hidden states of last tokens, (n, H)."""
    head = getattr(model, HEAD)
    return head(hidden.to(head.weight.device)).squeeze(-1)  # the layers may be spread over several GPUs
