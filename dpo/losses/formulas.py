"""Pure tensor functions: log-probabilities of labels, and losses.

Torch is imported inside functions, because the check of a config reads the table of losses without it. In shapes, B is
the number of examples, T of tokens, and V of vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# types of options, with their bounds, of which `dpo/settings/keys.py` makes the keys `loss.OPTION`
Positive = Annotated[float, "> 0"]
Weight = Annotated[float, "[0, 1e30]"]
Fraction = Annotated[float, "[0, 1]"]
OpenFraction = Annotated[float, "(0, 1)"]
FlippedLabels = Annotated[float, "[0, 0.5)"]

IGNORE_INDEX = -100  # label of a token that is not scored: prompt and padding
LONGEST_LIST = 16  # most responses of a ranked list
# A ranked list's responses have these roles between the best, which is `chosen`, and the worst, which is `rejected`.
BETWEEN = tuple(f"rank{rank}" for rank in range(2, LONGEST_LIST))


def _get_batch_logps(logits: Tensor, labels: Tensor, average_log_prob: bool = False) -> Tensor:
    """Return the log-probability of each row's labels: the sum or, with `average_log_prob`, the mean over them, (B,).

    `logits`, (B, T, V), predict the *next* token; `labels`, (B, T), are -100 where nothing is scored.
    """
    assert logits.shape[:-1] == labels.shape
    targets = labels[:, 1:]  # (B, T-1)
    scored = targets != IGNORE_INDEX
    # `gather` cannot take the index -100: it takes 0 in its place, and these entries are masked out below.
    indices = targets.where(scored, 0).unsqueeze(2)  # (B, T-1, 1)
    logps = logits[:, :-1].log_softmax(-1).gather(2, indices).squeeze(2)  # (B, T-1)
    sums = (logps * scored).sum(-1)
    return sums / scored.sum(-1) if average_log_prob else sums


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
    """Compute losses of DPO, cDPO or IPO, and the detached rewards of chosen and rejected responses, each (B,).

    The log-probabilities, (B,) each, are summed over the tokens of a response.

    DPO: eq. 7 of arXiv 2305.18290; with `label_smoothing`, the share of flipped pairs in [0, 0.5), conservative DPO
    (eq. 3 of https://ericmitchell.ai/cdpo.pdf). IPO: eq. 17 of arXiv 2310.12036, without `label_smoothing`.
    `reference_free` treats the reference as uniform in the loss, but not in the rewards.
    """
    h = policy_chosen_logps - policy_rejected_logps  # becomes the difference of the two log-ratios
    if not reference_free:
        h = h - (reference_chosen_logps - reference_rejected_logps)
    losses = (h - 1 / (2 * beta)) ** 2 if ipo else _smoothed(beta * h, label_smoothing)
    chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
    rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps).detach()
    return losses, chosen_rewards, rejected_rewards


NOT_NEEDED: Any = None  # stands for a tensor that the loss does not need


class Scores(NamedTuple):
    """Input of a loss: log-probabilities summed over each response's tokens, or rewards of a scalar head.

    Tensors are (B,) unless noted. They are 0 where an example has no response of the role: an SFT target is `chosen`;
    a labelled response is `chosen` if it is desirable, else `rejected`. Of a ranked list, the best response is
    `chosen`, the worst `rejected`, and the others are `between`, (B, ranks), best first.
    """

    chosen: Tensor
    chosen_lengths: Tensor
    rejected: Tensor = NOT_NEEDED
    rejected_lengths: Tensor = NOT_NEEDED
    reference_chosen: Tensor = NOT_NEEDED
    reference_rejected: Tensor = NOT_NEEDED
    chosen_tail: Tensor = NOT_NEEDED  # log-probability of the tokens beyond the shorter response's length
    rejected_tail: Tensor = NOT_NEEDED
    reference_chosen_tail: Tensor = NOT_NEEDED
    reference_rejected_tail: Tensor = NOT_NEEDED
    chosen_squares: Tensor = NOT_NEEDED  # the sum over tokens of log sum_v pi(v)^2, detached
    rejected_squares: Tensor = NOT_NEEDED
    between: Tensor = NOT_NEEDED
    between_lengths: Tensor = NOT_NEEDED
    reference_between: Tensor = NOT_NEEDED
    offset: Tensor | float = 0.0  # (B,): each pair's margin, by which its rewards should differ, if `Loss.takes_offset`
    batch_statistic: Tensor | None = None  # (B, k); None: these examples are the whole global batch
    average: float = 0.0  # running average of `Loss.running_statistic` over updates

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-ratios of chosen and rejected responses: log pi - log ref."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def h(self) -> Tensor:
        """Return the difference of the log-ratios."""
        u_w, u_l = self.log_ratios()
        return u_w - u_l

    def mean_log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-ratios of chosen and rejected responses, each divided by its number of tokens."""
        u_w, u_l = self.log_ratios()
        return u_w / self.chosen_lengths, u_l / self.rejected_lengths

    def mean_logps(self) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probabilities of chosen and rejected responses, each divided by its number of tokens.

        Those of the reference are not subtracted.
        """
        return self.chosen / self.chosen_lengths, self.rejected / self.rejected_lengths


class Losses(NamedTuple):
    """Output of a loss; tensors are (B,), and all but the losses are detached."""

    losses: Tensor
    rewards: Mapping[str, Tensor] = {}  # by role; set by `dpo.losses.Loss`
    metrics: Mapping[str, Tensor] = {}  # further metrics, logged as NAME/train and NAME/eval
    accuracies: Tensor | None = None  # None: 1 if the chosen reward is above the rejected one, else 0


# --- the losses. As in papers, w is the chosen ("winning") response and l the rejected ("losing") one; u_w and u_l are
# --- their log-ratios log pi - log ref, and h = u_w - u_l


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """Compute the logistic loss of a margin, averaged over labels of which the share `label_smoothing` is flipped."""
    return -(1 - label_smoothing) * _log_sigmoid(margin) - label_smoothing * _log_sigmoid(-margin)


def sft(scores: Scores, *, average: Literal["sum", "mean"] = "sum", **_: Any) -> Losses:
    """Return the negated log-probability of the target.

    A config ported from the reference code may have other options, which do nothing.
    """
    if average == "mean":
        return Losses(-scores.chosen / scores.chosen_lengths)
    return Losses(-scores.chosen)


def dpo(scores: Scores, *, beta: Positive, label_smoothing: FlippedLabels, reference_free: bool) -> Losses:
    """DPO or, with `label_smoothing`, conservative DPO; see `preference_loss`."""
    losses, _, _ = preference_loss(
        # The offset is a difference of rewards, which are beta times log-ratios.
        scores.chosen - scores.offset / beta,
        scores.rejected,
        scores.reference_chosen,
        scores.reference_rejected,
        beta,
        label_smoothing,
        reference_free=reference_free,
    )
    return Losses(losses)


def dpo_norm(scores: Scores, *, beta: Positive) -> Losses:
    """Length-normalised DPO, as Tulu 3 was trained (arXiv 2411.15124, section 5)."""
    u_w, u_l = scores.mean_log_ratios()
    return Losses(-_log_sigmoid(beta * (u_w - u_l) - scores.offset))


def ipo(scores: Scores, *, beta: Positive, average: bool = False) -> Losses:
    """IPO (arXiv 2310.12036, eq. 17). `average` takes means over tokens, as the authors did."""
    u_w, u_l = scores.mean_log_ratios() if average else scores.log_ratios()
    return Losses((u_w - u_l - 1 / (2 * beta)) ** 2)


def hinge(scores: Scores, *, beta: Positive) -> Losses:
    """SLiC's hinge loss (arXiv 2305.10425) on DPO's log-ratios, as in arXiv 2309.06657; the margin is 1 / beta."""
    return Losses((1 - beta * scores.h()).relu())


def robust(scores: Scores, *, beta: Positive, label_smoothing: FlippedLabels) -> Losses:
    """Robust DPO (arXiv 2403.00409): unbiased if the fraction `label_smoothing` of the pairs is flipped."""
    margin = beta * scores.h() - scores.offset
    losses = -(1 - label_smoothing) * _log_sigmoid(margin) + label_smoothing * _log_sigmoid(-margin)
    return Losses(losses / (1 - 2 * label_smoothing))


def exo(scores: Scores, *, beta: Positive, label_smoothing: FlippedLabels) -> Losses:
    """EXO for pairs (arXiv 2402.00856, eq. 16): KL(p || q) of the policy's preference p and the smoothed label q.

    p is (sigmoid(margin), sigmoid(-margin)), and q is (1 - label_smoothing, label_smoothing). As the loss takes the log
    of q, `label_smoothing` must be above 0.
    """
    margin = beta * scores.h()
    chosen_term = margin.sigmoid() * (_log_sigmoid(margin) - math.log1p(-label_smoothing))
    rejected_term = (-margin).sigmoid() * (_log_sigmoid(-margin) - math.log(label_smoothing))
    return Losses(chosen_term + rejected_term)


def discopop(scores: Scores, *, beta: Positive, tau: Positive) -> Losses:
    """DiscoPOP (arXiv 2406.08414, eq. 5): the larger the margin, the less logistic and the more exponential.

    The smaller `tau`, the more abruptly the loss changes from one to the other.
    """
    margin = beta * scores.h()
    logistic = (-margin / tau).sigmoid() * -_log_sigmoid(margin)
    # sigmoid(margin / tau) * exp(-margin), as one exp because exp(-margin) alone overflows
    exponential = (_log_sigmoid(margin / tau) - margin).exp()
    return Losses(logistic + exponential)


def simpo(scores: Scores, *, beta: Positive, gamma: float) -> Losses:
    """SimPO (arXiv 2405.14734, eq. 6); `gamma` is by how much the chosen reward should exceed the rejected one."""
    chosen, rejected = scores.mean_logps()
    return Losses(-_log_sigmoid(beta * (chosen - rejected) - gamma - scores.offset))


def orpo(scores: Scores, *, beta: Positive) -> Losses:
    """ORPO (arXiv 2403.07691, eq. 6 and 7); beta is the paper's lambda, and odds are of mean log-probabilities."""
    chosen, rejected = scores.mean_logps()
    log_odds_ratio = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return Losses(-chosen - beta * _log_sigmoid(log_odds_ratio))


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x <= 0."""
    import torch

    x = x.clamp(max=-torch.finfo(x.dtype).eps)  # so that the result is finite
    # expm1 is exact where exp(x) is near 1, and log1p where it is near 0
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def apo_zero(scores: Scores, *, beta: Positive) -> Losses:
    """APO-zero (arXiv 2408.06266, eq. 7): chosen up, rejected down."""
    u_w, u_l = scores.log_ratios()
    return Losses((-beta * u_w).sigmoid() + (beta * u_l).sigmoid())


def apo_down(scores: Scores, *, beta: Positive) -> Losses:
    """APO-down (arXiv 2408.06266, eq. 8): chosen down, rejected further down."""
    u_w, u_l = scores.log_ratios()
    return Losses((beta * u_w).sigmoid() + (-beta * (u_w - u_l)).sigmoid())


def nca(scores: Scores, *, beta: Positive) -> Losses:
    """NCA for pairs (arXiv 2402.05369, section 4.1)."""
    u_w, u_l = scores.log_ratios()
    raising_chosen = -_log_sigmoid(beta * u_w)
    lowering_both = -(_log_sigmoid(-beta * u_w) + _log_sigmoid(-beta * u_l)) / 2
    return Losses(raising_chosen + lowering_both)


def _bco_terms(scores: Scores, beta: float) -> tuple[Tensor, Tensor]:
    """Compute BCO's losses of chosen and of rejected responses; `scores.average` is the paper's reward shift delta."""
    u_w, u_l = scores.log_ratios()
    return -_log_sigmoid(beta * u_w - scores.average), -_log_sigmoid(scores.average - beta * u_l)


def bco(scores: Scores, *, beta: Positive, momentum: Fraction = 1.0) -> Losses:
    """BCO (arXiv 2404.04656) for pairs, without the density ratio.

    `momentum` is that of `scores.average`, which the trainer updates; 1 leaves the average at 0.
    """
    chosen, rejected = _bco_terms(scores, beta)
    return Losses(chosen + rejected)


def sppo(scores: Scores, *, beta: Positive) -> Losses:
    """SPPO (arXiv 2405.00675, eq. 4.7), if the chosen response always wins; 1 / beta is the paper's eta."""
    u_w, u_l = scores.log_ratios()
    return Losses((u_w - 0.5 / beta) ** 2 + (u_l + 0.5 / beta) ** 2)


def dpop(scores: Scores, *, beta: Positive, penalty: Weight) -> Losses:
    """DPO-Positive (arXiv 2402.13228, eq. 3); `penalty` is the paper's lambda."""
    u_w, u_l = scores.log_ratios()
    margin = beta * (u_w - u_l - penalty * (-u_w).relu()) - scores.offset
    return Losses(-_log_sigmoid(margin))


def cal_dpo(scores: Scores, *, beta: Positive) -> Losses:
    """Cal-DPO (arXiv 2412.14516, algorithm 1), whose calibration is the loss of SPPO."""
    return Losses(-_log_sigmoid(scores.h()) + sppo(scores, beta=beta).losses)


def mean_reward(chosen: float, rejected: float, beta: float) -> float:
    """Return the running statistic of BCO (`Loss.running_statistic`) from the mean rewards of both roles."""
    return (chosen + rejected) / 2


def mean_gap(chosen: float, rejected: float, beta: float) -> float:
    """Return the running statistic of beta-DPO, the mean of h in nats, from the mean rewards of both roles."""
    return (chosen - rejected) / beta


# --- losses that compare the examples of the global batch. Their statistic has no gradient ----------------------------


def find_batch_beta(scores: Scores, *, beta: Positive, alpha: float, momentum: Fraction, **_: Any) -> Tensor:
    """Compute a batch's beta for beta-DPO (arXiv 2407.08639, section 4), the same for all examples, (B, 1).

    It exceeds `beta` in a batch whose mean h is above the running average; `alpha` says how much.
    """
    h = scores.h().detach()
    gap = h.mean()  # the paper's M, in nats and without beta, as in the authors' code
    average = momentum * scores.average + (1 - momentum) * gap
    batch_beta = beta * (1 + alpha * (gap - average))
    return batch_beta.clamp(min=1e-3).expand(len(h), 1)  # a gap far below the average would make beta negative


def beta_dpo(scores: Scores, *, beta: Positive, alpha: float, momentum: Fraction) -> Losses:
    """Beta-DPO (arXiv 2407.08639), without its filter; alpha and momentum are options of `find_batch_beta`."""
    return Losses(-_log_sigmoid(scores.batch_statistic[:, 0] * scores.h() - scores.offset))


def _take_at_same_rank(values: Tensor, others: Tensor) -> Tensor:
    """Return, for each value, the entry of `others` that has the same rank, detached; all are (B,)."""
    # The first argsort gives the index at each rank, the second the rank of each index.
    ranks = values.detach().argsort(stable=True).argsort()
    return others.detach().sort().values[ranks]


def aot_partners(scores: Scores, **_: Any) -> Tensor:
    """Find, for each of the policy's margins, the reference's margin of the same rank, (B, 1)."""
    margins = scores.chosen - scores.rejected
    return _take_at_same_rank(margins, scores.reference_chosen - scores.reference_rejected)[:, None]


def aot(scores: Scores, *, beta: Positive, label_smoothing: FlippedLabels) -> Losses:
    """AOT for pairs (arXiv 2406.05882), whose statistic is `aot_partners`."""
    margin = beta * (scores.chosen - scores.rejected - scores.batch_statistic[:, 0])
    return Losses(_smoothed(margin, label_smoothing))


def aot_unpaired_partners(scores: Scores, **_: Any) -> Tensor:
    """Find, for each chosen and each rejected log-ratio, the other role's of the same rank, (B, 2)."""
    import torch

    u_w, u_l = scores.log_ratios()
    return torch.stack([_take_at_same_rank(u_w, u_l), _take_at_same_rank(u_l, u_w)], dim=1)


def aot_unpaired(scores: Scores, *, beta: Positive, label_smoothing: FlippedLabels) -> Losses:
    """AOT, unpaired (arXiv 2406.05882), whose statistic is `aot_unpaired_partners`."""
    u_w, u_l = scores.log_ratios()
    chosen_losses = _smoothed(beta * (u_w - scores.batch_statistic[:, 0]), label_smoothing)
    rejected_losses = _smoothed(beta * (scores.batch_statistic[:, 1] - u_l), label_smoothing)
    # Partners have no gradient: only the first term moves chosen responses, only the second moves rejected responses.
    # Both terms compare the same ranks and have the same sum over the batch, so the second adds only its gradient.
    return Losses(chosen_losses + rejected_losses - rejected_losses.detach())


# --- the loss of a reward model, whose scores are rewards ------------------------------------------------------------


def bradley_terry(scores: Scores, *, centering: Weight) -> Losses:
    """The loss of a reward model (arXiv 2203.02155, eq. 1), with the offset as margin (arXiv 2307.09288, eq. 2).

    `centering` keeps rewards around 0 (arXiv 2312.09244, eq. 2).
    """
    ranking = -_log_sigmoid(scores.chosen - scores.rejected - scores.offset)
    return Losses(ranking + centering * (scores.chosen + scores.rejected) ** 2)


# --- losses of labelled examples, which have one response each. u is its log-ratio ------------------------------------


def estimate_kl(scores: Scores, **_: Any) -> Tensor:
    """Estimate KL(policy || reference) from mismatched examples, (B, 1) (arXiv 2402.01306, section 4)."""
    log_ratios = sum(scores.log_ratios())  # an example has one response, so one of its two log-ratios is 0
    return log_ratios.detach().mean().clamp(min=0).expand(len(log_ratios), 1)


def bco_unpaired(scores: Scores, *, beta: Positive, momentum: Fraction) -> Losses:
    """BCO (arXiv 2404.04656), with the two terms of `bco` on different examples."""
    chosen, rejected = _bco_terms(scores, beta)
    return Losses(chosen.where(scores.chosen_lengths > 0, rejected))


def kto(scores: Scores, *, beta: Positive, desirable_weight: Weight, undesirable_weight: Weight) -> Losses:
    """KTO (arXiv 2402.01306, section 4), whose z_0 is the statistic `estimate_kl`, or 0 if there is none."""
    z = scores.chosen.detach() * 0 if scores.batch_statistic is None else scores.batch_statistic[:, 0]
    u_w, u_l = scores.log_ratios()
    desirable = desirable_weight * (-beta * (u_w - z)).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
    undesirable = undesirable_weight * (beta * (u_l - z)).sigmoid()
    return Losses(desirable.where(scores.chosen_lengths > 0, undesirable), metrics={"kto/kl": z})


def apo_zero_unpaired(
    scores: Scores, *, beta: Positive, desirable_weight: Weight, undesirable_weight: Weight
) -> Losses:
    """APO-zero (arXiv 2408.06266, eq. 7) on labelled responses: KTO with z_0 = 0."""
    without_kl = scores._replace(batch_statistic=None)
    output = kto(without_kl, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    return Losses(output.losses)


# --- the loss of ranked lists -----------------------------------------------------------------------------------------


def plackett_luce(scores: Scores, *, beta: Positive) -> Losses:
    """DPO on ranked lists by the Plackett-Luce model (arXiv 2305.18290, appendix A.3).

    Each response i but the worst adds -log P(i is the best of itself and all worse ones j), which is
    log(1 + sum_j exp(-beta h_ij)) = -log_sigmoid(-logsumexp_j(-beta h_ij)). K is the longest list.
    """
    import torch

    def by_rank(best: Tensor, between: Tensor, worst: Tensor) -> Tensor:
        """Stack the values of a list's responses, best first, (B, K)."""
        columns = [] if between is NOT_NEEDED else between.unbind(1)  # not needed for lists of two
        return torch.stack([best, *columns, worst], dim=1)

    def compare(values: Tensor) -> Tensor:
        """Subtract from each value each value of its list, (B, K, K)."""
        return values[:, :, None] - values[:, None, :]

    policy = by_rank(scores.chosen, scores.between, scores.rejected)
    reference = by_rank(scores.reference_chosen, scores.reference_between, scores.reference_rejected)
    has_response = by_rank(scores.chosen_lengths, scores.between_lengths, scores.rejected_lengths) > 0  # (B, K)
    # (B, K, K): entry [b, i, j] is true if list b has responses i and j, and j is the worse one
    is_pair = (has_response[:, :, None] & has_response[:, None, :]).triu(1)
    # The differences are computed as dpo does, so that a list of two has the loss of dpo to the last digit.
    h = compare(policy) - compare(reference)  # (B, K, K)
    has_worse = is_pair.any(2)  # (B, K)
    # -beta h_ij where j is worse than i, else -inf; responses without a worse one get zeros, as the gradient of a
    # logsumexp of nothing is NaN
    exponents = (-beta * h).masked_fill(~is_pair, -math.inf).masked_fill(~has_worse[:, :, None], 0)  # (B, K, K)
    losses = -_log_sigmoid(-exponents.logsumexp(2)).where(has_worse, 0).sum(1)  # (B,)
    rewards = beta * (policy - reference).detach()  # (B, K)
    is_right = (compare(rewards) > 0) & is_pair  # (B, K, K)
    accuracies = (is_right.sum((1, 2)) / is_pair.sum((1, 2))).to(losses)  # (B,)
    return Losses(losses, accuracies=accuracies)


# --- options that losses of pairs share ------------------------------------------------------------------------------


def weigh_tails(scores: Scores, alpha: float) -> Scores:
    """Give tokens beyond the shorter response's length the weight `alpha`, as LD-DPO does (arXiv 2409.06411)."""
    weighted = {}
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        weighted[name] = getattr(scores, name) - (1 - alpha) * getattr(scores, f"{name}_tail")
    return scores._replace(**weighted)


def f_derivative(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Compute the derivative f'(pi / ref) of f-DPO (arXiv 2309.16240, table 1), less its value where pi = ref.

    `alpha` is that of the alpha divergence.
    """
    import torch

    if divergence == "js":
        return math.log(2) + _log_sigmoid(log_ratio)
    if divergence == "forward_kl":
        alpha = 1  # it is the alpha divergence with alpha = 1
    # What follows is f' of the alpha divergence, (1 - (pi / ref)^-alpha) / alpha. Its exponent is clamped, as exp
    # overflows float32 at 88: log-ratios of rejected responses reach -88 in ordinary runs, and an infinite margin has
    # NaN gradients. The factor 0.9 leaves room for the division by alpha.
    largest_exponent = 0.9 * math.log(torch.finfo(log_ratio.dtype).max)
    exponent = (-alpha * log_ratio).clamp(max=largest_exponent)
    return -exponent.expm1() / alpha


def replace_log_ratios(scores: Scores, divergence: str, alpha: float) -> Scores:
    """Return scores whose log-ratios are f' of the ratios pi / ref, as f-DPO has them (`f_derivative`)."""
    u_w, u_l = scores.log_ratios()
    zeros = u_w.detach() * 0  # losses subtract the reference's log-probability, which f' already contains
    return scores._replace(
        chosen=f_derivative(u_w, divergence, alpha),
        rejected=f_derivative(u_l, divergence, alpha),
        reference_chosen=zeros,
        reference_rejected=zeros,
    )


def find_wpo_weights(scores: Scores) -> Tensor:
    """Compute the weights of WPO (arXiv 2406.11827, eq. 2, sampled alignment), (B,), detached.

    The log of a pair's weight is the sum over both responses of the mean over tokens of log pi - log sum_v pi(v)^2.
    """
    chosen = (scores.chosen - scores.chosen_squares) / scores.chosen_lengths
    rejected = (scores.rejected - scores.rejected_squares) / scores.rejected_lengths
    return (chosen + rejected).detach().exp()
