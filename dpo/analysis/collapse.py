"""Detection of collapse: a loss far above its start, and margins that show no preference.

Where policy and reference are equal, every loss has the value of having learned nothing (docs/metrics.md). The first
evaluation or update of a run shows that value under all of its options, so later losses are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST_UPDATES, FEWEST_PAIRS = 50, 256  # in a window
SURE = 4.0  # standard errors by which the loss is too high
FEW = 16  # updates whose huge losses show a collapse
HUGE, HUGE_EVALUATED = 5.0, 20.0  # times the start: half of the losses of these updates; the loss of one evaluation
LEAST = 0.5  # stands for a start nearer to 0 than that
FIRST = 10  # updates averaged as the start of a loss without a reference, whose first pairs are like any others

WHAT_TO_TRY = (
    "By its own loss the policy is worse than before training, and seldom comes back by itself: stop, and start again "
    "with a tenth of lr, more warmup_steps or a larger batch_size."
)


class Means(NamedTuple):
    """Mean loss and mean margin."""

    loss: float
    margin: float


def updates_at_start(reference: bool) -> int:
    """Number of first updates that give the start of a run without a first evaluation."""
    return 1 if reference else FIRST


def count_window(batch_size: float) -> int:
    """Number of updates in a window."""
    return max(FEWEST_UPDATES, math.ceil(FEWEST_PAIRS / batch_size)) if batch_size > 0 else FEWEST_PAIRS


class Collapse(NamedTuple):
    """Means over a number of updates."""

    loss: float
    margin: float
    updates: int


def find_collapse(losses: Sequence[float], margins: Sequence[float], start: Means, width: int) -> Collapse | None:
    """Return the means over the last updates if they show a collapse, else None.

    In a collapse the mean loss over the last `width` updates is above twice its start by `SURE` standard errors, or
    half of the last `FEW` losses are above `HUGE` times it; and the mean margin is not above its start."""
    for n, is_too_high in ((FEW, _most_are_huge), (width, _mean_is_high)):
        loss, margin = (np.asarray(values[-n:], dtype=float) for values in (losses, margins))
        if len(loss) == n and margin.mean() <= start.margin and is_too_high(loss, start.loss):
            return Collapse(float(loss.mean()), float(margin.mean()), n)
    return None


def is_collapsed(evaluation: Means, start: Means) -> bool:
    """Whether an evaluation shows a collapse, even one of few pairs."""
    return evaluation.loss > _times(start.loss, HUGE_EVALUATED) and evaluation.margin <= start.margin


def _times(loss: float, factor: float) -> float:
    """`factor` times the loss at the start, or as far above a start near 0."""
    return loss + (factor - 1) * max(abs(loss), LEAST)


def _most_are_huge(losses: np.ndarray, start: float) -> bool:
    """Whether the median is huge; the mean of a few losses is uncertain if one is an outlier."""
    return float(np.median(losses)) > _times(start, HUGE)


def _mean_is_high(losses: np.ndarray, start: float) -> bool:
    error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    return float(losses.mean()) - SURE * error > _times(start, 2)
