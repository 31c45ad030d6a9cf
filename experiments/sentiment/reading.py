"""Tables and picture of the rows of `experiments.sentiment`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpo.analysis.curves import DARK, LIGHT
from experiments.reading import Estimate, add_legend, estimate_mean, format_table, new_picture, style_axis, to_png
from experiments.runs import Row
from experiments.sentiment.sweep import METHODS

REFERENCE, BEST = "reference", "best_of_n"
PLANNED_KLS = (0.2, 0.5, 1.0, 2.0)
PLANNED = (  # the first method's reward less the second's at equal KL, planned before the runs
    ("ipo", "dpo"),
    ("online_dpo", "dpo"),
    ("dpo", "sft_chosen"),
    ("dpo", BEST),
    ("online_dpo", BEST),
)
MARKERS = {"dpo": "o", "online_dpo": "s", "ipo": "^", "sft_chosen": "P"}
WIDTH, HEIGHT = 6.4, 5.2  # inches
KL_TICKS = (0, 0.25, 1, 2, 4, 6, 8, 12, 16, 24, 32)  # ticks beyond the last policy are not drawn


def list_policies(rows: Sequence[Row], method: str) -> list[Row]:
    """List a method's rows in order of KL."""
    return sorted((row for row in rows if row["method"] == method), key=lambda row: row["kl"])


def at_kl(rows: Sequence[Row], method: str, kl: float) -> np.ndarray | None:
    """Interpolate a method's rewards at this KL, (prompts,).

    The interpolation is linear in KL between the reference and the method's policies. None above their highest KL.
    """
    policies = [*list_policies(rows, REFERENCE), *list_policies(rows, method)]
    kls = [row["kl"] for row in policies]
    if len(policies) < 2 or kl > max(kls):
        return None
    rewards = np.array([row["rewards"] for row in policies]).T  # (prompts, policies)
    return np.array([np.interp(kl, kls, prompt_rewards) for prompt_rewards in rewards])


def format_tables(rows: Sequence[Row]) -> str:
    """Make the tables of policies and of planned comparisons."""
    lines = [["policy", "beta, passes, or N", "KL", "true reward", "more than the reference", "tokens"]]
    for method in (REFERENCE, *METHODS, BEST):
        for row in list_policies(rows, method):
            estimates = [Estimate(row[key], row[f"{key}_half_width"]) for key in ("kl", "reward", "gain")]
            cells = [f"{estimate}" for estimate in estimates]
            if method in (REFERENCE, BEST):
                cells[0] = f"{row['kl']:.2f}"  # from a formula, without an interval
            lines.append([method, f"{row['knob']:g}", *cells, f"{row['length']:.1f}" if "length" in row else ""])
    planned = [["difference of rewards", *(f"KL {kl:g}" for kl in PLANNED_KLS)]]
    for first, second in PLANNED:
        cells = []
        for kl in PLANNED_KLS:
            ours, theirs = at_kl(rows, first, kl), at_kl(rows, second, kl)
            if ours is None or theirs is None:
                cells.append("-")
            else:
                cells.append(f"{estimate_mean(ours - theirs, range(len(ours))):+.2f}")
        planned.append([f"{first} - {second}", *cells])
    return "\n\n".join(format_table(table) for table in (lines, planned))


def _signed_root(values: Any) -> Any:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: Any) -> Any:
    return np.sign(values) * np.square(values)


def draw(rows: Sequence[Row], *, dark: bool) -> bytes:
    """Draw a PNG of reward against KL, on a square-root scale.

    Bars are 95 % intervals.
    """
    theme = DARK if dark else LIGHT
    with new_picture(WIDTH, HEIGHT, theme) as picture:
        axis: Any = picture.subplots()
        [reference] = list_policies(rows, REFERENCE)
        trained = [row["kl"] for row in rows if row["method"] in METHODS]
        best = [row for row in list_policies(rows, BEST) if row["kl"] <= 1.5 * max(trained, default=np.inf)]
        line = [reference, *best]
        axis.plot(
            [row["kl"] for row in line],
            [row["reward"] for row in line],
            **{"color": theme.muted, "linestyle": (0, (4, 2)), "marker": ".", "label": "best of N"},
        )
        for color, name in zip(theme.colors, METHODS, strict=False):
            policies = list_policies(rows, name)
            if policies:
                axis.errorbar(
                    [row["kl"] for row in policies],
                    [row["reward"] for row in policies],
                    xerr=[row["kl_half_width"] for row in policies],
                    yerr=[row["reward_half_width"] for row in policies],
                    **{"color": color, "marker": MARKERS[name], "markersize": 5, "elinewidth": 1},
                    label=METHODS[name].label,
                )
        axis.plot(0, reference["reward"], "*", color=theme.ink, markersize=11, zorder=5, label="reference")
        style_axis(axis, theme)
        last = axis.get_xlim()[1]
        axis.set_xscale("function", functions=(_signed_root, _signed_square))  # most policies have a small KL
        axis.set_xlim(-0.02, last)
        axis.set_xticks([tick for tick in KL_TICKS if tick < last], [f"{tick:g}" for tick in KL_TICKS if tick < last])
        axis.set_title(
            "true reward, in standard deviations of the reference's", loc="left", fontsize=10, color=theme.ink
        )
        add_legend(picture, axis, theme)
        return to_png(picture)
