"""Tables and picture of `benchmarks.hh_smollm2`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.preference_scores import Interval
from dpo.analysis.curves import DARK, LIGHT

OURS, TRL = 0, 1  # indices of a theme's colours


class Result(NamedTuple):
    """Measurements of one policy; the reference is SFT's policy. Log-probabilities are sums over tokens."""

    name: str
    beta: float | None
    n_pairs: int
    accuracy: Interval | None  # share of test pairs with a gap above 0
    accuracy_if_shorter: Interval | None  # of pairs whose chosen response has fewer tokens than the rejected one
    accuracy_if_longer: Interval | None
    balanced: Interval | None  # the mean of these two, which is 0.5 for ranking by length alone
    length_correlation: float | None  # of the gap with the difference of lengths, chosen minus rejected tokens
    gap: Interval  # nats: log pi - log ref, chosen minus rejected; the reward margin is beta times it
    chosen_logp: Interval
    rejected_logp: Interval
    chosen_change: Interval  # log pi - log ref
    rejected_change: Interval
    kl: Interval  # KL(policy || reference) of a response, nats
    kl_by_log_ratio: Interval  # the same, estimated by the mean log-ratio
    length: Interval  # tokens of a sample
    ended: Interval  # share of samples that ended before the limit
    empty: Interval  # share of samples without text
    online_accuracy: Interval | None  # over the second half of the training pairs, each before its update
    online_balanced: Interval | None  # the same, as `balanced`
    online_shorter: float | None  # share of these pairs whose chosen response is shorter; ties count half
    seconds_per_pair: float
    trl_evaluation: dict[str, float] | None


COLUMNS: dict[str, Callable[[Result], str]] = {
    "": lambda r: r.name,
    "KL to SFT, nats": lambda r: f"{r.kl:.2f}" if r.accuracy else "",
    "accuracy on pairs not yet trained on, balanced over length": lambda r: (
        f"{r.online_balanced:.2f}" if r.online_balanced else ""
    ),
    "change of log pi, chosen": lambda r: f"{r.chosen_change:.1f}" if r.accuracy else "",
    "rejected": lambda r: f"{r.rejected_change:.1f}" if r.accuracy else "",
    "empty samples": lambda r: f"{100 * r.empty.mean:.0f} %",
    "tokens of a sample": lambda r: f"{r.length:.0f}",
}
TEST_COLUMNS: dict[str, Callable[[Result], str]] = {
    "test pairs": lambda r: r.name,
    "accuracy": lambda r: f"{r.accuracy:.2f}" if r.accuracy else "",
    "balanced over length": lambda r: f"{r.balanced:.2f}" if r.balanced else "",
    "gap, nats": lambda r: f"{r.gap:.2f}",
}


def tables(results: Sequence[Result]) -> str:
    """Two Markdown tables, the second on the test pairs; brackets are 95 % intervals."""
    trained = [result for result in results if result.accuracy]
    return f"{_table(COLUMNS, results)}\n{_table(TEST_COLUMNS, trained)}"


def _table(columns: dict[str, Callable[[Result], str]], results: Sequence[Result]) -> str:
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[show(result) for show in columns.values()] for result in results]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw_picture(results: Sequence[Result], file: Path, *, dark: bool) -> None:
    """Draw points with intervals, a row per policy: accuracy, gap, change of both sides, KL."""
    theme = DARK if dark else LIGHT
    shown = [result for result in results if result.accuracy]
    panels: list[tuple[str, float | None, list[Callable[[Result], Interval | None]]]] = [
        ("held-out accuracy", 0.5, [lambda r: r.accuracy]),
        ("held-out gap, nats", 0.0, [lambda r: r.gap]),
        ("change of log pi, chosen ● rejected ○", 0.0, [lambda r: r.chosen_change, lambda r: r.rejected_change]),
        ("KL to SFT, nats", None, [lambda r: r.kl]),
    ]
    with mpl.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(
            figsize=(11, 0.9 + 0.36 * len(shown)), dpi=160, facecolor=theme.background, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots(1, len(panels), sharey=True)
        for axis, (title, zero, values) in zip(axes, panels, strict=True):
            for row, result in enumerate(shown):
                for side, value in enumerate(values):
                    _point(
                        axis, row + 0.15 * (2 * side - len(values) + 1), value(result), theme, result, filled=side == 0
                    )
            axis.xaxis.set_major_locator(MaxNLocator(4))
            if zero is not None:
                axis.axvline(zero, color=theme.muted, linewidth=0.8, linestyle=":")
            else:
                axis.set_xlim(left=0)
            axis.set_title(title, fontsize=9, color=theme.ink)
            axis.tick_params(length=0, labelcolor=theme.ink)
            axis.set_facecolor(theme.background)
            axis.grid(axis="x", color=theme.grid)
            axis.set_axisbelow(True)
            for spine in axis.spines.values():
                spine.set_visible(False)
        axes[0].set_yticks(range(len(shown)), [result.name for result in shown])
        axes[0].set_ylim(len(shown) - 0.5, -0.5)
        figure.savefig(file, facecolor=theme.background, metadata={"Software": None})


def _point(axis: Any, height: float, value: Interval, theme: Any, result: Result, *, filled: bool) -> None:
    color = theme.colors[TRL if result.trl_evaluation else OURS]
    axis.plot([value.low, value.high], [height, height], color=color, linewidth=1.4)
    face = color if filled else theme.background
    axis.plot([value.mean], [height], "o", color=color, markerfacecolor=face, markersize=5)
