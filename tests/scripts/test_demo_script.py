"""`make demo` prints the shares, and writes a page about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import write_rows

from dpo.data.demo import Shares, get_demo
from scripts import demo
from scripts.demo_picture import describe

PNG = b"\x89PNG\r\n\x1a\n"


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


@pytest.fixture
def completed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    monkeypatch.setattr("dpo.analysis.page.draw_all", lambda runs: [])  # takes seconds; test_page.py draws them
    dialogues = list(get_demo("test").items())[:10]
    for seed in (0, 1):
        for name in demo.STAGES:
            metrics = [
                {"split": "eval", "examples": n, "updates": n, "loss/eval": loss, "rewards_eval/accuracies": n / 32}
                for n, loss in ((0, 88.0), (32, 6.5))
            ]
            write_run(demo.find_directory(seed) / name, dialogues, metrics, 0.5 if name == "sft" else 0.9)
    return tmp_path


def test_the_table_has_the_shares_and_the_last_line_names_the_page(completed, capsys):
    assert demo.main([]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split() for line in lines if line.startswith(("untrained", "after"))] == [
        ["untrained", "88.0", "0.0%", "0.0%", "100.0%", "0.0%"],
        ["after", "SFT", "6.5", "0.00", "50.0%", "50.0%", "0.0%", "0.0%"],
        ["after", "DPO", "1.00", "90.0%", "10.0%", "0.0%", "0.0%"],
    ]
    page = completed / "report" / "report.html"
    assert lines[-1].startswith("Now open ")
    assert "report/report.html" in lines[-1]
    text = page.read_text(encoding="utf-8")
    assert text.index("What DPO changed") < text.index('id="summary"')
    assert text.count("50.0 % are courteous before DPO and 90.0 % after it") == 1  # in the caption alone


def test_several_seeds_are_one_picture_which_can_be_kept(completed, capsys):
    assert demo.main(["--seeds", "2", "--picture", str(completed / "shown.png")]) == 0
    assert "after DPO, seed 1" in capsys.readouterr().out
    light, dark = ((completed / f"shown{which}.png").read_bytes() for which in ("", "-dark"))
    assert light.startswith(PNG)
    assert dark.startswith(PNG)
    assert light != dark


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--seeds", "0"], "--seeds at least 1"),
        (["--seed", "1", "--seeds", "2"], "not allowed with"),
        (["--picture", "demo.svg"], "--picture demo.svg must end in .png"),
        (["--picture", "nowhere/demo.png"], "in a directory that exists"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        demo.main(arguments)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_picture_in_words():
    change = (Shares(0.4, 0.59, 0.01, 0), Shares(0.95, 0.05, 0, 0))
    assert "40.0 % are courteous before DPO and 95.0 % after it; 1.0 % are broken" in describe([change])
    other = (Shares(0.45, 0.55, 0, 0), Shares(0.95, 0.05, 0, 0))
    assert "40.0 to 45.0 % are courteous before DPO and 95.0 % after it" in describe([change, other])


@pytest.mark.slow  # about a minute
def test_dpo_makes_the_demo_courteous_and_breaks_no_sentences(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    assert demo.main([]) == 0
    outcome = demo.read_outcome(0)
    assert outcome.untrained.broken > 0.99
    assert outcome.before.courteous <= 0.5
    assert outcome.after.courteous >= 0.9
    assert outcome.after.broken <= 0.02
