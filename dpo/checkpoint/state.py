"""The state for resuming a run, besides policy, optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dpo.errors import InputError

COUNTERS = ("example_counter", "batch_counter", "evaluated_at", "saved_at")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ReferenceState(Protocol):
    digest: str | None
    logps: Stateful


class RunState:
    """The counters of a run, the cached reference log-probabilities, and the states of other parts.

    Without a reference, `frozen` is, on rank 0, the digest of the base under an adapter, which is not saved either.
    """

    def __init__(self, reference: ReferenceState | None, frozen: str | None, *, rank: int, **parts: Stateful) -> None:
        self.example_counter = 0  # examples trained on
        self.batch_counter = 0  # updates applied or skipped
        self.evaluated_at = self.saved_at = -1  # number of examples; an evaluation outdates an earlier checkpoint
        self._frozen = reference.digest if reference else frozen
        self._reference, self._rank, self._parts = reference, rank, parts

    def count(self, n_examples: int) -> tuple[int, int]:
        """Count one more update of `n_examples`. Returns (updates, examples) including it."""
        self.batch_counter += 1
        self.example_counter += n_examples
        return self.batch_counter, self.example_counter

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "reference": self._frozen,
            **({"reference_logps": self._reference.logps.state_dict()} if self._reference else {}),
            **{name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`. Raises InputError if the reference has changed."""
        if self._rank == 0 and state["reference"] != self._frozen:
            what = "reference" if self._reference else "base"
            raise InputError(f"the {what} model has changed since the checkpoint: model.name_or_path or model.archive")
        for name in COUNTERS:
            setattr(self, name, state[name])
        if self._reference:
            self._reference.logps.load_state_dict(state["reference_logps"])
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
