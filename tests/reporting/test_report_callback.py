"""`report=true` keeps a run's report fresh, never in its way."""

from __future__ import annotations

import time

import pytest
from support.runs import assert_gone

from dpo.reporting import report
from dpo.reporting.events import Evaluation, RunContext
from dpo.reporting.report import ReportWriter
from dpo.settings.plan import make_plan

EVALUATION = Evaluation(0, 0, {})
PROGRAM = """
import os, sys, time
with open(sys.argv[1] + "/started", "a") as file:
    print(os.getpid(), *sys.argv[3:], file=file)
{then}
"""


@pytest.fixture
def writer(tmp_path):
    """A callback whose lines are in `logged`."""
    logged = []
    context = RunContext(make_plan({"report": True}), tmp_path / "run", 0, None, logged.append)
    (tmp_path / "run").mkdir()
    made = ReportWriter(context)
    made.logged = logged
    return made


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Replace the program that writes the page."""

    def put(then: str) -> None:
        monkeypatch.setattr(report, "ROOT", tmp_path / "root")
        file = tmp_path / "root" / "dpo" / "analysis" / "page.py"
        file.parent.mkdir(parents=True)
        file.write_text(PROGRAM.format(then=then))

    return put


def started(writer: ReportWriter) -> list[list[str]]:
    file = writer.context.run_dir / "started"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_trains_has_a_report_and_says_where_at_the_end(run, tmp_path, capsys):
    run("run", "report=true")
    page = tmp_path / "run" / "report" / "report.html"
    assert f"report: {page}" in capsys.readouterr().out.splitlines()
    assert "Complete after 6 of 6 updates" in page.read_text(encoding="utf-8")


def test_there_are_never_two_and_the_last_is_of_the_end(writer, program):
    program("if '--ended' not in sys.argv: time.sleep(60)")
    for _ in range(3):
        before = time.monotonic()
        writer.on_evaluation(EVALUATION)
        assert time.monotonic() - before < 5  # it does not wait
    wait_for(lambda: started(writer))

    writer.on_end()

    (pid, *_), (last, *options) = started(writer)
    assert options == ["--ended"]
    assert_gone([int(pid), int(last)])
    assert writer.logged == [f"report: {writer.context.run_dir}/report/report.html"]


@pytest.mark.parametrize("then", ["raise ValueError('no ink')", "time.sleep(60)"])
def test_a_failure_is_one_line_and_does_not_end_the_run(writer, program, monkeypatch, then):
    program(then)
    monkeypatch.setattr(report, "LAST_SECS", 1)
    writer.on_end()
    command = f"python -m scripts.report {writer.context.run_dir}"
    assert writer.logged == [f"warning: the report was not written; {command} writes it, or says why not"]
    assert_gone([int(pid) for pid, *_ in started(writer)])
