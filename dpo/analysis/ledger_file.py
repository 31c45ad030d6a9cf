"""The files of a ledger, with a row per example and visit.

A training run appends to `ledger.arrows`, an Arrow stream that can be read after a kill and that a resumed run can
truncate. `ledger.parquet` is made from it, and depends on its rows alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.system.plain_files import check_readable, replacing
from dpo.system.run_directory import PARQUET, STREAM

RECURRING = ("example", "dataset", "split")  # columns of recurring texts
SCHEMA = pa.schema(
    {
        "example": pa.string(),
        "dataset": pa.string(),
        "update": pa.int64(),
        "epoch": pa.int64(),
        "split": pa.string(),
        "policy_chosen": pa.float64(),  # exact for float32, the usual dtype of log-probabilities
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
DRAWN = pa.schema(  # more columns in an online run; null in rows whose pair is from the data
    {
        "tie": pa.bool_(),
        "prompt": pa.large_string(),  # all rows together may exceed 2 GB
        "chosen": pa.large_string(),
        "rejected": pa.large_string(),
        "others": pa.list_(pa.large_string()),
        "score_chosen": pa.float64(),
        "score_rejected": pa.float64(),
        "score_others": pa.list_(pa.float64()),
    }
)
ONLINE_SCHEMA = pa.schema([*SCHEMA, *DRAWN])
# more columns if the data has weights or margins: the example's weight, and what was subtracted from its logit
WEIGHTED_SCHEMA = pa.schema([*SCHEMA, ("weight", pa.float64()), ("offset", pa.float64())])
ROW_GROUP = 2**16  # rows in memory at a time while a file is written


def make_schema(names: Collection[str]) -> pa.Schema:
    """Choose the schema of a ledger that has these columns."""
    if "tie" in names:
        return ONLINE_SCHEMA
    return WEIGHTED_SCHEMA if "weight" in names else SCHEMA


def encode_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with recurring texts dictionary-encoded."""
    fields = []
    for field in schema:
        dtype = pa.dictionary(pa.int32(), field.type) if field.name in RECURRING else field.type
        fields.append((field.name, dtype))
    return pa.schema(fields)


def begin(stream: Path, schema: pa.Schema = SCHEMA) -> None:
    """Write the schema to a stream that is empty or missing."""
    with stream.open("ab") as file:
        if file.tell() == 0:
            file.write(schema.serialize())


def append(stream: Path, columns: Mapping[str, Any]) -> None:
    """Append rows in one write.

    `columns` has lists or tensors by name, None for a column without values.
    """
    n_rows, schema, arrays = len(columns["example"]), make_schema(columns), []
    for field in schema:
        values = columns[field.name]
        if values is None:
            arrays.append(pa.nulls(n_rows, field.type))
            continue
        if pa.types.is_floating(field.type) and not isinstance(values, list):  # a tensor
            values = np.asarray(values, dtype=np.float64)
        arrays.append(pa.array(values, field.type))
    with stream.open("ab") as file:
        file.write(pa.record_batch(arrays, schema=schema).serialize())


def write_parquet(stream: Path, target: Path) -> int:
    """Write a stream's rows as Parquet, atomically and in constant memory.

    Returns the number of rows.
    """
    n_rows, schema = 0, encode_schema(_read_schema(stream))
    with (
        replacing(target) as unfinished,
        unfinished.open("wb") as file,  # as Arrow takes no path that is not UTF-8
        pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=list(RECURRING)) as writer,
    ):
        for table in _read_row_groups(stream):
            writer.write_table(table, row_group_size=ROW_GROUP)
            n_rows += len(table)
    return n_rows


def read_ledger(run_dir: Path) -> pa.Table | None:
    """Read all rows so far, in order; None without a ledger.

    Raises InputError for another kind of file.
    """
    stream, parquet = run_dir / STREAM, run_dir / PARQUET
    # a stream whose beginning was lost has no rows; the Parquet file has those of the last time that the run ended
    if stream.exists() and not (parquet.exists() and not _begins_with_schema(stream)):
        empty = encode_schema(_read_schema(stream)).empty_table()  # there may be no rows yet
        file, table = stream, pa.concat_tables([empty, *_read_row_groups(stream)])
    elif parquet.exists():
        check_readable(parquet)
        with _explaining_errors(parquet), parquet.open("rb") as content:
            table = pq.read_table(content)
            file, table = parquet, table.cast(encode_schema(make_schema(table.schema.names)))
    else:
        return None
    with _explaining_errors(file):
        _check_rows(table)
        return table.unify_dictionaries().combine_chunks()


