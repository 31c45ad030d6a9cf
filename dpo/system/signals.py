"""Stop signals: Ctrl-C, SIGTERM and SIGUSR1 end a run with a checkpoint.

A second Ctrl-C ends it without a checkpoint. While a run starts, a signal ends the process at once, as nothing can be
lost. Raising an exception instead, wherever the signal arrives, might reach a library that silently goes on, as in an
attempted import, or C++ that aborts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dpo.system.host import is_rank_0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ABORTED = 128 + signal.SIGINT  # exit status after Ctrl-C, saved or not, as shells expect
ASKED = 128 + signal.SIGTERM  # exit status after SIGTERM or SIGUSR1
before_end: list[Callable[[], object]] = []  # called when a signal ends this process at once
SAME_SECS = 1  # a second SIGINT within this time is the same Ctrl-C: terminal and launcher may both send it


class PressedAgain(KeyboardInterrupt):
    """A second Ctrl-C, which ends a run without saving."""


class Stopped(BaseException):
    """The run stopped on a signal; `run_dir` may hold a checkpoint.

    Not an Exception: libraries catch those and go on.
    """

    def __init__(self, number: int = signal.SIGTERM, run_dir: str | Path | None = None) -> None:
        super().__init__(number)
        self.number, self.run_dir = number, run_dir

    def __str__(self) -> str:
        has_checkpoint = self.run_dir is not None and any(Path(self.run_dir).glob("step-*"))
        way_on = f"rerun the same command with local_run_dir={self.run_dir} resume=auto to continue"
        return f"stopped by {_name(self.number)}: {way_on if has_checkpoint else 'nothing to save'}"

    @property
    def status(self) -> int:
        return ABORTED if self.number == signal.SIGINT else ASKED


def abort() -> NoReturn:
    """End at once, even while a checkpoint is written in the background."""
    _end("aborted: nothing more is saved", ABORTED)


def end_on_stop_signals() -> None:
    """Make signals end this process at once, with a message."""
    for number in _list_handled():
        signal.signal(number, partial(_end_by_signal, None))


def _end_by_signal(run_dir: str | Path | None, number: int, _: object) -> None:
    for act in before_end:
        with suppress(Exception):  # an error must not keep the process from ending
            act()
    stopped = Stopped(number, run_dir)
    _end(str(stopped) if _speaks() else "", stopped.status)


@contextmanager
def ending_on_stop_signals(run_dir: str | Path) -> Iterator[None]:
    """Inside, a signal ends this process at once, unless handled otherwise.

    A Stopped that passes through gets the `run_dir`, for its message.
    """
    with handling_signals(partial(_end_by_signal, run_dir)):
        try:
            yield
        except Stopped as stopped:
            stopped.run_dir = run_dir
            raise


@contextmanager
def on_stop_signals(act: Callable[[int], str]) -> Iterator[None]:
    """Inside, call `act` on stop signals, and print its message.

    `act` gets the signal's number. A second Ctrl-C raises PressedAgain. If Ctrl-C was ignored before, it stays ignored.
    """
    heard: dict[int, float] = {}  # when each signal came first

    def hear(number: int, _: object) -> None:
        now, first = time.monotonic(), heard.get(number)
        heard.setdefault(number, now)
        if number == signal.SIGINT and first is not None:
            if now - first > SAME_SECS:
                raise PressedAgain
            return
        message = act(number)
        if len(heard) == 1 and _speaks():
            again = "; press Ctrl-C again to exit immediately without saving" if number == signal.SIGINT else ""
            start = "\r\x1b[K" if os.isatty(1) else ""  # replaces the progress bar, which is redrawn below
            with suppress(OSError):  # a closed terminal or log file must not prevent the checkpoint
                # not `print`, which the signal may have interrupted: it cannot be entered twice
                os.write(1, f"{start}{_name(number)}: {message}{again}\n".encode())

    with handling_signals(hear):
        yield


@contextmanager
def handling_signals(handler: Any, *numbers: int) -> Iterator[None]:
    """Inside, these signals have this handler, by default all stop signals.

    No effect in a thread that may not set them. Restores the former handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    formers = {number: former for number in SIGNALS if (former := signal.getsignal(number)) is not None}
    try:
        for number in numbers or _list_handled():
            signal.signal(number, handler)
        yield
    finally:
        for number, former in formers.items():
            signal.signal(number, former)


def _list_handled() -> list[int]:
    """The signals to handle: Ctrl-C only if it is not ignored."""
    return [n for n in SIGNALS if n != signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]


def _speaks() -> bool:
    """Return whether this process prints for the run."""
    return multiprocessing.parent_process() is None and is_rank_0()


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _end(sentence: str, status: int) -> NoReturn:
    with suppress(OSError, RuntimeError):  # a signal may have interrupted a write
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode() if sentence else b"")
    os._exit(status)
