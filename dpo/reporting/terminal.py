"""Progress and evaluations on a terminal, or as lines in a log file."""

import io
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tqdm

from dpo.numbers import compact, count
from dpo.reporting.events import Callback, Evaluation, Update
from dpo.settings.plan import Plan

LINE = "{desc} {n_fmt}/{total_fmt}{postfix}, {remaining} left"  # tqdm fills these in
BAR = "{percentage:3.0f}% {remaining} left |{bar}| {desc} {n_fmt}/{total_fmt}{postfix}"  # fits 80 columns
LINE_SECS = 10  # time between lines about a long task in a log file
UPDATE_METRICS = {  # metrics in a line about an update: (label, significant digits)
    "loss/train": ("loss", 4),
    "rewards_train/accuracies": ("acc", 2),
    "rewards_train/margins": ("margin", 3),
    "online/score": ("score", 3),
}


def _find_original_stdout() -> Any:
    """Return stdout without the `RecordedStream` that copies it to the run's log, where bars do not belong."""
    return getattr(sys.stdout, "original", sys.stdout)


class Progress(Callback):
    """Shows a bar on a terminal; elsewhere prints lines, about updates at most every `minimum_log_interval_secs`."""

    _last_line_time = float("-inf")

    def __init__(self, plan: Plan, *, silent: bool):
        self.interval = plan.run.minimum_log_interval_secs
        self.batch_size = plan.data.batch_size
        self.reference = plan.reference  # None: the loss has no reference
        self.silent = silent
        self.show_bar = not silent and sys.stdout.isatty()
        self._bars: list[tqdm.tqdm] = []  # one for each running task; each task runs inside the one before it

    def track_updates(self, items: Iterable, *, total: int, done: int) -> Iterator:
        """Yield `items`, the updates that remain of `total` after `done`, under a bar, which `on_update` advances."""
        with self._showing_bar("update", total, done):
            yield from items

    def track(self, items: Iterable, *, total: int, what: str) -> Iterator:
        """Yield the items of a task under a bar of its own; the task may run inside another one, such as training."""
        self._last_line_time = time.monotonic()  # a task shorter than LINE_SECS prints no line
        with self._showing_bar(what, total):
            for n_done, item in enumerate(items):
                if n_done:
                    self._show(n_done)
                yield item

    def show_token(self, done: int, total: int) -> None:
        """Show beside the innermost bar how many tokens of an answer are drawn."""
        if self._bars:
            self._show(self._bars[-1].n, f"token {done}/{total}")

    def on_update(self, update: Update) -> None:
        metrics = update.metrics
        facts = []
        for name, (label, digits) in UPDATE_METRICS.items():
            if name in metrics:
                facts.append(f"{label} {compact(metrics[name], digits)}")
        if not self.show_bar:
            n_examples = self._bars[-1].total * self.batch_size
            facts.insert(0, f"{update.number * self.batch_size:,}/{count(n_examples, 'example')}")
            facts.append(f"{compact(metrics['examples_per_second'])} ex/s")
        self._show(update.number, "  ".join(facts), self.interval)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        width = max(map(len, evaluation.metrics), default=0)
        lines = [f"evaluation after {count(evaluation.n_examples, 'example')}:"]
        for name, value in evaluation.metrics.items():
            lines.append(f"  {name:<{width}}  {value:>10.5g}")
        if self.reference and evaluation.n_updates == 0 and evaluation.metrics.get("rewards_eval/accuracies") == 0:
            lines.append("  (before the first update policy and reference are equal: each pair is a tie, counted as 0)")
        self.line("\n".join(lines))

    def line(self, text: str) -> None:
        """Print a message; a bar is redrawn below."""
        if not self.silent:
            with tqdm.tqdm.external_write_mode(file=_find_original_stdout()):
                print(text, flush=True)

    def close(self) -> None:
        """Close the bars, so that further output appears below them."""
        while self._bars:
            self._bars.pop().close()

    @contextmanager
    def _showing_bar(self, what: str, total: int, done: int = 0) -> Iterator:
        """Show a task's bar while the context is open; without a terminal, tqdm only computes the text of the lines."""
        bar = tqdm.tqdm(
            total=total,
            initial=done,
            desc=what,
            bar_format=BAR if self.show_bar else LINE,
            file=_find_original_stdout() if self.show_bar else io.StringIO(),
            leave=not self._bars,  # the outermost bar stays
            smoothing=0,  # the time left is estimated from the mean speed
            miniters=0,
            dynamic_ncols=self.show_bar,
        )
        self._bars.append(bar)
        start = time.monotonic()
        try:
            yield
        finally:
            if bar in self._bars:  # unless `close` has closed it
                self._bars.remove(bar)
                bar.close()
            # The time of a task before the first update, such as an evaluation, must not lower the speed of updates.
            if self._bars and self._bars[-1].n == self._bars[-1].initial:
                self._bars[-1].start_t += time.monotonic() - start

    def _show(self, done: float, note: str = "", interval: float = LINE_SECS) -> None:
        """Show at the innermost bar that `done` items are done, and a note.

        Where bars are not drawn, print the bar's text, unless a line was printed less than `interval` seconds ago.
        """
        bar = self._bars[-1]
        bar.set_postfix_str(note, refresh=False)
        bar.update(done - bar.n)
        if not self.show_bar and time.monotonic() - self._last_line_time >= interval:
            self._last_line_time = time.monotonic()
            self.line(str(bar))
