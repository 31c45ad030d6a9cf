"""Events of a run, and its callbacks, each of which owns its files and its part of a checkpoint."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpo.data.examples import Example
from dpo.data.preflight import TrainingData
from dpo.models.adapters import count_parameters
from dpo.models.answers import OnlinePair
from dpo.settings.plan import Plan


class Update(NamedTuple):
    """An update on a global batch of B examples, applied or refused."""

    number: int  # from 1; refused updates count
    n_examples: int  # in this and all updates before, refused ones included
    examples: Sequence[Example]
    table: Mapping[str, torch.Tensor]  # metrics of each example and the reference's log-probabilities, (B,) each
    metrics: Mapping[str, float]  # means over the examples, and grad_norm; in `on_update` also lr, speed and others
    drawn: Mapping[int, OnlinePair] = {}  # the policy's answers, by index in `examples`


class Sample(NamedTuple):
    """A prompt with continuations by policy and reference."""

    prompt: str
    policy: str
    reference: str | None  # None without a reference, or if it was freed
    policy_ended: bool | None = None  # with an end token, not cut off; None if unknown
    reference_ended: bool | None = None
    turns: str = ""  # the prompt for readers, without control tokens


class Evaluation(NamedTuple):
    n_updates: int
    n_examples: int
    metrics: Mapping[str, float]
    examples: Sequence[Example] = ()
    table: Mapping[str, torch.Tensor] = {}  # as in `Update`


class RunContext(NamedTuple):
    plan: Plan
    run_dir: Path
    rank: int
    data: TrainingData
    log: Callable  # prints a message, on rank 0
    policy: Any = None  # the model that is trained, distributed as it is (`dpo.parallel.sharding` gathers weights)

    def count_parameters(self) -> dict:
        return {} if self.policy is None else {"parameters": count_parameters(self.policy)}


class Callback:
    """A receiver of events, made before a checkpoint is loaded."""

    files: tuple[str, ...] = ()  # files in the run directory that it appends to
    derived: tuple[str, ...] = ()  # files made from `files`

    def __init__(self, context: RunContext):
        self.context = context
        self.plan = context.plan
        self.run_dir = context.run_dir
        self.log = context.log

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        """Decide whether this process has this callback; most run on rank 0 alone."""
        return context.rank == 0

    def on_start(self) -> None:
        """Open files; on a resume, `load_state_dict` came before."""

    def allows(self, update: Update) -> bool:
        """Decide whether to apply an update; all ranks must agree."""
        return True

    def on_update(self, update: Update) -> None:
        """Called after an update, which was applied or refused."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called after an evaluation on held-out examples, with its metrics."""

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        """Called with an evaluation's samples; none if sampling failed."""

    def on_answers(self, n_examples: int, answers: Mapping[str, str]) -> None:
        """Called with the policy's most probable answers to a few held-out prompts."""

    def on_abort(self, reason: str) -> None:
        """Note that the run aborts on NaN; `on_end` follows."""

    def on_end(self) -> None:
        """Close files, as the run is complete, was stopped, or aborted."""

    def state_dict(self) -> dict:
        """Return tensors, numbers, texts, lists and dicts for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        """Take back the state; {} if the checkpoint has none."""


class Callbacks:
    """The callbacks of a run, in the order of their calls."""

    def __init__(self, table: Mapping[str, type[Callback]], context: RunContext, **given: Callback):
        """`table` has the classes from which callbacks are made; those `given` exist already, and are called first."""
        wanted = {
            name: callback_class(context) for name, callback_class in table.items() if callback_class.is_wanted(context)
        }
        self.callbacks = {**given, **wanted}

    def emit(self, event: str, *details: Any) -> None:
        for callback in self.callbacks.values():
            getattr(callback, f"on_{event}")(*details)

    def allow(self, update: Update) -> bool:
        """Ask every callback, as each may log or count."""
        decisions = [callback.allows(update) for callback in self.callbacks.values()]
        return all(decisions)

    def state_dict(self) -> dict:
        """Return the states by name.

        Raises TypeError for what could not be restored, as checkpoints are read without running code in them.
        """
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        content = io.BytesIO()
        torch.save(states, content)
        content.seek(0)
        try:
            torch.load(content, weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(f"state_dict() must have only tensors, numbers, texts, lists and dicts: {error}") from error
        return states

    def load_state_dict(self, states: Mapping[str, Mapping]) -> None:
        for name, callback in self.callbacks.items():
            callback.load_state_dict(states.get(name, {}))
