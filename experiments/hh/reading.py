"""Table and picture of the rows of `experiments.hh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.curves import DARK, LIGHT
from experiments.hh.pairs import (
    measure_distances,
    predict_by_difference,
    predict_by_lengths,
    predict_by_words,
    sort_by_length,
)
from experiments.hh.sweep import METHODS, REFERENCE, ROLES, Sweep
from experiments.reading import Estimate, add_legend, estimate_mean, format_table, new_picture, style_axis, to_png
from experiments.runs import Row

COMPARED = "dpo-0.1"  # with which the other methods and the baselines are compared
END, AT_KL = "at the end", "at equal KL"  # points of the runs at which methods are compared
MARKERS = {"dpo-0.1": "o", "ipo-0.1": "^", "dpo-0.5": "s", "kto-0.1": "D", "dpo-0.05": "v"}
STYLES = ((0, (4, 2)), (0, (2, 1)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (7, 2)))  # of the baselines' lines
WIDTH, HEIGHT = 6.9, 5.2  # inches
N_NEIGHBORS = 8  # pairs of similar lengths
Scores = Mapping[int, float]  # by the number of the pair: 1 if ranked right, 0 if wrong


class Evaluation(NamedTuple):
    """Held-out pairs, ranked after a part of a method's runs."""

    pairs: np.ndarray  # numbers of the pairs, (n,)
    chosen: np.ndarray  # log-ratios, (n,)
    rejected: np.ndarray
    kl: Estimate

    @property
    def scores(self) -> Scores:
        return judge(self.pairs, self.chosen - self.rejected)


class Data(NamedTuple):
    """The pairs, by their numbers, and how they are ranked without training."""

    first_turns: Sequence[str]
    folds: np.ndarray
    tokens: np.ndarray  # of chosen and rejected, (pairs, 2)
    baselines: Mapping[str, Scores]  # by their names

    @property
    def differences(self) -> np.ndarray:
        """Chosen minus rejected tokens, (pairs,)."""
        return self.tokens[:, 0] - self.tokens[:, 1]


def make_data(sweep: Sweep, rows: Sequence[Row]) -> Data:
    """Rank a sweep's pairs without training; `rows` has the reference's."""
    tokens = np.array([[len(ids) for ids in sweep.encode(n).responses] for n in range(len(sweep.pairs))])  # (pairs, 2)
    reference = [row for row in rows if row["method"] == REFERENCE]
    scored = np.concatenate([row["pairs"] for row in reference])
    logps = np.stack([np.concatenate([row[role] for row in reference]) for role in ROLES], axis=-1)  # (n, 2)
    everything = np.arange(len(tokens))
    baselines = {
        "length difference, logistic": judge(
            everything, predict_by_difference(tokens[:, 0] - tokens[:, 1], sweep.folds)
        ),
        "both lengths, kernel": judge(everything, predict_by_lengths(tokens, sweep.folds)),
        "words, logistic": judge(everything, predict_by_words(sweep.pairs, sweep.folds)),
        "log ref, sum": judge(scored, logps @ [1, -1]),
        "log ref, mean": judge(scored, logps / tokens[scored] @ [1, -1]),
    }
    return Data([pair.first_turn for pair in sweep.pairs], sweep.folds, tokens, baselines)


def judge(pairs: np.ndarray, margins: np.ndarray) -> Scores:
    """Score margins: 1 if positive, 0 if negative, 1/2 if 0."""
    return dict(zip(pairs.tolist(), (np.sign(margins) + 1) / 2, strict=True))


def collect(rows: Sequence[Row], method: str) -> dict[float, Evaluation]:
    """Join the rows of a method's folds, by share of a run."""
    method_rows = sorted((row for row in rows if row["method"] == method), key=lambda row: row["fold"])
    evaluations = {}
    for share in sorted({row["share"] for row in method_rows}):
        fold_rows = [row for row in method_rows if row["share"] == share]
        pairs, chosen, rejected, kls = (
            np.concatenate([row[key] for row in fold_rows]) for key in ("pairs", *ROLES, "kl")
        )
        evaluations[share] = Evaluation(pairs, chosen, rejected, estimate_mean(kls, range(len(kls))))
    return evaluations


