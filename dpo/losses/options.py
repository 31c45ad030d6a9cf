"""Options of pairwise losses, applied to scores and losses.

Pure tensor functions, as in `formulas.py`. The options' keys are in `config/loss/options/`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dpo.losses.formulas import Scores

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = ("sft_weight", "wpo", "ld_alpha", "f_divergence", "f_alpha")  # all but the first need a reference


def with_lighter_tails(scores: Scores, alpha: float) -> Scores:
    """LD-DPO (arXiv 2409.06411).

    Tokens beyond the shorter response's length have the weight `alpha`.
    """
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    return scores._replace(
        **{name: getattr(scores, name) - (1 - alpha) * getattr(scores, f"{name}_tail") for name in names}
    )


def f_derivative(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(pi / ref), shifted to 0 at equality (arXiv 2309.16240, table 1)."""
    import torch
    from torch.nn.functional import logsigmoid

    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    alpha = 1 if divergence == "forward_kl" else alpha
    # exp overflows float32 at 88 nats, by which rejected responses fall in ordinary runs; an infinite margin has NaN
    # gradients. 0.9 leaves room for the division by alpha
    largest = 0.9 * math.log(torch.finfo(log_ratio.dtype).max)
    return -(-alpha * log_ratio).clamp(max=largest).expm1() / alpha


def with_divergence(scores: Scores, divergence: str, alpha: float) -> Scores:
    """Replace log-ratios by f' of the ratios, for another divergence."""
    u_w, u_l = (f_derivative(u, divergence, alpha) for u in scores.log_ratios())
    zeros = u_w.detach() * 0  # losses subtract the reference's log-probability, which f' already contains
    return scores._replace(chosen=u_w, rejected=u_l, reference_chosen=zeros, reference_rejected=zeros)


def wpo_weights(scores: Scores) -> Tensor:
    """Weights of WPO (arXiv 2406.11827, eq. 2, sampled alignment), (B,).

    How likely the policy is to write both responses: exp of the mean over tokens of log pi(token) - log sum_v pi(v)^2,
    detached.
    """
    chosen = (scores.chosen - scores.chosen_squares) / scores.chosen_lengths
    rejected = (scores.rejected - scores.rejected_squares) / scores.rejected_lengths
    return (chosen + rejected).detach().exp()


def change_scores(
    scores: Scores, *, ld_alpha: float = 1, f_divergence: str = "reverse_kl", f_alpha: float = 0.5, **_: Any
) -> Scores:
    """Apply `ld_alpha` and `f_divergence` to a loss's scores."""
    if ld_alpha != 1:
        scores = with_lighter_tails(scores, ld_alpha)
    return scores if f_divergence == "reverse_kl" else with_divergence(scores, f_divergence, f_alpha)


def change_losses(losses: Tensor, scores: Scores, *, sft_weight: float = 0, wpo: bool = False, **_: Any) -> Tensor:
    """Apply `wpo` and `sft_weight` to losses of pairs.

    `scores` are those before `change_scores`.
    """
    if wpo:
        losses = losses * wpo_weights(scores)
    return losses - sft_weight * scores.chosen / scores.chosen_lengths if sft_weight else losses
