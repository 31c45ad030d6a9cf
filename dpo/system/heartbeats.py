"""Heartbeats of a run's machines. A machine that loses power closes no connection, so others would wait forever."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

BEATS_PER_TIMEOUT = 6


@contextmanager
def watching_machines(
    store: Any, machine: int, n_machines: int, *, writes: bool, timeout_secs: float, give_up: Callable[[str], None]
) -> Iterator:
    """Watch the other machines inside the context; a process with `writes`, one per machine, writes its heartbeats.

    `store` is the store through which the processes meet. A machine is watched from its first heartbeat on, until its
    context ends without an error. Once a machine has been silent for `timeout_secs`, or this process did not run for as
    long, a thread calls `give_up(why)`, which must end the process.
    """
    if n_machines == 1:
        yield
        return
    beats = [f"heartbeats of machine {i}" for i in range(n_machines)]
    ends = [f"end of machine {i}" for i in range(n_machines)]
    answered_at = time.monotonic()  # when the store last answered all calls of a round
    heard_at = [math.inf] * n_machines  # inf: not watched; one thread writes the list, the other reads it
    is_over = threading.Event()
    pause = timeout_secs / BEATS_PER_TIMEOUT

    def exchange(connection: Any) -> None:
        """Write and read heartbeats. A call of the store may never return, so `watch` runs in a thread of its own."""
        nonlocal answered_at
        counts = [0] * n_machines
        try:
            while not is_over.is_set():
                if writes:
                    connection.add(beats[machine], 1)
                for i in range(n_machines):
                    count = connection.add(beats[i], 0)  # unlike `get`, it does not wait for a first heartbeat
                    if connection.check([ends[i]]):
                        heard_at[i] = math.inf
                    elif count != counts[i]:
                        counts[i] = count
                        heard_at[i] = time.monotonic()
                answered_at = time.monotonic()
                is_over.wait(pause)
        except RuntimeError:  # the process that served the store has ended, so collectives fail, too
            is_over.set()

    def watch() -> None:
        """Give up if this process was stopped, if the store does not answer, or if another machine is silent."""
        looked_at = time.monotonic()
        while not is_over.wait(pause):
            now = time.monotonic()
            if now - looked_at > timeout_secs:
                give_up(f"for {now - looked_at:.0f} s it did not run, or C code held the GIL")
            looked_at = now
            silent = [i for i in range(n_machines) if now - heard_at[i] > timeout_secs]
            if now - answered_at > timeout_secs:
                give_up(f"the store, through which the processes meet, has not answered for {timeout_secs:g} s")
            elif silent:
                names = " and ".join(f"machine {i}" for i in silent)
                give_up(f"no heartbeat of {names} for {timeout_secs:g} s (heartbeat_timeout_secs)")

    threading.Thread(target=exchange, args=(store.clone(),), daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        if writes:
            with suppress(RuntimeError):  # the process that serves the store may have ended before
                store.set(ends[machine], "")
    finally:
        is_over.set()
