"""Scores of `benchmarks.hh_smollm2` against numbers worked by hand."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from support.runs import GOLDEN, run_script

from benchmarks import hh_smollm2
from benchmarks.preference_scores import (
    Interval,
    balance_over_length,
    bootstrap,
    by_prompt,
    divergence,
)


def test_an_interval_of_shares_is_that_of_the_binomial_distribution():
    # 32 of 64: resampled counts are Binomial(64, 1/2), whose 2.5th and 97.5th percentiles are 24 and 40
    assert bootstrap([0, 1] * 32) == Interval(0.5, 24 / 64, 40 / 64)


def test_policies_are_resampled_together_and_samples_of_a_prompt_are_one_observation():
    values = np.random.default_rng(1).normal(size=20)
    assert bootstrap(values + 1).low == pytest.approx(bootstrap(values).low + 1)
    assert bootstrap(values).low < bootstrap(values, seed=1).high
    samples = [{"prompt": 1, "kl": 4.0}, {"prompt": 0, "kl": 1.0}, {"prompt": 1, "kl": 2.0}]
    assert by_prompt(samples, "kl").tolist() == [1.0, 3.0]


def markov(seed):
    """A model whose next token depends on the last: five tokens."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))

    def forward(ids, logits_to_keep):
        return SimpleNamespace(logits=table[ids][:, -logits_to_keep:])

    forward.probabilities = table.softmax(-1).double()
    return forward


def test_both_estimates_of_kl_have_its_value_for_mean():
    policy, reference = markov(0), markov(1)
    p, q = policy.probabilities, reference.probabilities
    step = (p * (p / q).log()).sum(-1)  # of the token after each token
    exact = step[3] + (p[3] * step).sum()  # of two tokens after token 3
    mean, square = np.zeros(2), np.zeros(2)
    for a, b in itertools.product(range(5), repeat=2):
        both = np.array(divergence(policy, reference, (0, 3), (a, b)))
        weight = float(p[3, a] * p[a, b])
        mean, square = mean + weight * both, square + weight * both**2
    assert mean == pytest.approx([float(exact)] * 2, rel=1e-5)
    variance = square - mean**2
    assert variance[1] < variance[0]  # the exact KL of each token varies less than the log-ratio


def test_ranking_by_length_alone_is_at_chance_when_lengths_are_balanced():
    longer = np.array([-3] * 30 + [5] * 10 + [0] * 7)
    assert balance_over_length(longer < 0, longer) == Interval(0.5, 0.5, 0.5)
    right = np.array([1, 0] * 15 + [1] * 10 + [0] * 7, dtype=bool)  # half of the shorter ones, all longer ones
    found = balance_over_length(right, longer)
    assert found.mean == 0.75
    # resampled counts of the shorter ones are Binomial(30, 1/2), between 10 and 20
    assert (found.low, found.high) == pytest.approx(((10 / 30 + 1) / 2, (20 / 30 + 1) / 2))
    assert balance_over_length(right[:30], longer[:30]) is None


def test_training_pairs_have_their_gap_and_lengths_from_our_ledger_and_from_what_trl_logged(tmp_path):
    rows = {
        "split": ["train", "train", "eval"],
        **{"policy_chosen": [-1.0, -2.0, 0.0], "reference_chosen": [-2.0, -2.0, 0.0]},
        **{"policy_rejected": [-3.0, -1.0, 0.0], "reference_rejected": [-1.0, -2.0, 0.0]},
        **{"chosen_tokens": pa.array([4, 9, 1], pa.uint16()), "rejected_tokens": pa.array([7, 2, 1], pa.uint16())},
    }
    pq.write_table(pa.table(rows), tmp_path / "ledger.parquet")
    gaps, longer = hh_smollm2.online_pairs(tmp_path, "dpo 0.1")
    assert (gaps.tolist(), longer.tolist()) == ([3.0, -1.0], [-3, 7])

    transformers.AutoTokenizer.from_pretrained(GOLDEN / "tiny-llama").save_pretrained(tmp_path / "hf")
    texts = [{"prompt": "a", "chosen": " yes", "rejected": " yes yes yes"}, {"chosen": " no no", "rejected": " no"}]
    (tmp_path / "train.json").write_text(json.dumps(texts))
    (tmp_path / "trl.json").write_text(json.dumps({"margins": [0.3, -0.1]}))
    gaps, longer = hh_smollm2.online_pairs(tmp_path, "TRL dpo 0.1")
    assert gaps.tolist() == pytest.approx([3.0, -1.0])
    assert np.sign(longer).tolist() == [-1, 1]


def test_a_row_that_there_is_none_of_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--only: unknown rows dpo 7; the rows are sft; dpo 0.05; "):
        hh_smollm2.main(["--model=M", "--data=D", f"--out={tmp_path}", "--only=dpo 7"])
    with pytest.raises(SystemExit, match="rows of TRL need --trl PYTHON"):
        hh_smollm2.main(["--model=M", "--data=D", f"--out={tmp_path}", "--only=TRL dpo 0.1"])


@pytest.mark.slow
def test_it_goes_from_nothing_to_the_table(tmp_path):
    arguments = (
        f"--model={GOLDEN / 'tiny-llama'}", f"--data={GOLDEN / 'words'}", f"--out={tmp_path}", "--quick", "--samples=1",
        "--tokens=8", "--only=dpo 0.1", "max_length=128", "max_prompt_length=64",
    )  # fmt: skip
    for _ in range(2):  # the second finds all of it there
        result = run_script("-m", "benchmarks.hh_smollm2", *arguments)
        assert result.returncode == 0, result.stderr
    assert "updates of 8 examples will run" not in result.stdout
    assert [row["name"] for row in json.loads((tmp_path / "results.json").read_text())] == ["sft", "dpo 0.1"]
    assert (tmp_path / "hh.png").stat().st_size > 1000
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table] == [
        *("| ", "| ---", "| sft", "| dpo 0.1", "", "| test pairs", "| ---", "| dpo 0.1")
    ]
