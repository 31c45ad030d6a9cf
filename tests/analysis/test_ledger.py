"""The ledger: its summary and its files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpo.analysis import ledger_file
from dpo.analysis.ledger import Pair, summarize
from dpo.analysis.ledger_file import (
    DRAWN,
    ONLINE_SCHEMA,
    PARQUET,
    STREAM,
    append,
    begin,
    read_ledger,
    write_parquet,
)
from dpo.errors import InputError


def visit(example: str, update: int, margin: float | None, **facts: Any) -> dict[str, Any]:
    """A row; chosen has 10 tokens more than rejected.

    Both log-probabilities were -3 under the reference.
    """
    common = {"example": example, "dataset": "hh", "update": update, "epoch": 0, "split": "train", "truncated": False}
    logps = {"policy_chosen": -2.0, "policy_rejected": -5.0, "reference_chosen": -3.0, "reference_rejected": -3.0}
    return {**common, **logps, "chosen_tokens": 30, "rejected_tokens": 20, "loss": 0.5, "margin": margin, **facts}


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), ledger_file.SCHEMA)


def test_pairs_that_never_flip_were_wrong_at_each_of_several_visits_after_the_first_update():
    summary = summarize(
        table_of(
            *(visit(name, 1, 0.0) for name in ("wrong", "flips", "once")),  # the policy is the reference
            visit("wrong", 2, -0.1),
            visit("flips", 2, -0.1),
            visit("once", 2, -0.1),
            visit("right", 2, 0.2),
            visit("wrong", 3, -0.3),
            visit("flips", 3, 0.1),
            visit("tie", 3, 0.0, split="eval"),
            visit("tie", 4, 0.0, split="eval"),
        )
    )
    assert (summary.rows, summary.examples) == (11, 5)
    assert (summary.n_seen_again, summary.n_never_flipped) == (3, 2)
    assert summary.never_flipped == [
        Pair("wrong", "hh", "train", 2, -0.1, -0.3, pytest.approx((-1.0 - 1.5) / 2)),  # medians 0.1 and 0.2
        Pair("tie", "hh", "eval", 2, 0.0, 0.0, 0.0),
    ]


def drawn(example: str, update: int, margin: float, scores: tuple[float, float], **facts: Any) -> dict[str, Any]:
    """A visit of a drawn pair; equal scores are a tie."""
    texts = {"prompt": "Why?", "chosen": f" {example}", "rejected": " no", "others": [" so"]}
    numbers = {"score_chosen": scores[0], "score_rejected": scores[1], "score_others": [scores[1]]}
    return {**visit(example, update, margin), "tie": scores[0] == scores[1], **texts, **numbers, **facts}


def test_drawn_pairs_have_their_texts_in_the_ledger_and_ties_are_not_wrong():
    nothing = dict.fromkeys(DRAWN.names)
    rows = [
        *(visit("given", update, -0.2) | nothing for update in (2, 3)),
        drawn("tie", 2, -0.3, (1.0, 1.0)),
        drawn("wrong", 2, -0.3, (2.0, 1.0)),
        *(drawn(f"right{i}", 2, 0.1, (2.0, 1.0)) for i in range(3)),
    ]
    summary = summarize(pa.Table.from_pylist(rows, ONLINE_SCHEMA))
    assert [(pair.example, pair.texts, pair.scores) for pair in summary.suspected_noise] == [
        ("wrong", {"prompt": "Why?", "chosen": " wrong", "rejected": " no"}, (2.0, 1.0)),
        ("given", None, None),
    ]
    assert summary.n_seen_again == 1


def test_a_margin_within_the_rounding_of_equal_models_is_neither_wrong_nor_noise():
    before = [visit("a", 0, 0.0005, split="eval"), visit("b", 0, -0.0004, split="eval")]  # float16 reference
    after = [visit(name, update, -0.0004) for name in ("c", "d", "e") for update in (2, 3)]
    summary = summarize(table_of(*before, *after))
    assert (summary.n_never_flipped, summary.n_suspected_noise) == (0, 0)

    trained = [visit("c", 9, -0.2), visit("c", 10, -0.2), visit("d", 10, 0.1)]
    assert [pair.example for pair in summarize(table_of(*before, *trained)).suspected_noise] == ["c"]


def test_suspected_noise_is_wrong_by_more_than_is_typical_at_its_time_the_worst_first():
    early = [visit(f"early {i}", 2, 0.1) for i in range(9)]
    late = [visit(f"late {i}", 20, 4.0) for i in range(9)]
    doubtful = [visit("a", 2, -0.3), visit("b", 20, -8.0), visit("usual", 20, -0.3), visit("once right", 20, -9.0)]
    summary = summarize(table_of(*early, visit("once right", 2, 0.1), *late, *doubtful), top=1)

    assert summary.n_suspected_noise == 2
    assert [(p.example, p.relative_margin) for p in summary.suspected_noise] == [("a", pytest.approx(-3))]
    assert summary.n_never_flipped == 0  # seen once each


def test_without_pairs_nothing_is_listed():
    summary = summarize(table_of(*(visit("a", update, None, truncated=True) for update in (1, 2))))
    assert (summary.examples, summary.truncated, summary.n_seen_again) == (1, 1, 0)
    assert summarize(ledger_file.SCHEMA.empty_table()).rows == 0


# --- the files -----------------------------------------------------------------------------------------------------

ROWS = [visit(f"{i}", i, i / 3) for i in range(23)]


def stream_of(folder: Path, *sizes: int) -> Path:
    """The rows appended so many at a time."""
    folder.mkdir()
    begin(folder / STREAM)
    start = 0
    for size in sizes:
        part = ROWS[start : start + size]
        append(folder / STREAM, {name: [row[name] for row in part] for name in ledger_file.SCHEMA.names})
        start += size
    return folder / STREAM


def test_the_file_depends_on_the_rows_and_not_on_how_they_were_appended(tmp_path):
    files = []
    for name, sizes in {"a": (23,), "b": (1, 2, 7, 13), "c": (4, 4, 4, 4, 4, 3)}.items():
        files.append(tmp_path / name / PARQUET)
        assert write_parquet(stream_of(tmp_path / name, *sizes), files[-1]) == 23
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == sorted((STREAM, PARQUET))

    assert len({file.read_bytes() for file in files}) == 1
    assert pq.read_table(files[0]).to_pylist() == read_ledger(tmp_path / "a").to_pylist() == ROWS
    files[0].with_name(STREAM).unlink()
    assert read_ledger(tmp_path / "a").to_pylist() == ROWS


def test_whole_appends_of_a_stream_that_was_cut_are_read(tmp_path):
    sizes = (1, 2, 3)
    ends = [len(stream_of(tmp_path / str(n), *sizes[:n]).read_bytes()) for n in range(len(sizes) + 1)]
    content = (tmp_path / "3" / STREAM).read_bytes()
    cuts = [*range(ends[0], ends[-1], 37), ends[-1] - 1, *ends]
    for cut in cuts:
        (tmp_path / "3" / STREAM).write_bytes(content[:cut])
        whole = sum(size for size, end in zip(sizes, ends[1:], strict=True) if end <= cut)
        assert read_ledger(tmp_path / "3").to_pylist() == ROWS[:whole], cut


@pytest.mark.parametrize("name", [STREAM, PARQUET])
def test_another_file_is_refused(name, tmp_path):
    assert read_ledger(tmp_path) is None
    (tmp_path / name).write_bytes(b"PAR1" + bytes(1000))
    with pytest.raises(InputError, match=f"{name} cannot be read as a ledger"):
        read_ledger(tmp_path)

    other = pa.table({"example": ["a"], "loss": [1.0]})
    if name == PARQUET:
        pq.write_table(other, tmp_path / name)
    else:
        with pa.ipc.new_stream(tmp_path / name, other.schema) as writer:
            writer.write_table(other)
    with pytest.raises(InputError, match=f"{name} cannot be read as a ledger"):
        read_ledger(tmp_path)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_whatever_byte_of_a_ledger_is_damaged_its_rows_are_read_or_refused_in_words(byte, tmp_path):
    stream = stream_of(tmp_path / "run", 2, 3)
    content = stream.read_bytes()
    for place in range(0, len(content), 31):
        stream.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        with suppress(InputError):
            assert len(read_ledger(stream.parent)) <= 5
