"""Parts of a reward margin: chosen rising, rejected falling, and the lengths of both."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dpo.analysis.runs import Run, number

COLUMNS = (
    *("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected"),
    *("chosen_tokens", "rejected_tokens"),
)


class MarginParts(NamedTuple):
    """Contribution of each side to a margin = chosen - rejected; NaN where unknown.

    Mean rewards relative to the reference, or, under a loss without one, their change since the start."""

    split: str
    chosen: float
    rejected: float
    chosen_tokens: float = math.nan  # like `rejected_tokens`, NaN for rewards per token, to which length adds nothing
    rejected_tokens: float = math.nan
    length_by_pair: float = math.nan  # the part due to length, computed for each pair of the ledger
    since_start: bool = False  # not relative to a reference

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected

    @property
    def length(self) -> float:
        """Part of the margin due to different lengths, by pair if there is a ledger, else from means.

        With a change per token of a on the chosen side and b on the rejected one, and lengths m and n, the margin is
        a m - b n = (a - b) (m + n) / 2 + (a + b) / 2 (m - n), of which the second term is 0 for equal lengths.
        """
        if math.isfinite(self.length_by_pair):
            return self.length_by_pair
        if not (self.chosen_tokens > 0 and self.rejected_tokens > 0):
            return math.nan
        return float(_of_length(self.chosen, self.rejected, self.chosen_tokens, self.rejected_tokens))


def _of_length(chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any) -> Any:
    per_token = chosen / chosen_tokens + rejected / rejected_tokens
    return per_token / 2 * (chosen_tokens - rejected_tokens)


def length_by_pair(run: Run) -> float:
    """Mean part of the margin due to length, over the ledger's pairs of the last evaluation.

    NaN without a ledger, or if rewards are not beta times the change of log-probabilities."""
    beta, margin = number(run.setting("loss.beta")), run.eval.last("rewards_eval/margins")
    if run.ledger is None or not beta > 0:
        return math.nan
    import pyarrow.compute as pc  # here: most runs have no ledger

    table = run.ledger.filter(pc.equal(run.ledger["split"], "eval"))
    if not len(table):
        return math.nan
    updates = table["update"].to_numpy()
    c = {name: table[name].to_numpy()[updates == updates.max()] for name in COLUMNS}
    chosen, rejected = (beta * (c[f"policy_{side}"] - c[f"reference_{side}"]) for side in ("chosen", "rejected"))
    if not math.isclose(float((chosen - rejected).mean()), margin, rel_tol=0.01, abs_tol=1e-6):
        return math.nan
    return float(_of_length(chosen, rejected, c["chosen_tokens"], c["rejected_tokens"]).mean())


def margin_parts(run: Run) -> MarginParts | None:
    """Parts of the margin at the last evaluation, or, without one after an update, in the last training updates.

    None without pairs, and for a loss without a reference if there are no earlier values to compare with.
    """
    examples = run.eval.points("rewards_eval/chosen")[0]
    split = "eval" if len(examples) and examples[-1] > 0 else "train"
    names = [f"rewards_{split}/{side}" for side in ("chosen", "rejected")]
    chosen, rejected = (run.tail(split, name) for name in names)
    if not (math.isfinite(chosen) and math.isfinite(rejected)):
        return None
    if not run.has_reference:
        moved = _moves(run, "rewards")
        return moved and MarginParts(moved.split, moved.chosen, moved.rejected, since_start=True)
    if run.objective is None or run.objective.per_token:
        return MarginParts(split, chosen, rejected)
    counted = "test" if split == "eval" else "train"
    m, n = (run.count(f"{counted}.mean_{side}_tokens") for side in ("chosen", "rejected"))
    by_pair = length_by_pair(run) if split == "eval" else math.nan
    return MarginParts(split, chosen, rejected, m, n, by_pair)


class Change(NamedTuple):
    """Change of the means of chosen and rejected responses since the start."""

    split: str
    stem: str  # of the metrics: logps, rewards
    chosen_before: float
    chosen_after: float
    rejected: float  # its change

    @property
    def chosen(self) -> float:
        return self.chosen_after - self.chosen_before

    @property
    def margin(self) -> float:
        """Change of the difference of the two sides."""
        return self.chosen - self.rejected


def find_change(run: Run) -> Change | None:
    """Change of summed log-probabilities, in nats and not in rewards."""
    return _moves(run, "logps")


def _moves(run: Run, stem: str) -> Change | None:
    """Change from the first evaluation to the last; without two, from the first updates to the last."""
    for split, log in (("eval", run.eval), ("train", run.train)):
        sides = [log.points(f"{stem}_{split}/{side}")[1] for side in ("chosen", "rejected")]
        length = 1 if split == "eval" else max(10, len(sides[0]) // 10)
        if min(map(len, sides)) < 2 * length:
            continue
        (before, after), (low, high) = ((float(v[:length].mean()), float(v[-length:].mean())) for v in sides)
        return Change(split, stem, before, after, high - low)
    return None
