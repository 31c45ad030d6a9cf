"""Charts of runs: a thin line through all updates, a thick one for their running mean, and markers for evaluations."""

import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpo.analysis.runs import LoggedRun
from dpo.errors import needing

SOFTWARE = "dpo report"  # in the metadata of each picture: a later report replaces only pictures that have it
STYLE = [
    "tableau-colorblind10",
    {
        "text.parse_math": False,  # a $ in a name begins no formula
        "font.size": 9,
        "figure.titleweight": "bold",
        "figure.titlesize": 10.5,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "axes.spines.top": False,
        "axes.spines.right": False,
    },
]
LINE_STYLES = (("-", "o"), ("--", "s"), ("-.", "^"))  # (line of running means, marker of evaluations), by metric


class Chart(NamedTuple):
    title: str
    metrics: tuple[str, ...]  # SPLIT stands for train and eval
    in_percent: bool = False  # values are from 0 to 1, shown in percent
    baseline: float | None = None  # where a horizontal line is drawn: 0, or the accuracy by chance


CHARTS = (  # in the order of the report
    Chart("Loss", ("loss/SPLIT",)),
    Chart("Reward accuracy", ("rewards_SPLIT/accuracies",), in_percent=True, baseline=0.5),
    Chart("Area under the ROC curve of rewards", ("rewards_eval/auc",), baseline=0.5),
    Chart("Reward margin", ("rewards_SPLIT/margins",), baseline=0.0),
    Chart("Rewards", ("rewards_SPLIT/chosen", "rewards_SPLIT/rejected"), baseline=0.0),
    Chart("Log-probabilities", ("logps_SPLIT/chosen", "logps_SPLIT/rejected")),
    Chart("KL to the reference, estimated by KTO (nats)", ("kto/kl/SPLIT",), baseline=0.0),
    Chart("Gradient norm", ("grad_norm",)),
    Chart("Learning rate", ("lr",)),
    Chart("Scores on held-out prompts", ("online_eval/score", "online_eval/reference_score")),
    Chart("Win rate against the reference", ("online_eval/win_rate",), in_percent=True),
    Chart("Scores of answers", ("online/score_best", "online/score", "online/score_worst")),
    Chart("KL to the reference, estimated (nats)", ("online/kl",), baseline=0.0),
    Chart("Length of answers (tokens)", ("online/length",)),
    Chart("Answers that end, prompts that tie", ("online/eos", "online/ties"), in_percent=True),
    Chart("Throughput (tokens per second)", ("tokens_per_second",)),
)


class Line(NamedTuple):
    label: str  # "" if the chart has one run and one metric, which its title names
    color: int  # an index in matplotlib's cycle of colors: the run's number, or the metric's if there is one run
    style: int  # an index in LINE_STYLES: the metric's number in its chart
    updates: tuple[np.ndarray, np.ndarray]  # (numbers of examples trained on, values of the metric)
    evaluations: tuple[np.ndarray, np.ndarray]  # (the same numbers, values on held-out examples)


def plan_charts(runs: list[LoggedRun]) -> Iterator[tuple[Chart, list[Line]]]:
    """Yield each chart that has values, with its lines.

    Runs with different losses get no chart of the loss, as its values cannot be compared.
    """
    has_one_loss = len({run.objective.name for run in runs}) == 1
    for chart in CHARTS:
        lines = []
        for run_number, run in enumerate(runs):
            for metric_number, metric in enumerate(chart.metrics):
                evaluations = run.eval.points(metric.replace("SPLIT", "eval"))
                updates = run.train.points(metric.replace("SPLIT", "train"))
                label = metric.rpartition("/")[2] if len(chart.metrics) > 1 else ""
                color = metric_number
                if len(runs) > 1:  # then colors tell runs apart, and line styles tell metrics apart
                    label = f"{run.name} {label}".strip()
                    color = run_number
                if len(updates[1]) or len(evaluations[1]):
                    lines.append(Line(label, color, metric_number, updates, evaluations))
        if lines and (has_one_loss or chart.title != "Loss"):
            yield chart, lines


def draw_charts(runs: list[LoggedRun]) -> list[tuple[str, bytes]]:
    """Draw the charts that `plan_charts` yields, and return (title, PNG) of each."""
    return [(chart.title, _draw_chart(chart, lines)) for chart, lines in plan_charts(runs)]


def _draw_chart(chart: Chart, lines: list[Line]) -> bytes:
    """Return the PNG of a chart.

    Each line has its updates (thin), their running mean (thick), and its evaluations (dotted, with markers). Pyplot is
    not used, as it could open a window, and keeps every figure in memory.
    """
    with needing("matplotlib"):
        import matplotlib.style
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, PercentFormatter

    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(4.8, 3.0), dpi=200, layout="constrained")
        axes = figure.add_subplot(xlabel="examples")
        for line in lines:
            color = f"C{line.color}"
            label = line.label[:48]
            mean_style, evaluation_marker = LINE_STYLES[line.style]
            examples, values = line.updates
            update_marker = "."
            if len(values) >= 8:  # fewer values are drawn as they are, each with a point
                axes.plot(examples, values, color=color, alpha=0.22, linewidth=0.7)
                update_marker = ""
                window = np.ones(max(5, len(values) // 15 | 1))  # `| 1` makes its length odd, so that it has a center
                # The sum over each window is divided by the number of values in it, which is smaller at the ends.
                values = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
            if len(values):
                axes.plot(examples, values, color=color, linestyle=mean_style, marker=update_marker, label=label)
                label = None  # so that the legend does not name the evaluations too
            axes.plot(
                *line.evaluations,
                color=color,
                label=label,
                linestyle=":",
                linewidth=1.1,
                marker=evaluation_marker,
                markersize=4,
                markerfacecolor="white",
                zorder=3,
            )
        if chart.baseline is not None:
            axes.axhline(chart.baseline, color="gray", linewidth=0.8)
        if chart.in_percent:
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.suptitle(chart.title, x=0.02, ha="left")
        if any(line.label for line in lines):
            figure.legend(fontsize=8, loc="outside lower left", ncols=3, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, metadata={"Software": SOFTWARE})
        return file.getvalue()
