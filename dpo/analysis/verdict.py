"""The verdict on a run: did the model change, is it better.

The run's terminal ends with them, and its report begins with them. docs/metrics.md has the rules.
"""

from __future__ import annotations

import math

from dpo.analysis.measures import find_change, n_effective, n_evaluated, wilson_interval
from dpo.analysis.rules import EVAL_ACCURACY
from dpo.analysis.runs import Run, number
from dpo.numbers import count, percent, signed

# spacing of numbers near 1 in each dtype: smaller changes of a log-probability may be rounding
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALL_CHANGE = 0.01  # nats: a token's probability changes by a hundredth of itself
ENOUGH_PAIRS = 100  # tell an accuracy of 0.6 from 0.5
FEWEST_PAIRS = 30  # fewer are too few whatever they say


def describe_change(run: Run) -> str:
    """Say how held-out responses' likelihood changed; "" if unknown."""
    changes, dtypes = _find_changes_per_token(run)
    if not changes:
        return ""
    rounding = max((ROUNDING.get(str(dtype), 0.0) for dtype in dtypes), default=0.0)
    shown = " and ".join(f"{side} by {signed(change)}" for side, change in changes.items())
    facts = f"the log-probability of held-out responses moved, per token: {shown}"
    largest = max(map(abs, changes.values()))
    if largest <= rounding:
        return f"The model did not change beyond rounding: {facts}."
    if largest < SMALL_CHANGE:
        return f"The model hardly changed: {facts}; its answers are probably as before."
    return f"The model changed: {facts}."


def _find_changes_per_token(run: Run) -> tuple[dict[str, float], list[object]]:
    """Mean changes by side, and the dtypes whose rounding they have.

    They are since the evaluation before the first update or, without one, against the reference.
    """
    config = run.config.get("model")
    model = config if isinstance(config, dict) else {}
    dtypes: list[object] = [model.get("autocast"), model.get("policy_dtype")]
    lengths = {side: run.count(f"test.mean_{side}_tokens") for side in ("chosen", "rejected")}
    changes: dict[str, float] = {}
    change, beta = find_change(run), number(run.setting("loss.beta"))
    if change is not None and change.split == "eval" and run.eval.updates[0] == 0 and run.has_pairs:
        changes = {"chosen": change.chosen, "rejected": change.rejected}
    elif len(run.eval) > 1 and run.eval.updates[0] == 0:
        values = run.eval.points("logps_eval/chosen")[1]
        changes = {"chosen": float(values[-1] - values[0])} if len(values) > 1 else {}
    elif run.has_reference and beta > 0 and run.setting("loss.f_divergence", "reverse_kl") == "reverse_kl":
        dtypes.append(model.get("reference_dtype"))
        changes = {side: run.eval.last(f"rewards_eval/{side}") / beta for side in lengths}
        if run.is_per_token:
            lengths = dict.fromkeys(lengths, 1.0)
    per_token = {side: change / lengths[side] for side, change in changes.items() if lengths[side] > 0}
    return {side: change for side, change in per_token.items() if math.isfinite(change)}, dtypes


def describe_accuracy(run: Run) -> str:
    """Say what the held-out accuracy proves; "" without one."""
    accuracy = run.eval.last(EVAL_ACCURACY)
    examples, values = run.eval.points(EVAL_ACCURACY)
    if not len(examples) or examples[-1] == 0:
        return ""
    n_pairs, n = n_evaluated(run), n_effective(run)
    n_prompts, n_examples = run.count("test.prompts"), run.count("test.examples")
    if n_examples > n_prompts > 0:  # pairs of one prompt are alike, so that a prompt counts once
        n *= n_prompts / n_examples
    low, high = exact_interval(accuracy, n)
    interval = f"95 % interval {percent(low)} to {percent(high)}"
    right = f"{accuracy * n_pairs:,.0f} of {count(n_pairs, 'held-out pair')} are ranked right ({interval})"
    if not run.has_reference and len(values) > 1 and examples[0] == 0:
        right += f", before training {percent(values[0])} were"
    if n < FEWEST_PAIRS or (low <= 0.5 <= high and n < ENOUGH_PAIRS):
        prompts = "" if n == n_pairs else f" of {count(round(n), 'prompt')}"
        are = "is" if n_pairs == 1 else "are"
        return f"{right}: {count(n_pairs, 'pair')}{prompts} {are} too few to judge; about {ENOUGH_PAIRS} would do."
    if low > 0.5:
        return f"{right}: better than by chance."
    return f"{right}: {'worse than' if high < 0.5 else 'no better than'} by chance, as far as these pairs tell."


def exact_interval(share: float, n: float) -> tuple[float, float]:
    """Compute Clopper and Pearson's 95 % interval, or Wilson's of many.

    Wilson's is too narrow for a few pairs that are all ranked right.
    """
    n_whole = round(n)
    if n_whole > 300 or n_whole < 1:
        return wilson_interval(share, max(n, 1))
    right = round(share * n_whole)

    def tail(p: float, first: int) -> float:
        """Probability that `first` or more pairs are right."""
        return sum(math.comb(n_whole, k) * p**k * (1 - p) ** (n_whole - k) for k in range(first, n_whole + 1))

    def solve(first: int, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if tail(middle, first) < probability else (low, middle)
        return low

    return (solve(right, 0.025) if right else 0.0), (solve(right + 1, 0.975) if right < n_whole else 1.0)
