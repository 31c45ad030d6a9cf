"""Means with intervals, folds, best-of-N and KL of the experiments on language models."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from support.models import build
from support.runs import ROOT

from benchmarks.preference_scores import divergence
from dpo.errors import InputError
from dpo.models.answers import Answer
from dpo.models.side_by_side import Side
from experiments.hh import reading as hh_reading
from experiments.hh.pairs import (
    Pair,
    predict_by_difference,
    predict_by_lengths,
    predict_by_words,
    read_pairs,
    split_folds,
)
from experiments.language import sum_kls
from experiments.reading import estimate_mean
from experiments.sentiment import data, reading
from experiments.sentiment.data import Scale

# --- means with intervals ---------------------------------------------------------------------------------------------


def test_without_clusters_the_interval_is_the_usual_one():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = estimate_mean(values, range(4))
    assert found == pytest.approx((4.0, 1.96 * values.std(ddof=1) / 2))
    assert f"{found:+.1f}" == "+4.0 ± 3.5"


def test_repeating_every_value_in_its_cluster_changes_nothing():
    values = [1.0, 2.0, 4.0, 9.0]
    assert estimate_mean(np.repeat(values, 3), np.repeat(range(4), 3)) == pytest.approx(estimate_mean(values, range(4)))


def test_the_mean_of_strata_weighs_each_alike():
    """3 of 4 and 0 of 1, each with the variance of its own mean."""
    found = estimate_mean([1, 1, 1, 0, 0, 1], range(6), strata=[0, 0, 0, 0, 1, 1])
    assert found.mean == pytest.approx((3 / 4 + 1 / 2) / 2)
    variance = (4 * (3 / 16) / 16 + 2 * (1 / 4) / 4) / 4
    assert found.half_width == pytest.approx(1.96 * np.sqrt(variance * 6 / 5))


def test_the_interval_covers_the_mean_of_clustered_values():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        effects, sizes = rng.normal(size=60), rng.integers(1, 5, size=60)
        clusters = np.repeat(range(60), sizes)
        found = estimate_mean(effects[clusters] + 0.3 * rng.normal(size=len(clusters)), clusters)
        covered += abs(found.mean) < found.half_width
    assert 0.91 < covered / 400 < 0.98


# --- HH ---------------------------------------------------------------------------------------------------------------


def make_pair(first_turn, n):
    prompt = f"\n\nHuman: {first_turn}\n\nAssistant: Yes.\n\nHuman: Go on {n}\n\nAssistant:"
    return Pair(prompt, f" chosen {n}", f" rejected {n}")


def test_no_first_turn_is_in_two_folds_and_folds_are_of_equal_size():
    turns = [f"turn {n % 31}" for n in range(200)]
    folds = split_folds(turns, 5)
    assert all(len({folds[i] for i in range(200) if turns[i] == turn}) == 1 for turn in turns)
    assert np.ptp(np.bincount(folds)) <= 7  # a turn has 6 or 7 pairs
    order = np.random.default_rng(1).permutation(200)
    assert (split_folds([turns[i] for i in order], 5) == folds[order]).all()


def test_pairs_are_read_once_and_their_first_turn_ignores_case(tmp_path):
    pairs = [make_pair("Hello", 1), make_pair("hello ", 2)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair.record) + "\n" for pair in (*pairs, pairs[0])))
    assert read_pairs([file]) == pairs
    assert pairs[0].first_turn == pairs[1].first_turn
    file.write_text('{"chosen": "no dialogue", "rejected": ""}\n')
    with pytest.raises(InputError, match="line 1: not a pair"):
        read_pairs([file])


def make_data(differences):
    """Pairs in one fold whose shorter response has 10 tokens."""
    differences = np.asarray(differences)
    tokens = np.stack((np.maximum(differences, 0), np.maximum(-differences, 0)), axis=-1) + 10
    return make_data_of_lengths(tokens)


def make_data_of_lengths(tokens):
    return hh_reading.Data([str(i) for i in range(len(tokens))], np.zeros(len(tokens), int), tokens, {})


@pytest.mark.parametrize("longest_preferred", [0, 20, 60])
def test_balanced_ranking_by_the_length_difference_alone_is_a_half(longest_preferred):
    """The longer response is preferred if it is not too long, as chosen responses here are."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, 4000)
    differences = np.where(rng.random(4000) < np.where(sizes < 20, 0.7, 0.3), sizes, -sizes)
    scores = hh_reading.judge(np.arange(4000), differences * np.where(sizes < longest_preferred, 1, -1))
    assert hh_reading.balance(scores, make_data(differences)).mean == pytest.approx(0.5, abs=0.03)


