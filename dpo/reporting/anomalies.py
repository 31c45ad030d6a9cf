"""Guard against NaN, and a warning about collapse."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dpo.analysis.measures import COLLAPSED, UPDATES_AT_START, is_collapsed
from dpo.data.tokenization import unescape
from dpo.errors import NonFinite
from dpo.losses import TRAINS_ON
from dpo.reporting.events import Callback, Evaluation, RunContext, Update
from dpo.system.plain_files import make_directory

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFiniteGuard(Callback):
    """Guard against NaN and infinity: every rank skips or aborts, and rank 0 saves the update's examples."""

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
        lines = []
        for i, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            prompt_number, index = example.id
            prompt = self.context.data.train[prompt_number]
            record: dict[str, Any] = {"prompt": unescape(prompt.text), "prompt_number": prompt_number}
            if i in update.drawn:
                chosen, rejected = update.drawn[i].pair
                record |= {"chosen": chosen.text, "rejected": rejected.text}
                record |= {"score_chosen": chosen.score, "score_rejected": rejected.score}
            else:
                record |= self._name_texts({role: unescape(text) for role, text in prompt.texts(index).items()})
            for name, values in (("weight", prompt.weights), ("margin", prompt.margins)):
                if values is not None:
                    record[name] = values[index]
            lines.append(json.dumps(record | {name: column[i] for name, column in columns.items()}) + "\n")
        make_directory(folder)
        for split in ("train", "test"):  # a dataset needs both
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    def _name_texts(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """The texts of an example by the columns that such data has; `texts` are by role."""
        match self.context.plan.loss.trains_on:
            case "targets":
                return {"completion": texts["chosen"]}
            case "labels":
                [(role, text)] = texts.items()
                return {"completion": text, "label": role == "chosen"}
            case "lists":
                return {"responses": [texts[role] for role in TRAINS_ON["lists"] if role in texts]}
        return dict(texts)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = state["skipped"]


class CollapseWarner(Callback):
    """One warning, when `is_collapsed` says so of the last updates."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._start: tuple[float, float] | None = None  # loss and margin
        self._losses, self._margins = (deque[float](maxlen=max(n for n, _ in COLLAPSED)) for _ in range(2))
        self._warned = False

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        # `loss.wpo` (needs_squares) weights losses by the policy, so a loss is not comparable with one at the start
        loss = context.plan.loss
        return context.rank == 0 and loss.has_margins and not loss.needs_squares

    def on_evaluation(self, evaluation: Evaluation) -> None:
        start = [evaluation.metrics.get(name, math.nan) for name in ("loss/eval", "rewards_eval/margins")]
        if evaluation.n_updates == 0 and all(map(math.isfinite, start)):  # an online run may have no pairs
            self._start = start[0], start[1]

    def on_update(self, update: Update) -> None:
        loss, margin = update.metrics["loss/train"], update.metrics["rewards_train/margins"]
        if not math.isfinite(loss + margin):
            return
        self._losses.append(loss)
        self._margins.append(margin)
        if self._start is None and update.number == (1 if self.context.plan.loss.reference else UPDATES_AT_START):
            self._start = fmean(self._losses), fmean(self._margins)
        if self._warned or self._start is None or not is_collapsed(*self._start, [*self._losses], [*self._margins]):
            return
        self._warned = True
        self.context.log(
            f"warning: update {update.number}: the run has collapsed: the last values of loss/train are about "
            f"{median(self._losses):.4g} ({self._start[0]:.4g} at the start), and margins do not grow. It seldom "
            "recovers by itself: stop, and start again with a tenth of lr, more warmup_steps or a larger batch_size."
        )

    def state_dict(self) -> dict[str, Any]:
        start = None if self._start is None else list(self._start)
        return {"warned": self._warned, "start": start, "losses": [*self._losses], "margins": [*self._margins]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._warned = state["warned"]
            self._start = None if state["start"] is None else (state["start"][0], state["start"][1])
            self._losses.extend(state["losses"])
            self._margins.extend(state["margins"])
