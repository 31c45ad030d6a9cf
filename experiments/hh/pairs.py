"""Pairs of HH, folds by first turn, and predictions by length.

Imports no torch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.errors import InputError
from preference_datasets import extract_anthropic_prompt

RIDGE = 1e-3  # keeps the weights of the regression finite


class Pair(NamedTuple):
    """A pair of dialogues that differ in the last response."""

    prompt: str
    chosen: str
    rejected: str

    @property
    def first_turn(self) -> str:
        return self.prompt.split("\n\nAssistant:")[0].strip().lower()

    @property
    def record(self) -> dict[str, str]:
        """The pair in HH's form."""
        return {"chosen": self.prompt + self.chosen, "rejected": self.prompt + self.rejected}


def read_pairs(files: Sequence[Path]) -> list[Pair]:
    """Read the distinct pairs of files in HH's form.

    A file has JSON lines, and may be gzipped. Rows with equal responses or different prompts are left out. Raises
    InputError for a file or row in another form.
    """
    pairs: dict[Pair, None] = {}
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    chosen, rejected = row["chosen"], row["rejected"]
                    prompt = extract_anthropic_prompt(chosen)
                except (ValueError, KeyError, TypeError, InputError) as error:
                    raise InputError(f"{file}, line {number}: not a pair in the form of hh-rlhf ({error})") from error
                if rejected.startswith(prompt) and chosen != rejected:
                    pairs[Pair(prompt, chosen[len(prompt) :], rejected[len(prompt) :])] = None
    return [*pairs]


def split_folds(first_turns: Sequence[str], n_folds: int) -> np.ndarray:
    """Find the number of each pair's fold, (pairs,).

    Pairs with the same first turn are in one fold. The turns are dealt out in the order of their hashes, each to the
    fold that has the fewest pairs so far. So folds do not depend on the order of the pairs.
    """
    counts: dict[str, int] = {}
    for turn in first_turns:
        counts[turn] = counts.get(turn, 0) + 1
    sizes, fold_of_turn = [0] * n_folds, {}
    for turn in sorted(counts, key=lambda turn: hashlib.sha256(turn.encode()).digest()):
        fold_of_turn[turn] = fold = sizes.index(min(sizes))
        sizes[fold] += counts[turn]
    return np.array([fold_of_turn[turn] for turn in first_turns])


def predict_by_length(tokens: Any, folds: np.ndarray) -> np.ndarray:
    """Margins of chosen over rejected by a regression on length, (pairs,).

    `tokens` are the lengths of chosen and rejected, (pairs, 2). A response's score is a weighted sum of its length, log
    length, and squared log length. A logistic regression on the pairs of the other folds fits the weights. In it, pairs
    whose chosen response is longer count as much as pairs whose chosen response is shorter: otherwise the regression
    prefers the shorter response in almost every pair.
    """
    tokens = np.asarray(tokens, float)
    features = np.stack((tokens, np.log(tokens), np.log(tokens) ** 2), axis=-1)  # (pairs, 2, 3)
    differences = features[:, 0] - features[:, 1]
    differences /= differences.std(0)
    _, kinds = np.unique(np.sign(tokens[:, 0] - tokens[:, 1]), return_inverse=True)  # longer, shorter or equal
    margins = np.zeros(len(tokens))
    for fold in np.unique(folds):
        in_fold, others = folds == fold, folds != fold
        shares = 1 / np.bincount(kinds[others])[kinds[others]]  # the same sum for each kind
        margins[in_fold] = differences[in_fold] @ fit_logistic(differences[others], shares / shares.sum())
    return margins


def fit_logistic(differences: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Fit w to maximize the weighted mean of log sigmoid(w x), (features,)."""
    weights = np.zeros(differences.shape[1])
    for _ in range(50):  # Newton's steps
        p = 1 / (1 + np.exp(-differences @ weights))
        gradient = differences.T @ (shares * (1 - p)) - RIDGE * weights
        curvature = (differences.T * (shares * p * (1 - p))) @ differences + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(curvature, gradient)
    return weights
