"""The callback that writes the ledger (`ledger=true`); `dpo/analysis/ledger.py` has the format of its files."""

from collections.abc import Mapping

from dpo.analysis.ledger import PARQUET, STREAM, append, find_end, write_parquet
from dpo.models.answers import OnlinePair
from dpo.reporting.events import Evaluation, Update
from dpo.reporting.files import Appender


class Ledger(Appender):
    """Appends the rows of each update, even of a skipped one, and of each evaluation.

    At the start and at the end of a run it writes all rows as Parquet.
    """

    switch = "ledger"
    files = (STREAM,)
    derived = (PARQUET,)
    find_end = staticmethod(find_end)

    def on_start(self) -> None:
        super().on_start()
        append(self.run_dir / STREAM)
        write_parquet(self.run_dir)

    def on_update(self, update: Update) -> None:
        self._append("train", update.number, update, update.drawn)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._append("eval", evaluation.n_updates, evaluation)

    def on_end(self) -> None:
        write_parquet(self.run_dir)

    def _append(
        self, split: str, update: int, event: Update | Evaluation, drawn: Mapping[int, OnlinePair] = {}
    ) -> None:
        """Append a row for each example of an event.

        `update` is the number of an update, or how many updates came before an evaluation; `drawn` is `Update.drawn`.
        """
        n_updates_before = update - 1 if split == "train" else update
        updates_per_epoch = self.context.data.examples_per_epoch // self.plan.data.batch_size
        scores = "rewards" if self.plan.loss.scalar_head else "logps"
        rows = []
        for i, example in enumerate(event.examples):
            row = {
                "example": example.digest,
                "dataset": example.dataset,
                "update": update,
                "epoch": n_updates_before // updates_per_epoch,
                "split": split,
                "truncated": example.truncated,
                "weight": example.weight,
                "offset": example.margin,
            }
            metrics = {"loss": f"loss/{split}", "margin": f"rewards_{split}/margins"}  # in `event.table`, by column
            for role, n_tokens in zip(example.roles, example.n_scored, strict=True):
                row[f"{role}_tokens"] = n_tokens
                metrics |= {f"policy_{role}": f"{scores}_{split}/{role}", f"reference_{role}": f"reference_{role}"}
            row |= {column: event.table[name][i].item() for column, name in metrics.items() if name in event.table}
            if pair := drawn.get(i):
                chosen, rejected = pair.pair
                others = [answer for k, answer in enumerate(pair.answers) if k not in (pair.best, pair.worst)]
                row |= {
                    "tie": pair.is_tie,
                    "prompt": pair.prompt,
                    "chosen": chosen.text,
                    "rejected": rejected.text,
                    "others": [answer.text for answer in others],
                    "score_chosen": chosen.score,
                    "score_rejected": rejected.score,
                    "score_others": [answer.score for answer in others],
                }
            rows.append(row)
        append(self.run_dir / STREAM, rows)
