"""Ledgers made by hand, with the run that they belong to."""

from __future__ import annotations

from pathlib import Path

from dpo.analysis.ledger_file import ONLINE_SCHEMA, SCHEMA, append, begin
from support.records import evaluation, rewards, update, write_run


def row(example: str, number: int, split: str, chosen: float, rejected: float, tokens: tuple[int, int]) -> dict:
    """A visit whose responses have these log-ratios; beta is 0.1."""
    return {
        **dict.fromkeys(SCHEMA.names, 0),
        **{"example": example, "dataset": "hh", "update": number, "epoch": 0, "split": split, "truncated": False},
        **{"policy_chosen": chosen - 50, "reference_chosen": -50.0, "policy_rejected": rejected - 40},
        **{"reference_rejected": -40.0, "margin": 0.1 * (chosen - rejected), "loss": 0.6},
        **dict(zip(("chosen_tokens", "rejected_tokens"), tokens, strict=True)),
    }


def with_ledger(folder: Path, rows: list[dict]) -> Path:
    """Write a run with this ledger, and always the same metrics."""
    run = write_run(folder, [update(1), update(2), evaluation(2, 0.6, **rewards("eval", 0.1, -0.05))])
    schema = ONLINE_SCHEMA if rows and "tie" in rows[0] else SCHEMA
    begin(run / "ledger.arrows", schema)
    append(run / "ledger.arrows", {name: [row[name] for row in rows] for name in schema.names}, schema)
    return run
