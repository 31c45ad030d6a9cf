"""`report=true` writes a report at a run's end, and never fails it."""

from dpo.reporting.events import RunContext
from dpo.reporting.report import ReportWriter
from dpo.settings.plan import make_plan


def test_a_failure_is_one_line_with_the_reason_and_does_not_end_the_run(run_dir, monkeypatch):
    monkeypatch.setattr("dpo.analysis.page.read_runs", None)
    logged = []
    ReportWriter(RunContext(make_plan({"report": True}), run_dir, 0, None, logged.append)).on_end()
    why = "'NoneType' object is not callable"
    assert logged == [f"warning: the report was not written: {why}; try dpo report {run_dir}"]
