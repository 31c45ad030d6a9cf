"""Tables of the rows of `experiments.frontier`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

REWARD_KLS = (0.5, 1.0, 2.0, 3.0, 4.0)  # columns of the table of rewards at equal KL
DIFFERENCE_KLS = (1.0, 2.0, 3.0, 3.8, 5.0, 6.0)  # columns of the table of differences
COMPARED = (  # its rows: the first method's reward minus the second's
    ("cdpo", "dpo"), ("ipo", "dpo"), ("dpo", "simpo"), ("dpo", "apo_zero"), ("online_dpo", "dpo"),
    ("online_dpo", "dpo_reweighted"), ("online_dpo", "dpo_once"), ("dpo", "dpo_noisy"), ("cdpo_noisy", "dpo_noisy"),
    ("ipo_noisy", "dpo_noisy"),
)  # fmt: skip
# 0.975 quantiles of Student's t with 1, 2, ... 9 degrees of freedom; with more, that of 9 makes an interval too wide
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Row = dict[str, Any]  # of frontier.json


class Curve(NamedTuple):
    """A method's policies, in order of KL.

    The arrays are (seeds, betas).
    """

    betas: list[float | None]
    reward: np.ndarray
    kl: np.ndarray
    limit: np.ndarray  # the reward of pi* at the same KL


def list_methods(rows: Sequence[Row]) -> list[str]:
    """List the methods that were trained on preferences."""
    return [*dict.fromkeys(row["method"] for row in rows if row["seed"] is not None)]


def collect_curve(rows: Sequence[Row], method: str, parameter: str = "beta") -> Curve:
    """Collect the rows of a method that differ in a parameter."""
    own_rows = [row for row in rows if row["method"] == method]
    values = list(dict.fromkeys(row[parameter] for row in own_rows))
    seeds = list(dict.fromkeys(row["seed"] for row in own_rows))
    row_at = {(row["seed"], row[parameter]): row for row in own_rows}

    def make_array(key: str) -> np.ndarray:
        return np.array([[row_at[seed, value][key] for value in values] for seed in seeds])

    reward, kl, limit = map(make_array, ("reward", "kl", "most_reward"))
    order = kl.mean(0).argsort()
    return Curve([values[i] for i in order], reward[:, order], kl[:, order], limit[:, order])


def most_reward(rows: Sequence[Row], kl: float) -> float:
    """Reward of pi* at this KL, interpolated between its rows."""
    points = sorted((row["kl"], row["reward"]) for row in rows if row["method"] in ("sft", "pi_star"))
    kls, rewards = zip(*points, strict=True)
    return float(np.interp(kl, kls, rewards))


def at_equal_kl(curve: Curve, rows: Sequence[Row], kl: float) -> np.ndarray:
    """Interpolate the reward of each seed at this KL, (seeds,).

    It is the reward of pi*, less the gap to pi*, which is interpolated between the seed's policies. Interpolated
    rewards would lie below a concave frontier, the more so the further apart its points are.

    NaN beyond the highest KL of the policies, and below nine tenths of their lowest: the gap rises steeply from 0.
    """
    rewards = []
    for kls, gaps in zip(curve.kl, curve.limit - curve.reward, strict=True):
        order = kls.argsort()
        lowest, highest = 0.9 * kls.min(), kls.max()
        gap = np.interp(kl, [0.0, *kls[order]], [0.0, *gaps[order]])  # the reference has KL 0 and no gap
        rewards.append(most_reward(rows, kl) - gap if lowest <= kl <= highest else np.nan)
    return np.array(rewards)


def within_budget(curve: Curve, reference: Row, budgets: np.ndarray) -> np.ndarray:
    """Average each seed's highest reward within a budget over KL budgets, (seeds,).

    The highest reward is that of a policy or a mixture of two. Tossing a coin between two policies for each response
    gives the mean of their rewards, and at most the mean of their KLs.
    """
    scores = []
    for rewards, kls in zip(curve.reward, curve.kl, strict=True):
        policies = sorted(zip((0.0, *kls), (reference["reward"], *rewards), strict=True))
        mixtures = []  # rewards of each pair's mixtures, (budgets,)
        for (kl_1, reward_1), (kl_2, reward_2) in itertools.combinations(policies, 2):
            mixtures.append(np.interp(budgets, (kl_1, kl_2), (reward_1, reward_2), left=-np.inf))
        scores.append(np.max(mixtures, axis=0).mean())
    return np.array(scores)


def mean_and_interval(values: np.ndarray, sign: str = "") -> str:
    """Format a mean over seeds and its 95 % interval (Student's t).

    `-` if a value is missing. With a `sign`, an interval that excludes 0 is bold.
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


def tables(rows: Sequence[Row]) -> list[str]:
    """Make Markdown tables: best policies, rewards at equal KL, and differences."""
    return [
        table for table in (_make_peak_table(rows), _make_reward_table(rows), _make_difference_table(rows)) if table
    ]


def _make_peak_table(rows: Sequence[Row]) -> str:
    """Tabulate each method's best policy, and its policy of most KL."""
    lines = [["method", "best beta", "KL", "reward", "gap to pi*", "most KL", "reward there", "change"]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        best = int(curve.reward.mean(0).argmax())
        beta = "-" if curve.betas[best] is None else f"{curve.betas[best]:.2g}"
        best_reward, last_reward = curve.reward[:, best], curve.reward[:, -1]  # (seeds,)
        gap = curve.limit[:, best] - best_reward
        cells = [
            method,
            beta,
            f"{curve.kl[:, best].mean():.2f}",
            mean_and_interval(best_reward),
            mean_and_interval(gap),
        ]
        if best == len(curve.betas) - 1:  # the best policy has the most KL
            cells += ["-"] * 3
        else:
            change = mean_and_interval(last_reward - best_reward, "+")
            cells += [f"{curve.kl[:, -1].mean():.2f}", mean_and_interval(last_reward), change]
        lines.append(cells)
    return _format_table(lines)


def _make_reward_table(rows: Sequence[Row]) -> str:
    lines = [["reward at", *(f"KL {kl:g}" for kl in REWARD_KLS)]]
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        cells = [mean_and_interval(at_equal_kl(curve, rows, kl)) for kl in REWARD_KLS]
        if set(cells) != {"-"}:
            lines.append([method, *cells])
    best_of_rows = [{**row, "method": "best"} for row in rows if row["method"].startswith("best_of")]
    best_of = collect_curve(best_of_rows, "best", "n")
    lines.append(["best of N", *(mean_and_interval(at_equal_kl(best_of, rows, kl)) for kl in REWARD_KLS)])
    lines.append(["pi*", *(f"{most_reward(rows, kl):.2f}" for kl in REWARD_KLS)])
    return _format_table(lines)


def _make_difference_table(rows: Sequence[Row]) -> str:
    curves = {method: collect_curve(rows, method) for method in list_methods(rows)}
    compared = [(first, second) for first, second in COMPARED if first in curves and second in curves]
    lines = [["difference of rewards at", *(f"KL {kl:g}" for kl in DIFFERENCE_KLS)]]
    for first, second in compared:
        cells = []
        for kl in DIFFERENCE_KLS:
            difference = at_equal_kl(curves[first], rows, kl) - at_equal_kl(curves[second], rows, kl)  # (seeds,)
            cells.append(mean_and_interval(difference, "+"))
        lines.append([f"{first} - {second}", *cells])
    return _format_table(lines) if compared else ""


def format_controls(rows: Sequence[Row]) -> str:
    """Make Markdown tables of DPO without short responses, and reweighted."""
    header = ["symbols at least", "beta", "reward", "KL", "gap to pi*", "symbols", "of the shortest kind"]
    lines = [header]
    for reference in (row for row in rows if row["method"] == "sft"):
        shortest = str(reference["shortest"])
        lines.append([shortest, "reference", f"{reference['reward']:.2f}", "0", "0", *_format_lengths([reference])])
        own_rows = [row for row in rows if (row["method"], row["shortest"]) == ("dpo", reference["shortest"])]
        rewards_by_beta = []
        for beta in dict.fromkeys(row["beta"] for row in own_rows):
            seeds = [row for row in own_rows if row["beta"] == beta]
            rewards_by_beta.append(np.array([row["reward"] for row in seeds]))
            lines.append([shortest, f"{beta:g}", *_format_point(seeds), *_format_lengths(seeds)])
        change = mean_and_interval(rewards_by_beta[-1] - rewards_by_beta[0], "+")
        cells = [shortest, "change", change]
        lines.append(cells + [""] * (len(header) - len(cells)))
    scale_lines = [["log-ratio times", "reward", "KL", "gap to pi*"]]
    reweighted = [row for row in rows if row["method"] == "dpo_reweighted"]
    for scale in dict.fromkeys(row["scale"] for row in reweighted):
        scale_lines.append([f"{scale:g}", *_format_point([row for row in reweighted if row["scale"] == scale])])
    return f"{_format_table(lines)}\n\n{_format_table(scale_lines)}"


def _format_point(seeds: Sequence[Row]) -> list[str]:
    """Make cells of the mean reward, KL and gap to pi*."""
    reward, kl, limit = (np.array([row[key] for row in seeds]) for key in ("reward", "kl", "most_reward"))
    return [mean_and_interval(reward), mean_and_interval(kl), mean_and_interval(limit - reward)]


def _format_lengths(seeds: Sequence[Row]) -> list[str]:
    """Make cells of the mean length and shares of shortest responses."""
    shares = ", ".join(f"{100 * row['lengths'][row['shortest']]:.0f}" for row in seeds)
    return [f"{np.mean([row['length'] for row in seeds]):.1f}", f"{shares} %"]


def format_rates(rows: Sequence[Row], budgets: np.ndarray) -> str:
    """Make a Markdown table of `within_budget` by method and learning rate."""
    reference = next(row for row in rows if row["method"] == "sft")
    trained = [row for row in rows if row["seed"] is not None]
    rates = sorted({row["lr"] for row in trained})
    lines = [["method", *(f"lr {rate:g}" for rate in rates)]]
    for method in list_methods(rows):
        cells = [method]
        for rate in rates:
            curve = collect_curve([row for row in trained if row["lr"] == rate], method)
            cells.append(f"{within_budget(curve, reference, budgets).mean():.3f}")
        lines.append(cells)
    return _format_table(lines)


def _format_table(lines: Sequence[Sequence[str]]) -> str:
    header, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([header, f"|{'---|' * len(lines[0])}", *rows])
