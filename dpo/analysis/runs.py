"""A run as read from its directory. What cannot be read is left out and noted in `problems`. Imports no torch."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpo.errors import InputError, explaining
from dpo.losses import LOSSES, Loss, find_loss
from dpo.numbers import count
from dpo.redaction import redact
from dpo.settings.keys import update_recorded
from dpo.settings.places import check_exists
from dpo.system.plain_files import check_readable, read_json, read_yaml
from dpo.system.run_directory import FIRST_EXAMPLES, WARNINGS_FILE, is_locked

# The loss of a run whose config names none. No rule may assume what holds only for some losses, so these are False.
UNKNOWN_LOSS = replace(LOSSES["dpo"], name="unknown", reference=False, margin_only=False)


def number(value: Any) -> float:
    """Return a number as a float, and NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) else math.nan


class Log(dict):
    """A split's metrics by name, each an array with a value per line of the split in metrics.jsonl; NaN if missing."""

    def __init__(self, lines: Sequence[dict] = ()):
        self.lines = lines

    def __missing__(self, name: str) -> np.ndarray:
        """Make the array of a metric when it is first asked for."""
        self[name] = np.array([number(line.get(name)) for line in self.lines])
        return self[name]

    def has(self, name: str) -> bool:
        """Whether a metric has a finite value."""
        return bool(np.isfinite(self[name]).any())

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (numbers of examples trained on, values of the metric), arrays over the lines where it is finite."""
        is_finite = np.isfinite(self[name])
        examples = self["examples"][is_finite]
        values = self[name][is_finite]
        if name.endswith("accuracies") and len(examples) and examples[0] == values[0] == 0:
            return examples[1:], values[1:]  # before training all pairs tie, as policy and reference are equal
        return examples, values

    def last(self, name: str) -> float:
        """Return the last finite value of a metric; NaN if there is none."""
        _, values = self.points(name)
        return values[-1] if len(values) else math.nan


@dataclass
class LoggedRun:
    """What a run's directory contains, without secrets in its config and its environment."""

    path: Path
    name: str
    config: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    preflight: dict = field(default_factory=dict)
    train: Log = field(default_factory=Log)
    eval: Log = field(default_factory=Log)
    first_examples: Sequence[dict] = ()
    samples: Sequence[dict] = ()
    answers: Sequence[dict] = ()  # the policy's most probable answers, before and after training
    last_nonfinite: int = 0  # the last update with NaN or infinity, whose examples were saved
    best_at: int | None = None  # number of examples at the checkpoint that BEST names
    warnings: dict[str, int] = field(default_factory=dict)  # how often each text was printed
    problems: list[str] = field(default_factory=list)
    state: str = "stopped"  # or "complete", "still training" or "aborted" (on NaN)

    def setting(self, key: str) -> Any:
        """Look up a setting by its dotted key; None if it is missing."""
        return look_up(self.config, key)

    def counted(self, key: str) -> float:
        """Look up a number that was counted before training, in preflight.json, by its dotted key; NaN if missing."""
        return number(look_up(self.preflight, key))

    @property
    def objective(self) -> Loss:
        """The loss that the run minimizes; UNKNOWN_LOSS if its config names none."""
        return find_loss(self.setting("loss")) if self.setting("loss.name") in LOSSES else UNKNOWN_LOSS

    @property
    def updates(self) -> int:
        """The number of the last update that was logged, from 1; 0 if there is none."""
        return int(np.max(self.train.points("updates")[1], initial=0))

    def means_at_ends(self, name: str) -> tuple[float, float]:
        """Return a metric's mean over the first tenth of the updates, and over the last tenth; NaN if it has no values.

        A tenth is at least ten updates.
        """
        _, values = self.train.points(name)
        if not len(values):
            return math.nan, math.nan
        tenth = max(10, len(values) // 10)
        return values[:tenth].mean(), values[-tenth:].mean()

    def compared_answers(self) -> list[tuple]:
        """Return (prompt, policy's answer before training, its newest answer) of the prompts that have both."""
        before = {line["prompt"]: line["answer"] for line in self.answers if line["examples"] == 0}
        now = {line["prompt"]: line["answer"] for line in self.answers if line["examples"] > 0}
        return [(prompt, before[prompt], answer) for prompt, answer in now.items() if prompt in before]

    def newest_samples(self) -> list[dict]:
        """Return the samples of the last evaluation that drew some."""
        return [sample for sample in self.samples if sample["examples"] == self.samples[-1]["examples"]]


def look_up(mapping: Any, key: str) -> Any:
    """Look up a value in nested mappings by its dotted key, such as `loss.beta`; return None if it is missing."""
    for part in key.split("."):  # down one level each
        mapping = mapping.get(part) if isinstance(mapping, dict) else None
    return mapping


@explaining(OSError, lambda why: InputError(f"the run cannot be read: {why}"))
def read_run(path: Path) -> LoggedRun:
    """Read a run from its directory. Raises InputError for a directory that is not a run's or cannot be read."""
    check_exists(path)
    if not any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise InputError(f"{path} is not a run: pass the directory of a run, which has config.yaml and metrics.jsonl")
    run = LoggedRun(path.resolve(), path.name)
    run.config = redact(update_recorded(_read_mapping(run, "config.yaml", read_yaml)))
    run.env = redact(_read_mapping(run, "env.json", read_json))
    run.preflight = _read_mapping(run, "preflight.json", read_json)
    metrics = _read_objects(run, "metrics.jsonl", {"split", "examples", "updates"})
    run.train = Log([line for line in metrics if line["split"] == "train"])
    run.eval = Log([line for line in metrics if line["split"] == "eval"])
    run.first_examples = _read_objects(run, FIRST_EXAMPLES, {"prompt"})
    samples = _read_objects(run, "samples.jsonl", {"examples", "prompt"})
    # An online run's other lines have the answers that updates drew.
    run.samples = [{"reference": None, **line} for line in samples if "policy" in line]
    run.answers = _read_objects(run, "answers.jsonl", {"examples", "prompt", "answer"})
    run.warnings = Counter(line["warning"] for line in _read_objects(run, WARNINGS_FILE, {"warning"}))
    for entry in run.path.iterdir():
        if match := re.fullmatch(r"nonfinite-(\d+)", entry.name):
            run.last_nonfinite = max(run.last_nonfinite, int(match[1]))
    match = re.fullmatch(r"step-(\d+)", os.path.basename(os.path.realpath(run.path / "BEST")))
    if match and (run.path / match[0]).exists():  # the link may be missing, or its checkpoint may have been deleted
        run.best_at = int(match[1])
    # A name that is not in UTF-8 has lone surrogates, which no page can hold.
    run.name = redact(str(run.setting("exp_name") or run.path.name)).encode("utf-8", "replace").decode()
    if run.eval.last("updates") >= run.counted("updates") > 0:  # the last evaluation comes after all updates
        run.state = "complete"
    elif "ended" not in run.env and is_locked(run.path):  # the process of a run that has ended may hold the lock still
        run.state = "still training"
    elif run.last_nonfinite > run.updates:  # the update was not logged, so the run ended there
        run.state = "aborted"
    return run


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Read runs, each once. If two have the same name, all runs are named by their paths."""
    runs = [read_run(path) for path in dict.fromkeys(map(Path.resolve, paths))]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = redact(str(run.path))
    return runs


def _read_mapping(run: LoggedRun, name: str, read: Callable) -> dict:
    """Return the mapping that the file `name` holds, read by `read(path)`.

    If the file cannot be read, {} is returned, and the reason is added to the run's problems.
    """
    try:
        value = read(run.path / name)
        if isinstance(value, dict):
            return value
        problem = "holds no mapping"
    except FileNotFoundError:
        problem = "is missing"
    except (InputError, OSError) as error:
        problem = f"cannot be read: {error}"
    run.problems.append(f"{name} {problem}")
    return {}


def _read_objects(run: LoggedRun, name: str, keys: set[str]) -> list[dict]:
    """Return the JSON objects of a file's lines that have all `keys`; [] if the file does not exist.

    If there are other lines, their number is added to the run's problems.
    """
    file = run.path / name
    if not file.exists():
        return []
    check_readable(file)
    objects = []
    n_unreadable = 0
    # The text after the last newline is a line that is still being written, or was when the run was killed.
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
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
