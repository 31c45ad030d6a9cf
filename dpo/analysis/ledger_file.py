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
import pyarrow.parquet as pq

from dpo.errors import InputError, explaining
from dpo.system.plain_files import check_readable, replacing
from dpo.system.run_directory import PARQUET, STREAM

TEXTS = ("example", "dataset", "split")
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
ROW_GROUP = 2**16  # rows in memory at a time while a file is written


def make_schema(names: Collection[str]) -> pa.Schema:
    """The schema of a ledger with these columns."""
    return ONLINE_SCHEMA if "tie" in names else SCHEMA


def encoded(schema: pa.Schema) -> pa.Schema:
    """The schema with recurring texts dictionary-encoded."""
    return pa.schema([(f.name, pa.dictionary(pa.int32(), f.type) if f.name in TEXTS else f.type) for f in schema])


def begin(stream: Path, schema: pa.Schema = SCHEMA) -> None:
    """Write the schema to a stream that is empty or missing."""
    with stream.open("ab") as file:
        if file.tell() == 0:
            file.write(schema.serialize())


def append(stream: Path, columns: Mapping[str, Any]) -> None:
    """Append rows in one write.

    `columns` has lists or tensors by name, None for a column without values.
    """
    n, schema = len(columns["example"]), make_schema(columns)
    with stream.open("ab") as file:
        file.write(pa.record_batch([_column(f, columns[f.name], n) for f in schema], schema=schema).serialize())


def _column(field: pa.Field, values: Any, n: int) -> pa.Array:
    if values is None:
        return pa.nulls(n, field.type)
    if pa.types.is_floating(field.type) and not isinstance(values, list):  # a tensor
        values = np.asarray(values, dtype=np.float64)
    return pa.array(values, field.type)


def write_parquet(stream: Path, target: Path) -> int:
    """Write a stream's rows as Parquet, atomically and in constant memory.

    Returns their number.
    """
    n, schema = 0, encoded(_schema_in(stream))
    with (
        replacing(target) as beside,
        pq.ParquetWriter(beside, schema, compression="zstd", use_dictionary=list(TEXTS)) as writer,
    ):
        for table in _groups(stream):
            writer.write_table(table, row_group_size=ROW_GROUP)
            n += len(table)
    return n


def read_ledger(run_dir: Path) -> pa.Table | None:
    """Read all rows so far, in order; None without a ledger.

    Raises InputError for another kind of file.
    """
    if (run_dir / STREAM).exists():
        empty = encoded(_schema_in(run_dir / STREAM)).empty_table()
        table = pa.concat_tables([empty, *_groups(run_dir / STREAM)])
    elif (run_dir / PARQUET).exists():
        check_readable(run_dir / PARQUET)
        with _explaining(run_dir / PARQUET):
            table = pq.read_table(run_dir / PARQUET)
            table = table.cast(encoded(make_schema(table.schema.names)))
    else:
        return None
    return table.unify_dictionaries().combine_chunks()


def _groups(stream: Path) -> Iterator[pa.Table]:
    """Yield the rows in tables of ROW_GROUP, the last perhaps smaller.

    How the rows were appended does not change the tables.
    """
    waiting, n = [], 0
    for batch in _batches(stream):
        waiting.append(batch)
        n += len(batch)
        while n >= ROW_GROUP:
            table = pa.Table.from_batches(waiting)
            yield encode(table.slice(0, ROW_GROUP))
            waiting = table.slice(ROW_GROUP).to_batches()
            n -= ROW_GROUP
    if n:
        yield encode(pa.Table.from_batches(waiting))


def encode(table: pa.Table) -> pa.Table:
    """Combine a table's chunks and dictionary-encode recurring texts."""
    schema = encoded(make_schema(table.schema.names))
    columns = [table[field.name].combine_chunks().cast(field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _schema_in(stream: Path) -> pa.Schema:
    """Read the schema at the start of a stream.

    Raises InputError if it is not a ledger's.
    """
    check_readable(stream)
    with stream.open("rb") as file, _explaining(stream):
        schema = pa.ipc.open_stream(file).schema
        if schema not in (SCHEMA, ONLINE_SCHEMA):
            raise pa.ArrowInvalid("its columns are not those of a ledger")
    return schema


def find_end(stream: Path, size: int) -> int:
    """End of the last whole append within the first `size` bytes.

    0 if the stream does not begin like a ledger.
    """
    end = 0
    with suppress(InputError):
        _schema_in(stream)
        for _, end_of_append in _appends(stream):
            if end_of_append > size:
                break
            end = end_of_append
    return end


def _batches(stream: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches appended, up to the first that is incomplete."""
    return (batch for batch, _ in _appends(stream) if batch is not None)


def _appends(stream: Path) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """Yield each whole append of a stream, with its end.

    The first item is None, with the end of the schema.
    """
    with stream.open("rb") as file:
        with _explaining(stream):
            reader = pa.ipc.open_stream(file)
        yield None, file.tell()
        try:
            for batch in reader:
                batch.validate(full=True)  # else damaged offsets of texts would be read out of bounds
                yield batch, file.tell()
        except pa.ArrowException:
            return
        except OSError as error:
            if error.errno is not None:  # an error of the system; Arrow's own error for a truncated batch has none
                raise


def _explaining(path: Path) -> AbstractContextManager[None]:
    errors = (pa.ArrowInvalid, pa.ArrowKeyError, ValueError)
    return explaining(errors, lambda why: InputError(f"{path} is not a ledger of this version: {why}"))
