"""Summary of a ledger: pairs that were never ranked right, and those whose labels are likely wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    margins, updates = table["margin"].to_numpy(), table["update"].to_numpy()
    is_train = pc.equal(table["split"], "train").to_numpy()
    # a training row has the number of its own update, from 1; an evaluation row has the number of updates before it
    is_before_first_update = np.where(is_train, updates == 1, updates == 0)
    is_finite = np.isfinite(margins)
    # before the first update policy and reference are equal, and margins are rounding errors; if they differ from the
    # start, margins are larger, and LARGEST_ROUNDING is taken
    rounding = min(abs(margins[is_finite & is_before_first_update]).max(initial=0.0), LARGEST_ROUNDING)
    is_tie = pc.fill_null(table["tie"], False).to_numpy() if "tie" in table.schema.names else np.False_

    # margins grow while training, so each is compared with the margins of its period and split
    [rows] = (is_finite & ~is_before_first_update & ~is_tie).nonzero()  # (visits,)
    margins, last_update = margins[rows], int(updates.max(initial=1))
    periods = np.ceil(updates[rows] * min(PERIODS, last_update) / last_update) * 2 + is_train[rows]
    relative_margins = np.zeros_like(margins)
    for period in np.unique(periods):
        within = periods == period
        scale = max(float(np.median(abs(margins[within]))), rounding)
        relative_margins[within] = margins[within] / scale if scale > 0 else 0.0

    visits = table.select(["example", "dataset", "split"]).take(rows)
    for name, values in (("margin", margins), ("relative", relative_margins), ("row", rows)):
        visits = visits.append_column(name, pa.array(values))
    pairs = visits.group_by(["example", "split"], use_threads=False).aggregate(
        [
            *(("margin", function) for function in ("count", "max", "first", "last")),
            *(("relative", "mean"), ("dataset", "first"), ("row", "first")),
        ]
    )
    wrong = pairs.filter(pc.field("margin_max") <= -rounding).sort_by(
        [("relative_mean", "ascending"), ("split", "descending")]  # training pairs first
    )
    never_flipped = wrong.filter(pc.field("margin_count") >= 2)
    suspected_noise = wrong.filter(pc.field("relative_mean") <= -1)
    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(table.filter(table["truncated"])["example"].unique()),
        n_seen_again=len(pairs.filter(pc.field("margin_count") >= 2)),
        n_never_flipped=len(never_flipped),
        never_flipped=[_make_pair(table, pair) for pair in never_flipped.slice(0, top).to_pylist()],
        n_suspected_noise=len(suspected_noise),
        suspected_noise=[_make_pair(table, pair) for pair in suspected_noise.slice(0, top).to_pylist()],
    )


def _make_pair(table: pa.Table, pair: Mapping[str, Any]) -> Pair:
    """Make a pair of its numbers, with its texts and scores if it was drawn."""
    [row] = table.slice(pair["row_first"], 1).to_pylist()
    drawn: dict[str, Any] = {}
    if row.get("tie") is not None:
        drawn["texts"] = {name: row[name] for name in ("prompt", "chosen", "rejected")}
        drawn["scores"] = row["score_chosen"], row["score_rejected"]
    return Pair(
        pair["example"],
        pair["dataset_first"],
        pair["split"],
        visits=pair["margin_count"],
        first_margin=pair["margin_first"],
        last_margin=pair["margin_last"],
        relative_margin=pair["relative_mean"],
        **drawn,
    )
