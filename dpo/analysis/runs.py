"""A run as read from its directory.

A run may still train, have crashed, or lack files: parts that cannot be read are left out, and listed in
`Run.problems`. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.errors import InputError, explaining
from dpo.losses import LOSSES, Loss, find_loss
from dpo.numbers import count, figure
from dpo.settings.keys import HELD_OUT_SCORE
from dpo.system.plain_files import check_readable, read_json, read_yaml
from dpo.system.redaction import redact
from dpo.system.run_directory import RUN_LOG, is_locked

WARNS = "warning: "  # how a warning on the terminal begins
UNKNOWN_LOSS = replace(LOSSES["dpo"], name="unknown", reference=False, margin_only=False)


def number(value: Any) -> float:
    """A number as a float; NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) else math.nan


class Log:
    """Metrics of one split, a row per line; NaN where missing."""

    def __init__(self, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.lines = lines
        self._columns: dict[str, np.ndarray] = {}
        self.examples, self.updates = self["examples"], self["updates"]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, name: str) -> np.ndarray:
        """Values of a metric, (rows,)."""
        if name not in self._columns:
            self._columns[name] = np.array([number(line.get(name)) for line in self.lines])
        return self._columns[name]

    def has(self, name: str) -> bool:
        """Return whether a metric is a number anywhere."""
        return bool(np.isfinite(self[name]).any())

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(examples, values) where the metric is a number."""
        is_finite = np.isfinite(self[name])
        return self.examples[is_finite], self[name][is_finite]

    def last(self, name: str) -> float:
        """The last value that is a number; NaN if there is none."""
        _, values = self.points(name)
        return float(values[-1]) if len(values) else math.nan


class State(NamedTuple):
    """State of a run: a word, and a text that explains it."""

    word: str  # complete, training, stopped, aborted, ended, empty
    text: str


NOTHING = State("empty", "nothing was logged")


@dataclass
class Run:
    """Content of a run's directory, without secrets in settings and environment."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)
    train: Log = field(default_factory=Log)
    eval: Log = field(default_factory=Log)
    samples: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[dict[str, Any]] = field(default_factory=list)  # prompts with scored answers, by the last updates
    answers: list[dict[str, Any]] = field(default_factory=list)  # the policy's most probable, before and after training
    nonfinite: list[int] = field(default_factory=list)  # updates with NaN or infinity, whose examples were saved
    saved: list[int] = field(default_factory=list)  # number of examples at each checkpoint
    best: int | None = None  # number of examples at the checkpoint that BEST names
    warnings: dict[str, int] = field(default_factory=dict)  # of the terminal, with the number of times
    problems: list[str] = field(default_factory=list)
    state: State = NOTHING

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key of the config."""
        return look_up(self.config, key, default)

    def count(self, key: str) -> float:
        """A number of preflight.json by its dotted key; NaN if missing."""
        return number(look_up(self.preflight, key))

    @property
    def objective(self) -> Loss:
        """The run's loss with its options."""
        config = self.setting("loss")
        is_known = isinstance(config, Mapping) and config.get("name") in LOSSES
        return find_loss(config) if is_known else UNKNOWN_LOSS

    @property
    def online(self) -> bool:
        return self.setting("online.name") == "online" or self.train.has("online/score")

    @property
    def best_metric(self) -> tuple[str, int]:
        """The metric that ranks checkpoints, and +1 (higher is better) or -1."""
        return (HELD_OUT_SCORE, +1) if self.eval.has(HELD_OUT_SCORE) else self.objective.best

    @property
    def updates(self) -> int:
        return int(np.max(self.train.points("updates")[1], initial=0))

    @property
    def examples(self) -> int:
        """Number of examples that the run has trained on."""
        return int(np.max(self.train.points("examples")[1], initial=0))

    @property
    def total_updates(self) -> int | None:
        """Number of updates that the preflight counted."""
        total = self.count("updates")
        return int(total) if total > 0 else None

    def ends(self, name: str) -> tuple[float, float]:
        """Means of a training metric over the first and last tenth of the updates, at least ten; NaN without any."""
        _, values = self.train.points(name)
        tenth = max(10, len(values) // 10)
        return (float(values[:tenth].mean()), float(values[-tenth:].mean())) if len(values) else (math.nan, math.nan)

    def now(self, name: str) -> float:
        """A training metric's mean over the last tenth of updates; NaN without any."""
        return self.ends(name)[1]

    def samples_at(self, index: int) -> list[dict[str, Any]]:
        """Samples of the first (`index` 0) or the last (`index` -1) evaluation."""
        return [sample for sample in self.samples if sample["examples"] == self.samples[index]["examples"]]


def look_up(mapping: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in nested mappings."""
    for part in key.split("."):
        if not isinstance(mapping, Mapping) or part not in mapping:
            return default
        mapping = mapping[part]
    return mapping


def read_config(path: Path) -> Run:
    """Read the config of a run, and nothing else."""
    run = Run(path.resolve(), path.resolve().name)
    run.config = redact(_read_mapping(run, "config.yaml", read_yaml))
    return run


@explaining(OSError, lambda why: InputError(f"the run cannot be read: {why}"))
def read_run(path: Path, *, ended: bool = False) -> Run:
    """Read a run's directory.

    `ended` says that the run has ended although its process still holds the lock, as when it makes its last report.

    Raises InputError if the path is not a run's directory.
    """
    if not any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise InputError(f"{path} is no run: give the directory of a run, which has config.yaml and metrics.jsonl")
    run = read_config(path)
    run.env = redact(_read_mapping(run, "env.json", read_json))
    run.preflight = _read_mapping(run, "preflight.json", read_json)
    lines = _read_lines(run, "metrics.jsonl", {"split", "examples", "updates"})
    run.train, run.eval = (Log([line for line in lines if line["split"] == split]) for split in ("train", "eval"))
    lines = _read_lines(run, "samples.jsonl", {"examples", "prompt"})
    run.samples = [{"reference": None, **line} for line in lines if "policy" in line]
    run.drawn = [line for line in lines if "completions" in line]
    run.answers = _read_lines(run, "answers.jsonl", {"examples", "prompt", "answer"})
    logged = _read_text(run, RUN_LOG).splitlines()
    run.warnings = Counter(line.removeprefix(WARNS) for line in logged if line.startswith(WARNS))
    folders = [entry.name for entry in run.path.iterdir() if entry.is_dir()]
    run.nonfinite, run.saved = (
        sorted(int(name.removeprefix(prefix)) for name in folders if re.fullmatch(rf"{prefix}\d+", name))
        for prefix in ("nonfinite-", "step-")
    )
    best_folder = (run.path / "BEST").resolve().name
    # the link may lead nowhere, or to a checkpoint that was deleted
    run.best = next((n for n in run.saved if f"step-{n}" == best_folder), None)
    run.name = redact(str(run.setting("exp_name") or run.path.name))
    run.state = _find_state(run, locked=not ended and is_locked(run.path), ended=ended)
    return run


def read_runs(paths: Sequence[Path], *, ended: bool = False) -> list[Run]:
    """Read each run once, under a unique name: if two are equal, all are called by their paths."""
    runs = list({run.path: run for run in (read_run(path, ended=ended) for path in paths)}.values())
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = redact(str(run.path))
    return runs


def _find_state(run: Run, *, locked: bool, ended: bool) -> State:
    """Find the state of a run; `ended`: the caller knows that it ended in order."""
    done, total = run.updates, run.total_updates
    progress = f"{done:,} of {count(total, 'update')}" if total else count(done, "update")
    # the last evaluation comes after all updates
    if total and done >= total and run.eval.last("updates") >= total:
        return State("complete", f"complete after {progress}")
    if locked:
        return State("training", f"still training, {progress} so far")
    if not len(run.train) and not len(run.eval):
        return NOTHING
    if run.nonfinite and run.nonfinite[-1] > done:
        return State("aborted", f"aborted at update {run.nonfinite[-1]:,}: loss or gradient was NaN or infinite")
    # the process that has just ended in order may still be writing the last checkpoint
    if ended or (done and run.saved and run.saved[-1] == run.examples):
        return State("stopped", f"stopped after {progress}")
    checkpoint = f"last checkpoint after {count(run.saved[-1], 'example')}" if run.saved else "without a checkpoint"
    return State("ended", f"crashed or killed after {progress}, {checkpoint}")


def _read_mapping(run: Run, name: str, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Read a mapping; if that fails, note why among the run's problems."""
    try:
        value = read(run.path / name)
        if isinstance(value, dict):
            return value
        run.problems.append(f"{name} holds no mapping")
    except FileNotFoundError:
        run.problems.append(f"{name} is missing")
    except (InputError, OSError) as error:
        run.problems.append(f"{name} cannot be read: {error}")
    return {}


def _read_text(run: Run, name: str) -> str:
    """Read a file that a run appends to; "" if there is none."""
    path = run.path / name
    if not path.exists():
        return ""
    check_readable(path)
    return path.read_text(encoding="utf-8", errors="replace")


def _read_lines(run: Run, name: str, keys: set[str]) -> list[dict[str, Any]]:
    """Read a JSONL file's objects that have these keys; other lines are a problem."""
    objects, n_unreadable = [], 0
    # without what follows the last newline: it is being written, or was when the run died
    for line in _read_text(run, name).split("\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and keys <= value.keys():
            objects.append(value)
        else:
            n_unreadable += 1
    if n_unreadable:
        run.problems.append(f"{name}: {count(n_unreadable, 'line')} cannot be read")
    return objects


def describe_answers(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(role, label, text) of a drawn record's answers: the best one, others in order, the worst."""
    answers, best, worst = record["completions"], record["best"], record["worst"]  # the last two are indices
    ranks = {worst: ("rejected", "worst"), best: ("chosen", "best")}
    if record.get("flipped") is True:  # a label drawn at random has preferred the worst
        ranks = {worst: ("chosen", "worst, chosen"), best: ("rejected", "best, rejected")}
    described = []
    for i in sorted(range(len(answers)), key=lambda i: (i != best, i == worst)):
        role, rank = ranks.get(i, ("other", "another"))
        label = f"{rank}: score {figure(answers[i]['score'])}, {count(answers[i]['tokens'], 'token')}"
        described.append((role, label + ("" if answers[i]["ended"] else ", cut off"), answers[i]["text"]))
    return described
