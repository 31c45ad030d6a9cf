"""Progress of a run: a bar, or lines in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import tqdm

from dpo.numbers import clock_time, compact, count
from dpo.reporting.events import Callback, Evaluation, Update
from dpo.settings.plan import Plan

# in a log file, a long task gets a line every LINE_SECS; the first comes after FIRST_LINE_SECS if the task will take
# LINE_SECS longer
LINE_SECS, FIRST_LINE_SECS = 10, 2
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
    error_names = {f"{name}_se" for name in metrics}
    names = [name for name in metrics if name not in error_names]
    width = max(map(len, names), default=0)
    lines = [f"{title}:"]
    for name in names:
        error = metrics.get(f"{name}_se")
        note = "" if error is None else f" (SE {error:.2g})"
        lines.append(f"  {name:<{width}}  {metrics[name]:>10.5g}{note}")
    return "\n".join(lines)


def _shows_bars() -> bool:
    """Return whether output goes to a terminal that can show bars.

    Some recorders are terminals with 0 rows or columns, in which tqdm draws nothing.
    """
    if not sys.stdout.isatty():
        return False
    try:
        return 0 not in os.get_terminal_size(sys.stdout.fileno())
    except OSError:  # the size is unknown
        return True


def _find_screen() -> Any:
    """Standard output without the run's log, which has no place for bars."""
    return getattr(sys.stdout, "screen", sys.stdout)


class Task:
    """Progress of a long task: updates, an evaluation, sampling.

    - `total` items, of which `done` were finished before this process started.
    - `item_size`: examples per item, if known.
    - `examples`: examples of all items, if the last item has fewer than `item_size`.
    """

    def __init__(
        self, what: str, *, total: int, done: int, item_size: int | None, examples: int | None, bar: Any
    ) -> None:
        self.what, self.total, self.done, self.item_size, self.bar = what, total, done, item_size, bar
        self.examples = examples or total * (item_size or 0)  # shown only if the size is known
        self.item_fraction, self.note = 0.0, ""  # of the current item: the fraction that is done, and a text
        self.start_time, self.done_at_start = time.monotonic(), done
        self.nested_seconds = 0.0  # spent in tasks inside this one, such as evaluations between updates
        self.last_line_time: float | None = None  # of its last line in a log file

    def seconds(self) -> float:
        return time.monotonic() - self.start_time - self.nested_seconds

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None while unknown."""
        n_items = self.done + self.item_fraction
        n_new_items = n_items - self.done_at_start
        return self.seconds() / n_new_items * (self.total - n_items) if n_new_items > 0 else None

    def is_line_due(self) -> bool:
        """Return whether a log file should get a line."""
        if self.last_line_time is not None:
            return time.monotonic() - self.last_line_time >= LINE_SECS
        will_be_long = (self.seconds_left() or 0) >= LINE_SECS
        return self.seconds() >= LINE_SECS or (self.seconds() >= FIRST_LINE_SECS and will_be_long)

    def __str__(self) -> str:
        parts, seconds_left = [f"{self.what} {self.done}/{self.total}"], self.seconds_left()
        if self.item_size:
            parts.append(f"{min(self.done * self.item_size, self.examples):,}/{count(self.examples, 'example')}")
        if self.note:
            parts.append(self.note)
        if seconds_left is not None:
            parts.append(f"{clock_time(seconds_left)} left")
        return "  ".join(parts)


class Progress(Callback):
    """Progress as a bar on a terminal, or lines in a log.

    Lines come at most every `interval` seconds for updates, every ten seconds for other long tasks. `item_sizes` are
    the numbers of examples per item, by task.
    """

    def __init__(self, *, interval: float, silent: bool, item_sizes: Mapping[str, int] | None = None) -> None:
        self.interval, self.silent, self.item_sizes = interval, silent, item_sizes or {}
        self.show_bar = not silent and _shows_bars()
        self._open: list[Task] = []  # each runs inside the task before it in this list
        self._last_update_line = float("-inf")  # time

    @classmethod
    def of(cls, plan: Plan, *, silent: bool) -> Progress:
        eval_batch_size = plan.data.eval_batch_size
        item_sizes = {"update": plan.data.batch_size, "evaluate": eval_batch_size, "sample": eval_batch_size}
        return cls(interval=plan.logging.minimum_log_interval_secs, silent=silent, item_sizes=item_sizes)

    def updates(self, items: Iterable, *, total: int, done: int) -> Iterator:
        """Iterate over the batches of updates.

        `done` of the `total` updates were made before; `items` has only the others.
        """
        with self._showing("update", total=total, done=done, leave=True):
            yield from items

    def over(self, items: Iterable, *, total: int, what: str, examples: int | None = None) -> Iterator:
        """Iterate over the items of a task."""
        with self._showing(what, total=total, examples=examples) as task:
            for item in items:
                yield item
                task.done += 1
                task.item_fraction, task.note = 0.0, ""
                self._show(task)

    def on_update(self, update: Update) -> None:
        if self.silent:
            return
        metrics, task = update.metrics, self._open[-1]
        parts = []
        for name, (label, digits) in SHOWN_METRICS.items():
            if name in metrics:
                parts.append(f"{label} {compact(metrics[name], digits)}")
        parts.append(f"{compact(metrics['examples_per_second'])} ex/s")
        task.done, task.item_fraction, task.note = update.number, 0.0, "  ".join(parts)
        if self.show_bar:
            self._draw(task)
        elif time.monotonic() - self._last_update_line >= self.interval:
            self._last_update_line = task.last_line_time = time.monotonic()
            self.line(str(task))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        text = table(f"evaluation after {count(evaluation.n_examples, 'example')}", evaluation.metrics)
        if evaluation.n_updates == 0 and evaluation.metrics.get("rewards_eval/accuracies") == 0:
            text += (
                "\n  (before the first update policy and reference are equal: every pair is a tie, which counts as 0)"
            )
        self.line(text)

    def part(self, done: int, total: int, what: str) -> None:
        """Report progress within the current item, for instance in tokens."""
        if self._open and total > 1:
            task = self._open[-1]
            task.item_fraction, task.note = done / total, f"{what} {done}/{total}"
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
    def _showing(
        self, what: str, *, total: int, done: int = 0, leave: bool = False, examples: int | None = None
    ) -> Iterator[Task]:
        """Open a task, and on a terminal a bar; finally close both."""
        bar = tqdm.tqdm(
            total=total,
            initial=done,
            bar_format="{percentage:3.0f}% |{bar:20}| {desc}",
            file=_find_screen(),
            disable=not self.show_bar,
            leave=leave,
            miniters=0,
            dynamic_ncols=True,
        )
        task = Task(what, total=total, done=done, item_size=self.item_sizes.get(what), examples=examples, bar=bar)
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
            return
        seconds_left = task.seconds_left()
        if seconds_left != 0 and task.is_line_due():  # a task that is done needs no line
            is_first_estimate = task.last_line_time is None and seconds_left is not None
            task.last_line_time = time.monotonic()
            self.line(f"{task} at the rate so far" if is_first_estimate else str(task))

    def _draw(self, task: Task) -> None:
        task.bar.set_description_str(str(task), refresh=False)
        task.bar.update(task.done + task.item_fraction - task.bar.n)
