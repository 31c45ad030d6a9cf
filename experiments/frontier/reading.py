"""Tables of the rows of `experiments.frontier`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

EQUAL_KL = (0.5, 1.0, 2.0, 3.0, 4.0)
COMPARED_KL = (1.0, 2.0, 3.0, 3.8, 5.0, 6.0)
COMPARED = (
    ("cdpo", "dpo"), ("ipo", "dpo"), ("dpo", "simpo"), ("dpo", "apo_zero"), ("online_dpo", "dpo"),
    ("online_dpo", "dpo_reweighted"), ("online_dpo", "dpo_once"), ("dpo", "dpo_noisy"), ("cdpo_noisy", "dpo_noisy"),
    ("ipo_noisy", "dpo_noisy"),
)  # fmt: skip
# of Student's t with 1, 2, ... degrees of freedom; more than 9 count as 9, which makes an interval too wide
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Row = dict[str, Any]


class Course(NamedTuple):
    """A method's rewards and KLs, (seeds, betas), in order of KL.

    `limit` is the highest reward at each KL.
    """

    betas: list[float | None]
    reward: np.ndarray
    kl: np.ndarray
    limit: np.ndarray


def methods_in(rows: Sequence[Row]) -> list[str]:
    """Methods that were trained on preferences."""
    return [*dict.fromkeys(row["method"] for row in rows if row["seed"] is not None)]


def describe_course(rows: Sequence[Row], method: str, along: str = "beta") -> Course:
    own = [row for row in rows if row["method"] == method]
    betas, seeds = (list(dict.fromkeys(row[key] for row in own)) for key in (along, "seed"))
    at = {(row["seed"], row[along]): row for row in own}
    reward, kl, limit = (
        np.array([[at[seed, beta][key] for beta in betas] for seed in seeds]) for key in ("reward", "kl", "most_reward")
    )
    order = kl.mean(0).argsort()
    return Course([betas[i] for i in order], reward[:, order], kl[:, order], limit[:, order])


def most_reward(rows: Sequence[Row], kl: float) -> float:
    """Reward of pi* at this KL, interpolated between its rows."""
    limit = sorted((row["kl"], row["reward"]) for row in rows if row["method"] in ("sft", "pi_star"))
    kls, rewards = zip(*limit, strict=True)
    return float(np.interp(kl, kls, rewards))


def at_equal_kl(course: Course, rows: Sequence[Row], kl: float) -> np.ndarray:
    """Reward of each seed at this KL, interpolated.

    It is that of pi*, less the gap interpolated between the seed's policies.

    NaN beyond the last policy's KL, and below nine tenths of the first's: the gap rises steeply from 0. Interpolated
    rewards would lie below a concave frontier, the more so the further apart its points are.
    """
    found = []
    for kls, gaps in zip(course.kl, course.limit - course.reward, strict=True):
        order = kls.argsort()
        x, y = np.array([0.0, *kls[order]]), np.array([0.0, *gaps[order]])
        found.append(most_reward(rows, kl) - np.interp(kl, x, y) if 0.9 * x[1] <= kl <= x[-1] else np.nan)
    return np.array(found)


def within_budget(course: Course, start: Row, budgets: np.ndarray) -> np.ndarray:
    """Mean over KL budgets of each seed's highest reward within one.

    By a policy or a mixture of two.

    A coin toss between two policies for each response gives the mean of their rewards, and at most that of their KLs.
    """
    found = []
    for rewards, kls in zip(course.reward, course.kl, strict=True):
        points = sorted(zip((0.0, *kls), (start["reward"], *rewards), strict=True))
        lines = [np.interp(budgets, *zip(*two, strict=True), left=-np.inf) for two in itertools.combinations(points, 2)]
        found.append(np.max(lines, axis=0).mean())
    return np.array(found)


def mean_and_interval(values: np.ndarray, sign: str = "") -> str:
    """Mean over seeds and its 95 % interval (Student's t).

    `-` if a value is missing, bold if it excludes 0.
    """
    if np.isnan(values).any():
        return "-"
    mean, n = values.mean(), len(values)
    if n == 1:
        return f"{mean:{sign}.2f}"
    half = T_975[min(n, len(T_975) + 1) - 2] * values.std(ddof=1) / np.sqrt(n)
    text = f"{mean:{sign}.2f} [{mean - half:{sign}.2f}, {mean + half:{sign}.2f}]"
    return f"**{text}**" if sign and abs(mean) > half else text


def tables(rows: Sequence[Row]) -> list[str]:
    """Markdown tables: best policies, rewards at equal KL, and differences."""
    return [table for table in (_peaks(rows), _equal_kl(rows), _differences(rows)) if table]


def _peaks(rows: Sequence[Row]) -> str:
    lines = [["method", "best beta", "KL", "reward", "gap to pi*", "most KL", "reward there", "change"]]
    for method in methods_in(rows):
        c = describe_course(rows, method)
        best = int(c.reward.mean(0).argmax())
        beta = "-" if c.betas[best] is None else f"{c.betas[best]:.2g}"
        gap, change = c.limit[:, best] - c.reward[:, best], c.reward[:, -1] - c.reward[:, best]
        last = [f"{c.kl[:, -1].mean():.2f}", mean_and_interval(c.reward[:, -1]), mean_and_interval(change, "+")]
        first = [f"{c.kl[:, best].mean():.2f}", *map(mean_and_interval, (c.reward[:, best], gap))]
        lines.append([method, beta, *first, *(last if best < len(c.betas) - 1 else ["-"] * 3)])
    return _table(lines)


def _equal_kl(rows: Sequence[Row]) -> str:
    lines = [["reward at", *(f"KL {kl:g}" for kl in EQUAL_KL)]]
    for method in methods_in(rows):
        c = describe_course(rows, method)
        cells = [mean_and_interval(at_equal_kl(c, rows, kl)) for kl in EQUAL_KL]
        lines += [[method, *cells]] if {*cells} != {"-"} else []
    best_of = describe_course(
        [{**row, "method": "best"} for row in rows if row["method"].startswith("best_of")], "best", "n"
    )
    lines.append(["best of N", *(mean_and_interval(at_equal_kl(best_of, rows, kl)) for kl in EQUAL_KL)])
    lines.append(["pi*", *(f"{most_reward(rows, kl):.2f}" for kl in EQUAL_KL)])
    return _table(lines)


def _differences(rows: Sequence[Row]) -> str:
    courses = {method: describe_course(rows, method) for method in methods_in(rows)}
    compared = [pair for pair in COMPARED if courses.keys() >= set(pair)]
    lines = [["difference of rewards at", *(f"KL {kl:g}" for kl in COMPARED_KL)]]
    for pair in compared:
        first, second = (np.array([at_equal_kl(courses[method], rows, kl) for kl in COMPARED_KL]) for method in pair)
        lines.append([" - ".join(pair), *(mean_and_interval(row, "+") for row in first - second)])
    return _table(lines) if compared else ""


def format_controls(rows: Sequence[Row]) -> str:
    """Markdown tables of DPO without short responses, and reweighted."""
    heads = ["symbols at least", "beta", "reward", "KL", "gap to pi*", "symbols", "of the shortest kind"]
    lines = [heads]
    for start in (row for row in rows if row["method"] == "sft"):
        least, rewards = str(start["shortest"]), []
        own = [row for row in rows if (row["method"], row["shortest"]) == ("dpo", start["shortest"])]
        lines.append([least, "reference", f"{start['reward']:.2f}", "0", "0", *_lengths([start])])
        for beta in dict.fromkeys(row["beta"] for row in own):
            seeds = [row for row in own if row["beta"] == beta]
            rewards.append(np.array([row["reward"] for row in seeds]))
            lines.append([least, f"{beta:g}", *_point(seeds), *_lengths(seeds)])
        lines.append([least, "change", mean_and_interval(rewards[-1] - rewards[0], "+"), *[""] * (len(heads) - 3)])
    scales = [["log-ratio times", "reward", "KL", "gap to pi*"]]
    reweighted = [row for row in rows if row["method"] == "dpo_reweighted"]
    for scale in dict.fromkeys(row["scale"] for row in reweighted):
        scales.append([f"{scale:g}", *_point([row for row in reweighted if row["scale"] == scale])])
    return f"{_table(lines)}\n\n{_table(scales)}"


def _point(seeds: Sequence[Row]) -> list[str]:
    reward, kl, limit = (np.array([row[key] for row in seeds]) for key in ("reward", "kl", "most_reward"))
    return [mean_and_interval(reward), mean_and_interval(kl), mean_and_interval(limit - reward)]


def _lengths(seeds: Sequence[Row]) -> list[str]:
    """Cells for the mean length and the shares of the least."""
    shares = ", ".join(f"{100 * row['lengths'][row['shortest']]:.0f}" for row in seeds)
    return [f"{np.mean([row['length'] for row in seeds]):.1f}", f"{shares} %"]


def format_rates(rows: Sequence[Row], budgets: np.ndarray) -> str:
    """Markdown table: the score of `within_budget` for each method and learning rate."""
    start = next(row for row in rows if row["method"] == "sft")
    trained = [row for row in rows if row["seed"] is not None]
    rates = sorted({row["lr"] for row in trained})
    lines = [["method", *(f"lr {rate:g}" for rate in rates)]]
    for method in methods_in(rows):
        of_rates = [[row for row in trained if row["lr"] == rate] for rate in rates]
        scores = [within_budget(describe_course(own, method), start, budgets).mean() for own in of_rates]
        lines.append([method, *(f"{score:.3f}" for score in scores)])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest])
