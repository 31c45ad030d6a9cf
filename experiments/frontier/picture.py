"""Picture of `experiments.frontier`: reward and the gap to pi* against KL."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpo.analysis.curves import DARK, LIGHT, Theme
from experiments.frontier.jobs import Row
from experiments.frontier.methods import find_label
from experiments.frontier.reading import collect_curve, list_methods, select

SOLID, DASHED, DOTTED = "-", (0, (5, 1.5)), (0, (1, 1.5))
STYLES = {  # colour's index in the theme, marker, line; other methods are only in the tables
    "dpo": (0, "o", SOLID),
    "dpo_reweighted": (0, "s", DASHED),
    "cdpo": (6, "s", DOTTED),
    "ipo": (2, "^", DOTTED),
    "simpo": (4, "D", DOTTED),
    "apo_zero": (3, "v", DOTTED),
    "kto": (5, "s", DOTTED),
    "online_dpo": (1, "o", SOLID),
    "dpo_once": (0, "x", DOTTED),
    "preferred_sft": (5, "P", SOLID),
    "unlikelihood": (4, "X", SOLID),
    "reinforce": (1, "v", DASHED),
    "exact_rl": (2, "*", SOLID),
    "rm_last": (3, "<", SOLID),
    "rm_tokens": (6, ">", SOLID),
    "best_by_rm_tokens": (6, ".", DASHED),
}
WIDTH, HEIGHT = 4.9, 5.6  # inches of a panel


def draw(rows: Sequence[Row], *, dark: bool) -> bytes:
    """Draw a PNG with lines through means over seeds.

    Dots are policies along the runs of the first seed. Both panels have the same scales. Shown are rows of fixed
    length, or of free length if there are no others.
    """
    theme = DARK if dark else LIGHT
    fixed_length = any(row["fixed_length"] for row in rows)
    end_rows = select(rows, fixed_length=fixed_length)
    methods = [method for method in STYLES if method in list_methods(end_rows)]
    along = [row for row in rows if "share" in row and row["fixed_length"] == fixed_length]
    with _new_picture(2 * WIDTH, HEIGHT, theme) as picture:
        axes: Any = picture.subplots(1, 2)
        highest_kl = max(row["kl"] for row in end_rows if row["method"] in methods)
        _draw_limit(axes[0], end_rows, theme)
        _draw_best_of_n(axes, end_rows, theme, highest_kl)
        for method in methods:
            method_along = [row for row in along if row["method"] == method]
            _draw_method(axes, end_rows, method_along, method, theme)
        for axis, title in zip(axes, ("expected true reward", "gap to the optimum"), strict=True):
            axis.set_title(title, loc="left", fontsize=10, color=theme.ink)
            _style_axis(axis, theme)
            axis.set_xlim(-0.02 * highest_kl, 1.04 * highest_kl)
        _set_reward_ranges(axes, end_rows, methods, highest_kl)
        _add_legend(picture, axes[0], theme)
        return _to_png(picture)


def _set_reward_ranges(axes: Any, rows: Sequence[Row], methods: Sequence[str], highest_kl: float) -> None:
    """Give the panels of rewards and of gaps the same scale."""
    shown = [row for row in rows if row["method"] in methods]
    rewards = [row["reward"] for row in rows if row["method"] in (*methods, "sft")]
    highest = max(row["reward"] for row in rows if row["kl"] <= 1.1 * highest_kl)
    widest_gap = max(row["most_reward"] - row["reward"] for row in shown)
    span = 1.1 * max(highest - min(rewards), widest_gap)
    axes[0].set_ylim(min(rewards) - 0.05 * span, min(rewards) + 0.95 * span)
    axes[1].set_ylim(0.95 * span, -0.05 * span)  # inverted: better policies are higher in both panels


def _average(rows: Sequence[Row], key: str) -> np.ndarray:
    """Average values of pi* or best-of-N over tasks, in increasing order."""
    values: dict[Any, list[float]] = {}
    for row in rows:
        values.setdefault((row["method"], row["beta"]), []).append(row[key])
    return np.sort([np.mean(of_tasks) for of_tasks in values.values()])  # reward and KL rise together


def _draw_limit(axis: Any, rows: Sequence[Row], theme: Theme) -> None:
    """Draw the reference and pi*."""
    limit_rows = [row for row in rows if row["method"] in ("sft", "pi_star")]
    kls, rewards = (_average(limit_rows, key) for key in ("kl", "reward"))
    axis.fill_between(kls, rewards, 2 * max(rewards), color=theme.grid, alpha=0.6, linewidth=0)
    axis.text(0.03, 0.95, "no policy can be here", transform=axis.transAxes, va="top", fontsize=8.5, color=theme.muted)
    axis.plot(kls, rewards, color=theme.ink, linewidth=2, label="\N{GREEK SMALL LETTER PI}*, the optimum")
    axis.plot(kls[0], rewards[0], "*", color=theme.ink, markersize=11, zorder=5, label="reference (SFT)")


def _draw_best_of_n(axes: Any, rows: Sequence[Row], theme: Theme, highest_kl: float) -> None:
    best_of_n = [row for row in rows if row["method"].startswith("best_of_")]
    kls, rewards, limits = (_average(best_of_n, key) for key in ("kl", "reward", "most_reward"))
    kls, rewards, limits = (values[: np.searchsorted(kls, highest_kl)] for values in (kls, rewards, limits))
    style = {"color": theme.muted, "linewidth": 1.3, "linestyle": (0, (4, 2)), "marker": ".", "markersize": 4}
    axes[0].plot(kls, rewards, **style, label="best of N by the true reward")
    axes[1].plot(kls, limits - rewards, **style)


def _draw_method(axes: Any, rows: Sequence[Row], along: Sequence[Row], method: str, theme: Theme) -> None:
    """Draw a method's means, and dots for policies along its runs."""
    curve = collect_curve(rows, method)
    color_index, marker, line = STYLES[method]
    style = {"color": theme.colors[color_index], "linestyle": line, "linewidth": 1.5, "marker": marker, "markersize": 4}
    dots = {"color": theme.colors[color_index], "linewidth": 0, "marker": ".", "markersize": 2.5, "alpha": 0.5}
    kls = [row["kl"] for row in along]
    rewards = np.array([row["reward"] for row in along])
    gaps = np.array([row["most_reward"] for row in along]) - rewards
    for axis, values, dot_values in (
        (axes[0], curve.reward, rewards),
        (axes[1], curve.limit - curve.reward, gaps),
    ):
        axis.plot(curve.kl.mean(0), values.mean(0), **style, label=find_label(method))
        axis.plot(kls, dot_values, **dots)


@contextmanager
def _new_picture(width: float, height: float, theme: Theme) -> Iterator[Figure]:
    """Make a figure of this width and height in inches."""
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(width, height), dpi=200, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


def _style_axis(axis: Any, theme: Theme) -> None:
    """Style a panel whose horizontal axis is KL."""
    axis.set_xlabel("KL(policy || reference) in nats", color=theme.ink)
    axis.set_facecolor(theme.background)
    axis.grid(True, color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=theme.muted, length=0)
    axis.spines[:].set_visible(False)


def _add_legend(picture: Figure, axis: Any, theme: Theme) -> None:
    """Put the legend of a panel below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=theme.ink)


def _to_png(picture: Figure) -> bytes:
    file = io.BytesIO()
    picture.savefig(file, format="png", facecolor=picture.get_facecolor(), metadata={"Software": None})
    return file.getvalue()
