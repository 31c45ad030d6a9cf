"""Numbers derived from a run: chance, collapse, the course of a metric, spikes, the parts of a margin, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dpo.analysis.runs import Run, number
from dpo.numbers import figure, percent, signed

USEFUL = 0.55  # below this accuracy nothing useful was learned
SPIKE = 10.0  # times the median of up to 100 values before; at least 20 are needed
FAINT = 0.01  # of the mean of the first 20 values: a value below that is not a spike
LEDGER_COLUMNS = (
    *("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected"),
    *("chosen_tokens", "rejected_tokens"),
)
Z, Z98 = 1.959964, 2.326348  # standard errors of a 95 % and a 98 % interval


# --- chance -----------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    low: float
    high: float


def wilson_interval(share: float, n: float) -> Interval:
    """Wilson's 95 % interval of a share measured on n examples; valid also for small n and near 0 and 1."""
    share = min(max(share, 0.0), 1.0)
    middle, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return Interval((middle - half) / (1 + Z**2 / n), (middle + half) / (1 + Z**2 / n))


def is_inconclusive(accuracy: float, n: float) -> bool:
    """Return whether n pairs cannot tell a useful accuracy from chance."""
    low, high = wilson_interval(accuracy, n)
    return low <= 0.5 and high >= USEFUL


def accuracy_error(accuracy: float, n: float) -> float:
    """Two standard errors of an accuracy measured on n examples."""
    return 2 * math.sqrt(max(accuracy * (1 - accuracy), 0.0) / n) if n > 0 else 0.0


def difference_error(first: np.ndarray, last: np.ndarray) -> float:
    """Two standard errors of a difference of means."""
    return 2 * math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))


