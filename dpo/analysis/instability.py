"""Detection of spikes and collapse, update by update.

A run warns of them while it trains, and its report names them; docs/metrics.md has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

# a spike is above SPIKE_RATIO times the median of the last N_TYPICAL values, and above LARGEST_RATIO times the largest
# value before it, other spikes aside. The second condition is for late updates: once most pairs are learned, a small
# batch has the loss of its worst pair, and many values are far above the median. With an exponential tail, a value
# exceeds 3 times the largest of the n values before it with a probability of 6 / ((n + 1) (n + 2) (n + 3))
SPIKE_RATIO, LARGEST_RATIO = 10.0, 3.0
N_TYPICAL = 100  # values whose median is the typical one
FIRST_BLOCK = 100  # values in the first block of `RecentLargest`
FEWEST_VALUES = 20  # values before the first possible spike; their mean sets the scale for FAINT
FAINT = 0.01  # a value below this fraction of the mean of the first 20 values is not a spike

# collapse, in a short window of updates and in a long one
SHORT_WINDOW = 16  # updates
FEWEST_UPDATES, FEWEST_PAIRS = 50, 256  # the long window has at least this many of each
COLLAPSE_ERRORS = 4.0  # standard errors by which the mean loss of the long window is too high
HUGE, HUGE_EVALUATED = 5.0, 20.0  # multiples of the start's loss that are huge in an update, and in an evaluation
LEAST_START_LOSS = 0.5  # a multiple of a start's loss near 0 would be near 0 too, so this is multiplied instead
UPDATES_AT_START = 10  # updates averaged as the start of a loss without a reference: a single one says too little

WHAT_TO_TRY = (
    "By its own loss the policy is worse than before training, and seldom recovers by itself: stop, and start again "
    "with a tenth of lr, more warmup_steps or a larger batch_size."
)


def updates_at_start(has_reference: bool) -> int:
    """Number of first updates that stand for an evaluation before training."""
    return 1 if has_reference else UPDATES_AT_START


class Means(NamedTuple):
    """Mean loss and mean margin."""

    loss: float
    margin: float


@dataclass
class RecentLargest:
    """Largest of the values added, early values aside.

    Losses and gradients may be large at the start. The values are in blocks: the first has `FIRST_BLOCK`, each later
    one is as long as all before it. Values in the current and the previous block count: at least the later half of all.
    """

    value: float = -math.inf
    largest_in_block: float = -math.inf
    n: int = 0  # number of values added
    block_end: int = FIRST_BLOCK  # `n` at the end of the current block

    def add(self, value: float) -> None:
        self.value = max(self.value, value)
        self.largest_in_block = max(self.largest_in_block, value)
        self.n += 1
        if self.n == self.block_end:
            self.value, self.largest_in_block = self.largest_in_block, -math.inf
            self.block_end = 2 * self.n


class InstabilityDetector:
    """Detector of spikes and collapse in a run's logged values.

    While policy and reference are equal, a loss has the value of a policy that learned nothing (docs/metrics.md). The
    first evaluation or update shows this value, whatever the loss's options: later losses are compared with it.
    """

    def __init__(self, batch_size: float, start: Means | None = None) -> None:
        self.start = start
        self.first: dict[str, float] = {}  # mean of each metric's first 20 values
        self.largest: dict[str, RecentLargest] = {}  # by metric; spikes are not added
        self._earlier: dict[str, deque[float]] = {name: deque(maxlen=N_TYPICAL) for name in ("grad_norm", "loss/train")}
        updates_with_fewest_pairs = math.ceil(FEWEST_PAIRS / batch_size) if batch_size > 0 else FEWEST_PAIRS
        self._long_window = max(FEWEST_UPDATES, updates_with_fewest_pairs)
        self._losses = deque[float](maxlen=self._long_window)
        self._margins = deque[float](maxlen=self._long_window)

    def state_dict(self) -> dict[str, Any]:
        """The values with which later ones are compared."""
        return {
            "start": None if self.start is None else list(self.start),
            "first": dict(self.first),
            "largest": {name: asdict(largest) for name, largest in self.largest.items()},
            "earlier": {name: list(values) for name, values in self._earlier.items()},
            "losses": list(self._losses),
            "margins": list(self._margins),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = Means(*state["start"]) if state["start"] else None
        self.first = dict(state["first"])
        self.largest = {name: RecentLargest(**largest) for name, largest in state["largest"].items()}
        self._earlier = {name: deque(values, maxlen=N_TYPICAL) for name, values in state["earlier"].items()}
        self._losses = deque(state["losses"], maxlen=self._long_window)
        self._margins = deque(state["margins"], maxlen=self._long_window)

    def find_spike(self, name: str, value: float) -> float | None:
        """Add a gradient norm or loss; return its ratio if it spikes.

        The ratio is to the median of the values before; None without a spike.
        """
        earlier = self._earlier[name]
        if len(earlier) == FEWEST_VALUES:
            self.first.setdefault(name, fmean(earlier))
        ratio = self._measure_spike(name, value) if len(earlier) >= FEWEST_VALUES else None
        if math.isfinite(value):
            earlier.append(value)
            if ratio is None:
                self.largest.setdefault(name, RecentLargest()).add(value)
        return ratio

    def _measure_spike(self, name: str, value: float) -> float | None:
        # a loss no higher than at the start is harmless
        if name == "loss/train" and self.start is not None and value <= self.start.loss:
            return None
        earlier = self._earlier[name]
        if not value > max(LARGEST_RATIO * self.largest[name].value, FAINT * self.first[name]):
            return None
        typical = median(earlier)
        return value / typical if value > SPIKE_RATIO * typical > 0 else None

    def take_start(self, n: int) -> None:
        """Take the first `n` updates as the start, unless already known."""
        if self.start is None and len(self._losses) == n:
            self.start = Means(fmean(self._losses), fmean(self._margins))

    def find_collapse(self, loss: float, margin: float) -> tuple[Means, int] | None:
        """Add an update; return a collapsed window's means and number of updates.

        In a collapsed window the mean margin is not above the start's, and losses are too high: in the long window,
        their mean is above twice the start's loss by `COLLAPSE_ERRORS` standard errors; in the short window, half of
        them are above `HUGE` times the start's loss.
        """
        if not (math.isfinite(loss) and math.isfinite(margin)):
            return None
        self._losses.append(loss)
        self._margins.append(margin)
        if self.start is None:
            return None
        for n in (SHORT_WINDOW, self._long_window):
            losses, margins = list(self._losses)[-n:], list(self._margins)[-n:]
            if len(losses) < n or sum(margins) > n * self.start.margin:  # margins grow in nearly all runs
                continue
            if n == SHORT_WINDOW:  # a single outlier moves the mean of a few losses, but not their median
                is_too_high = median(losses) > self._multiply_start_loss(HUGE)
            else:
                excess = fmean(losses) - self._multiply_start_loss(2)
                is_too_high = excess > 0 and excess > COLLAPSE_ERRORS * stdev(losses) / math.sqrt(n)
            if is_too_high:
                return Means(fmean(losses), fmean(margins)), n
        return None

    def is_collapsed(self, evaluation: Means) -> bool:
        """Return whether an evaluation, even of few pairs, shows a collapse."""
        if self.start is None or evaluation.margin > self.start.margin:
            return False
        return evaluation.loss > self._multiply_start_loss(HUGE_EVALUATED)

    def _multiply_start_loss(self, factor: float) -> float:
        """Multiply the start's loss; its size counts as at least LEAST_START_LOSS.

        With a factor above 1 the result is above the start's loss, even a negative one.
        """
        assert self.start is not None
        return self.start.loss + (factor - 1) * max(abs(self.start.loss), LEAST_START_LOSS)
