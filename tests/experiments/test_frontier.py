"""`experiments.frontier`: its task, its estimators, its tables. No policy is above pi*."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.models import plain_logps
from support.runs import ROOT

from dpo.data.examples import encode_examples, list_examples
from dpo.data.table import Prompt
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import load_tokenizer
from dpo.models.pretrained import load_model
from experiments.frontier import __main__ as frontier
from experiments.frontier import exact, plain, runs
from experiments.frontier.picture import draw as draw_picture
from experiments.frontier.reading import (
    at_equal_kl,
    choose_settings,
    collect_curve,
    format_trials,
    mean_and_interval,
    summarize,
    tables,
    within_budget,
)
from experiments.frontier.task import NONE, Pairs, Task, draw_pairs, noisy_scorer

TASK = Task(symbols=3, prompt_length=4, response_length=3, held_out=17, for_tuning=9, fixed_length=False)
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("frontier") / "model"
    runs.write_model(directory, TASK)
    return directory


def load_random(model_dir):
    """Random weights, larger than usual, so that responses differ in probability."""
    found = load_model(str(model_dir), dtype=torch.float32, random_init=True).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(3)
    return found


@pytest.fixture(scope="module")
def model(model_dir):
    return load_random(model_dir)


@pytest.fixture(scope="module", params=[True, False], ids=["fixed", "free"])
def world(request, model, tmp_path_factory):
    """A task where all responses have the same length, or not, and a model for it."""
    if not request.param:
        return TASK, model
    task = dataclasses.replace(TASK, fixed_length=True)
    directory = tmp_path_factory.mktemp("frontier") / "model"
    runs.write_model(directory, task)
    return task, load_random(directory)


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
    parts = [
        {tuple(prompt) for prompt in part} for part in (TASK.train_prompts, TASK.tuning_prompts, TASK.test_prompts)
    ]
    assert [len(part) for part in parts] == [81 - 17 - 9, 9, 17]
    assert len(set.union(*parts)) == 81
    fixed = dataclasses.replace(TASK, fixed_length=True)
    assert [fixed.text(leaf) for leaf in fixed.leaves] == texts[-27:]
    assert (fixed.demonstrate(fixed.test_prompts, np.random.default_rng(0)) != NONE).all()


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


def test_the_two_responses_of_a_pair_differ_and_none_is_empty(model):
    rng = np.random.default_rng(0)
    pairs = draw_pairs(TASK, TASK.train_prompts, lambda asked: exact.draw(model, TASK, asked, rng), rng)
    assert (pairs.chosen != pairs.rejected).any(-1).all()
    assert (np.stack((pairs.chosen, pairs.rejected)) != NONE).any(-1).all()


# --- what a model makes of it -----------------------------------------------------------------------------------------


def test_the_leaves_are_what_the_trainer_scores(model, model_dir, logps):
    """Tokenized and cut by the trainer's rule, scored by its plain path."""
    encode = TextEncoder(load_tokenizer(str(model_dir)))
    texts, examples = [TASK.text(leaf) for leaf in TASK.leaves], []
    for text in texts:
        prompt = Prompt(TASK.text(TASK.test_prompts[3]), [text], [{"chosen": 0}], "keep_start", rendered=False)
        lengths = {"max_length": TASK.prompt_length + TASK.response_length, "max_prompt_length": TASK.prompt_length}
        examples += encode_examples(list_examples(prompt), encode, **lengths)
    assert [len(example.responses[0]) for example in examples] == [min(len(text) + 1, 3) for text in texts]
    with torch.no_grad():
        (scored,) = plain_logps(model, examples)
    assert scored.tolist() == pytest.approx(logps[3].tolist(), abs=2e-5)
    assert np.exp(logps).sum(-1) == pytest.approx(np.ones(17))


def plain_leaves(score, task, prompts):
    """Values of all leaves by `score`, which gets all responses to a prompt as rows."""
    rows = [plain.encode(task, np.repeat(prompt[None], len(task.leaves), 0), task.leaves) for prompt in prompts]
    with torch.no_grad():
        return torch.stack([score(*row) for row in rows]).double().numpy()


def test_a_tree_has_the_log_probabilities_of_its_texts(world):
    task, own_model = world
    found = exact.leaf_logps(own_model, task, task.test_prompts[:12])  # more than are computed at once
    expected = plain_leaves(lambda *row: plain.token_logps(own_model, *row).sum(-1), task, task.test_prompts[:12])
    assert found == pytest.approx(expected, abs=2e-5)
    assert np.exp(found).sum(-1) == pytest.approx(np.ones(12))


