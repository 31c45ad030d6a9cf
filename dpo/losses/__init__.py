"""The table of losses, and what each of them needs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, get_type_hints

import dpo.losses.formulas as formulas
from dpo.losses.formulas import BETWEEN, IGNORE_INDEX, LONGEST_LIST, Losses, Scores, _get_batch_logps, preference_loss  # noqa: F401

# The kinds of training examples, with the roles of their responses. A labelled example has one response, whose role is
# its label. A ranked list has a best and a worst response, and any number of others.
TRAINS_ON = {
    "pairs": ("chosen", "rejected"),
    "targets": ("chosen",),
    "labels": ("chosen", "rejected"),
    "lists": ("chosen", *BETWEEN, "rejected"),
}
RESPONSE_ROLES = ("chosen", "rejected", *BETWEEN)


class PairOptions(TypedDict, total=False):
    """Options that losses of pairs share (`config/loss/options/`).

    All but `sft_weight` and `offset_by_margin` need a reference.
    """

    sft_weight: formulas.Weight
    wpo: bool
    ld_alpha: formulas.Fraction
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"]
    f_alpha: formulas.OpenFraction
    offset_by_margin: bool  # formulas subtract the margin of the data, which is `Scores.offset`


SHARED = tuple(get_type_hints(PairOptions))


@dataclass(frozen=True)
class Loss:
    """A loss, and what it needs.

    `fn(scores, **options)` gets the keys of `config/loss/NAME.yaml` as options, except those of PairOptions.
    """

    fn: Any  # a function of `formulas`; None: a weighted sum of other losses, which needs what any of them needs
    trains_on: str = "pairs"  # a key of TRAINS_ON
    reference: bool = True  # whether it needs the reference's log-probabilities
    # The metric that ranks checkpoints, and +1 if higher values are better, -1 if lower ones are.
    best: tuple[str, int] = ("rewards_eval/accuracies", +1)
    # Whether the loss depends only on the difference of the log-ratios, as the derivation of f_divergence assumes.
    margin_only: bool = True
    # For a loss that compares the examples of a batch: (scores of the global batch, **options) -> values, (B, k).
    batch_statistic: Callable | None = None
    # Whether the statistic is computed on mismatched examples, each a prompt with a response to another prompt.
    mismatched: bool = False
    # (mean chosen reward, mean rejected reward, beta) -> value, whose average over updates is `Scores.average`
    running_statistic: Callable | None = None
    takes_offset: bool = False  # whether it is logistic, so that `offset_by_margin` can shift its sigmoid
    takes_weights: bool = True  # whether it is a mean over examples, so that the data may weight them
    # Whether rewards are means over tokens rather than sums; a string names the option that decides.
    per_token: bool | str = False
    # Whether the loss trains a reward model: the policy's architecture with a scalar head, whose rewards are the
    # scores.
    scalar_head: bool = False
    # `find_loss` sets the following.
    name: str = ""
    options: Mapping = field(default_factory=dict)
    shared: Mapping = field(default_factory=dict)  # those of PairOptions
    parts: Sequence[tuple[float, "Loss"]] = ()  # weights and losses of a weighted sum

    @property
    def roles(self) -> tuple[str, ...]:
        return TRAINS_ON[self.trains_on]

    @property
    def reference_columns(self) -> list[str]:
        """Name the reference's log-probabilities, in the order of the columns of their cache."""
        columns = [f"reference_{role}" for role in self.roles]
        return columns + [f"{column}_tail" for column in columns if self.needs_tails]

    @property
    def can_be_mixed(self) -> bool:
        """Return whether `loss=mix` may contain it: it trains a policy on single pairs or targets."""
        is_independent = self.fn is not None and self.batch_statistic is None  # needs no other losses or examples
        return is_independent and not self.scalar_head and self.trains_on in ("pairs", "targets")

    @property
    def needs_tails(self) -> bool:
        """Return whether it weights the tokens of a response beyond the other one's length (LD-DPO)."""
        return self.shared.get("ld_alpha", 1) != 1

    @property
    def needs_squares(self) -> bool:
        """Return whether WPO's weights need sums of log sum_v pi(v)^2 (`Scores.chosen_squares`, `rejected_squares`)."""
        return self.shared.get("wpo", False)

    @property
    def needs_margins(self) -> bool:
        """Return whether it needs the margins of the data, as `Scores.offset`."""
        return self.shared.get("offset_by_margin", False)

    def __call__(self, scores: Scores) -> Losses:
        """Compute the losses of examples, with the shared options, and the rewards of their responses.

        Without `scores.batch_statistic`, the examples must be a whole global batch. Training on targets has no rewards.
        """
        # A statistic of mismatched examples cannot be computed from these scores.
        if self.batch_statistic and scores.batch_statistic is None and not self.mismatched:
            scores = scores._replace(batch_statistic=self.find_batch_statistic(scores))
        transformed = self.transform(scores)
        if self.parts:
            weighted = (weight * part.fn(part.transform(scores), **part.options).losses for weight, part in self.parts)
            output = Losses(sum(weighted))  # type: ignore[arg-type]
        else:
            output = self.fn(transformed, **self.options)
        losses = output.losses
        # These two need the policy's own log-probabilities, so they take `scores`, not `transformed`.
        if self.needs_squares:
            losses = losses * formulas.find_wpo_weights(scores)
        if sft_weight := self.shared.get("sft_weight"):
            losses = losses - sft_weight * scores.chosen / scores.chosen_lengths
        rewards = {}
        if self.trains_on != "targets":  # beta times log-ratios, or log-probabilities without a reference, (B,)
            chosen = transformed.chosen  # a scalar head's scores are rewards
            rejected = transformed.rejected
            if self.reference:
                chosen, rejected = transformed.mean_log_ratios() if self.per_token else transformed.log_ratios()
            elif self.per_token:
                chosen, rejected = transformed.mean_logps()
            beta = self.options.get("beta", 1.0)
            rewards = {"chosen": (beta * chosen).detach(), "rejected": (beta * rejected).detach()}
        return output._replace(losses=losses, rewards=rewards)

    def transform(self, scores: Scores) -> Scores:
        """Apply the options `ld_alpha` and `f_divergence` to the scores; without a reference, return them unchanged."""
        if not self.reference:
            return scores
        if self.needs_tails:
            scores = formulas.weigh_tails(scores, self.shared["ld_alpha"])
        divergence = self.shared.get("f_divergence", "reverse_kl")
        if divergence != "reverse_kl":
            scores = formulas.replace_log_ratios(scores, divergence, self.shared["f_alpha"])
        return scores

    def find_batch_statistic(self, scores: Scores) -> Any:
        """Compute the `batch_statistic` of a global batch, (B, k), which the losses of its examples need."""
        return self.batch_statistic(self.transform(scores), **self.options)  # type: ignore[misc]


