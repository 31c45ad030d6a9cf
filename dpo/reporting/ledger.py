"""The ledger: values of each example at each visit, in `ledger.parquet`.

`dpo/analysis/ledger_file.py` has the columns, and reads and writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dpo.analysis import ledger_file
from dpo.data.examples import Example
from dpo.models.answers import Drawn
from dpo.reporting.events import Evaluation, RunContext, Update
from dpo.reporting.files import Appender
from dpo.system.run_directory import PARQUET, STREAM

GROWTH = 2  # factor by which the rows must grow before an evaluation writes ledger.parquet again


class Ledger(Appender):
    """Callback that records the examples of each update, skipped ones too, and of each evaluation.

    An update appends some kilobytes to a stream. The whole stream is written as Parquet at the start, at the end, and
    at an evaluation if its rows have doubled since; all writes together cost at most three times the last one.
    """

    files, derived = (STREAM,), (PARQUET,)

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.stream = self.run_dir / STREAM
        self.rows = self.parquet_rows = 0  # in the stream; in ledger.parquet
        self.schema = ledger_file.SCHEMA
        if context.plan.online is not None:
            self.schema = ledger_file.ONLINE_SCHEMA
        elif {"weights", "margins"} & {*context.data.train.columns, *context.data.test.columns}:
            self.schema = ledger_file.WEIGHTED_SCHEMA

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.ledger

    def find_end(self, path: Path, size: int) -> int:
        return ledger_file.find_end(path, size)

    def on_start(self) -> None:
        super().on_start()
        ledger_file.begin(self.stream, self.schema)
        self._write()

    def on_update(self, update: Update) -> None:
        self._append("train", update.number, update.examples, update.table, drawn=update.drawn)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.examples:  # an online run may have prompts without pairs
            self._append("eval", evaluation.n_updates, evaluation.examples, evaluation.table)
        if self.rows >= GROWTH * self.parquet_rows:
            self._write()

    def on_end(self) -> None:
        self._write()

    def _write(self) -> None:
        self.rows = self.parquet_rows = ledger_file.write_parquet(self.stream, self.run_dir / PARQUET)

    def _append(
        self,
        split: str,
        update: int,
        examples: Sequence[Example],
        table: Mapping[str, torch.Tensor],
        *,
        drawn: Mapping[int, Drawn] = MappingProxyType({}),
    ) -> None:
        """Append examples; `update` is an update's number, or the number of updates before an evaluation."""
        n_updates_before = update - 1 if split == "train" else update
        updates_per_epoch = self.context.data.report.examples_per_epoch // self.context.plan.data.batch_size
        score = "rewards" if self.context.plan.loss.scalar_head else "logps"
        values = {name: column.tolist() for name, column in table.items()}
        rows = []
        for i, example in enumerate(examples):
            row = {
                "example": example.digest,
                "dataset": example.dataset,
                "update": update,
                "epoch": n_updates_before // updates_per_epoch,
                "split": split,
                "truncated": example.truncated,
                "loss": values[f"loss/{split}"][i],
                "margin": values[f"rewards_{split}/margins"][i] if f"rewards_{split}/margins" in values else None,
                "weight": example.weight,
                "offset": example.margin,
            }
            for role, n_tokens in zip(example.roles, example.n_scored, strict=True):
                row[f"{role}_tokens"] = n_tokens
                for column, name in (("policy", f"{score}_{split}/{role}"), ("reference", f"reference_{role}")):
                    if name in values:
                        row[f"{column}_{role}"] = values[name][i]
            rows.append(row | (_describe_drawn(drawn[i]) if i in drawn else {}))
        columns = {name: [row.get(name) for row in rows] for name in self.schema.names}
        ledger_file.append(self.stream, columns, self.schema)
        self.rows += len(rows)


def _describe_drawn(drawn: Drawn) -> dict[str, Any]:
    """The columns of a drawn pair: texts and scores of its answers."""
    chosen, rejected = drawn.pair
    others = [answer for i, answer in enumerate(drawn.answers) if i not in (drawn.best, drawn.worst)]
    return {
        "tie": drawn.is_tie,
        "prompt": drawn.prompt,
        "chosen": chosen.text,
        "rejected": rejected.text,
        "others": [answer.text for answer in others],
        "score_chosen": chosen.score,
        "score_rejected": rejected.score,
        "score_others": [answer.score for answer in others],
    }
