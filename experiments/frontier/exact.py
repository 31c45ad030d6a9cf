"""Expected reward and KL of policies by enumeration, in float64.

Log-probabilities and rewards of all responses to all prompts are arrays (prompts, leaves). Means weigh prompts equally.
docs/frontier.md has the formulas, and the reason why no policy is above pi*.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier.task import NONE, Task


class Point(NamedTuple):
    """Means over prompts of E[r] and of KL(policy || reference), in nats."""

    reward: float
    kl: float


class Limit(NamedTuple):
    """The reference and the true reward, which determine pi*.

    Both are for all responses to the held-out prompts, (prompts, leaves).
    """

    reference: np.ndarray  # log-probabilities
    rewards: np.ndarray


def leaf_logps(model: Any, task: Task, prompts: np.ndarray) -> np.ndarray:
    """Log-probability of every response to every prompt, (prompts, leaves).

    The model's vocabulary is the symbols and then EOS. The tree of responses grows by a symbol at a time, with cached
    keys and values. EOS is impossible before `task.shortest` symbols.
    """
    import torch

    n, eos = task.symbols, task.symbols
    input_ids, cache = torch.from_numpy(prompts), None
    prefix_logps = np.zeros((len(prompts), 1))  # of all texts of t symbols, (prompts, n**t)
    ended_logps = []  # of all texts of t symbols and EOS, for each t
    with torch.no_grad():
        for t in range(task.response_length):
            output = model(input_ids, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1].double()
            if t < task.shortest:
                logits[:, eos] = -math.inf
            token_logps = logits.log_softmax(-1).numpy().reshape(len(prompts), -1, n + 1)  # (prompts, n**t, n + 1)
            ended_logps.append(prefix_logps + token_logps[..., eos])
            prefix_logps = (prefix_logps[..., None] + token_logps[..., :n]).reshape(len(prompts), -1)
            # each text is continued by each symbol
            cache = output.past_key_values
            cache.batch_repeat_interleave(n)
            input_ids = torch.arange(n).repeat(len(input_ids))[:, None]
    return np.concatenate([*ended_logps[task.shortest :], prefix_logps], axis=1)  # the order of `task.leaves`


def draw(model: Any, task: Task, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a response to each prompt, (prompts, response_length)."""
    import torch

    eos = task.symbols
    texts, goes_on = prompts, np.full(len(prompts), True)
    with torch.no_grad():
        for t in range(task.response_length):
            input_ids = torch.from_numpy(np.where(texts == NONE, 0, texts))  # after EOS any token will do
            logits = model(input_ids).logits[:, -1].double().numpy()
            if t < task.shortest:
                logits[:, eos] = -np.inf
            tokens = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from the softmax of the logits
            goes_on &= tokens != eos
            texts = np.concatenate([texts, np.where(goes_on, tokens, NONE)[:, None]], axis=1)
    return texts[:, task.prompt_length :]


def make_point(logps: np.ndarray, reference: np.ndarray, rewards: np.ndarray) -> Point:
    """Compute E[r] and KL(policy || reference) of a policy."""
    probabilities = np.exp(logps)
    log_ratios = np.where(probabilities > 0, logps - reference, 0)
    reward, kl = ((probabilities * values).sum(-1).mean() for values in (rewards, log_ratios))
    return Point(float(reward), float(kl))


def measure(logps: np.ndarray, task: Task, limit: Limit, *, optimal: bool = False) -> dict[str, float]:
    """Measure a policy, for its row in the tables.

    `optimal`: the policy is pi*.
    """
    point = make_point(logps, *limit)
    probabilities, lengths = np.exp(logps), (task.leaves != NONE).sum(-1)
    return {
        **point._asdict(),
        "most_reward": point.reward if optimal else most_reward(point.kl, *limit),  # of any policy with this KL
        "length": float((probabilities * lengths).sum(-1).mean()),
        "empty": float(probabilities[:, lengths == 0].sum(-1).mean()),
    }


def optimum(beta: float, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of pi*, eq. 4 of arXiv 2305.18290.

    pi*(y | x) = reference(y | x) exp(r(x, y) / beta) / Z(x).
    """
    logits = reference + rewards / beta
    logits = logits - logits.max(-1, keepdims=True)  # so that exp does not overflow
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def most_reward(kl: float, reference: np.ndarray, rewards: np.ndarray) -> float:
    """Highest expected reward of any policy with this mean KL.

    pi* maximizes E[r] - beta KL over all policies, so no policy has more reward at the KL of pi*. That KL falls as beta
    grows, so bisection finds the beta with the given KL. KL beyond that of the best responses alone adds no reward.
    """

    def find_point(log_beta: float) -> Point:
        return make_point(optimum(np.exp(log_beta), reference, rewards), reference, rewards)

    low, high = np.log(1e-3), np.log(1e6)  # logarithms of beta
    if kl >= find_point(low).kl:
        return float(rewards.max(-1).mean())
    for _ in range(40):
        middle = (low + high) / 2
        if find_point(middle).kl > kl:
            low = middle
        else:
            high = middle
    return find_point(low).reward


def chosen(reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probability of each response to be the chosen one of a pair.

    This is the policy that SFT on chosen responses learns from unlimited pairs.

    A pair is two draws from the reference, y and z, where z is drawn again until it differs from y: (y, z) has
    probability p(y) p(z) / (1 - p(y)). It is labelled by Bradley and Terry's model.
    """
    chosen_logps = np.empty_like(reference)
    for i, (logps, prompt_rewards) in enumerate(zip(reference, rewards, strict=True)):
        p = np.exp(logps)
        weight_as_first = p / (1 - p)
        # responses of equal reward win alike, so sums over opponents are sums over the levels of reward
        levels, level_of_response = np.unique(prompt_rewards, return_inverse=True)
        win_probability = 1 / (1 + np.exp(levels[None] - levels[:, None]))  # of the row's level over the column's
        wins_as_first, wins_as_second = (
            # over all opponents but the response itself, against which it would win half of the time
            (win_probability @ np.bincount(level_of_response, weights, minlength=len(levels)))[level_of_response]
            - weights / 2
            for weights in (p, weight_as_first)  # of the opponents
        )
        chosen_logps[i] = np.log(weight_as_first * wins_as_first + p * wins_as_second)
    return chosen_logps


def best_of_n(n: int, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of the best of n draws from the reference.

    They are -inf for probability 0. Ties are decided at random.

    Let p(w) be the reference's probability of a reward w, and F(w) that of at most w. The best draw has reward w with
    probability F(w)^n - (F(w) - p(w))^n. The responses with that reward share it in proportion to the reference.
    """
    best_logps = np.empty_like(reference)
    for i, (logps, prompt_rewards) in enumerate(zip(reference, rewards, strict=True)):
        levels, level_of_response = np.unique(prompt_rewards, return_inverse=True)
        p = np.bincount(level_of_response, np.exp(logps), minlength=len(levels))
        cumulative = np.minimum(p.cumsum(), 1)  # F
        with np.errstate(divide="ignore"):
            # F^n (1 - (1 - p / F)^n), which does not cancel where p is tiny
            log_of_bracket = np.log(-np.expm1(n * np.log1p(-np.minimum(p / cumulative, 1))))
            log_best = n * np.log(cumulative) + log_of_bracket
        best_logps[i] = logps + (log_best - np.log(p))[level_of_response]
    return best_logps
