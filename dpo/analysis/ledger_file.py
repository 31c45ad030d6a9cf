"""The files of a ledger, with a row per example and visit.

A training run appends to `ledger.arrows`, an Arrow stream that can be read after a kill and that a resumed run can
truncate. `ledger.parquet` is made from it, and depends on its rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.system.plain_files import check_readable, replacing
from dpo.system.run_directory import PARQUET, STREAM

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


def begin(stream: Path, schema: pa.Schema = SCHEMA) -> None:
    """Write the schema to a stream that is empty or missing."""
    with stream.open("ab") as file:
        if file.tell() == 0:
            file.write(schema.serialize())


def append(stream: Path, columns: Mapping[str, Any], schema: pa.Schema = SCHEMA) -> None:
    """Append rows in one write; `columns` has a list for each column of the schema."""
    rows = pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
    with stream.open("ab") as file:
        file.write(rows.serialize())


def write_parquet(stream: Path, target: Path) -> int:
    """Write a stream's rows as Parquet, atomically; returns their number."""
    import pyarrow.parquet as pq  # here, as runs without a ledger import this file too

    table = _read_stream(stream)
    with replacing(target) as unfinished, unfinished.open("wb") as file:  # as Arrow takes no path that is not UTF-8
        recurring = ["example", "dataset", "split"]
        pq.write_table(table, file, row_group_size=2**16, compression="zstd", use_dictionary=recurring)
    return len(table)


def read_ledger(run_dir: Path) -> pa.Table | None:
    """Read all rows so far, in order; None without a ledger.

    Raises InputError for another kind of file.
    """
    stream, parquet = run_dir / STREAM, run_dir / PARQUET
    if stream.exists():
        return _read_stream(stream)
    if not parquet.exists():
        return None
    import pyarrow.parquet as pq

    check_readable(parquet)
    with _explaining_errors(parquet), parquet.open("rb") as content:
        table = pq.read_table(content)
        _check_schema(table.schema)
        return table


def find_end(stream: Path, size: int) -> int:
    """Find the end of the last append within the first `size` bytes; 0 if the stream does not begin like a ledger."""
    with suppress(InputError):
        return max((end for _, end in _read_appends(stream) if end <= size), default=0)
    return 0


def _read_stream(stream: Path) -> pa.Table:
    """Read a stream's rows, in one chunk, so that files made of them do not depend on the appends."""
    return pa.concat_tables([rows for rows, _ in _read_appends(stream)]).combine_chunks()


def _read_appends(stream: Path) -> Iterator[tuple[pa.Table, int]]:
    """Yield the rows of each complete append, and the byte where it ends; first no rows, and the end of the schema.

    Raises InputError for a schema that is not a ledger's.
    """
    check_readable(stream)
    with stream.open("rb") as file:
        with _explaining_errors(stream):
            reader = pa.ipc.open_stream(file)
            _check_schema(reader.schema)
        yield reader.schema.empty_table(), file.tell()
        while True:
            try:
                batch = reader.read_next_batch()
                batch.validate(full=True)  # without this, damaged offsets of texts would be read out of bounds
            except Exception as error:  # Arrow raises anything at the end or for damage, also a MemoryError
                if isinstance(error, OSError) and error.errno is not None:  # the system's own; Arrow's have no errno
                    raise
                return
            yield pa.Table.from_batches([batch]), file.tell()


def _check_schema(schema: pa.Schema) -> None:
    if schema not in (SCHEMA, ONLINE_SCHEMA, WEIGHTED_SCHEMA):
        raise pa.ArrowInvalid("its columns are not those of a ledger")


def _explaining_errors(path: Path) -> AbstractContextManager[None]:
    """Raise InputError where Arrow cannot read a file."""
    return explaining_library(lambda error: InputError(f"{path} cannot be read as a ledger: {one_sentence(error)}"))
