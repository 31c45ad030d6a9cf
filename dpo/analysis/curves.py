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
from matplotlib.image import imsave
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from dpo.analysis.runs import Run
from dpo.numbers import figure as format_number
from dpo.numbers import percent

SIZE, DPI = (4.8, 3.0), 200  # inches
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


# lines have the colours of Okabe and Ito, which colour-blind readers tell apart
LIGHT = Theme(
    "#ffffff",
    "#1b1f24",
    "#59616b",
    "#e6e8eb",
    ("#0072b2", "#d55e00", "#009e73", "#b5568c", "#c98a00", "#3c9bd0", "#6b6b6b"),
)
DARK = Theme(
    "#171b21",
    "#e8eaed",
    "#a0a8b3",
    "#2b313a",
    ("#56b4e9", "#f08a3c", "#2fc796", "#e39ac6", "#f0c04a", "#8fb8ff", "#b8bcc2"),
)


def _format_css(theme: Theme) -> str:
    return "".join(f"{name}:{color};" for name, color in theme.variables().items())


# CSS for pages and pictures of either theme
COLORS = f":root{{{_format_css(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_format_css(DARK)}}}}}"


@dataclass(frozen=True)
class Chart:
    """Content of a picture: a metric, or several in one picture."""

    name: str  # of its file
    title: str
    metrics: tuple[str, ...]  # SPLIT stands for train and eval
    unit: str = ""
    log_scale: bool = False  # used if values span a wide range
    in_percent: bool = False  # values are from 0 to 1, shown in percent
    baseline: float | None = None  # height of a horizontal line: 0, or the accuracy of chance
    from_zero: bool = False  # the vertical axis begins at 0
    smooth: bool = True  # show a running mean
    loss: str | None = None  # show only runs with this loss; None: all runs


class Picture(NamedTuple):
    """A drawn chart."""

    name: str
    title: str
    alt: str
    svg: bytes
    png: bytes  # in the light theme's colours


class Line(NamedTuple):
    """One metric of one run, in one colour."""

    run: Run
    metric: str
    color: int  # index in `Theme.colors`
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
    """List the charts that runs may have, in the page's order."""
    charts = [
        Chart("loss", "Loss", ("loss/SPLIT",)),
        Chart("accuracy", "Reward accuracy", ("rewards_SPLIT/accuracies",), in_percent=True, baseline=0.5),
        Chart("auc", "Area under the ROC curve of rewards", ("rewards_eval/auc",), baseline=0.5),
        Chart("margin", "Reward margin", ("rewards_SPLIT/margins",), baseline=0.0),
        Chart("rewards", "Rewards", ("rewards_SPLIT/chosen", "rewards_SPLIT/rejected"), baseline=0.0),
        Chart("logps", "Log-probabilities", ("logps_SPLIT/chosen", "logps_SPLIT/rejected")),
        Chart("kto_kl", "KL to the reference, estimated by KTO", ("kto/kl/SPLIT",), unit="nats", baseline=0.0),
        Chart("grad_norm", "Gradient norm", ("grad_norm",), log_scale=True),
        Chart("lr", "Learning rate", ("lr",), log_scale=True, smooth=False),
        Chart("held_out_score", "Scores on held-out prompts", ("online_eval/score", "online_eval/reference_score")),
        Chart("win_rate", "Win rate against the reference", ("online_eval/win_rate",), in_percent=True),
        Chart("online_score", "Scores of answers", ("online/score_best", "online/score", "online/score_worst")),
        Chart("online_kl", "KL to the reference, estimated", ("online/kl",), unit="nats", baseline=0.0),
        Chart("online_length", "Length of answers", ("online/length",), unit="tokens"),
        Chart("online_answers", "Answers that end, prompts that tie", ("online/eos", "online/ties"), in_percent=True),
        Chart("online_time", "Share of the time", ("online/sampling_share", "online/scoring_share"), in_percent=True),
        Chart("throughput", "Throughput", ("tokens_per_second",), unit="tokens per second", from_zero=True),
        Chart("memory", "Peak memory", ("memory/peak_gb",), unit="GB", from_zero=True, smooth=False),
    ]
    losses = list(dict.fromkeys(run.loss for run in runs))
    if len(losses) <= 1:
        return charts
    split_charts = []
    for chart in charts:
        if chart.name not in ("loss", "logps"):
            split_charts.append(chart)
            continue
        for loss in losses:  # values of different losses cannot be compared, so each loss has a chart
            name_in_file = re.sub(r"\W", "_", loss) or "_"
            name, title = f"{chart.name}-{name_in_file}", f"{chart.title}, {loss}"
            split_charts.append(replace(chart, name=name, title=title, loss=loss))
    return split_charts


