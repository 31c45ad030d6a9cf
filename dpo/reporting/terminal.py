"""Progress of a run: a bar, or lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import tqdm

from dpo.numbers import clock_time, compact, count
from dpo.reporting.events import Callback, Evaluation, Update
from dpo.settings.plan import Plan

LINE_SECS = 10  # time between lines about a long task in a log file
SHOWN_METRICS = {  # of an update: label and significant digits
    "loss/train": ("loss", 4),
    "rewards_train/accuracies": ("acc", 2),
    "rewards_train/margins": ("margin", 3),
    "online/score": ("score", 3),
}


def table(title: str, metrics: Mapping[str, float]) -> str:
    """A title, then a line for each name and value.

    A standard error, whose name ends in `_se`, is on the line of its metric.
    """
    names = [name for name in metrics if name.removesuffix("_se") not in metrics or not name.endswith("_se")]
    width, lines = max(map(len, names), default=0), [f"{title}:"]
    for name in names:
        error = metrics.get(f"{name}_se")
        note = "" if error is None else f" (SE {error:.2g})"
        lines.append(f"  {name:<{width}}  {metrics[name]:>10.5g}{note}")
    return "\n".join(lines)


def _shows_bars() -> bool:
    return sys.stdout.isatty()


def _find_screen() -> Any:
    """Standard output without the run's log, which has no place for bars."""
    return getattr(sys.stdout, "screen", sys.stdout)


class Task:
    """A long task of `total` items, of which `done` are finished: updates, an evaluation, sampling."""

    def __init__(self, what: str, total: int, done: int, bar: Any) -> None:
        self.what, self.total, self.done, self.bar = what, total, done, bar
        self.part, self.note = 0.0, ""  # of the current item: the fraction that is done, and a text
        self.start_time = self.last_line_time = time.monotonic()
        self.done_at_start = done
        self.nested_seconds = 0.0  # spent in tasks inside this one, such as evaluations between updates

    def __str__(self) -> str:
        parts, n_new = [f"{self.what} {self.done}/{self.total}", self.note], self.done + self.part - self.done_at_start
        if n_new > 0:
            seconds = time.monotonic() - self.start_time - self.nested_seconds
            parts.append(f"{clock_time(seconds / n_new * (self.total - self.done - self.part))} left")
        return "  ".join(filter(None, parts))


class Progress(Callback):
    """Progress as a bar on a terminal, or lines in a log.

    Lines come at most every `interval` seconds for updates, every ten seconds within a long task.
    """

    def __init__(self, *, interval: float, silent: bool, batch_size: int = 1) -> None:
        self.interval, self.silent, self.batch_size = interval, silent, batch_size
        self.show_bar = not silent and _shows_bars()
        self._open: list[Task] = []  # each runs inside the task before it in this list
        self._last_update_line = float("-inf")  # time

    @classmethod
    def of(cls, plan: Plan, *, silent: bool) -> Progress:
        interval, batch_size = plan.logging.minimum_log_interval_secs, plan.data.batch_size
        return cls(interval=interval, silent=silent, batch_size=batch_size)

    def updates(self, items: Iterable, *, total: int, done: int) -> Iterator:
        """Iterate over the batches of updates.

        `done` of the `total` updates were made before; `items` has only the others.
        """
        with self._showing("update", total, done):
            yield from items

    def over(self, items: Iterable, *, total: int, what: str) -> Iterator:
        """Iterate over the items of a task."""
        with self._showing(what, total) as task:
            for item in items:
                yield item
                task.done += 1
                task.part, task.note = 0.0, ""
                self._show(task)

    def on_update(self, update: Update) -> None:
        if self.silent:
            return
        metrics, task = update.metrics, self._open[-1]
        task.done, task.part = update.number, 0.0
        facts = [f"{task.done * self.batch_size:,}/{count(task.total * self.batch_size, 'example')}"]
        for name, (label, digits) in SHOWN_METRICS.items():
            if name in metrics:
                facts.append(f"{label} {compact(metrics[name], digits)}")
        task.note = "  ".join([*facts, f"{compact(metrics['examples_per_second'])} ex/s"])
        if self.show_bar:
            self._draw(task)
        elif time.monotonic() - self._last_update_line >= self.interval:
            self._last_update_line = task.last_line_time = time.monotonic()
            self.line(str(task))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        text = table(f"evaluation after {count(evaluation.n_examples, 'example')}", evaluation.metrics)
        if evaluation.n_updates == 0 and evaluation.metrics.get("rewards_eval/accuracies") == 0:
            note = "before the first update policy and reference are equal: every pair is a tie, which counts as 0"
            text += f"\n  ({note})"
        self.line(text)

    def part(self, done: int, total: int, what: str) -> None:
        """Report progress within the current item, for instance in tokens."""
        if self._open and total > 1:
            task = self._open[-1]
            task.part, task.note = done / total, f"{what} {done}/{total}"
            self._show(task)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self.silent:
            return
        above_bar = tqdm.tqdm.external_write_mode(file=_find_screen()) if self.show_bar else nullcontext()
        with above_bar:
            # in one write, as a thread that saves prints too
            print(f"{text}\n", end="", flush=True)

    def close(self) -> None:
        """Close all bars, so that further output appears below them."""
        while self._open:
            self._open.pop().bar.close()

    @contextmanager
    def _showing(self, what: str, total: int, done: int = 0) -> Iterator[Task]:
        """Open a task, and on a terminal a bar; finally close both."""
        bar = tqdm.tqdm(
            total=total,
            initial=done,
            bar_format="{percentage:3.0f}% |{bar:20}| {desc}",
            file=_find_screen(),
            disable=not self.show_bar,
            leave=not self._open,  # the outermost bar stays
            miniters=0,
            dynamic_ncols=True,
        )
        task = Task(what, total, done, bar)
        bar.set_description_str(str(task))
        self._open.append(task)
        try:
            yield task
        finally:
            if task in self._open:  # unless `close` has closed it
                self._open.remove(task)
                bar.close()
            if self._open:
                self._open[-1].nested_seconds += time.monotonic() - task.start_time

    def _show(self, task: Task) -> None:
        if self.show_bar:
            self._draw(task)
        elif task.done < task.total and time.monotonic() - task.last_line_time >= LINE_SECS:
            task.last_line_time = time.monotonic()
            self.line(str(task))

    def _draw(self, task: Task) -> None:
        task.bar.set_description_str(str(task), refresh=False)
        task.bar.update(task.done + task.part - task.bar.n)
