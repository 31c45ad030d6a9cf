"""Options that losses of pairs share.

They change the scores that a loss gets, or the losses that it returns. Pure tensor functions, as in `formulas.py`. The
keys of the options are in `config/loss/options/`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dpo.losses.formulas import Scores

if TYPE_CHECKING:
    from torch import Tensor

# All but sft_weight and offset_by_margin need a reference. offset_by_margin is not applied here: the formulas subtract
# the margin, which is in the scores as `offset`.
OPTIONS = ("sft_weight", "wpo", "ld_alpha", "f_divergence", "f_alpha", "offset_by_margin")


def weigh_tails(scores: Scores, alpha: float) -> Scores:
    """Give tokens beyond the shorter response's length the weight `alpha`.

    This is LD-DPO (arXiv 2409.06411).
    """
    weighted = {}
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        weighted[name] = getattr(scores, name) - (1 - alpha) * getattr(scores, f"{name}_tail")
    return scores._replace(**weighted)


def f_derivative(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Compute f'(pi / ref) of f-DPO (arXiv 2309.16240, table 1).

    A constant is added, so that the result is 0 where pi = ref, like the log-ratio that it replaces. For the alpha
    divergence this is (1 - (pi / ref)^-alpha) / alpha, and forward KL is the case alpha = 1.
    """
    import torch
    from torch.nn.functional import logsigmoid

    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence == "forward_kl":
        alpha = 1
    # exp overflows float32 at 88. Log-ratios of rejected responses reach -88 in ordinary runs, and an infinite margin
    # has NaN gradients. The factor 0.9 leaves room for the division by alpha
    largest_exponent = 0.9 * math.log(torch.finfo(log_ratio.dtype).max)
    exponent = (-alpha * log_ratio).clamp(max=largest_exponent)
    return -exponent.expm1() / alpha


def replace_log_ratios(scores: Scores, divergence: str, alpha: float) -> Scores:
    """Replace the log-ratios by f' of the ratios, for another divergence."""
    chosen, rejected = (f_derivative(log_ratio, divergence, alpha) for log_ratio in scores.log_ratios())
    zeros = chosen.detach() * 0  # losses subtract the reference's log-probability, which f' already contains
    return scores._replace(chosen=chosen, rejected=rejected, reference_chosen=zeros, reference_rejected=zeros)


def find_wpo_weights(scores: Scores) -> Tensor:
    """Weights of WPO (arXiv 2406.11827, eq. 2, sampled alignment), (B,), detached.

    A weight is large if the policy is likely to write both responses. It is exp(m_chosen + m_rejected), where
    m is the mean over a response's tokens of log pi(token) - log sum_v pi(v)^2.
    """
    chosen = (scores.chosen - scores.chosen_squares) / scores.chosen_lengths
    rejected = (scores.rejected - scores.rejected_squares) / scores.rejected_lengths
    return (chosen + rejected).detach().exp()


def apply_to_scores(
    scores: Scores, *, ld_alpha: float = 1, f_divergence: str = "reverse_kl", f_alpha: float = 0.5, **_: Any
) -> Scores:
    """Apply `ld_alpha` and `f_divergence` to the scores that a loss gets."""
    if ld_alpha != 1:
        scores = weigh_tails(scores, ld_alpha)
    if f_divergence != "reverse_kl":
        scores = replace_log_ratios(scores, f_divergence, f_alpha)
    return scores


def apply_to_losses(losses: Tensor, scores: Scores, *, sft_weight: float = 0, wpo: bool = False, **_: Any) -> Tensor:
    """Apply `wpo` and `sft_weight` to losses of pairs.

    `scores` have not passed through `apply_to_scores`.
    """
    if wpo:
        losses = losses * find_wpo_weights(scores)
    if sft_weight:
        losses = losses - sft_weight * scores.chosen / scores.chosen_lengths
    return losses
