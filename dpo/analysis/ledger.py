"""Summary of a ledger: pairs that never flip, label noise, lengths, drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpo.analysis.ledger_file import RECURRING, encode
from dpo.analysis.runs import Run
from dpo.errors import InputError
from dpo.numbers import count, figure, percent, signed

PERIODS = 10  # equal parts of a run's updates
LENGTHS = (-64, -16, 0, 1, 17, 65)  # lower ends of the classes of length differences, in tokens
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
    highest_margin: float
    relative_margin: float  # mean of its margins, each divided by the median size of margins in its period and split
    texts: Mapping[str, str] | None = None  # prompt, chosen, rejected; the ledger has them only for drawn pairs
    scores: tuple[float, float] | None = None  # of chosen and rejected, for drawn pairs

    def __str__(self) -> str:
        return f"{self.example} {self.dataset} ({self.split})"

    def describe_margins(self) -> str:
        """Describe how the margin moved and, for a drawn pair, its scores."""
        text = (
            f"{count(self.visits, 'visit')}: margin {signed(self.first_margin)} at first, {signed(self.last_margin)} "
            f"at last; on average {figure(self.relative_margin, 2)} times the median size of margins at that time"
        )
        if self.scores is not None:
            chosen, rejected = self.scores
            text += f"; scores: chosen {figure(chosen)}, rejected {figure(rejected)}"
        return text


# finds the texts of a run's pairs, by example; raises InputError if they cannot be loaded
FindTexts = Callable[[Run, Sequence[Pair]], Mapping[str, Mapping[str, str]]]


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
    """Pairs to print, the worst first."""

    title: str
    text: str
    pairs: list[Pair]


class Table(NamedTuple):
    """A table to print."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


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
        """Replace the texts of each listed pair by `texts(pair)`."""

        def replace_texts(pairs: list[Pair]) -> list[Pair]:
            return [replace(pair, texts=texts(pair)) for pair in pairs]

        return replace(
            self,
            never_flipped=replace_texts(self.never_flipped),
            suspected_noise=replace_texts(self.suspected_noise),
            note=note,
        )

    def find_texts(self, run: Run, find: FindTexts) -> LedgerSummary:
        """Put texts into the listed pairs, or note why some are missing."""
        without_texts = [pair for pair in self.listed if pair.texts is None]
        if not without_texts:
            return self
        try:
            texts = find(run, without_texts)
        except (InputError, OSError) as error:
            return replace(self, note=f"Texts are not shown: {error}")
        examples = {pair.example for pair in without_texts}
        missing = examples - texts.keys()
        note = f"The run's datasets have changed, and lack {len(missing)} of these {count(len(examples), 'pair')}"
        return self.with_texts(lambda pair: pair.texts or texts.get(pair.example), note if missing else None)

    def explain_missing_pairs(self, run: Run) -> LedgerSummary:
        """Add a note if the run's loss does not train on pairs."""
        if run.has_margins:
            return self
        note = f"loss={run.loss} trains on {run.trains_on}: without pairs there are no margins to rank."
        return replace(self, note=note)

    def lists(self) -> list[PairList]:
        """Make the lists of pairs, worst first.

        There are none if no pair was visited after the first update.
        """
        if not self.lengths:
            return []
        was = "was" if self.n_never_flipped == 1 else "were"
        never_flipped = (
            f"{self.n_never_flipped:,} of {count(self.n_seen_again, 'pair')} that were seen at least twice {was} wrong "
            "each time, with a margin never above 0."
        )
        suspected = count(self.n_suspected_noise, "pair was", "pairs were")
        noise = f"{suspected} never ranked right, and wrong by at least the median size of margins at that time."
        if any(pair.scores is None for pair in self.suspected_noise):
            noise += " Check whether their labels are swapped."
        if any(pair.scores is not None for pair in self.suspected_noise):
            noise += " Check whether the scorer is right about the drawn pairs."
        return [
            PairList("Pairs that never flip", never_flipped, self.never_flipped),
            PairList("Suspected label noise", noise, self.suspected_noise),
        ]

    def tables(self) -> list[Table]:
        """Make the tables of margins against length, and of drift."""
        return [*map(_make_length_table, self.lengths), _make_drift_table(self.drift)]


def summarize(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """Summarize a ledger, with `top` pairs in each list, worst first."""
    table = encode(table)
    pairs = _Pairs(table)
    is_seen_again = pairs.n_visits >= 2
    never_flipped = pairs.always_wrong & is_seen_again
    suspected_noise = pairs.always_wrong & (pairs.mean_relative_margins <= -1)
    truncated = table.filter(table["truncated"])
    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(truncated["example"].unique()),
        n_seen_again=int(is_seen_again.sum()),
        n_never_flipped=int(never_flipped.sum()),
        never_flipped=pairs.list_worst(never_flipped, top),
        n_suspected_noise=int(suspected_noise.sum()),
        suspected_noise=pairs.list_worst(suspected_noise, top),
        lengths=pairs.measure_lengths(),
        drift=_measure_drift(table),
    )


