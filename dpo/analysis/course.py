"""Spikes and collapse, found update by update.

A run warns of them while it trains, and its report names them; docs/metrics.md has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median, stdev
from typing import NamedTuple

SPIKE = 10.0  # a spike is above so many times the median of the 100 values before, or of at least 20
FAINT = 0.01  # a value below this fraction of the mean of the first 20 values is not a spike
FEWEST_UPDATES, FEWEST_PAIRS = 50, 256  # the window of a collapse holds at least so many
SURE = 4.0  # standard errors by which the mean loss of a window is too high
FEW = 16  # updates that show a collapse sooner than a window, if half of their losses are huge
HUGE, HUGE_EVALUATED = 5.0, 20.0  # times the start's loss: a huge loss of an update; of an evaluation
LEAST = 0.5  # a start's loss nearer to 0 than this counts as this large, where it is multiplied
FIRST = 10  # updates averaged as the start of a loss without a reference, whose value at the start is not known

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

        If it is a spike, returns its ratio to the median of the values before.
        """
        before, ratio = self._before[name], None
        if len(before) == 20:
            self.first.setdefault(name, fmean(before))
        # two kinds of outliers are harmless: a gradient where hardly any is left (FAINT), and where nearly all pairs
        # are learned, the loss of a pair that is not, as long as it is no higher than at the start
        is_harmless = name == "loss/train" and self.start is not None and value <= self.start.loss
        # no median is below the minimum, so this cheap test comes before the median
        if len(before) >= 20 and value > max(SPIKE * min(before), FAINT * self.first[name]) and not is_harmless:
            usual = median(before)
            ratio = value / usual if value > SPIKE * usual > 0 else None
        if math.isfinite(value):
            before.append(value)
        return ratio

    def take_start(self, n: int) -> None:
        """Take the first `n` updates as the start, unless it is known."""
        if self.start is None and len(self._losses) == n:
            self.start = Means(fmean(self._losses), fmean(self._margins))

    def find_collapse(self, loss: float, margin: float) -> tuple[Means, int] | None:
        """Add an update.

        If the last updates show a collapse, returns their means and their number.

        In a collapse the mean margin is not above its start. Also, the mean loss of a window is above twice the start's
        by `SURE` standard errors, or half of the last `FEW` losses are above `HUGE` times the start's.
        """
        if not (math.isfinite(loss) and math.isfinite(margin)):
            return None
        self._losses.append(loss)
        self._margins.append(margin)
        if self.start is None:
            return None
        for n in (FEW, self._width):
            losses, margins = list(self._losses)[-n:], list(self._margins)[-n:]
            if len(losses) < n or sum(margins) > n * self.start.margin:  # margins grow in nearly all runs
                continue
            if n == FEW:  # a single outlier moves the mean of a few losses, but not their median
                is_too_high = median(losses) > self._times_start(HUGE)
            else:
                excess = fmean(losses) - self._times_start(2)
                is_too_high = excess > 0 and excess > SURE * stdev(losses) / math.sqrt(n)
            if is_too_high:
                return Means(fmean(losses), fmean(margins)), n
        return None

    def is_collapsed(self, evaluation: Means) -> bool:
        """Return whether an evaluation shows a collapse, even one of few pairs."""
        if self.start is None or evaluation.margin > self.start.margin:
            return False
        return evaluation.loss > self._times_start(HUGE_EVALUATED)

    def _times_start(self, factor: float) -> float:
        """`factor` times the start's loss, which counts as `LEAST` at least."""
        assert self.start is not None
        return self.start.loss + (factor - 1) * max(abs(self.start.loss), LEAST)
