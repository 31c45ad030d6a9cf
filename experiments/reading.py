"""Means with intervals, tables and pictures of all experiments."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpo.analysis.curves import Theme

NORMAL_975 = 1.96


class Estimate(NamedTuple):
    """A mean with half the width of its 95 % interval."""

    mean: float
    half_width: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.mean:{spec}} ± {self.half_width:{spec.lstrip('+')}}"


def estimate_mean(values: Any, clusters: Any, strata: Any = None) -> Estimate:
    """Estimate the mean of values, (n,), that are independent only between clusters.

    With `strata` the estimate is the mean of the strata's means. The interval is normal, by linearization: a value's
    influence on the mean is its distance from its stratum's mean, divided by the stratum's size and by the number of
    strata. Influences add up within a cluster.
    """
    values = np.asarray(values, float)
    if strata is None:
        strata = np.zeros(len(values))
    _, clusters = np.unique(np.asarray(clusters), return_inverse=True)  # the number of each value's cluster, (n,)
    _, strata = np.unique(strata, return_inverse=True)  # the number of each value's stratum, (n,)
    sizes = np.bincount(strata)  # (strata,)
    means = np.bincount(strata, values) / sizes  # (strata,)
    influences = (values - means[strata]) / (sizes[strata] * len(sizes))  # (n,)
    by_cluster = np.bincount(clusters, influences)  # (clusters,)
    n = len(by_cluster)
    error = np.sqrt((by_cluster**2).sum() * n / (n - 1)) if n > 1 else np.nan
    return Estimate(float(means.mean()), float(NORMAL_975 * error))


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; the first line is its header."""
    header, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([header, f"|{'---|' * len(lines[0])}", *rows])


# --- pictures ---------------------------------------------------------------------------------------------------------


@contextmanager
def new_picture(width: float, height: float, theme: Theme) -> Iterator[Figure]:
    """Make a figure of this width and height in inches."""
    with mpl.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        picture = Figure(figsize=(width, height), dpi=200, facecolor=theme.background, layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


def style_axis(axis: Any, theme: Theme) -> None:
    """Style a panel whose horizontal axis is KL."""
    axis.set_xlabel("KL(policy || reference) in nats", color=theme.ink)
    axis.set_facecolor(theme.background)
    axis.grid(True, color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=theme.muted, length=0)
    axis.spines[:].set_visible(False)


def add_legend(picture: Figure, axis: Any, theme: Theme) -> None:
    """Put the legend of a panel below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=theme.ink)


def to_png(picture: Figure) -> bytes:
    file = io.BytesIO()
    picture.savefig(file, format="png", facecolor=picture.get_facecolor(), metadata={"Software": None})
    return file.getvalue()
