"""Picture of `experiments.frontier`: reward against KL, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.frontier.jobs import Row
from experiments.frontier.reading import collect_curve, list_methods

INK, MUTED, GRID = "#1b1f24", "#59616b", "#e6e8eb"
SOLID, DASHED, DOTTED = "-", (0, (5, 1.5)), (0, (1, 1.5))
STYLES = {  # label, colour (of Okabe and Ito, which colour-blind readers tell apart), marker, line
    "dpo": ("DPO", "#0072b2", "o", SOLID),
    "kto": ("KTO", "#3c9bd0", "s", DOTTED),
    "online_dpo": ("online DPO", "#d55e00", "o", SOLID),
    "preferred_sft": ("SFT on the chosen", "#3c9bd0", "P", SOLID),
    "unlikelihood": ("Unlikelihood", "#c98a00", "X", SOLID),
    "exact_rl": ("exact RL, true reward", "#009e73", "*", SOLID),
    "rm_last": ("optimum of a reward model, last token", "#b5568c", "<", DASHED),
    "rm_tokens": ("optimum of a reward model, per token", "#6b6b6b", ">", DASHED),
}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw a task's limit, and lines through means over seeds."""
    picture = Figure(figsize=(7.0, 5.6), dpi=200, layout="constrained")
    axis = picture.add_subplot()
    # the reference and pi*, whose reward and KL rise together
    kls, rewards = np.array(sorted((row["kl"], row["reward"]) for row in rows if row["seed"] is None)).T
    axis.fill_between(kls, rewards, 2 * max(rewards), color=GRID, alpha=0.6, linewidth=0)
    axis.text(0.03, 0.95, "no policy can be here", transform=axis.transAxes, va="top", fontsize=8.5, color=MUTED)
    axis.plot(kls, rewards, color=INK, linewidth=2, label="\N{GREEK SMALL LETTER PI}*, the optimum")
    axis.plot(kls[0], rewards[0], "*", color=INK, markersize=11, zorder=5, label="reference (SFT)")
    for method in list_methods(rows):
        curve, (label, color, marker, line) = collect_curve(rows, method), STYLES[method]
        style = {"color": color, "linestyle": line, "marker": marker}
        axis.plot(curve.kl.mean(0), curve.reward.mean(0), **style, linewidth=1.5, markersize=4, label=label)
    shown = [row for row in rows if row["seed"] is not None]
    highest_kl = max(row["kl"] for row in shown)
    lowest, highest = min(row["reward"] for row in shown), max(row["most_reward"] for row in shown)
    axis.set_xlim(-0.02 * highest_kl, 1.04 * highest_kl)
    axis.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.1 * (highest - lowest))
    axis.set_title("expected true reward", loc="left", fontsize=10)
    axis.set_xlabel("KL(policy || reference) in nats")
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, length=0)
    axis.spines[:].set_visible(False)
    picture.legend(loc="outside lower center", ncols=2, frameon=False)
    picture.savefig(file)