class _Pairs:
    """The pairs of a ledger, in arrays of visits and of pairs.

    A visit is a row of the ledger's table. Ties, and visits before the first update, are left out.
    """

    def __init__(self, table: pa.Table) -> None:
        margins = _numbers(table, "margin")
        is_finite, is_before_first_update = np.isfinite(margins), _is_before_first_update(table)
        # before the first update policy and reference are equal, and margins are rounding errors; if they differ from
        # the start, margins are larger, and LARGEST_ROUNDING is taken
        first_margins = margins[is_finite & is_before_first_update]
        rounding = min(abs(first_margins).max(initial=0.0), LARGEST_ROUNDING)

        self._table = table
        [self._rows] = (is_finite & ~is_before_first_update & ~_is_tie(table)).nonzero()  # (visits,)
        self._margins = margins[self._rows]  # (visits,)
        splits = _codes(table, "split")[self._rows]  # (visits,), 0 or 1

        # margins grow while training, so each is compared with the margins of its period and split
        period_and_split = _periods(table)[self._rows] * 2 + splits
        scales = np.maximum(_find_group_medians(abs(self._margins), period_and_split), rounding)
        relative_margins = np.divide(self._margins, scales, out=np.zeros_like(self._margins), where=scales > 0)

        example_and_split = _codes(table, "example")[self._rows] * 2 + splits  # (visits,), equal for visits of one pair
        # `_first_visits` has an index in `_rows` for each pair, `pair_of_visit` the index of a pair for each visit
        _, self._first_visits, pair_of_visit, self.n_visits = np.unique(
            example_and_split, return_index=True, return_inverse=True, return_counts=True
        )
        n_pairs = len(self.n_visits)
        self._last_visits = np.zeros(n_pairs, dtype=np.int64)
        np.maximum.at(self._last_visits, pair_of_visit, np.arange(len(self._rows)))
        self._highest_margins = np.full(n_pairs, -np.inf)
        np.maximum.at(self._highest_margins, pair_of_visit, self._margins)
        self.always_wrong = self._highest_margins <= -rounding
        self.mean_relative_margins = np.bincount(pair_of_visit, relative_margins, n_pairs) / self.n_visits

    def list_worst(self, is_listed: np.ndarray, top: int) -> list[Pair]:
        """List the `top` pairs of the lowest relative margins, where `is_listed`."""
        by_margin = np.argsort(self.mean_relative_margins, kind="stable")  # indices of pairs, the worst first
        indices = by_margin[is_listed[by_margin]][:top]
        rows = self._table.take(self._rows[self._first_visits[indices]]).to_pylist()
        return [
            Pair(
                **{name: row[name] for name in RECURRING},
                visits=int(self.n_visits[i]),
                first_margin=float(self._margins[self._first_visits[i]]),
                last_margin=float(self._margins[self._last_visits[i]]),
                highest_margin=float(self._highest_margins[i]),
                relative_margin=float(self.mean_relative_margins[i]),
                **_get_drawn_texts(row),
            )
            for row, i in zip(rows, indices, strict=True)
        ]

    def measure_lengths(self) -> list[Lengths]:
        """Relate margins to lengths, for each split that has pairs."""
        rows, margins = self._rows[self._last_visits], self._margins[self._last_visits]  # (pairs,)
        differences = (_numbers(self._table, "chosen_tokens") - _numbers(self._table, "rejected_tokens"))[rows]
        is_train = _is_train(self._table)[rows]
        lengths = []
        for split, mask in (("train", is_train), ("eval", ~is_train)):
            if mask.any():
                lengths.append(_relate_to_lengths(split, differences[mask], margins[mask]))
        return lengths


