"""Drawn answers are kept: in samples, ledger, logs, and for replay."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.runs import read_metrics, read_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dpo.analysis.ledger import PARQUET
from dpo.analysis.runs import read_run
from dpo.data.examples import text_digest
from dpo.errors import RunError

ONLINE = (
    *("online=online", "online.scorer=keyword", "online.keyword=e", "online.n_samples=3", "online.max_new_tokens=8"),
    *("batch_size=4", "lr=1e-2", "ledger=true"),
)


def rows_of(run_dir: Path) -> list[dict]:
    return pq.read_table(run_dir / PARQUET).to_pylist()


def records_of(run_dir: Path) -> list[dict]:
    return [line for line in read_rows(run_dir / "samples.jsonl") if "completions" in line]


def test_samples_ledger_and_logs_of_a_run_hold_what_was_drawn(run, tmp_path):
    run("run", *ONLINE, "online.mix_offline=0.25", "n_eval_model_samples=2", "tensorboard.enabled=true")

    folder = tmp_path / "run"
    rows, lines = rows_of(folder), read_metrics(folder, "train")
    trained = [row for row in rows if row["split"] == "train"]
    drawn = [row for row in trained if row["tie"] is not None]
    assert all(row["prompt"] is row["others"] is row["score_chosen"] is None for row in rows if row["tie"] is None)
    assert [sum(row["update"] == line["updates"] for row in drawn) for line in lines] == [3] * 6  # and a pair of data
    # an example is a prompt: two batches of eleven are an epoch
    assert [row["epoch"] for row in trained] == [update // 2 for update in range(6) for _ in range(4)]
    for row in drawn:
        assert row["example"] == text_digest(row["prompt"], {role: row[role] for role in ("chosen", "rejected")})
        scores = row["score_chosen"], *row["score_others"], row["score_rejected"]
        assert scores == tuple(text.count("e") for text in (row["chosen"], *row["others"], row["rejected"]))
        assert scores[0] == max(scores)
        assert len(scores) == 3
    for line in lines:
        best = [row["score_chosen"] for row in drawn if row["update"] == line["updates"]]
        assert sum(best) / 3 == pytest.approx(line["online/score_best"])
        ties = [row["tie"] for row in drawn if row["update"] == line["updates"]]
        assert sum(ties) / 3 == pytest.approx(line["online/ties"])

    records = records_of(folder)  # though sample_during_eval=false
    assert [record["examples"] for record in records] == [8, 8, 16, 16, 24, 24]
    kept = {(row["prompt"], row["chosen"], row["rejected"]) for row in drawn}
    for record in records:
        best, worst = (record["completions"][record[which]]["text"] for which in ("best", "worst"))
        assert (record["prompt"], best, worst) in kept
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in ("online/score", "online/kl", "online/sampling_share"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in lines])
    found = read_run(folder)
    assert (found.online, len(found.drawn), found.samples, found.problems) == (True, 6, [], [])


def test_a_drawn_batch_that_is_not_finite_is_kept_and_can_be_replayed(run, spoil, tmp_path):
    spoil(1)
    with pytest.raises(RunError, match="update 1 has loss nan"):
        run("run", *ONLINE)

    for row in read_rows(tmp_path / "run" / "nonfinite-1" / "train.jsonl"):
        assert row["prompt"].startswith("\n\nHuman: Where is hh")
        assert row["score_chosen"] == row["chosen"].count("e") >= row["score_rejected"] == row["rejected"].count("e")
    source = f"++dataset_sources.bad={tmp_path}/run/nonfinite-1"
    run("replay", "datasets=[bad]", source, "n_examples=4", "eval_batch_size=4")
