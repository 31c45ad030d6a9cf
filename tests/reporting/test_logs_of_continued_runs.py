"""A run's logs have everything once, whatever happens to a file."""

import shutil
from pathlib import Path

import pytest
from support.records import context_in, start
from support.runs import read_rows
from test_ledger_of_runs import EXAMPLES, ledger_in, rows_of, table_of

from dpo.analysis.ledger import PARQUET, STREAM, read_ledger
from dpo.reporting.events import Evaluation, Sample, Update
from dpo.reporting.files import FileLogger


def updates_in(run_dir: Path) -> list[int]:
    """The updates of which the ledger has the 4 rows."""
    rows = [row["update"] for row in rows_of(run_dir) if row["split"] == "train"]
    assert rows == [update for update in dict.fromkeys(rows) for _ in range(4)]
    return rows[::4]


def test_what_no_checkpoint_knows_is_moved_aside_and_the_warning_names_it(run, run_dir, tmp_path, printed):
    run("other", "ledger=true", "n_examples=8")
    run("run", "n_examples=8")
    for name in (STREAM, PARQUET):
        shutil.copy(tmp_path / "other" / name, run_dir)
    (run_dir / f"{STREAM}.old").write_text("precious")
    printed()

    run("run", "ledger=true", "n_examples=16", "resume=auto")

    said = printed()
    reason = "is not as the run's checkpoint knows it;"
    assert f"warning: {run_dir / STREAM} {reason} {PARQUET} is renamed to {PARQUET}.old; {STREAM} is renamed to" in said
    assert (run_dir / f"{STREAM}.old").read_text() == "precious"
    assert (run_dir / f"{STREAM}.old.1").read_bytes() == (tmp_path / "other" / STREAM).read_bytes()
    assert (run_dir / f"{PARQUET}.old").read_bytes() == (tmp_path / "other" / PARQUET).read_bytes()
    assert updates_in(run_dir) == [3, 4]


def logger_in(run_dir: Path, state: dict) -> FileLogger:
    return start(FileLogger(context_in(run_dir, n_eval_model_samples=1)), state)


def log(logger: FileLogger, number: int) -> None:
    logger.on_evaluation(Evaluation(number, 4 * number, {"loss/eval": 0.5}))
    logger.on_answers(4 * number, {"p": f"answer {number}"})
    logger.on_samples(4 * number, [Sample("p", f"answer {number}", None)])


def test_what_was_logged_after_the_checkpoint_is_written_again_and_once(tmp_path, printed):
    logger = logger_in(tmp_path, {})
    state_at_start = logger.state_dict()
    log(logger, 1)
    state = logger.state_dict()
    log(logger, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(bytes(4096))
    log(logger_in(tmp_path, state), 3)
    for name in ("metrics.jsonl", "samples.jsonl", "answers.jsonl"):
        assert [line["examples"] for line in read_rows(tmp_path / name)] == [4, 12]
    log(logger_in(tmp_path, state_at_start), 1)
    assert (tmp_path / "samples.txt").read_text().count("after") == 1
    assert printed() == ""


@pytest.mark.parametrize("name", FileLogger.files)
def test_lines_that_are_lost_before_the_checkpoint_leave_those_before_them(name, tmp_path, printed):
    file, logger = tmp_path / name, logger_in(tmp_path, {})
    for number in (1, 2):
        log(logger, number)
    state, damaged = logger.state_dict(), file.read_bytes()[:-2]
    file.write_bytes(damaged)

    log(logger_in(tmp_path, state), 3)

    assert file.read_bytes().startswith(damaged[: damaged.rindex(b"\n") + 1])
    assert (tmp_path / f"{name}.old").read_bytes() == damaged
    if name.endswith(".jsonl"):
        assert [line["examples"] for line in read_rows(file)] == [4, 12]
    said = printed()
    assert f"warning: {file} is not as the run's checkpoint knows it; {name} is renamed to {name}.old" in said


def cut(content: bytes) -> bytes:
    return content[:-40]


def zero(content: bytes) -> bytes:
    """The last message as it may be after power was lost; to Arrow, zeros end a stream in order."""
    place = content.rindex(b"\xff\xff\xff\xff")
    return content[:place] + bytes(len(content) - place)


def spoil_head(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 4 + content[12:]


@pytest.mark.parametrize("damage", [cut, zero, spoil_head])
def test_a_ledger_that_is_damaged_before_the_checkpoint_keeps_its_whole_rows(damage, tmp_path, printed):
    ledger, stream = ledger_in(tmp_path), tmp_path / STREAM
    for update in (1, 2):
        ledger.on_update(Update(update, 4 * update, EXAMPLES, table_of("train"), {}))
    ledger.on_end()
    state, content, parquet = ledger.state_dict(), damage(stream.read_bytes()), (tmp_path / PARQUET).read_bytes()
    stream.write_bytes(content)

    continued = ledger_in(tmp_path, state)
    continued.on_update(Update(3, 12, EXAMPLES, table_of("train"), {}))
    continued.on_end()

    assert updates_in(tmp_path) == ([3] if damage is spoil_head else [1, 3])
    assert (tmp_path / f"{STREAM}.old").read_bytes() == content
    assert (tmp_path / f"{PARQUET}.old").read_bytes() == parquet  # it may have what the stream has lost
    assert len(read_ledger(tmp_path)) == len(rows_of(tmp_path))
    assert f"warning: {stream} is not as" in printed()
