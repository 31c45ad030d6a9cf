"""Waiting for work that one rank does alone, such as saving.

In a collective the other ranks would time out even if the working rank makes progress, and would not handle signals.
Instead, they poll the store, and wait as long as the working rank sends heartbeats.
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
FAILED = "failed"  # the value that a rank sets after an error; results are set as "done RESULT"


def is_shared() -> bool:
    """Return whether there are other processes to wait for."""
    return dist.is_initialized() and dist.get_world_size() > 1


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def _heartbeat_key(rank: int) -> str:
    """The key of a rank's counter of heartbeats in the store."""
    return f"heartbeats of rank {rank}"


@contextmanager
def sending_heartbeats() -> Iterator[None]:
    """Send heartbeats to waiting ranks, from a thread, while this rank works inside."""
    if not is_shared():
        yield
        return
    done, store, key = threading.Event(), default_store(), _heartbeat_key(dist.get_rank())

    def beat() -> None:
        with suppress(dist.DistError):  # if the store is gone, the other ranks notice it themselves
            while not done.wait(BEAT_SECS):
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for(keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """Wait for the values that ranks set in the store under these keys; return them by rank.

    Raises DistError if a rank failed, or neither sets its value nor sends a heartbeat for `silence_secs`.
    """
    store, values, pause = default_store(), {}, 0.005
    n_heartbeats = dict.fromkeys(keys, 0)  # by rank
    last_heartbeat = dict.fromkeys(keys, time.monotonic())  # when it came, by rank
    while True:
        for rank in keys.keys() - values.keys():
            if store.check([keys[rank]]):
                values[rank] = store.get(keys[rank]).decode()
                if values[rank] == FAILED:
                    raise dist.DistError(f"rank {rank} failed while the others waited for it")
                continue
            n = store.add(_heartbeat_key(rank), 0)  # adding 0 reads the counter
            if n != n_heartbeats[rank]:
                n_heartbeats[rank], last_heartbeat[rank] = n, time.monotonic()
            elif time.monotonic() - last_heartbeat[rank] > silence_secs:
                raise dist.DistError(f"rank {rank} sent no heartbeat for {silence_secs:g} s")
        if len(values) == len(keys):
            return values
        time.sleep(pause)  # returns to Python, so that signals are handled
        pause = min(2 * pause, LONGEST_PAUSE)


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
        wait_for({0: key}, store.timeout.total_seconds())


def after_rank_0(place: str, act: Callable[[], T]) -> T:
    """Call `act()` on rank 0, then on the other ranks; each gets its own result."""
    if not is_shared():
        return act()
    if dist.get_rank() != 0:
        meet_rank_0(place)
        return act()
    with sending_heartbeats():
        result = act()
    meet_rank_0(place)  # lets the other ranks go on
    return result


def once_per_machine(make: Callable[[], str], *, silence_secs: float) -> str:
    """Call `make()` in one process of each machine; return its result to all, once all machines are done.

    Raises DistError if a call of `make` failed, or if its process sent no heartbeat for `silence_secs`.
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
        try:
            with sending_heartbeats():
                result = make()
            store.set(keys[rank], f"done {result}")
        except BaseException:
            with suppress(dist.DistError):  # the error of `make` is the one to raise
                store.set(keys[rank], FAILED)
            raise
    own_maker = machines.index(machines[rank])
    return wait_for(keys, silence_secs)[own_maker].removeprefix("done ")


def all_arrive(place: str, *, patience_secs: float) -> bool:
    """Record this rank's arrival at a place; return whether all ranks get there.

    It waits until another rank has sent no heartbeat for `patience_secs`, and not at all if they are 0.
    """
    if not is_shared():
        return True
    rank, store = dist.get_rank(), default_store()
    call = store.add(f"calls of {rank} at {place}", 1)
    keys = {other: f"{place}, call {call}, rank {other}" for other in range(dist.get_world_size())}
    store.set(keys[rank], "")
    try:
        for other, key in keys.items() if patience_secs else ():
            wait_for({other: key}, patience_secs)
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
