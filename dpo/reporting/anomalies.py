"""Guard against NaN, and warnings about spikes and collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpo.analysis.instability import WHAT_TO_TRY, InstabilityDetector, Means, updates_at_start
from dpo.data.tokenization import unescape
from dpo.errors import RunError
from dpo.losses import TRAINS_ON
from dpo.reporting.events import Callback, Evaluation, RunContext, Update
from dpo.system.plain_files import make_directory

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFinite(RunError):
    """A NaN or infinite loss or gradient.

    Every process of a run raises it at the same update.
    """


class NonFiniteGuard(Callback):
    """Guard against NaN and infinity: every rank skips or aborts.

    Rank 0 saves the examples of the update.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.skipped = 0  # updates so far

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return True

    def allows(self, update: Update) -> bool:
        """Return whether losses and gradient are finite.

        Raises NonFinite if not, unless `nan_policy` is skip and at most MAX_SKIPPED updates are skipped with this one.
        """
        grad_norm, losses = update.metrics["grad_norm"], update.table["loss/train"]
        if math.isfinite(grad_norm) and losses.isfinite().all():
            return True
        folder = self.context.run_dir / f"nonfinite-{update.number}"
        if self.context.rank == 0:
            self._write(folder, update)
        self.skipped += 1
        problem = (
            f"update {update.number} has loss {losses.mean():.4g} and gradient norm {grad_norm:.4g}; its examples are "
            f"in {folder}"
        )
        if self.context.plan.training.nan_policy == "raise":
            raise NonFinite(f"{problem}; the update was not applied; nan_policy=skip would skip it and continue")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{problem}; {MAX_SKIPPED} updates were skipped before")
        self.context.log(f"warning: {problem}; the update was skipped")
        return False

    def _write(self, folder: Path, update: Update) -> None:
        """Write the examples as a dataset for `dataset_sources`.

        A line has the texts of an example and its row of `Update.table`.
        """
        columns = {name: column.tolist() for name, column in update.table.items()}
        trains_on, lines = self.context.plan.loss.trains_on, []
        for i, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            prompt_number, index_in_prompt = example.id
            prompt = self.context.data.train[prompt_number]
            texts = {role: unescape(text) for role, text in prompt.texts(index_in_prompt).items()}
            if i in update.drawn:
                chosen, rejected = update.drawn[i].pair
                record: dict[str, Any] = {"chosen": chosen.text, "rejected": rejected.text}
                record |= {"score_chosen": chosen.score, "score_rejected": rejected.score}
            elif trains_on == "targets":
                record = {"completion": texts["chosen"]}
            elif trains_on == "labels":
                [(role, text)] = texts.items()
                record = {"completion": text, "label": role == "chosen"}
            elif trains_on == "lists":
                record = {"responses": [texts[role] for role in TRAINS_ON["lists"] if role in texts]}
            else:
                record = dict(texts)
            if prompt.weights is not None:
                record["weight"] = prompt.weights[index_in_prompt]
            if prompt.margins is not None:
                record["margin"] = prompt.margins[index_in_prompt]
            metrics = {name: column[i] for name, column in columns.items()}
            line = {"prompt": unescape(prompt.text), **record, "prompt_number": prompt_number, **metrics}
            lines.append(json.dumps(line) + "\n")
        make_directory(folder)
        for split in ("train", "test"):  # a dataset needs both
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]


class InstabilityWarner(Callback):
    """Warnings about each spike, and one about a collapse."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        loss = context.plan.loss
        # `loss.wpo` (needs_squares) weights losses by the policy, so a loss is not comparable with one at the start
        self._checks_collapse = loss.has_margins and not loss.needs_squares
        self._updates_at_start = updates_at_start(loss.reference)
        self._detector = InstabilityDetector(context.plan.data.batch_size)
        self._warned = False

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._checks_collapse:
            return
        loss, margin = evaluation.metrics.get("loss/eval"), evaluation.metrics.get("rewards_eval/margins")
        if loss is None or margin is None:  # an online run on prompts without pairs
            return
        means = Means(loss, margin)
        if evaluation.n_updates == 0:
            self._detector.start = means if math.isfinite(loss) and math.isfinite(margin) else None
        # an online run follows its scorer, which may contradict the labels of the evaluation's pairs
        elif self.context.plan.online is None and self._detector.is_collapsed(means):
            self._warn_about_collapse(f"evaluation after {evaluation.n_examples} examples", "", "eval", means)

    def on_update(self, update: Update) -> None:
        for name in ("loss/train", "grad_norm"):
            value = update.metrics[name]
            ratio = self._detector.find_spike(name, value)
            if ratio is not None:
                spike = f"{name} {value:.4g} is {ratio:.0f} times the median of the updates before"
                self.context.log(f"warning: update {update.number}: {spike}")
        if not self._checks_collapse:
            return
        loss, margin = update.metrics["loss/train"], update.metrics["rewards_train/margins"]
        collapse = self._detector.find_collapse(loss, margin)
        if collapse is not None:
            means, n_updates = collapse
            window = f"over the last {n_updates} updates "
            self._warn_about_collapse(f"update {update.number}", window, "train", means)
        if update.number == self._updates_at_start:
            self._detector.take_start(self._updates_at_start)

    def _warn_about_collapse(self, when: str, window: str, split: str, means: Means) -> None:
        """Log a warning, once in a run.

        `window` names the updates that `means` are over; "" for an evaluation.
        """
        start = self._detector.start
        if self._warned or start is None:
            return
        self._warned = True
        # a margin that is 0 up to rounding is shown as 0; adding 0.0 turns -0.0 into 0.0
        start_margin = round(start.margin, 3) + 0.0
        self.context.log(
            f"warning: {when}: the run has collapsed: {window}loss/{split} is {means.loss:.4g} (at the start "
            f"{start.loss:.4g}) and rewards_{split}/margins is {means.margin:.3g} (at the start "
            f"{start_margin:.3g}). {WHAT_TO_TRY}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"warned": self._warned, "detector": self._detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._warned = state["warned"]
            self._detector.load_state_dict(state["detector"])
