"""Events of a run, and its callbacks.

Each callback owns its files and its part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dpo.data.examples import Example
from dpo.data.preflight import TrainingData
from dpo.models.adapters import ParameterCount
from dpo.models.answers import Drawn
from dpo.settings.plan import Plan


class Update(NamedTuple):
    """A global batch, trained on, or skipped at a callback's veto."""

    number: int  # from 1, skipped ones included
    n_examples: int  # trained on so far, with this one
    examples: Sequence[Example]
    table: Mapping[str, torch.Tensor]  # of each example, (B,): metrics and the reference's log-probabilities
    metrics: Mapping[str, float]  # means over the examples and grad_norm; in `on_update` also lr and speed
    drawn: Mapping[int, Drawn] = MappingProxyType({})  # by place in `examples`: the pairs that the policy wrote


class Sample(NamedTuple):
    """A prompt, continued by the policy and perhaps the reference."""

    prompt: str
    policy: str
    reference: str | None


class Evaluation(NamedTuple):
    """An evaluation after `n_updates` and `n_examples`."""

    n_updates: int
    n_examples: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample]
    examples: Sequence[Example] = ()
    table: Mapping[str, torch.Tensor] = MappingProxyType({})  # of each example, (B,), as an update's


class RunContext(NamedTuple):
    """Facts about a run for its callbacks."""

    plan: Plan
    run_dir: Path
    rank: int
    data: TrainingData
    log: Callable[[str], None]  # prints a line, on rank 0
    parameters: ParameterCount | None = None  # of the policy


class Callback:
    """A watcher of a run, which may veto updates.

    It is created before a checkpoint is loaded; `on_start` follows, and opens files.
    """

    files: tuple[str, ...] = ()  # files in the run directory that it appends to
    derived: tuple[str, ...] = ()  # files made from these

    def __init__(self, context: RunContext) -> None:
        self.context = context

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        """Return whether this process gets it; most run on rank 0."""
        return context.rank == 0

    def on_start(self) -> None:
        """The run starts, or continues from the state given to `load_state_dict`."""

    def allows(self, update: Update) -> bool:
        """Return whether to apply an update; all ranks must agree."""
        return True

    def on_update(self, update: Update) -> None:
        """An update was applied, or skipped at a callback's veto."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """The policy was evaluated."""

    def on_abort(self, reason: str) -> None:
        """The run ends on NaN or infinite values.

        `reason` is a sentence; `on_end` follows.
        """

    def on_end(self) -> None:
        """The run has ended: complete, stopped by a signal, or aborted."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors, numbers, texts, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`, empty if there is none."""


class Callbacks:
    """Callbacks of a process by name, which get events in this order."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.callbacks = dict(callbacks)
        self._idle: dict[str, dict[str, Any]] = {}  # states of callbacks that are switched off, for a later run

    @classmethod
    def of(cls, table: Mapping[str, type[Callback]], context: RunContext, **given: Callback) -> Callbacks:
        """Build from callbacks given by name, then a table's wanted ones."""
        wanted = {name: callback for name, callback in table.items() if callback.is_wanted(context)}
        return cls({**given, **{name: callback(context) for name, callback in wanted.items()}})

    def emit(self, event: str, *details: Any) -> None:
        """Call `on_EVENT(*details)` of each callback."""
        for callback in self.callbacks.values():
            getattr(callback, f"on_{event}")(*details)

    def allow(self, update: Update) -> bool:
        """Return whether all callbacks allow an update."""
        answers = [callback.allows(update) for callback in self.callbacks.values()]  # every one is asked
        return all(answers)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Non-empty states, also of callbacks that are switched off."""
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        for name, state in states.items():
            _check_plain(state, f"{name}.state_dict()")
        return {**self._idle, **{name: state for name, state in states.items() if state}}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._idle = {name: {**state, "was_off": True} for name, state in states.items() if name not in self.callbacks}
        for name, callback in self.callbacks.items():
            callback.load_state_dict(states.get(name, {}))


def _check_plain(value: Any, place: str) -> None:
    """Check a state; raise TypeError if a checkpoint would lose it."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for item in value:
            _check_plain(item, place)
    elif not isinstance(value, torch.Tensor) and type(value) not in (bool, int, float, str, type(None)):
        raise TypeError(
            f"{place} is a {type(value).__name__}: a checkpoint holds tensors, numbers, texts, lists, dicts"
        )
