"""First picture of the demo's page: kinds of samples before and after DPO."""

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
KINDS = (("courteous", 2), ("curt", 6), ("broken", 1))  # a share, and its colour's index in the theme


def draw(changes: Sequence[Change], *, dark: bool) -> bytes:
    """Draw a PNG with bars of each run's samples before and after DPO, divided into courteous, curt and broken."""
    theme = DARK if dark else LIGHT
    thickness = 0.8 / len(changes)
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(6, 2.7), dpi=260, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis: Any = picture.subplots()
        for stage in range(2):
            for i, change in enumerate(changes):
                top = stage + i * thickness - 0.4 + thickness / 2
                left = 0.0
                for kind, color in KINDS:
                    share = getattr(change[stage], kind)
                    axis.barh(top, share, 0.94 * thickness, left=left, color=theme.colors[color])
                    if share >= 0.3:  # room for its name
                        style = {"va": "center", "color": theme.background, "fontsize": 8.5, "fontweight": "bold"}
                        axis.text(left + 0.01, top, f"{percent(share)} {kind}", **style)
                    left += share
                broken = f"{percent(change[stage].broken)} broken"
                axis.text(1.01, top, broken, va="center", color=theme.ink)
        axis.set_yticks((0, 1), STAGES, fontsize=11, fontweight="bold", color=theme.ink)
        axis.set_ylim(1.45, -0.45)
        axis.set_xlim(0, 1.2)  # room for the share that is too thin to name
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.set_facecolor(theme.background)
        for spine in axis.spines.values():
            spine.set_visible(False)
        axis.set_title(TITLE, loc="left", fontsize=10, color=theme.muted)
        file = io.BytesIO()
        picture.savefig(file, format="png", facecolor=theme.background, metadata={"Software": None})
    return file.getvalue()


def describe(changes: Sequence[Change]) -> str:
    """Describe the picture in words."""
    before, after = (
        {kind: _between([getattr(change[stage], kind) for change in changes]) for kind, _ in KINDS}
        for stage in range(2)
    )
    runs = f" Each of {len(changes)} seeds has a bar." if len(changes) > 1 else ""
    return (
        "Of the answers to questions that the model was not trained on, "
        f"{before['courteous']} are courteous before DPO and {after['courteous']} after it; "
        f"{before['broken']} are broken sentences before and {after['broken']} after.{runs}"
    )


def _between(shares: Sequence[float]) -> str:
    least, most = percent(min(shares)), percent(max(shares))
    return least if least == most else f"{least.removesuffix(' %')} to {most}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
