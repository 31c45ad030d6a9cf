"""Numbers derived from a run: intervals, errors, collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from dpo.analysis.runs import Run, number

EVAL_ACCURACY = "rewards_eval/accuracies"
Z_95 = 1.959964  # half the width of a 95 % interval, in standard errors
BEYOND_CHANCE = 3.0  # standard errors, for small samples and the best of some evaluations too
UPDATES_AT_START = 10  # updates averaged as the start of a loss without a reference: a single one says too little
COLLAPSED = ((50, 3.0), (16, 5.0))  # last updates, and the multiple of the start's loss that is too high


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


def mean_and_bound(values: np.ndarray) -> tuple[float, float]:
    """The mean of successive values, and how far from it the expected value may be by chance.

    If neighbours have a correlation c, values at distance k are taken to have c^k. This multiplies the variance of the
    mean by (1 + c) / (1 - c).
    """
    n, centered = len(values), values - values.mean()
    sum_of_squares = float(centered @ centered)
    correlation = float(centered[1:] @ centered[:-1]) / sum_of_squares if sum_of_squares > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.95)
    error = math.sqrt(sum_of_squares / (n - 1) / n * (1 + correlation) / (1 - correlation))
    return float(values.mean()), BEYOND_CHANCE * error


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


def is_collapsed(start_loss: float, start_margin: float, losses: Sequence[float], margins: Sequence[float]) -> bool:
    """Return whether the last updates' losses are far above the start's.

    Half of the last losses are above a multiple of the start's, which counts as at least 0.5, while the mean margin,
    which grows in nearly all runs, is not above the start's. Without pairs `margins` are NaN, and do not count.
    """
    for n, factor in COLLAPSED:
        limit = start_loss + (factor - 1) * max(abs(start_loss), 0.5)
        if len(losses) >= n and median(losses[-n:]) > limit and not fmean(margins[-n:]) > start_margin:
            return True
    return False
