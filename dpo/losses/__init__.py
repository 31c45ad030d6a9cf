"""Table of the losses and their needs.

The functions are in `formulas.py`, the options that losses share in `options.py`. Imports no torch, so that a config is
checked quickly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dpo.losses.formulas as formulas
from dpo.losses.formulas import IGNORE_INDEX, Losses, Scores, _get_batch_logps, preference_loss
from dpo.losses.options import OPTIONS, change_losses, change_scores

__all__ = [
    "IGNORE_INDEX",
    "LOSSES",
    "ROLES",
    "TRAINS_ON",
    "Loss",
    "Losses",
    "Scores",
    "_get_batch_logps",
    "find_loss",
    "preference_loss",
]

# kinds of training examples, and the roles of the responses in each; the target of SFT is `chosen`
TRAINS_ON = {"pairs": ("chosen", "rejected"), "targets": ("chosen",)}
ROLES = tuple(dict.fromkeys(role for roles in TRAINS_ON.values() for role in roles))


@dataclass(frozen=True)
class Loss:
    """A loss and its needs.

    `fn(scores, **options)` gets the keys of `config/loss/NAME.yaml` as options.
    """

    fn: Callable[..., Losses]
    trains_on: str = "pairs"  # a key of TRAINS_ON
    reference: bool = True  # needs the reference's log-probabilities
    # the metric by which checkpoints are ranked; +1: higher wins
    best: tuple[str, int] = ("rewards_eval/accuracies", +1)
    margin_only: bool = True  # depends only on the difference of log-ratios, for which f_divergence is derived
    batch_statistic: Callable[..., Any] | None = None  # (scores of a global batch, **options) -> values, (B, k)
    # (mean chosen reward, mean rejected reward, beta) -> value, averaged over updates
    running_statistic: Callable[[float, float, float], float] | None = None
    needs_label_smoothing: bool = False  # is infinite at label_smoothing=0
    per_token: bool | str = False  # rewards are means over tokens, not sums; a name is the option that decides it
    # set by `bind`: the loss's name, its own options, and the options that all losses share
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reference and self.trains_on == "targets":
            raise ValueError("a loss of targets has no reference: give reference=False")

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the responses in its examples."""
        return TRAINS_ON[self.trains_on]

    @property
    def reference_columns(self) -> list[str]:
        """Names of the reference's log-probabilities that the loss needs.

        They are fields of `Scores` without the prefix `reference_`.
        """
        return [*self.roles, *(f"{role}_tail" for role in self.roles if self.needs_tails)]

    @property
    def can_be_mixed(self) -> bool:
        """Return whether a mix may contain this loss.

        Each example's loss must depend on that example alone.
        """
        return self.batch_statistic is None

    @property
    def needs_tails(self) -> bool:
        """Return whether policy and reference must also compute the tails of `Scores`."""
        return self.common.get("ld_alpha", 1) != 1

    @property
    def needs_squares(self) -> bool:
        """Return whether the policy must also compute the squares of `Scores`."""
        return bool(self.common.get("wpo"))

    def bind(self, name: str, options: Mapping[str, Any], common: Mapping[str, Any]) -> Loss:
        """Bind the options of a run."""
        per_token = bool(options.get(self.per_token)) if isinstance(self.per_token, str) else self.per_token
        return replace(self, name=name, options=options, common=common, per_token=per_token)

    def __call__(self, scores: Scores) -> Losses:
        """Compute losses and rewards.

        Shared options that are not given are off.
        """
        output = self.compute(scores)
        if self.trains_on != "pairs":
            return output
        return output._replace(losses=change_losses(output.losses, scores, **self.common))

    def compute(self, scores: Scores) -> Losses:
        """Compute losses and rewards, before the options that change losses."""
        return self.fn(self.change(scores), **self.options)

    def change(self, scores: Scores) -> Scores:
        """Apply the options that change scores.

        They are defined only for losses with a reference.
        """
        return change_scores(scores, **self.common) if self.reference else scores

    def find_batch_statistic(self, scores: Scores) -> Any:
        """Compute the statistic of a global batch, (B, k)."""
        assert self.batch_statistic is not None
        return self.batch_statistic(self.change(scores), **self.options)


