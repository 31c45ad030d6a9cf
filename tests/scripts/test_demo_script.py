"""`make demo` trains, prints the shares, and writes a page about them."""

from __future__ import annotations

import pytest

from dpo.data.demo import judge
from scripts import demo


@pytest.mark.slow  # about a minute
def test_dpo_makes_the_demo_courteous_and_breaks_no_sentences(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    assert demo.main() == 0
    assert judge(demo.read_samples("sft", 0)).broken > 0.99
    assert judge(demo.read_samples("dpo", 0)).courteous <= 0.5
    after = judge(demo.read_samples("dpo", -1))
    assert after.courteous >= 0.9
    assert after.broken <= 0.02
    lines = capsys.readouterr().out.splitlines()
    assert f"{after.courteous:.1%}" in next(line for line in lines if line.startswith("after DPO"))
    assert "report/report.html" in lines[-1]
    assert (tmp_path / "report" / "report.html").exists()
