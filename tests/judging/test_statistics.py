"""Win rates and their intervals."""

import numpy as np
import pytest

from dpo.judging import statistics
from dpo.judging.statistics import FEWEST_FOR_LENGTH, find_rate, summarize_verdicts


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "N_RESAMPLES", 2_000)


def draw(n: int, *, quality: float, slope: float, seed: int) -> tuple[list[float], list[int]]:
    """Verdicts of a judge who likes long answers, on answers of which the first are longer."""
    generator = np.random.default_rng(seed)
    lengths = np.stack([generator.integers(50, 400, n), generator.integers(20, 200, n)], axis=1)
    difference = lengths[:, 0] - lengths[:, 1]
    chance = 1 / (1 + np.exp(-quality - slope * np.tanh(difference / difference.std())))
    return (generator.random(n) < chance).astype(float).tolist(), difference.tolist()


def test_wins_ties_and_losses_are_counted_and_a_tie_is_half_a_win():
    summary = summarize_verdicts([1, 0.5, 0.75, 0, 0.25], [0] * 5)
    assert (summary.n, summary.wins, summary.ties, summary.losses) == (5, 2, 1, 2)
    assert summary.rate.value == 0.5
    assert summary.controlled is None
    assert "a wins 2, ties 1 and loses 2 of 5 prompts against b: win rate 50 %" in summary.describe("a", "b")


def test_what_so_many_prompts_show_is_in_whole_points_and_none_more_are_asked_for_if_enough():
    def describe(n_ties: int, score: float) -> str:
        return summarize_verdicts([0.5] * n_ties + [score], [0] * (n_ties + 1)).describe("a", "b")

    assert describe(8, 0.75).endswith("That is too few to say much.")
    assert "many can show a rate 1 point or more away from 50 %. At" in describe(99, 0.75)
    assert describe(8, 1).endswith("much; 13 more prompts would show a rate 10 points away from 50 %.")


def test_the_interval_covers_the_truth_about_95_times_in_100():
    covered = 0
    for seed in range(300):
        scores = np.random.default_rng(seed).choice([0, 0.5, 1], p=[0.3, 0.2, 0.5], size=80)
        rate = find_rate(scores, np.random.default_rng(seed))
        covered += rate.low <= 0.6 <= rate.high
    assert 0.9 <= covered / 300 <= 0.985


def test_equal_verdicts_have_an_interval_too():
    rate = find_rate(np.ones(10), np.random.default_rng(0))
    assert rate.value == 1
    assert rate.low == pytest.approx(0.722, abs=1e-3)  # Wilson's


def test_what_length_explains_is_taken_out():
    scores, differences = draw(1000, quality=0.0, slope=2.0, seed=1)
    summary = summarize_verdicts(scores, differences)
    assert summary.rate.low > 0.6  # equal answers seem better for their length
    assert summary.controlled.low < 0.5 < summary.controlled.high
    scores, differences = draw(1000, quality=1.0, slope=2.0, seed=2)
    better = summarize_verdicts(scores, differences).controlled
    assert better.low < 1 / (1 + np.exp(-1.0)) < better.high
    assert "At equal lengths of the answers: " in summary.describe("a", "b")


def test_where_one_models_answers_are_always_longer_there_is_no_rate_at_equal_lengths():
    always = list(range(100, 200))
    assert summarize_verdicts([1.0, 0.0] * 50, always).controlled is None


@pytest.mark.parametrize("verdict", [0.0, 1.0])
def test_equal_lengths_or_verdicts_leave_the_controlled_rate_finite(verdict):
    summary = summarize_verdicts([verdict] * FEWEST_FOR_LENGTH, [0] * FEWEST_FOR_LENGTH)
    assert summary.controlled.value == pytest.approx(verdict, abs=0.01)


def test_the_smallest_difference_is_found_in_most_samples_of_that_size():
    """80 % of samples with the difference have an interval without one half."""
    n, found = 200, 0
    smallest = summarize_verdicts([0.0, 1.0] * (n // 2), [0] * n).smallest
    for seed in range(200):
        scores = (np.random.default_rng(seed).random(n) < 0.5 + smallest).astype(float)
        found += find_rate(scores, np.random.default_rng(0)).low > 0.5
    assert 0.7 <= found / 200 <= 0.9
