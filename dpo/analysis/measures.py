"""Numbers derived from a run: intervals, its start, margins, cost."""

from __future__ import annotations

import math
import zlib
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.runs import Run, first_tenth, number

EVAL_ACCURACY = "rewards_eval/accuracies"
Z_95 = 1.959964  # half the width of a 95 % interval, in standard errors
UPDATES_AT_START = 10  # updates averaged as the start of a loss without a reference: a single one says too little
BEYOND_CHANCE = 3.0  # standard errors, for small samples and the best of some evaluations too


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share measured on n examples.

    It is valid also for small n and near 0 and 1.
    """
    share = min(max(share, 0.0), 1.0)
    middle = share + Z_95**2 / (2 * n)
    half_width = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    scale = 1 + Z_95**2 / n
    return (middle - half_width) / scale, (middle + half_width) / scale


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
    """Standard error of `loss/eval`; infinite with fewer than 20 updates.

    The standard deviation of an example's loss is estimated from the mean losses of training batches, in the tenth of
    the run where it is largest: towards the end, training examples may be learned, and their losses nearly equal.
    """
    losses = run.train.points("loss/train")[1]
    if len(losses) < 20:
        return math.inf
    batch_size = max(1.0, number(run.setting("batch_size", 1)))
    batch_deviation = max(float(tenth.std(ddof=1)) for tenth in np.array_split(losses, 10))
    example_deviation = batch_deviation * math.sqrt(batch_size)
    return example_deviation / math.sqrt(n_effective(run))


def find_start_loss(run: Run) -> float:
    """Loss of the untrained policy; NaN if it was not logged.

    It is that of an evaluation before the first update, of the first update or, without a reference, of the first ten.
    """
    if len(run.eval) and run.eval.updates[0] == 0 and math.isfinite(run.eval["loss/eval"][0]):
        return float(run.eval["loss/eval"][0])
    n = 1 if run.has_reference else UPDATES_AT_START
    is_logged = len(run.train) >= n and run.train.updates[n - 1] == n  # a log may begin later
    return float(run.train["loss/train"][:n].mean()) if is_logged else math.nan


def multiply_start_loss(loss: float, factor: float) -> float:
    """Multiply a start's loss, whose size counts as at least 0.5.

    A multiple of a loss near 0 would be near 0 too. The result is above a negative loss as well.
    """
    return loss + (factor - 1) * max(abs(loss), 0.5)


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


def pair_samples(run: Run) -> tuple[list[tuple[str, str]], str]:
    """Pair the policy's newest samples with others of the same prompts.

    The others are the reference's or, without a reference, the policy's earliest; the text says whose.
    """
    earliest, newest = run.samples_at(0), run.samples_at(-1)
    pairs = [(new["policy"], new["reference"]) for new in newest if new["reference"] is not None]
    if pairs or earliest == newest:
        return pairs, "the reference's"
    both = zip(newest, earliest, strict=False)
    return [(new["policy"], old["policy"]) for new, old in both if new["prompt"] == old["prompt"]], "its first"


def is_broken(text: str) -> bool:
    """Return whether a text is empty or repeats itself.

    English compresses to half its size, a repeated sentence to a fifth.
    """
    content = text.strip().encode("utf-8", "replace")
    return not content or (len(content) >= 200 and len(zlib.compress(content)) < 0.25 * len(content))


def n_answered(run: Run, name: str) -> float:
    """Number of prompts behind `run.tail` of a metric of drawn answers.

    Prompts with a pair from the datasets do not count. The answers to one prompt count as one: they may be alike.
    """
    share_drawn = 1 - number(run.setting("online.mix_offline", 0))
    return len(run.ends(name)[1]) * number(run.setting("batch_size", 1)) * share_drawn


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
    seconds = _update_seconds(run)
    tokens = seconds * run.train["tokens_per_second"]
    return Cost(_sum_known(seconds), elapsed, _sum_known(tokens), devices, kind)


def _sum_known(values: np.ndarray) -> float:
    """Sum the values that are numbers; NaN if there are none."""
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def _update_seconds(run: Run) -> np.ndarray:
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
