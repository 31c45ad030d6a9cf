"""Callbacks that notice what goes wrong in training: NaN, infinity and collapse."""

import math
from collections.abc import Mapping
from pathlib import Path

from dpo.analysis.rules import COLLAPSE_ADVICE, find_collapse
from dpo.analysis.runs import read_run
from dpo.data.schema import write_lines
from dpo.errors import NonFinite, WarningLine
from dpo.losses import TRAINS_ON
from dpo.reporting.events import Callback, Evaluation, RunContext, Update

MAX_SKIPPED = 10  # updates that a run skips before it aborts


class NonFiniteGuard(Callback):
    """Refuses an update with NaN or infinity, on every rank; rank 0 saves the update's examples."""

    skipped = 0  # number of updates skipped so far

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return True

    def allows(self, update: Update) -> bool:
        """Refuse an update with NaN or infinity: raise NonFinite or, with nan_policy=skip, return False.

        After MAX_SKIPPED skipped updates it raises NonFinite, too. A gradient that overflows float16 while the loss
        scale can still be halved is allowed here: the trainer does not apply it, and halves the scale.
        """
        grad_norm = update.metrics["grad_norm"]
        losses = update.table["loss/train"]
        scale = update.metrics.get("loss_scale", 1)
        if losses.isfinite().all() and (math.isfinite(grad_norm) or scale > 1):
            return True
        folder = self.run_dir / f"nonfinite-{update.number}"
        if self.context.rank == 0:
            self._write_examples(folder, update)
        self.skipped += 1
        problem = (
            f"update {update.number} has loss {losses.mean():.4g} and gradient norm {grad_norm:.4g}; its examples are "
            f"in {folder}"
        )
        if "loss_scale" in update.metrics:
            problem += f"; float16 holds numbers up to 65504: compute in bfloat16 or float32 ({scale=:g})"
        if self.plan.training.nan_policy == "raise":
            raise NonFinite(f"{problem}; set nan_policy=skip to skip such updates")
        if self.skipped > MAX_SKIPPED:
            raise NonFinite(f"{problem}; {MAX_SKIPPED} updates were skipped before")
        self.log(WarningLine(f"{problem}; the update was skipped"))
        return False

    def _write_examples(self, folder: Path, update: Update) -> None:
        """Write an update's examples, each with its metrics, as a dataset that the key `dataset_sources` can name."""
        trains_on = self.plan.loss.trains_on
        records = []
        for i, example in enumerate(update.examples):
            assert example.id is not None  # it came from the data
            prompt_number, index = example.id
            prompt = self.context.data.train[prompt_number]
            texts = prompt.texts(index)
            record = {"prompt": prompt.text, "prompt_number": prompt_number}
            if i in update.drawn:  # the policy drew this pair, so the data has no responses
                for role, answer in zip(TRAINS_ON["pairs"], update.drawn[i].pair, strict=True):
                    record |= {role: answer.text, f"score_{role}": answer.score}
            elif trains_on == "targets":
                record["completion"] = texts["chosen"]
            elif trains_on == "labels":
                [(role, text)] = texts.items()
                record |= {"completion": text, "label": role == "chosen"}
            elif trains_on == "lists":
                record["responses"] = [texts[role] for role in TRAINS_ON["lists"] if role in texts]
            else:
                record |= texts
            record |= {name: column[i].item() for name, column in update.table.items()}
            if prompt.weights is not None:
                record["weight"] = example.weight
            if prompt.margins is not None:
                record["margin"] = example.margin
            records.append(record)
        folder.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):  # a dataset needs both
            write_lines(folder / f"{split}.jsonl", records)

    def state_dict(self) -> dict:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping) -> None:
        self.skipped = state.get("skipped", 0)


class CollapseWarner(Callback):
    """Warns once of a collapse. It reads the run's logs, so it must be called after FileLogger, which writes them."""

    _has_warned = False

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._has_warned and (evidence := find_collapse(read_run(self.run_dir))):
            self._has_warned = True
            self.log(WarningLine(f"the run has collapsed: {evidence}; {COLLAPSE_ADVICE}"))

    def state_dict(self) -> dict:
        return {"has_warned": self._has_warned}

    def load_state_dict(self, state: Mapping) -> None:
        self._has_warned = state.get("has_warned", False)
