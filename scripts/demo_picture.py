"""Picture of the demo: kinds of samples before and after DPO."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpo.analysis.curves import DARK, LIGHT
from dpo.data.demo import Shares

Change = tuple[Shares, Shares]  # before and after DPO
STAGES = ("before DPO", "after DPO")
TITLE = "answers to questions that the model was not trained on"
ALT = "Bars of the courteous, curt and broken answers before and after DPO"  # a caption has the numbers
KINDS = {"courteous": 2, "curt": 6, "broken": 1}  # a share, and its colour's index in the theme


def draw(changes: Sequence[Change], *, dark: bool) -> bytes:
    """Draw a PNG with bars of each run's samples, by kind."""
    theme = DARK if dark else LIGHT
    thickness = 0.8 / len(changes)
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(6, 2.7), dpi=260, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis: Any = picture.subplots()
        for stage, i in ((stage, i) for stage in range(2) for i in range(len(changes))):
            shares, top, left = changes[i][stage], stage + i * thickness - 0.4 + thickness / 2, 0.0
            for kind, color in KINDS.items():
                share = getattr(shares, kind)
                axis.barh(top, share, 0.94 * thickness, left=left, color=theme.colors[color])
                if share >= 0.3:  # room for its name
                    style = {"va": "center", "color": theme.background, "fontsize": 8.5, "fontweight": "bold"}
                    axis.text(left + 0.01, top, f"{percent(share)} {kind}", **style)
                left += share
            axis.text(1.01, top, f"{percent(shares.broken)} broken", va="center", color=theme.ink)
        axis.set_yticks((0, 1), STAGES, fontsize=11, fontweight="bold", color=theme.ink)
        axis.set_ylim(1.45, -0.45)
        axis.set_xlim(0, 1.2)  # room for the share that is too thin to name
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.set_facecolor(theme.background)
        axis.spines[:].set_visible(False)
        axis.set_title(TITLE, loc="left", fontsize=10, color=theme.muted)
        file = io.BytesIO()
        picture.savefig(file, format="png", facecolor=theme.background, metadata={"Software": None})
    return file.getvalue()


def describe(changes: Sequence[Change]) -> str:
    """Describe the picture in words."""

    def between(stage: int, kind: str) -> str:
        shares = [getattr(change[stage], kind) for change in changes]
        least, most = percent(min(shares)), percent(max(shares))
        return least if least == most else f"{least.removesuffix(' %')} to {most}"

    runs = f" Each of {len(changes)} seeds has a bar." if len(changes) > 1 else ""
    return (
        "Of the answers to questions that the model was not trained on, "
        f"{between(0, 'courteous')} are courteous before DPO and {between(1, 'courteous')} after it; "
        f"{between(0, 'broken')} are broken sentences before and {between(1, 'broken')} after.{runs}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
