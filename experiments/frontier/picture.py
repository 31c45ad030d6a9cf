"""Picture of `experiments.frontier`: expected true reward against KL."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpo.analysis.curves import DARK, LIGHT, Theme
from experiments.frontier.methods import METHODS
from experiments.frontier.reading import Row, collect_curve, list_methods

STYLES = {  # colour's index in the theme, marker
    "dpo": (0, "o"),
    "cdpo": (6, "s"),
    "ipo": (2, "^"),
    "simpo": (4, "D"),
    "apo_zero": (3, "v"),
    "online_dpo": (1, "o"),
    "preferred_sft": (5, "P"),
}
CONTROL = "dpo_once"  # drawn as a broken line, without a dot for each run
WIDTH, HEIGHT = 4.9, 4.9  # inches of a panel


def draw(rows: Sequence[Row], *, dark: bool) -> bytes:
    """Draw a PNG: a dot per run, lines through means over seeds."""
    theme = DARK if dark else LIGHT
    noisy = [method for method in list_methods(rows) if METHODS[method].noisy]
    clean = [method for method in list_methods(rows) if not METHODS[method].noisy]
    panels = [clean, noisy] if noisy else [clean]
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        size = WIDTH * len(panels), HEIGHT
        picture = Figure(figsize=size, dpi=200, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        axes: Any
        [axes] = picture.subplots(1, len(panels), sharey=True, squeeze=False)
        for axis, methods in zip(axes, panels, strict=True):
            highest_kl = max(row["kl"] for row in rows if row["method"] in methods)
            _draw_known(axis, rows, theme, highest_kl)
            for method in methods:
                _draw_method(axis, rows, method, theme)
            _style_axis(axis, theme, highest_kl)
        axes[0].set_ylim(*_find_reward_range(rows))
        axes[0].set_ylabel("expected true reward", color=theme.ink)
        axes[0].set_title("labels by Bradley and Terry's model", loc="left", fontsize=10, color=theme.ink)
        if noisy:
            noise = next(row["label_noise"] for row in rows if row.get("label_noise"))
            title = f"{100 * noise:.0f} % of the labels flipped (dotted: none)"
            axes[1].set_title(title, loc="left", fontsize=10, color=theme.ink)
            # for comparison, the same methods without noise
            for method in sorted({name.removesuffix("_noisy") for name in noisy} & set(clean)):
                _draw_method(axes[1], rows, method, theme, dotted=True)
        handles, labels = axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink)
        file = io.BytesIO()
        picture.savefig(file, format="png", facecolor=theme.background, metadata={"Software": None})
    return file.getvalue()


def _find_reward_range(rows: Sequence[Row]) -> tuple[float, float]:
    """Find the range of rewards that the picture shows.

    Rows of trained policies have a seed. Policies of far more KL than theirs are not shown.
    """
    trained = [row for row in rows if row["seed"] is not None]
    highest_kl = max(row["kl"] for row in trained)
    lowest = min(row["reward"] for row in rows if row["seed"] is not None or row["method"] == "sft")
    highest = max(row["reward"] for row in rows if row["kl"] <= 1.1 * highest_kl)
    return lowest - 0.08 * (highest - lowest), highest + 0.06 * (highest - lowest)


def _draw_known(axis: Any, rows: Sequence[Row], theme: Theme, highest_kl: float) -> None:
    """Draw the policies that need no training: the reference, pi* and best-of-N."""
    [reference] = [row for row in rows if row["method"] == "sft"]
    optimal = sorted((row for row in rows if row["method"] == "pi_star"), key=lambda row: row["kl"])
    kls, rewards = ([reference[key], *(row[key] for row in optimal)] for key in ("kl", "reward"))
    axis.fill_between(kls, rewards, 2 * max(rewards), color=theme.grid, alpha=0.6, linewidth=0)
    axis.text(0.03, 0.95, "no policy can be here", transform=axis.transAxes, va="top", fontsize=8.5, color=theme.muted)
    axis.plot(kls, rewards, color=theme.ink, linewidth=2, label="\N{GREEK SMALL LETTER PI}*, the optimum")
    best_of_n = [row for row in rows if row["method"].startswith("best_of_") and row["kl"] < highest_kl]
    kls, rewards = ([reference[key], *(row[key] for row in best_of_n)] for key in ("kl", "reward"))
    style = {"color": theme.muted, "linewidth": 1.3, "linestyle": (0, (4, 2)), "marker": ".", "markersize": 4}
    axis.plot(kls, rewards, **style, label=f"best of 2, 4, ..., {best_of_n[-1]['n']:,}")
    axis.plot(
        reference["kl"], reference["reward"], "*", color=theme.ink, markersize=11, zorder=5, label="reference (SFT)"
    )


def _draw_method(axis: Any, rows: Sequence[Row], method: str, theme: Theme, *, dotted: bool = False) -> None:
    """Draw a method's means over seeds, and a dot for each run.

    The control, and a `dotted` line, have no dots.
    """
    curve, label = collect_curve(rows, method), METHODS[method].label
    kl, reward = curve.kl.mean(0), curve.reward.mean(0)
    color_index, marker = STYLES["dpo" if method == CONTROL else method.removesuffix("_noisy")]
    color = theme.colors[color_index]
    if dotted:
        axis.plot(kl, reward, linestyle=":", color=color, linewidth=1.3, alpha=0.8)
        return
    if method == CONTROL:
        dash_dotted = (0, (5, 1.5, 1, 1.5))
        axis.plot(kl, reward, linestyle=dash_dotted, color=color, linewidth=1.3, alpha=0.8, label=label)
        return
    axis.plot(curve.kl.ravel(), curve.reward.ravel(), marker, color=color, markersize=3.2, alpha=0.45, linewidth=0)
    axis.plot(kl, reward, color=color, linewidth=1.7, marker=marker, markersize=5.5, zorder=4, label=label)


def _style_axis(axis: Any, theme: Theme, highest_kl: float) -> None:
    axis.set_xlim(-0.02 * highest_kl, 1.04 * highest_kl)
    axis.set_xlabel("KL(policy || reference) in nats", color=theme.ink)
    axis.set_facecolor(theme.background)
    axis.grid(True, color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=theme.muted, length=0)
    axis.spines[:].set_visible(False)