@pytest.mark.parametrize("per_token", [False, True])
def test_a_tree_has_the_scores_of_a_reward_model(per_token, world):
    task, own_model = world
    reward_model = plain.RewardModel(own_model, per_token=per_token)
    torch.nn.init.normal_(reward_model.head.weight)
    found = reward_model.leaf_scores(task, task.test_prompts[:2])
    assert found == pytest.approx(plain_leaves(reward_model, task, task.test_prompts[:2]), abs=1e-3)
    assert found.std() > 0.1


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
    rng, limit = np.random.default_rng(1), exact.Limit(*small)
    for beta in (5, 1, 0.3, 0.1):
        best = exact.optimum(beta, *small)
        point = exact.make_point(best, *small)
        assert limit.most_reward(point.kl) == pytest.approx(point.reward, abs=1e-4)
        for scale in (0.01, 0.1, 1, 3):
            for _ in range(20):
                logits = best + scale * rng.normal(size=best.shape)
                other = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                reward, kl = exact.make_point(other, *small)
                assert reward <= limit.most_reward(kl) + 1e-9
    assert limit.most_reward(1e3) == pytest.approx(small[1].max(-1).mean())  # more KL buys nothing
    assert limit.most_reward(0) == pytest.approx((np.exp(small[0]) * small[1]).sum(-1).mean())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_best_of_n_is_what_all_draws_of_n_come_to(small, n):
    """Chosen by the reward, or by a reward model's scores."""
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


def test_a_reweighted_policy_is_the_reference_times_a_power_of_its_ratio(small):
    reference, others = np.exp(small[0]), np.exp(small[0])[:, ::-1]
    for scale in (1.0, 2.5):
        share = reference * (others / reference) ** scale
        found = np.exp(exact.reweight(scale, np.log(others), np.log(reference)))
        assert found == pytest.approx(share / share.sum(-1, keepdims=True))


# --- methods in plain torch -------------------------------------------------------------------------------------------


def test_exact_rl_ascends_reward_less_beta_kl(world):
    """The objective is that of the points; its gradient is its slope along a direction."""
    task, own_model = world
    prompts, policy = task.train_prompts[:2], copy.deepcopy(own_model).double()
    reference, rewards = exact.leaf_logps(own_model, task, prompts), task.reward(prompts[:, None], task.leaves[None])
    weight, step = policy.model.layers[0].mlp.up_proj.weight, 1e-4

    def objective():
        return exact.expected_objective(policy, reference, rewards, 0.3, task, prompts)

    with torch.no_grad():
        weight.mul_(0.5)  # no longer the reference
    objective().backward()
    logps = exact.leaf_logps(policy, task, prompts)
    point = exact.make_point(logps, reference, rewards)
    assert objective().item() == pytest.approx(point.reward - 0.3 * point.kl, abs=1e-6)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step)
            values.append(objective().item())
            weight.sub_(sign * step)
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(weight.grad.sum().item(), rel=5e-3)


def test_reinforce_has_the_gradient_of_exact_rl_on_average(world):
    task, own_model = world
    prompts = np.repeat(task.train_prompts[:1], 1000, axis=0)
    reference = copy.deepcopy(own_model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.7)
    policy, compute_loss = plain.make_reinforce(
        reference, task, Pairs(prompts, prompts, prompts), plain.Setting("reinforce", 0.3, 0, 1e-3, 1, 1)
    )
    policy.load_state_dict(own_model.state_dict())
    compute_loss(np.arange(len(prompts))).backward()
    found, policy.lm_head.weight.grad = policy.lm_head.weight.grad.clone(), None
    (-exact.expected_objective(
        policy, exact.leaf_logps(reference, task, prompts[:1]), task.reward(prompts[:1], task.leaves)[None],
        0.3, task, prompts[:1],
    )).backward()  # fmt: skip
    expected = policy.lm_head.weight.grad
    assert (found - expected).norm() < 0.35 * expected.norm()  # 2,000 samples


