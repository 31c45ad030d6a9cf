"""`make demo` trains, prints the share of courteous answers, and writes a page."""

import pytest
from support.runs import read_rows

from dpo.commands import demo
from dpo.data.demo import COURTEOUS


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes on 2 idle cores
def test_dpo_makes_the_demo_courteous(tmp_path, monkeypatch, printed):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    demo.main([])
    samples = read_rows(tmp_path / "dpo" / "samples.jsonl")
    last = [sample["policy"].strip() for sample in samples if sample["examples"] == samples[-1]["examples"]]
    share = sum(answer.startswith(COURTEOUS) for answer in last) / 256
    assert share >= 0.9
    before, after = [line for line in printed().splitlines() if line.startswith("courteous answers")]
    assert float(before.rpartition(" ")[2].removesuffix("%")) <= 50
    assert after.endswith(f" {share:.1%}")
    assert (tmp_path / "report" / "report.html").exists()
