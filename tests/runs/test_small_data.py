"""A few rows are enough for a run, under each trainer."""

from collections import Counter

import pytest
from support.pytests import slow, succeeded
from support.runs import TINY, read_json, read_rows, train, write_rows

from dpo.analysis.ledger import read_ledger

TRAINERS = {
    "one process": (),
    "sharded": ("trainer=FSDPTrainer", "world_size=2"),
    "cut": ("trainer=TensorParallelTrainer", "world_size=2"),
    "sharded over three": ("trainer=FSDPTrainer", "world_size=3", "batch_size=3"),
}


@pytest.mark.parametrize(
    ("n_rows", "trainer", "counts"),
    [
        (5, "one process", (4, 1, 1)),
        # The 16 examples of a batch of evaluation cannot be divided by three.
        slow(60, "sharded over three", (54, 6, 18)),
        slow(60, "one process", (54, 6, 13)),
        slow(60, "sharded", (54, 6, 13)),
        slow(60, "cut", (54, 6, 13)),
        slow(5, "sharded", (4, 1, 1)),
    ],
)
def test_every_test_row_is_scored_and_sampled_once_at_each_evaluation(n_rows, trainer, counts, run_dir, tmp_path):
    rows = [
        {"prompt": f"Where is key {i}?", "chosen": f" Here{' I think' * (i % 3)}.", "rejected": " Go!"}
        for i in range(n_rows)
    ]
    result = succeeded(train(
        "loss=dpo", "loss.beta=0.1", f"model.name_or_path={TINY}", "exp_name=small", "ledger=true",
        "do_first_sampling=true", "eval_every=1000", "holdout=0.1",
        "datasets=[mine]", f"dataset_sources.mine={write_rows(tmp_path / 'mine.jsonl', rows)}", "max_length=48",
        "max_prompt_length=24", f"local_run_dir={run_dir}", f"local_dirs=[{tmp_path}]", *TRAINERS[trainer],
    ))  # fmt: skip

    report = read_json(run_dir / "preflight.json")
    n_train, n_test, updates = counts
    assert (report["train"]["examples"], report["test"]["examples"]) == (n_train, n_test)
    assert report["updates"] == updates
    scored = Counter(
        (row["update"], row["example"]) for row in read_ledger(run_dir).to_pylist() if row["split"] == "eval"
    )
    assert set(scored.values()) == {1}
    assert Counter(update for update, _ in scored) == {0: n_test, updates: n_test}
    samples, answers = (read_rows(run_dir / name) for name in ("samples.jsonl", "answers.jsonl"))
    assert len({(sample["examples"], sample["prompt"]) for sample in samples}) == len(samples) == 2 * n_test
    assert {(answer["examples"], answer["prompt"]) for answer in answers} == {
        (sample["examples"], sample["prompt"]) for sample in samples
    }
    assert len(answers) == len(samples)
    assert f" of {n_test} answer" in result.stdout.splitlines()[-1]
