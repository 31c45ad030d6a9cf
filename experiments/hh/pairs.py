"""Pairs of HH, folds by first turn, and predictions without a model.

Imports no torch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpo.errors import InputError
from preference_datasets import extract_anthropic_prompt

LENGTH_RIDGES = (1e-3,)  # keeps the weights finite
WORDS_RIDGES = (1e-2, 1e-3, 1e-4)  # of features whose mean square is 1 / pairs
BANDWIDTHS = (0.3, 0.6, 1.2)  # of the logarithms of lengths
MAX_BINS, PAIRS_PER_BIN = 8, 30  # bins of length differences
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


def sort_by_length(differences: np.ndarray) -> np.ndarray:
    """Sort pairs by chosen minus rejected tokens into strata, (pairs,).

    Bins of equal numbers of pairs, by the difference's size, have two strata each: chosen is shorter, or longer. -1
    means that a pair does not count, as its lengths are equal or one stratum of its bin is empty.
    """
    strata, differs, is_longer = np.full(len(differences), -1), differences != 0, differences > 0
    sizes = np.abs(differences)
    n_bins = int(np.clip(differs.sum() // PAIRS_PER_BIN, 1, MAX_BINS))
    edges = np.quantile(sizes[differs], np.arange(1, n_bins) / n_bins) if differs.any() else []
    bins = np.searchsorted(edges, sizes, side="right")
    counts = differs & np.isin(bins, bins[differs & is_longer]) & np.isin(bins, bins[differs & ~is_longer])
    strata[counts] = (2 * bins + is_longer)[counts]
    return strata


def predict_by_difference(differences: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Margins of chosen over rejected by the lengths' difference, (pairs,).

    `differences` are chosen minus rejected tokens, (pairs,). A logistic regression on the pairs of the other folds fits
    a weighted sum of a difference, its sign, and the logarithm of its size.
    """
    sign = np.sign(differences)
    features = np.stack((sign, differences, sign * np.log1p(np.abs(differences))), axis=-1)
    scales = np.maximum(np.sqrt((features**2).mean(0)), 1e-9)  # 0 if all lengths are equal
    return _fit_ridge(features / scales, folds, LENGTH_RIDGES)


def predict_by_lengths(tokens: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Margins of chosen over rejected by both lengths, (pairs,).

    `tokens` are the lengths, (pairs, 2). In this kernel regression the pairs of the other folds vote whether the longer
    response is chosen; their weights are a normal density of the logarithms of both lengths, and all strata of
    `sort_by_length` weigh alike. The bandwidth is the one with the highest balanced accuracy within the other folds.
    """
    differences = tokens[:, 0] - tokens[:, 1]
    strata, is_longer = sort_by_length(differences), np.sign(differences)
    distances = measure_distances(tokens)

    def predict(voters: np.ndarray, bandwidth: float) -> np.ndarray:
        voters = voters & (strata >= 0)
        votes = is_longer[voters] / np.bincount(strata[voters])[strata[voters]]
        return is_longer * (np.exp(-distances[:, voters] / (2 * bandwidth**2)) @ votes)

    def judge(margins: np.ndarray, judged: np.ndarray) -> float:
        _, judged_strata = np.unique(strata[judged & (strata >= 0)], return_inverse=True)
        is_right = margins[judged & (strata >= 0)] > 0
        return float((np.bincount(judged_strata, is_right) / np.bincount(judged_strata)).mean())

    return _cross_fit(folds, BANDWIDTHS, predict, judge)


def measure_distances(tokens: np.ndarray) -> np.ndarray:
    """Squared distances of pairs by the logarithms of both lengths, (pairs, pairs)."""
    positions = np.log(np.sort(tokens, axis=1))
    return ((positions[:, None] - positions) ** 2).sum(-1)


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
    return _fit_ridge(vectors * np.sqrt(np.maximum(eigenvalues, 0)), folds, WORDS_RIDGES)


def _cross_fit(
    folds: np.ndarray,
    settings: Sequence[float],
    predict: Callable[[np.ndarray, float], np.ndarray],
    judge: Callable[[np.ndarray, np.ndarray], float],
) -> np.ndarray:
    """Predict each fold's margins from the other folds, (pairs,).

    `predict(fitted, setting)` fits to the pairs of a mask, and gives margins of all pairs. If there are several
    settings, the one that `judge(margins, judged)` finds best when the other folds predict each other is taken.
    """

    def predict_each_other(others: np.ndarray, setting: float) -> np.ndarray:
        margins = np.zeros(len(folds))
        for fold in np.unique(folds[others]):
            margins[folds == fold] = predict(others & (folds != fold), setting)[folds == fold]
        return margins

    margins, best = np.zeros(len(folds)), settings[0]
    for fold in np.unique(folds):
        others = folds != fold
        if len(settings) > 1:
            best = max(settings, key=lambda setting: judge(predict_each_other(others, setting), others))
        margins[~others] = predict(others, best)[~others]
    return margins


def _fit_ridge(differences: np.ndarray, folds: np.ndarray, ridges: Sequence[float]) -> np.ndarray:
    """Predict each fold's margins by a logistic regression on differences, (pairs,)."""
    return _cross_fit(
        folds,
        ridges,
        predict=lambda fitted, ridge: differences @ fit_logistic(differences[fitted], ridge),
        judge=lambda margins, judged: -float(np.logaddexp(0, -margins[judged]).mean()),
    )


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
