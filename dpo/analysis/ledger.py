"""Summary of a ledger: pairs that never flip, label noise, lengths, drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpo.analysis.ledger_file import TEXTS, encode
from dpo.analysis.runs import Run
from dpo.errors import InputError
from dpo.numbers import count, figure, percent, signed

PERIODS = 10  # equal parts of a run's updates
LENGTHS = (-64, -16, 0, 1, 17, 65)  # lower ends of the classes of length differences, in tokens
LARGEST_ROUNDING = 0.01  # of a reward, if policy and reference differ only in dtype


@dataclass(frozen=True)
class Pair:
    """A pair, over its visits after the first update.

    Margins before the first update are 0 or rounding errors, and are ignored.
    """

    example: str
    dataset: str
    split: str
    visits: int
    first_margin: float
    last_margin: float
    highest_margin: float
    relative_margin: float  # mean of its margins, each divided by the median |margin| of its period and split
    texts: Mapping[str, str] | None = None  # prompt, chosen, rejected; the ledger has them only for drawn pairs
    scores: tuple[float, float] | None = None  # of chosen and rejected, for drawn pairs

    def __str__(self) -> str:
        return f"{self.example} {self.dataset} ({self.split})"

    def describe_margins(self) -> str:
        text = (
            f"{count(self.visits, 'visit')}: margin {signed(self.first_margin)} at first, {signed(self.last_margin)} "
            f"at last; on average {figure(self.relative_margin, 2)} times the median size of margins at that time"
        )
        if self.scores is not None:
            chosen, rejected = self.scores
            text += f"; scores: chosen {figure(chosen)}, rejected {figure(rejected)}"
        return text


FindTexts = Callable[[Run, Sequence[Pair]], Mapping[str, Mapping[str, str]]]
"""Finds the texts of a run's pairs, by example; raises InputError if they cannot be loaded."""


@dataclass(frozen=True)
class LengthClass:
    """Pairs with similar length differences, at their last visit."""

    difference: str
    pairs: int
    margin: float
    right: float  # fraction of the pairs with a margin above 0


@dataclass(frozen=True)
class Lengths:
    """Margins at the last visits, against chosen minus rejected tokens."""

    split: str
    correlation: float | None  # Pearson's; None if lengths or margins are all equal
    classes: list[LengthClass]


@dataclass(frozen=True)
class Period:
    """Means over the visits to a dataset's examples in a period.

    Under SFT, where there are no pairs, all but `loss` and `policy_chosen` are None.
    """

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
    right: float | None  # fraction of the visits with a margin above 0


