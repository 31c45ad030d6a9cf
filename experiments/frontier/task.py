"""Short strings, a known true reward, and labelled pairs.

A prompt is a string of a few symbols. A response is a string of at most `response_length` symbols, ended by EOS, or cut
after the last symbol that fits: a prompt has finitely many responses, the leaves of a tree. numpy alone; `exact.py`
evaluates models on the tree, and docs/frontier.md has the formulas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SYMBOLS = "abcdefgh"
NONE = -1  # in place of a symbol, after the end of a response

EACH, REPEAT = 0.5, 0.6  # in the true reward: worth of each symbol, cost of repeating one
SHARPNESS, STOPS = 0.7, 0.2  # of the demonstrator: scale of its logits, probability to end after each symbol


class Pairs(NamedTuple):
    """Labelled pairs: prompts (N, prompt_length), chosen and rejected (N, response_length)."""

    prompts: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True)
class Task:
    """Prompts, responses and the true reward, given by these numbers."""

    symbols: int = 5
    prompt_length: int = 5
    response_length: int = 5
    held_out: int = 53  # prompts on which policies are judged; the others are trained on
    shortest: int = 0  # least symbols of a response, before which EOS is impossible (in controls.py alone)
    seed: int = 0

    @functools.cached_property
    def _prompts(self) -> np.ndarray:
        found = np.array([*itertools.product(range(self.symbols), repeat=self.prompt_length)])
        return np.random.default_rng([self.seed, 1]).permutation(found)

    @property
    def test_prompts(self) -> np.ndarray:
        """Held-out prompts, (held_out, prompt_length)."""
        return self._prompts[: self.held_out]

    @property
    def train_prompts(self) -> np.ndarray:
        return self._prompts[self.held_out :]

    @functools.cached_property
    def leaves(self) -> np.ndarray:
        """All responses, shorter ones first, (leaves, response_length)."""
        rows = []
        for length in range(self.shortest, self.response_length + 1):
            shape = self.symbols**length, length
            texts = np.array([*itertools.product(range(self.symbols), repeat=length)], dtype=int).reshape(shape)
            rows.append(np.pad(texts, ((0, 0), (0, self.response_length - length)), constant_values=NONE))
        return np.concatenate(rows)

    # --- the true reward ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng, n = np.random.default_rng([self.seed, 2]), self.symbols
        return rng.normal(size=(n, n)), rng.normal(size=(n, n)), rng.normal(size=(n, n, n))

    def _raw_reward(self, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
        suits, follows, completes = self._tables
        shape = np.broadcast_shapes(prompts.shape[:-1], responses.shape[:-1])
        prompts = np.broadcast_to(prompts, (*shape, self.prompt_length))
        y = np.broadcast_to(responses, (*shape, self.response_length))
        middle, last = prompts[..., self.prompt_length // 2, None], prompts[..., -1:]
        one_before = np.concatenate((last, y[..., :-1]), axis=-1)
        two_before = np.concatenate((middle, one_before[..., :-1]), axis=-1)
        of_symbol = suits[prompts[..., :1], y] + follows[one_before, y] + completes[two_before, one_before, y] / 2
        times = (y[..., None] == np.arange(self.symbols)).sum(-2)  # of each symbol in the response
        return ((EACH + of_symbol) * (y != NONE)).sum(-1) - REPEAT * (times * (times - 1) / 2).sum(-1)

    @functools.cached_property
    def _mean_and_spread(self) -> tuple[float, float]:
        """Mean of the demonstrator's raw rewards, and spread within a prompt."""
        rng = np.random.default_rng([self.seed, 3])
        prompts = self.train_prompts[rng.integers(len(self.train_prompts), size=20_000)]
        first, second = (self._raw_reward(prompts, self.demonstrate(prompts, rng)) for _ in range(2))
        return float((first + second).mean() / 2), float(np.sqrt(((first - second) ** 2).mean() / 2))

    def reward(self, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
        """True reward of responses (..., response_length) to prompts (..., prompt_length), which broadcast.

        The demonstrator's responses have mean 0 and, for the same prompt, standard deviation 1.
        """
        mean, spread = self._mean_and_spread
        return (self._raw_reward(prompts, responses) - mean) / spread

    # --- texts --------------------------------------------------------------------------------------------------------

    def demonstrate(self, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a response to each prompt, (prompts, response_length).

        A Markov chain: its next symbol depends on the one before and on the prompt's first, and not on the reward.
        """
        tables, n = np.random.default_rng([self.seed, 4]), self.symbols
        after, of_prompt = tables.normal(size=(n, n)), tables.normal(size=(n, n))
        rows = np.full((len(prompts), self.response_length), NONE)
        before, goes_on = prompts[:, -1], np.full(len(prompts), True)
        for t in range(self.response_length):
            if t > 0:  # no response is empty
                goes_on &= rng.random(len(prompts)) >= STOPS
            logits = SHARPNESS * (after[before] + of_prompt[prompts[:, 0]])
            before = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
            rows[:, t] = np.where(goes_on, before, NONE)
        return rows

    def text(self, symbols: Sequence[int]) -> str:
        return "".join(SYMBOLS[symbol] for symbol in symbols if symbol != NONE)

    def read(self, text: str, length: int) -> np.ndarray:
        """Symbols of a text, (length,), NONE after its end."""
        found = [SYMBOLS.index(letter) for letter in text]
        return np.array([*found, *[NONE] * (length - len(found))])


def draw_pairs(
    task: Task,
    prompts: np.ndarray,
    write: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
    *,
    noise: float = 0.0,
) -> Pairs:
    """Draw two different responses to each prompt with `write`, and label them.

    Bradley and Terry: y is chosen over z with probability sigmoid(r(y) - r(z)); afterwards each label is flipped with
    probability `noise`, which changes neither the responses nor the other labels.
    """
    y, z = write(prompts), write(prompts)
    while (same := (y == z).all(-1)).any():
        z[same] = write(prompts[same])
    margin = task.reward(prompts, y) - task.reward(prompts, z)
    chooses_y = rng.random(len(prompts)) < 1 / (1 + np.exp(-margin))
    chooses_y ^= rng.random(len(prompts)) < noise
    return Pairs(prompts, np.where(chooses_y[:, None], y, z), np.where(chooses_y[:, None], z, y))


def noisy_scorer(task: Task, seed: int) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """A scorer for online DPO: true rewards with Gumbel noise.

    The difference of two such noises is logistic: of two responses y is above z with probability sigmoid(r(y) - r(z)),
    so that online pairs are labelled like those drawn beforehand.
    """
    rng = np.random.default_rng([task.seed, 7, seed])

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        asked = np.stack([task.read(text, task.prompt_length) for text in prompts])
        said = np.stack([task.read(text, task.response_length) for text in responses])
        return (task.reward(asked, said) + rng.gumbel(size=len(asked))).tolist()

    return score
