"""Expected reward and KL of policies by enumeration, in float64.

Log-probabilities and rewards of all responses are arrays (prompts, leaves); prompts count equally. docs/frontier.md has
the formulas, and why no policy is above pi*.
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
    """Log-probabilities and true rewards of all responses under the reference.

    (prompts, leaves), on the held-out prompts.
    """

    reference: np.ndarray
    rewards: np.ndarray


def leaf_logps(model: Any, task: Task, prompts: np.ndarray) -> np.ndarray:
    """Log-probability of every response to every prompt, (prompts, leaves).

    The model's vocabulary is the symbols and then EOS. The tree grows by a symbol at a time; keys and
    values are cached. Before `task.shortest` symbols EOS is impossible.
    """
    import torch

    n, rows = task.symbols, torch.from_numpy(prompts)
    cache, before, leaves = None, np.zeros((len(prompts), 1)), []  # `before`: of each text of t symbols
    with torch.no_grad():
        for t in range(task.response_length):
            output = model(rows, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1].double()
            logits[:, n] -= math.inf if t < task.shortest else 0
            step = logits.log_softmax(-1).numpy().reshape(len(prompts), -1, n + 1)
            leaves.append(before + step[..., n])
            before = (before[..., None] + step[..., :n]).reshape(len(prompts), -1)
            cache = output.past_key_values
            cache.batch_repeat_interleave(n)
            rows = torch.arange(n).repeat(len(rows))[:, None]
    return np.concatenate([*leaves[task.shortest :], before], axis=1)


def draw(model: Any, task: Task, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a response to each prompt, (prompts, response_length)."""
    import torch

    rows, goes_on = prompts, np.full(len(prompts), True)
    with torch.no_grad():
        for t in range(task.response_length):
            logits = model(torch.from_numpy(np.where(rows == NONE, 0, rows))).logits[:, -1].double().numpy()
            logits[:, task.symbols] -= np.inf if t < task.shortest else 0
            tokens = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from their softmax
            goes_on &= tokens != task.symbols
            rows = np.concatenate([rows, np.where(goes_on, tokens, NONE)[:, None]], axis=1)
    return rows[:, task.prompt_length :]


def make_point(logps: np.ndarray, reference: np.ndarray, rewards: np.ndarray) -> Point:
    """Compute E[r] and KL(policy || reference) of a policy."""
    share = np.exp(logps)
    log_ratio = np.where(share > 0, logps - reference, 0)
    return Point(float((share * rewards).sum(-1).mean()), float((share * log_ratio).sum(-1).mean()))


def measure(logps: np.ndarray, task: Task, limit: Limit, *, optimal: bool = False) -> dict[str, float]:
    """Measure a policy: the values of its row."""
    point = make_point(logps, *limit)
    share, lengths = np.exp(logps), (task.leaves >= 0).sum(-1)
    return {
        **point._asdict(),
        "most_reward": point.reward if optimal else most_reward(point.kl, *limit),
        "length": float((share * lengths).sum(-1).mean()),
        "empty": float(share[:, lengths == 0].sum(-1).mean()),
    }


def optimum(beta: float, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of pi*, eq. 4 of arXiv 2305.18290.

    pi*(y | x) = reference(y | x) exp(r(x, y) / beta) / Z(x).
    """
    logits = reference + rewards / beta
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def most_reward(kl: float, reference: np.ndarray, rewards: np.ndarray) -> float:
    """Highest expected reward of any policy with this mean KL.

    pi* with a common beta maximizes E[r] - beta KL over all policies, so none has more reward at its KL. Its KL falls
    as beta grows, and is found by bisection. KL beyond that of the best responses alone adds no reward.
    """

    def at(log_beta: float) -> Point:
        return make_point(optimum(np.exp(log_beta), reference, rewards), reference, rewards)

    low, high = np.log(1e-3), np.log(1e6)
    if kl >= at(low).kl:
        return float(rewards.max(-1).mean())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).kl > kl else (low, middle)
    return at(low).reward


def chosen(reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of a pair's chosen response.

    SFT on chosen responses learns them from unlimited pairs.

    The pair is two draws from the reference, the second repeated until it differs, labelled by Bradley and Terry's
    model.
    """
    found = np.empty_like(reference)
    for row, (logps, of_prompt) in enumerate(zip(reference, rewards, strict=True)):
        p = np.exp(logps)
        first = p / (1 - p)  # y and then z is drawn with probability p(y) p(z) / (1 - p(y))
        levels, level = np.unique(of_prompt, return_inverse=True)
        wins = 1 / (1 + np.exp(levels[None] - levels[:, None]))
        over_second, over_first = (
            (wins @ np.bincount(level, share, minlength=len(levels)))[level] - share / 2 for share in (p, first)
        )
        found[row] = np.log(first * over_second + p * over_first)
    return found


def best_of(n: int, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of the best of n draws from the reference.

    -inf for probability 0; ties are drawn by lot.

    Let p(w) be the reference's probability of a reward w, and F(w) that of at most w. The best draw has reward w with
    probability F(w)^n - (F(w) - p(w))^n, which the responses with that reward share as in the reference.
    """
    found = np.empty_like(reference)
    for row, (logps, of_prompt) in enumerate(zip(reference, rewards, strict=True)):
        levels, level = np.unique(of_prompt, return_inverse=True)
        p = np.bincount(level, np.exp(logps), minlength=len(levels))
        up_to = np.minimum(p.cumsum(), 1)
        # 1 - (1 - p / F)^n without cancellation where p is tiny
        with np.errstate(divide="ignore"):
            log_best = n * np.log(up_to) + np.log(-np.expm1(n * np.log1p(-np.minimum(p / up_to, 1))))
        found[row] = logps + (log_best - np.log(p))[level]
    return found
