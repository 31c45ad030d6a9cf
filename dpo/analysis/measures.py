"""Numbers derived from a run: intervals, its start, margins, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.runs import Log, Run, first_tenth, number

USEFUL = 0.55  # below this accuracy nothing useful was learned
SIDES = ("chosen", "rejected")
PAIR_COLUMNS = (  # columns of the ledger that `evaluated_pairs` reads
    "loss", "margin", "chosen_tokens", "rejected_tokens",
    "policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected",
)  # fmt: skip
Z_95, Z_98 = 1.959964, 2.326348  # half the width of a 95 % and a 98 % interval, in standard errors
UPDATES_AT_START = 10  # updates averaged as the start of a loss without a reference: a single one says too little
COLLAPSED_UPDATES = ((16, 5.0), (50, 3.0))  # last updates, and the multiple of the start's loss that is too high
COLLAPSED_EVALUATION = 20.0  # the same multiple for an evaluation, whose pairs may be few
LEAST_START_LOSS = 0.5  # a multiple of a start's loss near 0 would be near 0 too, so this is multiplied instead
COLLAPSED = (
    "By its own loss the policy is worse than before training, and seldom recovers by itself: stop, and start again "
    "with a tenth of lr, more warmup_steps or a larger batch_size."
)


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share measured on n examples.

    It is valid also for small n and near 0 and 1.
    """
    share = min(max(share, 0.0), 1.0)
    middle = share + Z_95**2 / (2 * n)
    half_width = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    scale = 1 + Z_95**2 / n
    return (middle - half_width) / scale, (middle + half_width) / scale


def is_inconclusive(accuracy: float, n: float) -> bool:
    """Return whether an accuracy's interval includes both chance and USEFUL."""
    low, high = wilson_interval(accuracy, n)
    return low <= 0.5 and high >= USEFUL


