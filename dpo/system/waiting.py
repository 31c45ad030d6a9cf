"""Waiting for work that one rank does alone, such as saving.

In a collective the other ranks would time out whatever progress that rank makes, and would not handle signals. Instead,
they poll the store, and wait as long as that rank sends heartbeats.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
BEAT_SECS = 2.0  # between two heartbeats
LONGEST_PAUSE = 0.5  # longest time between two polls of the store, in seconds
FAILED = "failed"  # in place of an answer; others begin with "done"


def is_shared() -> bool:
    """Return whether there are other processes to wait for."""
    return dist.is_initialized() and dist.get_world_size() > 1


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def wait_for(keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """The values that these ranks set under their keys.

    Raises DistError if a rank failed, or neither answers nor sends a heartbeat for `silence_secs`.
    """
    store, answers, pause = default_store(), {}, 0.005
    heard = dict.fromkeys(keys, (0, time.monotonic()))  # by rank: its count of heartbeats, and when the last one came
    while True:
        for rank in keys.keys() - answers.keys():
            if store.check([keys[rank]]):
                answers[rank] = store.get(keys[rank]).decode()
                if answers[rank] == FAILED:
                    raise dist.DistError(f"rank {rank} failed while the others waited for it")
            elif (count := store.add(_heartbeats(rank), 0)) != heard[rank][0]:  # adding 0 reads the counter
                heard[rank] = count, time.monotonic()
            elif time.monotonic() - heard[rank][1] > silence_secs:
                raise dist.DistError(f"rank {rank} sent no heartbeat for {silence_secs:g} s")
        if len(answers) == len(keys):
            return answers
        time.sleep(pause)  # in Python, so that signals are handled
        pause = min(2 * pause, LONGEST_PAUSE)


def _heartbeats(rank: int) -> str:
    """The key of a counter in the store."""
    return f"heartbeats of rank {rank}"


@contextmanager
def sending_heartbeats(beat_secs: float = BEAT_SECS) -> Iterator[None]:
    """Inside, a thread tells waiting ranks that this one lives."""
    done, store, key = threading.Event(), default_store(), _heartbeats(dist.get_rank())

    def beat() -> None:
        with suppress(dist.DistError):  # if the store is gone, the other ranks notice it themselves
            while not done.wait(beat_secs):
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def report_progress() -> None:
    """Tell waiting ranks that this one has made progress."""
    if is_shared():
        default_store().add(_heartbeats(dist.get_rank()), 1)


def meet_rank_0(place: str) -> None:
    """Wait until rank 0 has reached `place`, a name used once.

    Rank 0 does not wait. Raises DistError if it neither arrives nor makes progress within the collective timeout.
    """
    if not is_shared():
        return
    store, key = default_store(), f"rank 0 at {place}"
    if dist.get_rank() == 0:
        store.set(key, "")
    else:
        wait_for({0: key}, store.timeout.total_seconds())


def after_rank_0(place: str, act: Callable[[], T]) -> T:
    """Return `act()`, called on rank 0 before the other ranks."""
    if not is_shared() or dist.get_rank() != 0:
        meet_rank_0(place)
        return act()
    with sending_heartbeats():
        done = act()
    meet_rank_0(place)
    return done


def once_per_machine(make: Callable[[], str], *, silence_secs: float) -> str:
    """The result of `make()`, called in one process of each machine.

    Every process must call this; it returns once all machines are done. Raises DistError if one of the calls failed, or
    a process that makes one sent no heartbeat for `silence_secs`.
    """
    if not is_shared():
        return make()
    rank, store = dist.get_rank(), default_store()
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, identify_machine())
    call = store.add(f"calls of {rank}", 1)  # the same number on every rank
    first_ranks = {machines.index(machine) for machine in machines}  # one per machine
    keys = {first: f"once per machine, call {call}, rank {first}" for first in first_ranks}
    first = machines.index(machines[rank])
    if rank == first:
        try:
            with sending_heartbeats(min(BEAT_SECS, silence_secs / 4)):
                made = make()
            store.set(keys[rank], f"done {made}")
        except BaseException:
            with suppress(dist.DistError):  # the first error is the one to raise
                store.set(keys[rank], FAILED)
            raise
    return wait_for(keys, silence_secs)[first].removeprefix("done ")


def identify_machine() -> str:
    """An id shared by processes that see the same files."""
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # host names may not be unique
    return f"{booted} {os.readlink('/proc/self/ns/mnt')}"


def leave_together() -> None:
    """Wait for every rank, as rank 0 may serve their common store."""
    if is_shared():
        dist.barrier()
