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
        self.online = context.plan.online is not None
        columns = {*context.data.train.columns, *context.data.test.columns}
        self.weighted = not columns.isdisjoint(("weights", "margins"))

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.ledger

    def find_end(self, path: Path, size: int) -> int:
        return ledger_file.find_end(path, size)

    def on_start(self) -> None:
        super().on_start()
        data_schema = ledger_file.WEIGHTED_SCHEMA if self.weighted else ledger_file.SCHEMA
        ledger_file.begin(self.stream, ledger_file.ONLINE_SCHEMA if self.online else data_schema)
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
        n_rows = len(examples)
        n_updates_before = update - 1 if split == "train" else update
        updates_per_epoch = self.context.data.report.examples_per_epoch // self.context.plan.data.batch_size
        tokens_by_role = [dict(zip(example.roles, example.n_scored, strict=True)) for example in examples]

        def select(metric: str, role: str) -> list[float | None] | None:
            """Select a metric's values, None for examples without the role; None if it was not measured."""
            if metric not in table:
                return None
            values = table[metric].tolist()
            return [value if role in example.roles else None for value, example in zip(values, examples, strict=True)]

        score = "rewards" if self.context.plan.loss.scalar_head else "logps"
        columns: dict[str, Any] = {
            "example": [example.digest for example in examples],
            "dataset": [example.dataset for example in examples],
            "update": [update] * n_rows,
            "epoch": [n_updates_before // updates_per_epoch] * n_rows,
            "split": [split] * n_rows,
            "policy_chosen": select(f"{score}_{split}/chosen", "chosen"),
            "policy_rejected": select(f"{score}_{split}/rejected", "rejected"),
            "reference_chosen": select("reference_chosen", "chosen"),
            "reference_rejected": select("reference_rejected", "rejected"),
            "chosen_tokens": [n_tokens.get("chosen") for n_tokens in tokens_by_role],
            "rejected_tokens": [n_tokens.get("rejected") for n_tokens in tokens_by_role],
            "truncated": [example.truncated for example in examples],
            "loss": table[f"loss/{split}"],
            "margin": table.get(f"rewards_{split}/margins"),
        }
        if self.weighted:
            columns["weight"] = [example.weight for example in examples]
            columns["offset"] = [example.margin for example in examples]
        if self.online:
            drawn_rows = [_make_drawn_row(drawn[i]) if i in drawn else {} for i in range(n_rows)]
            columns |= {name: [row.get(name) for row in drawn_rows] for name in ledger_file.DRAWN.names}
        ledger_file.append(self.stream, columns)
        self.rows += n_rows


def _make_drawn_row(drawn: Drawn) -> dict[str, Any]:
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
