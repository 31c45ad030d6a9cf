"""Summary of a ledger's rows: pairs, lengths, datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpo.analysis.ledger_file import TEXTS, encode

PERIODS = 10  # equal parts of a run's updates, which are compared
LENGTHS = (-64, -16, 0, 1, 17, 65)  # lower ends of the classes of length differences, in tokens
LARGEST_ROUNDING = 0.01  # of a reward, where policy and reference are equal but for their dtype


@dataclass(frozen=True)
class Pair:
    """A pair over its visits after the first update; earlier margins are 0 or rounding errors."""

    example: str
    dataset: str
    split: str
    visits: int
    first_margin: float
    last_margin: float
    highest_margin: float
    relative_margin: float  # mean of its margins, each divided by the median |margin| of its period and split
    texts: dict[str, str] | None = None  # prompt, chosen, rejected of a pair that was drawn; others are in the data
    scores: tuple[float, float] | None = None  # of chosen and rejected, of a pair that was drawn


@dataclass(frozen=True)
class LengthClass:
    """Pairs with similar length differences (chosen minus rejected tokens), at their last visit."""

    difference: str
    pairs: int
    margin: float
    right: float  # fraction with a margin above 0


@dataclass(frozen=True)
class Lengths:
    """Margins at the last visits against chosen minus rejected tokens."""

    split: str
    correlation: float | None  # Pearson's; None if lengths or margins are all equal
    classes: list[LengthClass]


@dataclass(frozen=True)
class Period:
    """Means over the visits of a dataset's examples in a period of a run; None where SFT has no value."""

    dataset: str
    split: str
    first_update: int
    last_update: int
    visits: int
    loss: float
    policy_chosen: float
    policy_rejected: float | None
    chosen_change: float | None  # policy minus reference
    rejected_change: float | None
    margin: float | None
    right: float | None  # fraction with a margin above 0


@dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger. Lists of pairs hold at most the number asked for; `n_` counts all."""

    rows: int
    examples: int
    truncated: int  # examples
    n_seen_again: int  # pairs with at least two visits after the first update
    n_never_flipped: int  # of these: the margin was never above 0
    never_flipped: list[Pair]
    n_suspected_noise: int  # never right either, and wrong by more than the typical margin of their period
    suspected_noise: list[Pair]
    lengths: list[Lengths]
    drift: list[Period]


def summarize(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """Summarize a ledger's pairs, lengths and datasets, with `top` pairs in each list, the worst first."""
    table = encode(table)
    pairs = _Pairs(table)
    wrong = pairs.wrong
    again = pairs.visits >= 2
    noise = wrong & (pairs.relative <= -1)
    truncated = table.filter(table["truncated"])
    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(truncated["example"].unique()),
        n_seen_again=int(again.sum()),
        n_never_flipped=int((wrong & again).sum()),
        never_flipped=pairs.worst(wrong & again, top),
        n_suspected_noise=int(noise.sum()),
        suspected_noise=pairs.worst(noise, top),
        lengths=pairs.lengths(),
        drift=_drift(table),
    )


class _Pairs:
    """Pairs of both splits, without ties: arrays in order of the first visit after the first update."""

    def __init__(self, table: pa.Table) -> None:
        updates, margins = _numbers(table, "update"), _numbers(table, "margin")
        applied = updates - _is_train(table)  # updates of the policy before the visit
        finite = np.isfinite(margins)
        # margins between equal models are rounding errors, also with a float16 reference; others are larger
        rounding = min(abs(margins[finite & (applied == 0)]).max(initial=0.0), LARGEST_ROUNDING)
        rows = (finite & (applied > 0) & ~_is_tie(table)).nonzero()[0]
        self._table, margins = table, margins[rows]
        splits, periods = _codes(table, "split")[rows], _periods(table)[rows]
        scale = np.maximum(_medians(abs(margins), periods * 2 + splits), rounding)
        relative = np.divide(margins, scale, out=np.zeros_like(margins), where=scale > 0)
        keys = _codes(table, "example")[rows] * 2 + splits
        _, self._first, pair, self.visits = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        n = len(self.visits)
        self._last = np.zeros(n, dtype=np.int64)
        np.maximum.at(self._last, pair, np.arange(len(rows)))
        self.highest = np.full(n, -np.inf)
        np.maximum.at(self.highest, pair, margins)
        self.wrong = self.highest <= -rounding
        self.relative = np.bincount(pair, relative, n) / np.maximum(self.visits, 1)
        self._rows, self._margins = rows, margins

    def worst(self, which: np.ndarray, top: int) -> list[Pair]:
        chosen = which.nonzero()[0]
        chosen = chosen[np.argsort(self.relative[chosen], kind="stable")][:top]
        rows = self._table.take(self._rows[self._first[chosen]]).to_pylist()
        return [
            Pair(
                **{name: row[name] for name in TEXTS},
                visits=int(self.visits[pair]),
                first_margin=float(self._margins[self._first[pair]]),
                last_margin=float(self._margins[self._last[pair]]),
                highest_margin=float(self.highest[pair]),
                relative_margin=float(self.relative[pair]),
                **_as_drawn(row),
            )
            for row, pair in zip(rows, chosen, strict=True)
        ]

    def lengths(self) -> list[Lengths]:
        """Margins against lengths, for each split that has pairs."""
        rows, margins = self._rows[self._last], self._margins[self._last]
        longer = _numbers(self._table, "chosen_tokens")[rows] - _numbers(self._table, "rejected_tokens")[rows]
        is_train = _is_train(self._table)[rows]
        found = [("train", is_train), ("eval", ~is_train)]
        return [_lengths(split, longer[here], margins[here]) for split, here in found if here.any()]