def average(scores: Scores, data: Data) -> Estimate:
    """Mean score, clustered by first turn."""
    return estimate_mean([*scores.values()], [data.first_turns[pair] for pair in scores])


def balance(scores: Scores, data: Data) -> Estimate:
    """Mean score, balanced over the difference of the lengths.

    The strata of `sort_by_length` count alike. So a rule that depends on the length difference alone scores 1/2 if it
    is constant within each bin. The interval is clustered by first turn.
    """
    pairs = np.array([*scores])
    strata = sort_by_length(data.differences[pairs])
    counted = pairs[strata >= 0].tolist()
    turns = [data.first_turns[pair] for pair in counted]
    return estimate_mean([scores[pair] for pair in counted], turns, strata=strata[strata >= 0])


def score_by_neighbors(evaluation: Evaluation, data: Data) -> Scores:
    """Score each pair by the margins of pairs with similar lengths.

    They are the nearest 8 of the same fold, so their margins are from the same policy. A margin is taken as that of the
    longer over the shorter response. If margins depended only on lengths and chance, the mean of these scores would
    equal that of the policy's own, apart from the lengths being only similar.
    """
    pairs = evaluation.pairs
    is_longer = np.sign(data.differences[pairs])
    margins_of_longer = (evaluation.chosen - evaluation.rejected) * is_longer
    distances = measure_distances(data.tokens[pairs])
    is_neighbor = (data.folds[pairs][:, None] == data.folds[pairs]) & (is_longer != 0)
    np.fill_diagonal(is_neighbor, False)
    n_neighbors = min(N_NEIGHBORS, int(is_neighbor.sum(axis=1).min()))  # fewer in a small trial
    nearest = np.argsort(np.where(is_neighbor, distances, np.inf), axis=1, kind="stable")[:, :n_neighbors]
    scores = (np.sign(margins_of_longer[nearest] * is_longer[:, None]) + 1) / 2
    return dict(zip(pairs.tolist(), scores.mean(1).tolist(), strict=True))


def interpolate(evaluations: Sequence[Evaluation], kl: float) -> Scores:
    """Interpolate the score of each pair at this KL.

    The interpolation is linear in KL along the runs, so the mean over pairs is the interpolated accuracy. Empty if all
    evaluations have a higher KL, or all a lower one; the first counts as having this KL if it is in its interval.
    """
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.kl.mean)
    kls = [evaluation.kl.mean for evaluation in ordered]
    if not kls[0] - ordered[0].kl.half_width <= kl <= kls[-1]:
        return {}
    scores = [evaluation.scores for evaluation in ordered]
    return {pair: float(np.interp(kl, kls, [part[pair] for part in scores])) for pair in scores[0]}


def choose_kl(rows: Sequence[Row]) -> float:
    """Choose the highest KL that all methods reach."""
    return min(max(e.kl.mean for e in collect(rows, method).values()) for method in list_methods(rows))


def list_methods(rows: Sequence[Row]) -> list[str]:
    return [method for method in METHODS if any(row["method"] == method for row in rows)]


def format_tables(rows: Sequence[Row], data: Data) -> str:
    """Make the tables of methods, of differences, and of what lengths explain."""
    kl = choose_kl(rows)
    scores = {method: _find_scores(rows, method, kl) for method in list_methods(rows)}
    tables = [_make_method_lines(rows, data, scores, kl)]
    if COMPARED in scores:
        tables.append(_make_difference_lines(data, scores, kl))
    tables.append(_make_length_lines(rows, data, list(scores)))
    return "\n\n".join(format_table(lines) for lines in tables)


def _find_scores(rows: Sequence[Row], method: str, kl: float) -> dict[str, Scores]:
    """Find a method's scores at END and AT_KL."""
    evaluations = collect(rows, method)
    return {END: evaluations[1.0].scores, AT_KL: interpolate([*evaluations.values()], kl)}