def test_unlikelihood_is_the_sum_of_its_two_terms(world):
    task, own_model = world
    prompts, responses = task.train_prompts[:3], task.leaves[[5, 9, 20]]
    pairs = Pairs(prompts, responses, task.leaves[[7, 2, 11]])
    policy, compute_loss = plain.make_unlikelihood(
        own_model, task, pairs, plain.Setting("unlikelihood", 0.3, 0, 1e-3, 1, 1)
    )
    expected = []
    with torch.no_grad():
        for i in range(3):
            chosen, rejected = (
                plain.token_logps(policy, *encoded)[encoded[1]]
                for encoded in (plain.encode(task, prompts[i : i + 1], part[i : i + 1]) for part in pairs[1:])
            )
            expected.append(-chosen.sum() - 0.3 * (1 - rejected.exp()).log().sum())
        assert compute_loss(np.arange(3)).item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_reward_model_learns_which_responses_are_chosen(world):
    task, own_model = world
    chosen, rejected = (np.repeat(task.leaves[[i]], 55, 0) for i in (-1, 0))
    pairs = Pairs(task.train_prompts, chosen, rejected)
    for method in ("rm_last", "rm_tokens"):
        setting, updates = plain.Setting(method, None, 0, 3e-3, 15, 16), []
        reward_model = plain.train(own_model, task, pairs, setting, lambda update, _, seen=updates: seen.append(update))
        scores = reward_model.leaf_scores(task, task.test_prompts[:3])
        assert (scores[:, -1] > scores[:, 0]).all()
        assert updates == [*range(1, 16)]


# --- what the rows say ------------------------------------------------------------------------------------------------


def made_row(method, beta, seed, reward, kl, **more):
    row = {"task": 0, "fixed_length": True, "method": method, "beta": beta, "seed": seed, "reward": reward, "kl": kl}
    return {**row, "most_reward": 2.0, "label_noise": 0.0, "lr": 1e-3, "passes": 4, **more}


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


def test_with_several_tasks_an_interval_is_over_their_means():
    units = [(task, seed) for task in range(3) for seed in range(4)]
    values = np.array([task + 10 * (seed - 1.5) for task, seed in units])
    assert summarize(values, units) == mean_and_interval(np.array([0.0, 1.0, 2.0]))
    assert summarize(values[:4], units[:4]) == mean_and_interval(values[:4])
    missing = np.append(values, np.nan)
    assert summarize(missing, [*units, (2, 4)]) == f"{mean_and_interval(np.array([0.0, 1.0, 2.0]))} (12 of 13)"
    assert summarize(np.array([1.0, np.nan]), units[:2]) == "-"


def test_the_tables_and_the_picture_of_rows(made_rows):
    planned, peaks, equal = tables(made_rows)
    assert len(planned.splitlines()) == 3  # there is but one method, so only its betas are compared
    assert "| dpo | 0.1 | 2.00 | 1.10 [-0.17, 2.37] | 0.90 [-0.37, 2.17] | 4.00 | 0.60 [0.60, 0.60] | -0.50" in peaks
    assert "| dpo | - | 0.00 [0.00, 0.00] | 0.77" in equal
    lower = [{**row, "method": "ipo", "reward": row["reward"] - 0.1} for row in made_rows if row["method"] == "dpo"]
    planned = tables(made_rows + lower)[0]
    assert "| ipo - dpo | fixed | **-0.10 [-0.10, -0.10]** | **-0.10 [-0.10, -0.10]** | **-0.10" in planned
    assert "| dpo: beta 0.01 - beta 0.1 | fixed |  |  |  | -0.50" in planned
    free = [{**row, "fixed_length": False, "reward": row["reward"] - 0.1} for row in made_rows]
    along = [{**row, "share": 0.5} for row in made_rows if row["method"] == "dpo"]
    assert tables(made_rows + along) == tables(made_rows)
    assert len(tables(made_rows + free)) == 5
    pictures = [draw_picture(rows, dark=dark) for rows in (made_rows, made_rows + along) for dark in (False, True)]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert len(set(pictures)) == 4


def test_settings_are_those_of_the_highest_score(made_rows):
    worse = [
        {**row, "lr": 2e-3, "passes": 2, "reward": row["reward"] - 0.3} for row in made_rows if row["method"] == "dpo"
    ]
    assert choose_settings(worse + made_rows) == {"dpo": {"lr": 1e-3, "passes": 4}}
    assert "| method | 0.002, 2 | 0.001, 4 |" in format_trials(worse + made_rows)
    sft = [{**row, "method": "preferred_sft", "beta": 16, "passes": 32} for row in made_rows if row["beta"] == 0.1]
    assert choose_settings(sft + made_rows)["preferred_sft"] == {"lr": 1e-3, "passes": 2}


def test_the_tables_of_the_document_are_those_of_its_rows():
    first_task, more_tasks = (ROOT / "docs" / name for name in ("frontier.json", "frontier-tasks.json"))
    tables = frontier.read_tables([first_task]).split("\n\n")
    planned, *_ = frontier.read_tables([first_task, more_tasks]).split("\n\n")
    text = (ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8")
    assert [table for table in (*tables, planned) if table not in text] == []
