"""What scores the answers that a policy gives in training: scorers by name, and the check of what they give."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig

from dpo.data.prompts import Prompt
from dpo.errors import InputError, RunError
from dpo.models.answers import Answer
from dpo.models.reward_model import find_reward_structure, load_reward_model, notes_on

# of prompts and one answer to each, a number for each; higher is better
Score = Callable[[Sequence[Prompt], Sequence[Answer]], Iterable[float]]


class ScorerFailed(RunError):
    """A reward model or function raised an error, or gave something else than a finite number for each answer."""


class Scorer(NamedTuple):
    """Scores answers."""

    name: str  # what the config calls it
    score: Score
    digest: str = ""  # of the code or weights: a continued run must have the same
    in_parallel: bool = False  # each process scores its own answers; else rank 0 all of them
    notes: tuple[str, ...] = ()  # to log at the start

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        """The scores, as floats. Raises ScorerFailed, which names the scorer."""
        try:
            scores = [float(score) for score in self.score(prompts, answers)]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            raise ScorerFailed(f"{self.name} failed: {_tell(error)}") from error
        if len(scores) != len(answers):
            raise ScorerFailed(f"{self.name} gave {len(scores)} scores for {len(answers)} answers")
        for score, answer in zip(scores, answers, strict=True):
            if not math.isfinite(score):
                raise ScorerFailed(f"{self.name} gave the score {score} to the answer {answer.text[:200]!r}")
        return scores


def _tell(error: Exception) -> str:
    """The error in one line, with the place where it was raised."""
    *_, place = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place.filename}, line {place.lineno})"


def shorter(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
    """The number of tokens, negated."""
    return [-len(answer.tokens) for answer in answers]


def count_keyword(keyword: str) -> Score:
    """How often a text occurs in the answer, without overlaps."""
    return lambda prompts, answers: [answer.text.count(keyword) for answer in answers]


def load_function(place: str) -> Score:
    """The function that `FILE.py:NAME` names, which is given two lists of texts, prompts and answers.

    Runs the file's code. Raises InputError if it fails, or has no such function.
    """
    file, _, name = place.rpartition(":")
    path = Path(file).expanduser().resolve()
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # which dataclasses and pickle look for
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"online.function={place}: {path} cannot be run: {_tell(error)}") from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"online.function={place}: {path} has no function {name}")

    def score(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Any:
        return function([prompt.text for prompt in prompts], [answer.text for answer in answers])

    return score


def load_scorer(config: DictConfig, device: torch.device, *, rows: int) -> Scorer:
    """The scorer that `config.online` names; a reward model on `device`, for `rows` answers at a time.

    Raises InputError if it cannot be loaded.
    """
    online = config.online
    if online.scorer == "reward_model":
        model, digest = load_reward_model(config, device, rows=rows)
        notes = notes_on(model, config)
        return Scorer(f"online.reward_model={online.reward_model}", model, digest, in_parallel=True, notes=notes)
    if online.scorer == "function":
        file = Path(online.function.rpartition(":")[0]).expanduser()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return Scorer(f"online.function={online.function}", load_function(online.function), digest)
    score = count_keyword(online.keyword) if online.scorer == "keyword" else shorter
    return Scorer(f"online.scorer={online.scorer}", score)


def check_scorer(config: DictConfig) -> tuple[str, ...]:
    """Notes on the scorer that `config.online` names; a reward model is not read. Raises InputError as `load_scorer`
    does."""
    if config.online.scorer == "reward_model":
        return notes_on(find_reward_structure(config), config)
    return load_scorer(config, torch.device("meta"), rows=1).notes
