"""Spikes and collapse, found update by update.

A run warns of them while it trains, and its report names them; docs/metrics.md has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median, stdev
from typing import NamedTuple

SPIKE = 10.0  # times the median of up to 100 values before; at least 20 are needed
FAINT = 0.01  # of the mean of the first 20 values: a value below that is not a spike
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


def updates_at_start(reference: bool) -> int:
    """Number of updates that stand for an evaluation before the first."""
    return 1 if reference else FIRST


class Means(NamedTuple):
    """Mean loss and mean margin."""

    loss: float
    margin: float


class Course:
    """A run's start and its last losses, margins and gradient norms.

    Where policy and reference are equal, every loss has the value of having learned nothing (docs/metrics.md). The
    first evaluation or update of a run shows that value under all of its options: later losses are compared with it.
    """

    def __init__(self, batch_size: float, start: Means | None = None) -> None:
        self.start = start
        self.first: dict[str, float] = {}  # means of the first 20 values
        self._before: dict[str, deque[float]] = {name: deque(maxlen=100) for name in ("grad_norm", "loss/train")}
        self._width = max(FEWEST_UPDATES, math.ceil(FEWEST_PAIRS / batch_size)) if batch_size > 0 else FEWEST_PAIRS
        self._losses, self._margins = deque[float](maxlen=self._width), deque[float](maxlen=self._width)

    def find_spike(self, name: str, value: float) -> float | None:
        """Add a gradient norm or loss.

        Returns its ratio to the median before if it is a spike.
        """
        before, found = self._before[name], None
        if len(before) == 20:
            self.first.setdefault(name, fmean(before))
        # where hardly any gradient is left an outlier is harmless; where nearly all pairs are learned, so is one that
        # is not
        is_learned = name == "loss/train" and self.start is not None and value <= self.start.loss
        if len(before) >= 20 and value > max(SPIKE * min(before), FAINT * self.first[name]) and not is_learned:
            usual = median(before)  # costs more than all the rest, and no median is below the least
            found = value / usual if value > SPIKE * usual > 0 else None
        if math.isfinite(value):
            before.append(value)
        return found

    def take_start(self, n: int) -> None:
        """Take the first `n` updates as the start, unless it is known."""
        if self.start is None and len(self._losses) == n:
            self.start = Means(fmean(self._losses), fmean(self._margins))

    def find_collapse(self, loss: float, margin: float) -> tuple[Means, int] | None:
        """Add an update.

        Returns the means over the last updates, and their number, if they show a collapse.

        In a collapse the mean loss of a window is above twice its start by `SURE` standard errors, or half of the last
        `FEW` losses are above `HUGE` times it; and the mean margin is not above its start.
        """
        if not (math.isfinite(loss) and math.isfinite(margin)):
            return None
        self._losses.append(loss)
        self._margins.append(margin)
        if self.start is None:
            return None
        for n in (FEW, self._width):
            losses, margins = list(self._losses)[-n:], list(self._margins)[-n:]
            if len(losses) < n or sum(margins) > n * self.start.margin:  # as nearly always
                continue
            if n == FEW:  # the mean of a few losses is uncertain if one is an outlier
                is_too_high = median(losses) > self._times_start(HUGE)
            else:
                excess = fmean(losses) - self._times_start(2)
                is_too_high = excess > 0 and excess > SURE * stdev(losses) / math.sqrt(n)
            if is_too_high:
                return Means(fmean(losses), fmean(margins)), n
        return None

    def is_collapsed(self, evaluation: Means) -> bool:
        """Return whether an evaluation shows a collapse, even one of few pairs."""
        start = self.start
        return (
            start is not None
            and evaluation.loss > self._times_start(HUGE_EVALUATED)
            and evaluation.margin <= start.margin
        )

    def _times_start(self, factor: float) -> float:
        """`factor` times the start's loss, or as far above one near 0."""
        assert self.start is not None
        return self.start.loss + (factor - 1) * max(abs(self.start.loss), LEAST)
