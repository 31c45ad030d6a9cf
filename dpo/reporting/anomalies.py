"""Guard against NaN or infinite losses and gradients, and warnings about spikes and collapse."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from dpo.analysis.measures import (
    FAINT,
    SPIKE,
    WHAT_TO_TRY,
    Means,
    count_window,
    find_collapse,
    is_collapsed,
    updates_at_start,
)
from dpo.errors import RunError
from dpo.reporting.events import Callback, Evaluation, RunContext, Update

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFinite(RunError):
    """A NaN or infinite loss or gradient; every process of a run raises it at the same update."""


class NonFiniteGuard(Callback):
    """Guard that aborts at or skips a NaN or infinite update, on every rank, and saves its batch for replay."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.skipped = 0

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return True

    def allows(self, update: Update) -> bool:
        """Return whether losses and gradient are finite.

        Raises NonFinite if not, unless `nan_policy` is skip and at most MAX_SKIPPED updates were skipped.
        """
        norm, losses = update.metrics["grad_norm"], update.table["loss/train"]
        if math.isfinite(norm) and losses.isfinite().all():
            return True
        folder = self.context.run_dir / f"nonfinite-{update.number}"
        if self.context.rank == 0:
            self._write(folder, update)
        self.skipped += 1
        what = (
            f"update {update.number} has loss {losses.mean():.4g} and gradient norm {norm:.4g}; its examples are in "
            f"{folder}"
        )
        if self.context.plan.training.nan_policy == "raise":
            raise NonFinite(f"{what}; update not applied; nan_policy=skip would continue")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{what}; {MAX_SKIPPED} updates were skipped before")
        self.context.log(f"warning: {what}; it was skipped")
        return False

    def _write(self, folder: Path, update: Update) -> None:
        """Write the examples, with prompt indices and metrics, as a dataset for `dataset_sources`."""
        columns = {name: column.tolist() for name, column in update.table.items()}
        lines = []
        for row, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            number, index = example.id
            prompt = self.context.data.train[number]
            if row in update.drawn:
                best, worst = update.drawn[row].pair
                texts: dict[str, Any] = {"chosen": best.text, "rejected": worst.text}
                texts |= {"score_chosen": best.score, "score_rejected": worst.score}
            else:
                texts = prompt.texts(index)
            if len(texts) == 1:
                texts = {"completion": texts["chosen"]}
            line = {"prompt": prompt.text, **texts, "prompt_number": number}
            lines.append(json.dumps(line | {name: column[row] for name, column in columns.items()}) + "\n")
        folder.mkdir(exist_ok=True)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]


class CourseWarner(Callback):
    """Warnings about each spike of gradient norm or loss, and one about a collapse.

    A spike is a value above `SPIKE` times the median of the last 100, after the first 20 updates. A loss below its
    start is not a spike: where nearly all pairs are learned, one that is not learned stands out. Nor is a value below
    `FAINT` of the mean of the first 20.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        loss = context.plan.loss
        self._reference = loss.reference
        # weights of wpo move with the policy, and the loss with them: it is not compared with its start
        self._may_collapse = loss.trains_on == "pairs" and not loss.needs_squares
        self._before: dict[str, deque[float]] = {name: deque(maxlen=100) for name in ("loss/train", "grad_norm")}
        self._first: dict[str, float] = {}  # means of the first 20
        self._width = count_window(context.plan.data.batch_size)
        self._window: deque[Means] = deque(maxlen=self._width)
        self._start: Means | None = None
        self._warned = False

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._may_collapse:
            return
        now = Means(evaluation.metrics["loss/eval"], evaluation.metrics["rewards_eval/margins"])
        if evaluation.n_updates == 0:
            self._start = now if all(map(math.isfinite, now)) else None
        # an online run follows its scorer, which held-out labels may contradict
        elif self._start and self.context.plan.online is None and is_collapsed(now, self._start):
            self._warn_about_collapse(f"evaluation after {evaluation.n_examples} examples", "", "eval", now)

    def on_update(self, update: Update) -> None:
        self._look_for_spikes(update)
        if self._may_collapse:
            self._look_for_collapse(update)

    def _look_for_spikes(self, update: Update) -> None:
        for name, before in self._before.items():
            value, usual = update.metrics[name], median(before) if len(before) >= 20 else float("inf")
            learned = name == "loss/train" and self._start and value <= self._start.loss
            if len(before) == 20:
                self._first.setdefault(name, sum(before) / 20)
            if value > SPIKE * usual > 0 and value > FAINT * self._first[name] and not learned:
                times = f"{value / usual:.0f} times its median before"
                self.context.log(f"warning: update {update.number}: {name} {value:.4g} is {times}")
            if math.isfinite(value):
                before.append(value)

    def _look_for_collapse(self, update: Update) -> None:
        now = Means(update.metrics["loss/train"], update.metrics["rewards_train/margins"])
        if not all(map(math.isfinite, now)):
            return
        self._window.append(now)
        n = updates_at_start(self._reference)
        if self._start is None and update.number == len(self._window) == n:
            self._start = Means(*(sum(values) / n for values in zip(*self._window, strict=True)))
        if self._warned or self._start is None:
            return
        losses, margins = zip(*self._window, strict=True)
        if found := find_collapse(losses, margins, self._start, self._width):
            over, means = f"over the last {found.updates} updates ", Means(found.loss, found.margin)
            self._warn_about_collapse(f"update {update.number}", over, "train", means)

    def _warn_about_collapse(self, when: str, over: str, split: str, now: Means) -> None:
        start = self._start
        if self._warned or start is None:
            return
        self._warned = True
        self.context.log(
            f"warning: {when}: the run has collapsed: {over}loss/{split} is {now.loss:.4g} (at the start "
            f"{start.loss:.4g}) and rewards_{split}/margins {now.margin:.3g} (at the start "
            f"{round(start.margin, 3) + 0.0:.3g}). {WHAT_TO_TRY}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "warned": self._warned,
            "first": self._first,
            **({"start": self._start._asdict()} if self._start else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`. An older run has none, and its start is unknown."""
        start = state.get("start")
        self._start = Means(start["loss"], start["margin"]) if start else None
        self._warned = state.get("warned", False)
        self._first = dict(state.get("first", {}))