def _get_drawn_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and scores of a row, if its pair was drawn."""
    if row.get("tie") is None:
        return {}
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    return {"texts": texts, "scores": (row["score_chosen"], row["score_rejected"])}


def _relate_to_lengths(split: str, differences: np.ndarray, margins: np.ndarray) -> Lengths:
    """Average the margins of each class of length differences, and correlate them.

    `differences` and `margins` are (pairs,).
    """
    ranges = [f"{low} to {high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(LENGTHS)]
    names = [f"below {LENGTHS[0]}", *ranges, f"{LENGTHS[-1]} and more"]
    class_of_pair = np.searchsorted(LENGTHS, differences, side="right")  # index in `names`
    classes = []
    for i, name in enumerate(names):
        in_class = margins[class_of_pair == i]
        if len(in_class):
            classes.append(LengthClass(name, len(in_class), float(in_class.mean()), float((in_class > 0).mean())))
    correlation = None
    if len(differences) > 1 and differences.std() > 0 and margins.std() > 0:
        correlation = float(np.corrcoef(differences, margins)[0, 1])
    return Lengths(split, correlation, classes)


def _measure_drift(table: pa.Table) -> list[Period]:
    """Average the visits to each dataset and split in each period."""
    keys = np.stack([_codes(table, "dataset"), _codes(table, "split"), _periods(table)])  # (3, rows)
    groups, group_of_row = np.unique(keys, axis=1, return_inverse=True)  # (3, groups), (rows,)
    columns = {name: _numbers(table, name) for name in ("loss", "margin", "policy_chosen", "policy_rejected")}
    for side in ("chosen", "rejected"):
        columns[f"{side}_change"] = columns[f"policy_{side}"] - _numbers(table, f"reference_{side}")
    # visits before the first update, and ties, are neither right nor wrong
    is_undecided = np.isnan(columns["margin"]) | _is_before_first_update(table) | _is_tie(table)
    columns["right"] = np.where(is_undecided, np.nan, columns["margin"] > 0)
    updates = _numbers(table, "update")
    datasets, splits = (_get_dictionary_column(table, name).dictionary.to_pylist() for name in ("dataset", "split"))
    periods = []
    for group_index, (dataset_code, split_code, _) in enumerate(groups.T):
        is_in_group = group_of_row.ravel() == group_index
        means = {name: _mean(values[is_in_group]) for name, values in columns.items()}
        period = Period(
            datasets[dataset_code],
            splits[split_code],
            first_update=int(updates[is_in_group].min()),
            last_update=int(updates[is_in_group].max()),
            visits=int(is_in_group.sum()),
            **means,
        )
        periods.append(period)
    return periods


def _make_length_table(lengths: Lengths) -> Table:
    correlation = "" if lengths.correlation is None else f", correlation {signed(lengths.correlation, 2)}"
    rows = [[c.difference, f"{c.pairs:,}", signed(c.margin), percent(c.right)] for c in lengths.classes]
    columns = ("chosen minus rejected tokens", "pairs", "mean margin", "ranked right")
    return Table(f"Margin against length, {lengths.split}{correlation}", columns, rows)


def _make_drift_table(drift: Sequence[Period]) -> Table:
    if any(period.margin is not None for period in drift):  # pairs
        fields = ["margin", "right", "chosen_change", "rejected_change"]
    else:  # targets or labels; a change needs a reference
        names = ("policy_chosen", "chosen_change", "rejected_change")
        fields = [name for name in names if any(getattr(period, name) is not None for period in drift)]
    rows = []
    for period in drift:
        updates = f"{period.first_update:,}"
        if period.last_update > period.first_update:
            updates += f" to {period.last_update:,}"
        means = [getattr(period, field) for field in ("loss", *fields)]
        cells = ["" if mean is None else figure(mean) for mean in means]
        rows.append([f"{period.dataset} ({period.split})", updates, f"{period.visits:,}", *cells])
    columns = ("dataset", "updates", "visits", "loss", *(field.replace("_", " ") for field in fields))
    return Table("Drift by dataset, means over the visits; a change is policy minus reference", columns, rows)


def _mean(values: np.ndarray) -> float | None:
    """Mean of the finite values; None if there are none.

    The loss of a skipped update is NaN.
    """
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as an array, NaN for nulls."""
    return table[name].to_numpy()


def _codes(table: pa.Table, name: str) -> np.ndarray:
    """Codes of a column of texts, (rows,), equal for equal texts."""
    return _get_dictionary_column(table, name).indices.to_numpy().astype(np.int64)


def _get_dictionary_column(table: pa.Table, name: str) -> pa.DictionaryArray:
    return table[name].chunk(0)  # `encode` made a single chunk


def _is_train(table: pa.Table) -> np.ndarray:
    return pc.equal(table["split"], "train").to_numpy()


def _is_before_first_update(table: pa.Table) -> np.ndarray:
    """Return whether the policy of each row had no update yet, (rows,)."""
    updates = _numbers(table, "update")
    # a training row has the number of its own update, from 1; an evaluation row has the number of updates before it
    return np.where(_is_train(table), updates == 1, updates == 0)


def _is_tie(table: pa.Table) -> np.ndarray:
    """Return whether each row's pair is a tie, (rows,)."""
    if "tie" not in table.schema.names:
        return np.zeros(len(table), dtype=bool)
    return pc.fill_null(table["tie"], False).to_numpy()


def _periods(table: pa.Table) -> np.ndarray:
    """The period of each row, (rows,).

    Updates have periods from 1 to PERIODS. An evaluation has the period of the update before it, or 0 before the first.
    """
    updates = _numbers(table, "update")
    last_update = int(updates.max(initial=1))
    n_periods = min(PERIODS, last_update)
    return np.ceil(updates * n_periods / last_update).astype(np.int64)


def _find_group_medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Find for each value the median of its group, (values,)."""
    medians = np.empty_like(values)
    for group in np.unique(groups):
        medians[groups == group] = np.median(values[groups == group])
    return medians
