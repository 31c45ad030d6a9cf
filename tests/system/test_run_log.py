"""What rank 0 prints is in `log.txt`, without the redraws of bars, and its warnings are in the report."""

from __future__ import annotations

import html
import logging
import sys

import pytest
import tqdm
from support.faults import start_run

from dpo.analysis.page import write_report
from dpo.system.run_log import RunLog


@pytest.fixture
def log(capsys):
    log = RunLog()
    yield log
    log.close()


def read(tmp_path) -> str:
    return (tmp_path / "log.txt").read_text()


def test_both_streams_are_in_it_from_the_start_and_a_resume_appends(log, tmp_path, capsys):
    log.begin()
    print("before the directory")
    log.open(tmp_path)
    print("error: no", file=sys.stderr)
    assert read(tmp_path) == "before the directory\nerror: no\n"
    log.begin()
    print("again")
    assert read(tmp_path) == "before the directory\nerror: no\n"
    log.open(tmp_path)
    log.close()
    print("after the run")
    assert read(tmp_path) == "before the directory\nerror: no\nagain\n"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("before the directory\nagain\nafter the run\n", "error: no\n")


def test_a_bar_leaves_no_redraws_and_a_secret_no_trace(log, tmp_path, monkeypatch):
    from dpo.reporting.terminal import Progress

    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    monkeypatch.setattr("dpo.reporting.terminal._shows_bars", lambda: True)
    log.begin()
    log.open(tmp_path)
    progress = Progress(interval=0, silent=False)
    for i in progress.over(range(3), total=3, what="update"):
        for j in progress.over(range(3), total=3, what="token"):
            progress.part(j, 3, "token")
        progress.line(f"line {i} of sk-0123456789")
    for _ in tqdm.tqdm(range(3), file=sys.stderr, desc="theirs", miniters=1, mininterval=0):
        pass
    *ours, theirs = read(tmp_path).splitlines()
    assert ours == [f"line {i} of REDACTED" for i in range(3)]
    assert ("3/3" in theirs, "1/3" in theirs) == (True, False)


def log_as_a_library() -> None:
    from dpo.data import preflight

    load = preflight.load_tokenizer

    def load_and_log(*args, **kwargs):
        logging.getLogger("library").warning("of a library")
        return load(*args, **kwargs)

    preflight.load_tokenizer = load_and_log


@pytest.mark.parametrize("processes", [[], ["trainer=FSDPTrainer", "world_size=2"]])
def test_a_run_has_its_text_from_the_first_line_to_the_last_and_its_warnings_in_the_report(
    command, tmp_path, processes
):
    run = start_run(command("run", "warmup_steps=100", *processes), log_as_a_library)
    assert run.wait() == 0, run.text
    text = read(tmp_path / "run")
    printed = run.text.splitlines()
    assert "of a library" in printed
    assert [line for line in printed if line not in text.splitlines()] == []
    assert text.splitlines()[0] == printed[0]
    warnings = {line.removeprefix("warning: ") for line in printed if line.startswith("warning: ")}
    assert warnings
    (tmp_path / "run" / "log.txt").write_text(text + "warning: 1 <b> 2\nwarning: 1 <b> 2\n")
    page = write_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert "<li>1 &lt;b&gt; 2 (2 times)</li>" in page
    assert all(f"<li>{warning}</li>" in html.unescape(page) for warning in warnings)
