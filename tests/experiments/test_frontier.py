"""`experiments.frontier`: its task and its estimators. No policy is above pi*."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.models import plain_logps

from dpo.data.examples import Example
from dpo.models.paths import ModelPath
from dpo.models.pretrained import load_model
from experiments.frontier import exact, files
from experiments.frontier.task import Task, draw_pairs, noisy_scorer

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=17, for_tuning=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, larger than usual, so that responses differ in probability."""
    directory = tmp_path_factory.mktemp("frontier") / "model"
    files.write_model(directory, TASK)
    found = load_model(ModelPath(str(directory), random_init=True), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(3)
    return found


@pytest.fixture(scope="module")
def logps(model):
    return exact.leaf_logps(model, TASK, TASK.test_prompts)


# --- the task ---------------------------------------------------------------------------------------------------------


def test_leaves_are_all_responses_once_and_no_held_out_prompt_is_trained_on():
    assert [TASK.text(leaf) for leaf in TASK.leaves] == ["".join(t) for t in itertools.product("abc", repeat=3)]
    train, test = ({tuple(prompt) for prompt in part} for part in (TASK.train_prompts, TASK.test_prompts))
    assert (len(train), len(test), train & test) == (81 - 17 - 9, 17, set())


def test_the_reward_is_the_sum_that_the_document_says():
    suits, follows, completes = TASK._reward_tables
    prompt, response = np.array([2, 0, 1, 0]), np.array([1, 1, 2])
    raw = 0.5 + suits[2, 1] + follows[0, 1] + completes[1, 0, 1] / 2
    raw += 0.5 + suits[2, 1] + follows[1, 1] + completes[0, 1, 1] / 2
    raw += 0.5 + suits[2, 2] + follows[1, 2] + completes[1, 1, 2] / 2
    raw -= 0.6  # the second of two
    mean, spread = TASK._mean_and_spread
    assert TASK.reward(prompt, response) == pytest.approx((raw - mean) / spread)


def test_labels_are_bradley_and_terrys_for_pairs_and_for_what_is_drawn_online():
    prompts, y, z = np.repeat(TASK.test_prompts[:1], 20_000, axis=0), TASK.leaves[5], TASK.leaves[20]
    margin = float(TASK.reward(prompts[0], y) - TASK.reward(prompts[0], z))
    chance = 1 / (1 + math.exp(-margin))
    responses = iter([np.tile(y, (20_000, 1)), np.tile(z, (20_000, 1))])
    pairs = draw_pairs(TASK, prompts, partial(next, responses), np.random.default_rng(3))
    assert 0.1 < abs(margin) < 3
    assert (pairs.chosen == y).all(-1).mean() == pytest.approx(chance, abs=0.015)  # 4 standard errors

    score = noisy_scorer(TASK, seed=0)
    asked, said = [TASK.text(prompts[0])] * 40_000, [TASK.text(y), TASK.text(z)] * 20_000
    scores = np.array(score(asked, said)).reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).mean() == pytest.approx(chance, abs=0.015)


# --- what a model makes of it -----------------------------------------------------------------------------------------


def test_the_leaves_have_the_log_probabilities_that_the_trainer_scores(model, logps):
    for i in (0, 3, 16):  # more prompts than are computed at once
        prompt = tuple(TASK.test_prompts[i].tolist())
        examples = [Example(prompt, (tuple(leaf),)) for leaf in TASK.leaves.tolist()]
        with torch.no_grad():
            (scored,) = plain_logps(model, examples)
        assert scored.tolist() == pytest.approx(logps[i].tolist(), abs=2e-5)
    assert np.exp(logps).sum(-1) == pytest.approx(np.ones(17))


def test_no_policy_is_above_the_limit_and_the_optimum_is_on_it():
    rng = np.random.default_rng(0)
    logits, rewards = rng.normal(size=(2, 3, 5))  # 3 prompts with 5 responses each
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    limit = exact.Limit(reference, rewards)
    for beta in (5, 1, 0.3, 0.1):
        best = exact.optimum(beta, reference, rewards)
        point = exact.make_point(best, reference, rewards)
        assert limit.most_reward(point.kl) == pytest.approx(point.reward, abs=1e-4)
        for scale in (0.01, 0.1, 1, 3):
            for _ in range(20):
                logits = best + scale * rng.normal(size=best.shape)
                other = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                reward, kl = exact.make_point(other, reference, rewards)
                assert reward <= limit.most_reward(kl) + 1e-9
    assert limit.most_reward(1e3) == pytest.approx(rewards.max(-1).mean())  # more KL buys nothing
    assert limit.most_reward(0) == pytest.approx((np.exp(reference) * rewards).sum(-1).mean())
