"""Progress of a run: a bar, or lines in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tqdm

from dpo.numbers import clock_time, compact, count
from dpo.reporting.events import Callback, Evaluation, Update
from dpo.settings.plan import Plan

# in a log file a long task gets a line every QUIET_SECS; the first comes after SOON_SECS if it will take that long
QUIET_SECS, SOON_SECS = 10, 2
SHOWN = {  # metrics of an update that are shown: their label and significant digits
    "loss/train": ("loss", 4),
    "rewards_train/accuracies": ("acc", 2),
    "rewards_train/margins": ("margin", 3),
    "online/score": ("score", 3),
}


def table(title: str, metrics: Mapping[str, float]) -> str:
    """A title, then a line for each name and value."""
    width = max(map(len, metrics), default=0)
    return "\n".join([f"{title}:", *(f"  {name:<{width}}  {value:>10.5g}" for name, value in metrics.items())])


def _shows_bars() -> bool:
    """Return whether output goes to a terminal with rows.

    Without rows, as in some recorders, tqdm draws nothing.
    """
    if not sys.stdout.isatty():
        return False
    try:
        return 0 not in os.get_terminal_size(sys.stdout.fileno())
    except OSError:  # stdout is not a file with a size
        return True


class Task:
    """Progress of a long task: updates, an evaluation, sampling.

    `done` of its `total` items were finished before; each has `each` examples, if known.
    """

    def __init__(self, what: str, *, total: int, done: int, each: int | None, examples: int | None, bar: Any) -> None:
        self.what, self.total, self.done, self.each, self.bar = what, total, done, each, bar
        self.examples = examples or total * (each or 0)  # the last item may have fewer than `each`
        self.part, self.note = 0.0, ""  # fraction of the current item that is done, and a text on it
        self.began, self.done_before = time.monotonic(), done
        self.elsewhere = 0.0  # seconds spent in tasks inside this one, such as evaluations between updates
        self.last_line: float | None = None  # time of its last line in a log file

    def seconds(self) -> float:
        return time.monotonic() - self.began - self.elsewhere

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None while unknown."""
        done = self.done + self.part - self.done_before
        return self.seconds() / done * (self.total - self.done - self.part) if done > 0 else None

    def is_due(self) -> bool:
        """Return whether a log file should get a line."""
        if self.last_line is not None:
            return time.monotonic() - self.last_line >= QUIET_SECS
        will_be_long = (self.seconds_left() or 0) >= QUIET_SECS
        return self.seconds() >= QUIET_SECS or (self.seconds() >= SOON_SECS and will_be_long)

    def __str__(self) -> str:
        facts, left = [f"{self.what} {self.done}/{self.total}"], self.seconds_left()
        if self.each:
            facts.append(f"{min(self.done * self.each, self.examples):,}/{count(self.examples, 'example')}")
        if self.note:
            facts.append(self.note)
        if left is not None:
            facts.append(f"{clock_time(left)} left")
        return "  ".join(facts)


class Progress(Callback):
    """Progress as a bar on a terminal, or lines in a log.

    Lines come at most every `interval` seconds for updates, every ten seconds for other long tasks. `each` is the
    number of examples per item of a task, if known.
    """

    def __init__(self, *, interval: float, silent: bool, each: Mapping[str, int] | None = None) -> None:
        self.interval, self.silent, self.each = interval, silent, each or {}
        self.show_bar = not silent and _shows_bars()
        self._open: list[Task] = []  # each runs inside the task before it
        self._last_update = float("-inf")

    @classmethod
    def of(cls, plan: Plan, *, silent: bool) -> Progress:
        each = {"update": plan.data.batch_size, **dict.fromkeys(("evaluate", "sample"), plan.data.eval_batch_size)}
        return cls(interval=plan.logging.minimum_log_interval_secs, silent=silent, each=each)

    def updates(self, items: Iterable, *, total: int, done: int) -> Iterator:
        """Iterate over batches, of which `done` were done before."""
        with self._showing("update", total=total, done=done, leave=True):
            yield from items

    def over(self, items: Iterable, *, total: int, what: str, examples: int | None = None) -> Iterator:
        """Iterate over the items of a task."""
        with self._showing(what, total=total, examples=examples) as task:
            for task.done, item in enumerate(items):
                yield item
                task.done, task.part, task.note = task.done + 1, 0.0, ""
                self._show(task)

    def on_update(self, update: Update) -> None:
        if self.silent:
            return
        metrics, task = update.metrics, self._open[-1]
        facts = [f"{label} {compact(metrics[name], n)}" for name, (label, n) in SHOWN.items() if name in metrics]
        task.done, task.part = update.number, 0.0
        task.note = "  ".join([*facts, f"{compact(metrics['examples_per_second'])} ex/s"])
        if self.show_bar:
            self._draw(task)
        elif time.monotonic() - self._last_update >= self.interval:
            self._last_update = task.last_line = time.monotonic()
            self.line(str(task))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.line(table(f"evaluation after {count(evaluation.n_examples, 'example')}", evaluation.metrics))

    def part(self, done: int, total: int, what: str) -> None:
        """Report progress within the current item, for instance in tokens."""
        if self._open:
            task = self._open[-1]
            task.part, task.note = done / total, f"{what} {done}/{total}"
            self._show(task)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.silent:
            tqdm.tqdm.write(text, file=sys.stdout) if self.show_bar else print(text, flush=True)

    def close(self) -> None:
        """Close the bars, so that further output appears below them."""
        while self._open:
            self._open.pop().bar.close()

    @contextmanager
    def _showing(
        self, what: str, *, total: int, done: int = 0, leave: bool = False, examples: int | None = None
    ) -> Iterator[Task]:
        bar = tqdm.tqdm(
            total=total,
            initial=done,
            bar_format="{percentage:3.0f}% |{bar:20}| {desc}",
            file=sys.stdout,
            disable=not self.show_bar,
            leave=leave,
            miniters=0,
            dynamic_ncols=True,
        )
        task = Task(what, total=total, done=done, each=self.each.get(what), examples=examples, bar=bar)
        bar.set_description_str(str(task))
        self._open.append(task)
        try:
            yield task
        finally:
            if task in self._open:
                self._open.remove(task)
                bar.close()
            if self._open:
                self._open[-1].elsewhere += time.monotonic() - task.began

    def _show(self, task: Task) -> None:
        if self.show_bar:
            self._draw(task)
        elif task.seconds_left() != 0 and task.is_due():
            is_first_estimate = task.last_line is None and task.seconds_left() is not None
            task.last_line = time.monotonic()
            self.line(f"{task}{' at the rate so far' if is_first_estimate else ''}")

    def _draw(self, task: Task) -> None:
        task.bar.set_description_str(str(task), refresh=False)
        task.bar.update(task.done + task.part - task.bar.n)
