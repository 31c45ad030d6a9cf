"""Prompts, the true reward, and labelled pairs of `experiments.sentiment`. Imports no torch.

The prompts come from the model itself: it continues the openings below to PROMPT_TOKENS tokens. So the experiment needs
no dataset, and the prompts are texts that the model writes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.errors import InputError

PROMPT_TOKENS, RESPONSE_TOKENS = 14, 24
OPENINGS = (
    "The restaurant on the corner", "The movie we saw last night", "My first day at the new job",
    "The hotel room was", "When I opened the package", "The teacher looked at the class",
    "Our trip to the coast", "The weather this week", "The new phone I bought", "After the meeting, my boss",
    "The book I just finished", "The neighbours next door", "Last summer my family", "The concert yesterday evening",
    "The doctor told me that", "I watched the game and", "The food at the wedding", "My grandmother's house",
    "The city council has decided", "The train was", "She read the letter and", "The dog in the park",
    "When the lights came on", "The customer service of this shop", "The children in the garden",
    "The company announced that", "He walked into the room and", "The first chapter of the story",
    "Everyone at the party", "The old bridge over the river", "The coach said after the match",
    "My roommate and I", "The software update", "The review of the play", "In the end, the jury",
    "The garden behind our house", "The exam this morning", "The singer's second album", "The flight back home",
    "The village at the foot of the mountain", "Her answer to my question", "The car I rented",
    "The museum downtown", "The soup of the day", "My experience with this product", "The news this morning",
    "The winter in this town", "The volunteers at the shelter",
)  # fmt: skip
Reward = Callable[[str], float]


def load_lexicon() -> Reward:
    """Load VADER's sentiment of a text, in [-1, 1].

    Raises InputError if the package is missing.
    """
    try:
        module = importlib.import_module("vaderSentiment.vaderSentiment")
    except ImportError as error:
        raise InputError(f"the true reward is a lexicon's sentiment: pip install vaderSentiment ({error})") from error
    analyzer = module.SentimentIntensityAnalyzer()
    return lambda text: float(analyzer.polarity_scores(text)["compound"])


class Scale(NamedTuple):
    """Mean and standard deviation of the reference's sentiments."""

    mean: float
    spread: float

    def standardize(self, sentiments: Any) -> np.ndarray:
        return (np.asarray(sentiments, float) - self.mean) / self.spread


def make_scorer(scale: Scale) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """Make the true reward as a function for `online.function`."""
    sentiment = load_lexicon()
    return lambda prompts, completions: scale.standardize([sentiment(text) for text in completions]).tolist()


def write_scorer(root: Path, scale: Scale) -> str:
    """Write a scorer's file; return the value of `online.function`."""
    file = root / "scorer.py"
    module = "from experiments.sentiment.data import Scale, make_scorer"
    file.write_text(f"{module}\n\nscore = make_scorer({scale})\n", encoding="utf-8")
    return f"{file}:score"


def keep_prompt(tokens: Sequence[int], encode: Callable[[str], list[int]], decode: Callable[..., str]) -> str | None:
    """Decode a prompt; None if short, or if encoding changes its tokens."""
    if len(tokens) < PROMPT_TOKENS:
        return None
    prompt = [*tokens[:PROMPT_TOKENS]]
    text = decode(prompt)
    return text if encode(text) == prompt else None


def label_pairs(records: Sequence[dict[str, Any]], rewards: np.ndarray, seed: int) -> list[dict[str, str]]:
    """Label two responses to each prompt by the Bradley-Terry model.

    `rewards` are (prompts, 2). The first response is chosen with probability sigmoid(its reward - the other's).
    """
    margins = rewards[:, 0] - rewards[:, 1]
    first_wins = np.random.default_rng(seed).random(len(records)) < 1 / (1 + np.exp(-margins))
    pairs = []
    for record, wins in zip(records, first_wins, strict=True):
        first, second = record["texts"]
        chosen, rejected = (first, second) if wins else (second, first)
        pairs.append({"prompt": record["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def best_of(n: int, rewards: np.ndarray) -> np.ndarray:
    """Estimate the expected best of n of the reference's rewards, (prompts,).

    `rewards` are (prompts, M). The estimate is the mean of the best over all subsets of n of the M samples, so it is
    unbiased: the k-th smallest is the best in comb(k - 1, n - 1) subsets.
    """
    m = rewards.shape[1]
    shares = np.array([comb(k - 1, n - 1) / comb(m, n) for k in range(1, m + 1)])  # (M,)
    return np.sort(rewards, axis=1) @ shares


def bound_best_kl(n: int) -> float:
    """Bound the KL of best-of-n by log n - (n-1)/n."""
    return float(np.log(n) - (n - 1) / n)
