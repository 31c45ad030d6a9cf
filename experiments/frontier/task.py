"""Short strings, a known true reward, and labelled pairs.

A prompt is a string of a few symbols, a response one of `response_length` symbols. Both are arrays of symbols' indices.
So a prompt has finitely many responses, the leaves of a tree, on which `exact.py` evaluates models. The demonstrator is
a Markov chain that writes the responses for SFT. docs/frontier.md has the formulas. Imports no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SYMBOLS = "abcdefgh"
SYMBOL_REWARD = 0.5  # for each symbol of a response, in the true reward
REPETITION_COST = 0.6  # for each pair of equal symbols
LOGIT_SCALE = 0.7  # scales the demonstrator's logits: the smaller, the more random are its responses


class Pairs(NamedTuple):
    """Labelled pairs: prompts (N, prompt_length), chosen and rejected (N, response_length)."""

    prompts: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True)
class Task:
    """Prompts, responses and the true reward, given by these numbers."""

    symbols: int = 5  # number of different symbols
    prompt_length: int = 5
    response_length: int = 5
    held_out: int = 500  # number of prompts on which policies are measured
    for_tuning: int = 129  # number of prompts on which settings were chosen; training uses the remaining prompts
    seed: int = 0

    @functools.cached_property
    def _prompts(self) -> np.ndarray:
        """All prompts in random order, (prompts, prompt_length)."""
        prompts = self._list_strings(self.prompt_length)
        rng = np.random.default_rng([self.seed, 1])
        return rng.permutation(prompts)

    def _list_strings(self, length: int) -> np.ndarray:
        """List all strings of this length, (strings, length)."""
        strings = itertools.product(range(self.symbols), repeat=length)
        return np.array(list(strings))

    @property
    def test_prompts(self) -> np.ndarray:
        """Held-out prompts, (held_out, prompt_length)."""
        return self._prompts[: self.held_out]

    @property
    def train_prompts(self) -> np.ndarray:
        """Prompts that are neither held out nor for tuning."""
        return self._prompts[self.held_out + self.for_tuning :]

    @functools.cached_property
    def leaves(self) -> np.ndarray:
        """All responses, (leaves, response_length)."""
        return self._list_strings(self.response_length)

    # --- the true reward ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _reward_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three tables of random rewards of a response's symbol.

        The last index is the symbol itself. The other indices are, in the first table, the prompt's first symbol; in
        the second, the symbol before; in the third, the two symbols before.
        """
        n = self.symbols
        rng = np.random.default_rng([self.seed, 2])
        by_prompt = rng.normal(size=(n, n))
        by_one_before = rng.normal(size=(n, n))
        by_two_before = rng.normal(size=(n, n, n))
        return by_prompt, by_one_before, by_two_before

    def _raw_reward(self, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
        """Compute the reward before it is normalized, with shapes as in `reward`."""
        by_prompt, by_one_before, by_two_before = self._reward_tables
        shape = np.broadcast_shapes(prompts.shape[:-1], responses.shape[:-1])
        x = np.broadcast_to(prompts, (*shape, self.prompt_length))
        y = np.broadcast_to(responses, (*shape, self.response_length))
        # The first symbol of a response comes after the prompt's middle and last symbols.
        middle = x[..., self.prompt_length // 2, None]
        last = x[..., -1:]
        one_before = np.concatenate((last, y[..., :-1]), axis=-1)
        two_before = np.concatenate((middle, one_before[..., :-1]), axis=-1)
        from_prompt = by_prompt[x[..., :1], y]  # (..., response_length)
        from_one_before = by_one_before[one_before, y]
        from_two_before = by_two_before[two_before, one_before, y] / 2
        symbol_rewards = SYMBOL_REWARD + (from_prompt + from_one_before + from_two_before)
        is_symbol = y[..., None] == np.arange(self.symbols)
        n_occurrences = is_symbol.sum(-2)  # by symbol of the response
        n_pairs = n_occurrences * (n_occurrences - 1) / 2  # of equal symbols
        return symbol_rewards.sum(-1) - REPETITION_COST * n_pairs.sum(-1)

    @functools.cached_property
    def _mean_and_spread(self) -> tuple[float, float]:
        """Mean of the raw rewards of the demonstrator's responses, and their standard deviation within a prompt."""
        rng = np.random.default_rng([self.seed, 3])
        drawn = rng.integers(len(self.train_prompts), size=20_000)
        prompts = self.train_prompts[drawn]
        first = self._raw_reward(prompts, self.demonstrate(prompts, rng))
        second = self._raw_reward(prompts, self.demonstrate(prompts, rng))
        mean = (first + second).mean() / 2
        variance = ((first - second) ** 2).mean() / 2  # half that of the difference of two responses to a prompt
        return float(mean), float(np.sqrt(variance))

    def reward(self, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
        """Compute the true rewards of responses to prompts, (...).

        `prompts` (..., prompt_length) and `responses` (..., response_length) broadcast. The rewards of the
        demonstrator's responses have mean 0 and, within a prompt, standard deviation 1.
        """
        mean, spread = self._mean_and_spread
        return (self._raw_reward(prompts, responses) - mean) / spread

    def reward_leaves(self, prompts: np.ndarray) -> np.ndarray:
        """Compute the true reward of every response to every prompt, (prompts, leaves)."""
        return self.reward(prompts[:, None], self.leaves[None])

    # --- texts --------------------------------------------------------------------------------------------------------

    def demonstrate(self, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a response of the demonstrator to each prompt, (prompts, response_length).

        The demonstrator is a Markov chain: the next symbol depends on the symbol before and on the prompt's first
        symbol, not on the reward.
        """
        n = self.symbols
        table_rng = np.random.default_rng([self.seed, 4])
        by_one_before = table_rng.normal(size=(n, n))
        by_prompt = table_rng.normal(size=(n, n))
        responses = np.empty((len(prompts), self.response_length), dtype=int)
        symbols = prompts[:, -1]  # the last symbol of each prompt, then of each response so far
        for t in range(self.response_length):
            logits = by_one_before[symbols] + by_prompt[prompts[:, 0]]
            logits = LOGIT_SCALE * logits
            noise = rng.gumbel(size=logits.shape)
            symbols = (logits + noise).argmax(-1)  # drawn from the softmax of the logits
            responses[:, t] = symbols
        return responses

    def text(self, symbols: Sequence[int]) -> str:
        """Write symbols as letters, which `read` reads."""
        return "".join(SYMBOLS[symbol] for symbol in symbols)

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """Read the symbols of texts of one length, (texts, length)."""
        symbols = [[SYMBOLS.index(letter) for letter in text] for text in texts]
        return np.array(symbols)


def draw_pairs(
    task: Task,
    prompts: np.ndarray,
    write: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
) -> Pairs:
    """Draw two different responses to each prompt, and label them.

    `write(prompts)` draws one response to each of some prompts. By Bradley and Terry's model y is chosen over z with
    probability sigmoid(r(y) - r(z)).
    """
    y = write(prompts)
    z = write(prompts)
    is_same = (y == z).all(-1)
    while is_same.any():
        z[is_same] = write(prompts[is_same])
        is_same = (y == z).all(-1)
    margins = task.reward(prompts, y) - task.reward(prompts, z)
    chances = 1 / (1 + np.exp(-margins))
    draws = rng.random(len(prompts))
    chooses_y = (draws < chances)[:, None]
    return Pairs(
        prompts,
        chosen=np.where(chooses_y, y, z),
        rejected=np.where(chooses_y, z, y),
    )


def noisy_scorer(task: Task, seed: int) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """Make a scorer for online DPO: true rewards with Gumbel noise.

    The difference of two such noises is logistic, so y scores above z with probability sigmoid(r(y) - r(z)): online
    pairs are labelled like the pairs of `draw_pairs`.
    """
    rng = np.random.default_rng([task.seed, 7, seed])

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        rewards = task.reward(task.read(prompts), task.read(responses))
        noise = rng.gumbel(size=len(prompts))
        return (rewards + noise).tolist()

    return score
