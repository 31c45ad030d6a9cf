"""Drawn answers are kept: in samples, ledger, logs, and for replay."""

import pytest
from support.runs import read_metrics, read_rows

from dpo.analysis.ledger import read_ledger
from dpo.data.examples import text_digest
from dpo.errors import RunError

ONLINE = (
    "online=online",
    "online.scorer=keyword",
    "online.keyword=e",
    "online.n_samples=3",
    "online.max_new_tokens=8",
    "batch_size=4",
    "lr=1e-2",
    "ledger=true",
)
MIXED = (*ONLINE, "online.mix_offline=0.25", "n_eval_model_samples=2")


def test_the_ledger_has_texts_and_scores_of_drawn_pairs_and_none_of_given_ones(finished):
    rows = read_ledger(finished(*MIXED)).to_pylist()
    assert all(row["prompt"] is row["others"] is row["score_chosen"] is None for row in rows if row["tie"] is None)
    # An example is a prompt: two batches of eleven are an epoch.
    trained = [row["epoch"] for row in rows if row["split"] == "train"]
    assert trained == [update // 2 for update in range(6) for _ in range(4)]
    drawn = [row for row in rows if row["tie"] is not None]
    for row in drawn:
        assert row["example"] == text_digest(row["prompt"], {role: row[role] for role in ("chosen", "rejected")})
        scores = [row["score_chosen"], *row["score_others"], row["score_rejected"]]
        assert scores == [text.count("e") for text in (row["chosen"], *row["others"], row["rejected"])]
        assert scores[0] == max(scores)
    for line in read_metrics(finished(*MIXED), "train"):
        best = [row["score_chosen"] for row in drawn if row["update"] == line["updates"]]
        assert len(best) == 3  # and a pair of the data
        assert sum(best) / 3 == pytest.approx(line["online/score_best"])


def test_samples_of_drawn_answers_are_those_of_the_ledger(finished):
    """The run has sample_during_eval=false."""
    records = read_rows(finished(*MIXED) / "samples.jsonl")
    assert [record["examples"] for record in records] == [8, 8, 16, 16, 24, 24]
    kept = {(row["prompt"], row["chosen"], row["rejected"]) for row in read_ledger(finished(*MIXED)).to_pylist()}
    for record in records:
        best, worst = (record["completions"][record[which]]["text"] for which in ("best", "worst"))
        assert (record["prompt"], best, worst) in kept


def test_a_drawn_batch_that_is_not_finite_is_kept_and_can_be_replayed(run, spoil, run_dir):
    spoil(1)
    with pytest.raises(RunError, match="update 1 has loss nan"):
        run("run", *ONLINE)

    for row in read_rows(run_dir / "nonfinite-1" / "train.jsonl"):
        assert row["prompt"].startswith("\n\nHuman: Where is hh")
        assert row["score_chosen"] == row["chosen"].count("e") >= row["score_rejected"] == row["rejected"].count("e")
    source = f"++dataset_sources.bad={run_dir}/nonfinite-1"
    run("replay", "datasets=[bad]", source, "n_examples=4", "eval_batch_size=4")
