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
MOST_POINTS = 500  # points of a line; a picture's width shows no more


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
    smooth: bool = True  # show a running mean
    loss: str | None = None  # show only runs with this loss; None: all runs


CHARTS = (  # in the order of the page
    Chart("loss", "Loss", ("loss/SPLIT",)),
    Chart("accuracy", "Reward accuracy", ("rewards_SPLIT/accuracies",), in_percent=True, baseline=0.5),
    Chart("auc", "Area under the ROC curve of rewards", ("rewards_eval/auc",), baseline=0.5),
    Chart("margin", "Reward margin", ("rewards_SPLIT/margins",), baseline=0.0),
    Chart("rewards", "Rewards", ("rewards_SPLIT/chosen", "rewards_SPLIT/rejected"), baseline=0.0),
    Chart("logps", "Log-probabilities", ("logps_SPLIT/chosen", "logps_SPLIT/rejected")),
    Chart("kto_kl", "KL to the reference, estimated by KTO (nats)", ("kto/kl/SPLIT",), baseline=0.0),
    Chart("grad_norm", "Gradient norm", ("grad_norm",), log_scale=True),
    Chart("lr", "Learning rate", ("lr",), log_scale=True, smooth=False),
    Chart("held_out_score", "Scores on held-out prompts", ("online_eval/score", "online_eval/reference_score")),
    Chart("win_rate", "Win rate against the reference", ("online_eval/win_rate",), in_percent=True),
    Chart("online_score", "Scores of answers", ("online/score_best", "online/score", "online/score_worst")),
    Chart("online_kl", "KL to the reference, estimated (nats)", ("online/kl",), baseline=0.0),
    Chart("online_length", "Length of answers (tokens)", ("online/length",)),
    Chart("online_answers", "Answers that end, prompts that tie", ("online/eos", "online/ties"), in_percent=True),
    Chart("online_time", "Share of the time", ("online/sampling_share", "online/scoring_share"), in_percent=True),
    Chart("throughput", "Throughput (tokens per second)", ("tokens_per_second",)),
    Chart("memory", "Peak memory (GB)", ("memory/peak_gb",), smooth=False),
)


class Picture(NamedTuple):
    """A drawn chart."""

    name: str
    alt: str
    svg: bytes
    png: bytes  # in the light theme's colours


class Line(NamedTuple):
    """One metric of one run, in one colour."""

    run: Run
    metric: str
    color: int  # index in `Theme.colors`, and beyond them a dashed line
    label: str

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """(examples, values) of evaluations."""
        examples, values = self.run.eval.points(self.metric.replace("SPLIT", "eval"))
        if not self.metric.endswith("accuracies"):
            return examples, values
        # before training, policy and reference are equal: all pairs tie, and an accuracy of 0 says nothing
        is_all_ties = (examples == 0) & (values == 0)
        return examples[~is_all_ties], values[~is_all_ties]


def list_charts(runs: Sequence[Run]) -> list[Chart]:
    """List the charts that runs may have.

    Values of different losses cannot be compared, so each loss has charts of its own. If there are several runs, each
    metric has a chart.
    """
    losses = list(dict.fromkeys(run.loss for run in runs))
    charts = []
    for chart in CHARTS:
        is_split_by_loss = len(losses) > 1 and chart.name in ("loss", "logps")
        for loss in losses if is_split_by_loss else [None]:
            for metrics in [chart.metrics] if len(runs) == 1 else [(metric,) for metric in chart.metrics]:
                parts = [loss] if loss is not None else []
                if metrics != chart.metrics:
                    parts.append(metrics[0].rpartition("/")[2])
                name = "-".join([chart.name, *(re.sub(r"\W", "_", part) for part in parts)])
                title = ", ".join([chart.title, *parts])
                charts.append(replace(chart, name=name, title=title, metrics=metrics, loss=loss))
    return charts


