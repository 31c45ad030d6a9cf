"""Summary of a ledger: pairs that were never ranked right, and those whose labels are likely wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpo.analysis.ledger_file import RECURRING, encode

PERIODS = 10  # equal parts of a run's updates
LARGEST_ROUNDING = 0.01  # rounding error of a reward, if policy and reference differ only in dtype


@dataclass(frozen=True)
class Pair:
    """A pair, over its visits after the first update.

    Earlier margins are 0 or rounding errors, and are ignored.
    """

    example: str
    dataset: str
    split: str
    visits: int
    first_margin: float
    last_margin: float
    relative_margin: float  # mean of its margins, each divided by the median size of margins in its period and split
    texts: Mapping[str, str] | None = None  # prompt, chosen, rejected; the ledger has them only for drawn pairs
    scores: tuple[float, float] | None = None  # of chosen and rejected, for drawn pairs


@dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger.

    Lists of pairs are cut to the worst ones, whose number is an option; the counts in `n_` fields are of all pairs.
    """

    rows: int
    examples: int
    truncated: int  # number of truncated examples
    n_seen_again: int  # pairs with at least two visits after the first update
    n_never_flipped: int  # pairs seen again whose margin was never above 0
    never_flipped: list[Pair]
    n_suspected_noise: int  # pairs never ranked right, whose mean relative margin is -1 or less
    suspected_noise: list[Pair]


def summarize(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """Summarize a ledger, with `top` pairs in each list, worst first.

    Ties, and visits before the first update, tell nothing of a pair.
    """
    table = encode(table)
    margins, updates = (table[name].to_numpy() for name in ("margin", "update"))
    is_train = pc.equal(table["split"], "train").to_numpy()
    # a training row has the number of its own update, from 1; an evaluation row has the number of updates before it
    is_before_first_update = np.where(is_train, updates == 1, updates == 0)
    is_finite = np.isfinite(margins)
    # before the first update policy and reference are equal, and margins are rounding errors; if they differ from the
    # start, margins are larger, and LARGEST_ROUNDING is taken
    rounding = min(abs(margins[is_finite & is_before_first_update]).max(initial=0.0), LARGEST_ROUNDING)
    is_tie = np.zeros(len(table), dtype=bool)
    if "tie" in table.schema.names:
        is_tie = pc.fill_null(table["tie"], False).to_numpy()
    [rows] = (is_finite & ~is_before_first_update & ~is_tie).nonzero()  # (visits,)
    margins, is_eval = margins[rows], ~is_train[rows]

    # margins grow while training, so each is compared with the margins of its period and split
    last_update = int(updates.max(initial=1))
    periods = np.ceil(updates[rows] * min(PERIODS, last_update) / last_update).astype(np.int64) * 2 + is_eval
    relative_margins = np.zeros_like(margins)
    for period in np.unique(periods):
        within = periods == period
        scale = max(float(np.median(abs(margins[within]))), rounding)
        relative_margins[within] = margins[within] / scale if scale > 0 else 0.0

    codes = table["example"].chunk(0).indices.to_numpy().astype(np.int64)  # `encode` made a single chunk
    # `first_visits` has an index in `rows` for each pair, `pair_of_visit` the index of a pair for each visit
    _, first_visits, pair_of_visit, n_visits = np.unique(
        codes[rows] * 2 + is_eval, return_index=True, return_inverse=True, return_counts=True
    )
    last_visits = np.zeros_like(first_visits)
    np.maximum.at(last_visits, pair_of_visit, np.arange(len(rows)))
    highest_margins = np.full(len(n_visits), -np.inf)
    np.maximum.at(highest_margins, pair_of_visit, margins)
    mean_relative_margins = np.bincount(pair_of_visit, relative_margins, len(n_visits)) / n_visits
    is_always_wrong = highest_margins <= -rounding
    never_flipped = is_always_wrong & (n_visits >= 2)
    suspected_noise = is_always_wrong & (mean_relative_margins <= -1)

    def list_worst(is_listed: np.ndarray) -> list[Pair]:
        by_margin = np.argsort(mean_relative_margins, kind="stable")
        indices = by_margin[is_listed[by_margin]][:top]
        return [
            Pair(
                **{name: row[name] for name in RECURRING},
                visits=int(n_visits[i]),
                first_margin=float(margins[first_visits[i]]),
                last_margin=float(margins[last_visits[i]]),
                relative_margin=float(mean_relative_margins[i]),
                **_get_drawn_texts(row),
            )
            for row, i in zip(table.take(rows[first_visits[indices]]).to_pylist(), indices, strict=True)
        ]

    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(table.filter(table["truncated"])["example"].unique()),
        n_seen_again=int((n_visits >= 2).sum()),
        n_never_flipped=int(never_flipped.sum()),
        never_flipped=list_worst(never_flipped),
        n_suspected_noise=int(suspected_noise.sum()),
        suspected_noise=list_worst(suspected_noise),
    )


def _get_drawn_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and scores of a row, if its pair was drawn."""
    if row.get("tie") is None:
        return {}
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    return {"texts": texts, "scores": (row["score_chosen"], row["score_rejected"])}
