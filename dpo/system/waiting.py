"""Waiting for work that one rank does alone, such as saving.

In a collective the other ranks would time out even if the working rank makes progress, and would not handle signals.
Instead, they poll the store, and wait as long as the working rank sends heartbeats. It sends them for at most
LONGEST_WORK collective timeouts, so that a rank that hangs, on a disk for instance, ends the run.
"""

from __future__ import annotations

import os
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
BEAT_SECS = 0.5  # between two heartbeats
LONGEST_PAUSE = 0.5  # longest time between two polls of the store, in seconds
LONGEST_WORK = 10  # collective timeouts for which a rank may work alone: 5 hours by default


def is_shared() -> bool:
    """Return whether there are other processes to wait for."""
    return dist.is_initialized() and dist.get_world_size() > 1


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def sending_heartbeats() -> Iterator[None]:
    """Send heartbeats to waiting ranks, from a thread, while this rank works inside."""
    if not is_shared():
        yield
        return
    done, store, key = threading.Event(), default_store(), f"heartbeats of rank {dist.get_rank()}"
    deadline = time.monotonic() + LONGEST_WORK * store.timeout.total_seconds()

    def beat() -> None:
        with suppress(dist.DistError):  # if the store is gone, the other ranks notice it themselves
            while not done.wait(BEAT_SECS) and time.monotonic() < deadline:
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for(rank: int, key: str, silence_secs: float) -> str:
    """Wait until a rank has set the value of a key in the store; return the value.

    Raises DistError if the rank neither sets it nor sends a heartbeat for `silence_secs`.
    """
    store, pause = default_store(), 0.005
    n_heartbeats, last_heartbeat = 0, time.monotonic()
    while not store.check([key]):
        n = store.add(f"heartbeats of rank {rank}", 0)  # adding 0 reads the counter
        if n != n_heartbeats:
            n_heartbeats, last_heartbeat = n, time.monotonic()
        elif time.monotonic() - last_heartbeat > silence_secs:
            raise dist.DistError(f"rank {rank} sent no heartbeat for {silence_secs:g} s")
        time.sleep(pause)  # returns to Python, so that signals are handled
        pause = min(2 * pause, LONGEST_PAUSE)
    return store.get(key).decode()


def meet_rank_0(place: str) -> None:
    """Wait until rank 0, which does not wait, has reached a place, whose name is used once in a run.

    Raises DistError if rank 0 neither arrives nor sends a heartbeat within the collective timeout.
    """
    if not is_shared():
        return
    store, key = default_store(), f"rank 0 at {place}"
    if dist.get_rank() == 0:
        store.set(key, "")
    else:
        wait_for(0, key, store.timeout.total_seconds())


def after_rank_0(place: str, act: Callable[[], T]) -> T:
    """Call `act()` on rank 0, then on the other ranks; each gets its own result."""
    if is_shared() and dist.get_rank() != 0:
        meet_rank_0(place)
        return act()
    with sending_heartbeats():
        result = act()
    meet_rank_0(place)  # lets the other ranks go on
    return result


def once_per_machine(make: Callable[[], str]) -> str:
    """Call `make()` in one process of each machine; return its result to all, once all machines are done.

    A process whose `make` fails ends; the others lose contact with it, at the latest after a collective timeout.
    """
    if not is_shared():
        return make()
    rank, store = dist.get_rank(), default_store()
    machines: list[str] = [""] * dist.get_world_size()  # by rank
    dist.all_gather_object(machines, identify_machine())
    makers = {machines.index(machine) for machine in machines}  # the first rank of each machine
    call = store.add(f"calls of {rank}", 1)  # the same number on every rank, as all ranks make all calls
    keys = {maker: f"once per machine, call {call}, rank {maker}" for maker in makers}  # where makers put their results
    if rank in makers:
        with sending_heartbeats():
            store.set(keys[rank], make())
    results = {maker: wait_for(maker, key, store.timeout.total_seconds()) for maker, key in keys.items()}
    return results[machines.index(machines[rank])]


def all_arrive(place: str, *, patience_secs: float) -> bool:
    """Record this rank's arrival at a place; return whether all ranks get there.

    It waits until another rank has sent no heartbeat for `patience_secs`, and not at all if they are 0.
    """
    if not is_shared():
        return True
    rank, store = dist.get_rank(), default_store()
    call = store.add(f"calls of {rank} at {place}", 1)
    store.set(f"{place}, call {call}, rank {rank}", "")
    try:
        for other in range(dist.get_world_size()) if patience_secs else ():
            wait_for(other, f"{place}, call {call}, rank {other}", patience_secs)
    except dist.DistError:
        return False
    return True


def check_alike(facts: Mapping[str, str]) -> None:
    """Raise InputError, on every rank, for facts in which ranks differ."""
    if not is_shared():
        return
    gathered: list[Any] = [None] * dist.get_world_size()  # by rank
    dist.all_gather_object(gathered, (socket.gethostname(), dict(facts)))
    host_0, facts_0 = gathered[0]
    for rank, (host, others) in enumerate(gathered):
        if different := [name for name, value in facts_0.items() if others.get(name) != value]:
            raise InputError(
                f"rank {rank} on {host} has not the same as rank 0 on {host_0}: {', '.join(different)}; give all "
                f"machines the same files"
            )


def identify_machine() -> str:
    """An id shared by processes that see the same files."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # host names may not be unique
    return f"{boot_id} {os.readlink('/proc/self/ns/mnt')}"  # a container has a mount namespace of its own


def leave_together() -> None:
    """Wait for all ranks, as rank 0's exit may end the store."""
    if is_shared():
        dist.barrier()