def test_balanced_accuracy_weighs_longer_and_shorter_chosen_responses_alike():
    data = make_data([-3, -1, -2, 4, 0])
    scores = hh_reading.judge(np.arange(5), np.array([1, 1, -1, 1, -1]))  # right: 2 of 3 and 1 of 1; equal lengths: 0
    assert hh_reading.balance(scores, data).mean == pytest.approx(5 / 6)
    assert hh_reading.average(scores, data).mean == pytest.approx(3 / 5)


def test_the_regression_on_length_learns_from_the_other_folds():
    """In folds 1 and 2 the shorter is chosen, in fold 0 the longer."""
    folds = np.arange(300) % 3
    differences = np.random.default_rng(0).integers(5, 100, 300) * np.where(folds == 0, 1, -1)
    margins = predict_by_difference(differences, folds)
    assert (margins[folds == 0] < 0).mean() > 0.95


def test_the_regression_on_length_can_depend_on_the_size_of_the_difference():
    """Chosen are the longer if they are much longer, else the shorter."""
    sizes = np.random.default_rng(0).integers(1, 100, 600)
    differences = np.where(sizes > 50, sizes, -sizes)
    assert (predict_by_difference(differences, np.arange(600) % 3) > 0).mean() > 0.85


def draw_lengths(n):
    """The longer response is chosen if the shorter has more than 30 tokens; the difference alone tells nothing."""
    rng = np.random.default_rng(0)
    shorter, differences = rng.integers(2, 300, n), rng.integers(1, 60, n)
    longer = shorter + differences
    return np.where((shorter > 30)[:, None], np.stack((longer, shorter), -1), np.stack((shorter, longer), -1))


def test_the_regression_on_both_lengths_finds_what_their_difference_does_not_tell():
    tokens, folds = draw_lengths(400), np.arange(400) % 4
    data, everything = make_data_of_lengths(tokens), np.arange(400)
    by_lengths = hh_reading.judge(everything, predict_by_lengths(tokens, folds))
    by_difference = hh_reading.judge(everything, predict_by_difference(data.differences, folds))
    assert hh_reading.balance(by_lengths, data).mean > 0.85
    assert hh_reading.balance(by_difference, data).mean == pytest.approx(0.5, abs=0.05)
    # in fold 0 the other response is chosen, which the other folds cannot tell
    reversed_in_fold_0 = np.where((folds == 0)[:, None], tokens[:, ::-1], tokens)
    assert (predict_by_lengths(reversed_in_fold_0, folds)[folds == 0] > 0).mean() < 0.2


def test_margins_of_similar_lengths_tell_a_ranking_by_length_from_one_by_something_else():
    tokens, rng = draw_lengths(600), np.random.default_rng(1)
    data, everything = make_data_of_lengths(tokens), np.arange(600)
    by_length, by_label = np.where(tokens.min(1) > 30, 1, -1) * np.sign(data.differences), np.ones(600)
    tokens_at_random = np.where((rng.random(600) < 0.5)[:, None], tokens, tokens[:, ::-1])
    for margins, lengths, own, of_neighbors in (
        (by_length, tokens, 1.0, 1.0),
        (by_label, tokens_at_random, 1.0, 0.5),  # nothing in the lengths tells what the margins know
    ):
        data = make_data_of_lengths(lengths)
        evaluation = hh_reading.Evaluation(everything, margins, np.zeros(600), hh_reading.Estimate(1, 0))
        assert hh_reading.balance(evaluation.scores, data).mean == own
        by_neighbors = hh_reading.score_by_neighbors(evaluation, data)
        assert hh_reading.balance(by_neighbors, data).mean == pytest.approx(of_neighbors, abs=0.06)


def test_a_pair_is_no_neighbor_of_itself_and_of_no_other_fold():
    data = make_data([3, 3, -3, -3])._replace(folds=np.array([0, 0, 1, 1]))
    evaluation = hh_reading.Evaluation(np.arange(4), np.array([1, -1, 1, 1]), np.zeros(4), hh_reading.Estimate(1, 0))
    assert hh_reading.score_by_neighbors(evaluation, data) == {0: 0, 1: 1, 2: 1, 3: 1}


def test_the_regression_on_words_learns_from_the_other_folds():
    rng, nouns = np.random.default_rng(0), [f"noun{n}" for n in range(30)]
    pairs = [
        Pair("", f" {kind}, {rng.choice(nouns)}.", f" {rng.choice(nouns)} {rng.choice(nouns)}")
        for kind in rng.choice(["Sorry", "Sure"], 200)
    ]
    folds = np.arange(200) % 4
    assert (predict_by_words(pairs, folds) > 0).mean() > 0.95
    reversed_in_fold_0 = [
        Pair("", pair.rejected, pair.chosen) if fold == 0 else pair for pair, fold in zip(pairs, folds, strict=True)
    ]
    assert (predict_by_words(reversed_in_fold_0, folds)[folds == 0] < 0).mean() > 0.95


