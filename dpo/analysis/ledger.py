"""A ledger has a row for each example of each update and evaluation (docs/metrics.md): a row is a visit of an example.

A run appends rows to an Arrow stream, which can be read after a kill and truncated, and copies them to a Parquet file.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.settings.places import check_exists
from dpo.system.plain_files import check_readable, replacing

STREAM = "ledger.arrows"
PARQUET = "ledger.parquet"
SCHEMA = pa.schema(  # values that an example does not have are null
    {
        "example": "string",
        "dataset": "string",
        "update": "int64",
        "epoch": "int64",
        "split": "string",
        "policy_chosen": "float64",  # exact for float32, the usual dtype of log-probabilities
        "policy_rejected": "float64",
        "reference_chosen": "float64",
        "reference_rejected": "float64",
        "chosen_tokens": "int64",
        "rejected_tokens": "int64",
        "truncated": "bool",
        "loss": "float64",
        "margin": "float64",
        "weight": "float64",
        "offset": "float64",
        # Pairs that the policy drew have these columns, too.
        "tie": "bool",
        "prompt": "large_string",  # all rows together may exceed 2 GB
        "chosen": "large_string",
        "rejected": "large_string",
        "others": pa.list_(pa.large_string()),
        "score_chosen": "float64",
        "score_rejected": "float64",
        "score_others": pa.list_(pa.float64()),
    }
)
LARGEST_ROUNDING = 0.01  # limit of a margin's rounding error, also if policy and reference have different dtypes


def append(stream: Path, rows: Sequence[Mapping] = ()) -> None:
    """Append rows as one record batch; an empty or missing stream first gets the schema.

    Columns that a row lacks become null.
    """
    with stream.open("ab") as file:
        if file.tell() == 0:
            file.write(SCHEMA.serialize())
        if rows:
            file.write(pa.RecordBatch.from_pylist(rows, SCHEMA).serialize())


def write_parquet(run_dir: Path) -> None:
    """Write all rows of the stream to `ledger.parquet`, which is replaced. Raises InputError if there is no stream."""
    import pyarrow.parquet as pq  # not at the top, as runs without a ledger import this module too

    table = read_ledger(run_dir)
    # Python opens the file, as Arrow opens only paths in UTF-8.
    with replacing(run_dir / PARQUET) as unfinished, unfinished.open("wb") as file:
        recurring = ["example", "dataset", "split"]  # columns of repeated texts, each of which is stored once
        pq.write_table(table, file, row_group_size=2**16, compression="zstd", use_dictionary=recurring)


def read_ledger(run_dir: Path) -> pa.Table:
    """Return all rows so far, with the columns of SCHEMA.

    They are combined into one chunk, or the bytes of a Parquet file would depend on how many rows were appended at a
    time. Raises InputError for a directory without a ledger.
    """
    check_exists(run_dir)
    if not (run_dir / STREAM).exists():
        raise InputError(f"{run_dir} has no {STREAM}: pass the directory of a run with ledger=true")
    return pa.concat_tables([rows for rows, _ in _read_appends(run_dir / STREAM)]).combine_chunks()


def find_end(stream: Path, size: int) -> int:
    """Return the offset of the end of the last complete record batch within the first `size` bytes.

    If there is no such batch, this is the end of the schema; if the file is not a ledger, it is 0.
    """
    with suppress(InputError):
        return max((end for _, end in _read_appends(stream) if end <= size), default=0)
    return 0


def _read_appends(stream: Path) -> Iterator[tuple[pa.Table, int]]:
    """Yield (no rows, offset of the schema's end), then (rows, offset of their end) for each call of `append`.

    The iteration ends before rows that are unfinished or damaged. Raises InputError if the schema is not a ledger's.
    """
    check_readable(stream)
    with stream.open("rb") as file:
        with explaining_library(lambda why: InputError(f"{stream} cannot be read as a ledger: {one_sentence(why)}")):
            reader = pa.ipc.open_stream(file)
            if reader.schema != SCHEMA:
                raise pa.ArrowInvalid("its columns are not those of a ledger")
        yield SCHEMA.empty_table(), file.tell()
        while True:
            try:
                batch = reader.read_next_batch()
                batch.validate(full=True)  # without this, damaged offsets of texts would be read out of bounds
            except Exception as error:  # Arrow raises many classes at the end or for damage, even MemoryError
                if isinstance(error, OSError) and error.errno is not None:  # from the system: Arrow sets no errno
                    raise
                return
            yield pa.Table.from_batches([batch]), file.tell()


class LedgerSummary(NamedTuple):
    rows: int
    examples: int  # number of different examples
    truncated: int  # number of truncated examples
    n_seen_again: int  # pairs with at least two visits after the first update
    n_never_flipped: int  # pairs seen again that were never ranked right
    never_flipped: list[dict]  # as `_list_pairs` returns them; both lists have at most `top`
    n_suspected_noise: int  # pairs never ranked right, whose mean relative margin is -1 or less
    suspected_noise: list[dict]


def summarize_ledger(table: pa.Table, *, top: int = 10) -> LedgerSummary:
    """Count a ledger's examples, and find pairs that were ranked wrong at every visit; each list has at most `top`.

    Ties, and visits before the first update, say nothing about a pair, so they are left out when pairs are judged.
    """
    margins = table["margin"].to_numpy()
    updates = table["update"].to_numpy()
    is_train = pc.equal(table["split"], "train").to_numpy()
    # A training row has the number of its own update, and its margin is computed before the update's step. An
    # evaluation row has the number of updates before it.
    is_before_first_update = np.where(is_train, updates == 1, updates == 0)
    is_finite = np.isfinite(margins)
    is_tie = pc.fill_null(table["tie"], False).to_numpy()
    # Before the first update, policy and reference are equal, so the largest margin there is the largest rounding
    # error. If the two models differ from the start, margins are larger, and LARGEST_ROUNDING is used.
    rounding = min(abs(margins[is_finite & is_before_first_update]).max(initial=0.0), LARGEST_ROUNDING)

    # Margins grow while training, so each is compared with the margins of its period and split.
    [rows] = (is_finite & ~is_before_first_update & ~is_tie).nonzero()  # indices of the rows to judge by, (visits,)
    margins = margins[rows]
    last_update = updates.max(initial=1)
    # A period is one of at most ten equal parts of the run's updates. Its number is doubled, and 1 is added for
    # training rows, so that each value of `periods` means one period of one split.
    periods = np.ceil(updates[rows] * min(10, last_update) / last_update) * 2 + is_train[rows]
    relative_margins = np.zeros_like(margins)
    for period in np.unique(periods):
        within = periods == period
        scale = max(np.median(abs(margins[within])), rounding)  # rounding errors must not count as large margins
        if scale > 0:
            relative_margins[within] = margins[within] / scale

    visits = table.select(["example", "split"]).take(rows)
    for name, values in (("margin", margins), ("relative", relative_margins), ("row", rows)):
        visits = visits.append_column(name, pa.array(values))
    statistics = [("margin", "count"), ("margin", "max"), ("margin", "first"), ("margin", "last")]
    statistics += [("relative", "mean"), ("row", "first")]
    # `pairs` has a row per pair and split, with columns such as margin_max. "first" and "last" need the rows in order,
    # which threads would not keep.
    pairs = visits.group_by(["example", "split"], use_threads=False).aggregate(statistics)
    wrong = pairs.filter(pc.field("margin_max") <= -rounding)  # even the best visit ranked the rejected response higher
    wrong = wrong.sort_by([("relative_mean", "ascending"), ("split", "descending")])  # training pairs first
    was_seen_again = pc.field("margin_count") >= 2
    never_flipped = wrong.filter(was_seen_again)
    suspected_noise = wrong.filter(pc.field("relative_mean") <= -1)
    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(table.filter(table["truncated"])["example"].unique()),
        n_seen_again=len(pairs.filter(was_seen_again)),
        n_never_flipped=len(never_flipped),
        never_flipped=_list_pairs(table, never_flipped.slice(0, top)),
        n_suspected_noise=len(suspected_noise),
        suspected_noise=_list_pairs(table, suspected_noise.slice(0, top)),
    )


def _list_pairs(table: pa.Table, pairs: pa.Table) -> list[dict]:
    """List pairs, each with its first visit (a row of `table`) and its statistics (a row of `pairs`).

    The margins of visits before the first update are 0 or rounding errors, so these do not count. `relative_mean` is
    the mean of the pair's margins, each divided by the median of |margin| over all pairs in the same split and the same
    tenth of the run.
    """
    first_visits = table.take(pairs["row_first"]).to_pylist()
    return [visit | pair for visit, pair in zip(first_visits, pairs.to_pylist(), strict=True)]
