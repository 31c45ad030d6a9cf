"""Stop signals: Ctrl-C, SIGTERM and SIGUSR1 end a run with a checkpoint; a second Ctrl-C ends it without one.

A signal is remembered beside what is done about it: an exception that a handler raises may reach a library that goes
on without a word, as one that tries an import does.
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
from pathlib import Path
from typing import NoReturn

from dpo.system.rank_env import is_rank_0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ABORTED = 128 + signal.SIGINT  # exit status after Ctrl-C, saved or not, as shells expect
ASKED = 128 + signal.SIGTERM  # exit status after SIGTERM or SIGUSR1
SAME_SECS = 1  # a second SIGINT within this time is the same Ctrl-C: terminal and launcher may both send it

_heard: dict[int, float] = {}  # the signals of this process since somebody listens, and when each came first
_n_listening = 0


class Stopped(BaseException):
    """The run stopped on signal `number`; what was trained is saved.

    Not an Exception: libraries go on after those. `way_on` says what is saved and how to continue.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number, self.way_on = number, ""

    def __str__(self) -> str:
        return f"stopped by {_name(self.number)}: {self.way_on or 'nothing to save'}"

    @property
    def status(self) -> int:
        return ABORTED if self.number == signal.SIGINT else ASKED


def abort() -> NoReturn:
    """End at once, whatever is being written in the background."""
    _end("aborted: nothing more is saved", ABORTED)


def end_on_stop_signals() -> None:
    """From now on a signal ends this process at once, with a sentence: for imports, where nothing can be lost."""

    def end(number: int, _: object) -> None:
        stopped = Stopped(number)
        _end(str(stopped) if _speaks() else "", stopped.status)

    for number in _heeded():
        signal.signal(number, end)


@contextmanager
def on_stop_signals(act: Callable[[int], str]) -> Iterator[None]:
    """Inside, a signal calls `act` with its number, and what that says is done about it is printed; a second Ctrl-C
    raises KeyboardInterrupt. `act` also learns of a signal that came while others listened outside.

    Ctrl-C stays ignored if it was. Only the main thread can handle signals.
    """
    global _n_listening
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, _: object) -> None:
        now, first = time.monotonic(), _heard.get(number)
        _heard.setdefault(number, now)
        if number == signal.SIGINT and first is not None:
            if now - first > SAME_SECS:
                raise KeyboardInterrupt
            return
        _acknowledge(number, act(number), first=len(_heard) == 1)

    formers = {number: signal.getsignal(number) for number in _heeded()}
    _n_listening += 1
    try:
        for number in formers:
            signal.signal(number, hear)
        for number in tuple(_heard):
            _acknowledge(number, act(number), first=True)
        yield
    finally:
        for number, former in formers.items():
            signal.signal(number, former)
        _n_listening -= 1
        if _n_listening == 0:
            _heard.clear()


@contextmanager
def raising_stopped() -> Iterator[None]:
    """Inside, a signal raises Stopped: at once, at the next `raise_if_asked`, and at the end if it was swallowed."""
    raised: list[int] = []

    def raise_stopped(number: int) -> NoReturn:
        raised.append(number)
        raise Stopped(number)

    with on_stop_signals(raise_stopped):
        try:
            yield
        except Exception as error:
            if raised:  # which a library has made this error of
                raise Stopped(raised[0]) from error
            raise
        if raised:
            raise Stopped(raised[0])


def raise_if_asked() -> None:
    """Raise Stopped if this process had a stop signal, whatever became of the exception that it raised then."""
    for number in _heard:
        raise Stopped(number)


@contextmanager
def saying_how_to_continue(run_dir: str | Path) -> Iterator[None]:
    """Inside, Stopped gets the way on for a run in this directory: there is none without a checkpoint."""
    try:
        yield
    except Stopped as stopped:
        if any(Path(run_dir).glob("step-*")):
            stopped.way_on = f"rerun the same command with local_run_dir={run_dir} resume=auto to continue"
        raise


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C from the start: a terminal sends it to all of them, and only their parent
    should handle it and forward it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _heeded() -> list[int]:
    """The signals to handle: Ctrl-C only if it is not ignored."""
    return [n for n in SIGNALS if n != signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]


def _speaks() -> bool:
    """Whether this is the one process of the run that prints: the parent of the others, or rank 0."""
    return multiprocessing.parent_process() is None and is_rank_0()


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _acknowledge(number: int, done: str, *, first: bool) -> None:
    if not first or not _speaks():
        return
    again = "; press Ctrl-C again to exit immediately without saving" if number == signal.SIGINT else ""
    line = f"{_name(number)}: {done}{again}"
    if os.isatty(1):
        line = f"\r\x1b[K{line}"  # replaces the progress bar, which is redrawn below
    with suppress(OSError):  # a closed terminal or log file must not prevent the checkpoint
        os.write(1, f"{line}\n".encode())  # not print: the signal may have interrupted one


def _end(sentence: str, status: int) -> NoReturn:
    with suppress(OSError, RuntimeError):  # a signal may have interrupted a write
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode() if sentence else b"")
    os._exit(status)
