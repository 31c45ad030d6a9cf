"""Curves of runs, as SVG for light and dark pages, and PNG.

Every update is a thin line under the running mean, evaluations are dots. Drawn on a canvas of matplotlib, without
pyplot, so that no window opens and no global state changes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    background: str
    ink: str
    muted: str
    grid: str
    colors: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Colours by the names of their CSS variables."""
        named = {f"--plot-{i}": color for i, color in enumerate(self.colors)}
        return {"--card": self.background, "--ink": self.ink, "--muted": self.muted, "--grid": self.grid, **named}

    def css(self) -> str:
        return "".join(f"{name}:{color};" for name, color in self.variables().items())


# lines have the colours of Okabe and Ito, which colour-blind readers tell apart
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#b5568c", "#c98a00", "#3c9bd0", "#6b6b6b")
OKABE_ITO_ON_DARK = ("#56b4e9", "#f08a3c", "#2fc796", "#e39ac6", "#f0c04a", "#8fb8ff", "#b8bcc2")
LIGHT = Theme("#ffffff", "#1b1f24", "#59616b", "#e6e8eb", OKABE_ITO)
DARK = Theme("#171b21", "#e8eaed", "#a0a8b3", "#2b313a", OKABE_ITO_ON_DARK)
# CSS for pages and pictures of either theme
COLORS = f":root{{{LIGHT.css()}}}@media(prefers-color-scheme:dark){{:root{{{DARK.css()}}}}}"


@dataclass(frozen=True)
class Chart:
    """Content of a picture: a metric, or several in one picture."""

    name: str  # of its file
    title: str
    metrics: tuple[str, ...]  # SPLIT stands for train and eval
    log_scale: bool = False  # used if values span a wide range
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
    Chart("grad_norm", "Gradient norm", ("grad_norm",), log_scale=True),
    Chart("lr", "Learning rate", ("lr",), log_scale=True),
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
    """One metric of one run, in one colour."""

    label: str  # "" if the title says what it is
    color: int  # index in `Theme.colors`, and beyond them a dashed line
    updates: tuple[np.ndarray, np.ndarray]  # (examples, values)
    evaluations: tuple[np.ndarray, np.ndarray]


class Picture(NamedTuple):
    """A drawn chart."""

    name: str
    alt: str
    svg: bytes
    png: bytes  # in the light theme's colours


