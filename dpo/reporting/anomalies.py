"""NaN or infinite losses and gradients, and spikes."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from dpo.analysis.findings import SPIKE
from dpo.data.examples import examples_of
from dpo.errors import RunError
from dpo.losses import LOSSES
from dpo.reporting.events import Callback, RunContext, Update

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFinite(RunError):
    """The loss or the gradient is NaN or infinite; every process of a run raises it at the same update."""


class NonFiniteGuard(Callback):
    """Aborts or skips an update with a NaN or infinite loss or gradient, on every rank, and saves its batch for
    replay."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.skipped = 0

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return True

    def allows(self, update: Update) -> bool:
        """Whether losses and gradient are finite.

        Raises NonFinite if not, unless `nan_policy` is to skip the update and few were skipped.
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
        if self.context.config.nan_policy == "raise":
            raise NonFinite(f"{what}; update not applied; nan_policy=skip would continue")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{what}; {MAX_SKIPPED} updates were skipped before")
        self.context.log(f"warning: {what}; it was skipped")
        return False

    def _write(self, folder: Path, update: Update) -> None:
        """Write the examples, with the indices of their prompts and their metrics, as a dataset for
        `dataset_sources`."""
        sft_mode = not LOSSES[self.context.config.loss.name].pairwise
        columns = {name: column.tolist() for name, column in update.table.items()}
        lines = []
        for row, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            number, index = example.id
            prompt = self.context.data.train[number]
            texts: dict[str, Any] = list(examples_of(prompt, sft_mode=sft_mode))[index].texts
            if example.drawn is not None:
                best, worst = example.drawn.pair
                texts = {"chosen": best.text, "rejected": worst.text}
                texts |= {"score_chosen": best.score, "score_rejected": worst.score}
            if sft_mode:
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


class SpikeWarner(Callback):
    """Warns about a loss or gradient norm above `SPIKE` times the median of the last 100, after the first 20
    updates."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._before: dict[str, deque[float]] = {name: deque(maxlen=100) for name in ("loss/train", "grad_norm")}

    def on_update(self, update: Update) -> None:
        for name, before in self._before.items():
            value, usual = update.metrics[name], median(before) if len(before) >= 20 else float("inf")
            if value > SPIKE * usual > 0:
                times = f"{value / usual:.0f} times its median before"
                self.context.log(f"warning: update {update.number}: {name} {value:.4g} is {times}")
            if math.isfinite(value):
                before.append(value)
