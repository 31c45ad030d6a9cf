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

    number: int  # from 1; skipped updates count
    n_examples: int  # so far, those of skipped updates included
    examples: Sequence[Example]
    table: Mapping[str, torch.Tensor]  # per example, (B,): metrics and the reference's log-probabilities
    metrics: Mapping[str, float]  # means over the examples and grad_norm; in `on_update` also lr and speed
    drawn: Mapping[int, Drawn] = MappingProxyType({})  # the policy's answers, by index in `examples`


class Sample(NamedTuple):
    """A prompt with continuations by policy and reference."""

    prompt: str
    policy: str
    reference: str | None  # None without a reference, or if it was freed


class Evaluation(NamedTuple):
    """An evaluation after `n_updates` and `n_examples`."""

    n_updates: int
    n_examples: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample]
    examples: Sequence[Example] = ()
    table: Mapping[str, torch.Tensor] = MappingProxyType({})  # per example, (B,), as in `Update`


class RunContext(NamedTuple):
    """Facts about a run for its callbacks."""

    plan: Plan
    run_dir: Path
    rank: int
    data: TrainingData
    log: Callable[[str], None]  # prints a message, on rank 0
    parameters: ParameterCount | None = None  # of the policy


class Callback:
    """A watcher of a run, which may veto updates.

    It is created before a checkpoint is loaded; `on_start` follows, and opens files.
    """

    files: tuple[str, ...] = ()  # files in the run directory that it appends to
    derived: tuple[str, ...] = ()  # files made from `files`

    def __init__(self, context: RunContext) -> None:
        self.context = context

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        """Return whether this process has this callback.

        Most run on rank 0 alone.
        """
        return context.rank == 0

    def on_start(self) -> None:
        """Handle the start; on a resume, `load_state_dict` came before."""

    def allows(self, update: Update) -> bool:
        """Return whether to apply an update; all ranks must agree."""
        return True

    def on_update(self, update: Update) -> None:
        """Handle an update that was applied, or skipped by a veto."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Handle an evaluation."""

    def on_abort(self, reason: str) -> None:
        """Handle an abort on NaN, with its `reason`; `on_end` follows."""

    def on_end(self) -> None:
        """Handle the end: the run is complete, was stopped, or aborted."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors, numbers, texts, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`, empty if the checkpoint has none."""


class Callbacks:
    """Callbacks of a process by name, which get events in this order."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.callbacks = dict(callbacks)
        self._idle: dict[str, dict[str, Any]] = {}  # states of callbacks that are switched off, for a later run

    @classmethod
    def of(cls, table: Mapping[str, type[Callback]], context: RunContext, **given: Callback) -> Callbacks:
        """Make the given callbacks, then the wanted ones of the table."""
        wanted = {name: callback for name, callback in table.items() if callback.is_wanted(context)}
        return cls({**given, **{name: callback(context) for name, callback in wanted.items()}})

    def emit(self, event: str, *details: Any) -> None:
        """Call `on_EVENT(*details)` of each callback."""
        for callback in self.callbacks.values():
            getattr(callback, f"on_{event}")(*details)

    def allow(self, update: Update) -> bool:
        """Return whether all callbacks allow an update."""
        answers = [callback.allows(update) for callback in self.callbacks.values()]  # ask all, as each may log or count
        return all(answers)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Non-empty states, also those kept for callbacks that are off."""
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        for name, state in states.items():
            _check_plain(state, f"{name}.state_dict()")
        return {**self._idle, **{name: state for name, state in states.items() if state}}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._idle = {name: {**state, "was_off": True} for name, state in states.items() if name not in self.callbacks}
        for name, callback in self.callbacks.items():
            callback.load_state_dict(states.get(name, {}))


def _check_plain(value: Any, place: str) -> None:
    """Raise TypeError for a value that a checkpoint would not restore.

    Checkpoints are read as data, not as arbitrary Python objects.
    """
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
