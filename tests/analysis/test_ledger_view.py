"""What the report shows of a ledger, and what it says of lengths pair by pair."""

from __future__ import annotations

import pytest
from support.ledgers import row, with_ledger
from support.records import update, write_run

from dpo.analysis.ledger_file import DRAWN
from dpo.analysis.measures import margin_parts
from dpo.analysis.page import render, summarize_ledger
from dpo.analysis.runs import read_run
from dpo.errors import InputError

ROWS = [
    row("old", 1, "eval", 9.0, 0.0, (9, 9)),
    row("a", 2, "eval", 2.0, 1.0, (20, 10)),  # 0.1 a token on both sides: all of its 1.0 is length
    row("b", 2, "eval", 0.0, -2.0, (10, 10)),  # as long: nothing of its 2.0
]


def test_length_is_worked_out_in_each_pair_of_the_last_evaluation(tmp_path):
    parts = margin_parts(read_run(with_ledger(tmp_path, ROWS)))
    assert parts.margin == pytest.approx(0.15)
    assert parts.length == pytest.approx(0.05)  # 0.1 times the mean of 1.0 and 0.0


def test_rewards_of_another_scale_are_left_to_the_means(tmp_path):
    rows = [{**one, "policy_chosen": one["policy_chosen"] + 5} for one in ROWS]
    parts = margin_parts(read_run(with_ledger(tmp_path, rows)))
    assert parts.length == 0  # mean tokens are 20 and 20


def test_suspected_noise_is_shown_with_its_texts_escaped(tmp_path):
    wrong = [row("bad", n, "train", -9.0, 9.0, (5, 5)) for n in (2, 3)]
    right = [row(f"good{i}", n, "train", 1.0, -1.0, (5, 5)) for n in (2, 3) for i in range(4)]
    run = read_run(with_ledger(tmp_path, [*wrong, *right]))
    asked = []

    def find_texts(run, pairs):
        asked.extend(pair.example for pair in pairs)
        return {"bad": {"prompt": "Why?", "chosen": "<b>no</b>", "rejected": "because"}}

    view = summarize_ledger(run, find_texts)

    assert asked == ["bad", "bad"]  # it never flips either
    never, noise = view.lists()
    assert never.text.startswith("1 of 5 pairs that were seen at least twice was wrong each time")
    assert [pair.texts["chosen"] for pair in noise.pairs] == ["<b>no</b>"]
    page = render([run], [], find_texts=find_texts)
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<b>no" not in page
    assert 'href="#ledger"' in page


def test_drawn_pairs_are_shown_from_the_ledger_itself(tmp_path):
    """No dataset has them, and none is asked for them."""
    own = {"tie": False, "prompt": "Why?", "chosen": " drawn", "rejected": " no", "others": [], "score_others": []}
    own |= {"score_chosen": 2.0, "score_rejected": -1.0}
    bad = [row("bad", 2, "train", -9.0, 9.0, (5, 5)) | own]
    good = [row(f"good{i}", 2, "train", 1.0, -1.0, (5, 5)) | own for i in range(4)]
    given = [row("given", n, "eval", -9.0, 9.0, (5, 5)) | dict.fromkeys(DRAWN.names) for n in (1, 2)]
    folder = with_ledger(tmp_path / "drawn", [*bad, *good])
    view = summarize_ledger(read_run(folder))
    noise = view.lists()[1]
    [pair] = noise.pairs
    assert pair.texts == {"prompt": "Why?", "chosen": " drawn", "rejected": " no"}
    assert pair.describe_margins().endswith("; scores 2 and \N{MINUS SIGN}1")
    assert "whether the scorer is right" in noise.text
    assert "labels" not in noise.text
    assert view.note is None

    mixed = summarize_ledger(read_run(with_ledger(tmp_path / "mixed", [*bad, *good, *given])))
    assert [pair.texts is not None for pair in mixed.lists()[1].pairs] == [True, False]
    assert mixed.note.startswith("python -m scripts.ledger")


def test_texts_that_cannot_be_loaded_are_a_note(tmp_path):
    run = read_run(with_ledger(tmp_path, [row("bad", n, "train", -9.0, 9.0, (5, 5)) for n in (2, 3)]))

    def find_texts(run, pairs):
        raise InputError("no such dataset")

    command = f"python -m scripts.ledger {run.path} shows texts that can be loaded"
    assert summarize_ledger(run, find_texts).note == f"Texts are not shown: no such dataset; {command}"
    assert summarize_ledger(run).note == command


def test_margins_against_length_and_drift_are_tables(tmp_path):
    titles = [table.title for table in summarize_ledger(read_run(with_ledger(tmp_path, ROWS))).tables()]
    assert titles[0].startswith("Margin against length, eval")
    assert titles[-1].startswith("Drift by dataset")


@pytest.mark.parametrize("rows", [[], [row("a", 0, "eval", 0.0, 0.0, (5, 5))]])
def test_a_ledger_that_has_just_begun_is_shown_as_far_as_it_goes(tmp_path, rows):
    run = read_run(with_ledger(tmp_path, rows))
    assert run.problems == []
    assert (summarize_ledger(run) is None) == (not rows)
    assert "<h1>" in render([run], [])


@pytest.mark.parametrize("name", ["ledger.arrows", "ledger.parquet"])
def test_a_ledger_that_is_none_is_a_problem_and_no_more(tmp_path, name):
    run_dir = write_run(tmp_path, [update(1)])
    (run_dir / name).write_bytes(b"junk")
    run = read_run(run_dir)
    assert run.ledger is None
    assert len(run.problems) == 1
    assert run.problems[0].startswith("the ledger cannot be read: ")
