"""`dpo report RUN [RUN ...] [--out DIR]`."""

import os

import pytest
from support.records import evaluation, update, write_run

from dpo.analysis import curves
from dpo.commands.report import main

LINES = [evaluation(0, 0.69), update(1), evaluation(1, 0.6)]


@pytest.fixture(autouse=True)
def without_curves(monkeypatch):
    """They take seconds; tests/analysis/test_page.py draws them."""
    monkeypatch.setattr(curves, "plan_charts", lambda runs: [])


def test_one_run_is_reported_in_its_directory(run_dir, printed):
    run = write_run(run_dir, LINES)
    before = {name: (run / name).read_bytes() for name in os.listdir(run)}

    assert main([str(run)]) == 0

    assert printed() == f"report: {run}/report/report.html\n"
    assert "<h1>made" in (run / "report" / "report.html").read_text()
    assert {name: (run / name).read_bytes() for name in before} == before


def test_several_are_reported_in_report_or_where_it_is_said(tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(tmp_path / name, LINES, config={"exp_name": name})) for name in "ab"]
    assert main(runs) == main(runs) == main([*runs, "--out", "deep/er"]) == 0
    assert printed().splitlines() == [
        *["report: report/report.html"] * 2,
        "report: deep/er/report.html",
    ]
    assert "2 runs compared" in (tmp_path / "deep" / "er" / "report.html").read_text()


def test_a_sweeps_directory_stands_for_the_runs_of_its_jobs(tmp_path):
    for name in ("0_a", "1_b"):
        write_run(tmp_path / "sweep" / name, LINES, config={"exp_name": name})
    assert main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    assert "2 runs compared" in (tmp_path / "out" / "report.html").read_text()


def test_junk_and_a_place_that_is_not_a_reports_are_one_sentence_and_status_2(run_dir, tmp_path, capsys):
    run = str(write_run(run_dir, LINES))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("<title>my report</title>")
    for arguments, said in (
        ([run, f"{tmp_path}/nowhere", "--out", f"{tmp_path}/out"], f"error: {tmp_path}/nowhere "),
        ([run, f"{tmp_path}/mine", "--out", f"{tmp_path}/out"], f"error: {tmp_path}/mine "),
        ([run, "--out", f"{run}/env.json"], "env.json cannot be written"),
        ([run, "--out", f"{tmp_path}/mine"], "mine/report.html is none of the files that this command writes"),
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["<title>my report</title>"]