def accuracy_error(accuracy: float, n: float) -> float:
    """Standard error of an accuracy measured on n examples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / n) if n > 0 else 0.0


def best_of_many_quantile(n: int) -> float:
    """Standard errors by which the best of n may lead by chance.

    If n values differ from another value by chance alone, then with a probability of at least 0.95 none of them is
    better than it by more than this many standard errors of the difference (Bonferroni's correction).
    """
    return NormalDist().inv_cdf(1 - 0.05 / max(n, 1))


def is_below(share: float, limit: float, n: float) -> bool:
    """Return whether a share of n examples is clearly below a limit."""
    return n > 0 and wilson_interval(share, n)[1] < limit


def is_above(share: float, limit: float, n: float) -> bool:
    """Return whether a share of n examples is clearly above a limit."""
    return n > 0 and wilson_interval(share, n)[0] > limit


def mean_error(values: np.ndarray) -> float:
    """Standard error of the mean of successive values, which may be correlated.

    If neighbours have a correlation c, values at distance k are taken to have c^k. This multiplies the variance of the
    mean by (1 + c) / (1 - c).
    """
    n, centered = len(values), values - values.mean()
    sum_of_squares = float(centered @ centered)
    correlation = float(centered[1:] @ centered[:-1]) / sum_of_squares if sum_of_squares > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.95)
    return math.sqrt(sum_of_squares / (n - 1) / n * (1 + correlation) / (1 - correlation))


def change_and_bound(first: np.ndarray, last: np.ndarray) -> tuple[float, float]:
    """Change of a mean, and half its 98 % interval.

    `first` and `last` have successive values, which may be correlated.
    """
    error = math.hypot(mean_error(first), mean_error(last))
    return float(last.mean() - first.mean()), student_quantile(min(len(first), len(last)) - 1) * error


def mean_and_bound(differences: np.ndarray) -> tuple[float, float]:
    """Mean of independent differences, and half its 98 % interval.

    A 95 % interval would be too narrow: with few samples of skewed lengths it misses the mean in slightly more than one
    run of twenty.
    """
    n = len(differences)
    standard_error = float(differences.std(ddof=1)) / math.sqrt(n)
    return float(differences.mean()), student_quantile(n - 1) * standard_error


def student_quantile(degrees: int) -> float:
    """99 % quantile of Student's t: half a 98 % interval.

    The expansion by Cornish and Fisher is right within 1 % from 5 degrees of freedom on.
    """
    z = Z_98
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def binomial_tail(heads: int, tosses: int) -> float:
    """Probability of at least `heads` heads in `tosses` of a fair coin."""
    return sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2**tosses


def n_evaluated(run: Run, what: str = "examples") -> float:
    """Number of different examples, or prompts, in an evaluation."""
    n_asked, n_available = number(run.setting("n_eval_examples")), run.count(f"test.{what}")
    n = n_asked if n_asked > 0 else 256.0  # the default, if the config is lost
    return min(n, n_available) if n_available > 0 else n


def n_effective(run: Run) -> float:
    """Number of evaluated examples or, if they have weights w, fewer.

    A weighted mean varies as much as a plain mean of (sum w)^2 / sum w^2 examples, the preflight's effective examples.
    """
    effective, available = run.count("test.effective_examples"), run.count("test.examples")
    # all examples count if the counts are lost
    return n_evaluated(run) * (effective / available if effective > 0 and available > 0 else 1)


def evaluation_loss_error(run: Run) -> float:
    """Standard error of `loss/eval`; 0 with fewer than 20 updates.

    The standard deviation of an example's loss is estimated from the mean losses of training batches, in the tenth of
    the run where it is largest: towards the end, training examples may be learned, and their losses nearly equal.
    """
    losses = run.train.points("loss/train")[1]
    if len(losses) < 20:
        return 0.0
    batch_size = max(1.0, number(run.setting("batch_size", 1)))
    batch_deviation = max(float(tenth.std(ddof=1)) for tenth in np.array_split(losses, 10))
    example_deviation = batch_deviation * math.sqrt(batch_size)
    return example_deviation / math.sqrt(n_effective(run))


class Means(NamedTuple):
    """Mean loss and margin."""

    loss: float
    margin: float


def is_collapsed(start: Means, losses: Sequence[float], margins: Sequence[float], factor: float) -> bool:
    """Return whether the policy's loss is far above the start's.

    Half of the losses are above `factor` times the start's, which counts as at least LEAST_START_LOSS, while the mean
    margin, which grows in nearly all runs, is not above the start's.
    """
    too_high = start.loss + (factor - 1) * max(abs(start.loss), LEAST_START_LOSS)  # above a negative start, too
    return median(losses) > too_high and fmean(margins) <= start.margin


def find_start(run: Run) -> Means | None:
    """Find the mean loss and margin before training.

    They come from an evaluation before the first update or, without one, from the first updates. None if neither was
    logged.
    """
    if len(run.eval) and run.eval.updates[0] == 0:
        start = _average_first_rows(run.eval, "eval", 1)
        if start is not None:
            return start
    n = 1 if run.has_reference else UPDATES_AT_START
    is_logged = len(run.train) >= n and run.train.updates[n - 1] == n  # a log may begin later
    return _average_first_rows(run.train, "train", n) if is_logged else None


def _average_first_rows(log: Log, split: str, n: int) -> Means | None:
    """Average the first rows' losses and margins; None if any is missing."""
    means = Means(float(log[f"loss/{split}"][:n].mean()), float(log[f"rewards_{split}/margins"][:n].mean()))
    return means if all(map(math.isfinite, means)) else None


def mean_near(run: Run, name: str, examples: float) -> float:
    """Mean of a training metric over the updates just before `examples`.

    The mean is over as many updates as a tenth of the run or, if no update is that early, over the first tenth.
    """
    examples_trained, values = run.train.points(name)
    tenth = max(10, len(values) // 10)
    nearest = values[examples_trained <= examples][-tenth:]
    if not len(nearest):
        nearest = first_tenth(values)
    return float(nearest.mean()) if len(nearest) else math.nan


class Change(NamedTuple):
    """Changes of the means of chosen and rejected since the start."""

    split: str
    chosen_before: float
    chosen_after: float
    rejected: float  # the change, as in `chosen` and `margin`

    @property
    def chosen(self) -> float:
        return self.chosen_after - self.chosen_before

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def find_change(run: Run, stem: str = "logps") -> Change | None:
    """Find the change of the metrics STEM_SPLIT/chosen and STEM_SPLIT/rejected.

    The last evaluation is compared with the first or, if there are fewer than two, the last updates with the first.
    """
    for split, log in (("eval", run.eval), ("train", run.train)):
        chosen, rejected = (log.points(f"{stem}_{split}/{side}")[1] for side in SIDES)
        n_averaged = 1 if split == "eval" else max(10, len(chosen) // 10)  # single updates vary more
        if min(len(chosen), len(rejected)) < 2 * n_averaged:
            continue
        chosen_before, rejected_before = (float(values[:n_averaged].mean()) for values in (chosen, rejected))
        chosen_after, rejected_after = (float(values[-n_averaged:].mean()) for values in (chosen, rejected))
        return Change(split, chosen_before, chosen_after, rejected_after - rejected_before)
    return None


class MarginParts(NamedTuple):
    """Mean rewards of chosen and rejected, whose difference is the margin."""

    chosen: float
    rejected: float
    since_start: bool = False  # the loss has no reference, so the rewards are changes since the start
    chosen_tokens: float = math.nan
    rejected_tokens: float = math.nan
    length: float = math.nan  # part of the margin due to length; NaN if unknown, or if rewards are per token
    by_pair: bool = False  # `length` is a mean over the ledger's pairs, not computed from the four means

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def margin_parts(run: Run) -> MarginParts | None:
    """Split the margin of the last evaluation or updates into parts.

    None without pairs, and for a reward model, whose rewards are no log-probabilities. None also for a loss without a
    reference if there are no earlier values to compare with.
    """
    if not run.has_pairs or run.trains_reward_model:
        return None
    examples, _ = run.eval.points("rewards_eval/chosen")
    is_evaluated = len(examples) > 0 and examples[-1] > 0  # after an update
    split = "eval" if is_evaluated else "train"
    chosen, rejected = (run.tail(split, f"rewards_{split}/{side}") for side in SIDES)
    if not (math.isfinite(chosen) and math.isfinite(rejected)):
        return None
    if not run.has_reference:
        change = find_change(run, "rewards")
        return None if change is None else MarginParts(change.chosen, change.rejected, since_start=True)
    if run.is_per_token:
        return MarginParts(chosen, rejected)
    data_split = "test" if split == "eval" else "train"
    chosen_tokens, rejected_tokens = (run.count(f"{data_split}.mean_{side}_tokens") for side in SIDES)
    length = length_by_pair(run) if split == "eval" else math.nan
    by_pair = math.isfinite(length)
    if not by_pair and chosen_tokens > 0 and rejected_tokens > 0:
        length = float(length_part(chosen, rejected, chosen_tokens, rejected_tokens))
    return MarginParts(
        chosen,
        rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        length=length,
        by_pair=by_pair,
    )


def length_part(chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any) -> Any:
    """Part of a margin that is due to length.

    With a reward per token of a for chosen and b for rejected, and lengths m and n, the margin is
    a m - b n = (a - b) (m + n) / 2 + (a + b) / 2 (m - n). The result is its second term, the mean reward per token
    times the extra tokens, which is 0 for equal lengths. Takes numbers, or arrays of the pairs.
    """
    mean_per_token = (chosen / chosen_tokens + rejected / rejected_tokens) / 2
    return mean_per_token * (chosen_tokens - rejected_tokens)


def length_by_pair(run: Run) -> float:
    """Average `length_part` over the ledger's pairs at the last evaluation.

    NaN without a ledger, or if rewards are not beta times the log-ratio of policy and reference.
    """
    beta, logged_margin = number(run.setting("loss.beta")), run.eval.last("rewards_eval/margins")
    pairs = evaluated_pairs(run, run.eval.updates[-1])
    if pairs is None or not beta > 0:
        return math.nan
    chosen, rejected = (beta * (pairs[f"policy_{side}"] - pairs[f"reference_{side}"]) for side in SIDES)  # (pairs,)
    if not math.isclose((chosen - rejected).mean(), logged_margin, rel_tol=0.01, abs_tol=1e-6):
        return math.nan
    return float(length_part(chosen, rejected, pairs["chosen_tokens"], pairs["rejected_tokens"]).mean())


def evaluated_pairs(run: Run, n_updates: float) -> dict[str, np.ndarray] | None:
    """Columns of the ledger's pairs in the evaluation after `n_updates`, (pairs,) each.

    `right` is 1 for a margin above 0, else 0. The pairs are sorted by example, so that evaluations of the same pairs
    can be compared pair by pair. None without a ledger or without such rows.
    """
    if run.ledger is None:
        return None
    import pyarrow.compute as pc  # imported here, as most runs have no ledger

    table = run.ledger.filter(pc.and_(pc.equal(run.ledger["split"], "eval"), pc.equal(run.ledger["update"], n_updates)))
    order = pc.sort_indices(table["example"].cast("string")).to_numpy()
    pairs = {name: table[name].to_numpy()[order] for name in PAIR_COLUMNS}
    if not len(order) or not np.isfinite(pairs["margin"]).all():
        return None
    return pairs | {"right": (pairs["margin"] > 0).astype(float)}


def compare_evaluations(run: Run, name: str, first: float, last: float) -> tuple[float, float] | None:
    """Mean change per pair between two evaluations, and its standard error.

    `name` is a column of `evaluated_pairs`, `first` and `last` are numbers of updates. None unless the ledger has both
    evaluations, of the same pairs.
    """
    before, after = evaluated_pairs(run, first), evaluated_pairs(run, last)
    if before is None or after is None:
        return None
    n_before, n = len(before[name]), len(after[name])
    if n != n_before or n < 2:
        return None
    differences = after[name] - before[name]
    return float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(n)


class Cost(NamedTuple):
    """Time, tokens and devices of a run; NaN where unknown."""

    updating_secs: float  # in updates alone, without loading, evaluating, sampling and saving
    elapsed_secs: float  # from start to end or until now, without pauses between; NaN if the run crashed
    tokens: float
    devices: float
    kind: str  # GPU or CPU

    @property
    def secs(self) -> float:
        """Elapsed time or, if that is unknown, time in updates."""
        return float(np.nanmax([self.updating_secs, self.elapsed_secs, 0.0]))

    @property
    def updates_alone(self) -> bool:
        """Return whether `secs` is the time in updates alone."""
        return not self.elapsed_secs >= self.updating_secs  # also if the elapsed time is NaN

    @property
    def device_hours(self) -> float:
        return self.secs * self.devices / 3600


def measure_cost(run: Run) -> Cost:
    gpus, processes = run.env.get("gpus"), number(run.env.get("processes"))
    if isinstance(gpus, list) and gpus:
        kind = "GPU"
        devices = processes if processes > 1 else float(len(gpus))  # a single process uses all GPUs that it sees
    else:
        kind = "CPU"
        devices = number(run.env.get("cpus"))
    started = _parse_time(run.env.get("started"))
    ended = datetime.now(UTC) if run.state.word == "training" else _parse_time(run.env.get("ended"))
    elapsed = max(0.0, (ended - started).total_seconds()) if started and ended else math.nan
    elapsed += number(run.env.get("seconds_before", 0))  # before the last resume
    seconds = update_seconds(run)
    tokens = seconds * run.train["tokens_per_second"]
    return Cost(_sum_known(seconds), elapsed, _sum_known(tokens), devices, kind)


def _sum_known(values: np.ndarray) -> float:
    """Sum the values that are numbers; NaN if there are none."""
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def update_seconds(run: Run) -> np.ndarray:
    """Seconds that each update took, (updates,); NaN where unknown."""
    examples = np.diff(run.train.examples, prepend=0.0)
    speed = run.train["examples_per_second"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(speed > 0, examples / speed, np.nan)


def _parse_time(text: Any) -> datetime | None:
    """Parse a time with its zone; None for anything else."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else None
