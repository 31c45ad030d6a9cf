"""`make demo` prints the shares, and writes a page about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import write_rows

from dpo.data.demo import get_demo, judge
from scripts import demo


def write_run(run_dir: Path, dialogues: list, metrics: list[dict], share_courteous: float) -> None:
    """A completed run that evaluated twice; SFT begins with noise."""
    sft = run_dir.name == "sft"
    rows = []
    for examples, share in ((0, None if sft else 0.5), (32, share_courteous)):
        for i, (prompt, entry) in enumerate(dialogues):
            text = "lantern lantern" if share is None else entry["responses"][0 if i < 10 * share else 1]
            rows.append(
                {"examples": examples, "updates": examples, "prompt": prompt, "policy": text, "reference": None}
            )
    write_rows(run_dir / "samples.jsonl", rows)
    write_rows(run_dir / "metrics.jsonl", metrics)
    (run_dir / "LATEST").mkdir()


def test_the_table_has_the_shares_and_the_last_line_names_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    monkeypatch.setattr("dpo.analysis.page.draw_all", lambda runs: [])  # takes seconds; test_page.py draws them
    dialogues = list(get_demo("test").items())[:10]
    for name in demo.STAGES:
        metrics = [
            {"split": "eval", "examples": n, "updates": n, "loss/eval": loss, "rewards_eval/accuracies": n / 32}
            for n, loss in ((0, 88.0), (32, 6.5))
        ]
        write_run(tmp_path / name, dialogues, metrics, 0.5 if name == "sft" else 0.9)

    assert demo.main() == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split() for line in lines if line.startswith(("untrained", "after"))] == [
        ["untrained", "88.0", "0.0%", "0.0%", "100.0%", "0.0%"],
        ["after", "SFT", "6.5", "0.00", "50.0%", "50.0%", "0.0%", "0.0%"],
        ["after", "DPO", "1.00", "90.0%", "10.0%", "0.0%", "0.0%"],
    ]
    assert lines[-1].startswith("Now open ")
    assert "report/report.html" in lines[-1]
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.slow  # about a minute
def test_dpo_makes_the_demo_courteous_and_breaks_no_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    assert demo.main() == 0
    assert judge(demo.read_samples("sft", 0)).broken > 0.99
    assert judge(demo.read_samples("dpo", 0)).courteous <= 0.5
    after = judge(demo.read_samples("dpo", -1))
    assert after.courteous >= 0.9
    assert after.broken <= 0.02
