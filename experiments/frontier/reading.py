"""Tables of the rows of `experiments.frontier`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier.jobs import Row
from experiments.frontier.methods import METHODS, PLANNED, PLANNED_FALLS, PLANNED_KLS, PlannedFall

REWARD_KLS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)  # columns of the table of rewards at equal KL
BUDGETS = np.linspace(0, 5, 51)  # of KL; --tune averages over them
# 0.975 quantiles of Student's t with 1 to 9 degrees of freedom; for more, the last makes intervals slightly too wide
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
COVERED = 0.9  # share of the seeds that must have a value for a mean to be shown
Unit = tuple[int, int]  # task and seed


class Curve(NamedTuple):
    """A method's policies, in order of KL.

    The arrays are (units, betas), where a unit is a seed of a task.
    """

    units: list[Unit]
    betas: list[float | None]
    reward: np.ndarray
    kl: np.ndarray
    limit: np.ndarray  # the reward of pi* at the same KL


def list_methods(rows: Sequence[Row]) -> list[str]:
    """List the methods that come from runs."""
    return [*dict.fromkeys(row["method"] for row in rows if row["seed"] is not None)]


def select(rows: Sequence[Row], *, fixed_length: bool) -> list[Row]:
    """Select rows of fixed or free length, but not policies along runs."""
    return [row for row in rows if row["fixed_length"] == fixed_length and "share" not in row]


def collect_curve(rows: Sequence[Row], method: str) -> Curve:
    """Collect a method's rows, which differ in unit and beta."""
    row_at = {(row["task"], row["seed"], row["beta"]): row for row in rows if row["method"] == method}
    units = list(dict.fromkeys((task, seed) for task, seed, _ in row_at))
    betas = list(dict.fromkeys(beta for *_, beta in row_at))

    def make_array(key: str) -> np.ndarray:
        return np.array([[row_at[*unit, beta][key] for beta in betas] for unit in units])

    reward, kl, limit = map(make_array, ("reward", "kl", "most_reward"))
    order = kl.mean(0).argsort()
    return Curve(units, [betas[i] for i in order], reward[:, order], kl[:, order], limit[:, order])


def most_reward(rows: Sequence[Row], kl: float, task: int = 0) -> float:
    """Reward of a task's pi* at this KL, interpolated between its rows."""
    limit_rows = [row for row in rows if row["method"] in ("sft", "pi_star") and row["task"] == task]
    kls, rewards = zip(*sorted((row["kl"], row["reward"]) for row in limit_rows), strict=True)
    return float(np.interp(kl, kls, rewards))


def find_gaps(curve: Curve, kl: float) -> np.ndarray:
    """Interpolate each unit's gap to pi* at this KL, (units,).

    Gaps are interpolated, because interpolated rewards would lie below a concave frontier. The gap is NaN above the
    highest KL of the unit's policies, and below 0.9 times their lowest KL, where it rises steeply from 0.
    """
    gaps = []
    for kls, unit_gaps in zip(curve.kl, curve.limit - curve.reward, strict=True):
        order = kls.argsort()
        lowest, highest = 0.9 * kls.min(), kls.max()
        gap = np.interp(kl, [0.0, *kls[order]], [0.0, *unit_gaps[order]])  # the reference has KL 0 and no gap
        gaps.append(gap if lowest <= kl <= highest else np.nan)
    return np.array(gaps)


def at_equal_kl(curve: Curve, rows: Sequence[Row], kl: float) -> np.ndarray:
    """Compute each unit's reward at this KL, (units,): pi*'s less the gap."""
    limits = {task: most_reward(rows, kl, task) for task in {task for task, _ in curve.units}}
    return np.array([limits[task] for task, _ in curve.units]) - find_gaps(curve, kl)


def within_budget(curve: Curve, reference: Row, budgets: np.ndarray) -> np.ndarray:
    """Score each unit by its highest reward within a KL budget, (units,).

    The score is the mean over budgets. A mixture of two policies counts too: tossing a coin between them for each
    response gives the mean of their rewards, and at most the mean of their KLs.
    """
    scores = []
    for rewards, kls in zip(curve.reward, curve.kl, strict=True):
        policies = sorted(zip((0.0, *kls), (reference["reward"], *rewards), strict=True))  # (KL, reward) of each
        mixtures = []  # by pair of policies: the reward of its mixture at each budget, (budgets,)
        for (kl_1, reward_1), (kl_2, reward_2) in itertools.combinations(policies, 2):
            mixtures.append(np.interp(budgets, (kl_1, kl_2), (reward_1, reward_2), left=-np.inf))
        scores.append(np.max(mixtures, axis=0).mean())
    return np.array(scores)