def _as_drawn(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and scores of a row, if its pair was drawn."""
    if row.get("tie") is None:
        return {}
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    return {"texts": texts, "scores": (row["score_chosen"], row["score_rejected"])}


def _lengths(split: str, longer: np.ndarray, margins: np.ndarray) -> Lengths:
    varies = len(longer) > 1 and longer.std() > 0 and margins.std() > 0
    ends = [f"{low} to {high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(LENGTHS)]
    names = [f"below {LENGTHS[0]}", *ends, f"{LENGTHS[-1]} and more"]
    classes = np.searchsorted(LENGTHS, longer, side="right")
    return Lengths(
        split,
        float(np.corrcoef(longer, margins)[0, 1]) if varies else None,
        [
            LengthClass(names[i], len(m), float(m.mean()), float((m > 0).mean()))
            for i in range(len(names))
            if len(m := margins[classes == i])
        ],
    )


def _drift(table: pa.Table) -> list[Period]:
    """Means of each dataset and split by period."""
    splits, datasets, periods = _codes(table, "split"), _codes(table, "dataset"), _periods(table)
    keys = np.stack([datasets, splits, periods])
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    columns = {name: _numbers(table, name) for name in ("loss", "margin", "policy_chosen", "policy_rejected")}
    for side in ("chosen", "rejected"):
        columns[f"{side}_change"] = columns[f"policy_{side}"] - _numbers(table, f"reference_{side}")
    updates = _numbers(table, "update")
    # visits before the first update, and ties, are neither right nor wrong
    undecided = np.isnan(columns["margin"]) | (updates == _is_train(table)) | _is_tie(table)
    columns["right"] = np.where(undecided, np.nan, columns["margin"] > 0)
    names = {name: _dictionary(table, name).dictionary.to_pylist() for name in ("dataset", "split")}
    found = []
    for number, (dataset, split, _) in enumerate(groups.T):
        rows = (group.ravel() == number).nonzero()[0]
        when = int(updates[rows].min()), int(updates[rows].max())
        means = {name: _mean(values[rows]) for name, values in columns.items()}
        found.append(Period(names["dataset"][dataset], names["split"][split], *when, len(rows), **means))
    return found


def _mean(values: np.ndarray) -> float | None:
    """Mean of the finite values, None without any; a skipped update may have NaN."""
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column, NaN where it has no value."""
    return table[name].to_numpy()


def _codes(table: pa.Table, name: str) -> np.ndarray:
    return _dictionary(table, name).indices.to_numpy().astype(np.int64)


def _dictionary(table: pa.Table, name: str) -> pa.DictionaryArray:
    return table[name].chunk(0)


def _is_train(table: pa.Table) -> np.ndarray:
    return pc.equal(table["split"], "train").to_numpy()


def _is_tie(table: pa.Table) -> np.ndarray:
    """Whether the scorer left each row's pair undecided, (rows,)."""
    if "tie" not in table.schema.names:
        return np.zeros(len(table), dtype=bool)
    return pc.fill_null(table["tie"], False).to_numpy()


def _periods(table: pa.Table) -> np.ndarray:
    """Period of each row, a tenth of the run's updates; an evaluation belongs to the updates before it."""
    updates = _numbers(table, "update")
    last = max(int(updates.max()), 1) if len(updates) else 1
    return np.ceil(updates * min(PERIODS, last) / last).astype(np.int64)


def _medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The median of each value's group."""
    medians = np.empty_like(values)
    for group in np.unique(groups):
        medians[groups == group] = np.median(values[groups == group])
    return medians