def find_loss(loss_config: Mapping) -> Loss:
    """Return the loss that the section `loss` of a config names, with its options; a mix also has its parts."""
    options = dict(loss_config)
    name = options.pop("name")
    shared = {key: options.pop(key) for key in SHARED if key in options}
    loss = replace(LOSSES[name], name=name, options=options, shared=shared)
    if isinstance(loss.per_token, str):
        loss = replace(loss, per_token=bool(options.get(loss.per_token)))
    if loss.fn is not None:
        return loss
    parts = []
    for part_name, weight in options.get("weights", {}).items():
        if weight:
            own = {key: options[key] for key in list_parameters(LOSSES[part_name]) if key in options}
            parts.append((weight, find_loss({"name": part_name, **own, **shared})))
    with_reference = [part for _, part in parts if part.reference]
    return replace(
        loss,
        parts=parts,
        reference=bool(with_reference),
        margin_only=all(part.margin_only for part in with_reference),
        per_token=not with_reference,  # without a reference, the rewards are means, as for SimPO and ORPO
    )


def list_parameters(loss: Loss) -> dict:
    """Map the names of a loss's own options to their types; empty for a mix."""
    if loss.fn is None:
        return {}
    parameters = inspect.signature(loss.fn, eval_str=True).parameters.values()
    return {option.name: option.annotation for option in parameters if option.kind is option.KEYWORD_ONLY}


def list_options() -> dict:
    """Map the names of all options, of any loss, to their types with bounds."""
    types = get_type_hints(PairOptions, include_extras=True)
    for loss in LOSSES.values():
        types |= list_parameters(loss)
    return types


# The AUC ranks checkpoints, as it does not depend on the losses' weights of labels.
FOR_LABELS: Any = {"trains_on": "labels", "best": ("rewards_eval/auc", +1), "margin_only": False}
LOSSES = {
    "sft": Loss(formulas.sft, trains_on="targets", reference=False, best=("loss/eval", -1)),
    "dpo": Loss(formulas.dpo, takes_offset=True),
    "ipo": Loss(formulas.ipo, per_token="average"),
    "hinge": Loss(formulas.hinge),
    "robust": Loss(formulas.robust, takes_offset=True),
    "dpo_norm": Loss(formulas.dpo_norm, per_token=True, takes_offset=True),
    "exo": Loss(formulas.exo),
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
    "kto": Loss(formulas.kto, **FOR_LABELS, batch_statistic=formulas.estimate_kl, mismatched=True),
    "apo_zero_unpaired": Loss(formulas.apo_zero_unpaired, **FOR_LABELS),
    "bco_unpaired": Loss(formulas.bco_unpaired, **FOR_LABELS, running_statistic=formulas.mean_reward),
    "bradley_terry": Loss(
        formulas.bradley_terry, reference=False, margin_only=False, takes_offset=True, scalar_head=True
    ),
    "plackett_luce": Loss(formulas.plackett_luce, trains_on="lists", margin_only=False),
    "mix": Loss(None),
}
