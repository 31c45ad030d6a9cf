"""Waiting for work that one rank does alone, such as saving, and noticing a machine that has gone.

Both use the key-value store that rank 0 serves. The others poll it while a rank works alone: in a collective they would
time out, and handle no signals. A `call_site` is any text that names a place in the code; the store's keys are made
from it.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dpo.errors import InputError

T = TypeVar("T")
LONGEST_PAUSE = 0.5  # longest time between two polls of the store, in seconds
LONGEST_WORK = 10  # collective timeouts for which a rank may work alone: 5 hours by default
BEATS_PER_TIMEOUT = 6
FAILURE_KEY = "a rank has failed"  # a key in the store, which a rank that fails sets before it exits


def has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank. It is sent pickled; other ranks' values are ignored.

    Every rank must call it.
    """
    if not has_other_ranks():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def default_store() -> dist.Store:
    """Return the store through which the default process group was formed."""
    return dist.group.WORLD.get_group_store()


@contextmanager
def store_with_watchdog() -> Iterator[dist.Store]:
    """Yield the store; this process aborts if the body takes longer than the store's timeout.

    A call of the store does not return while rank 0, which serves it, is suspended or hangs. At SIGABRT a worker prints
    its stack, and the parent takes it for one that lost contact.
    """
    store = default_store()
    watchdog = threading.Timer(store.timeout.total_seconds(), os.kill, (os.getpid(), signal.SIGABRT))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield store
    finally:
        watchdog.cancel()


def wait_for(key: str, longest_secs: float | None = None) -> str:
    """Wait until a rank sets a key in the store, and return its value.

    Raises DistError once a rank has failed, or after `longest_secs`, by default LONGEST_WORK collective timeouts.
    """
    store = default_store()
    pause = 0.005  # seconds; doubled after each poll
    longest = longest_secs or LONGEST_WORK * store.timeout.total_seconds()
    deadline = time.monotonic() + longest
    while True:
        with store_with_watchdog():
            if store.check([key]):
                return store.get(key).decode()
            if store.check([FAILURE_KEY]):
                raise dist.DistError(FAILURE_KEY)
        if time.monotonic() > deadline:
            raise dist.DistError(f"timed out after {longest:g} s of waiting for {key}")
        time.sleep(pause)  # returns to Python, so that signals are handled
        pause = min(2 * pause, LONGEST_PAUSE)


def announce(key: str, value: str = "") -> None:
    """Set a key in the store, for which other ranks may wait."""
    if has_other_ranks():
        default_store().set(key, value)


def meet_rank_0(call_site: str) -> None:
    """Wait until rank 0 has made the same call; rank 0 does not wait."""
    after_rank_0(call_site, lambda: None)


def after_rank_0(call_site: str, act: Callable[[], T]) -> T:
    """Call `act()` on rank 0 and, once it is done there, on all others; return this rank's result."""
    key = f"rank 0 at {name_call(call_site)}"
    if not is_rank_0():
        wait_for(key)
        return act()
    result = act()
    announce(key)  # lets the other ranks go on
    return result


def name_call(call_site: str) -> str:
    """Return the call site with the number of this call of it, which makes the store's keys unique.

    Every rank gets the same number, as each counts its own calls and all ranks make all calls.
    """
    if not has_other_ranks():
        return call_site
    with store_with_watchdog() as store:
        return f"{call_site}, call {store.add(f'calls of {dist.get_rank()} at {call_site}', 1)}"


def gather_all(value: Any) -> list:
    """Return the values of all processes in the order of ranks; they are sent pickled."""
    if not has_other_ranks():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def once_per_machine(make: Callable[[], str]) -> str:
    """Call `make()` in one process of each machine, and return its result in all of them, once all machines are done.

    All ranks must call this, as they first exchange the ids of their machines.
    """
    if not has_other_ranks():
        return make()
    machines = gather_all(identify_machine())  # by rank
    call = name_call("the work of one process per machine")
    firsts = [machines.index(machine) for machine in machines]  # by rank: the first rank of its machine
    rank = dist.get_rank()
    if firsts[rank] == rank:
        announce(f"rank {rank} at {call}", make())
    results = {first: wait_for(f"rank {first} at {call}") for first in set(firsts)}
    return results[firsts[rank]]


def identify_machine() -> str:
    """Return an id that is the same for processes of one machine that see the same files."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # host names may not be unique
    return f"{boot_id} {os.readlink('/proc/self/ns/mnt')}"  # a container has a mount namespace of its own


def all_arrive(call_site: str, *, patience_secs: float) -> bool:
    """Tell the other ranks that this one has arrived, and return whether each of them arrives in time.

    This rank waits for one after the other, up to `patience_secs` for each. With 0 it does not wait, and returns True.
    """
    if not has_other_ranks():
        return True
    call = name_call(call_site)
    announce(f"rank {dist.get_rank()} at {call}")
    if patience_secs:
        try:
            for other in range(dist.get_world_size()):
                wait_for(f"rank {other} at {call}", patience_secs)
        except dist.DistError:
            return False
    return True


def check_alike(facts: Mapping[str, str]) -> None:
    """Raise InputError, on every rank, if the facts of a rank differ from rank 0's; `facts` are values by name.

    Collectives that depend on these facts would hang, or compute something else, so they must come after this call.
    """
    if not has_other_ranks():
        return
    host_0, facts_0 = from_rank_0((socket.gethostname(), facts))
    different = sorted({name for name, _ in facts_0.items() ^ facts.items()})
    # Only a few names are shown, as those of all weights of a model would be long.
    for rank, (host, names) in enumerate(gather_all((socket.gethostname(), different[:3]))):
        if names:
            raise InputError(
                f"rank {rank} on {host} and rank 0 on {host_0} differ in {', '.join(names)}: use the same files, "
                "settings and versions on all machines"
            )


def barrier_before_exit() -> None:
    """Wait for all ranks, as rank 0 must not exit while another rank uses the store that rank 0 serves."""
    if has_other_ranks():
        dist.barrier()


# --- heartbeats. A machine that loses power closes no connection, so others would wait forever -----------------------


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
