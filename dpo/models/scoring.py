"""Scorers of the policy's answers in training, and checks of their scores."""

from __future__ import annotations

import ast
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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dpo.data.table import Prompt
from dpo.data.tokenization import unescape
from dpo.errors import InputError, RunError, one_sentence
from dpo.models.answers import Answer
from dpo.models.reward_model import find_reward_structure, load_reward_model, notes_on
from dpo.parallel.mesh import from_rank_0
from dpo.settings.plan import Plan
from dpo.system.signals import PressedAgain, Stopped

# maps prompts, and an answer to each, to one number per answer; higher is better
Score = Callable[[Sequence[Prompt], Sequence[Answer]], Iterable[float]]

T = TypeVar("T")
LARGEST = 3.4e38  # the largest float32


class ScorerFailed(RunError):
    """An error of a scorer, or an invalid score."""


class Scorer(NamedTuple):
    """A function or reward model that scores answers."""

    name: str  # as in the config
    score: Score
    digest: str = ""  # of the code or weights, which must be the same when a run is resumed
    in_parallel: bool = False  # true: each process scores its own answers; false: rank 0 scores all
    notes: tuple[str, ...] = ()  # messages to log at the start
    check: Callable[[Prompt], Any] = lambda prompt: None  # raises InputError for an unsupported prompt
    file: Path | None = None  # the user's code, whose line is named in errors

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
        """The score of each answer.

        Raises ScorerFailed for any error of the scorer, and for an invalid score.
        """

        def compute() -> list[float]:
            scores = self.score(prompts, answers)
            if isinstance(scores, (str, bytes, Mapping)):
                raise TypeError(f"a number for each answer is expected, in a list, and not {scores!r:.80}")
            # take at most one score too many, as a user's iterable may be endless
            return [float(score) for score in itertools.islice(scores, len(answers) + 1)]

        scores = _run_users_code(compute, ScorerFailed, f"{self.name} failed", self.file)
        if len(scores) != len(answers):
            n_scores = f"more than {len(answers)}" if len(scores) > len(answers) else len(scores)
            raise ScorerFailed(f"{self.name} gave {n_scores} scores for {len(answers)} answers")
        for score, answer in zip(scores, answers, strict=True):
            if not abs(score) <= LARGEST:  # also if the score is NaN
                raise ScorerFailed(
                    f"{self.name} gave the score {score} to the answer {answer.text[:200]!r}: scores must be finite "
                    f"float32 numbers"
                )
        return scores


@contextmanager
def seeded_generators(*numbers: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators inside."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    seeds = np.random.SeedSequence(numbers).generate_state(4)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seeds.tobytes())
        np.random.seed(seeds)
        torch.manual_seed(int(seeds.view(np.uint64)[0]))
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


# A function and not a context manager: if the user's code raised StopIteration, contextlib would raise that instead of
# our `error_class`.
def _run_users_code(code: Callable[[], T], error_class: type[Exception], problem: str, file: Path | None) -> T:
    """Run a user's code without gradients.

    Any error becomes an `error_class`, whose message begins with `problem` and names the line of `file`.
    """
    try:
        with torch.no_grad():
            return code()
    except (PressedAgain, Stopped, error_class):
        raise
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, if the code raises them
        raise error_class(f"{problem}: {_describe_error(error, file)}") from error


def _describe_error(error: BaseException, file: Path | None) -> str:
    """An error's class, its message, and the last line in `file`."""
    try:
        message = one_sentence(error)
    except Exception:  # raised by `__str__` of a user's exception class
        message = "its message cannot be shown"
    frames = traceback.extract_tb(error.__traceback__)
    line_numbers = [frame.lineno for frame in frames if frame.filename == str(file)]
    location = f" ({file}, line {line_numbers[-1]})" if line_numbers else ""
    return f"{type(error).__name__}: {message}{location}"


def _parse_file(function: str) -> Path:
    """The file in `FILE.py:NAME`."""
    return Path(function.rpartition(":")[0]).expanduser().resolve()


def shorter(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float]:
    """The score of `online.scorer=shorter`, higher for shorter answers."""
    return [-len(answer.tokens) for answer in answers]


def count_keyword(keyword: str) -> Score:
    """Make a score that counts `keyword` in the answer."""
    return lambda prompts, answers: [answer.text.count(keyword) for answer in answers]


def load_function(function: str) -> Score:
    """Load a user's function, given as `FILE.py:NAME`.

    The function gets the texts of prompts and answers. Runs the file's code, which may import modules beside it. Raises
    InputError if the code fails, or has no such function.
    """
    name, path = function.rpartition(":")[2], _parse_file(function)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickle look the module up there
    if str(path.parent) not in sys.path:  # for imports of modules beside the file
        sys.path.append(str(path.parent))
    problem = f"online.function={function}: {path} cannot be run"
    _run_users_code(lambda: spec.loader.exec_module(module), InputError, problem, path)
    users_function: Any = getattr(module, name, None)
    if not callable(users_function):
        raise InputError(f"online.function={function}: {path} has no function {name}")

    def score(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Any:
        return users_function([unescape(prompt.text) for prompt in prompts], [answer.text for answer in answers])

    return score


def hash_code(file: Path) -> str:
    """Hash a file and what it imports from its directory."""
    contents: dict[str, bytes] = {}
    modules = [file]
    while modules:
        path = modules.pop()
        place = os.path.relpath(path, file.parent)
        if place in contents or not path.is_file():
            continue
        contents[place] = path.read_bytes()
        try:
            nodes = ast.walk(ast.parse(contents[place]))
        except (SyntaxError, ValueError):  # imported when the function is called, if at all
            continue
        for node in nodes:
            names: list[str] = []
            folder = file.parent
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = f"{node.module}." if node.module else ""
                names = [f"{module}{alias.name}" for alias in node.names]
                folder = path.parents[node.level - 1] if node.level else file.parent
            for name in names:
                parts = name.split(".")
                places = [folder.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
                modules += [module for place in places for module in (place.with_suffix(".py"), place / "__init__.py")]
    return hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()


def load_scorer(plan: Plan, device: torch.device, *, rows: int) -> Scorer:
    """Load the scorer that `plan.online` names.

    A reward model is loaded on `device`, for `rows` answers at a time. Raises InputError if the scorer cannot be
    loaded.
    """
    online = plan.online
    if online.scorer == "reward_model":
        reward_model, digest = load_reward_model(plan, device, rows=rows)
        name, notes = f"online.reward_model={online.reward_model}", notes_on(reward_model, plan)
        return Scorer(name, reward_model, digest, in_parallel=True, notes=notes, check=reward_model.check)
    if online.scorer == "function":
        file = _parse_file(online.function)
        if not dist.is_initialized() or dist.get_rank() == 0:
            score = load_function(online.function)
            digest = hash_code(file)
        else:  # rank 0 scores all answers: other ranks do not load the function, and never call their placeholder
            score, digest = shorter, ""
        return Scorer(f"online.function={online.function}", score, from_rank_0(digest), file=file)
    score = count_keyword(online.keyword) if online.scorer == "keyword" else shorter
    return Scorer(f"online.scorer={online.scorer}", score)


def check_scorer(plan: Plan) -> tuple[str, ...]:
    """Check a plan's scorer as `load_scorer` does, and return its notes.

    Does not read the weights of a reward model.
    """
    if plan.online.scorer == "reward_model":
        return notes_on(find_reward_structure(plan), plan)
    return load_scorer(plan, torch.device("meta"), rows=1).notes
