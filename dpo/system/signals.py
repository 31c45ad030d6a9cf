"""Stop signals: during training they end a run with a checkpoint, before that they end the process at once.

At once means without an exception, which a library might catch, for instance around an import.
"""

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

from dpo.system.host import is_launched_as_rank_0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal was closed
MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)  # as in a background job, or by nohup; then they stay ignored
INTERRUPT_STATUS = 128 + signal.SIGINT  # exit status after Ctrl-C, saved or not, as shells expect
STOP_STATUS = 128 + signal.SIGTERM  # exit status after any other stop signal
SAME_SECS = 1  # a second SIGINT within this time is from the same Ctrl-C: terminal and launcher may both send one


class Stopped(BaseException):
    """Raised when a run stops on a signal. This is no Exception, as libraries would catch one and go on."""

    def __init__(self, number: int = signal.SIGTERM, run_dir: str | Path | None = None):
        super().__init__(number)
        self.number = number
        self.run_dir = run_dir
        self.status = INTERRUPT_STATUS if number == signal.SIGINT else STOP_STATUS  # exit status of the process

    def __str__(self) -> str:
        advice = "nothing to save"
        if self.run_dir and any(Path(self.run_dir).glob("step-*")):
            advice = f"rerun the same command with local_run_dir={self.run_dir} resume=auto to continue"
        return f"stopped by {_name_signal(self.number)}: {advice}"


def end_on_stop_signals() -> None:
    """End the process on a stop signal from now on."""
    for number in _list_handled():
        signal.signal(number, partial(_end, None))


@contextmanager
def ending_on_stop_signals(run_dir: str | Path) -> Iterator:
    """End the process on a stop signal inside, with a message on how to continue the run in `run_dir`, if it can be.

    A Stopped that is raised inside gets the `run_dir`, for the same message.
    """
    with handling_signals(partial(_end, run_dir)):
        try:
            yield
        except Stopped as stopped:
            stopped.run_dir = run_dir
            raise


def _end(run_dir: str | Path | None, number: int, _: object) -> NoReturn:
    """Handle the signal `number`: end the process with the message and exit status of Stopped."""
    stopped = Stopped(number, run_dir)
    end_process(f"{stopped}\n" if _prints_for_run() else "", stopped.status)


def end_process(message: str, status: int) -> NoReturn:
    """Write a message to stderr, and exit with `status` without finalizing the interpreter.

    The threads of a process group might abort a process whose interpreter is finalized.
    """
    with suppress(OSError, RuntimeError):  # a signal may have interrupted a write
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):
        os.write(2, message.encode())
    os._exit(status)


@contextmanager
def on_stop_signals(act: Callable[[int], str]) -> Iterator:
    """Call `act(number)` on a stop signal inside, and print the message that it returns.

    A repeated signal is ignored, but a second Ctrl-C raises KeyboardInterrupt.
    """
    first_times = {}  # when each signal came first, by its number

    def handle(number: int, _: object) -> None:
        now = time.monotonic()
        if number in first_times:  # torchrun, Slurm or a user may send a signal again
            if number == signal.SIGINT and now - first_times[number] > SAME_SECS:
                raise KeyboardInterrupt
            return
        first_times[number] = now
        message = act(number)
        if len(first_times) == 1 and _prints_for_run():  # not again for another kind of signal
            if number == signal.SIGINT:
                message += "; press Ctrl-C again to exit immediately without saving"
            clear_line = "\r\x1b[K" if os.isatty(1) else ""  # the progress bar is redrawn below
            with suppress(OSError):  # a closed terminal or log file must not prevent the checkpoint
                # `print` may be what the signal interrupted, and cannot be entered twice.
                os.write(1, f"{clear_line}{_name_signal(number)}: {message}\n".encode())

    with handling_signals(handle):
        yield


@contextmanager
def handling_signals(handler: Any, *numbers: int) -> Iterator:
    """Let `handler` handle the signals `numbers` inside, by default all stop signals that are not ignored.

    In another thread than the main one nothing changes.
    """
    former_handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in numbers or _list_handled():
                former_handlers[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in former_handlers.items():
            if former is not None:  # a handler that was not set from Python cannot be restored
                signal.signal(number, former)


def _list_handled() -> list[int]:
    """List the stop signals, without those that the process was started to ignore."""
    return [n for n in SIGNALS if n not in MAY_BE_IGNORED or signal.getsignal(n) is not signal.SIG_IGN]


def _prints_for_run() -> bool:
    """Whether this process prints about signals: neither a worker of ours, nor another rank than 0."""
    return multiprocessing.parent_process() is None and is_launched_as_rank_0()


def _name_signal(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
