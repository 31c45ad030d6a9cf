"""Numbers derived from a run: chance, start, margins, cost."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.course import Means, updates_at_start
from dpo.analysis.runs import Run, first_tenth, number

USEFUL = 0.55  # below this accuracy nothing useful was learned
SIDES = ("chosen", "rejected")
Z, Z98 = 1.959964, 2.326348  # standard errors of a 95 % and a 98 % interval


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share measured on n examples.

    It is valid also for small n and near 0 and 1.
    """
    share = min(max(share, 0.0), 1.0)
    middle, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return (middle - half) / (1 + Z**2 / n), (middle + half) / (1 + Z**2 / n)


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
    """Mean of differences, and half the width of its 98 % interval.

    That is Student's t times the standard error. Not 95 %: with few samples of skewed lengths, that would miss by
    chance in slightly more than one run of twenty.
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
    """Probability of at least `heads` heads in `tosses` of a fair coin."""
    return sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2**tosses


def n_evaluated(run: Run) -> float:
    """Number of different examples in an evaluation."""
    n, available = number(run.setting("n_eval_examples", 256)), run.count("test.examples")
    n = n if n > 0 else 256.0
    return min(n, available) if available > 0 else n


def evaluation_loss_error(run: Run) -> float:
    """Two standard errors of `loss/eval`; 0 with fewer than 20 updates.

    The spread of an example's loss is estimated from the training batches, in the tenth of the run where it is widest:
    towards the end, training examples may be learned, and their losses nearly equal.
    """
    losses = run.train.points("loss/train")[1]
    if len(losses) < 20:
        return 0.0
    batch_size = max(1.0, number(run.setting("batch_size", 1)))
    spread_of_batches = max(float(tenth.std(ddof=1)) for tenth in np.array_split(losses, 10))
    return 2 * spread_of_batches * math.sqrt(batch_size) / math.sqrt(n_evaluated(run))


def find_start(run: Run) -> Means | None:
    """Mean loss and margin before, or else in, the first updates."""
    n = updates_at_start(run.has_reference)
    # number of rows, and the `updates` of the last of them; a log that begins later does not show the start
    for split, log, n_rows, last_update in (("eval", run.eval, 1, 0), ("train", run.train, n, n)):
        losses, margins = log[f"loss/{split}"][:n_rows], log[f"rewards_{split}/margins"][:n_rows]
        has_start = len(log) >= n_rows and log.updates[n_rows - 1] == last_update
        if has_start and np.isfinite(losses).all() and np.isfinite(margins).all():
            return Means(float(losses.mean()), float(margins.mean()))
    return None


def mean_near(run: Run, name: str, examples: float) -> float:
    """Mean over the tenth of the updates that ends at `examples`.

    Before the first update: over the first tenth.
    """
    examples_trained, values = run.train.points(name)
    tenth = values[examples_trained <= examples][-max(10, len(values) // 10) :]
    if not len(tenth):
        tenth = first_tenth(values)
    return float(tenth.mean()) if len(tenth) else math.nan


class Change(NamedTuple):
    """Change of the means of both sides since the start."""

    split: str
    chosen_before: float
    chosen_after: float
    rejected: float  # change of the rejected side

    @property
    def chosen(self) -> float:
        return self.chosen_after - self.chosen_before

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def find_change(run: Run, stem: str = "logps") -> Change | None:
    """Change from the first evaluation to the last, or over the updates."""
    for split, log in (("eval", run.eval), ("train", run.train)):
        chosen, rejected = (log.points(f"{stem}_{split}/{side}")[1] for side in SIDES)
        n = 1 if split == "eval" else max(10, len(chosen) // 10)  # values at either end
        if min(len(chosen), len(rejected)) < 2 * n:
            continue
        rejected_change = float(rejected[-n:].mean()) - float(rejected[:n].mean())
        return Change(split, float(chosen[:n].mean()), float(chosen[-n:].mean()), rejected_change)
    return None


class MarginParts(NamedTuple):
    """Mean rewards of both sides, whose difference is the margin.

    They are relative to the reference or, under a loss without one, changes since the start.
    """

    chosen: float
    rejected: float
    since_start: bool = False
    chosen_tokens: float = math.nan
    rejected_tokens: float = math.nan
    length: float = math.nan  # part of the margin due to length; NaN if unknown, or if rewards are per token
    by_pair: bool = False  # `length` was computed for each pair of the ledger, not from means

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def margin_parts(run: Run) -> MarginParts | None:
    """Parts of the margin at the last evaluation or updates.

    None without pairs, and for a loss without a reference if there are no earlier values to compare with.
    """
    examples = run.eval.points("rewards_eval/chosen")[0]
    split = "eval" if len(examples) and examples[-1] > 0 else "train"
    chosen, rejected = (run.tail(split, f"rewards_{split}/{side}") for side in SIDES)
    if not (math.isfinite(chosen) and math.isfinite(rejected)):
        return None
    if not run.has_reference:
        change = find_change(run, "rewards")
        return change and MarginParts(change.chosen, change.rejected, since_start=True)
    if run.is_per_token:
        return MarginParts(chosen, rejected)
    m, n = (run.count(f"{'test' if split == 'eval' else 'train'}.mean_{side}_tokens") for side in SIDES)
    length = length_by_pair(run) if split == "eval" else math.nan
    by_pair = math.isfinite(length)
    if not by_pair and m > 0 and n > 0:
        length = float(length_part(chosen, rejected, m, n))
    return MarginParts(chosen, rejected, False, m, n, length, by_pair)


def length_part(chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any) -> Any:
    """Margin due to length: mean reward per token times the extra tokens.

    With a reward per token of a on the chosen side and b on the rejected one, and lengths m and n, the margin is
    a m - b n = (a - b) (m + n) / 2 + (a + b) / 2 (m - n), of which the second term is 0 for equal lengths.
    """
    per_token = chosen / chosen_tokens + rejected / rejected_tokens
    return per_token / 2 * (chosen_tokens - rejected_tokens)


def length_by_pair(run: Run) -> float:
    """Mean length part over the ledger's pairs of the last evaluation.

    NaN without a ledger, or if rewards are not beta times the change of log-probabilities.
    """
    beta, margin = number(run.setting("loss.beta")), run.eval.last("rewards_eval/margins")
    if run.ledger is None or not beta > 0:
        return math.nan
    import pyarrow.compute as pc  # most runs have no ledger

    table = run.ledger.filter(pc.equal(run.ledger["split"], "eval"))
    if not len(table):
        return math.nan
    updates = table["update"].to_numpy()
    names = [f"{kind}_{side}" for kind in ("policy", "reference") for side in SIDES] + [f"{s}_tokens" for s in SIDES]
    last = {name: table[name].to_numpy()[updates == updates.max()] for name in names}
    chosen, rejected = (beta * (last[f"policy_{side}"] - last[f"reference_{side}"]) for side in SIDES)
    # under another kind of reward, this mean is not the margin that the run logged
    if not math.isclose(float((chosen - rejected).mean()), margin, rel_tol=0.01, abs_tol=1e-6):
        return math.nan
    return float(length_part(chosen, rejected, last["chosen_tokens"], last["rejected_tokens"]).mean())


class Cost(NamedTuple):
    """Time, tokens and devices of a run; NaN where unknown."""

    updating_secs: float  # in updates alone, without loading, evaluating, sampling and saving
    elapsed_secs: float  # from the last start to the end, or till now; NaN if the run did not end in order
    tokens: float
    devices: float
    kind: str  # GPU or CPU

    @property
    def secs(self) -> float:
        """Elapsed time or, if longer, time in updates."""
        # after a resume, elapsed time is since the last start
        return float(np.nanmax([self.updating_secs, self.elapsed_secs, 0.0]))

    @property
    def updates_alone(self) -> bool:
        """Return whether `secs` is the time in updates alone."""
        return not self.elapsed_secs >= self.updating_secs

    @property
    def device_hours(self) -> float:
        return self.secs * self.devices / 3600


def measure_cost(run: Run) -> Cost:
    seconds = update_seconds(run)
    tokens = seconds * run.train["tokens_per_second"]
    gpus, processes = run.env.get("gpus"), number(run.env.get("processes"))
    if isinstance(gpus, list) and gpus:
        # several processes use a GPU each, a single one uses all it sees
        devices, kind = (processes if processes > 1 else float(len(gpus))), "GPU"
    else:
        devices, kind = number(run.env.get("cpus")), "CPU"
    ended = datetime.now(UTC) if run.state.word == "training" else _time(run.env.get("ended"))
    started = _time(run.env.get("started"))
    elapsed = max(0.0, (ended - started).total_seconds()) if started and ended else math.nan
    updating, processed = (float(np.nansum(v)) if np.isfinite(v).any() else math.nan for v in (seconds, tokens))
    return Cost(updating, elapsed, processed, devices, kind)


def update_seconds(run: Run) -> np.ndarray:
    """Seconds that each update took, (updates,); NaN where unknown."""
    examples = np.diff(run.train.examples, prepend=0.0)
    speed = run.train["examples_per_second"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(speed > 0, examples / speed, np.nan)


def _time(text: Any) -> datetime | None:
    """Parse a time with its zone; None for anything else."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else None
