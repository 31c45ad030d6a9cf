"""Cost of a run: time, tokens, device hours."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.runs import Run, number


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
        """Whether `secs` is the time in updates alone, because nothing more is known."""
        return not self.elapsed_secs >= self.updating_secs

    @property
    def device_hours(self) -> float:
        return self.secs * self.devices / 3600


def measure_cost(run: Run) -> Cost:
    """Measure the cost of a run so far."""
    seconds = seconds_of_updates(run)
    tokens = seconds * run.train["tokens_per_second"]
    gpus = run.env.get("gpus")
    n_gpus = len(gpus) if isinstance(gpus, list) else 0
    processes = number(run.env.get("processes"))
    if n_gpus:  # a single process uses all GPUs it sees, several use one each
        devices, kind = (processes if processes > 1 else float(n_gpus)), "GPU"
    else:
        devices, kind = number(run.env.get("cpus")), "CPU"
    return Cost(_total(seconds), _elapsed(run), _total(tokens), devices, kind)


def seconds_of_updates(run: Run) -> np.ndarray:
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
