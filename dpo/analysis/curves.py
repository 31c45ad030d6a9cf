"""Curves of runs, as SVG for light and dark pages, and PNG.

Every update is a thin line under the running mean, evaluations are dots. Drawn with matplotlib's own canvas: no window,
no state of pyplot.
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
from dpo.numbers import figure as in_words
from dpo.numbers import percent

SIZE, DPI = (4.8, 3.0), 200
FEWEST_TO_SMOOTH = 8  # values: with fewer, the values themselves are the curve
MOST_POINTS = 500  # of a line: a picture's width shows no more


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


_light, _dark = ("".join(f"{name}:{c};" for name, c in theme.variables().items()) for theme in (LIGHT, DARK))
# CSS for pages and pictures of either theme
COLORS = f":root{{{_light}}}@media(prefers-color-scheme:dark){{:root{{{_dark}}}}}"


@dataclass(frozen=True)
class Chart:
    """A picture of one metric, perhaps for both sides of pairs."""

    name: str  # of the file
    title: str
    metrics: tuple[str, ...]  # SPLIT stands for train and eval
    unit: str = ""
    log_scale: bool = False  # used if values span a wide range
    share: bool = False  # values are from 0 to 1, shown in percent
    level: float | None = None  # height of a line to compare with: 0, or the share that chance gives
    from_zero: bool = False
    smooth: bool = True
    loss: str | None = None  # None: of all runs; else only of runs with this loss


class Picture(NamedTuple):
    """A drawn chart."""

    name: str
    title: str
    alt: str
    svg: bytes
    png: bytes  # in light colours


class Line(NamedTuple):
    """One metric of one run, in one colour."""

    run: Run
    metric: str
    color: int  # index in `Theme.colors`
    label: str

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """(examples, values) of evaluations."""
        examples, values = self.run.eval.points(self.metric.replace("SPLIT", "eval"))
        # equal models have an accuracy of 0, as every pair is a tie
        ties = (examples == 0) & (values == 0) & self.metric.endswith("accuracies")
        return examples[~ties], values[~ties]


def list_charts(runs: Sequence[Run]) -> list[Chart]:
    """List the charts that runs may have, in the page's order."""
    charts = [
        Chart("loss", "Loss", ("loss/SPLIT",)),
        Chart("accuracy", "Reward accuracy", ("rewards_SPLIT/accuracies",), share=True, level=0.5),
        Chart("margin", "Reward margin", ("rewards_SPLIT/margins",), level=0.0),
        Chart("rewards", "Rewards", ("rewards_SPLIT/chosen", "rewards_SPLIT/rejected"), level=0.0),
        Chart("logps", "Log-probabilities", ("logps_SPLIT/chosen", "logps_SPLIT/rejected")),
        Chart("grad_norm", "Gradient norm", ("grad_norm",), log_scale=True),
        Chart("lr", "Learning rate", ("lr",), log_scale=True, smooth=False),
        Chart("online_score", "Scores of answers", ("online/score_best", "online/score", "online/score_worst")),
        Chart("online_kl", "KL to the reference, estimated", ("online/kl",), unit="nats", level=0.0),
        Chart("online_length", "Length of answers", ("online/length",), unit="tokens"),
        Chart("online_answers", "Answers that end, prompts that tie", ("online/eos", "online/ties"), share=True),
        Chart("online_time", "Share of the time", ("online/sampling_share", "online/scoring_share"), share=True),
        Chart("throughput", "Throughput", ("tokens_per_second",), unit="tokens per second", from_zero=True),
        Chart("memory", "Peak memory", ("memory/peak_gb",), unit="GB", from_zero=True, smooth=False),
    ]
    losses = list(dict.fromkeys(run.loss for run in runs))
    found = []
    for chart in charts:
        if len(losses) > 1 and chart.name in ("loss", "logps"):
            files = [re.sub(r"\W", "_", loss) or "_" for loss in losses]
            found += [
                replace(chart, name=f"{chart.name}-{file}", title=f"{chart.title}, {loss}", loss=loss)
                for file, loss in zip(files, losses, strict=True)
            ]
        else:
            found.append(chart)
    return found


