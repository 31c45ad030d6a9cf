"""Rules of the report, the runs they apply to, and their findings.

`rules_on_training.py`, `rules_on_pairs.py` and `rules_on_answers.py` have the rules; `findings.py` has the table of
all, and docs/metrics.md describes them. A finding that looks like a fault is a warning, any other a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dpo.analysis.runs import Run

WARNING, NOTE = "warning", "note"
TRAIN_ACCURACY, EVAL_ACCURACY = "rewards_train/accuracies", "rewards_eval/accuracies"
WAYS_TO_HOLD_CHOSEN_UP = "an option that holds chosen responses up: loss.sft_weight, loss=dpop or loss=apo_zero."

# kinds of data (`Run.kind`)
ONLINE = frozenset({"online"})
PAIRS = frozenset({"pairs", "lists"})  # the best and the worst response of a list count as a pair
FIXED = PAIRS | {"labels", "targets"}  # examples of datasets; those of an online run change with the policy
ANY = FIXED | ONLINE


class Finding(NamedTuple):
    """A fact about a run, or what follows from its metrics."""

    level: str  # WARNING or NOTE
    title: str
    value: str  # the numbers it is about
    text: str  # what these mean, and what to do


def warning(title: str, value: str, text: str) -> Finding:
    return Finding(WARNING, title, value, text)


def note(title: str, value: str, text: str) -> Finding:
    return Finding(NOTE, title, value, text)


class Rule(NamedTuple):
    """A rule, the kinds of data it is for, and its needs."""

    find: Callable[[Run], Iterator[Finding]]
    kinds: frozenset[str]
    needs: tuple[str, ...] = ()  # metrics, `samples` or `ledger`

    def apply(self, run: Run) -> list[Finding]:
        """Apply the rule to a run, if the rule is for it."""
        applies = run.kind in self.kinds and all(_has(run, name) for name in self.needs)
        return list(self.find(run)) if applies else []


def _has(run: Run, name: str) -> bool:
    """Return whether a run has what a rule needs.

    A metric must have a value after an update: before the first one, policy and reference are equal.
    """
    if name == "samples":
        return bool(run.samples)
    if name == "ledger":
        return run.ledger is not None
    examples, _ = (run.eval if "eval" in name else run.train).points(name)
    return len(examples) > 0 and examples[-1] > 0
