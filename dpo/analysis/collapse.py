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
LEAST = 0.5  # by which a loss is far above a start near 0
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
    """How many first updates show the start of a run that was not evaluated before them."""
    return 1 if reference else FIRST


def window_of(batch_size: float) -> int:
    """How many updates are looked at together."""
    return max(FEWEST_UPDATES, math.ceil(FEWEST_PAIRS / batch_size)) if batch_size > 0 else FEWEST_PAIRS


def find_collapse(losses: Sequence[float], margins: Sequence[float], start: Means) -> Means | None:
    """The means over a window of updates, if they are those of a collapse: the loss is above twice its start by `SURE`
    standard errors, while the margin is not above its start by more than 2."""
    loss, loss_error = _mean(losses)
    margin, margin_error = _mean(margins)
    too_high = start.loss + max(abs(start.loss), LEAST)
    if loss - SURE * loss_error > too_high and margin - 2 * margin_error <= start.margin:
        return Means(loss, margin)
    return None


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """A mean and its standard error."""
    array = np.asarray(values, dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) / math.sqrt(len(array))
