"""Guard against NaN, and warnings about spikes and collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpo.analysis.instability import WHAT_TO_TRY, InstabilityDetector, Means, updates_at_start
from dpo.errors import RunError
from dpo.reporting.events import Callback, Evaluation, RunContext, Update

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFinite(RunError):
    """A NaN or infinite loss or gradient.

    Every process of a run raises it at the same update.
    """


class NonFiniteGuard(Callback):
    """Guard against NaN: every rank skips or aborts.

    Rank 0 saves the examples of the update.
    """

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
        numbers = f"loss {losses.mean():.4g} and gradient norm {norm:.4g}"
        what = f"update {update.number} has {numbers}; its examples are in {folder}"
        if self.context.plan.training.nan_policy == "raise":
            raise NonFinite(f"{what}; update not applied; nan_policy=skip would continue")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{what}; {MAX_SKIPPED} updates were skipped before")
        self.context.log(f"warning: {what}; it was skipped")
        return False

    def _write(self, folder: Path, update: Update) -> None:
        """Write the examples as a dataset for `dataset_sources`."""
        columns = {name: column.tolist() for name, column in update.table.items()}
        lines = []
        for row, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            prompt_number, index = example.id
            prompt = self.context.data.train[prompt_number]
            if row in update.drawn:
                best, worst = update.drawn[row].pair
                texts: dict[str, Any] = {"chosen": best.text, "rejected": worst.text}
                texts |= {"score_chosen": best.score, "score_rejected": worst.score}
            else:
                texts = prompt.texts(index)
            if len(texts) == 1:  # an SFT target
                texts = {"completion": texts["chosen"]}
            line = {"prompt": prompt.text, **texts, "prompt_number": prompt_number}
            lines.append(json.dumps(line | {name: column[row] for name, column in columns.items()}) + "\n")
        folder.mkdir(exist_ok=True)
        for split in ("train", "test"):  # a dataset needs both
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]


class CourseWarner(Callback):
    """Warnings about each spike, and one about a collapse."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        loss = context.plan.loss
        # weights of wpo move with the policy, and the loss with them: it is not compared with its start
        self._may_collapse = loss.trains_on == "pairs" and not loss.needs_squares
        self._at_start = updates_at_start(loss.reference)
        self._detector = InstabilityDetector(context.plan.data.batch_size)
        self._warned = False

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._may_collapse:
            return
        now = Means(evaluation.metrics["loss/eval"], evaluation.metrics["rewards_eval/margins"])
        if evaluation.n_updates == 0:
            self._detector.start = now if all(map(math.isfinite, now)) else None
        # an online run follows its scorer, which held-out labels may contradict
        elif self.context.plan.online is None and self._detector.is_collapsed(now):
            self._warn_about_collapse(f"evaluation after {evaluation.n_examples} examples", "", "eval", now)

    def on_update(self, update: Update) -> None:
        for name in ("loss/train", "grad_norm"):
            value = update.metrics[name]
            if ratio := self._detector.find_spike(name, value):
                spike = f"{name} {value:.4g} is {ratio:.0f} times its median before"
                self.context.log(f"warning: update {update.number}: {spike}")
        if not self._may_collapse:
            return
        loss, margin = update.metrics["loss/train"], update.metrics["rewards_train/margins"]
        if collapsed := self._detector.find_collapse(loss, margin):
            means, n = collapsed
            self._warn_about_collapse(f"update {update.number}", f"over the last {n} updates ", "train", means)
        if update.number == self._at_start:
            self._detector.take_start(self._at_start)

    def _warn_about_collapse(self, when: str, over: str, split: str, now: Means) -> None:
        start = self._detector.start
        if self._warned or start is None:
            return
        self._warned = True
        start_margin = round(start.margin, 3) + 0.0  # without rounding errors; -0.0 + 0.0 is 0.0
        self.context.log(
            f"warning: {when}: the run has collapsed: {over}loss/{split} is {now.loss:.4g} (at the start "
            f"{start.loss:.4g}) and rewards_{split}/margins {now.margin:.3g} (at the start "
            f"{start_margin:.3g}). {WHAT_TO_TRY}"
        )

    def state_dict(self) -> dict[str, Any]:
        start = self._detector.start
        return {"warned": self._warned, "first": self._detector.first, "start": start and list(start)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._warned, self._detector.first = state["warned"], dict(state["first"])
            self._detector.start = Means(*state["start"]) if state["start"] else None