# --- means and intervals ----------------------------------------------------------------------------------------------


def mean_and_interval(values: np.ndarray, sign: str = "") -> str:
    """Format a mean and its 95 % interval (Student's t).

    The text is `-` if a value is missing. `sign` is "+" for differences: an interval that excludes 0 is then bold.
    """
    if not len(values) or np.isnan(values).any():
        return "-"
    mean, n = values.mean(), len(values)
    if n == 1:
        return f"{mean:{sign}.2f}"
    quantile = T_975[min(n - 1, len(T_975)) - 1]
    half_width = quantile * values.std(ddof=1) / np.sqrt(n)
    text = f"{mean:{sign}.2f} [{mean - half_width:{sign}.2f}, {mean + half_width:{sign}.2f}]"
    return f"**{text}**" if sign and abs(mean) > half_width else text


def summarize(values: np.ndarray, units: Sequence[Unit], sign: str = "") -> str:
    """Format the mean over units and its interval.

    With several tasks the interval is over the tasks' means, since seeds of a task have its reward and reference in
    common. If a few units have no value, the number of units that have one is given.
    """
    is_there = ~np.isnan(values)
    if not is_there.any() or is_there.mean() < COVERED:
        return "-"
    tasks = np.array([task for task, _ in units])
    averaged = values[is_there]
    if len({*tasks}) > 1:
        values_by_task = [values[is_there & (tasks == task)] for task in dict.fromkeys(tasks)]
        averaged = np.array([of_task.mean() if len(of_task) else np.nan for of_task in values_by_task])
    text = mean_and_interval(averaged, sign)
    if text == "-" or is_there.all():
        return text
    return f"{text} ({is_there.sum()} of {len(values)})"


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> list[str]:
    """Make Markdown tables: planned comparisons, best policies, and rewards at equal KL."""
    all_tables = [_make_planned_table(rows)]
    for fixed_length in (True, False):
        own_rows = select(rows, fixed_length=fixed_length)
        if list_methods(own_rows):
            name = "fixed length" if fixed_length else "free length"
            all_tables += [_make_peak_table(own_rows, name), _make_reward_table(own_rows, name)]
    return [table for table in all_tables if table]


def _make_planned_table(rows: Sequence[Row]) -> str:
    """Tabulate the planned differences whose two methods were run."""
    lines = [["difference of rewards", "length", *(f"KL {kl:g}" for kl in PLANNED_KLS), "each beta at its KL"]]
    for first, second, fixed_length in PLANNED:
        own_rows = select(rows, fixed_length=fixed_length)
        if {first, second} <= {*list_methods(own_rows)}:
            first_curve, second_curve = (collect_curve(own_rows, method) for method in (first, second))
            assert first_curve.units == second_curve.units  # paired
            # the first's reward less the second's: each is pi*'s less a gap
            differences = [find_gaps(second_curve, kl) - find_gaps(first_curve, kl) for kl in PLANNED_KLS]
            cells = [summarize(values, first_curve.units, "+") for values in differences]
            lines.append([f"{first} - {second}", _name_length(fixed_length), *cells, ""])
    for planned in PLANNED_FALLS:
        cell = _format_fall(planned, select(rows, fixed_length=planned.fixed_length))
        if cell:
            text = f"{planned.method}: beta {planned.smaller:g} - beta {planned.beta:g}"
            lines.append([text, _name_length(planned.fixed_length), *[""] * len(PLANNED_KLS), cell])
    return format_table(lines) if len(lines) > 1 else ""


def _format_fall(planned: PlannedFall, rows: Sequence[Row]) -> str:
    curve = collect_curve(rows, planned.method) if planned.method in list_methods(rows) else None
    if curve is None or not {planned.beta, planned.smaller} <= {*curve.betas}:
        return ""
    before, after = (curve.reward[:, curve.betas.index(beta)] for beta in (planned.beta, planned.smaller))
    return summarize(after - before, curve.units, "+")


