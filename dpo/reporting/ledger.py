"""`ledger.parquet`: values of each example at each visit.

Columns and files are in `dpo/analysis/ledger_file.py`, which only runs with a ledger import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dpo.data.examples import Example
from dpo.models.answers import Drawn
from dpo.reporting.events import Evaluation, RunContext, Update
from dpo.reporting.files import Appender
from dpo.system.run_directory import PARQUET, STREAM

if TYPE_CHECKING:
    import torch

GROWTH = 2  # factor by which rows grow before an evaluation writes ledger.parquet again


class Ledger(Appender):
    """Callback that records the examples of each update and evaluation.

    It records skipped updates too. An append is one write of some kilobytes. All rows are read and written as Parquet
    at the start, at an evaluation if they have doubled, and at the end. All these writes together cost at most three
    times as much as the last one.
    """

    files, derived = (STREAM,), (PARQUET,)

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.rows = self.written = 0
        self.online = context.plan.online is not None

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.ledger

    def find_end(self, path: Path, size: int) -> int:
        from dpo.analysis.ledger_file import find_end

        return find_end(path, size) if size else 0

    def on_start(self) -> None:
        from dpo.analysis.ledger_file import ONLINE_SCHEMA, SCHEMA, begin

        super().on_start()
        self.stream, self.parquet = self.run_dir / STREAM, self.run_dir / PARQUET
        begin(self.stream, ONLINE_SCHEMA if self.online else SCHEMA)
        self._write()

    def on_update(self, update: Update) -> None:
        before = update.number - 1
        self._append("train", update.number, before, update.examples, update.table, update.drawn)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._append("eval", evaluation.n_updates, evaluation.n_updates, evaluation.examples, evaluation.table)
        if self.rows >= GROWTH * self.written:
            self._write()

    def on_end(self) -> None:
        self._write()

    def _write(self) -> None:
        from dpo.analysis.ledger_file import write_parquet

        self.rows = self.written = write_parquet(self.stream, self.parquet)

    def _append(
        self,
        split: str,
        number: int,
        n_updates_before: int,
        examples: Sequence[Example],
        table: Mapping[str, torch.Tensor],
        drawn: Mapping[int, Drawn] = MappingProxyType({}),
    ) -> None:
        """Append the examples of an update or evaluation.

        `number` is the row's `update` (docs/metrics.md).
        """
        from dpo.analysis.ledger_file import DRAWN, append

        n = len(examples)
        updates_per_epoch = self.context.data.report.epoch // self.context.plan.data.batch_size
        n_tokens = [dict(zip(example.roles, example.n_scored, strict=True)) for example in examples]

        def pick(metric: str, role: str) -> list[float | None] | None:
            """Values of a metric; an example without this role has None."""
            if metric not in table:
                return None
            values = table[metric].tolist()
            return [v if role in example.roles else None for v, example in zip(values, examples, strict=True)]

        columns: dict[str, Any] = {
            "example": [example.digest for example in examples],
            "dataset": [example.dataset for example in examples],
            "update": [number] * n,
            "epoch": [n_updates_before // updates_per_epoch] * n,
            "split": [split] * n,
            "policy_chosen": pick(f"logps_{split}/chosen", "chosen"),
            "policy_rejected": pick(f"logps_{split}/rejected", "rejected"),
            "reference_chosen": pick("reference/chosen", "chosen"),
            "reference_rejected": pick("reference/rejected", "rejected"),
            "chosen_tokens": [by_role.get("chosen") for by_role in n_tokens],
            "rejected_tokens": [by_role.get("rejected") for by_role in n_tokens],
            "truncated": [example.truncated for example in examples],
            "loss": table[f"loss/{split}"],
            "margin": table.get(f"rewards_{split}/margins"),
        }
        if self.online:
            rows = [_as_row(drawn[i]) if i in drawn else {} for i in range(n)]
            columns |= {name: [row.get(name) for row in rows] for name in DRAWN.names}
        append(self.stream, columns)
        self.rows += n


def _as_row(drawn: Drawn) -> dict[str, Any]:
    """Texts and scores of a prompt's answers, which are stored nowhere else."""
    best, worst = drawn.pair
    others = [answer for i, answer in enumerate(drawn.answers) if i not in (drawn.best, drawn.worst)]
    return {
        "tie": drawn.is_tie,
        "prompt": drawn.prompt,
        "chosen": best.text,
        "rejected": worst.text,
        "others": [answer.text for answer in others],
        "score_chosen": best.score,
        "score_rejected": worst.score,
        "score_others": [answer.score for answer in others],
    }
