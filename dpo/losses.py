"""Pure tensor functions: log-probabilities of labels, and the losses on them. Imports nothing of ours.

Shapes: B examples, T tokens, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100  # label of a token that is not scored: prompt and padding


def _get_batch_logps(logits: torch.Tensor, labels: torch.Tensor, average_log_prob: bool = False) -> torch.Tensor:
    """Log-probability of the labels of each row, (B,): the sum over scored tokens, or their mean.

    `logits` (B, T, V) predict the *next* token, so position t is scored against `labels[:, t + 1]`; labels (B, T)
    are -100 where nothing is scored. Summed, not averaged, is what DPO's derivation asks for.
    """
    assert logits.shape[:-1] == labels.shape
    targets = labels[:, 1:]  # (B, T-1)
    scored = targets != IGNORE_INDEX
    # index 0 stands in for -100, which gather cannot take; those entries are masked out below
    picked = logits[:, :-1].log_softmax(-1).gather(2, targets.where(scored, 0).unsqueeze(2)).squeeze(2)  # (B, T-1)
    total = (picked * scored).sum(-1)
    return total / scored.sum(-1) if average_log_prob else total


def preference_loss(
    policy_chosen_logps: torch.Tensor,
    policy_rejected_logps: torch.Tensor,
    reference_chosen_logps: torch.Tensor,
    reference_rejected_logps: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
    reference_free: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, chosen rewards, rejected rewards), each (B,), from summed log-probabilities (B,).

    DPO: eq. 7 of arXiv 2305.18290; with `label_smoothing` eps in [0, 0.5), conservative DPO, which assumes that a
    fraction eps of the pairs is flipped (eq. 3 of https://ericmitchell.ai/cdpo.pdf). IPO: eq. 17 of arXiv 2310.12036.
    `reference_free` takes the reference as uniform in the loss; the rewards still use it. Rewards are detached.
    """
    from torch.nn.functional import logsigmoid  # here: validation reads LOSSES, and needs no torch

    h = policy_chosen_logps - policy_rejected_logps
    if not reference_free:
        h = h - (reference_chosen_logps - reference_rejected_logps)
    if ipo:
        losses = (h - 1 / (2 * beta)) ** 2
    else:
        losses = -logsigmoid(beta * h) * (1 - label_smoothing) - logsigmoid(-beta * h) * label_smoothing
    chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
    rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps).detach()
    return losses, chosen_rewards, rejected_rewards


def _dpo(*logps: torch.Tensor, beta: float, label_smoothing: float, reference_free: bool):
    return preference_loss(*logps, beta, label_smoothing, reference_free=reference_free)


def _ipo(*logps: torch.Tensor, beta: float):
    return preference_loss(*logps, beta, ipo=True)


@dataclass(frozen=True)
class Loss:
    """What the trainer asks of a loss. `on_pairs` is None for SFT, whose loss is minus the target's log-probability;
    otherwise it maps four (B,) log-probabilities and the keys of `config/loss/NAME.yaml` to losses and rewards."""

    on_pairs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None

    @property
    def uses_reference(self) -> bool:
        return self.on_pairs is not None


LOSSES = {"sft": Loss(None), "dpo": Loss(_dpo), "ipo": Loss(_ipo)}
