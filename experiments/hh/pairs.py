"""Pairs of HH, folds by first turn, and predictions without a model.

Imports no torch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpo.errors import InputError
from preference_datasets import extract_anthropic_prompt

LENGTH_RIDGE = 1e-3  # keeps the weights finite
WORDS_RIDGE = 1e-2  # of features whose mean square is 1 / pairs
N_NEWTON = 10  # steps of a regression
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]")


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


def predict_by_length(differences: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Margins of chosen over rejected by a regression on length, (pairs,).

    `differences` are chosen minus rejected tokens, (pairs,). A logistic regression on the pairs of the other folds fits
    a weighted sum of a difference, its sign, and the logarithm of its size.
    """
    sign = np.sign(differences)
    features = np.stack((sign, differences, sign * np.log1p(np.abs(differences))), axis=-1)
    scales = np.maximum(np.sqrt((features**2).mean(0)), 1e-9)  # 0 if all lengths are equal
    return _cross_fit(features / scales, folds, LENGTH_RIDGE)


def predict_by_words(pairs: Sequence[Pair], folds: np.ndarray) -> np.ndarray:
    """Margins of chosen over rejected by a regression on words, (pairs,).

    A logistic regression on the pairs of the other folds fits a weight for each word and punctuation mark; a response's
    score is the sum of the weights of those it contains.
    """
    words: dict[str, int] = {}  # numbers of the words
    entries = []  # (pair, word, 1 if only chosen has it, -1 if only rejected has it)
    for number, pair in enumerate(pairs):
        chosen, rejected = (set(WORD.findall(text.lower())) for text in (pair.chosen, pair.rejected))
        for word in sorted(chosen ^ rejected):
            entries.append((number, words.setdefault(word, len(words)), 1 if word in chosen else -1))
    rows, columns, values = np.array(entries).T
    differences = np.zeros((len(pairs), len(words)), np.float32)
    differences[rows, columns] = values
    # the same regression with one feature per pair, as there are more words than pairs
    products = (differences @ differences.T).astype(float)
    eigenvalues, vectors = np.linalg.eigh(products / np.diag(products).mean())
    return _cross_fit(vectors * np.sqrt(np.maximum(eigenvalues, 0)), folds, WORDS_RIDGE)


def _cross_fit(differences: np.ndarray, folds: np.ndarray, ridge: float) -> np.ndarray:
    """Predict each fold's margins by a regression on the other folds, (pairs,)."""
    margins = np.zeros(len(differences))
    for fold in np.unique(folds):
        margins[folds == fold] = differences[folds == fold] @ fit_logistic(differences[folds != fold], ridge)
    return margins


def fit_logistic(differences: np.ndarray, ridge: float) -> np.ndarray:
    """Fit the weights w of a logistic regression on differences x, (features,).

    They maximize the mean of log sigmoid(w x) minus ridge / 2 |w|^2.
    """
    n, size = differences.shape
    weights = np.zeros(size)
    for _ in range(N_NEWTON):
        p = 1 / (1 + np.exp(-differences @ weights))
        gradient = differences.T @ (1 - p) / n - ridge * weights
        curvature = (differences.T * (p * (1 - p) / n)) @ differences + ridge * np.eye(size)
        weights += np.linalg.solve(curvature, gradient)
    return weights