def make_row(share, kl, gaps):
    lists = {"pairs": [*range(len(gaps))], "chosen": gaps, "rejected": [0.0] * len(gaps), "kl": [kl, kl]}
    return {"method": "dpo-0.1", "fold": 0, "share": share, **lists}


def test_accuracy_at_equal_kl_is_interpolated_along_the_run():
    rows = [make_row(0.5, 1.0, [1.0, 1.0, -1.0, -1.0]), make_row(1.0, 3.0, [1.0, 1.0, 1.0, -1.0])]
    along = [*hh_reading.collect(rows, "dpo-0.1").values()]
    assert hh_reading.interpolate(along, 1.5) == pytest.approx({0: 1, 1: 1, 2: 0.25, 3: 0})
    assert hh_reading.interpolate(along, 0.5) == {}
    uncertain = [along[0]._replace(kl=hh_reading.Estimate(1.0, 0.6)), along[1]]
    assert hh_reading.interpolate(uncertain, 0.5) == along[0].scores
    assert hh_reading.choose_kl([rows[0] | {"kl": [5.0, 5.0]}, rows[1]]) == 5.0  # KL fell along the run
    assert "| DPO, beta 0.1 | 3.00 ± 0.00 | 0.750 ± " in hh_reading.format_tables(rows, make_data([-1, 1, -1, 1]))


# --- sentiment --------------------------------------------------------------------------------------------------------


def test_best_of_n_is_the_mean_over_all_subsets():
    rewards = np.random.default_rng(0).normal(size=(3, 6))
    for n in (1, 2, 5, 6):
        subsets = [rewards[:, list(chosen)].max(1) for chosen in itertools.combinations(range(6), n)]
        assert data.best_of(n, rewards) == pytest.approx(np.mean(subsets, axis=0))
    assert data.bound_best_kl(1) == 0
    assert data.bound_best_kl(4) == pytest.approx(np.log(4) - 3 / 4)


def test_labels_follow_bradley_and_terry():
    """A tie is a coin toss, and at a difference of 1 it is sigmoid(1)."""
    records = [{"prompt": "p", "texts": ["better", "worse"]}] * 4000
    for difference, share in ((0.0, 0.5), (1.0, 0.731)):
        pairs = data.label_pairs(records, np.tile([difference, 0.0], (4000, 1)), seed=0)
        assert np.mean([pair["chosen"] == "better" for pair in pairs]) == pytest.approx(share, abs=0.03)
        assert all({pair["chosen"], pair["rejected"]} == {"better", "worse"} for pair in pairs)


def test_the_tables_of_the_document_are_those_of_its_rows():
    rows = json.loads((ROOT / "docs" / "sentiment.json").read_text())
    text = (ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8")
    assert [table for table in reading.format_tables(rows).split("\n\n") if table not in text] == []


def test_the_true_reward_is_the_standardized_sentiment(monkeypatch):
    monkeypatch.setattr(data, "load_lexicon", lambda: lambda text: text.count("good") - text.count("bad"))
    assert data.make_scorer(Scale(0.5, 2.0))(["", ""], ["good good", "bad"]) == [0.75, -0.75]


def test_a_missing_lexicon_is_one_sentence(monkeypatch):
    monkeypatch.setitem(data.importlib.sys.modules, "vaderSentiment", None)
    with pytest.raises(InputError, match="pip install vaderSentiment"):
        data.load_lexicon()


def test_rewards_at_equal_kl_are_paired_by_prompt():
    def make(method, kl, rewards):
        return {"method": method, "knob": 1, "kl": kl, "rewards": rewards}

    rows = [make("reference", 0.0, [0, 1]), make("dpo", 2.0, [2, 1]), make("dpo", 4.0, [2, 3])]
    assert reading.at_kl(rows, "dpo", 1.0).tolist() == [1, 1]
    assert reading.at_kl(rows, "dpo", 3.0).tolist() == [2, 2]
    assert reading.at_kl(rows, "dpo", 4.5) is None
    assert reading.at_kl(rows, "ipo", 1.0) is None


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_the_kl_of_a_batch_is_that_of_each_answer_alone():
    policy, other = build("llama").eval(), build("llama").eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    prompts = [(1, 2, 3), (4, 5, 6, 7, 8), (9,)]
    answers = [Answer("", tokens, ended=False) for tokens in ((10, 11), (12,), (13, 14, 15, 16))]
    sides = [Side(name, model, None, None) for name, model in (("policy", policy), ("reference", other))]
    found = sum_kls(*sides, prompts, answers)
    for kl, prompt, answer in zip(found, prompts, answers, strict=True):
        assert kl == pytest.approx(divergence(policy, other, prompt, answer.tokens)[1], rel=1e-4)
        assert kl > 1e-3
