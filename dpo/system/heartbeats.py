"""Heartbeats of a run's machines: one without power closes no connection, so the others would wait for it long."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BEATS_PER_TIMEOUT = 6
ENDED = -(2**62)  # added to the count of a machine's heartbeats when it has done its work


@contextmanager
def watching_machines(
    store: Any, machine: int, n_machines: int, *, writes: bool, timeout_secs: float, give_up: Callable[[str], None]
) -> Iterator:
    """Watch the other machines inside the context; one process of each machine, which `writes`, writes its heartbeats.

    `store` is the one through which the processes met. Once a machine has been silent for `timeout_secs`, or this
    process did not run for as long, a thread calls `give_up(why)`, which must end the process.
    """
    if n_machines == 1:
        yield
        return
    keys = [f"heartbeats of machine {i}" for i in range(n_machines)]
    heard_at = [time.monotonic()] * n_machines  # infinite once a machine has ended
    is_over = threading.Event()
    pause = timeout_secs / BEATS_PER_TIMEOUT

    def exchange(connection: Any) -> None:
        """Write and read heartbeats. Calls of the store may never return, so another thread looks at the clock."""
        counts = [0] * n_machines
        while not is_over.wait(pause):
            try:
                if writes:
                    connection.add(keys[machine], 1)
                now = list(map(int, connection.multi_get(keys)))
            except RuntimeError:  # the process that serves the store has ended, which closes all connections
                is_over.set()
                return
            for i in range(n_machines):
                if now[i] != counts[i]:
                    counts[i] = now[i]
                    heard_at[i] = math.inf if now[i] < 0 else time.monotonic()

    def watch() -> None:
        looked_at = time.monotonic()
        while not is_over.wait(pause):
            now = time.monotonic()
            if now - looked_at > timeout_secs:
                give_up(f"this process did not run for {now - looked_at:.0f} s, so the others went on without it")
            looked_at = now
            silent = [i for i in range(n_machines) if now - heard_at[i] > timeout_secs]
            if silent:
                names = " and ".join(f"machine {i}" for i in silent)
                give_up(f"no heartbeat of {names} for {timeout_secs:g} s (heartbeat_timeout_secs)")

    threading.Thread(target=exchange, args=(store.clone(),), daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        if writes:
            store.add(keys[machine], ENDED)
    finally:
        is_over.set()
