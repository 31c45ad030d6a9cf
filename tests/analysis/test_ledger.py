"""The ledger: its summary and its files."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pytests import refused

from dpo.analysis.ledger import (
    PARQUET,
    SCHEMA,
    STREAM,
    append,
    read_ledger,
    summarize_ledger,
    write_parquet,
)
from dpo.errors import InputError


def visit(example: str, update: int, margin: float | None, **facts: Any) -> dict[str, Any]:
    common = {"example": example, "dataset": "hh", "update": update, "epoch": 0, "split": "train", "truncated": False}
    return {**common, "loss": 0.5, "margin": margin, **facts}


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SCHEMA)


def test_pairs_that_never_flip_were_wrong_at_each_of_several_visits_after_the_first_update():
    summary = summarize_ledger(
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
    names = ("example", "dataset", "split", "n_visits", "first_margin", "last_margin", "relative_margin")
    assert [tuple(pair[name] for name in names) for pair in summary.never_flipped] == [
        ("wrong", "hh", "train", 2, -0.1, -0.3, pytest.approx((-1.0 - 1.5) / 2)),  # medians 0.1 and 0.2
        ("tie", "hh", "eval", 2, 0.0, 0.0, 0.0),
    ]


def drawn(example: str, update: int, margin: float, scores: tuple[float, float]) -> dict[str, Any]:
    """A visit of a drawn pair; equal scores are a tie."""
    texts = {"prompt": "Why?", "chosen": f" {example}", "rejected": " no"}
    numbers = {"score_chosen": scores[0], "score_rejected": scores[1]}
    return {**visit(example, update, margin), "tie": scores[0] == scores[1], **texts, **numbers}


def test_drawn_pairs_have_their_texts_in_the_ledger_and_ties_are_not_wrong():
    rows = [
        *(visit("given", update, -0.2) for update in (2, 3)),
        drawn("tie", 2, -0.3, (1.0, 1.0)),
        drawn("wrong", 2, -0.3, (2.0, 1.0)),
        *(drawn(f"right{i}", 2, 0.1, (2.0, 1.0)) for i in range(3)),
    ]
    summary = summarize_ledger(table_of(*rows))
    names = ("example", "prompt", "chosen", "rejected", "score_chosen", "score_rejected")
    assert [tuple(pair[name] for name in names) for pair in summary.suspected_noise] == [
        ("wrong", "Why?", " wrong", " no", 2.0, 1.0),
        ("given", None, None, None, None, None),
    ]
    assert summary.n_seen_again == 1


def test_a_margin_within_the_rounding_of_equal_models_is_neither_wrong_nor_noise():
    before = [visit("a", 0, 0.0005, split="eval"), visit("b", 0, -0.0004, split="eval")]  # float16 reference
    after = [visit(name, update, -0.0004) for name in ("c", "d", "e") for update in (2, 3)]
    summary = summarize_ledger(table_of(*before, *after))
    assert (summary.n_never_flipped, summary.n_suspected_noise) == (0, 0)

    trained = [visit("c", 9, -0.2), visit("c", 10, -0.2), visit("d", 10, 0.1)]
    assert [pair["example"] for pair in summarize_ledger(table_of(*before, *trained)).suspected_noise] == ["c"]


def test_suspected_noise_is_wrong_by_more_than_is_typical_at_its_time_the_worst_first(monkeypatch):
    monkeypatch.setattr("dpo.analysis.ledger.N_LISTED", 1)
    early = [visit(f"early {i}", 2, 0.1) for i in range(9)]
    late = [visit(f"late {i}", 20, 4.0) for i in range(9)]
    doubtful = [visit("a", 2, -0.3), visit("b", 20, -8.0), visit("usual", 20, -0.3), visit("once right", 20, -9.0)]
    summary = summarize_ledger(table_of(*early, visit("once right", 2, 0.1), *late, *doubtful))

    assert summary.n_suspected_noise == 2
    assert [(p["example"], p["relative_margin"]) for p in summary.suspected_noise] == [("a", pytest.approx(-3))]
    assert summary.n_never_flipped == 0  # seen once each


# --- the files -----------------------------------------------------------------------------------------------------

ROWS = [visit(f"{i}", i, i / 3) for i in range(23)]


def stream_of(folder: Path, *sizes: int) -> Path:
    """The rows appended so many at a time."""
    folder.mkdir()
    append(folder / STREAM)
    start = 0
    for size in sizes:
        append(folder / STREAM, ROWS[start : start + size])
        start += size
    return folder / STREAM


def test_the_parquet_file_depends_on_the_rows_and_not_on_how_they_were_appended(tmp_path):
    files = []
    for name, sizes in {"a": (23,), "b": (1, 2, 7, 13), "c": (4, 4, 4, 4, 4, 3)}.items():
        stream_of(tmp_path / name, *sizes)
        write_parquet(tmp_path / name)
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == sorted((STREAM, PARQUET))
        files.append(tmp_path / name / PARQUET)
    assert len({file.read_bytes() for file in files}) == 1
    assert pq.read_table(files[0]) == read_ledger(tmp_path / "a") == table_of(*ROWS)


def test_whole_appends_of_a_stream_that_was_cut_are_read(tmp_path):
    sizes = (1, 2, 3)
    ends = [len(stream_of(tmp_path / str(n), *sizes[:n]).read_bytes()) for n in range(len(sizes) + 1)]
    content = (tmp_path / "3" / STREAM).read_bytes()
    for cut in (*range(ends[0], ends[-1], 37), ends[-1] - 1, *ends):
        (tmp_path / "3" / STREAM).write_bytes(content[:cut])
        whole = sum(size for size, end in zip(sizes, ends[1:], strict=True) if end <= cut)
        assert read_ledger(tmp_path / "3") == table_of(*ROWS[:whole]), cut


def test_without_a_ledger_or_with_another_file_of_its_name_it_is_refused(tmp_path):
    with refused(f"{tmp_path} has no {STREAM}: pass the directory of a run with ledger=true"):
        read_ledger(tmp_path)
    (tmp_path / STREAM).write_bytes(b"PAR1" + bytes(1000))
    with refused(f"{STREAM} cannot be read as a ledger"):
        read_ledger(tmp_path)
    other = pa.table({"example": ["a"], "loss": [1.0]})
    with pa.ipc.new_stream(tmp_path / STREAM, other.schema) as writer:
        writer.write_table(other)
    with refused(f"{STREAM} cannot be read as a ledger: its columns are not those"):
        read_ledger(tmp_path)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_whatever_byte_of_a_ledger_is_damaged_its_rows_are_read_or_refused_in_words(byte, tmp_path):
    stream = stream_of(tmp_path / "run", 2, 3)
    content = stream.read_bytes()
    for place in range(0, len(content), 31):
        stream.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        with suppress(InputError):
            assert len(read_ledger(stream.parent)) <= 5
