"""The ledger of a run: a row for each example and visit. Its files, and what they say about the data.

A training run appends to `ledger.arrows`, an Arrow stream: what a kill leaves of it can be read, and a resumed run can
cut it. `ledger.parquet` is made from it, and depends on its rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpo.errors import InputError
from dpo.system.plain_files import check_readable

STREAM, PARQUET = "ledger.arrows", "ledger.parquet"
TEXTS = ("example", "dataset", "split")
SCHEMA = pa.schema(
    {
        "example": pa.string(),
        "dataset": pa.string(),
        "update": pa.int64(),
        "epoch": pa.int64(),
        "split": pa.string(),
        "policy_chosen": pa.float64(),  # holds float32, which losses usually are computed in, exactly
        "policy_rejected": pa.float64(),
        "reference_chosen": pa.float64(),
        "reference_rejected": pa.float64(),
        "chosen_tokens": pa.int64(),
        "rejected_tokens": pa.int64(),
        "truncated": pa.bool_(),
        "loss": pa.float64(),
        "margin": pa.float64(),
    }
)
ENCODED = pa.schema([(f.name, pa.dictionary(pa.int32(), f.type) if f.name in TEXTS else f.type) for f in SCHEMA])
ROW_GROUP = 2**16  # rows that are in memory at a time while a file is written


def begin(stream: Path) -> None:
    """Begin a stream, unless it has begun."""
    with stream.open("ab") as file:
        if file.tell() == 0:
            file.write(SCHEMA.serialize())


def append(stream: Path, columns: Mapping[str, Any]) -> None:
    """Add rows, in one write: sequences or tensors by column, None for a column that has no values."""
    n = len(columns["example"])
    with stream.open("ab") as file:
        file.write(pa.record_batch([_column(f, columns[f.name], n) for f in SCHEMA], schema=SCHEMA).serialize())


def _column(field: pa.Field, values: Any, n: int) -> pa.Array:
    if values is None:
        return pa.nulls(n, field.type)
    return pa.array(np.asarray(values, dtype=np.float64) if pa.types.is_floating(field.type) else values, field.type)


def write_parquet(stream: Path, target: Path) -> int:
    """Write the rows of a stream as Parquet, whole or not at all, in constant memory. Returns their number."""
    beside = target.with_name(f".{target.name}.tmp")
    beside.unlink(missing_ok=True)
    n = 0
    with pq.ParquetWriter(beside, ENCODED, compression="zstd", use_dictionary=list(TEXTS)) as writer:
        for table in _groups(stream):
            writer.write_table(table, row_group_size=ROW_GROUP)
            n += len(table)
    beside.replace(target)
    return n


def read_ledger(run_dir: Path) -> pa.Table | None:
    """All rows in order, as far as the run has come; None if it has no ledger. Raises InputError for another file."""
    if (run_dir / STREAM).exists():
        table = pa.concat_tables([ENCODED.empty_table(), *_groups(run_dir / STREAM)])
    elif (run_dir / PARQUET).exists():
        check_readable(run_dir / PARQUET)
        with _explaining(run_dir / PARQUET):
            table = pq.read_table(run_dir / PARQUET).cast(ENCODED)
    else:
        return None
    return table.unify_dictionaries().combine_chunks()


def _groups(stream: Path) -> Iterator[pa.Table]:
    """The rows in tables of ROW_GROUP, however they were appended; the last may have fewer."""
    waiting, n = [], 0
    for batch in _batches(stream):
        waiting.append(batch)
        n += len(batch)
        while n >= ROW_GROUP:
            table = pa.Table.from_batches(waiting)
            yield _encode(table.slice(0, ROW_GROUP))
            waiting = table.slice(ROW_GROUP).to_batches()
            n -= ROW_GROUP
    if n:
        yield _encode(pa.Table.from_batches(waiting))


def _encode(table: pa.Table) -> pa.Table:
    """The columns in one piece each, texts as dictionaries."""
    columns = [table[name].combine_chunks() for name in SCHEMA.names]
    return pa.Table.from_arrays([c.cast(f.type) for c, f in zip(columns, ENCODED, strict=True)], schema=ENCODED)


def _batches(stream: Path) -> Iterator[pa.RecordBatch]:
    """What was appended at a time, up to what a kill cut off, or what is just being written."""
    check_readable(stream)
    with stream.open("rb") as file:
        with _explaining(stream):
            reader = pa.ipc.open_stream(file)
            if reader.schema != SCHEMA:
                raise pa.ArrowInvalid("its columns are others")
        try:
            yield from reader
        except pa.ArrowInvalid:
            return
        except OSError as error:
            if error.errno is not None:  # the system's, not Arrow's about a body that is cut off
                raise


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowKeyError, ValueError) as error:
        raise InputError(f"{path} is not a ledger of this version: {' '.join(str(error).split())[:200]}") from error


# --- what the rows say ---------------------------------------------------------------------------------------------

PERIODS = 10  # in which the updates of a run are compared
LENGTHS = (-64, -16, 0, 1, 17, 65)  # lower ends of the classes of length differences, in tokens


@dataclass(frozen=True)
class Pair:
    """A pair over the visits after the first update; before it all margins are 0."""

    example: str
    dataset: str
    split: str
    visits: int
    first_margin: float
    last_margin: float
    highest_margin: float
    relative_margin: float  # mean of the margins, each over the median size of the margins of its time and split


@dataclass(frozen=True)
class LengthClass:
    """Pairs whose chosen response is so many tokens longer than the rejected one, at their last visit."""

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
    """Means over the visits of a dataset's examples in a period of a run. What SFT has not is None."""

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
    """What a ledger says. Lists of pairs are cut at the number asked for; `n_` counts all."""

    rows: int
    examples: int
    truncated: int  # examples
    n_seen_again: int  # pairs with at least two visits after the first update
    n_never_flipped: int  # of these: the margin was never above 0
    never_flipped: list[Pair]
    n_suspected_noise: int  # never right either, by more than the typical margin of their time
    suspected_noise: list[Pair]
    lengths: list[Lengths]
    drift: list[Period]


