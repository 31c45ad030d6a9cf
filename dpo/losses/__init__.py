"""The table of losses, and what each of them needs.

The functions are in `formulas.py`, and the options that losses of pairs share in `options.py`. Imports no
torch, so that a config is checked quickly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dpo.losses.formulas as formulas
from dpo.losses.formulas import BETWEEN, IGNORE_INDEX, LONGEST_LIST, Losses, Scores, _get_batch_logps, preference_loss
from dpo.losses.options import OPTIONS, apply_to_losses, apply_to_scores

__all__ = [
    "BETWEEN",
    "IGNORE_INDEX",
    "LONGEST_LIST",
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

# kinds of training examples, and the roles of the responses in them. The target of SFT is `chosen`. A labelled example
# has one response, which is `chosen` if its label says that it is desirable, and else `rejected`. A ranked list has a
# best and a worst response, and any number of others
TRAINS_ON = {
    "pairs": ("chosen", "rejected"),
    "targets": ("chosen",),
    "labels": ("chosen", "rejected"),
    "lists": ("chosen", *BETWEEN, "rejected"),
}
ROLES = tuple(dict.fromkeys(role for roles in TRAINS_ON.values() for role in roles))
# ranks checkpoints for losses of labels, as the AUC does not depend on the weights in such a loss
AUC = ("rewards_eval/auc", +1)


@dataclass(frozen=True)
class Loss:
    """A loss, and what it needs.

    `fn(scores, **options)` gets the keys of `config/loss/NAME.yaml` as options, except those in OPTIONS.
    """

    fn: Callable[..., Losses]
    trains_on: str = "pairs"  # a key of TRAINS_ON
    reference: bool = True  # whether it needs the reference's log-probabilities
    # the metric that ranks checkpoints, and +1 if higher values are better, -1 if lower ones are
    best: tuple[str, int] = ("rewards_eval/accuracies", +1)
    # whether it depends only on the difference of the log-ratios, as the derivation of f_divergence assumes
    margin_only: bool = True
    # for a loss that compares the examples of a batch: (scores of the global batch, **options) -> values, (B, k)
    batch_statistic: Callable[..., Any] | None = None
    # whether the statistic is computed on mismatched examples, each a prompt with a response to another prompt
    mismatched: bool = False
    # (mean chosen reward, mean rejected reward, beta) -> value, whose average over updates is `Scores.average`
    running_statistic: Callable[[float, float, float], float] | None = None
    takes_offset: bool = False  # whether it is logistic, so that `offset_by_margin` can shift its sigmoid
    takes_weights: bool = True  # whether it is a mean over examples, so that the data may weight them
    needs_label_smoothing: bool = False  # whether it is infinite at label_smoothing=0
    # whether rewards are means over tokens rather than sums; a string names the option that decides
    per_token: bool | str = False
    # whether it trains a reward model: the policy's architecture with a scalar head, whose rewards are the scores
    scalar_head: bool = False
    # the following are set by `bind`
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    shared_options: Mapping[str, Any] = field(default_factory=dict)  # the options in OPTIONS

    def __post_init__(self) -> None:
        if self.reference and self.trains_on == "targets":
            raise ValueError("a loss that trains on targets has no reference: give reference=False")

    @property
    def roles(self) -> tuple[str, ...]:
        return TRAINS_ON[self.trains_on]

    @property
    def reference_columns(self) -> list[str]:
        """Names of the reference's log-probabilities that the loss needs."""
        suffixes = ("", "_tail") if self.needs_tails else ("",)
        return [f"reference_{role}{suffix}" for suffix in suffixes for role in self.roles]

    @property
    def can_be_mixed(self) -> bool:
        """Whether `loss=mix` may contain this loss: it trains a policy on pairs, or targets, each by itself."""
        return self.batch_statistic is None and self.trains_on in ("pairs", "targets") and not self.scalar_head

    @property
    def has_margins(self) -> bool:
        """Whether each example has a chosen and a rejected response."""
        return self.trains_on in ("pairs", "lists")

    @property
    def needs_tails(self) -> bool:
        """Whether policy and reference must also compute the tails of `Scores`."""
        return self.shared_options.get("ld_alpha", 1) != 1

    @property
    def needs_margins(self) -> bool:
        """Whether each pair of the data must have a margin."""
        return bool(self.shared_options.get("offset_by_margin"))

    @property
    def needs_squares(self) -> bool:
        """Whether the policy must also compute the squares of `Scores`."""
        return bool(self.shared_options.get("wpo"))

    def bind(self, name: str, options: Mapping[str, Any], shared_options: Mapping[str, Any]) -> Loss:
        """Return this loss with the options of a run."""
        per_token = bool(options.get(self.per_token)) if isinstance(self.per_token, str) else self.per_token
        return replace(self, name=name, options=options, shared_options=shared_options, per_token=per_token)

    def __call__(self, scores: Scores) -> Losses:
        """Compute losses and rewards, with all options."""
        output = self.fn(self.transform(scores), **self.options)
        return self._apply_to_losses(output, scores)

    def transform(self, scores: Scores) -> Scores:
        """Apply `ld_alpha` and `f_divergence`, which need a reference."""
        return apply_to_scores(scores, **self.shared_options) if self.reference else scores

    def _apply_to_losses(self, output: Losses, scores: Scores) -> Losses:
        """Apply `wpo` and `sft_weight`, which only losses of pairs have."""
        if self.trains_on != "pairs":
            return output
        return output._replace(losses=apply_to_losses(output.losses, scores, **self.shared_options))

    def find_batch_statistic(self, scores: Scores) -> Any:
        """Compute the statistic of a global batch, (B, k)."""
        assert self.batch_statistic is not None
        return self.batch_statistic(self.transform(scores), **self.options)


