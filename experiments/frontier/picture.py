"""Picture of `experiments.frontier`: reward against KL, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.frontier.jobs import Row
from experiments.frontier.reading import collect_curve, list_methods

INK = "#1b1f24"
MUTED = "#59616b"
GRID = "#e6e8eb"
SOLID = "-"
DASHED = (0, (5, 1.5))
DOTTED = (0, (1, 1.5))
STYLES = {  # of methods; the colours are Okabe and Ito's, which colour-blind readers tell apart
    "dpo": {
        "label": "DPO",
        "color": "#0072b2",
        "marker": "o",
        "linestyle": SOLID,
    },
    "kto": {
        "label": "KTO",
        "color": "#3c9bd0",
        "marker": "s",
        "linestyle": DOTTED,
    },
    "online_dpo": {
        "label": "online DPO",
        "color": "#d55e00",
        "marker": "o",
        "linestyle": SOLID,
    },
    "preferred_sft": {
        "label": "SFT on the chosen",
        "color": "#3c9bd0",
        "marker": "P",
        "linestyle": SOLID,
    },
    "unlikelihood": {
        "label": "Unlikelihood",
        "color": "#c98a00",
        "marker": "X",
        "linestyle": SOLID,
    },
    "exact_rl": {
        "label": "exact RL, true reward",
        "color": "#009e73",
        "marker": "*",
        "linestyle": SOLID,
    },
    "rm_last": {
        "label": "optimum of a reward model, last token",
        "color": "#b5568c",
        "marker": "<",
        "linestyle": DASHED,
    },
    "rm_tokens": {
        "label": "optimum of a reward model, per token",
        "color": "#6b6b6b",
        "marker": ">",
        "linestyle": DASHED,
    },
}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the optimum's curve of reward against KL, and each method's, of means over seeds; save the picture."""
    picture = Figure(figsize=(7.0, 5.6), dpi=200, layout="constrained")
    axis = picture.add_subplot()
    # This is the curve from the reference to pi*, whose reward and KL rise together.
    known = sorted((row["kl"], row["reward"]) for row in rows if row["seed"] is None)
    kls, rewards = np.array(known).T
    axis.fill_between(
        kls,
        rewards,
        2 * max(rewards),
        color=GRID,
        alpha=0.6,
        linewidth=0,
    )
    axis.text(
        0.03,
        0.95,
        "no policy can be here",
        transform=axis.transAxes,
        va="top",
        fontsize=8.5,
        color=MUTED,
    )
    axis.plot(
        kls,
        rewards,
        color=INK,
        linewidth=2,
        label="\N{GREEK SMALL LETTER PI}*, the optimum",
    )
    axis.plot(
        kls[0],
        rewards[0],
        "*",
        color=INK,
        markersize=11,
        zorder=5,
        label="reference (SFT)",
    )
    for method in list_methods(rows):
        curve = collect_curve(rows, method)
        axis.plot(
            curve.kl.mean(0),
            curve.reward.mean(0),
            linewidth=1.5,
            markersize=4,
            **STYLES[method],
        )
    trained = [row for row in rows if row["seed"] is not None]
    highest_kl = max(row["kl"] for row in trained)
    lowest = min(row["reward"] for row in trained)
    highest = max(row["most_reward"] for row in trained)
    height = highest - lowest
    axis.set_xlim(-0.02 * highest_kl, 1.04 * highest_kl)
    axis.set_ylim(lowest - 0.05 * height, highest + 0.1 * height)
    axis.set_title("expected true reward", loc="left", fontsize=10)
    axis.set_xlabel("KL(policy || reference) in nats")
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, length=0)
    axis.spines[:].set_visible(False)
    picture.legend(loc="outside lower center", ncols=2, frameon=False)
    picture.savefig(file)