def _name_length(fixed_length: bool) -> str:
    return "fixed" if fixed_length else "free"


def _make_peak_table(rows: Sequence[Row], name: str) -> str:
    """Tabulate each method's best policy, and its policy of most KL."""
    lines = [[f"method, {name}", "best beta", "KL", "reward", "gap to pi*", "most KL", "reward there", "change"]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        best = int(curve.reward.mean(0).argmax())
        beta = "-" if curve.betas[best] is None else f"{curve.betas[best]:.2g}"
        best_reward, last_reward = curve.reward[:, best], curve.reward[:, -1]  # (units,)
        gap = curve.limit[:, best] - best_reward
        cells = [method, beta, f"{curve.kl[:, best].mean():.2f}"]
        cells += [summarize(values, curve.units) for values in (best_reward, gap)]
        if best == len(curve.betas) - 1:  # the best policy has the most KL
            cells += ["-"] * 3
        else:
            change = summarize(last_reward - best_reward, curve.units, "+")
            cells += [f"{curve.kl[:, -1].mean():.2f}", summarize(last_reward, curve.units), change]
        lines.append(cells)
    return format_table(lines)


def _make_reward_table(rows: Sequence[Row], name: str) -> str:
    lines = [[f"reward at, {name}", *(f"KL {kl:g}" for kl in REWARD_KLS)]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        cells = [summarize(at_equal_kl(curve, rows, kl), curve.units) for kl in REWARD_KLS]
        if set(cells) != {"-"}:
            lines.append([method, *cells])
    # best-of-N needs no run; N takes the place of beta in its curve
    best_rows = [row for row in rows if row["method"].startswith("best_of")]
    best_of = collect_curve([{**row, "method": "best", "beta": row["n"]} for row in best_rows], "best")
    lines.append(["best of N", *(summarize(at_equal_kl(best_of, rows, kl), best_of.units) for kl in REWARD_KLS)])
    tasks = [task for task, _ in best_of.units]
    limits = (np.mean([most_reward(rows, kl, task) for task in tasks]) for kl in REWARD_KLS)
    lines.append(["pi*", *(f"{limit:.2f}" for limit in limits)])
    return format_table(lines)


# --- tuning -----------------------------------------------------------------------------------------------------------


def score_trials(rows: Sequence[Row]) -> dict[str, dict[tuple[float, int], float]]:
    """Compute `within_budget` by method and trial (learning rate, passes)."""
    reference = next(row for row in rows if row["method"] == "sft")
    rows_of_trial: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        if row["method"] in METHODS:
            passes = row["passes"]
            if METHODS[row["method"]].knob == "passes":  # then `beta` is the factor of the trial's passes
                passes //= row["beta"]
            rows_of_trial.setdefault((row["method"], row["lr"], passes), []).append(row)
    scores: dict[str, dict[tuple[float, int], float]] = {}
    for (method, lr, passes), own_rows in rows_of_trial.items():
        score = within_budget(collect_curve(own_rows, method), reference, BUDGETS).mean()
        scores.setdefault(method, {})[lr, passes] = float(score)
    return scores


def choose_settings(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Choose each method's learning rate and passes, those of the highest score."""
    best = {method: max(scores, key=scores.__getitem__) for method, scores in score_trials(rows).items()}
    return {method: {"lr": lr, "passes": passes} for method, (lr, passes) in best.items()}


def format_trials(rows: Sequence[Row]) -> str:
    """Make a Markdown table of the scores; each method's best is bold."""
    scores = score_trials(rows)
    trials = [*dict.fromkeys(itertools.chain(*scores.values()))]
    lines = [["method", *(f"{lr:g}, {passes}" for lr, passes in trials)]]
    for method, score_of_trial in scores.items():
        best = max(score_of_trial.values())
        ordered = (score_of_trial[trial] for trial in trials)
        cells = (f"**{score:.3f}**" if score == best else f"{score:.3f}" for score in ordered)
        lines.append([f"`{method}`", *cells])
    return format_table(lines)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; the first line is its header."""
    header, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([header, f"|{'---|' * len(lines[0])}", *rows])
