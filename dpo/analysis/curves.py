"""Curves of runs, as PNG.

Every update is a thin line under the running mean, evaluations are circles. Drawn on a canvas of matplotlib, without
pyplot, so that no window opens and no global state changes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from dpo.analysis.runs import Run
from dpo.numbers import figure as format_number
from dpo.numbers import large, percent

FEWEST_TO_SMOOTH = 8  # with fewer values, the values themselves are the curve
LONGEST_LABEL = 48
# of Okabe and Ito, whose colours colour-blind readers tell apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b5568c", "#c98a00", "#3c9bd0", "#6b6b6b")
INK, MUTED, GRID = "#1b1f24", "#59616b", "#e6e8eb"


@dataclass(frozen=True)
class Chart:
    """Content of a picture: a metric, or several in one picture."""

    name: str  # of its file
    title: str
    metrics: tuple[str, ...]  # SPLIT stands for train and eval
    in_percent: bool = False  # values are from 0 to 1, shown in percent
    baseline: float | None = None  # height of a horizontal line: 0, or the accuracy of chance


CHARTS = (  # in the order of the page
    Chart("loss", "Loss", ("loss/SPLIT",)),
    Chart("accuracy", "Reward accuracy", ("rewards_SPLIT/accuracies",), in_percent=True, baseline=0.5),
    Chart("auc", "Area under the ROC curve of rewards", ("rewards_eval/auc",), baseline=0.5),
    Chart("margin", "Reward margin", ("rewards_SPLIT/margins",), baseline=0.0),
    Chart("rewards", "Rewards", ("rewards_SPLIT/chosen", "rewards_SPLIT/rejected"), baseline=0.0),
    Chart("logps", "Log-probabilities", ("logps_SPLIT/chosen", "logps_SPLIT/rejected")),
    Chart("kto_kl", "KL to the reference, estimated by KTO (nats)", ("kto/kl/SPLIT",), baseline=0.0),
    Chart("grad_norm", "Gradient norm", ("grad_norm",)),
    Chart("lr", "Learning rate", ("lr",)),
    Chart("held_out_score", "Scores on held-out prompts", ("online_eval/score", "online_eval/reference_score")),
    Chart("win_rate", "Win rate against the reference", ("online_eval/win_rate",), in_percent=True),
    Chart("online_score", "Scores of answers", ("online/score_best", "online/score", "online/score_worst")),
    Chart("online_kl", "KL to the reference, estimated (nats)", ("online/kl",), baseline=0.0),
    Chart("online_length", "Length of answers (tokens)", ("online/length",)),
    Chart("online_answers", "Answers that end, prompts that tie", ("online/eos", "online/ties"), in_percent=True),
    Chart("online_time", "Share of the time", ("online/sampling_share", "online/scoring_share"), in_percent=True),
    Chart("throughput", "Throughput (tokens per second)", ("tokens_per_second",)),
    Chart("memory", "Peak memory (GB)", ("memory/peak_gb",)),
)


class Line(NamedTuple):
    """One metric of one run."""

    label: str  # "" if the title says what it is
    color: int  # index in COLORS, and beyond them a dashed line
    updates: tuple[np.ndarray, np.ndarray]  # (examples, values)
    evaluations: tuple[np.ndarray, np.ndarray]


def draw_all(runs: Sequence[Run]) -> list[tuple[str, bytes]]:
    """Draw each chart for which a run has values: (title, PNG)."""
    return [(chart.title, draw(chart, lines)) for chart, lines in plan_charts(runs)]


def plan_charts(runs: Sequence[Run]) -> Iterator[tuple[Chart, list[Line]]]:
    """Yield the charts for which a run has values, with their lines.

    A single run's metrics share a chart, each in its own colour. With several runs each metric has a chart, and each
    run a colour; there is none of the loss if their losses differ, as such values cannot be compared.
    """
    several, losses_differ = len(runs) > 1, len({run.objective.name for run in runs}) > 1
    for chart in CHARTS:
        if chart.name == "loss" and losses_differ:
            continue
        parts = [chart]
        if several and len(chart.metrics) > 1:
            kinds = {metric.rpartition("/")[2]: metric for metric in chart.metrics}
            parts = [
                replace(chart, name=f"{chart.name}-{kind}", title=f"{chart.title}, {kind}", metrics=(metric,))
                for kind, metric in kinds.items()
            ]
        for part in parts:
            lines = []
            for color, (run, metric) in enumerate(product(runs, part.metrics)):
                kind = metric.rpartition("/")[2] if len(part.metrics) > 1 else ""
                line = _make_line(run, metric, run.name if several else kind, color)
                if len(line.updates[1]) or len(line.evaluations[1]):
                    lines.append(line)
            if lines:
                yield part, lines


def _make_line(run: Run, metric: str, label: str, color: int) -> Line:
    examples, values = run.eval.points(metric.replace("SPLIT", "eval"))
    # before training, policy and reference are equal: all pairs tie, and an accuracy of 0 says nothing
    says_something = (examples > 0) | (values != 0) | (not metric.endswith("accuracies"))
    evaluations = examples[says_something], values[says_something]
    return Line(label, color, run.train.points(metric.replace("SPLIT", "train")), evaluations)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Means over windows of about a fifteenth of all values, at least 5; they are cut at both ends."""
    window = np.ones(max(5, len(values) // 15 | 1))  # `| 1` makes it odd
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def draw(chart: Chart, lines: Sequence[Line]) -> bytes:
    """Draw a chart as PNG."""
    style = {"font.size": 9, "font.sans-serif": ["DejaVu Sans"], "text.parse_math": False}  # a $ begins no formula
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        picture = Figure(figsize=(4.8, 3.0), dpi=200, layout="constrained")
        FigureCanvasAgg(picture)
        axis = picture.add_subplot()
        for line in lines:
            _draw_line(axis, line)
        _style_axis(axis, chart, lines)
        picture.suptitle(chart.title, color=INK, fontsize=10.5, fontweight="bold", x=0.02, ha="left")
        if any(line.label for line in lines):
            picture.legend(fontsize=8, labelcolor=INK, loc="outside lower left", ncols=3, frameon=False)
        file = io.BytesIO()
        picture.savefig(file, metadata={"Software": None})
        return file.getvalue()


def _draw_line(axis: Any, line: Line) -> None:
    """Draw each update's value, a running mean of many, and evaluations as circles."""
    label = line.label.encode("utf-8", "replace").decode()  # a path may hold what is no text
    label = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..."
    color = COLORS[line.color % len(COLORS)]
    style: dict[str, Any] = {"color": color, "linewidth": 1.7, "label": label}
    style["linestyle"] = "-" if line.color < len(COLORS) else (0, (4, 1.5))
    examples, values = line.updates
    if len(values) >= FEWEST_TO_SMOOTH:
        axis.plot(examples, values, color=color, alpha=0.22, linewidth=0.7)
        axis.plot(examples, running_mean(values), **style)
    elif len(values):
        axis.plot(examples, values, marker="." if len(values) == 1 else None, **style)
    examples, evaluated = line.evaluations
    if len(evaluated):
        style |= {"linewidth": 1.1, "linestyle": (0, (1, 1.8)) if len(evaluated) > 2 else "none"}
        style["label"] = None if len(values) else label  # once in the legend
        axis.plot(examples, evaluated, marker="o", markersize=4, markerfacecolor="white", zorder=3, **style)


def _style_axis(axis: Any, chart: Chart, lines: Sequence[Line]) -> None:
    """Set scales, ticks and colours, and draw the baseline."""
    if chart.baseline is not None:
        axis.axhline(chart.baseline, color=MUTED, linewidth=0.8, alpha=0.7)
    else:
        values = np.concatenate([line.updates[1] for line in lines])
        if len(values) and values.min() > 0 and values.max() > 20 * np.median(values):
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
    format_value = percent if chart.in_percent else format_number
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: large(value)))
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, length=0, which="both")
    axis.spines[:].set_visible(False)
    axis.set_xlabel("examples", color=MUTED)