def summarize(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """What a ledger says about pairs, lengths and datasets, with `top` pairs in each list, the worst first."""
    table = _encode(table)
    pairs = _Pairs(table)
    wrong = pairs.highest <= 0
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
    """The pairs of each split, as arrays in order of their first visit after the first update."""

    def __init__(self, table: pa.Table) -> None:
        updates, margins = _numbers(table, "update"), _numbers(table, "margin")
        applied = updates - _is_train(table)  # updates of the policy that was asked
        rows = ((applied > 0) & np.isfinite(margins)).nonzero()[0]
        self._table, margins = table, margins[rows]
        splits, periods = _codes(table, "split")[rows], _periods(table)[rows]
        scale = _medians(abs(margins), periods * 2 + splits)
        relative = np.divide(margins, scale, out=np.zeros_like(margins), where=scale > 0)
        keys = _codes(table, "example")[rows] * 2 + splits
        _, self._first, pair, self.visits = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        n = len(self.visits)
        self._last = np.zeros(n, dtype=np.int64)
        np.maximum.at(self._last, pair, np.arange(len(rows)))
        self.highest = np.full(n, -np.inf)
        np.maximum.at(self.highest, pair, margins)
        self.relative = np.bincount(pair, relative, n) / np.maximum(self.visits, 1)
        self._rows, self._margins = rows, margins

    def worst(self, which: np.ndarray, top: int) -> list[Pair]:
        chosen = which.nonzero()[0]
        chosen = chosen[np.argsort(self.relative[chosen], kind="stable")][:top]
        names = self._table.select(TEXTS).take(self._rows[self._first[chosen]]).to_pylist()
        return [
            Pair(
                **name,
                visits=int(self.visits[pair]),
                first_margin=float(self._margins[self._first[pair]]),
                last_margin=float(self._margins[self._last[pair]]),
                highest_margin=float(self.highest[pair]),
                relative_margin=float(self.relative[pair]),
            )
            for name, pair in zip(names, chosen, strict=True)
        ]

    def lengths(self) -> list[Lengths]:
        """Of each split that has pairs."""
        rows, margins = self._rows[self._last], self._margins[self._last]
        longer = _numbers(self._table, "chosen_tokens")[rows] - _numbers(self._table, "rejected_tokens")[rows]
        is_train = _is_train(self._table)[rows]
        found = [("train", is_train), ("eval", ~is_train)]
        return [_lengths(split, longer[here], margins[here]) for split, here in found if here.any()]


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
    """Of each dataset and split, over the periods."""
    splits, datasets, periods = _codes(table, "split"), _codes(table, "dataset"), _periods(table)
    keys = np.stack([datasets, splits, periods])
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    columns = {name: _numbers(table, name) for name in ("loss", "margin", "policy_chosen", "policy_rejected")}
    for side in ("chosen", "rejected"):
        columns[f"{side}_change"] = columns[f"policy_{side}"] - _numbers(table, f"reference_{side}")
    columns["right"] = np.where(np.isnan(columns["margin"]), np.nan, columns["margin"] > 0)
    updates = _numbers(table, "update")
    names = {name: _dictionary(table, name).dictionary.to_pylist() for name in ("dataset", "split")}
    found = []
    for number, (dataset, split, _) in enumerate(groups.T):
        rows = (group.ravel() == number).nonzero()[0]
        when = int(updates[rows].min()), int(updates[rows].max())
        means = {name: _mean(values[rows]) for name, values in columns.items()}
        found.append(Period(names["dataset"][dataset], names["split"][split], *when, len(rows), **means))
    return found


def _mean(values: np.ndarray) -> float | None:
    """Of what is there and finite: a skipped update may have NaN."""
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


def _periods(table: pa.Table) -> np.ndarray:
    """The number of each row's period: a tenth of the run's updates; an evaluation belongs to the updates before it."""
    updates = _numbers(table, "update")
    last = max(int(updates.max()), 1) if len(updates) else 1
    return np.ceil(updates * min(PERIODS, last) / last).astype(np.int64)


def _medians(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The median of each value's group."""
    medians = np.empty_like(values)
    for group in np.unique(groups):
        medians[groups == group] = np.median(values[groups == group])
    return medians
