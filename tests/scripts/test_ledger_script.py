"""`dpo ledger` shows findings, with texts if they are there."""

from pathlib import Path

import pytest
import yaml
from support.runs import TINY, write_rows

from dpo.analysis.ledger import STREAM, append
from dpo.commands.ledger import main
from dpo.data.examples import text_digest

WRONG = {"prompt": "Hi", "chosen": " no\x1b[2J way", "rejected": " yes"}
RIGHT = [{"prompt": f"Hi {i}", "chosen": " yes", "rejected": " no way"} for i in range(7)]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run of two updates and evaluations; one pair is reversed."""
    for split in ("train", "test"):
        write_rows(tmp_path / "mine" / f"{split}.jsonl", [*RIGHT, WRONG])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = {
        "datasets": ["mine"],
        "dataset_sources": {"mine": str(tmp_path / "mine")},
        "local_dirs": [str(tmp_path)],
        "model": {"name_or_path": str(TINY), "tokenizer_name_or_path": None},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    for split, update in (("train", 1), ("eval", 1), ("train", 2), ("eval", 2)):
        right = 0.0 if (split, update) == ("train", 1) else 1.0
        common = {"dataset": "mine", "update": update, "epoch": update - 1, "split": split, "truncated": False}
        rows = [
            common
            | {"example": text_digest(pair["prompt"], {role: pair[role] for role in ("chosen", "rejected")})}
            | {"margin": -2 * right if pair is WRONG else right}
            for pair in (*RIGHT, WRONG)
        ]
        append(run_dir / STREAM, rows)
    return run_dir


def test_pairs_are_shown_with_their_texts_which_cannot_command_a_terminal(run_dir, printed):
    assert main([str(run_dir)]) == 0
    told = printed()

    assert "\x1b" not in told
    lines = told.splitlines()
    assert lines[0] == "32 visits of 8 examples, of which 0 are truncated."
    shown = [line.split(maxsplit=1) for line in lines if line.startswith("    ")]
    assert shown == [["prompt", "Hi"], ["chosen", "no [2J way"], ["rejected", "yes"]] * 3
    assert any(line.startswith("Pairs that never flip: 1 of 8") for line in lines)
    assert any(line.startswith("Suspected label noise: 2 pairs") for line in lines)


def test_texts_of_drawn_pairs_are_shown_without_any_dataset(tmp_path, printed):
    own = {"tie": False, "prompt": "Hi", "chosen": " no", "rejected": " yes", "score_chosen": 2, "score_rejected": -1}
    visit = {"example": "bad", "dataset": "hh", "epoch": 0, "split": "train", "truncated": False, "margin": -1.8}
    append(tmp_path / STREAM, [visit | {"update": n} | own for n in (2, 3)])
    assert main([str(tmp_path)]) == 0
    shown = printed()
    assert shown.count("    prompt    Hi") == shown.count("; scores: chosen 2, rejected -1") == 2


def test_one_line_says_why_texts_of_pairs_cannot_be_shown(run_dir, printed):
    mine = run_dir.parent / "mine"
    for split in ("train", "test"):
        write_rows(mine / f"{split}.jsonl", [*RIGHT, {**WRONG, "chosen": " other"}])
    assert main([str(run_dir)]) == 0
    assert printed().endswith("\nThe run's datasets have changed, and lack some of these pairs.\n")

    mine.rename(run_dir.parent / "moved")
    assert main([str(run_dir)]) == 0
    note = printed().splitlines()[-1]
    assert note.startswith(f"Texts are not shown: {mine} does not exist")
