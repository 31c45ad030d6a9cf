"""A run's logs have everything once, whatever happens to a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.runs import read_metrics
from test_ledger_of_runs import EXAMPLES, ledger_in, rows_of, table_of
from test_tensorboard import scalars

from dpo.analysis.ledger_file import PARQUET, STREAM, read_ledger
from dpo.reporting.events import Evaluation, RunContext, Sample, Update
from dpo.reporting.files import FileLogger
from dpo.settings.plan import make_plan

BOTH = ("ledger", "tensorboard.enabled")
ON, OFF = ([f"{key}={value}" for key in BOTH] for value in ("true", "false"))


def updates_in(run_dir: Path) -> list[int]:
    """The updates of which the ledger has the 4 rows."""
    rows = [row["update"] for row in rows_of(run_dir) if row["split"] == "train"]
    assert rows == [update for update in dict.fromkeys(rows) for _ in range(4)]
    return rows[::4]


@pytest.mark.slow
def test_a_log_that_was_off_for_a_while_has_every_row_once(run, tmp_path, capsys):
    run("run", *ON, "n_examples=8")
    run("run", *OFF, "n_examples=16", "resume=auto")
    run("run", *OFF, "n_examples=20", "resume=auto")
    shutil.rmtree(tmp_path / "run" / "step-20")  # as if killed before it was saved
    capsys.readouterr()
    run("run", *ON, "n_examples=24", "resume=auto")

    assert (
        "warning: ledger.arrows lacks the updates during which this log was switched off in the config"
        in capsys.readouterr().out
    )
    assert updates_in(tmp_path / "run") == [1, 2, 5, 6]
    assert [row["update"] for row in rows_of(tmp_path / "run") if row["split"] == "eval"][::4] == [0, 2, 6]
    assert [step for step, _ in scalars(tmp_path / "run")["loss/train"]] == [4, 8, 20, 24]
    assert [line["updates"] for line in read_metrics(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6]


def test_what_no_checkpoint_knows_is_moved_aside_and_the_warning_names_it(run, tmp_path, capsys):
    run("other", *ON, "n_examples=8")
    run("run", *OFF, "n_examples=8")
    for name in (STREAM, PARQUET):
        shutil.copy(tmp_path / "other" / name, tmp_path / "run")
    shutil.copytree(tmp_path / "other" / "tensorboard", tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / f"{STREAM}.old").write_text("precious")
    capsys.readouterr()

    run("run", *ON, "n_examples=16", "resume=auto")

    said = capsys.readouterr().out
    folder = tmp_path / "run"
    reason = "does not belong to a checkpoint of this run, so it is renamed to"
    assert f"warning: {folder / STREAM} {reason} {STREAM}.old.1" in said
    assert f"warning: {folder / 'tensorboard'} {reason} tensorboard.old" in said
    assert (folder / f"{STREAM}.old").read_text() == "precious"
    assert (folder / f"{STREAM}.old.1").read_bytes() == (tmp_path / "other" / STREAM).read_bytes()
    assert (folder / f"{PARQUET}.old").read_bytes() == (tmp_path / "other" / PARQUET).read_bytes()
    assert updates_in(folder) == [3, 4]
    assert [step for step, _ in scalars(folder)["loss/train"]] == [12, 16]


def test_garbage_behind_the_checkpoint_is_gone_before_anything_is_appended(run, tmp_path):
    run("whole", "ledger=true", "n_examples=16")
    run("run", "ledger=true", "n_examples=8")
    for name, garbage in ((STREAM, b"\xff\xff\xff\xff\x40\x01\x00\x00\x10"), ("metrics.jsonl", bytes(4096))):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(garbage)
    run("run", "ledger=true", "n_examples=16", "resume=auto")

    assert (tmp_path / "run" / PARQUET).read_bytes() == (tmp_path / "whole" / PARQUET).read_bytes()
    assert [line["updates"] for line in read_metrics(tmp_path / "run", "train")] == [1, 2, 3, 4]


def cut(content: bytes) -> bytes:
    return content[:-40]


def zero(content: bytes) -> bytes:
    """The last message as it may be after power was lost.

    To Arrow, zeros end a stream in order.
    """
    place = content.rindex(b"\xff\xff\xff\xff")
    return content[:place] + bytes(len(content) - place)


def lengthen(content: bytes) -> bytes:
    """The last message's length is in terabytes."""
    place = content.rindex(b"\xff\xff\xff\xff")
    return content[: place + 4] + b"\xff\xff\xff\x7f" + content[place + 8 :]


