"""Whether a run has collapsed: its loss is far above where it began, and its margins show no preference.

Where policy and reference are equal, every loss has the value of having learned nothing (docs/metrics.md). The first
evaluation or update of a run shows that value under all of its options, so that is what later losses are held against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST_UPDATES, FEWEST_PAIRS = 50, 256  # that are looked at together
SURE = 4.0  # standard errors by which the loss is too high
FEW = 16  # updates that tell a collapse by losses that are huge
HUGE, HUGE_EVALUATED = 5.0, 20.0  # times the start: half of the losses of these updates; the loss of one evaluation
LEAST = 0.5  # stands for a start nearer to 0 than that
FIRST = 10  # updates that stand for the start of a loss without a reference, whose first pairs are like any others

WHAT_TO_TRY = (
    "By its own loss the policy is worse than before training, and seldom comes back by itself: stop, and start again "
    "with a tenth of lr, more warmup_steps or a larger batch_size."
)


class Means(NamedTuple):
    """Mean loss and mean margin."""

    loss: float
    margin: float


def updates_at_start(reference: bool) -> int:
    """The number of first updates that show where a run without a first evaluation starts."""
    return 1 if reference else FIRST


def count_window(batch_size: float) -> int:
    """The number of updates that are looked at together."""
    return max(FEWEST_UPDATES, math.ceil(FEWEST_PAIRS / batch_size)) if batch_size > 0 else FEWEST_PAIRS


class Collapse(NamedTuple):
    """The means of so many updates."""

    loss: float
    margin: float
    updates: int


def find_collapse(losses: Sequence[float], margins: Sequence[float], start: Means, width: int) -> Collapse | None:
    """The means over the last updates, if they are those of a collapse: over the last `width` the loss is above twice
    its start by `SURE` standard errors, or of the last `FEW` half are above `HUGE` times it; and the mean margin is
    not above its start."""
    for n, is_too_high in ((FEW, _most_are_huge), (width, _mean_is_high)):
        loss, margin = (np.asarray(values[-n:], dtype=float) for values in (losses, margins))
        if len(loss) == n and margin.mean() <= start.margin and is_too_high(loss, start.loss):
            return Collapse(float(loss.mean()), float(margin.mean()), n)
    return None


def is_collapsed(evaluation: Means, start: Means) -> bool:
    """Whether an evaluation, which may have few pairs, shows a collapse."""
    return evaluation.loss > _times(start.loss, HUGE_EVALUATED) and evaluation.margin <= start.margin


def _times(loss: float, factor: float) -> float:
    """So many times the loss at the start, or that far above one near 0."""
    return loss + (factor - 1) * max(abs(loss), LEAST)


def _most_are_huge(losses: np.ndarray, start: float) -> bool:
    """By the median: one batch of a few that are far out makes the mean of these few uncertain."""
    return float(np.median(losses)) > _times(start, HUGE)


def _mean_is_high(losses: np.ndarray, start: float) -> bool:
    error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    return float(losses.mean()) - SURE * error > _times(start, 2)
