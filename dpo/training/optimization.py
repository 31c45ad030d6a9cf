"""Optimizers by name, and the learning rate over the updates."""

from __future__ import annotations

import torch

OPTIMIZERS = {
    optimizer.__name__: optimizer
    for optimizer in (
        torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
        torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
        torch.optim.Rprop, torch.optim.SGD,
    )
}  # fmt: skip


def warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises linearly over `steps` updates, then stays."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (steps + 1)))