class PairList(NamedTuple):
    title: str
    text: str
    pairs: list[Pair]


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger.

    Lists of pairs are cut to the number asked for; `n_` fields count all.
    """

    rows: int
    examples: int
    truncated: int  # examples
    n_seen_again: int  # pairs with at least two visits after the first update
    n_never_flipped: int  # pairs seen again whose margin was never above 0
    never_flipped: list[Pair]
    n_suspected_noise: int  # pairs never ranked right, whose mean relative margin is -1 or less
    suspected_noise: list[Pair]
    lengths: list[Lengths]
    drift: list[Period]
    note: str | None = None

    def __str__(self) -> str:
        visits, examples = count(self.rows, "visit"), count(self.examples, "example")
        return f"{visits} of {examples}, of which {count(self.truncated, 'is', 'are')} truncated."

    @property
    def listed(self) -> list[Pair]:
        return [*self.never_flipped, *self.suspected_noise]

    def with_texts(self, texts: Callable[[Pair], Mapping[str, str] | None], note: str | None = None) -> LedgerSummary:
        """Put `texts(pair)` into each listed pair."""

        def add_texts(pairs: list[Pair]) -> list[Pair]:
            return [replace(pair, texts=texts(pair)) for pair in pairs]

        never, noise = add_texts(self.never_flipped), add_texts(self.suspected_noise)
        return replace(self, never_flipped=never, suspected_noise=noise, note=note)

    def find_texts(self, run: Run, find: FindTexts) -> LedgerSummary:
        """Put texts into the listed pairs, or explain why any are missing."""
        wanted = [pair for pair in self.listed if pair.texts is None]
        if not wanted:
            return self
        try:
            texts = find(run, wanted)
        except (InputError, OSError) as error:
            return replace(self, note=f"Texts are not shown: {error}")
        examples = {pair.example for pair in wanted}
        n_missing = len(examples - texts.keys())
        note = None
        if n_missing:
            note = f"Its datasets have changed, and lack {n_missing} of these {count(len(examples), 'pair')}"
        return self.with_texts(lambda pair: pair.texts or texts.get(pair.example), note)

    def lists(self) -> list[PairList]:
        """Lists of pairs, worst first.

        There are none if no pair was visited after the first update.
        """
        if not self.lengths:
            return []
        never = (
            f"{self.n_never_flipped:,} of {count(self.n_seen_again, 'pair')} that were seen at least twice "
            f"{'was' if self.n_never_flipped == 1 else 'were'} wrong each time: with a margin never above 0."
        )
        suspected = count(self.n_suspected_noise, "pair was", "pairs were")
        noise = f"{suspected} never ranked right, and wrong by at least the median size of margins at that time."
        if any(pair.scores is None for pair in self.suspected_noise):
            noise += " Check whether their labels are swapped."
        if any(pair.scores is not None for pair in self.suspected_noise):
            noise += " Check whether the scorer is right about the drawn pairs."
        return [
            PairList("Pairs that never flip", never, self.never_flipped),
            PairList("Suspected label noise", noise, self.suspected_noise),
        ]

    def tables(self) -> list[Table]:
        """Tables of margins against length, and of drift."""
        tables = []
        for lengths in self.lengths:
            correlation = "" if lengths.correlation is None else f", correlation {signed(lengths.correlation, 2)}"
            rows = [[c.difference, f"{c.pairs:,}", signed(c.margin), percent(c.right)] for c in lengths.classes]
            columns = ("chosen minus rejected tokens", "pairs", "mean margin", "ranked right")
            tables.append(Table(f"Margin against length, {lengths.split}{correlation}", columns, rows))
        has_pairs = any(period.margin is not None for period in self.drift)
        names = ("margin", "right", "chosen_change", "rejected_change") if has_pairs else ("policy_chosen",)
        rows = []
        for period in self.drift:
            updates = f"{period.first_update:,}"
            if period.last_update > period.first_update:
                updates += f" to {period.last_update:,}"
            values = (getattr(period, name) for name in ("loss", *names))
            shown = ("" if value is None else figure(value) for value in values)
            rows.append([f"{period.dataset} ({period.split})", updates, f"{period.visits:,}", *shown])
        columns = ("dataset", "updates", "visits", "loss", *(name.replace("_", " ") for name in names))
        title = "Drift by dataset, means over the visits; a change is policy minus reference"
        return [*tables, Table(title, columns, rows)]


def summarize(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """Summarize a ledger, with `top` pairs in each list, worst first."""
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
    """Pairs of both splits, without ties: arrays of an entry per pair.

    Visits before the first update are left out.
    """

    def __init__(self, table: pa.Table) -> None:
        margins = _numbers(table, "margin")
        is_first, finite = _is_before_first_update(table), np.isfinite(margins)
        # margins of equal models are rounding errors, even with a float16 reference; the cap is for models that differ
        rounding = min(abs(margins[finite & is_first]).max(initial=0.0), LARGEST_ROUNDING)
        rows = (finite & ~is_first & ~_is_tie(table)).nonzero()[0]
        self._table, margins = table, margins[rows]
        splits, periods = _codes(table, "split")[rows], _periods(table)[rows]
        # margins grow while training, so each is compared with those of its time
        scale = np.maximum(_medians(abs(margins), periods * 2 + splits), rounding)
        relative = np.divide(margins, scale, out=np.zeros_like(margins), where=scale > 0)
        ids = _codes(table, "example")[rows] * 2 + splits  # one number per example and split
        # from here on, indices into `rows` and `margins`: the pair of each visit, and the first and last of each pair
        _, self._first, pair, self.visits = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        n = len(self.visits)
        self._last = np.zeros(n, dtype=np.int64)
        np.maximum.at(self._last, pair, np.arange(len(rows)))
        self.highest = np.full(n, -np.inf)
        np.maximum.at(self.highest, pair, margins)
        self.wrong = self.highest <= -rounding
        self.relative = np.bincount(pair, relative, n) / np.maximum(self.visits, 1)
        self._rows, self._margins = rows, margins

    def worst(self, is_listed: np.ndarray, top: int) -> list[Pair]:
        """The `top` pairs of the lowest relative margins, among those listed."""
        pairs = is_listed.nonzero()[0]
        pairs = pairs[np.argsort(self.relative[pairs], kind="stable")][:top]
        rows = self._table.take(self._rows[self._first[pairs]]).to_pylist()
        return [
            Pair(
                **{name: row[name] for name in TEXTS},
                visits=int(self.visits[pair]),
                first_margin=float(self._margins[self._first[pair]]),
                last_margin=float(self._margins[self._last[pair]]),
                highest_margin=float(self.highest[pair]),
                relative_margin=float(self.relative[pair]),
                **_drawn_parts(row),
            )
            for row, pair in zip(rows, pairs, strict=True)
        ]

    def lengths(self) -> list[Lengths]:
        """Margins against lengths, for each split that has pairs."""
        rows, margins = self._rows[self._last], self._margins[self._last]
        difference = _numbers(self._table, "chosen_tokens")[rows] - _numbers(self._table, "rejected_tokens")[rows]
        is_train = _is_train(self._table)[rows]
        masks = {"train": is_train, "eval": ~is_train}
        return [_lengths(split, difference[mask], margins[mask]) for split, mask in masks.items() if mask.any()]


def _drawn_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and scores of a row, if its pair was drawn."""
    if row.get("tie") is None:
        return {}
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    return {"texts": texts, "scores": (row["score_chosen"], row["score_rejected"])}