def draw_all(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draw each chart for which a run has values."""
    for chart in list_charts(runs):
        lines = make_lines(chart, runs)
        if lines:
            svg, png = draw(chart, lines, several=len(runs) > 1)
            yield Picture(chart.name, chart.title, describe(chart, lines), svg, png)


def make_lines(chart: Chart, runs: Sequence[Run]) -> list[Line]:
    """Make a chart's lines, for runs and metrics with values.

    Each run has its own colour or, if there is only one run, each metric.
    """
    several, lines = len(runs) > 1, []
    for run_index, run in enumerate(runs):
        if chart.loss not in (None, run.loss):
            continue
        for metric_index, metric in enumerate(chart.metrics):
            if not any(np.isfinite(log[metric.replace("SPLIT", split)]).any() for split, log in run.splits):
                continue
            words = [run.name] if several else []
            if len(chart.metrics) > 1:
                words.append(metric.rpartition("/")[2])
            lines.append(Line(run, metric, run_index if several else metric_index, " ".join(words)))
    return lines


def smooth(values: np.ndarray, *, width: int | None = None, robust: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Compute a running mean, or a running median if `robust`.

    Returns at most MOST_POINTS indices, and the means there, (points,) each. A mean is over a window of values around
    its index, without NaN. `width` is by default an odd number of at least 5, about a fifteenth of all values. At both
    ends the window is smaller.
    """
    n = len(values)
    indices = np.unique(np.linspace(0, max(n - 1, 0), min(n, MOST_POINTS)).astype(int))  # evenly spaced
    width = width or max(5, n // 15 | 1)  # `| 1` makes it odd
    half = width // 2
    average = np.median if robust else np.mean
    smoothed = []
    for i in indices:
        window = values[max(0, i - half) : i + half + 1]
        window = window[np.isfinite(window)]
        smoothed.append(average(window) if len(window) else np.nan)
    return indices, np.array(smoothed)


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


def draw(chart: Chart, lines: Sequence[Line], *, several: bool) -> tuple[bytes, bytes]:
    """Draw a chart as SVG and as PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        picture = Figure(figsize=SIZE, dpi=DPI, facecolor=LIGHT.background, layout="constrained")
        canvas = FigureCanvasAgg(picture)
        panels: list[list[Line]] = [list(lines)]
        if several:  # a panel for each metric that a run has
            panels = [[line for line in lines if line.metric == metric] for metric in chart.metrics]
            panels = [panel for panel in panels if panel]
        [axes] = picture.subplots(1, len(panels), sharey=True, squeeze=False)
        for axis, panel in zip(axes, panels, strict=True):
            for line in panel:
                _draw_updates(axis, chart, line, several=several)
                _draw_evaluations(axis, line)
            _style_axis(axis, chart, panel)
            if len(panels) > 1:
                axis.set_title(panel[0].metric.rpartition("/")[2], color=LIGHT.muted, fontsize=9, loc="left")
        _add_title_and_legend(picture, chart, lines, several=several)
        png, svg = io.BytesIO(), io.BytesIO()
        canvas.draw()  # once; savefig would draw again for the layout
        imsave(png, np.asarray(canvas.buffer_rgba()), format="png", metadata={"Software": None})
        picture.set_layout_engine("none")
        picture.savefig(svg, format="svg", dpi=72, metadata={"Date": None})
    text = svg.getvalue().decode()
    # matplotlib writes fixed colours; as variables they follow the page's theme
    for name, color in LIGHT.variables().items():
        text = text.replace(f": {color}", f": var({name})")
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # hundredths of a point are enough
    return text.replace("<defs>", f"<defs><style>{COLORS}</style>", 1).encode(), png.getvalue()


def _draw_updates(axis: Any, chart: Chart, line: Line, *, several: bool) -> None:
    """Draw the value of every update, and a running mean of many."""
    examples, values = line.run.train.examples, line.run.train[line.metric.replace("SPLIT", "train")]
    n_finite = int(np.isfinite(values).sum())
    if n_finite == 0:
        return
    color = LIGHT.colors[line.color % len(LIGHT.colors)]
    dashed = (0, (4, 1.5))
    style = "-" if line.color < len(LIGHT.colors) else dashed  # dashed once all colours are used
    extremes = find_extremes(values)
    if chart.smooth and n_finite >= FEWEST_TO_SMOOTH:
        axis.plot(examples[extremes], values[extremes], color=color, alpha=0.16 if several else 0.28, linewidth=0.7)
        indices, means = smooth(values, robust=line.metric == "grad_norm")  # spikes would bend a mean
        axis.plot(examples[indices], means, style, color=color, linewidth=1.7)
    else:
        marker = "." if n_finite == 1 else None  # a line through one point is invisible
        axis.plot(examples[extremes], values[extremes], style, color=color, linewidth=1.7, marker=marker)


def _draw_evaluations(axis: Any, line: Line) -> None:
    """Draw evaluations as circles, three or more joined by a dotted line."""
    examples, values = line.evaluations()
    if not len(values):
        return
    color = LIGHT.colors[line.color % len(LIGHT.colors)]
    dotted = (0, (1, 1.8))
    axis.plot(
        examples,
        values,
        color=color,
        linestyle=dotted if len(examples) > 2 else "none",
        linewidth=1.1,
        marker="o",
        markersize=4.6 if len(examples) <= 30 else 2.6,
        markeredgewidth=1.2,
        markerfacecolor=LIGHT.background,
        markeredgecolor=color,
        zorder=3,  # above the lines of updates
    )


def _style_axis(axis: Any, chart: Chart, lines: Sequence[Line]) -> None:
    """Set scales, ticks and colours, and draw the baseline."""
    if chart.log_scale and _spans_decades(lines):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    shows_chance = bool(chart.baseline)  # a baseline other than 0 is the accuracy of chance
    if chart.in_percent:
        bottom = _find_lowest_accuracy(lines) - 0.06 if shows_chance else -0.03
        axis.set_ylim(bottom, 1.03)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    if chart.from_zero:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    if chart.baseline is not None:
        axis.axhline(chart.baseline, color=LIGHT.muted, linewidth=0.8, alpha=0.7)
    if shows_chance:
        axis.annotate(
            "chance",
            (1, chart.baseline),  # the right end of the baseline; `xytext` is two points above
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            color=LIGHT.muted,
            fontsize=8,
        )
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _abbreviate(value)))
    axis.set_facecolor(LIGHT.background)
    axis.grid(True, color=LIGHT.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=LIGHT.muted, length=0, which="both")
    axis.yaxis.get_offset_text().set_color(LIGHT.muted)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xlabel("examples", color=LIGHT.muted)


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Return whether values are positive, and some far above a line's median."""
    values_by_line = [line.run.train.points(line.metric)[1] for line in lines]
    all_values = np.concatenate(values_by_line)
    lowest_median = min(float(np.median(values)) for values in values_by_line)
    return bool(all_values.min() > 0 and all_values.max() > 20 * lowest_median)


def _find_lowest_accuracy(lines: Sequence[Line]) -> float:
    """Find the lowest accuracy that the lines show; at most 0.45."""
    accuracies = [0.45]  # so that the baseline of chance is inside the picture
    for line in lines:
        _, updates = line.run.train.points(line.metric.replace("SPLIT", "train"))
        _, running_means = smooth(updates)
        _, evaluations = line.evaluations()
        accuracies += [*running_means, *evaluations]
    return float(min(accuracies))


def _abbreviate(value: float) -> str:
    """Abbreviate a number of examples: 800, 2k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _add_title_and_legend(picture: Any, chart: Chart, lines: Sequence[Line], *, several: bool) -> None:
    def printable(text: str) -> str:  # an SVG must not hold control characters or unpaired surrogates
        return "".join(c if c.isprintable() else " " for c in text)

    title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
    picture.suptitle(printable(title), color=LIGHT.ink, fontsize=10.5, fontweight="bold", x=0.02, ha="left")
    name_by_color = {line.color: (line.run.name if several else line.label) for line in lines}
    if not several and len(name_by_color) == 1:  # the title says what the only line is
        return
    colors = [LIGHT.colors[color % len(LIGHT.colors)] for color in name_by_color]
    handles = [mpl.lines.Line2D([], [], color=color, linewidth=2.2) for color in colors]
    names = [printable(name if len(name) <= 24 else f"{name[:22]}...") for name in name_by_color.values()]
    picture.legend(
        handles,
        names,
        fontsize=8,
        labelcolor=LIGHT.ink,
        loc="outside lower left",
        ncols=min(len(names), 3),
        frameon=False,
    )


def describe(chart: Chart, lines: Sequence[Line]) -> str:
    """Describe a picture in words, for readers who cannot see it."""
    format_value = percent if chart.in_percent else format_number
    sentences = []
    for line in lines:
        clauses = []
        for split, log in line.run.splits:
            values = log.points(line.metric.replace("SPLIT", split))[1]
            if len(values):
                numbers = (values[0], values[-1], values.min(), values.max())
                first, last, lowest, highest = map(format_value, numbers)
                name = "training" if split == "train" else "evaluation"
                clauses.append(f"{name} from {first} to {last}, between {lowest} and {highest}")
        label = f"{line.label}: " if line.label else ""
        sentences.append(f"{label}{'; '.join(clauses)}.")
    return f"{chart.title} against examples. {' '.join(sentences)}"