def _check_rows(table: pa.Table) -> None:
    """Raise ValueError for rows that no run writes."""
    table.validate(full=True)
    tables = {(*RECURRING, "update", "epoch"): table}
    tables["chosen_tokens", "rejected_tokens"] = table.filter(pc.is_valid(table["margin"]))
    if "tie" in table.schema.names:
        tables["prompt", "chosen", "rejected", "score_chosen", "score_rejected"] = table.filter(
            pc.is_valid(table["tie"])
        )
    for names, rows in tables.items():
        if empty := [name for name in names if rows[name].null_count]:
            raise ValueError(f"it has empty cells in {', '.join(empty)}")
    if not {*table["split"].unique().to_pylist()} <= {"train", "eval"}:
        raise ValueError("a split is neither train nor eval")
    if any(pc.min(table[name]).as_py() < 0 for name in ("update", "epoch") if len(table)):
        raise ValueError("a number of updates is negative")


def _read_row_groups(stream: Path) -> Iterator[pa.Table]:
    """Yield a stream's rows in tables of ROW_GROUP, the last perhaps smaller.

    The tables do not depend on how the rows were appended.
    """
    buffered, n_rows = [], 0
    for batch, _ in _read_appends(stream):
        if batch is None:  # the schema
            continue
        buffered.append(batch)
        n_rows += len(batch)
        while n_rows >= ROW_GROUP:
            table = pa.Table.from_batches(buffered)
            yield encode(table.slice(0, ROW_GROUP))
            buffered = table.slice(ROW_GROUP).to_batches()
            n_rows -= ROW_GROUP
    if n_rows:
        yield encode(pa.Table.from_batches(buffered))


def encode(table: pa.Table) -> pa.Table:
    """Combine a table's chunks and dictionary-encode recurring texts."""
    schema = encode_schema(make_schema(table.schema.names))
    columns = [table[field.name].combine_chunks().cast(field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _read_schema(stream: Path) -> pa.Schema:
    """Read the schema at the start of a stream.

    Raises InputError for a schema that is not a ledger's.
    """
    check_readable(stream)
    with stream.open("rb") as file, _explaining_errors(stream):
        schema = pa.ipc.open_stream(file).schema
        if schema not in (SCHEMA, ONLINE_SCHEMA, WEIGHTED_SCHEMA):
            raise pa.ArrowInvalid("its columns are not those of a ledger")
    return schema


def _begins_with_schema(stream: Path) -> bool:
    try:
        _read_schema(stream)
    except InputError:
        return False
    return True


def find_end(stream: Path, size: int) -> int:
    """Find the end of the last append within the first `size` bytes.

    0 if the stream does not begin like a ledger.
    """
    last_end = 0
    with suppress(InputError):
        _read_schema(stream)
        for _, end in _read_appends(stream):
            if end > size:
                break
            last_end = end
    return last_end


def _read_appends(stream: Path) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """Yield each complete append, and the byte where it ends.

    The first item is None and the end of the schema.
    """
    with stream.open("rb") as file:
        with _explaining_errors(stream):
            reader = pa.ipc.open_stream(file)
        yield None, file.tell()
        while (batch := _read_append(reader)) is not None:
            yield batch, file.tell()


def _read_append(reader: pa.ipc.RecordBatchStreamReader) -> pa.RecordBatch | None:
    """The next append; None after the last complete one."""
    try:
        batch = reader.read_next_batch()
        batch.validate(full=True)  # without this, damaged offsets of texts would be read out of bounds
    except Exception as error:  # Arrow raises anything for damage, also a MemoryError for a damaged length
        if isinstance(error, OSError) and error.errno is not None:  # the system's own; Arrow's have no errno
            raise
        return None
    return batch


def _explaining_errors(path: Path) -> AbstractContextManager[None]:
    """Raise InputError where Arrow cannot read a file."""
    return explaining_library(lambda error: InputError(f"{path} cannot be read as a ledger: {one_sentence(error)}"))
