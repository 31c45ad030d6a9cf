"""Scorers of the policy's answers in training, and checks of their scores."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dpo.data.table import Prompt
from dpo.errors import InputError, RunError, one_sentence
from dpo.models.answers import Answer
from dpo.models.reward_model import find_reward_structure, load_reward_model, notes_on
from dpo.parallel.mesh import from_rank_0
from dpo.settings.plan import Plan
from dpo.system.signals import PressedAgain, Stopped

# maps prompts and one answer to each to a number for each; higher is better
Score = Callable[[Sequence[Prompt], Sequence[Answer]], Iterable[float]]

T = TypeVar("T")
LARGEST = 3.4e38  # largest float32


class ScorerFailed(RunError):
    """An error of a scorer, or an invalid score."""


class Scorer(NamedTuple):
    """A function or reward model that scores answers."""

    name: str  # as in the config
    score: Score
    digest: str = ""  # of the code or weights: must be the same when a run is resumed
    in_parallel: bool = False  # each process scores its own answers; else rank 0 all of them
    notes: tuple[str, ...] = ()  # messages to log at the start
    check: Callable[[Prompt], Any] = lambda prompt: None  # raises InputError for a prompt that it does not support
    file: Path | None = None  # the user's code, whose line is named in errors

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        """The scores, or ScorerFailed for any error of the scorer."""

        def compute() -> list[float]:
            given = self.score(prompts, answers)
            if isinstance(given, (str, bytes, Mapping)):
                raise TypeError(f"a number for each answer is expected, in a list, and not {given!r:.80}")
            return [float(score) for score in itertools.islice(given, len(answers) + 1)]  # it may be endless

        scores = _run_users_code(compute, ScorerFailed, f"{self.name} failed", self.file)
        if len(scores) != len(answers):
            n_scores = len(scores) if len(scores) < len(answers) else f"more than {len(answers)}"
            raise ScorerFailed(f"{self.name} gave {n_scores} scores for {len(answers)} answers")
        for score, answer in zip(scores, answers, strict=True):
            if not abs(score) <= LARGEST:  # true for NaN too
                raise ScorerFailed(f"{self.name} gave the score {score} to the answer {answer.text[:200]!r}")
        return scores


@contextmanager
def seeded_generators(*numbers: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators inside."""
    before, numpy_before = random.getstate(), np.random.get_state()
    seeds = np.random.SeedSequence(numbers).generate_state(4)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seeds.tobytes())
        np.random.seed(seeds)
        torch.manual_seed(int(seeds.view(np.uint64)[0]))
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)


def _run_users_code(code: Callable[[], T], kind: type[Exception], what: str, file: Path | None) -> T:
    """Run code without gradients, and explain its errors.

    Not a `@contextmanager`, which would take an error raised from a StopIteration for its own, and let the
    StopIteration through.
    """
    try:
        with torch.no_grad(), raising_exit():
            return code()
    except (PressedAgain, Stopped, kind):
        raise
    except BaseException as error:  # even if it would exit or interrupt
        raise kind(f"{what}: {_tell(error, file)}") from error


@contextmanager
def raising_exit() -> Iterator[None]:
    """Let `os._exit` raise inside: no unfinished run may end with status 0."""
    modules = os, sys.modules[os.name]  # both have it
    leave, own = os._exit, os.getpid()

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() != own:  # a process that the code has forked
            leave(status)
        raise SystemExit(f"os._exit({status})")

    try:
        for module in modules:
            module._exit = raise_exit
        yield
    finally:
        for module in modules:
            module._exit = leave


def _tell(error: BaseException, file: Path | None) -> str:
    try:
        message = one_sentence(error)
    except Exception:  # of the `__str__` of the user's own class
        message = "?"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f" ({file}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {message}{place}"


def _parse_file(place: str) -> Path:
    """The file of `FILE.py:NAME`."""
    return Path(place.rpartition(":")[0]).expanduser().resolve()


def shorter(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
    return [-len(answer.tokens) for answer in answers]


def count_keyword(keyword: str) -> Score:
    """Make a score that counts a text in the answer."""
    return lambda prompts, answers: [answer.text.count(keyword) for answer in answers]


def load_function(place: str) -> Score:
    """Load the function `FILE.py:NAME` of lists of prompts and answers.

    Runs the file's code, which may import modules beside it. Raises InputError if it fails, or has no such function.
    """
    name, path = place.rpartition(":")[2], _parse_file(place)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # for dataclasses and pickle
    if str(path.parent) not in sys.path:  # for imports of modules beside it
        sys.path.append(str(path.parent))
    what = f"online.function={place}: {path} cannot be run"
    _run_users_code(lambda: spec.loader.exec_module(module), InputError, what, path)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"online.function={place}: {path} has no function {name}")

    def score(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Any:
        return function([prompt.text for prompt in prompts], [answer.text for answer in answers])

    return score


def load_scorer(plan: Plan, device: torch.device, *, rows: int) -> Scorer:
    """Load the scorer that `plan.online` names.

    A reward model is loaded on `device`, for `rows` answers at a time. Raises InputError if that fails.
    """
    online = plan.online
    if online.scorer == "reward_model":
        model, digest = load_reward_model(plan, device, rows=rows)
        notes = notes_on(model, plan)
        name = f"online.reward_model={online.reward_model}"
        return Scorer(name, model, digest, in_parallel=True, notes=notes, check=model.check)
    if online.scorer == "function":
        file = _parse_file(online.function)
        if not dist.is_initialized() or dist.get_rank() == 0:
            score = load_function(online.function)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        else:  # rank 0 scores all answers: the function is not loaded here, nor this one called
            score, digest = shorter, ""
        return Scorer(f"online.function={online.function}", score, from_rank_0(digest), file=file)
    score = count_keyword(online.keyword) if online.scorer == "keyword" else shorter
    return Scorer(f"online.scorer={online.scorer}", score)


def check_scorer(plan: Plan) -> tuple[str, ...]:
    """Notes on a plan's scorer, and the InputErrors of `load_scorer`.

    No reward model's weights are read.
    """
    if plan.online.scorer == "reward_model":
        return notes_on(find_reward_structure(plan), plan)
    return load_scorer(plan, torch.device("meta"), rows=1).notes
