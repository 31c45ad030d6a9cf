"""Picture of the demo: kinds of samples before and after DPO."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpo.analysis.curves import DARK, LIGHT, Theme
from dpo.data.demo import Shares

Change = tuple[Shares, Shares]  # shares of answers before and after DPO
STAGES = ("before DPO", "after DPO")
TITLE = "answers to questions that the model was not trained on"
ALT = "Bars of the courteous, curt and broken answers before and after DPO"  # the caption has the numbers
KINDS = {"courteous": 2, "curt": 6, "broken": 1}  # a field of `Shares`: its colour's index in the theme


def draw(changes: Sequence[Change], *, dark: bool) -> bytes:
    """Draw a PNG with a bar for each stage and run.

    A bar's parts are the shares of the kinds of answers.
    """
    theme = DARK if dark else LIGHT
    thickness = 0.8 / len(changes)  # stages are 1 apart
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(6, 2.7), dpi=260, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis: Any = picture.subplots()
        for stage in range(len(STAGES)):
            for i, change in enumerate(changes):
                y = stage - 0.4 + (i + 0.5) * thickness
                draw_bar(axis, change[stage], y, 0.94 * thickness, theme)
        axis.set_yticks((0, 1), STAGES, fontsize=11, fontweight="bold", color=theme.ink)
        axis.set_ylim(1.45, -0.45)  # the first stage is at the top
        axis.set_xlim(0, 1.2)  # leaves space for the text to the right of a bar
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.set_facecolor(theme.background)
        axis.spines[:].set_visible(False)
        axis.set_title(TITLE, loc="left", fontsize=10, color=theme.muted)
        file = io.BytesIO()
        picture.savefig(file, format="png", facecolor=theme.background, metadata={"Software": None})
    return file.getvalue()


def draw_bar(axis: Any, shares: Shares, y: float, thickness: float, theme: Theme) -> None:
    """Draw the shares of a run's answers side by side."""
    left = 0.0
    for kind, color in KINDS.items():
        share = getattr(shares, kind)
        axis.barh(y, share, thickness, left=left, color=theme.colors[color])
        if share >= 0.3:  # wide enough for a label
            style = {"va": "center", "color": theme.background, "fontsize": 8.5, "fontweight": "bold"}
            axis.text(left + 0.01, y, f"{percent(share)} {kind}", **style)
        left += share
    # the broken answers are usually the thinnest part, so their label is beside the bar
    axis.text(1.01, y, f"{percent(shares.broken)} broken", va="center", color=theme.ink)


def describe(changes: Sequence[Change]) -> str:
    """Describe the picture in words."""

    def format_range(stage: int, kind: str) -> str:
        shares = [getattr(change[stage], kind) for change in changes]
        lowest, highest = percent(min(shares)), percent(max(shares))
        return lowest if lowest == highest else f"{lowest.removesuffix(' %')} to {highest}"

    runs = f" Each of {len(changes)} seeds has a bar." if len(changes) > 1 else ""
    return (
        "Of the answers to questions that the model was not trained on, "
        f"{format_range(0, 'courteous')} are courteous before DPO and {format_range(1, 'courteous')} after it; "
        f"{format_range(0, 'broken')} are broken sentences before and {format_range(1, 'broken')} after.{runs}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