@dataclass(frozen=True)
class Mix(Loss):
    """A weighted sum of losses, with the needs of its parts.

    Each part gets the options that its function takes. Rewards are beta times log-ratios, or beta times mean
    log-probabilities if no part has a reference.
    """

    fn: Any = None  # each part has its own
    parts: Sequence[tuple[float, Loss]] = ()

    @property
    def can_be_mixed(self) -> bool:
        return False

    def bind(self, name: str, options: Mapping[str, Any], common: Mapping[str, Any]) -> Loss:
        parts = []
        for part, weight in options.get("weights", {}).items():
            if weight:
                known = inspect.signature(LOSSES[part].fn).parameters
                own = {key: value for key, value in options.items() if key in known}
                parts.append((weight, LOSSES[part].bind(part, own, common)))
        losses = [loss for _, loss in parts]
        return replace(
            self,
            name=name,
            options=options,
            common=common,
            parts=parts,
            reference=any(loss.reference for loss in losses),
            margin_only=all(loss.margin_only for loss in losses if loss.reference),
            needs_label_smoothing=any(loss.needs_label_smoothing for loss in losses),
            per_token=not any(loss.reference for loss in losses),
        )

    def compute(self, scores: Scores) -> Losses:
        losses = scores.chosen * 0  # zeros of the right shape, dtype and device
        for weight, loss in self.parts:
            losses = losses + weight * loss.compute(scores).losses
        rewards = self.change(scores).log_ratios() if self.reference else scores.mean_logps()
        return formulas.with_rewards(losses, *rewards, self.options["beta"])


def find_loss(loss_config: Mapping[str, Any]) -> Loss:
    """Find the loss that `config.loss` names and bind its options."""
    options = {key: value for key, value in loss_config.items() if key != "name"}
    common = {key: options.pop(key) for key in OPTIONS if key in options}
    return LOSSES[loss_config["name"]].bind(loss_config["name"], options, common)


LOSSES = {
    "sft": Loss(formulas.sft, trains_on="targets", reference=False, best=("loss/eval", -1)),
    "dpo": Loss(formulas.dpo),
    "ipo": Loss(formulas.ipo, per_token="average"),
    "hinge": Loss(formulas.hinge),
    "robust": Loss(formulas.robust),
    "dpo_norm": Loss(formulas.dpo_norm, per_token=True),
    "exo": Loss(formulas.exo, needs_label_smoothing=True),
    "discopop": Loss(formulas.discopop),
    "beta_dpo": Loss(formulas.beta_dpo, batch_statistic=formulas.find_batch_beta, running_statistic=formulas.mean_gap),
    "simpo": Loss(formulas.simpo, reference=False, per_token=True),
    "orpo": Loss(formulas.orpo, reference=False, per_token=True, margin_only=False),
    "apo_zero": Loss(formulas.apo_zero, margin_only=False),
    "apo_down": Loss(formulas.apo_down, margin_only=False),
    "nca": Loss(formulas.nca, margin_only=False),
    "bco": Loss(formulas.bco, margin_only=False, running_statistic=formulas.mean_reward),
    "sppo": Loss(formulas.sppo, margin_only=False),
    "dpop": Loss(formulas.dpop, margin_only=False),
    "cal_dpo": Loss(formulas.cal_dpo, margin_only=False),
    "aot": Loss(formulas.aot, margin_only=False, batch_statistic=formulas.aot_partners),
    "aot_unpaired": Loss(formulas.aot_unpaired, margin_only=False, batch_statistic=formulas.aot_unpaired_partners),
    "mix": Mix(),
}
