"""Events of a run, and the callbacks that get them; a callback owns its files and its part of a checkpoint."""

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
    n_examples: int  # in this and all earlier updates, refused ones included
    examples: Sequence[Example]
    table: Mapping[str, torch.Tensor]  # by name, metrics of each example and the reference's log-probabilities, (B,)
    metrics: Mapping[str, float]  # means over the examples, and grad_norm; in `on_update` also lr, speed and others
    drawn: Mapping[int, OnlinePair] = {}  # in an online run, the answers drawn, by index in `examples`


class Sample(NamedTuple):
    """A prompt with answers of policy and reference, generated at an evaluation for people to read."""

    prompt: str
    policy: str
    reference: str | None  # None without a reference, or if it was freed
    policy_ended: bool | None = None  # whether by an end token, not cut off; None if unknown
    reference_ended: bool | None = None
    turns: str = ""  # the prompt as people read it, without control tokens


class Evaluation(NamedTuple):
    n_updates: int  # before the evaluation
    n_examples: int  # trained on before the evaluation
    metrics: Mapping[str, float]
    examples: Sequence[Example] = ()
    table: Mapping[str, torch.Tensor] = {}  # as in `Update`


class RunContext(NamedTuple):
    plan: Plan
    run_dir: Path
    rank: int
    data: TrainingData
    log: Callable  # prints a message, on rank 0 only
    policy: Any = None  # the model that is trained, perhaps sharded (`dpo.parallel.sharding` gathers weights)

    def count_parameters(self) -> dict:
        """Return the policy's numbers of parameters under the key `parameters`; {} if the context has no policy."""
        return {} if self.policy is None else {"parameters": count_parameters(self.policy)}


class Callback:
    """Receives a run's events; methods that a subclass does not override do nothing.

    Callbacks are made before a checkpoint is loaded.
    """

    switch: str = ""  # the key that must be true, if there is one
    files: tuple[str, ...] = ()  # files in the run directory that the callback appends to
    derived: tuple[str, ...] = ()  # files made from `files`

    def __init__(self, context: RunContext):
        self.context = context
        self.plan = context.plan
        self.run_dir = context.run_dir
        self.log = context.log

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        """Return whether this process gets this callback; most callbacks are on rank 0 alone."""
        return context.rank == 0 and (not cls.switch or context.plan.values[cls.switch])

    def on_start(self) -> None:
        """Called before the first update, on a resume after `load_state_dict`: open files."""

    def allows(self, update: Update) -> bool:
        """Return whether to apply an update. A callback that may refuse one must decide alike on every rank."""
        return True

    def on_update(self, update: Update) -> None:
        """Called after an update, which was applied or refused."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called after an evaluation on held-out examples, with its metrics."""

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        """Called with an evaluation's samples; there are none if sampling failed."""

    def on_answers(self, n_examples: int, answers: Mapping[str, str]) -> None:
        """Called with the policy's most probable answers to a few held-out prompts, by prompt."""

    def on_abort(self, reason: str) -> None:
        """Called if the run aborts because a loss or gradient is not finite; `on_end` follows."""

    def on_end(self) -> None:
        """Called once, when the run is complete, stopped or aborted: close files."""

    def state_dict(self) -> dict:
        """Return the state that a checkpoint keeps, made of tensors, numbers, texts, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the state that `state_dict` returned; it is {} if the checkpoint has none of this callback."""


class Callbacks:
    """The callbacks of a run, in the order of their calls."""

    def __init__(self, table: Mapping[str, type[Callback]], context: RunContext, **existing: Callback):
        """Make callbacks from the classes in `table` that are wanted; `existing` callbacks are called before them."""
        wanted = {
            name: callback_class(context) for name, callback_class in table.items() if callback_class.is_wanted(context)
        }
        self.callbacks = {**existing, **wanted}

    def emit(self, event: str, *details: Any) -> None:
        """Call the method `on_EVENT` of every callback."""
        for callback in self.callbacks.values():
            getattr(callback, f"on_{event}")(*details)

    def allow(self, update: Update) -> bool:
        """Return whether all callbacks allow an update. Each is asked even after a refusal, as it may log or count."""
        decisions = [callback.allows(update) for callback in self.callbacks.values()]
        return all(decisions)

    def state_dict(self) -> dict:
        """Return the callbacks' states by name.

        Raises TypeError for a state that could not be restored: checkpoints are read with `weights_only=True`.
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