def _make_method_lines(
    rows: Sequence[Row], data: Data, scores: Mapping[str, Mapping[str, Scores]], kl: float
) -> list[list[str]]:
    """Make the lines of the table of baselines and methods."""
    lines = [
        ["", "KL", "accuracy", "balanced accuracy", f"balanced, at KL {kl:.2f}", "change of log pi, chosen / rejected"]
    ]
    for name, ranked in data.baselines.items():
        lines.append([name, "", f"{average(ranked, data):.3f}", f"{balance(ranked, data):.3f}", "", ""])
    for method, by_point in scores.items():
        end = collect(rows, method)[1.0]  # after the whole run
        accuracies = [f"{average(by_point[END], data):.3f}"]
        accuracies += [f"{balance(by_point[point], data):.3f}" if by_point[point] else "-" for point in (END, AT_KL)]
        changes = f"{end.chosen.mean():.1f} / {end.rejected.mean():.1f}"
        lines.append([METHODS[method].label, f"{end.kl}", *accuracies, changes])
    return lines


def _make_difference_lines(data: Data, scores: Mapping[str, Mapping[str, Scores]], kl: float) -> list[list[str]]:
    """Make the lines of the table of differences."""
    lines = [["difference of balanced accuracies", END, "fold by fold", f"at KL {kl:.2f}"]]
    baselines: dict[str, Mapping[str, Scores]] = {
        name: {END: found, AT_KL: {}} for name, found in data.baselines.items()
    }
    comparisons = [(method, COMPARED) for method in scores if method != COMPARED]
    comparisons += [(COMPARED, baseline) for baseline in baselines]
    for first, second in comparisons:
        firsts, seconds = scores[first], {**scores, **baselines}[second]
        end, at_kl = (_subtract(firsts[point], seconds[point]) for point in (END, AT_KL))
        folds = sorted({int(data.folds[pair]) for pair in end})
        by_fold = [{pair: change for pair, change in end.items() if data.folds[pair] == fold} for fold in folds]
        cells = [f"{balance(end, data):+.3f}", " ".join(f"{balance(changes, data).mean:+.2f}" for changes in by_fold)]
        lines.append([f"{first} - {second}", *cells, f"{balance(at_kl, data):+.3f}" if at_kl else "-"])
    return lines


def _make_length_lines(rows: Sequence[Row], data: Data, methods: Sequence[str]) -> list[list[str]]:
    """Make the lines of the table of what lengths explain of rankings."""
    lines = [["balanced accuracy at the end", "own margins", "margins of similar lengths", "difference"]]
    for method in methods:
        end = collect(rows, method)[1.0]
        by_neighbors = score_by_neighbors(end, data)
        parts = (end.scores, by_neighbors, _subtract(end.scores, by_neighbors))
        lines.append([METHODS[method].label, *(f"{balance(part, data):.3f}" for part in parts)])
    return lines


def _subtract(first: Scores, second: Scores) -> Scores:
    """Subtract the scores of the pairs that both have."""
    return {pair: first[pair] - second[pair] for pair in sorted(first.keys() & second.keys())}


def draw(rows: Sequence[Row], data: Data, *, dark: bool) -> bytes:
    """Draw a PNG of balanced accuracy against KL along the runs."""
    theme = DARK if dark else LIGHT
    with new_picture(WIDTH, HEIGHT, theme) as picture:
        axis: Any = picture.subplots()
        for style, (name, scores) in zip(STYLES, data.baselines.items(), strict=True):
            accuracy = balance(scores, data)
            axis.axhline(accuracy.mean, color=theme.muted, linewidth=1.2, linestyle=style, label=name)
        for color, method in zip(theme.colors, METHODS, strict=False):
            if method in list_methods(rows):
                along = [*collect(rows, method).values()]
                accuracies = [balance(evaluation.scores, data) for evaluation in along]
                axis.errorbar(
                    [e.kl.mean for e in along],
                    [accuracy.mean for accuracy in accuracies],
                    yerr=[accuracy.half_width for accuracy in accuracies],
                    xerr=[e.kl.half_width for e in along],
                    **{"color": color, "marker": MARKERS[method], "markersize": 5, "elinewidth": 1},
                    label=METHODS[method].label,
                )
        style_axis(axis, theme)
        axis.set_xlim(left=0)
        axis.set_title("held-out accuracy, balanced over lengths", loc="left", fontsize=10, color=theme.ink)
        add_legend(picture, axis, theme)
        return to_png(picture)