def spoil_head(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 4 + content[12:]


@pytest.mark.parametrize("damage", [cut, zero, lengthen, spoil_head])
def test_a_ledger_that_is_damaged_before_the_checkpoint_keeps_its_whole_rows_and_is_readable_to_its_end(
    damage, tmp_path, capsys
):
    ledger, stream = ledger_in(tmp_path), tmp_path / STREAM
    for update in (1, 2):
        ledger.on_update(Update(update, 4 * update, EXAMPLES, table_of("train"), {}))
    ledger.on_end()
    state, content = ledger.state_dict(), damage(stream.read_bytes())
    stream.write_bytes(content)

    continued = ledger_in(tmp_path, state)
    continued.on_update(Update(3, 12, EXAMPLES, table_of("train"), {}))
    continued.on_end()

    assert updates_in(tmp_path) == ([3] if damage is spoil_head else [1, 3])
    assert (tmp_path / f"{STREAM}.old").read_bytes() == content
    assert len(read_ledger(tmp_path)) == len(rows_of(tmp_path))
    said = capsys.readouterr().out
    assert f"warning: {stream} is damaged after " in said
    assert f"the damaged file is renamed to {STREAM}.old" in said


def test_of_a_ledger_that_is_gone_the_file_made_from_it_is_kept(tmp_path, capsys):
    ledger = ledger_in(tmp_path)
    ledger.on_update(Update(1, 4, EXAMPLES, table_of("train"), {}))
    ledger.on_end()
    state, rows = ledger.state_dict(), (tmp_path / PARQUET).read_bytes()
    (tmp_path / STREAM).unlink()

    ledger_in(tmp_path, state).on_end()

    assert (tmp_path / f"{PARQUET}.old").read_bytes() == rows
    assert f"{STREAM} lacks the last " in capsys.readouterr().out


def cut_last_line(content: bytes) -> bytes:
    return content[:-2]


def garble_last_line(content: bytes) -> bytes:
    """As long as before, and a line still, but no JSON."""
    return content[:-20] + b"\x01" * 19 + b"\n"


@pytest.mark.parametrize(
    ("damage", "name"),
    [*((cut_last_line, name) for name in FileLogger.files), (garble_last_line, "metrics.jsonl")],
)
def test_lines_that_are_damaged_before_the_checkpoint_keep_those_before_them(damage, name, tmp_path, capsys):
    def logger_in(state: dict) -> FileLogger:
        logger = FileLogger(RunContext(make_plan({"n_eval_model_samples": 1}), tmp_path, 0, None, print))
        logger.load_state_dict(state)
        logger.on_start()
        return logger

    def log(logger: FileLogger, number: int) -> None:
        logger.on_evaluation(Evaluation(number, 4 * number, {"loss/eval": 0.5}))
        logger.on_answers(4 * number, {"p": f"answer {number}"})
        logger.on_samples(4 * number, [Sample("p", f"answer {number}", None)])

    file, logger = tmp_path / name, logger_in({})
    for number in (1, 2):
        log(logger, number)
    state, whole = logger.state_dict(), file.read_bytes()
    damaged = damage(whole)
    file.write_bytes(damaged)

    log(logger_in(state), 3)

    lines = file.read_bytes().splitlines(keepends=True)
    kept = whole[:-2].rpartition(b"\n")[0].splitlines(keepends=True)
    assert [line.rstrip() for line in lines[: len(kept)]] == [line.rstrip() for line in kept]
    assert all(line.endswith(b"\n") for line in lines)
    assert (tmp_path / f"{name}.old").read_bytes() == damaged
    if name.endswith(".jsonl"):
        assert [json.loads(line)["examples"] for line in lines] == [4, 12]
    assert f"warning: {file} is damaged after " in capsys.readouterr().out
