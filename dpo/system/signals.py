"""Stop signals: Ctrl-C, SIGTERM and SIGUSR1 end a run with a checkpoint; a second Ctrl-C ends it without one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from dpo.system.rank_env import is_rank_0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ABORTED = 128 + signal.SIGINT  # exit status after Ctrl-C, saved or not, as shells expect
ASKED = 128 + signal.SIGTERM  # exit status after SIGTERM or SIGUSR1
SAME_SECS = 1  # a second SIGINT within this time is the same Ctrl-C: terminal and launcher may both send it


class Stopped(Exception):
    """The run stopped on signal `number`; a checkpoint is saved."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(f"asked to stop by {signal.Signals(number).name}")
        self.status = ABORTED if number == signal.SIGINT else ASKED


def abort() -> NoReturn:
    """End at once, whatever is being written in the background."""
    print("aborted: nothing more is saved", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ABORTED)


@contextmanager
def on_stop_signals(act: Callable[[int], object]) -> Iterator[None]:
    """Inside, a signal is acknowledged in one line and calls `act` with its number; a second Ctrl-C raises
    KeyboardInterrupt. Ctrl-C stays ignored if it was. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: dict[int, float] = {}  # when each came first

    def hear(number: int, _: object) -> None:
        now, first = time.monotonic(), heard.get(number)
        heard.setdefault(number, now)
        if number == signal.SIGINT and first is not None:
            if now - first > SAME_SECS:
                raise KeyboardInterrupt
            return
        if len(heard) == 1 and _speaks():
            _acknowledge(number)
        act(number)

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    formers = {n: signal.signal(n, hear) for n in SIGNALS if n != signal.SIGINT or not ignored}
    try:
        yield
    finally:
        for number, former in formers.items():
            signal.signal(number, former)


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


def _speaks() -> bool:
    """Whether this is the one process of the run that prints: the parent of the others, or rank 0."""
    return multiprocessing.parent_process() is None and is_rank_0()


def _acknowledge(number: int) -> None:
    ctrl_c = number == signal.SIGINT
    line = f"{'Ctrl-C' if ctrl_c else signal.Signals(number).name}: stopping after saving a checkpoint"
    line += "; press Ctrl-C again to exit immediately without saving" if ctrl_c else ""
    if os.isatty(1):
        line = f"\r\x1b[K{line}"  # replaces the progress bar, which is redrawn below
    with suppress(OSError):  # a closed terminal or log file must not prevent the checkpoint
        os.write(1, f"{line}\n".encode())  # not print: the signal may have interrupted one