def draw_all(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draw each chart for which a run has values."""
    for chart in list_charts(runs):
        if lines := make_lines(chart, runs):
            svg, png = draw(chart, lines, several=len(runs) > 1)
            yield Picture(chart.name, chart.title, describe(chart, lines), svg, png)


def make_lines(chart: Chart, runs: Sequence[Run]) -> list[Line]:
    """Make a chart's lines: a colour per run, or per side."""
    several, found = len(runs) > 1, []
    for i, run in enumerate(runs):
        if chart.loss is not None and chart.loss != run.loss:
            continue
        for side, metric in enumerate(chart.metrics):
            if any(len(log.points(metric.replace("SPLIT", split))[1]) for split, log in run.splits):
                names = [run.name] if several else []
                names += [metric.rpartition("/")[2]] if len(chart.metrics) > 1 else []
                label = " ".join(names)
                found.append(Line(run, metric, i if several else side, label))
    return found


def smooth(values: np.ndarray, *, width: int | None = None, robust: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Running mean, or median if `robust`.

    Returns at most MOST_POINTS indices, and the means there.

    A mean is over the window of `width` values around its index, by default an odd number of at least 5, about a
    fifteenth of all. At both ends the window is smaller. NaN does not count.
    """
    n = len(values)
    indices = np.unique(np.linspace(0, max(n - 1, 0), min(n, MOST_POINTS)).astype(int))
    half = (width or max(5, n // 15 | 1)) // 2  # `| 1` makes it odd
    average = np.median if robust else np.mean
    smoothed = []
    for i in indices:
        window = values[max(0, i - half) : i + half + 1]
        window = window[np.isfinite(window)]
        smoothed.append(average(window) if len(window) else np.nan)
    return indices, np.array(smoothed)


def find_extremes(values: np.ndarray) -> np.ndarray:
    """Indices to draw: both extremes of each part of a long run."""
    if len(values) <= 2 * MOST_POINTS:
        return np.arange(len(values))
    found = []
    for part in np.array_split(np.arange(len(values)), MOST_POINTS):  # indices
        finite = part[np.isfinite(values[part])]
        if len(finite):
            found += [finite[values[finite].argmin()], finite[values[finite].argmax()]]
        else:  # a gap of the line
            found.append(part[0])
    return np.unique(found)


STYLE = {
    **{"font.size": 9, "font.sans-serif": ["DejaVu Sans"], "text.parse_math": False},  # names hold no formulas
    **{"svg.fonttype": "none", "svg.hashsalt": "curves", "path.simplify_threshold": 0.5},  # equal runs, equal files
}


def draw(chart: Chart, lines: Sequence[Line], *, several: bool) -> tuple[bytes, bytes]:
    """Draw a chart as SVG and as PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        picture = Figure(figsize=SIZE, dpi=DPI, facecolor=LIGHT.background, layout="constrained")
        canvas = FigureCanvasAgg(picture)
        by_metric = [[line for line in lines if line.metric == metric] for metric in chart.metrics]
        panels: list[list[Line]] = [panel for panel in by_metric if panel] if several else [list(lines)]
        axes: Any = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            for line in panel:
                _draw_line(axis, chart, line, several=several)
            _dress(axis, chart, panel)
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


def _draw_line(axis: Any, chart: Chart, line: Line, *, several: bool) -> None:
    color = LIGHT.colors[line.color % len(LIGHT.colors)]
    style = "-" if line.color < len(LIGHT.colors) else (0, (4, 1.5))
    examples, values = line.run.train.examples, line.run.train[line.metric.replace("SPLIT", "train")]
    n, drawn = int(np.isfinite(values).sum()), find_extremes(values)
    if n >= FEWEST_TO_SMOOTH and chart.smooth:
        at, course = smooth(values, robust=line.metric == "grad_norm")
        axis.plot(examples[drawn], values[drawn], color=color, alpha=0.16 if several else 0.28, linewidth=0.7)
        axis.plot(examples[at], course, style, color=color, linewidth=1.7)
    elif n:
        axis.plot(examples[drawn], values[drawn], style, color=color, linewidth=1.7, marker="." if n == 1 else None)
    if "SPLIT" in line.metric:
        examples, held_out = line.evaluations()
        axis.plot(
            *(examples, held_out),
            color=color,
            linestyle=(0, (1, 1.8)) if len(examples) > 2 else "none",  # two points are not a course
            linewidth=1.1,
            marker="o",
            markersize=4.6 if len(examples) <= 30 else 2.6,
            markeredgewidth=1.2,
            markerfacecolor=LIGHT.background,
            markeredgecolor=color,
            zorder=3,
        )


def _dress(axis: Any, chart: Chart, lines: Sequence[Line]) -> None:
    """Set scales and ticks, and draw the line to compare with."""
    if chart.log_scale and _spans_decades(lines):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    if chart.share:
        axis.set_ylim(_find_least(lines) - 0.06 if chart.level else -0.03, 1.03)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    if chart.from_zero:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value)))
    if chart.level is not None:
        axis.axhline(chart.level, color=LIGHT.muted, linewidth=0.8, alpha=0.7)
    if chart.level:
        above = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points", "ha": "right"}
        axis.annotate("chance", (1, chart.level), color=LIGHT.muted, fontsize=8, **above)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(_abbreviate))
    axis.set_facecolor(LIGHT.background)
    axis.grid(True, color=LIGHT.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=LIGHT.muted, length=0, which="both")
    axis.yaxis.get_offset_text().set_color(LIGHT.muted)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xlabel("examples", color=LIGHT.muted)


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Return whether all values are above 0 and span a wide range."""
    values = [line.run.train.points(line.metric)[1] for line in lines]
    lowest, highest = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    usual = min(float(np.median(v)) for v in values)
    return lowest > 0 and highest > 20 * usual


def _find_least(lines: Sequence[Line]) -> float:
    """Lowest accuracy of evaluations and smoothed training curves; at most 0.45."""
    found = [0.45]
    for line in lines:
        values = line.run.train.points(line.metric.replace("SPLIT", "train"))[1]
        found += [*line.evaluations()[1], *smooth(values)[1]]
    return float(min(found))


def _abbreviate(value: float, _: Any = None) -> str:
    """Label of a tick in examples: 800, 2k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _add_title_and_legend(picture: Any, chart: Chart, lines: Sequence[Line], *, several: bool) -> None:
    def printable(text: str) -> str:  # an SVG must not hold control characters or unpaired surrogates
        return "".join(c if c.isprintable() else " " for c in text)

    title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
    picture.suptitle(printable(title), color=LIGHT.ink, fontsize=10.5, fontweight="bold", x=0.02, ha="left")
    shown = {line.color: (line.run.name if several else line.label) for line in lines}
    if not several and len(shown) == 1:
        return
    handles = [mpl.lines.Line2D([], [], color=LIGHT.colors[i % len(LIGHT.colors)], linewidth=2.2) for i in shown]
    names = [printable(name if len(name) <= 24 else f"{name[:22]}...") for name in shown.values()]
    place = {"loc": "outside lower left", "ncols": min(len(names), 3), "frameon": False}
    picture.legend(handles, names, fontsize=8, labelcolor=LIGHT.ink, **place)


def describe(chart: Chart, lines: Sequence[Line]) -> str:
    """Describe a picture in words, for readers who cannot see it."""
    say = percent if chart.share else in_words
    parts = []
    for line in lines:
        courses = []
        for (split, log), name in zip(line.run.splits, ("training", "evaluation"), strict=True):
            values = log.points(line.metric.replace("SPLIT", split))[1]
            if len(values) and (split == "train" or "SPLIT" in line.metric):
                first, last, least, most = (say(v) for v in (values[0], values[-1], values.min(), values.max()))
                courses.append(f"{name} from {first} to {last}, between {least} and {most}")
        parts.append((f"{line.label}: " if line.label else "") + "; ".join(courses))
    return f"{chart.title} against examples. " + ". ".join(parts) + "."
