"""Being asked to stop: SIGTERM and SIGUSR1 end a run after the update at hand, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 128 + signal.SIGTERM  # what a run exits with that was asked to stop, by either signal


class Stopped(Exception):
    """The run was asked to stop, and did; what was trained is saved."""


@contextmanager
def on_stop_signals(act: Callable[[int], object]) -> Iterator[None]:
    """Inside, either signal calls `act` with its number and nothing else. Only a main thread can hear signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    formers = {number: signal.signal(number, lambda number, _: act(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, former in formers.items():
            signal.signal(number, former)
