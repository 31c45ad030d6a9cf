"""Guard against NaN, and a warning about collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpo.analysis.rules import collapsed
from dpo.analysis.runs import read_run
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
            if i in update.drawn:
                chosen, rejected = update.drawn[i].pair
                texts = {"chosen": chosen.text, "rejected": rejected.text}
                texts |= {"score_chosen": chosen.score, "score_rejected": rejected.score}
            else:
                texts = self._name_texts({role: unescape(text) for role, text in prompt.texts(index).items()})
            record = {"prompt": unescape(prompt.text), "prompt_number": prompt_number, **texts}
            record |= {name: column[i] for name, column in columns.items()}
            if prompt.weights is not None:
                record["weight"] = prompt.weights[index]
            if prompt.margins is not None:
                record["margin"] = prompt.margins[index]
            lines.append(json.dumps(record) + "\n")
        make_directory(folder)
        for split in ("train", "test"):  # a dataset needs both
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    def _name_texts(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """The texts of an example, by role, under the columns that such data has."""
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
    """One warning, at the first evaluation after which the report's rule for collapse holds.

    It reads the logs of the run, so it follows the callback that writes them, and needs no state.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._has_warned = False

    def on_evaluation(self, evaluation: Evaluation) -> None:
        numbers = None if self._has_warned else collapsed(read_run(self.context.run_dir))
        if numbers is not None:
            self._has_warned = True
            advice = "it seldom recovers: stop, and start again with a tenth of lr, more warmup_steps or a larger batch"
            self.context.log(f"warning: the run has collapsed: {numbers}; {advice}")