def draw_all(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draw each chart for which a run has values."""
    for chart, lines in plan_charts(runs):
        yield draw(chart, lines)


def plan_charts(runs: Sequence[Run]) -> Iterator[tuple[Chart, list[Line]]]:
    """Yield the charts for which a run has values, with their lines.

    A single run's metrics share a chart, each in its own colour. With several runs each metric has a chart, and each
    run a colour; there is none of the loss if their losses differ, as such values cannot be compared.
    """
    for chart in CHARTS:
        if len(runs) == 1:
            labels = [metric.rpartition("/")[2] if len(chart.metrics) > 1 else "" for metric in chart.metrics]
            sources = [(runs[0], metric, label) for metric, label in zip(chart.metrics, labels, strict=True)]
            if lines := list(_make_lines(sources)):
                yield chart, lines
        elif chart.name != "loss" or len({run.objective.name for run in runs}) == 1:
            for metric in chart.metrics:
                named, kind = chart, metric.rpartition("/")[2]
                if len(chart.metrics) > 1:
                    named = replace(chart, name=f"{chart.name}-{kind}", title=f"{chart.title}, {kind}")
                if lines := list(_make_lines([(run, metric, run.name) for run in runs])):
                    yield named, lines


def _make_lines(sources: Sequence[tuple[Run, str, str]]) -> Iterator[Line]:
    """Make a line of each (run, metric, label) that has values."""
    for i, (run, metric, label) in enumerate(sources):
        updates = run.train.points(metric.replace("SPLIT", "train"))
        examples, values = run.eval.points(metric.replace("SPLIT", "eval"))
        # before training, policy and reference are equal: all pairs tie, and an accuracy of 0 says nothing
        says_something = (examples > 0) | (values != 0) | (not metric.endswith("accuracies"))
        evaluations = examples[says_something], values[says_something]
        if len(updates[1]) or len(evaluations[1]):
            yield Line(printable(label), i, updates, evaluations)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Means over windows of about a fifteenth of all values, at least 5; they are cut at both ends."""
    window = np.ones(max(5, len(values) // 15 | 1))  # `| 1` makes it odd
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a $ in a run's name begins no formula
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",  # without it, two pictures of the same run would differ
    "path.simplify_threshold": 0.5,  # points of a long line that nobody could see are left out
}


def draw(chart: Chart, lines: Sequence[Line]) -> Picture:
    """Draw a chart as SVG and as PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        picture = Figure(figsize=(4.8, 3.0), dpi=200, facecolor=LIGHT.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis = picture.add_subplot()
        for line in lines:
            _draw_line(axis, line)
        _style_axis(axis, chart, lines)
        picture.suptitle(printable(chart.title), color=LIGHT.ink, fontsize=10.5, fontweight="bold", x=0.02, ha="left")
        if any(line.label for line in lines):
            picture.legend(fontsize=8, labelcolor=LIGHT.ink, loc="outside lower left", ncols=3, frameon=False)
        png, svg = io.BytesIO(), io.BytesIO()
        picture.savefig(png, metadata={"Software": None})
        picture.savefig(svg, format="svg", dpi=72, metadata={"Date": None})
    text = svg.getvalue().decode()
    # matplotlib writes fixed colours; as variables they follow the page's theme
    for name, color in LIGHT.variables().items():
        text = text.replace(f": {color}", f": var({name})")
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # hundredths of a point are enough
    text = text.replace("<defs>", f"<defs><style>{COLORS}</style>", 1)
    return Picture(chart.name, f"{chart.title} against examples", text.encode(), png.getvalue())


def printable(text: str) -> str:
    """A text without what an SVG must not hold: control characters and unpaired surrogates; long ones are cut."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= 48 else f"{text[:46]}..."


def _draw_line(axis: Any, line: Line) -> None:
    """Draw each update's value, a running mean of many, and evaluations as circles."""
    color = LIGHT.colors[line.color % len(LIGHT.colors)]
    style: dict[str, Any] = {"color": color, "linewidth": 1.7, "label": line.label}
    style["linestyle"] = "-" if line.color < len(LIGHT.colors) else (0, (4, 1.5))
    examples, values = line.updates
    if len(values) >= FEWEST_TO_SMOOTH:
        axis.plot(examples, values, color=color, alpha=0.22, linewidth=0.7)
        axis.plot(examples, running_mean(values), **style)
    elif len(values):
        axis.plot(examples, values, marker="." if len(values) == 1 else None, **style)
    examples, evaluated = line.evaluations
    if len(evaluated):
        style |= {"linewidth": 1.1, "linestyle": (0, (1, 1.8)) if len(evaluated) > 2 else "none"}
        style["label"] = None if len(values) else line.label  # once in the legend
        axis.plot(examples, evaluated, marker="o", markersize=4, markerfacecolor=LIGHT.background, zorder=3, **style)


def _style_axis(axis: Any, chart: Chart, lines: Sequence[Line]) -> None:
    """Set scales, ticks and colours, and draw the baseline."""
    if chart.log_scale:
        values = np.concatenate([line.updates[1] for line in lines])
        if len(values) and values.min() > 0 and values.max() > 20 * np.median(values):
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
    format_value = percent if chart.in_percent else format_number
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    if chart.baseline is not None:
        axis.axhline(chart.baseline, color=LIGHT.muted, linewidth=0.8, alpha=0.7)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: large(value)))
    axis.set_facecolor(LIGHT.background)
    axis.grid(True, color=LIGHT.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=LIGHT.muted, length=0, which="both")
    axis.spines[:].set_visible(False)
    axis.set_xlabel("examples", color=LIGHT.muted)
