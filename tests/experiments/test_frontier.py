"""`experiments.frontier`: its task, its estimators, its tables. No policy is above pi*."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.models import plain_logps

from dpo.data.examples import Example
from dpo.data.tokenization import TextEncoder, encode_texts
from dpo.data.tokenizer import load_tokenizer
from dpo.models.pretrained import load_model
from experiments.frontier import __main__ as frontier
from experiments.frontier import controls, exact, runs
from experiments.frontier.picture import draw as draw_picture
from experiments.frontier.reading import (
    at_equal_kl,
    collect_curve,
    format_rates,
    mean_and_interval,
    tables,
    within_budget,
)
from experiments.frontier.task import NONE, Task, draw_pairs, noisy_scorer

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=17)
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("frontier") / "model"
    runs.write_model(directory, TASK)
    return directory


@pytest.fixture(scope="module")
def model(model_dir):
    """Random weights, larger than usual, so that responses differ in probability."""
    found = load_model(str(model_dir), dtype=torch.float32, random_init=True).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(3)
    return found


@pytest.fixture(scope="module")
def logps(model):
    return exact.leaf_logps(model, TASK, TASK.test_prompts)


@pytest.fixture(scope="module")
def rewards():
    return TASK.reward(TASK.test_prompts[:, None], TASK.leaves[None])


# --- the task ---------------------------------------------------------------------------------------------------------


def test_leaves_are_all_responses_once_and_no_held_out_prompt_is_trained_on():
    texts = [TASK.text(leaf) for leaf in TASK.leaves]
    assert texts == ["".join(t) for n in range(4) for t in itertools.product("abc", repeat=n)]
    train, test = ({tuple(prompt) for prompt in part} for part in (TASK.train_prompts, TASK.test_prompts))
    assert (len(train), len(test), len(train & test)) == (81 - 17, 17, 0)


def test_the_reward_is_the_sum_that_the_document_says():
    suits, follows, completes = TASK._reward_tables
    prompt, response = np.array([2, 0, 1, 0]), np.array([1, 1, NONE])
    raw = 0.5 + suits[2, 1] + follows[0, 1] + completes[1, 0, 1] / 2
    raw += 0.5 + suits[2, 1] + follows[1, 1] + completes[0, 1, 1] / 2
    raw -= 0.6  # the second of two
    mean, spread = TASK._mean_and_spread
    assert TASK.reward(prompt, response) == pytest.approx((raw - mean) / spread)
    assert TASK.reward(prompt, np.full(3, NONE)) == pytest.approx(-mean / spread)


def chance(margin: float) -> float:
    return 1 / (1 + math.exp(-margin))


def test_labels_are_bradley_and_terrys_and_noise_flips_its_share_of_them():
    prompts, y, z = np.repeat(TASK.test_prompts[:1], 20_000, axis=0), TASK.leaves[5], TASK.leaves[30]
    margin = float(TASK.reward(prompts[0], y) - TASK.reward(prompts[0], z))
    labels = []
    for noise in (0, 0.2):
        responses = iter([np.tile(y, (20_000, 1)), np.tile(z, (20_000, 1))])
        pairs = draw_pairs(TASK, prompts, partial(next, responses), np.random.default_rng(3), noise=noise)
        labels.append((pairs.chosen == y).all(-1))
    clean, noisy = labels
    assert 0.1 < abs(margin) < 3
    assert clean.mean() == pytest.approx(chance(margin), abs=0.015)  # 4 standard errors
    assert (clean != noisy).mean() == pytest.approx(0.2, abs=0.012)

    score = noisy_scorer(TASK, seed=0)  # of what is drawn online
    asked, said = [TASK.text(prompts[0])] * 40_000, [TASK.text(y), TASK.text(z)] * 20_000
    scores = np.array(score(asked, said)).reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).mean() == pytest.approx(chance(margin), abs=0.015)


def test_the_two_responses_of_a_pair_differ(model):
    rng = np.random.default_rng(0)
    pairs = draw_pairs(TASK, TASK.train_prompts, lambda asked: exact.draw(model, TASK, asked, rng), rng)
    assert (pairs.chosen != pairs.rejected).any(-1).all()


# --- what a model makes of it -----------------------------------------------------------------------------------------


def test_the_leaves_are_what_the_trainer_scores(model, model_dir, logps):
    """Tokenized and cut by the trainer's rule, scored by its plain path."""
    encode = TextEncoder(load_tokenizer(str(model_dir)))
    texts, examples = [TASK.text(leaf) for leaf in TASK.leaves], []
    for text in texts:
        prompt, responses = encode_texts(
            TASK.text(TASK.test_prompts[3]),
            [text],
            encode,
            truncation_mode="keep_start",
            max_length=TASK.prompt_length + TASK.response_length,
            max_prompt_length=TASK.prompt_length,
        )
        examples.append(Example(tuple(prompt), tuple(map(tuple, responses))))
    assert [len(example.responses[0]) for example in examples] == [min(len(text) + 1, 3) for text in texts]
    with torch.no_grad():
        (scored,) = plain_logps(model, examples)
    assert scored.tolist() == pytest.approx(logps[3].tolist(), abs=2e-5)
    assert np.exp(logps).sum(-1) == pytest.approx(np.ones(17))


