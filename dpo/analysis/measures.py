"""Intervals of a run's measures, and the numbers of examples that they are over."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dpo.analysis.runs import Run, number

EVAL_ACCURACY = "rewards_eval/accuracies"
Z_95 = 1.959964  # half the width of a 95 % interval, in standard errors


def find_zero(rises: Callable[[float], float]) -> float:
    """Find where a rising function on [0, 1] crosses 0."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return round(low, 6)


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Compute Clopper and Pearson's exact 95 % interval of a share of n examples.

    n is rounded, as weighted examples count as fewer.
    """
    n_whole = max(round(n), 1)
    right = round(share * n_whole)
    k = np.arange(n_whole + 1)
    log_ways = np.cumsum(np.log(np.maximum(n_whole + 1 - k, 1) / np.maximum(k, 1)) * (k > 0))  # log of n over k

    def tail(p: float, first: int) -> float:
        """Probability that `first` or more examples are right."""
        return float(np.exp(log_ways + k * math.log(p) + (n_whole - k) * math.log1p(-p))[first:].sum())

    low = find_zero(lambda p: tail(p, right) - 0.025) if right else 0.0
    return low, (find_zero(lambda p: tail(p, right + 1) - 0.975) if right < n_whole else 1.0)


def auc_interval(auc: float, n_chosen: float, n_rejected: float) -> tuple[float, float]:
    """Compute the 95 % interval of an AUC by Newcombe's method 5.

    It has the AUCs from which the observed one is 1.96 of their standard errors away, with the variance of Hanley and
    McNeil for numbers of responses that are about equal. It is valid near 0 and 1, where theirs has no width.
    """

    def deviate(theta: float) -> float:
        others = (n_chosen + n_rejected) / 2 - 1
        factor = 1 + max(others, 0) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (theta - auc) / math.sqrt(theta * (1 - theta) * factor / (n_chosen * n_rejected))

    return find_zero(lambda theta: deviate(theta) + Z_95), find_zero(lambda theta: deviate(theta) - Z_95)


def n_evaluated(run: Run, what: str = "examples") -> float:
    """Number of different examples, or prompts, in an evaluation."""
    n_asked, n_available = number(run.setting("n_eval_examples", 256)), run.count(f"test.{what}")
    return min(n_asked, n_available) if n_available > 0 else n_asked


def n_effective(run: Run) -> float:
    """Number of evaluated examples or, if they have weights w, fewer.

    A weighted mean varies as much as a plain mean of (sum w)^2 / sum w^2 examples, the preflight's effective examples.
    """
    share = run.count("test.effective_examples") / max(run.count("test.examples"), 1)
    return n_evaluated(run) * (share if share > 0 else 1)  # all examples count if the counts are lost