def draw_all(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draw each chart for which a run has values."""
    for chart in list_charts(runs):
        if lines := make_lines(chart, runs):
            svg, png = draw(chart, lines)
            yield Picture(chart.name, describe(chart, lines), svg, png)


def make_lines(chart: Chart, runs: Sequence[Run]) -> list[Line]:
    """Make a chart's lines: each run has its own colour or, if there is only one run, each metric."""
    lines = []
    for i, run in enumerate(runs):
        for j, metric in enumerate(chart.metrics):
            has_values = any(np.isfinite(log[metric.replace("SPLIT", split)]).any() for split, log in run.splits)
            if not has_values or chart.loss not in (None, run.loss):
                continue
            if len(runs) > 1:
                lines.append(Line(run, metric, i, run.name))
            else:  # of a single metric the title says what it is
                lines.append(Line(run, metric, j, metric.rpartition("/")[2] if len(chart.metrics) > 1 else ""))
    return lines


def smooth(values: np.ndarray, *, width: int | None = None, robust: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Compute a running mean, or a running median if `robust`.

    Returns at most MOST_POINTS indices, and the means there, (points,) each. A mean is over a window of values around
    its index, without NaN. `width` is by default an odd number of at least 5, about a fifteenth of all values. At both
    ends the window is smaller.
    """
    n = len(values)
    indices = np.unique(np.linspace(0, max(n - 1, 0), min(n, MOST_POINTS)).astype(int))  # evenly spaced
    half = (width or max(5, n // 15 | 1)) // 2  # `| 1` makes it odd
    average = np.median if robust else np.mean
    windows = (values[max(0, i - half) : i + half + 1] for i in indices)
    finite = [window[np.isfinite(window)] for window in windows]
    return indices, np.array([average(window) if len(window) else np.nan for window in finite])


def find_extremes(values: np.ndarray) -> np.ndarray:
    """Find indices to draw: in a long run, extremes of its parts."""
    if len(values) <= 2 * MOST_POINTS:
        return np.arange(len(values))
    indices = []
    for part in np.array_split(np.arange(len(values)), MOST_POINTS):
        if np.isnan(values[part]).all():
            indices.append(part[0])  # leaves a gap in the line
        else:
            indices += [part[np.nanargmin(values[part])], part[np.nanargmax(values[part])]]
    return np.unique(indices)


STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a $ in a run's name begins no formula
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",  # without it, two pictures of the same run would differ
    "path.simplify_threshold": 0.5,
}


def draw(chart: Chart, lines: Sequence[Line]) -> tuple[bytes, bytes]:
    """Draw a chart as SVG and as PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        picture = Figure(figsize=(4.8, 3.0), dpi=200, facecolor=LIGHT.background, layout="constrained")
        FigureCanvasAgg(picture)
        axis = picture.add_subplot()
        for line in lines:
            _draw_line(axis, chart, line)
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
    return text.replace("<defs>", f"<defs><style>{COLORS}</style>", 1).encode(), png.getvalue()


def printable(text: str) -> str:
    """A text without what an SVG must not hold: control characters and unpaired surrogates; long ones are cut."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= 48 else f"{text[:46]}..."


def _draw_line(axis: Any, chart: Chart, line: Line) -> None:
    """Draw each update's value, a running mean of many, and evaluations as circles."""
    color = LIGHT.colors[line.color % len(LIGHT.colors)]
    style = "-" if line.color < len(LIGHT.colors) else (0, (4, 1.5))
    label = printable(line.label)
    examples, values = line.run.train.examples, line.run.train[line.metric.replace("SPLIT", "train")]
    extremes, n_finite = find_extremes(values), int(np.isfinite(values).sum())
    if chart.smooth and n_finite >= FEWEST_TO_SMOOTH:
        axis.plot(examples[extremes], values[extremes], color=color, alpha=0.22, linewidth=0.7)
        indices, means = smooth(values, robust=line.metric == "grad_norm")  # spikes would bend a mean
        axis.plot(examples[indices], means, color=color, linestyle=style, linewidth=1.7, label=label)
    elif n_finite:
        marker = "." if n_finite == 1 else None  # a line through one point is invisible
        axis.plot(
            examples[extremes],
            values[extremes],
            color=color,
            linestyle=style,
            linewidth=1.7,
            marker=marker,
            label=label,
        )
    examples, values = line.evaluations()
    if len(values):
        dotted = (0, (1, 1.8)) if len(values) > 2 else "none"
        size = 4.6 if len(values) <= 30 else 2.6
        axis.plot(
            examples, values, color=color, linestyle=dotted, linewidth=1.1, marker="o", markersize=size,
            markerfacecolor=LIGHT.background, zorder=3, label=None if n_finite else label,  # above the updates
        )  # fmt: skip


def _style_axis(axis: Any, chart: Chart, lines: Sequence[Line]) -> None:
    """Set scales, ticks and colours, and draw the baseline."""
    if chart.log_scale:
        values = [line.run.train.points(line.metric)[1] for line in lines]
        lowest = min(float(of_line.min()) for of_line in values)
        if lowest > 0 and max(float(of_line.max() / np.median(of_line)) for of_line in values) > 20:
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
    format_value = percent if chart.in_percent else format_number
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    if chart.baseline is not None:
        axis.axhline(chart.baseline, color=LIGHT.muted, linewidth=0.8, alpha=0.7)
    if chart.baseline:  # other than 0 it is the accuracy of chance
        axis.text(
            1, chart.baseline, "chance", transform=axis.get_yaxis_transform(), ha="right", va="bottom",
            color=LIGHT.muted, fontsize=8,
        )  # fmt: skip
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: large(value)))
    axis.set_facecolor(LIGHT.background)
    axis.grid(True, color=LIGHT.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=LIGHT.muted, length=0, which="both")
    axis.spines[:].set_visible(False)
    axis.set_xlabel("examples", color=LIGHT.muted)


def describe(chart: Chart, lines: Sequence[Line]) -> str:
    """Describe a picture in words, for readers who cannot see it."""
    format_value = percent if chart.in_percent else format_number
    sentences = []
    for line in lines:
        clauses = []
        for name, (split, log) in zip(("training", "evaluation"), line.run.splits, strict=True):
            values = log.points(line.metric.replace("SPLIT", split))[1]
            if len(values):
                first, last, lowest, highest = map(format_value, (values[0], values[-1], values.min(), values.max()))
                clauses.append(f"{name} from {first} to {last}, between {lowest} and {highest}")
        label = f"{line.label}: " if line.label else ""
        sentences.append(f"{label}{'; '.join(clauses)}.")
    return f"{chart.title} against examples. {' '.join(sentences)}"
