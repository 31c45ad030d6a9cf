"""Tables of the rows of `experiments.frontier`, of which each is a policy's reward and KL.

A unit is a seed of a task; a gap is how far a reward is below that of pi* at the same KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.frontier.jobs import Row
from experiments.frontier.methods import PLANNED, PLANNED_KLS

REWARD_KLS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)  # columns of the table of rewards at equal KL
# 0.975 quantiles of Student's t with 1 to 9 degrees of freedom; for more, the last makes intervals slightly too wide
T_975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)
COVERED = 0.9  # share of the seeds that must have a value for a mean to be shown
Unit = tuple[int, int]  # task and seed


class Curve(NamedTuple):
    """A method's policies, in order of their mean KL. The arrays are (units, betas)."""

    units: list[Unit]
    betas: list[float | None]
    reward: np.ndarray
    kl: np.ndarray
    limit: np.ndarray  # the reward of pi* at the same KL


def list_methods(rows: Sequence[Row]) -> list[str]:
    """List the methods whose policies were trained, unlike the reference and pi*."""
    return [*dict.fromkeys(row["method"] for row in rows if row["seed"] is not None)]


def collect_curve(rows: Sequence[Row], method: str) -> Curve:
    """Collect a method's rows, one for each unit and beta."""
    row_at = {}
    for row in rows:
        if row["method"] == method:
            unit = (row["task"], row["seed"])
            row_at[unit, row["beta"]] = row
    units = list(dict.fromkeys(unit for unit, _ in row_at))
    betas = list(dict.fromkeys(beta for _, beta in row_at))

    def make_array(key: str) -> np.ndarray:
        return np.array([[row_at[unit, beta][key] for beta in betas] for unit in units])

    kl = make_array("kl")
    order = kl.mean(0).argsort()
    return Curve(
        units,
        betas=[betas[i] for i in order],
        reward=make_array("reward")[:, order],
        kl=kl[:, order],
        limit=make_array("most_reward")[:, order],
    )


def most_reward(rows: Sequence[Row], kl: float, task: int = 0) -> float:
    """Reward of a task's pi* at this KL, interpolated between its rows."""
    points = []
    for row in rows:
        if row["task"] == task and row["method"] in ("sft", "pi_star"):
            points.append((row["kl"], row["reward"]))
    kls, rewards = np.array(sorted(points)).T
    return float(np.interp(kl, kls, rewards))


def find_gaps(curve: Curve, kl: float) -> np.ndarray:
    """Interpolate each unit's gap to pi* at this KL, (units,).

    Gaps are interpolated, because interpolated rewards would lie below a concave frontier. The gap is NaN above the
    highest KL of the unit's policies, and below 0.9 times their lowest KL, where it rises steeply from 0.
    """
    gaps = []
    for kls, unit_gaps in zip(curve.kl, curve.limit - curve.reward, strict=True):
        gap = np.nan
        if 0.9 * kls.min() <= kl <= kls.max():
            order = kls.argsort()
            # The reference has KL 0 and no gap.
            known_kls = [0.0, *kls[order]]
            known_gaps = [0.0, *unit_gaps[order]]
            gap = np.interp(kl, known_kls, known_gaps)
        gaps.append(gap)
    return np.array(gaps)


def at_equal_kl(curve: Curve, rows: Sequence[Row], kl: float) -> np.ndarray:
    """Compute each unit's reward at this KL, (units,), which is pi*'s less the gap."""
    limits = [most_reward(rows, kl, task) for task, _ in curve.units]
    return np.array(limits) - find_gaps(curve, kl)


# --- means and intervals ----------------------------------------------------------------------------------------------


def mean_and_interval(values: np.ndarray, sign: str = "") -> str:
    """Format a mean and its 95 % interval (Student's t).

    The text is `-` if a value is missing. `sign` is "+" for differences: an interval that excludes 0 is then bold.
    """
    if np.isnan(values).any():
        return "-"
    mean = values.mean()
    n = len(values)
    if n == 1:
        return f"{mean:{sign}.2f}"
    quantile = T_975[min(n - 1, len(T_975)) - 1]
    half_width = quantile * values.std(ddof=1) / np.sqrt(n)
    low = mean - half_width
    high = mean + half_width
    text = f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"
    if sign and abs(mean) > half_width:
        return f"**{text}**"
    return text


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
        means = []
        for task in dict.fromkeys(tasks):
            values_of_task = values[is_there & (tasks == task)]
            means.append(values_of_task.mean() if len(values_of_task) else np.nan)
        averaged = np.array(means)
    text = mean_and_interval(averaged, sign)
    if text == "-" or is_there.all():
        return text
    return f"{text} ({is_there.sum()} of {len(values)})"


# --- tables -----------------------------------------------------------------------------------------------------------


def make_tables(rows: Sequence[Row]) -> str:
    """Make Markdown tables: planned comparisons, and rewards at equal KL."""
    return f"{_make_planned_table(rows)}\n\n{_make_reward_table(rows)}"


def _make_planned_table(rows: Sequence[Row]) -> str:
    """Tabulate those of the comparisons in PLANNED whose methods were run."""
    lines = [["difference of rewards", *(f"KL {kl:g}" for kl in PLANNED_KLS)]]
    methods = list_methods(rows)
    for first, second in PLANNED:
        if first not in methods or second not in methods:
            continue
        first_curve = collect_curve(rows, first)
        second_curve = collect_curve(rows, second)
        assert first_curve.units == second_curve.units  # paired
        cells = [f"{first} - {second}"]
        for kl in PLANNED_KLS:
            # Each reward is pi*'s less a gap; this is the first's less the second's.
            differences = find_gaps(second_curve, kl) - find_gaps(first_curve, kl)
            cells.append(summarize(differences, first_curve.units, sign="+"))
        lines.append(cells)
    return format_table(lines)


def _make_reward_table(rows: Sequence[Row]) -> str:
    """Tabulate each method's reward at equal KL, and that of pi* in the last line."""
    lines = [["reward at", *(f"KL {kl:g}" for kl in REWARD_KLS)]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        cells = [summarize(at_equal_kl(curve, rows, kl), curve.units) for kl in REWARD_KLS]
        if set(cells) != {"-"}:
            lines.append([method, *cells])
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = ["pi*"]
    for kl in REWARD_KLS:
        limit = np.mean([most_reward(rows, kl, task) for task in tasks])
        cells.append(f"{limit:.2f}")
    lines.append(cells)
    return format_table(lines)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; the first line is its header."""
    header, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    rule = "|" + "---|" * len(lines[0])
    return "\n".join([header, rule, *rows])