def test_reward_and_kl_agree_with_samples_of_generate(model, logps, rewards):
    """KL against a uniform reference, whose log-probabilities are known."""
    n, prompt = 6000, TASK.test_prompts[0]
    torch.manual_seed(0)
    rows = torch.from_numpy(np.repeat(prompt[None], n, 0))
    ids = model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=True, max_new_tokens=3, top_k=0)
    index = {TASK.text(leaf): i for i, leaf in enumerate(TASK.leaves)}
    texts = ["".join("abc"[i] for i in row if i < 3) for row in ids[:, len(prompt) :].tolist()]
    drawn = np.array([index[text] for text in texts])
    uniform = np.full_like(logps[:1], -math.log(40))
    point = exact.make_point(logps[:1], uniform, rewards[:1])
    for expected, values in ((point.reward, rewards[0, drawn]), (point.kl, (logps - uniform)[0, drawn])):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(n)


def test_draw_draws_from_the_model(model, logps):
    n, rng = 5000, np.random.default_rng(1)
    drawn = exact.draw(model, TASK, np.repeat(TASK.test_prompts[:1], n, 0), rng)
    counts = (drawn[:, None] == TASK.leaves[None]).all(-1).sum(0)
    assert counts.sum() == n  # each is a leaf
    expected = n * np.exp(logps[0])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


# --- the limit --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small():
    """A reference of 3 prompts with 5 responses each; two rewards tie."""
    rng = np.random.default_rng(0)
    logits, rewards = rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    rewards[:, 4] = rewards[:, 1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), rewards


def test_no_policy_is_above_the_limit_and_the_optimum_is_on_it(small):
    rng = np.random.default_rng(1)
    for beta in (5, 1, 0.3, 0.1):
        best = exact.optimum(beta, *small)
        point = exact.make_point(best, *small)
        assert exact.most_reward(point.kl, *small) == pytest.approx(point.reward, abs=1e-9)
        for scale in (0.01, 0.1, 1, 3):
            for _ in range(20):
                logits = best + scale * rng.normal(size=best.shape)
                other = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                reward, kl = exact.make_point(other, *small)
                assert reward <= exact.most_reward(kl, *small) + 1e-9
    assert exact.most_reward(1e3, *small) == pytest.approx(small[1].max(-1).mean())  # more KL buys nothing


