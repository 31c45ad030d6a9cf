"""Picture of `experiments.frontier`: reward against KL, and the limit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.frontier.jobs import Row
from experiments.frontier.reading import collect_curve, list_methods


class Theme(NamedTuple):
    """Colours of a picture, on a light or a dark page."""

    background: str
    ink: str
    muted: str
    grid: str
    colors: tuple[str, ...]  # of Okabe and Ito, whose colours colour-blind readers tell apart


OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#b5568c", "#c98a00", "#3c9bd0", "#6b6b6b")
OKABE_ITO_ON_DARK = ("#56b4e9", "#f08a3c", "#2fc796", "#e39ac6", "#f0c04a", "#8fb8ff", "#b8bcc2")
LIGHT = Theme("#ffffff", "#1b1f24", "#59616b", "#e6e8eb", OKABE_ITO)
DARK = Theme("#171b21", "#e8eaed", "#a0a8b3", "#2b313a", OKABE_ITO_ON_DARK)
SOLID, DASHED, DOTTED = "-", (0, (5, 1.5)), (0, (1, 1.5))
STYLES = {  # label, colour's index in the theme, marker, line
    "dpo": ("DPO", 0, "o", SOLID),
    "kto": ("KTO", 5, "s", DOTTED),
    "online_dpo": ("online DPO", 1, "o", SOLID),
    "preferred_sft": ("SFT on the chosen", 5, "P", SOLID),
    "unlikelihood": ("Unlikelihood", 4, "X", SOLID),
    "exact_rl": ("exact RL, true reward", 2, "*", SOLID),
    "rm_last": ("optimum of a reward model, last token", 3, "<", DASHED),
    "rm_tokens": ("optimum of a reward model, per token", 6, ">", DASHED),
}


def draw(rows: Sequence[Row], *, dark: bool) -> bytes:
    """Draw a PNG with lines through means over seeds."""
    theme = DARK if dark else LIGHT
    methods = [method for method in STYLES if method in list_methods(rows)]
    shown = [row for row in rows if row["method"] in methods]
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(7.0, 5.6), dpi=200, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis = picture.add_subplot()
        _draw_limit(axis, rows, theme)
        for method in methods:
            curve, (label, color_index, marker, line) = collect_curve(rows, method), STYLES[method]
            style = {"color": theme.colors[color_index], "linestyle": line, "marker": marker}
            axis.plot(curve.kl.mean(0), curve.reward.mean(0), **style, linewidth=1.5, markersize=4, label=label)
        highest_kl = max(row["kl"] for row in shown)
        lowest, highest = min(row["reward"] for row in shown), max(row["most_reward"] for row in shown)
        axis.set_xlim(-0.02 * highest_kl, 1.04 * highest_kl)
        axis.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.1 * (highest - lowest))
        axis.set_title("expected true reward", loc="left", fontsize=10, color=theme.ink)
        axis.set_xlabel("KL(policy || reference) in nats", color=theme.ink)
        axis.set_facecolor(theme.background)
        axis.grid(True, color=theme.grid, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=theme.muted, length=0)
        axis.spines[:].set_visible(False)
        picture.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=theme.ink)
        file = io.BytesIO()
        picture.savefig(file, format="png", facecolor=picture.get_facecolor(), metadata={"Software": None})
        return file.getvalue()


def _draw_limit(axis: Any, rows: Sequence[Row], theme: Theme) -> None:
    """Draw the reference and pi*, as means over tasks."""
    values: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        if row["method"] in ("sft", "pi_star"):
            values.setdefault((row["method"], row["beta"]), []).append((row["kl"], row["reward"]))
    # reward and KL rise together
    kls, rewards = np.array(sorted(np.mean(of_tasks, axis=0).tolist() for of_tasks in values.values())).T
    axis.fill_between(kls, rewards, 2 * max(rewards), color=theme.grid, alpha=0.6, linewidth=0)
    axis.text(0.03, 0.95, "no policy can be here", transform=axis.transAxes, va="top", fontsize=8.5, color=theme.muted)
    axis.plot(kls, rewards, color=theme.ink, linewidth=2, label="\N{GREEK SMALL LETTER PI}*, the optimum")
    axis.plot(kls[0], rewards[0], "*", color=theme.ink, markersize=11, zorder=5, label="reference (SFT)")