@dataclass(frozen=True)
class Mix(Loss):
    """A weighted sum of losses, which needs what any of them needs.

    Rewards are beta times log-ratios, or beta times mean log-probabilities if no loss has a reference.
    """

    fn: Any = None  # `__call__` calls those of the losses instead
    weighted_losses: Sequence[tuple[float, Loss]] = ()

    @property
    def can_be_mixed(self) -> bool:
        return False

    def bind(self, name: str, options: Mapping[str, Any], shared_options: Mapping[str, Any]) -> Loss:
        weighted_losses = []
        for loss_name, weight in options.get("weights", {}).items():
            if weight:
                loss = LOSSES[loss_name]
                parameters = inspect.signature(loss.fn).parameters
                loss_options = {key: value for key, value in options.items() if key in parameters}
                weighted_losses.append((weight, loss.bind(loss_name, loss_options, shared_options)))
        losses = [loss for _, loss in weighted_losses]
        return replace(
            self,
            name=name,
            options=options,
            shared_options=shared_options,
            weighted_losses=weighted_losses,
            reference=any(loss.reference for loss in losses),
            margin_only=all(loss.margin_only for loss in losses if loss.reference),
            needs_label_smoothing=any(loss.needs_label_smoothing for loss in losses),
            per_token=not any(loss.reference for loss in losses),
        )

    def __call__(self, scores: Scores) -> Losses:
        losses = scores.chosen * 0  # zeros of the right shape, dtype and device
        for weight, loss in self.weighted_losses:
            losses = losses + weight * loss.fn(loss.transform(scores), **loss.options).losses
        chosen, rejected = self.transform(scores).log_ratios() if self.reference else scores.mean_logps()
        return self._apply_to_losses(formulas.with_rewards(losses, chosen, rejected, self.options["beta"]), scores)


def find_loss(loss_config: Mapping[str, Any]) -> Loss:
    """Find the loss that `config.loss` names, and bind its options."""
    options = {key: value for key, value in loss_config.items() if key != "name"}
    shared_options = {key: options.pop(key) for key in OPTIONS if key in options}
    return LOSSES[loss_config["name"]].bind(loss_config["name"], options, shared_options)


LOSSES = {
    "sft": Loss(formulas.sft, trains_on="targets", reference=False, best=("loss/eval", -1)),
    "dpo": Loss(formulas.dpo, takes_offset=True),
    "ipo": Loss(formulas.ipo, per_token="average"),
    "hinge": Loss(formulas.hinge),
    "robust": Loss(formulas.robust, takes_offset=True),
    "dpo_norm": Loss(formulas.dpo_norm, per_token=True, takes_offset=True),
    "exo": Loss(formulas.exo, needs_label_smoothing=True),
    "discopop": Loss(formulas.discopop),
    "beta_dpo": Loss(
        formulas.beta_dpo,
        batch_statistic=formulas.find_batch_beta,
        running_statistic=formulas.mean_gap,
        takes_offset=True,
    ),
    "simpo": Loss(formulas.simpo, reference=False, per_token=True, takes_offset=True),
    "orpo": Loss(formulas.orpo, reference=False, per_token=True, margin_only=False),
    "apo_zero": Loss(formulas.apo_zero, margin_only=False),
    "apo_down": Loss(formulas.apo_down, margin_only=False),
    "nca": Loss(formulas.nca, margin_only=False),
    "bco": Loss(formulas.bco, margin_only=False, running_statistic=formulas.mean_reward),
    "sppo": Loss(formulas.sppo, margin_only=False),
    "dpop": Loss(formulas.dpop, margin_only=False, takes_offset=True),
    "cal_dpo": Loss(formulas.cal_dpo, margin_only=False),
    "aot": Loss(formulas.aot, margin_only=False, batch_statistic=formulas.aot_partners, takes_weights=False),
    "aot_unpaired": Loss(
        formulas.aot_unpaired, margin_only=False, batch_statistic=formulas.aot_unpaired_partners, takes_weights=False
    ),
    "kto": Loss(
        formulas.kto,
        trains_on="labels",
        best=AUC,
        margin_only=False,
        batch_statistic=formulas.estimate_kl,
        mismatched=True,
    ),
    "apo_zero_unpaired": Loss(formulas.apo_zero_unpaired, trains_on="labels", best=AUC, margin_only=False),
    "bco_unpaired": Loss(
        formulas.bco_unpaired,
        trains_on="labels",
        best=AUC,
        margin_only=False,
        running_statistic=formulas.mean_reward,
    ),
    "bradley_terry": Loss(
        formulas.bradley_terry, reference=False, margin_only=False, takes_offset=True, scalar_head=True
    ),
    "plackett_luce": Loss(formulas.plackett_luce, trains_on="lists", margin_only=False),
    "mix": Mix(),
}
