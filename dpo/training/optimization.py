"""Optimizers by name, and the learning rate over the updates."""

from __future__ import annotations

import torch

from dpo.settings import choices

OPTIMIZERS = {name: getattr(torch.optim, name) for name in choices.OPTIMIZERS}


def warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises linearly over `steps` updates, then stays."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (steps + 1)))
