"""What a run took: time, tokens, hours of its devices."""

from __future__ import annotations

import math
from datetime import datetime
from typing import NamedTuple

import numpy as np

from dpo.analysis.runs import Run, number


class Cost(NamedTuple):
    """Time, tokens and devices, of all updates that are in the metrics; NaN where they do not tell."""

    updating_secs: float  # in updates alone: not loading, evaluating, sampling, saving
    elapsed_secs: float  # from the last start to the last line of the metrics
    tokens: float
    devices: float
    kind: str  # GPU or CPU

    @property
    def secs(self) -> float:
        """What is known to have passed. After a resume the last start tells less than the updates do."""
        return float(np.nanmax([self.updating_secs, self.elapsed_secs, 0.0]))

    @property
    def device_hours(self) -> float:
        return self.secs * self.devices / 3600


def cost_of(run: Run) -> Cost:
    """What a run took so far."""
    examples = np.diff(run.train.examples, prepend=0.0)
    speed = run.train["examples_per_second"]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(speed > 0, examples / speed, np.nan)
    tokens = seconds * run.train["tokens_per_second"]
    gpus = run.env.get("gpus")
    n_gpus = len(gpus) if isinstance(gpus, list) else 0
    processes = number(run.env.get("processes"))
    if n_gpus:  # one process drives all that it sees, several one each
        devices, kind = (processes if processes > 1 else float(n_gpus)), "GPU"
    else:
        devices, kind = number(run.env.get("cpus")), "CPU"
    return Cost(_total(seconds), _elapsed(run), _total(tokens), devices, kind)


def _total(values: np.ndarray) -> float:
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def _elapsed(run: Run) -> float:
    try:
        started = datetime.fromisoformat(str(run.env.get("started")))
        return max(0.0, (run.written - started).total_seconds()) if run.written else math.nan
    except (ValueError, TypeError):  # an older run, or a time without its zone
        return math.nan