def mean_and_bound(differences: np.ndarray) -> tuple[float, float]:
    """Mean of differences, and half the width of its 98 % interval: Student's t times the standard error.

    Not 95 %: with few samples of skewed lengths, that would miss by chance in slightly more than one run of twenty.
    """
    n = len(differences)
    z, freedom = Z98, n - 1
    student = (  # its 99 % quantile, within 1 % from 5 degrees of freedom on (Cornish and Fisher)
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
    return float(differences.mean()), student * float(differences.std(ddof=1)) / math.sqrt(n)


def binomial_tail(heads: int, tosses: int) -> float:
    """Probability that a fair coin shows at least `heads` heads in `tosses` tosses."""
    return sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2**tosses


def n_evaluated(run: Run) -> float:
    """Number of different examples in an evaluation, at most those of the test split."""
    n, available = number(run.setting("n_eval_examples", 256)), run.count("test.examples")
    n = n if n > 0 else 256.0
    return min(n, available) if available > 0 else n


def evaluation_loss_error(run: Run) -> float:
    """Two standard errors of `loss/eval`; 0 if unknown, after fewer than 20 updates.

    From the widest spread of an example's loss during training, estimated from batches: by now, training examples may
    be learned.
    """
    losses = run.train.points("loss/train")[1]
    if len(losses) < 20:
        return 0.0
    batch = max(1.0, number(run.setting("batch_size", 1)))
    spread = max(float(part.std(ddof=1)) for part in np.array_split(losses, 10)) * math.sqrt(batch)
    return 2 * spread / math.sqrt(n_evaluated(run))


# --- collapse ---------------------------------------------------------------------------------------------------------

# Where policy and reference are equal, every loss has the value of having learned nothing (docs/metrics.md). The first
# evaluation or update of a run shows that value under all of its options, so later losses are compared with it.

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
    for n in (FEW, width):
        loss, margin = (np.asarray(values[-n:], dtype=float) for values in (losses, margins))
        if len(loss) < n or margin.mean() > start.margin:
            continue
        if n == FEW:  # the mean of a few losses is uncertain if one is an outlier
            is_too_high = np.median(loss) > _times(start.loss, HUGE)
        else:
            is_too_high = loss.mean() - SURE * loss.std(ddof=1) / math.sqrt(n) > _times(start.loss, 2)
        if is_too_high:
            return Collapse(float(loss.mean()), float(margin.mean()), n)
    return None


def is_collapsed(evaluation: Means, start: Means) -> bool:
    """Return whether an evaluation shows a collapse, even one of few pairs."""
    return evaluation.loss > _times(start.loss, HUGE_EVALUATED) and evaluation.margin <= start.margin


def _times(loss: float, factor: float) -> float:
    """`factor` times the loss at the start, or as far above a start near 0."""
    return loss + (factor - 1) * max(abs(loss), LEAST)


# --- the course of a metric -------------------------------------------------------------------------------------------


def find_start(run: Run) -> Means | None:
    """Loss and margin before the first update, else, without an evaluation then, of the first updates."""
    for split, log, n in (("eval", run.eval, 1), ("train", run.train, updates_at_start(run.has_reference))):
        values = np.stack([log[f"loss/{split}"], log[f"rewards_{split}/margins"]])[:, :n]
        first = log.updates[:n]
        if len(first) == n and first[-1] == (0 if split == "eval" else n) and np.isfinite(values).all():
            return Means(*map(float, values.mean(1)))
    return None


def first_tenth(values: np.ndarray) -> np.ndarray:
    """The first tenth of the values, at least 10."""
    return values[: max(10, len(values) // 10)]


def last_tenth(values: np.ndarray) -> np.ndarray:
    """The last tenth of the values, at least 10."""
    return values[-max(10, len(values) // 10) :]


def mean_near(run: Run, name: str, examples: float) -> float:
    """Mean of a training metric over a tenth of the updates, at least 10, up to a number of examples."""
    places, values = run.train.points(name)
    up_to = values[places <= examples][-max(10, len(values) // 10) :]
    up_to = up_to if len(up_to) else first_tenth(values)
    return float(up_to.mean()) if len(up_to) else math.nan


def find_spikes(values: np.ndarray) -> list[tuple[int, float]]:
    """Find spikes: (index, ratio to the median of the 100 numbers before) for ratios above SPIKE.

    Values below FAINT of the mean of the first 20 do not count: where hardly any gradient is left, an outlier is
    harmless."""
    places = np.flatnonzero(np.isfinite(values))
    finite = values[places]
    if len(finite) <= 20:
        return []
    # no median is below the least
    after = np.flatnonzero((finite > SPIKE * finite.min()) & (finite > FAINT * finite[:20].mean()))
    after = after[after >= 20]
    usual = np.array([np.median(finite[:i]) for i in after[after < 100]])
    if len(finite) > 100:
        before = sliding_window_view(finite, 100)
        for part in np.array_split(after[after >= 100], 1 + len(after) // 10_000):  # of limited size in memory
            usual = np.concatenate([usual, np.median(before[part - 100], axis=1)])
    times = finite[after] / np.where(usual > 0, usual, np.inf)
    return [(int(places[i]), float(by)) for i, by in zip(after, times, strict=True) if by > SPIKE]


# --- parts of the margin ----------------------------------------------------------------------------------------------


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
        return float(length_part(self.chosen, self.rejected, self.chosen_tokens, self.rejected_tokens))

    def describe_margin(self) -> str:
        margin = (
            f"margin {signed(self.margin)} since the start" if self.since_start else f"margin {figure(self.margin)}"
        )
        return f"{margin} = chosen {signed(self.chosen)} minus rejected {signed(self.rejected)}"

    def describe_sides(self) -> str:
        """Sentence on the share of the margin that each side gives."""
        chosen, rejected, margin = self.chosen, self.rejected, self.margin
        since = "Since the start" if self.since_start else "Against the reference"
        if margin <= 0:
            return f"{since}, rejected responses did at least as well as chosen ones: the margin has not grown."
        if margin < 0.2 * min(abs(chosen), abs(rejected)):
            return f"{since}, both moved by nearly as much: the margin is the little by which they differ."
        by_chosen, by_rejected = percent(abs(chosen) / margin), percent(abs(rejected) / margin)
        if chosen >= 0 and rejected <= 0:
            return (
                f"{since}, chosen responses became more likely and rejected ones less: {by_chosen} of the margin is "
                f"chosen rising, {by_rejected} is rejected falling."
            )
        if chosen < 0:
            return (
                f"{since}, both became less likely: rejected falling gives {by_rejected} of the margin, and chosen "
                f"falling takes {by_chosen} away."
            )
        return (
            f"{since}, both became more likely: chosen rising gives {by_chosen} of the margin, and rejected rising "
            f"takes {by_rejected} away."
        )


def length_part(chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any) -> Any:
    """Margin due to length: mean reward per token times the extra tokens."""
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
    c = {name: table[name].to_numpy()[updates == updates.max()] for name in LEDGER_COLUMNS}
    chosen, rejected = (beta * (c[f"policy_{side}"] - c[f"reference_{side}"]) for side in ("chosen", "rejected"))
    if not math.isclose(float((chosen - rejected).mean()), margin, rel_tol=0.01, abs_tol=1e-6):
        return math.nan
    return float(length_part(chosen, rejected, c["chosen_tokens"], c["rejected_tokens"]).mean())


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
        moved = find_change(run, "rewards")
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

    def describe(self) -> str:
        before, after = figure(self.chosen_before, 4), figure(self.chosen_after, 4)
        return f"{self.stem}_{self.split}/chosen {before}, then {after} ({signed(self.chosen)})"


def find_change(run: Run, stem: str = "logps") -> Change | None:
    """Change from the first evaluation to the last; without two, from the first updates to the last."""
    for split, log in (("eval", run.eval), ("train", run.train)):
        sides = [log.points(f"{stem}_{split}/{side}")[1] for side in ("chosen", "rejected")]
        length = 1 if split == "eval" else max(10, len(sides[0]) // 10)
        if min(map(len, sides)) < 2 * length:
            continue
        (before, after), (low, high) = ((float(v[:length].mean()), float(v[-length:].mean())) for v in sides)
        return Change(split, stem, before, after, high - low)
    return None


# --- cost -------------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Time, tokens and devices of all updates in the metrics; NaN where unknown."""

    updating_secs: float  # in updates alone, without loading, evaluating, sampling and saving
    elapsed_secs: float  # from the last start to the end, or till now; NaN if the run did not end in order
    tokens: float
    devices: float
    kind: str  # GPU or CPU

    @property
    def secs(self) -> float:
        """Elapsed time or time in updates, the longer one; after a resume, elapsed time is since the last start."""
        return float(np.nanmax([self.updating_secs, self.elapsed_secs, 0.0]))

    @property
    def updates_alone(self) -> bool:
        """Return whether `secs` is the time in updates alone, because nothing more is known."""
        return not self.elapsed_secs >= self.updating_secs

    @property
    def device_hours(self) -> float:
        return self.secs * self.devices / 3600


def measure_cost(run: Run) -> Cost:
    """Measure the cost of a run so far."""
    seconds = update_seconds(run)
    tokens = seconds * run.train["tokens_per_second"]
    gpus = run.env.get("gpus")
    n_gpus = len(gpus) if isinstance(gpus, list) else 0
    processes = number(run.env.get("processes"))
    if n_gpus:  # a single process uses all GPUs it sees, several use one each
        devices, kind = (processes if processes > 1 else float(n_gpus)), "GPU"
    else:
        devices, kind = number(run.env.get("cpus")), "CPU"
    return Cost(_total(seconds), _elapsed(run), _total(tokens), devices, kind)


def update_seconds(run: Run) -> np.ndarray:
    """Seconds that each update took, (updates,); NaN where unknown."""
    examples = np.diff(run.train.examples, prepend=0.0)
    speed = run.train["examples_per_second"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(speed > 0, examples / speed, np.nan)


def _total(values: np.ndarray) -> float:
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def _elapsed(run: Run) -> float:
    ended = datetime.now(UTC) if run.state.word == "training" else _time(run.env.get("ended"))
    started = _time(run.env.get("started"))
    return max(0.0, (ended - started).total_seconds()) if started and ended else math.nan


def _time(text: Any) -> datetime | None:
    """Parse a time with its zone; None for anything else, such as a missing time."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else None
