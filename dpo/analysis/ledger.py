"""A ledger has a row for each example of each update and evaluation (docs/metrics.md): a row is a visit of an example.

A run appends rows to an Arrow stream, which can be read after a kill and truncated, and copies them to a Parquet file.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.settings.places import check_exists
from dpo.system.plain_files import check_readable, replacing

STREAM = "ledger.arrows"
PARQUET = "ledger.parquet"
N_LISTED = 10  # most pairs in each list of a summary
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


def find_end(path: Path, size: int) -> int:
    """Return the offset of the end of the last complete record batch within the first `size` bytes.

    If there is no such batch, this is the end of the schema; if the file is not a ledger, it is 0.
    """
    with suppress(InputError):
        return max((end for _, end in _read_appends(path) if end <= size), default=0)
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
    never_flipped: list[dict]  # as `_list_pairs` returns them; both lists have at most N_LISTED
    n_suspected_noise: int  # pairs never ranked right, whose mean relative margin is -1 or less
    suspected_noise: list[dict]


def summarize_ledger(table: pa.Table) -> LedgerSummary:
    """Count a ledger's examples, and find pairs that were ranked wrong at every visit; each list has at most N_LISTED.

    Ties, and visits before the first update, say nothing about a pair, so they are left out when pairs are judged.
    """
    visits = table.select(["example", "split", "update", "margin", "tie"]).to_pandas().reset_index(names="row")
    last_update = max(1, visits["update"].max())
    visits = visits[np.isfinite(visits["margin"])]
    # A training row has the number of its own update, and its margin is computed before the update's step. An
    # evaluation row has the number of updates before it.
    is_before_first_update = visits["update"] == np.where(visits["split"] == "train", 1, 0)
    # Before the first update, policy and reference are equal, so the largest margin there is the largest rounding
    # error. If the two models differ from the start, margins are larger, and LARGEST_ROUNDING is used.
    rounding = min(visits["margin"][is_before_first_update].abs().to_numpy().max(initial=0.0), LARGEST_ROUNDING)

    # Margins grow while training, so each is divided by the median size in its split and its period, one of at most ten
    # equal parts of the run's updates. Rounding errors must not count as large margins.
    visits = visits[~is_before_first_update & ~visits["tie"].eq(True)]
    periods = np.ceil(visits["update"] * min(10, last_update) / last_update)
    sizes = visits["margin"].abs().groupby([visits["split"], periods]).transform("median").clip(lower=rounding)
    visits = visits.assign(relative_margin=(visits["margin"] / sizes).where(sizes > 0, 0.0))

    pairs = visits.groupby(["example", "split"], as_index=False, sort=False).agg(
        n_visits=("margin", "count"),
        best_margin=("margin", "max"),
        first_margin=("margin", "first"),
        last_margin=("margin", "last"),
        relative_margin=("relative_margin", "mean"),
        first_row=("row", "first"),
    )
    wrong = pairs[pairs["best_margin"] <= -rounding]  # even the best visit ranked the rejected response higher
    wrong = wrong.sort_values(["relative_margin", "split"], ascending=[True, False])  # training pairs first
    never_flipped = wrong[wrong["n_visits"] >= 2]
    suspected_noise = wrong[wrong["relative_margin"] <= -1]
    return LedgerSummary(
        rows=len(table),
        examples=len(table["example"].unique()),
        truncated=len(table.filter(table["truncated"])["example"].unique()),
        n_seen_again=(pairs["n_visits"] >= 2).sum(),
        n_never_flipped=len(never_flipped),
        never_flipped=_list_pairs(table, never_flipped.head(N_LISTED)),
        n_suspected_noise=len(suspected_noise),
        suspected_noise=_list_pairs(table, suspected_noise.head(N_LISTED)),
    )


def _list_pairs(table: pa.Table, pairs: Any) -> list[dict]:
    """List pairs, each with its first visit (a row of `table`) and its statistics (a row of the data frame `pairs`).

    The margins of visits before the first update are 0 or rounding errors, so these do not count. `relative_margin` is
    the mean of the pair's margins, each divided by the median of |margin| over all pairs in the same split and the same
    tenth of the run.
    """
    first_visits = table.take(pairs["first_row"].to_numpy()).to_pylist()
    return [visit | pair for visit, pair in zip(first_visits, pairs.to_dict("records"), strict=True)]