def test_the_chosen_are_what_all_pairs_come_to(small):
    reference, rewards = small
    p, r = np.exp(reference[0]), rewards[0]
    expected = np.zeros(5)
    for y, z in itertools.permutations(range(5), 2):
        won = chance(r[y] - r[z])
        drawn = p[y] * p[z] / (1 - p[y])  # the second again until it differs
        expected[y] += drawn * won
        expected[z] += drawn * (1 - won)
    assert np.exp(exact.chosen(*small)[0]) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_best_of_n_is_what_all_draws_of_n_come_to(small, n):
    reference, rewards = small
    p, r = np.exp(reference[0]), rewards[0]
    expected = np.zeros(5)
    for draws in itertools.product(range(5), repeat=n):
        best = [i for i in draws if r[i] == max(r[list(draws)])]  # one of these by lot, equal ones among them too
        for i in best:
            expected[i] += np.prod(p[list(draws)]) / len(best)
    assert np.exp(exact.best_of_n(n, *small)[0]) == pytest.approx(expected)
    many = exact.make_point(exact.best_of_n(10**6, *small), *small)
    assert many.reward == pytest.approx(rewards.max(-1).mean())


# --- controls ---------------------------------------------------------------------------------------------------------


def test_without_empty_responses_a_policy_is_itself_given_that_it_writes_something(model, logps):
    task = dataclasses.replace(TASK, shortest=1)
    found = exact.leaf_logps(model, task, TASK.test_prompts)
    share = np.exp(logps[:, 1:])
    assert np.exp(found) == pytest.approx(share / share.sum(-1, keepdims=True))
    assert [TASK.text(leaf) for leaf in task.leaves] == [TASK.text(leaf) for leaf in TASK.leaves[1:]]


@pytest.mark.parametrize("shortest", [1, 3])
def test_responses_that_are_too_short_are_not_drawn(model, shortest):
    task = dataclasses.replace(TASK, shortest=shortest)
    assert np.exp(exact.leaf_logps(model, task, task.test_prompts)).sum(-1) == pytest.approx(1)
    drawn = exact.draw(model, task, np.repeat(task.test_prompts, 50, axis=0), np.random.default_rng(0))
    assert set((drawn != NONE).sum(-1)) == {*range(shortest, 4)}


@pytest.fixture(scope="module")
def control_rows(model):
    return [*controls.run_all(model, TASK, pairs=64, epochs=8, seeds=(0, 1))]


def test_controls_are_trained_on_responses_that_are_possible_alone(control_rows):
    for row in control_rows:
        assert row["reward"] <= row["most_reward"] + 1e-6
        assert sum(row["lengths"]) == pytest.approx(1)
        assert sum(row["lengths"][: row["shortest"]]) == 0
    start = {row["shortest"]: row["reward"] for row in control_rows if row["method"] == "sft"}
    trained = [row for row in control_rows if row["method"] == "dpo"]
    assert {(row["shortest"], row["beta"], row["seed"]) for row in trained} == {
        *itertools.product((0, 1, 3), controls.BETAS, (0, 1))
    }
    assert min(row["reward"] - start[row["shortest"]] for row in trained) > 0


def test_a_reweighted_policy_is_the_reference_times_a_power_of_its_ratio(control_rows, model, logps):
    policy = controls.train_dpo(model, controls.Setting(TASK, controls.REWEIGHTED_BETA, 0, 64, 8))
    ratio = np.exp(exact.leaf_logps(policy, TASK, TASK.test_prompts) - logps)
    rows = [row for row in control_rows if row["method"] == "dpo_reweighted" and row["seed"] == 0]
    assert [row["scale"] for row in rows] == [*controls.SCALES]
    for row in rows:
        share = np.exp(logps) * ratio ** row["scale"]
        share /= share.sum(-1, keepdims=True)
        assert row["kl"] == pytest.approx((share * (np.log(share) - logps)).sum(-1).mean(), abs=1e-5)


# --- what the rows say ------------------------------------------------------------------------------------------------


def made_row(method, beta, seed, reward, kl, **more):
    return {
        **frontier.make_row(method, beta, seed, reward, kl),
        "most_reward": 2.0,
        "label_noise": 0.0,
        "lr": 1e-3,
        **more,
    }


