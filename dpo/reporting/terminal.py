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
        self.what, self.total, self.bar, self.note = what, total, bar, ""
        self.done, self.done_at_start = float(done), done  # with the fraction of the current item
        self.start_time = self.last_line_time = time.monotonic()
        self.nested_seconds = 0.0  # spent in tasks inside this one, such as evaluations between updates

    def __str__(self) -> str:
        parts, n_new = [f"{self.what} {int(self.done)}/{self.total}", self.note], self.done - self.done_at_start
        if n_new > 0:
            seconds = time.monotonic() - self.start_time - self.nested_seconds
            parts.append(f"{clock_time(seconds / n_new * (self.total - self.done))} left")
        return "  ".join(filter(None, parts))


class Progress(Callback):
    """Progress as a bar on a terminal, or lines in a log.

    Lines come at most every `interval` seconds for updates, every ten seconds within a long task.
    """

    def __init__(self, *, interval: float, silent: bool, batch_size: int = 1) -> None:
        self.interval, self.silent, self.batch_size = interval, silent, batch_size
        self.show_bar = not silent and _shows_bars()
        self._open: list[Task] = []  # each runs inside the task before it in this list

    @classmethod
    def of(cls, plan: Plan, *, silent: bool) -> Progress:
        interval, batch_size = plan.logging.minimum_log_interval_secs, plan.data.batch_size
        return cls(interval=interval, silent=silent, batch_size=batch_size)

    def updates(self, items: Iterable, *, total: int, done: int) -> Iterator:
        """Iterate over the batches of updates.

        `done` of the `total` updates were made before; `items` has only the others.
        """
        with self._showing("update", total, done) as task:
            task.last_line_time = float("-inf")  # the first update has a line at once
            yield from items

    def over(self, items: Iterable, *, total: int, what: str) -> Iterator:
        """Iterate over the items of a task."""
        with self._showing(what, total) as task:
            for n_done, item in enumerate(items, start=1):
                yield item
                if n_done < total:
                    self._show(task, n_done, "")

    def part(self, done: int, total: int, what: str) -> None:
        """Report progress within the current item, for instance in tokens."""
        if self._open and total > 1:
            task = self._open[-1]
            fraction = min(done / total, 0.999)  # the item is not done
            self._show(task, int(task.done) + fraction, f"{what} {done}/{total}")

    def _show(self, task: Task, done: float, note: str, interval: float = LINE_SECS) -> None:
        """Show a task on its bar, or as a line if the last one is older than `interval`."""
        task.done, task.note = done, note
        if self.show_bar:
            task.bar.set_description_str(str(task), refresh=False)
            task.bar.update(done - task.bar.n)
        elif time.monotonic() - task.last_line_time >= interval:
            task.last_line_time = time.monotonic()
            self.line(str(task))

    def on_update(self, update: Update) -> None:
        if self.silent:
            return
        metrics, task = update.metrics, self._open[-1]
        facts = [f"{update.number * self.batch_size:,}/{count(task.total * self.batch_size, 'example')}"]
        for name, (label, digits) in SHOWN_METRICS.items():
            if name in metrics:
                facts.append(f"{label} {compact(metrics[name], digits)}")
        facts.append(f"{compact(metrics['examples_per_second'])} ex/s")
        self._show(task, update.number, "  ".join(facts), self.interval)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        text = table(f"evaluation after {count(evaluation.n_examples, 'example')}", evaluation.metrics)
        if evaluation.n_updates == 0 and evaluation.metrics.get("rewards_eval/accuracies") == 0:
            note = "before the first update policy and reference are equal: every pair is a tie, which counts as 0"
            text += f"\n  ({note})"
        self.line(text)

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
