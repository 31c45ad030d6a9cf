"""Table and picture of the rows of `experiments.hh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpo.analysis.curves import DARK, LIGHT
from experiments.hh.pairs import predict_by_length
from experiments.hh.sweep import METHODS, ROLES
from experiments.reading import Estimate, add_legend, estimate_mean, format_table, new_picture, style_axis, to_png
from experiments.runs import Row

COMPARED = "dpo-0.1"  # with which the other methods and the baselines are compared, as planned
END, AT_KL = "at the end", "at equal KL"  # points of the runs at which methods are compared
MARKERS = {"dpo-0.1": "o", "ipo-0.1": "^", "dpo-0.5": "s", "kto-0.1": "D", "dpo-0.05": "v"}
WIDTH, HEIGHT = 6.4, 5.2  # inches
Scores = dict[int, float]  # by the number of the pair


class Evaluation(NamedTuple):
    """Held-out pairs, ranked after a part of a method's runs."""

    pairs: np.ndarray  # numbers of the pairs, (n,)
    chosen: np.ndarray  # log-ratios, (n,)
    rejected: np.ndarray
    kl: Estimate

    @property
    def scores(self) -> np.ndarray:
        """Scores of the pairs, (n,); see `judge`."""
        return judge(self.chosen - self.rejected)


class Data(NamedTuple):
    """First turns and folds, by the number of the pair."""

    first_turns: Sequence[str]
    folds: np.ndarray


def judge(margins: np.ndarray) -> np.ndarray:
    """Score margins: 1 if positive, 0 if negative, 1/2 if 0."""
    return (np.sign(margins) + 1) / 2


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


def balance(scores: np.ndarray, pairs: np.ndarray, differences: np.ndarray, data: Data) -> Estimate:
    """Average two accuracies: where chosen is shorter, and where it is longer.

    `scores` (n,) belong to `pairs` (n,); `differences` are chosen minus rejected tokens, by the number of the pair.
    Pairs of equal lengths do not count. The interval is clustered by first turn.
    """
    pair_differences = differences[pairs]
    is_counted = pair_differences != 0
    turns = [data.first_turns[pair] for pair in pairs[is_counted]]
    return estimate_mean(scores[is_counted], turns, strata=pair_differences[is_counted] > 0)


def interpolate(evaluations: Sequence[Evaluation], kl: float) -> np.ndarray | None:
    """Interpolate the score of each pair at this KL, (n,).

    The interpolation is linear in KL along the runs, so the mean over pairs is the interpolated accuracy. None if all
    evaluations have a higher KL, or all a lower one.
    """
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.kl.mean)
    kls = [evaluation.kl.mean for evaluation in ordered]
    if not kls[0] <= kl <= kls[-1]:
        return None
    scores = np.array([evaluation.scores for evaluation in ordered])  # (evaluations, n)
    return np.array([np.interp(kl, kls, pair_scores) for pair_scores in scores.T])


def choose_kl(rows: Sequence[Row]) -> float:
    """Choose the highest KL that all methods reach."""
    return min(collect(rows, method)[1.0].kl.mean for method in list_methods(rows))


def list_methods(rows: Sequence[Row]) -> list[str]:
    return [method for method in METHODS if any(row["method"] == method for row in rows)]


class Baselines(NamedTuple):
    """Held-out pairs of all folds, ranked by length or the reference alone."""

    pairs: np.ndarray  # numbers of the pairs, (n,)
    differences: np.ndarray  # chosen minus rejected tokens, by the number of the pair
    margins: dict[str, np.ndarray]  # by the name of the baseline, (n,)


def make_baselines(rows: Sequence[Row], data: Data) -> Baselines:
    """Make the baselines from the rows of the method with most folds."""
    end_rows = [row for row in rows if row["share"] == 1.0]
    method = max(list_methods(rows), key=lambda method: sum(row["method"] == method for row in end_rows))
    fold_rows = sorted((row for row in end_rows if row["method"] == method), key=lambda row: row["fold"])

    def join(key: str) -> np.ndarray:
        return np.concatenate([row[key] for row in fold_rows])

    pairs = join("pairs")
    tokens = np.stack([join(f"{role}_tokens") for role in ROLES], axis=-1)  # (n, 2)
    logps = np.stack([join(f"reference_{role}") for role in ROLES], axis=-1)
    means = logps / tokens
    margins = {
        "length, logistic regression": predict_by_length(tokens, data.folds[pairs]),
        "log ref, sum": logps[:, 0] - logps[:, 1],
        "log ref, mean over tokens": means[:, 0] - means[:, 1],
    }
    differences = np.zeros(len(data.folds), int)
    differences[pairs] = tokens[:, 0] - tokens[:, 1]
    return Baselines(pairs, differences, margins)


