"""`report=true` writes a report at a run's end, and never fails it."""

import sys

import pytest

from dpo.reporting import report
from dpo.reporting.events import RunContext
from dpo.reporting.report import ReportWriter
from dpo.settings.plan import make_plan


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise ValueError('no ink')", "ValueError: no ink"),
        ("import time; time.sleep(60)", "it took too long"),
        ("", "[Errno 2] No such file or directory: '/nowhere'"),  # no process can start
    ],
)
def test_a_failure_is_one_line_with_the_reason_and_does_not_end_the_run(program, why, run_dir, tmp_path, monkeypatch):
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo" / "__main__.py").write_text(program)
    if not program:
        monkeypatch.setattr(sys, "executable", "/nowhere")
    (tmp_path / "dpo" / "__init__.py").touch()  # else Python takes ours
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(report, "LONGEST_SECS", 1)
    logged = []
    ReportWriter(RunContext(make_plan({"report": True}), run_dir, 0, None, logged.append)).on_end()
    assert logged == [f"warning: the report was not written: {why}; try dpo report {run_dir}"]
