"""What the rows of `scripts.frontier` say, in tables: peaks, what follows them, rewards at equal KL, gaps to pi*."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

EQUAL_KL = (0.5, 1.0, 2.0, 3.0, 4.0)
Row = dict[str, Any]


class Course(NamedTuple):
    """A method's rewards and KLs, (seeds, betas), in the order of mean KL; `limit` is the most reward at each KL."""

    betas: list[float | None]
    reward: np.ndarray
    kl: np.ndarray
    limit: np.ndarray


def methods_in(rows: Sequence[Row]) -> list[str]:
    """Those that were trained from preferences."""
    return [*dict.fromkeys(row["method"] for row in rows if row["seed"] is not None)]


def course_of(rows: Sequence[Row], method: str, along: str = "beta") -> Course:
    own = [row for row in rows if row["method"] == method]
    betas, seeds = (list(dict.fromkeys(row[key] for row in own)) for key in (along, "seed"))
    at = {(row["seed"], row[along]): row for row in own}
    reward, kl, limit = (
        np.array([[at[seed, beta][key] for beta in betas] for seed in seeds]) for key in ("reward", "kl", "most_reward")
    )
    order = kl.mean(0).argsort()
    return Course([betas[i] for i in order], reward[:, order], kl[:, order], limit[:, order])


def most_reward(rows: Sequence[Row], kl: float) -> float:
    """pi*'s at this KL, between the rows that have it, which lie close together."""
    limit = sorted((row["kl"], row["reward"]) for row in rows if row["method"] in ("sft", "pi_star"))
    kls, rewards = zip(*limit, strict=True)
    return float(np.interp(kl, kls, rewards))


def at_equal_kl(course: Course, rows: Sequence[Row], kl: float) -> np.ndarray:
    """The reward of each seed at this KL: what pi* has there, less a gap that lies on lines between those of the seed's
    policies. NaN beyond the last, and below nine tenths of the KL of the first: the gap rises steeply from 0.

    Lines between rewards would lie below a concave frontier, the further its points are apart.
    """
    found = []
    for kls, gaps in zip(course.kl, course.limit - course.reward, strict=True):
        order = kls.argsort()
        x, y = np.array([0.0, *kls[order]]), np.array([0.0, *gaps[order]])
        found.append(most_reward(rows, kl) - np.interp(kl, x, y) if 0.9 * x[1] <= kl <= x[-1] else np.nan)
    return np.array(found)


def within_budget(course: Course, start: Row, budgets: np.ndarray) -> np.ndarray:
    """For each seed the mean over budgets of KL of the most reward that its policies, or mixtures of two, have.

    Who tosses a coin for each response has the mean of two policies' rewards, and at most the mean of their KLs.
    """
    found = []
    for rewards, kls in zip(course.reward, course.kl, strict=True):
        points = sorted(zip((0.0, *kls), (start["reward"], *rewards), strict=True))
        lines = [np.interp(budgets, *zip(*two, strict=True), left=-np.inf) for two in itertools.combinations(points, 2)]
        found.append(np.max(lines, axis=0).mean())
    return np.array(found)


def _spread(values: np.ndarray) -> str:
    """Mean and, of several seeds, their standard deviation."""
    if np.isnan(values).any():
        return "-"
    return f"{values.mean():.2f}" + (f"±{values.std(ddof=1):.2f}" if len(values) > 1 else "")


def as_text(rows: Sequence[Row]) -> str:
    """Markdown: for each method its best beta, what more KL costs, and its reward at equal KL."""
    heads = ["method", "best beta", "reward", "at KL", "pi* there", "least held: reward", "at KL"]
    lines = [heads + [f"KL {kl:g}" for kl in EQUAL_KL]]
    for method in methods_in(rows):
        c = course_of(rows, method)
        best = int(c.reward.mean(0).argmax())
        cells = [c.reward[:, best], c.kl[:, best], c.limit[:, best], c.reward[:, -1], c.kl[:, -1]]
        beta = "-" if c.betas[best] is None else f"{c.betas[best]:g}"
        equal = [at_equal_kl(c, rows, kl) for kl in EQUAL_KL]
        lines.append([method, beta, *map(_spread, (*cells, *equal))])
    lines.append(["pi*", *["-"] * 6, *(f"{most_reward(rows, kl):.2f}" for kl in EQUAL_KL)])
    best_of = course_of([{**row, "method": "best"} for row in rows if row["method"].startswith("best_of")], "best", "n")
    lines.append(["best of N", *["-"] * 6, *(_spread(at_equal_kl(best_of, rows, kl)) for kl in EQUAL_KL)])
    return _table(lines)


def rates_as_text(rows: Sequence[Row], budgets: np.ndarray) -> str:
    """Markdown: for each method and learning rate the score of `within_budget`."""
    start = next(row for row in rows if row["method"] == "sft")
    trained = [row for row in rows if row["seed"] is not None]
    rates = sorted({row["lr"] for row in trained})
    lines = [["method", *(f"lr {rate:g}" for rate in rates)]]
    for method in methods_in(rows):
        of_rates = [[row for row in trained if row["lr"] == rate] for rate in rates]
        scores = [within_budget(course_of(own, method), start, budgets).mean() for own in of_rates]
        lines.append([method, *(f"{score:.3f}" for score in scores)])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest])