def _lengths(split: str, difference: np.ndarray, margins: np.ndarray) -> Lengths:
    varies = len(difference) > 1 and difference.std() > 0 and margins.std() > 0
    ranges = [f"{low} to {high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(LENGTHS)]
    names = [f"below {LENGTHS[0]}", *ranges, f"{LENGTHS[-1]} and more"]
    class_of_pair = np.searchsorted(LENGTHS, difference, side="right")
    classes = []
    for i, name in enumerate(names):
        in_class = margins[class_of_pair == i]
        if len(in_class):
            classes.append(LengthClass(name, len(in_class), float(in_class.mean()), float((in_class > 0).mean())))
    return Lengths(split, float(np.corrcoef(difference, margins)[0, 1]) if varies else None, classes)


def _drift(table: pa.Table) -> list[Period]:
    """Means of each dataset and split by period."""
    keys = np.stack([_codes(table, "dataset"), _codes(table, "split"), _periods(table)])  # (3, rows)
    groups, group_of_row = np.unique(keys, axis=1, return_inverse=True)
    columns = {name: _numbers(table, name) for name in ("loss", "margin", "policy_chosen", "policy_rejected")}
    for side in ("chosen", "rejected"):
        columns[f"{side}_change"] = columns[f"policy_{side}"] - _numbers(table, f"reference_{side}")
    # visits before the first update, and ties, are neither right nor wrong
    undecided = np.isnan(columns["margin"]) | _is_before_first_update(table) | _is_tie(table)
    columns["right"] = np.where(undecided, np.nan, columns["margin"] > 0)
    updates = _numbers(table, "update")
    datasets, splits = (_take_dictionary(table, name).dictionary.to_pylist() for name in ("dataset", "split"))
    found = []
    for group, (dataset, split, _) in enumerate(groups.T):
        rows = (group_of_row.ravel() == group).nonzero()[0]
        first, last = int(updates[rows].min()), int(updates[rows].max())
        means = {name: _mean(values[rows]) for name, values in columns.items()}
        found.append(Period(datasets[dataset], splits[split], first, last, len(rows), **means))
    return found


def _mean(values: np.ndarray) -> float | None:
    """Mean of the finite values; None if there are none.

    A skipped update has NaN.
    """
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as an array, NaN for nulls."""
    return table[name].to_numpy()


def _codes(table: pa.Table, name: str) -> np.ndarray:
    return _take_dictionary(table, name).indices.to_numpy().astype(np.int64)


def _take_dictionary(table: pa.Table, name: str) -> pa.DictionaryArray:
    return table[name].chunk(0)


def _is_train(table: pa.Table) -> np.ndarray:
    return pc.equal(table["split"], "train").to_numpy()


def _is_before_first_update(table: pa.Table) -> np.ndarray:
    """Return whether the policy of each row had no update yet, (rows,)."""
    updates = _numbers(table, "update")
    # a training row has the number of its own update, from 1; an evaluation's, the number of updates before it
    return np.where(_is_train(table), updates == 1, updates == 0)


def _is_tie(table: pa.Table) -> np.ndarray:
    """Return whether each row's pair is a tie, (rows,)."""
    if "tie" not in table.schema.names:
        return np.zeros(len(table), dtype=bool)
    return pc.fill_null(table["tie"], False).to_numpy()


def _periods(table: pa.Table) -> np.ndarray:
    """Tenth of the run that each row is in, (rows,).

    An evaluation belongs to the updates before it, so one before the first update is in period 0.
    """
    updates = _numbers(table, "update")
    last = max(int(updates.max()), 1) if len(updates) else 1
    return np.ceil(updates * min(PERIODS, last) / last).astype(np.int64)


def _medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each value the median of its group, (values,)."""
    medians = np.empty_like(values)
    for group in np.unique(groups):
        medians[groups == group] = np.median(values[groups == group])
    return medians
