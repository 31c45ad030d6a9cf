"""Reward, KL and optima, by enumeration. A leaf is one of the possible responses to a prompt.

Log-probabilities and rewards of all responses to all prompts are arrays (prompts, leaves), in float64. Means
weigh prompts equally. docs/frontier.md has the formulas, and the reason why no policy is above pi*.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.frontier.task import Task

AT_ONCE = 3  # prompts whose responses are computed together, so few that a CPU's cache holds them
OPTIMAL_BETAS = np.geomspace(50, 0.02, 61)  # pi* for these, close together, as the curve is interpolated


class Point(NamedTuple):
    """Means over prompts of E[r] and of KL(policy || reference), in nats."""

    reward: float
    kl: float


# --- a model's values of all responses --------------------------------------------------------------------------------


def iterate_levels(model: Any, task: Task, prompts: Any, *, depth: int) -> Iterator[Any]:
    """Yield a model's outputs after all texts of t symbols, for t = 0 to `depth`.

    A text's tokens before its last are in the cache, which all texts that continue it share. Rows are in the order of
    `task.leaves`: n**t texts of the first prompt, then those of the next.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    symbols = torch.arange(task.symbols)
    tokens = prompts
    for _ in range(depth + 1):
        yield model(tokens, past_key_values=cache, use_cache=True)
        tokens = symbols.repeat(len(tokens))[:, None]
        cache.batch_repeat_interleave(task.symbols)


def compute_logps(model: Any, task: Task, prompts: Any) -> Any:
    """Log-probability of every response to every prompt, a tensor (prompts, leaves)."""
    text_logps: Any = torch.zeros(len(prompts), 1, dtype=torch.float64)  # all texts of t symbols: (prompts, n**t)
    for output in iterate_levels(model, task, prompts, depth=task.response_length - 1):
        logits = output.logits[:, -1].unflatten(0, text_logps.shape)  # (prompts, n**t, symbols)
        token_logps = logits.double().log_softmax(-1)
        text_logps = (text_logps[..., None] + token_logps).flatten(1)
    return text_logps


def leaf_values(compute: Any, prompts: np.ndarray) -> np.ndarray:
    """Compute a value of every response to every prompt, (prompts, leaves), for AT_ONCE prompts at a time.

    `compute` maps a tensor of some prompts to a tensor of their values.
    """
    parts = []
    with torch.no_grad():
        for part in torch.from_numpy(prompts).split(AT_ONCE):
            parts.append(compute(part).double())
    return torch.cat(parts).numpy()


def leaf_logps(model: Any, task: Task, prompts: np.ndarray) -> np.ndarray:
    """`compute_logps` of any number of prompts, an array (prompts, leaves)."""
    return leaf_values(lambda part: compute_logps(model, task, part), prompts)


def draw(model: Any, task: Task, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a response to each prompt, (prompts, response_length)."""
    texts = prompts
    with torch.no_grad():
        for _ in range(task.response_length):
            output = model(torch.from_numpy(texts))
            logits = output.logits[:, -1].double().numpy()
            noise = rng.gumbel(size=logits.shape)
            tokens = (logits + noise).argmax(-1)  # drawn from the softmax of the logits
            texts = np.column_stack([texts, tokens])
    return texts[:, task.prompt_length :]


# --- optima -----------------------------------------------------------------------------------------------------------


def make_point(logps: np.ndarray, reference: np.ndarray, rewards: np.ndarray) -> Point:
    """Compute E[r] and KL(policy || reference) of a policy from the `logps` of all responses."""
    probabilities = np.exp(logps)
    log_ratios = np.where(probabilities > 0, logps - reference, 0)
    reward = (probabilities * rewards).sum(-1).mean()
    kl = (probabilities * log_ratios).sum(-1).mean()
    return Point(float(reward), float(kl))


def optimum(beta: float, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Compute log-probabilities of pi*, eq. 4 of arXiv 2305.18290.

    pi*(y | x) = pi_ref(y | x) exp(r(x, y) / beta) / Z(x), and `reference` is log pi_ref. With a reward model's scores
    for `rewards`, pi* is the best policy that PPO on this reward model could find.
    """
    logits = reference + rewards / beta
    logits = logits - logits.max(-1, keepdims=True)  # so that exp does not overflow
    normalizers = np.exp(logits).sum(-1, keepdims=True)
    return logits - np.log(normalizers)


class Limit:
    """The reward that policies can reach at most, given by pi*, which the reference and the true reward determine.

    Both are for all responses to the prompts on which policies are measured, (prompts, leaves).
    """

    def __init__(self, reference: np.ndarray, rewards: np.ndarray) -> None:
        self.reference = reference  # log-probabilities
        self.rewards = rewards

    @cached_property
    def optima(self) -> list[Point]:
        """The points of pi* at OPTIMAL_BETAS."""
        return [self.find_optimum(beta) for beta in OPTIMAL_BETAS]

    def find_optimum(self, beta: float) -> Point:
        """Return the reward and KL of pi* for this beta."""
        logps = optimum(beta, self.reference, self.rewards)
        return make_point(logps, self.reference, self.rewards)

    def most_reward(self, kl: float) -> float:
        """Return an upper bound of the expected reward of policies with this mean KL, which is nearly tight.

        For any beta, pi* maximizes E[r] - beta KL over all policies, so every policy is on or below the line of slope
        beta through the point of pi*. The beta used is one whose pi* has about this KL, as the line then touches the
        frontier close by.
        """
        if kl <= 0:
            return make_point(self.reference, self.reference, self.rewards).reward
        kls = np.array([point.kl for point in self.optima])  # they rise as beta falls
        if kl < kls[0]:
            beta = OPTIMAL_BETAS[0] * np.sqrt(kls[0] / kl)  # where beta is large, KL is variance / (2 beta^2)
        else:
            log_kls = np.log(kls)
            log_beta = np.interp(np.log(kl), log_kls, np.log(OPTIMAL_BETAS))
            beta = np.exp(log_beta)
        point = self.find_optimum(float(beta))
        bound = point.reward + beta * (kl - point.kl)
        # At a very high KL the mean reward of the best responses is the tighter bound.
        best = float(self.rewards.max(-1).mean())
        return min(bound, best)

    def measure(self, logps: np.ndarray, *, optimal: bool = False) -> dict[str, float]:
        """Return a policy's reward and KL, and the highest reward at this KL, for its row.

        `optimal` says that the policy is pi*, whose own reward is the highest.
        """
        reward, kl = make_point(logps, self.reference, self.rewards)
        most_reward = reward if optimal else self.most_reward(kl)  # of any policy with this KL
        return {
            "reward": reward,
            "kl": kl,
            "most_reward": most_reward,
        }
