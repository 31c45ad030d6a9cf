"""What a reward margin is made of: chosen rising, rejected falling, and the lengths of both."""

from __future__ import annotations

import math
from typing import NamedTuple

from dpo.analysis.runs import Run


class MarginParts(NamedTuple):
    """Mean rewards, as docs/metrics.md has them: margin = chosen - rejected. NaN if lengths are not known."""

    split: str
    chosen: float
    rejected: float
    chosen_tokens: float
    rejected_tokens: float

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected

    @property
    def length(self) -> float:
        """What of the margin there is because one side is longer.

        With a change per token of a on the chosen side and b on the rejected one, and lengths m and n, the margin is
        a m - b n = (a - b) (m + n) / 2 + (a + b) / 2 (m - n), of which the second term is 0 for equal lengths.
        """
        if not (self.chosen_tokens > 0 and self.rejected_tokens > 0):
            return math.nan
        per_token = self.chosen / self.chosen_tokens + self.rejected / self.rejected_tokens
        return per_token / 2 * (self.chosen_tokens - self.rejected_tokens)


def margin_parts(run: Run) -> MarginParts | None:
    """Of the last evaluation after an update; without one, of the last training updates. None without pairs."""
    examples = run.eval.points("rewards_eval/chosen")[0]
    split = "eval" if len(examples) and examples[-1] > 0 else "train"
    chosen, rejected = (run.tail(split, f"rewards_{split}/{side}") for side in ("chosen", "rejected"))
    if not (math.isfinite(chosen) and math.isfinite(rejected)):
        return None
    counted = "test" if split == "eval" else "train"
    tokens = [run.count(f"{counted}.mean_{side}_tokens") for side in ("chosen", "rejected")]
    return MarginParts(split, chosen, rejected, *tokens)


class Change(NamedTuple):
    """Summed log-probabilities of chosen responses, at first and now; and how far the sides have parted since."""

    name: str  # the metric
    before: float
    after: float
    margin: float  # in log-probability, not reward

    @property
    def chosen(self) -> float:
        return self.after - self.before


def change_of(run: Run) -> Change | None:
    """From the first evaluation to the last; without two, from the first updates to the last."""
    for split, log in (("eval", run.eval), ("train", run.train)):
        sides = [log.points(f"logps_{split}/{side}")[1] for side in ("chosen", "rejected")]
        length = 1 if split == "eval" else max(10, len(sides[0]) // 10)
        if min(map(len, sides)) < 2 * length:
            continue
        (before, after), (low, high) = ((float(v[:length].mean()), float(v[-length:].mean())) for v in sides)
        return Change(f"logps_{split}/chosen", before, after, (after - before) - (high - low))
    return None
