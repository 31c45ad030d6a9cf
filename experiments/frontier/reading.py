"""Tables of the rows of `experiments.frontier`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.frontier.jobs import Row
from experiments.frontier.methods import PLANNED, PLANNED_KLS

REWARD_KLS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)  # columns of the table of rewards at equal KL
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


# --- means and intervals ----------------------------------------------------------------------------------------------


def mean_and_interval(values: np.ndarray, sign: str = "") -> str:
    """Format a mean and its 95 % interval (Student's t).

    The text is `-` if a value is missing. `sign` is "+" for differences: an interval that excludes 0 is then bold.
    """
    if np.isnan(values).any():
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
    if is_there.mean() < COVERED:
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


def make_tables(rows: Sequence[Row]) -> str:
    """Make Markdown tables: planned comparisons, and rewards at equal KL."""
    return f"{_make_planned_table(rows)}\n\n{_make_reward_table(rows)}"


def _make_planned_table(rows: Sequence[Row]) -> str:
    """Tabulate the planned differences whose methods were run."""
    lines = [["difference of rewards", *(f"KL {kl:g}" for kl in PLANNED_KLS)]]
    curves = {method: collect_curve(rows, method) for method in list_methods(rows)}
    for first, second in PLANNED:
        if {first, second} <= curves.keys():
            units = curves[first].units
            assert units == curves[second].units  # paired
            # the first's reward less the second's: each is pi*'s less a gap
            differences = [find_gaps(curves[second], kl) - find_gaps(curves[first], kl) for kl in PLANNED_KLS]
            lines.append([f"{first} - {second}", *(summarize(values, units, "+") for values in differences)])
    return format_table(lines)


def _make_reward_table(rows: Sequence[Row]) -> str:
    lines = [["reward at", *(f"KL {kl:g}" for kl in REWARD_KLS)]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        cells = [summarize(at_equal_kl(curve, rows, kl), curve.units) for kl in REWARD_KLS]
        if set(cells) != {"-"}:
            lines.append([method, *cells])
    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    limits = (np.mean([most_reward(rows, kl, task) for task in tasks]) for kl in REWARD_KLS)
    lines.append(["pi*", *(f"{limit:.2f}" for limit in limits)])
    return format_table(lines)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; the first line is its header."""
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([rows[0], f"|{'---|' * len(lines[0])}", *rows[1:]])
