"""Pure tensor functions: log-probabilities of labels, the losses on them, and the table of losses.

Imports nothing of ours, and torch only inside functions: the table is read before anything else is loaded.
Shapes: B examples, T tokens, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100  # label of a token that is not scored: prompt and padding


def _get_batch_logps(logits: Tensor, labels: Tensor, average_log_prob: bool = False) -> Tensor:
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
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
    reference_free: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, chosen rewards, rejected rewards), each (B,), from summed log-probabilities (B,).

    DPO: eq. 7 of arXiv 2305.18290; with `label_smoothing` eps in [0, 0.5), conservative DPO, which assumes that a
    fraction eps of the pairs is flipped (eq. 3 of https://ericmitchell.ai/cdpo.pdf). IPO: eq. 17 of arXiv 2310.12036,
    without `label_smoothing`.
    `reference_free` treats the reference as uniform in the loss; the rewards still use it. Rewards are detached.
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


class Scores(NamedTuple):
    """What a loss is given: summed log-probabilities of B examples, and how many tokens were summed, each (B,).

    `chosen` is the SFT target under a loss that is not pairwise, which has no `rejected`.
    """

    chosen: Tensor
    chosen_lengths: Tensor
    rejected: Any = None  # as the others below: a tensor if the loss needs it
    rejected_lengths: Any = None
    reference_chosen: Any = None
    reference_rejected: Any = None


class Losses(NamedTuple):
    """What a loss gives, each (B,). Rewards are detached; a pairwise loss must give them, another has none."""

    losses: Tensor
    chosen_rewards: Tensor | None = None
    rejected_rewards: Tensor | None = None


def _sft(scores: Scores, **_: Any) -> Losses:  # a ported config may have beta
    return Losses(-scores.chosen)


def _dpo(scores: Scores, *, beta: float, label_smoothing: float, reference_free: bool) -> Losses:
    logps = scores.chosen, scores.rejected, scores.reference_chosen, scores.reference_rejected
    return Losses(*preference_loss(*logps, beta, label_smoothing, reference_free=reference_free))


def _ipo(scores: Scores, *, beta: float) -> Losses:
    logps = scores.chosen, scores.rejected, scores.reference_chosen, scores.reference_rejected
    return Losses(*preference_loss(*logps, beta, ipo=True))


@dataclass(frozen=True)
class Loss:
    """A loss and what it needs. `fn(scores, **options)` gets the keys of `config/loss/NAME.yaml` as options."""

    fn: Callable[..., Losses]
    pairwise: bool = True  # trains on pairs; else on SFT targets
    reference: bool = True  # needs the reference's log-probabilities
    best: tuple[str, int] = (
        "rewards_eval/accuracies",
        +1,
    )  # the metric by which checkpoints are ranked; +1: higher wins

    def __post_init__(self) -> None:
        if self.reference and not self.pairwise:
            raise ValueError("a loss with a reference must be pairwise: give reference=False")

    def __call__(self, scores: Scores, loss_config: Mapping[str, Any]) -> Losses:
        """The losses under `config.loss`."""
        return self.fn(scores, **{key: value for key, value in loss_config.items() if key != "name"})


LOSSES = {
    "sft": Loss(_sft, pairwise=False, reference=False, best=("loss/eval", -1)),
    "dpo": Loss(_dpo),
    "ipo": Loss(_ipo),
}