@pytest.fixture
def made_rows():
    rows = [
        made_row("sft", None, None, 0.0, 0.0, most_reward=0.0),
        made_row("pi_star", 1.0, None, 1.5, 1.0),
        made_row("pi_star", 0.1, None, 2.0, 4.0),
    ]
    rows.append(made_row("best_of_2", None, None, 0.5, 0.3, n=2))
    for seed, shift in ((0, 0.0), (1, 0.2)):
        rows += [
            made_row("dpo", 0.1, seed, 1.0 + shift, 2.0),
            made_row("dpo", 1.0, seed, 0.5, 1.0),
            made_row("dpo", 0.01, seed, 0.6, 4.0),
        ]
    return rows


def test_rewards_at_equal_kl_are_below_the_limit_by_gaps_on_lines_from_the_reference(made_rows):
    """The gaps are 1.5 at KL 1, 1 and 0.8 at 2."""
    curve = collect_curve(made_rows, "dpo")
    assert curve.betas == [1.0, 0.1, 0.01]  # in the order of KL
    assert np.isnan(at_equal_kl(curve, made_rows, 0.5)).all()
    assert at_equal_kl(curve, made_rows, 1.0).tolist() == pytest.approx([1.5 - 1.5] * 2)
    assert at_equal_kl(curve, made_rows, 1.5).tolist() == pytest.approx([1.5 + 0.5 / 6 - 1.25, 1.5 + 0.5 / 6 - 1.15])
    assert np.isnan(at_equal_kl(curve, made_rows, 5.0)).all()


def test_a_budget_is_spent_on_the_best_mixture_within_it(made_rows):
    """Mixtures of the reference and the policy at KL 2 are best."""
    found = within_budget(collect_curve(made_rows, "dpo"), made_rows[0], np.array([0.0, 1.0, 2.0, 5.0]))
    assert found.tolist() == pytest.approx([(0 + 0.5 + 1 + 1) / 4, (0 + 0.6 + 1.2 + 1.2) / 4])


def test_an_interval_is_students():
    assert mean_and_interval(np.array([1.0, 2.0, 3.0])) == "2.00 [-0.48, 4.48]"  # 2 -+ 4.303 / sqrt(3)
    assert mean_and_interval(np.array([1.0, 1.1, 1.2]), "+") == "**+1.10 [+0.85, +1.35]**"  # excludes 0
    assert mean_and_interval(np.array([-1.0, 0.0, 1.2]), "+") == "+0.07 [-2.67, +2.80]"
    assert mean_and_interval(np.array([1.0])) == "1.00"
    assert mean_and_interval(np.array([1.0, np.nan])) == "-"


def test_the_tables_and_the_picture_of_rows(made_rows):
    peaks, equal, *differences = tables(made_rows)
    assert "| dpo | 0.1 | 2.00 | 1.10 [-0.17, 2.37] | 0.90 [-0.37, 2.17] | 4.00 | 0.60 [0.60, 0.60] | -0.50" in peaks
    assert "| dpo | - | 0.00 [0.00, 0.00] | 0.77" in equal
    assert differences == []  # there is but one method
    lower = [{**row, "method": "ipo", "reward": row["reward"] - 0.1} for row in made_rows if row["method"] == "dpo"]
    differences = tables(made_rows + lower)[2]
    assert "| ipo - dpo | **-0.10 [-0.10, -0.10]** | **-0.10 [-0.10, -0.10]** |" in differences
    assert "| dpo | 0.688 |" in format_rates(made_rows, np.array([0.0, 1.0, 2.0, 5.0]))
    noisy = [{**row, "method": "dpo_noisy", "label_noise": 0.2} for row in made_rows if row["method"] == "dpo"]
    pictures = [draw_picture(rows, dark=dark) for rows in (made_rows, made_rows + noisy) for dark in (False, True)]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert len(set(pictures)) == 4
