"""Table of losses, and the needs of each in data, models and checkpoints.

Its functions are in `formulas.py`, the options that losses share in `options.py`. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import dpo.losses.formulas as formulas
from dpo.losses.formulas import IGNORE_INDEX, Losses, Scores, _get_batch_logps, preference_loss
from dpo.losses.options import OPTIONS, change_losses, change_scores, needs_squares, needs_tails

__all__ = [
    "IGNORE_INDEX",
    "LOSSES",
    "Loss",
    "Losses",
    "Scores",
    "_get_batch_logps",
    "find_loss",
    "needs_squares",
    "needs_tails",
    "preference_loss",
]


@dataclass(frozen=True)
class Loss:
    """A loss and its needs. `fn(scores, **options)` gets the keys of `config/loss/NAME.yaml` as options."""

    fn: Callable[..., Losses]
    pairwise: bool = True  # trains on pairs; else on SFT targets
    reference: bool = True  # needs the reference's log-probabilities
    # the metric by which checkpoints are ranked; +1: higher wins
    best: tuple[str, int] = ("rewards_eval/accuracies", +1)
    of_margin: bool = True  # log-ratios enter by their difference alone, for which f_divergence is derived
    of_batch: Callable[..., Any] | None = None  # (scores of the global batch, **options) -> `Scores.of_batch`
    averaged: Callable[[float, float, float], float] | None = None  # of mean rewards and beta, for `Scores.average`
    smoothed: bool = False  # is infinite without label_smoothing
    per_token: bool | str = False  # rewards are means over tokens, not sums; the name of an option: if it is on

    def __post_init__(self) -> None:
        if self.reference and not self.pairwise:
            raise ValueError("a loss with a reference must be pairwise: give reference=False")

    @property
    def can_be_mixed(self) -> bool:
        """Whether it may be part of a mix: each example's loss depends on that example alone."""
        return self.of_batch is None and self.fn is not _mix

    def __call__(self, scores: Scores, loss_config: Mapping[str, Any]) -> Losses:
        """Compute the losses under `config.loss`. Shared options that it lacks are off."""
        own, common = split_options(loss_config)
        if self.fn is _mix:
            own["unchanged"] = scores
        losses, *rewards = self.fn(change_scores(scores, **common) if self.reference else scores, **own)
        return Losses(change_losses(losses, scores, **common) if self.pairwise else losses, *rewards)

    def constants(self, scores: Scores, loss_config: Mapping[str, Any]) -> Any:
        """Compute the constants of a global batch for each example, (B, k); for a loss with `of_batch` only."""
        assert self.of_batch is not None
        own, common = split_options(loss_config)
        return self.of_batch(change_scores(scores, **common), **own)


def split_options(loss_config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `config.loss` into the options of the loss alone and those that all have."""
    options = {key: value for key, value in loss_config.items() if key != "name"}
    common = {key: options.pop(key) for key in OPTIONS if key in options}
    return options, common


def _mix(scores: Scores, *, unchanged: Scores, weights: Mapping[str, float], **options: Any) -> Losses:
    """A weighted sum of losses, each with the options that it knows.

    Rewards are beta times log-ratios, or, where no part has a reference, beta times mean log-probabilities. Losses
    without a reference get the `unchanged` scores: `ld_alpha` and `f_divergence` apply only to losses with one.
    """
    parts = _parts(weights)
    if not any(loss.pairwise for loss in parts.values()):
        raise ValueError("loss=mix adds up no loss of pairs: give one of them a weight above 0")
    losses = scores.chosen * 0
    for name, loss in parts.items():
        known = inspect.signature(loss.fn).parameters
        own = {key: value for key, value in options.items() if key in known}
        part = loss.fn(scores if loss.reference else unchanged, **own)
        losses = losses + weights[name] * part.losses
    has_reference = any(loss.reference for loss in parts.values())
    rewards = scores.log_ratios() if has_reference else scores.mean_logps()
    return formulas.with_rewards(losses, *rewards, options["beta"])


def _parts(weights: Mapping[str, Any]) -> dict[str, Loss]:
    return {name: LOSSES[name] for name, weight in weights.items() if weight}


def find_loss(loss_config: Mapping[str, Any]) -> Loss:
    """Find the loss that `config.loss` names; a mix has the needs of its parts."""
    loss = LOSSES[loss_config["name"]]
    if loss.fn is not _mix:
        return replace(loss, per_token=_is_per_token(loss, loss_config)) if isinstance(loss.per_token, str) else loss
    parts = _parts(loss_config["weights"]).values()
    return replace(
        loss,
        reference=any(p.reference for p in parts),
        of_margin=all(p.of_margin for p in parts if p.reference),
        smoothed=any(p.smoothed for p in parts),
        per_token=not any(p.reference for p in parts),
    )


def _is_per_token(loss: Loss, loss_config: Mapping[str, Any]) -> bool:
    return bool(loss_config.get(loss.per_token)) if isinstance(loss.per_token, str) else loss.per_token


LOSSES = {
    "sft": Loss(formulas.sft, pairwise=False, reference=False, best=("loss/eval", -1)),
    "dpo": Loss(formulas.dpo),
    "ipo": Loss(formulas.ipo, per_token="average"),
    "hinge": Loss(formulas.hinge),
    "robust": Loss(formulas.robust),
    "dpo_norm": Loss(formulas.dpo_norm, per_token=True),
    "exo": Loss(formulas.exo, smoothed=True),
    "discopop": Loss(formulas.discopop),
    "beta_dpo": Loss(formulas.beta_dpo, of_batch=formulas.beta_of_batch, averaged=formulas.mean_gap),
    "simpo": Loss(formulas.simpo, reference=False, per_token=True),
    "orpo": Loss(formulas.orpo, reference=False, per_token=True, of_margin=False),
    "apo_zero": Loss(formulas.apo_zero, of_margin=False),
    "apo_down": Loss(formulas.apo_down, of_margin=False),
    "nca": Loss(formulas.nca, of_margin=False),
    "bco": Loss(formulas.bco, of_margin=False, averaged=formulas.mean_reward),
    "sppo": Loss(formulas.sppo, of_margin=False),
    "dpop": Loss(formulas.dpop, of_margin=False),
    "cal_dpo": Loss(formulas.cal_dpo, of_margin=False),
    "aot": Loss(formulas.aot, of_margin=False, of_batch=formulas.aot_partners),
    "aot_unpaired": Loss(formulas.aot_unpaired, of_margin=False, of_batch=formulas.aot_unpaired_partners),
    "mix": Loss(_mix),
}