def format_tables(rows: Sequence[Row], data: Data) -> str:
    """Make the tables of methods and of planned differences."""
    kl, baselines = choose_kl(rows), make_baselines(rows, data)
    scores = {method: _find_scores(rows, method, kl) for method in list_methods(rows)}
    tables = (
        _make_method_lines(rows, data, baselines, scores, kl),
        _make_difference_lines(data, baselines, scores, kl),
    )
    return "\n\n".join(format_table(lines) for lines in tables if len(lines) > 1)


def _find_scores(rows: Sequence[Row], method: str, kl: float) -> dict[str, Scores]:
    """Find a method's scores at END and AT_KL.

    AT_KL has none if `kl` is beyond the method's runs.
    """
    evaluations = collect(rows, method)
    end, at_kl = evaluations[1.0], interpolate([*evaluations.values()], kl)
    pairs = end.pairs.tolist()
    return {
        END: dict(zip(pairs, end.scores, strict=True)),
        AT_KL: {} if at_kl is None else dict(zip(pairs, at_kl, strict=True)),
    }


def _average(scores: Scores, baselines: Baselines, data: Data) -> Estimate:
    pairs = np.array([*scores])
    return balance(np.array([*scores.values()]), pairs, baselines.differences, data)


def _make_method_lines(
    rows: Sequence[Row], data: Data, baselines: Baselines, scores: Mapping[str, Mapping[str, Scores]], kl: float
) -> list[list[str]]:
    """Make the lines of the table of baselines and methods."""
    lines = [["", "KL", "balanced accuracy", f"at KL {kl:.2f}", "change of log pi, chosen / rejected", "pairs"]]
    for name, margins in baselines.margins.items():
        accuracy = balance(judge(margins), baselines.pairs, baselines.differences, data)
        lines.append([name, "", f"{accuracy:.3f}", "", "", f"{len(baselines.pairs)}"])
    for method, scores_by_point in scores.items():
        end = collect(rows, method)[1.0]  # after the whole run
        # at END and AT_KL
        accuracies = [f"{_average(found, baselines, data):.3f}" if found else "-" for found in scores_by_point.values()]
        changes = f"{end.chosen.mean():.1f} / {end.rejected.mean():.1f}"
        lines.append([METHODS[method].label, f"{end.kl}", *accuracies, changes, f"{len(end.pairs)}"])
    return lines


def _make_difference_lines(
    data: Data, baselines: Baselines, scores: Mapping[str, Mapping[str, Scores]], kl: float
) -> list[list[str]]:
    """Make the lines of the table of planned differences."""
    lines = [["difference of balanced accuracies", END, f"at KL {kl:.2f}", "pairs"]]
    if COMPARED not in scores:
        return lines
    all_scores: dict[str, Mapping[str, Scores]] = dict(scores)
    for name, margins in baselines.margins.items():
        all_scores[name] = {END: dict(zip(baselines.pairs.tolist(), judge(margins), strict=True)), AT_KL: {}}
    comparisons = [(method, COMPARED) for method in scores if method != COMPARED]
    comparisons += [(COMPARED, baseline) for baseline in baselines.margins]
    for first, second in comparisons:
        cells, n_pairs = [], 0
        for point in (END, AT_KL):
            first_scores, second_scores = all_scores[first][point], all_scores[second][point]
            pairs = sorted(first_scores.keys() & second_scores.keys())
            changes = {pair: first_scores[pair] - second_scores[pair] for pair in pairs}
            cells.append(f"{_average(changes, baselines, data):+.3f}" if changes else "-")
            n_pairs = max(n_pairs, len(pairs))
        lines.append([f"{first} - {second}", *cells, f"{n_pairs}"])
    return lines


def draw(rows: Sequence[Row], data: Data, *, dark: bool) -> bytes:
    """Draw a PNG of balanced accuracy against KL along the runs."""
    theme = DARK if dark else LIGHT
    baseline_pairs, differences, baseline_margins = make_baselines(rows, data)
    with new_picture(WIDTH, HEIGHT, theme) as picture:
        axis: Any = picture.subplots()
        styles = ((0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
        for line, (name, margins) in zip(styles, baseline_margins.items(), strict=True):
            accuracy = balance(judge(margins), baseline_pairs, differences, data)
            axis.axhline(accuracy.mean, color=theme.muted, linewidth=1.2, linestyle=line, label=name)
        for color, method in zip(theme.colors, METHODS, strict=False):
            if method in list_methods(rows):
                along = [*collect(rows, method).values()]
                accuracies = [balance(e.scores, e.pairs, differences, data) for e in along]
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
        axis.set_title("held-out accuracy, balanced over length", loc="left", fontsize=10, color=theme.ink)
        add_legend(picture, axis, theme)
        return to_png(picture)
