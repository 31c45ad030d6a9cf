"""A run as read from its directory.

A run may still train, have crashed, or lack files: parts that cannot be read are left out, and listed in
`Run.problems`. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.errors import InputError, explaining
from dpo.losses import LOSSES, Loss, find_loss
from dpo.numbers import count
from dpo.settings.choices import HELD_OUT_SCORE
from dpo.system.plain_files import check_readable, read_json, read_yaml
from dpo.system.redaction import redact
from dpo.system.run_directory import RUN_LOG, is_locked

MARKS_OF_A_RUN = ("config.yaml", "metrics.jsonl")  # a run's directory has at least one of these files
WARNS = "warning: "  # how a warning on the terminal begins
LARGEST_NUMBER = 1e100  # larger numbers count as missing: their sums and pictures would overflow


def number(value: Any) -> float:
    """A number as a float; NaN for anything else, or if huge."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST_NUMBER else math.nan


class Log:
    """Metrics of one split, a row per line; NaN where missing."""

    def __init__(self, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.lines = lines
        self._columns: dict[str, np.ndarray] = {}
        self.examples, self.updates = self["examples"], self["updates"]
        # names of metrics: together the first and the last line have all of them
        self.names = [*dict.fromkeys([*lines[0], *lines[-1]])] if lines else []

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, name: str) -> np.ndarray:
        """Values of a metric, (rows,)."""
        if name not in self._columns:
            self._columns[name] = np.array([number(line.get(name)) for line in self.lines])
        return self._columns[name]

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(examples, values) where the metric is a number."""
        values = self[name]
        is_finite = np.isfinite(values)
        return self.examples[is_finite], values[is_finite]

    def first(self, name: str) -> float:
        """The first value that is a number; NaN if there is none."""
        _, values = self.points(name)
        return float(values[0]) if len(values) else math.nan

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
    """Content of a run's directory, without secrets in settings and environment; what its loss is, if known."""

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

    @property
    def splits(self) -> tuple[tuple[str, Log], tuple[str, Log]]:
        return ("train", self.train), ("eval", self.eval)

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key of the config."""
        return _get_nested(self.config, key, default)

    def count(self, key: str) -> float:
        """A number of preflight.json by its dotted key; NaN if missing."""
        return number(_get_nested(self.preflight, key, None))

    @property
    def parameters(self) -> tuple[float, float]:
        """(trainable, all) of the policy; NaN if they were not recorded."""
        trainable = number(_get_nested(self.env, "parameters.trainable", None))
        return trainable, number(_get_nested(self.env, "parameters.total", None))

    @property
    def loss(self) -> str:
        return str(self.setting("loss.name") or "unknown")

    @property
    def objective(self) -> Loss | None:
        """The run's loss with its options; None if unknown."""
        config = self.setting("loss")
        if not isinstance(config, Mapping) or str(config.get("name")) not in LOSSES:
            return None
        weights = config.get("weights", {})  # only loss=mix has them, by the names of other losses
        are_known = isinstance(weights, Mapping) and weights.keys() <= LOSSES.keys()
        return find_loss(config) if are_known else None

    @property
    def best_metric(self) -> tuple[str, int] | None:
        """The metric that ranks checkpoints, and +1 (higher is better) or -1."""
        if HELD_OUT_SCORE in self.eval.names:
            return HELD_OUT_SCORE, +1
        return None if self.objective is None else self.objective.best

    @property
    def has_margins(self) -> bool:
        """Return whether examples have two sides; True if unknown."""
        return self.objective is None or self.objective.has_margins

    @property
    def trains_on(self) -> str | None:
        """A key of TRAINS_ON."""
        return None if self.objective is None else self.objective.trains_on

    @property
    def is_per_token(self) -> bool:
        """Return whether rewards are means over tokens; True if unknown."""
        return self.objective is None or bool(self.objective.per_token)

    @property
    def has_reference(self) -> bool:
        """Return whether rewards are known to be relative to a reference."""
        return self.objective is not None and self.objective.reference

    @property
    def online(self) -> bool:
        return self.setting("online.name") == "online" or "online/score" in self.train.names

    @property
    def kind(self) -> str:
        """The kind of the run's data: `online`, or a key of TRAINS_ON; pairs if unknown."""
        return "online" if self.online else self.trains_on or "pairs"

    @property
    def warmup_steps(self) -> float:
        """The updates of the warm-up, which null fits to the run."""
        steps = number(self.setting("warmup_steps", 0))
        return min(150, (self.total_updates or 0) // 10) if math.isnan(steps) else steps

    @property
    def updates(self) -> int:
        return _largest(self.train.updates)

    @property
    def examples(self) -> int:
        """Number of examples that the run has trained on."""
        return _largest(self.train.examples)

    @property
    def total_updates(self) -> int | None:
        """Number of updates that the preflight counted."""
        total = self.count("updates")
        return int(total) if total > 0 else None

    def ends(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The first and last tenth of a training metric's values, at least ten."""
        _, values = self.train.points(name)
        tenth = max(10, len(values) // 10)
        return values[:tenth], values[-tenth:]

    def tail(self, split: str, name: str) -> float:
        """A metric's last evaluation, or mean over the last tenth of updates."""
        if split == "eval":
            return self.eval.last(name)
        _, last_values = self.ends(name)
        return float(last_values.mean()) if len(last_values) else math.nan

    def samples_at(self, index: int) -> list[dict[str, Any]]:
        """Samples of the first (`index` 0) or the last (`index` -1) evaluation."""
        return [sample for sample in self.samples if sample["examples"] == self.samples[index]["examples"]]


def read_config(path: Path) -> Run:
    """Read the config of a run, and nothing else."""
    run = Run(path.resolve(), path.resolve().name)
    run.config = redact(_read_mapping(run, "config.yaml"))
    return run


@explaining(OSError, lambda why: InputError(f"the run cannot be read: {why}"))
def read_run(path: Path, *, ended: bool = False) -> Run:
    """Read a run's directory.

    `ended` says that the run has ended although its process still holds the lock, as when it makes its last report.

    Raises InputError if the path is not a run's directory.
    """
    _check_is_run(path)
    run = read_config(path)
    run.env = redact(_read_mapping(run, "env.json"))
    run.preflight = _read_mapping(run, "preflight.json")
    lines = _read_lines(run, "metrics.jsonl", lambda line: line.get("split") in ("train", "eval"))
    run.train, run.eval = (Log([line for line in lines if line["split"] == split]) for split in ("train", "eval"))
    if (run.path / "samples.jsonl").exists() or run.setting("sample_during_eval", True):
        lines = _read_lines(run, "samples.jsonl", lambda line: _is_sample(line) or _is_drawn(line))
        run.samples = [{"reference": None, **line} for line in lines if _is_sample(line)]
        run.drawn = [line for line in lines if _is_drawn(line)]
    if (run.path / "answers.jsonl").exists():
        run.answers = _read_lines(run, "answers.jsonl", lambda line: _has(line, ["examples"], prompt=str, answer=str))
    run.warnings = _read_warnings(run)
    folders = [entry.name for entry in os.scandir(run.path) if entry.is_dir(follow_symlinks=False)]
    run.nonfinite, run.saved = (
        sorted(int(name.removeprefix(prefix)) for name in folders if re.fullmatch(rf"{prefix}\d+", name))
        for prefix in ("nonfinite-", "step-")
    )
    best_folder = (run.path / "BEST").resolve().name
    # the link may lead nowhere, or to a checkpoint that was deleted
    run.best = next((n for n in run.saved if f"step-{n}" == best_folder), None)
    name = run.setting("exp_name")
    run.name = redact(name if isinstance(name, str) and name.strip() else run.path.name)
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
    if total is not None and done >= total and _largest(run.eval.updates) >= total:
        return State("complete", f"complete after {progress}")
    if locked:
        return State("training", f"still training, {progress} so far")
    if not len(run.train) and not len(run.eval):
        return NOTHING
    if run.nonfinite and run.nonfinite[-1] > done:
        return State("aborted", f"aborted at update {run.nonfinite[-1]:,}: loss or gradient was NaN or infinite")
    if ended:  # the process may still be writing the last checkpoint
        return State("stopped", f"stopped after {progress}")
    if done and run.saved and run.saved[-1] == run.examples:
        return State("stopped", f"stopped after {progress}, and saved there: resume=auto continues it")
    if total is None:
        return State("ended", f"ended after {progress}; without preflight.json the planned number is not known")
    checkpoint = f"last checkpoint after {count(run.saved[-1], 'example')}" if run.saved else "without a checkpoint"
    return State("ended", f"crashed or killed after {progress}, {checkpoint}")


def _check_is_run(path: Path) -> None:
    if not path.is_dir():
        problem = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise InputError(f"{path} {problem}: give the directory of a run, which has config.yaml and metrics.jsonl")
    if re.fullmatch(r"step-\d+", path.resolve().name):
        raise InputError(f"{path} is a checkpoint: give the directory of its run, {path.resolve().parent}")
    if not any((path / name).is_file() for name in MARKS_OF_A_RUN):
        files = " nor ".join(MARKS_OF_A_RUN)
        raise InputError(f"{path} is no run: it has neither {files}; give the directory of a run")


@contextmanager
def _noting_problems(run: Run, name: str) -> Iterator[None]:
    """Turn an unreadable file's error into one of the run's problems."""
    try:
        yield
    except FileNotFoundError:
        run.problems.append(f"{name} is missing")
    except (InputError, OSError) as error:
        run.problems.append(f"{name} cannot be read: {error}")


def _read_mapping(run: Run, name: str) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file; empty without one."""
    mapping: dict[str, Any] = {}
    with _noting_problems(run, name):
        value = read_json(run.path / name) if name.endswith(".json") else read_yaml(run.path / name)
        if not isinstance(value, dict):
            raise InputError("it holds no mapping")
        try:
            mapping = json.loads(json.dumps(value, default=str))  # turns YAML's dates into texts
        except TypeError as error:  # a key that is not a text
            raise InputError(str(error)) from error
    return mapping


def _read_lines(run: Run, name: str, is_valid: Callable[[dict], bool]) -> list[dict[str, Any]]:
    """Read a JSONL file's valid objects; other lines are a problem."""
    content = b""
    with _noting_problems(run, name):
        check_readable(run.path / name)
        content = (run.path / name).read_bytes()
    objects, unreadable_line_numbers = [], []
    lines = content.decode("utf-8", "replace").split("\n")
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and is_valid(value):
            objects.append(value)
        elif line_number < len(lines):  # a last line without a newline is being written, or was when the run died
            unreadable_line_numbers.append(line_number)
    if unreadable_line_numbers:
        n = len(unreadable_line_numbers)
        shown = ", ".join(map(str, unreadable_line_numbers[:5])) + (", ..." if n > 5 else "")
        are = "is" if n == 1 else "are"
        run.problems.append(
            f"{name}: {n} of {count(len(lines) - 1, 'line')} cannot be read, and {are} left out ({shown})"
        )
    return objects


def _read_warnings(run: Run) -> dict[str, int]:
    """Read the warnings in `log.txt`; empty without one."""
    path, lines = run.path / RUN_LOG, []
    if path.exists():  # unlike in runs of older code
        with _noting_problems(run, RUN_LOG):
            check_readable(path)
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return Counter(line.removeprefix(WARNS) for line in lines if line.startswith(WARNS))


def _has(value: Any, numbers: Sequence[str] = (), **types: Any) -> bool:
    """Return whether a value is a mapping with these numbers and types."""
    return (
        isinstance(value, Mapping)
        and all(math.isfinite(number(value.get(name))) for name in numbers)
        and all(isinstance(value.get(name), kind) for name, kind in types.items())
    )


def _is_sample(line: Mapping[str, Any]) -> bool:
    """Return whether a line is a `Sample`."""
    return _has(line, numbers=["examples"], prompt=str, policy=str, reference=(str, type(None)))


def _is_drawn(line: Mapping[str, Any]) -> bool:
    """Return whether a line is a prompt with drawn answers."""
    # best and worst are indices; they are in `numbers` too, as a bool is an int but not a number
    if not _has(line, numbers=["examples", "best", "worst"], prompt=str, completions=list, best=int, worst=int):
        return False
    answers = line["completions"]
    if not (0 <= line["best"] < len(answers) and 0 <= line["worst"] < len(answers)):
        return False
    return all(_has(answer, numbers=["score", "tokens"], text=str, ended=bool) for answer in answers)


def rank_answers(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """List (name, answer) of a drawn record: best, others in order, worst."""
    answers, best, worst = record["completions"], record["best"], record["worst"]  # the last two are indices
    is_flipped = record.get("flipped") is True  # a label drawn at random has preferred the worst
    ranked = [("best, rejected" if is_flipped else "best", answers[best])]
    ranked += [("another", answer) for i, answer in enumerate(answers) if i not in (best, worst)]
    if worst != best:
        ranked.append(("worst, chosen" if is_flipped else "worst", answers[worst]))
    return ranked


def _get_nested(mapping: Any, key: str, default: Any) -> Any:
    """The value of a dotted key in nested mappings."""
    value = mapping
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _largest(values: np.ndarray) -> int:
    finite = values[np.isfinite(values)]
    return int(finite.max()) if len(finite) else 0
