"""Waiting, through the store, for work that one rank does alone, such as loading data or writing a checkpoint.

A collective would time out whatever progress that rank makes, and would block signals. Instead, the other ranks poll
the store, and wait as long as that rank sends heartbeats.
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
PROGRESS = "progress of rank 0"  # key of a counter in the store
BEAT_SECS = 2.0  # between two heartbeats
LONGEST_PAUSE = 0.5  # longest time between two polls of the store, in seconds


def is_shared() -> bool:
    """Return whether there are other processes to wait for."""
    return dist.is_initialized() and dist.get_world_size() > 1


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def iterate_answers(
    store: dist.Store, keys: Mapping[int, str], signs: Mapping[int, str], silence_secs: float
) -> Iterator[tuple[int, str]]:
    """Yields (rank, the value set under its key) as the ranks answer.

    `signs` has the key of each rank's heartbeats. Raises DistError if a rank neither answers nor sends a
    heartbeat for `silence_secs`.
    """
    heard = dict.fromkeys(keys, (0, time.monotonic()))  # count of heartbeats, and when the last one came
    missing, pause = dict(keys), 0.005
    while missing:
        for rank, key in list(missing.items()):
            if store.check([key]):
                del missing[rank]
                yield rank, store.get(key).decode()
            elif (count := store.add(signs[rank], 0)) != heard[rank][0]:
                heard[rank] = count, time.monotonic()
            elif time.monotonic() - heard[rank][1] > silence_secs:
                raise dist.DistError(f"rank {rank} sent no heartbeat for {silence_secs:g} s")
        if missing:
            time.sleep(pause)  # in Python, so that signals are handled
            pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def sending_heartbeats(store: dist.Store, key: str, beat_secs: float) -> Iterator[None]:
    """Inside, a thread sends heartbeats: it increments a counter in the store every `beat_secs`."""
    done = threading.Event()

    def beat() -> None:
        with suppress(dist.DistError):  # without a store the other ranks fail by themselves
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
    """Tell the ranks that wait for rank 0 that it has made progress."""
    if is_shared():
        default_store().add(PROGRESS, 1)


def meet_rank_0(place: str) -> None:
    """Wait until rank 0 has reached `place`, a name used only once; rank 0 does not wait.

    Raises DistError if rank 0 neither arrives nor makes progress within the collective timeout.
    """
    if not is_shared():
        return
    store, key = default_store(), f"rank 0 at {place}"
    if dist.get_rank() == 0:
        store.set(key, "")
    else:
        dict(iterate_answers(store, {0: key}, {0: PROGRESS}, store.timeout.total_seconds()))


def after_rank_0(place: str, act: Callable[[], T]) -> T:
    """Call `act` on rank 0, with heartbeats, then on the other ranks; return its result."""
    if not is_shared() or dist.get_rank() != 0:
        meet_rank_0(place)
        return act()
    with sending_heartbeats(default_store(), PROGRESS, BEAT_SECS):
        done = act()
    meet_rank_0(place)
    return done


def once_per_machine(make: Callable[[], str], *, silence_secs: float) -> str:
    """The result of `make()` in the first process of each machine, for all processes of that machine.

    Every process must call it; it returns once all machines are done. Raises DistError if one of the first processes
    failed, or sent no heartbeat for `silence_secs`.
    """
    if not is_shared():
        return make()
    rank, store = dist.get_rank(), default_store()
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, identify_machine())
    call = store.add(f"calls of {rank}", 1)
    keys = {first: f"once per machine, call {call}, rank {first}" for first in map(machines.index, machines)}
    first = machines.index(machines[rank])
    if rank == first:
        make_for_others(make, store, keys[rank], min(BEAT_SECS, silence_secs / 4))
    return wait_for_makers(store, keys, silence_secs)[first]


def identify_machine() -> str:
    """An id shared by processes that see the same files."""
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # host names may not be unique
    return f"{booted} {os.readlink('/proc/self/ns/mnt')}"


def make_for_others(make: Callable[[], str], store: dist.Store, key: str, beat_secs: float) -> None:
    """Set the key to the result of `make()`, with heartbeats while it works, or to its failure."""
    try:
        with sending_heartbeats(store, f"{key} lives", beat_secs):
            made = make()
        store.set(key, f"done {made}")
    except BaseException:
        with suppress(dist.DistError):  # the first error is the one to raise
            store.set(key, "failed")
        raise


def wait_for_makers(store: dist.Store, keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """The results of these ranks. Raises DistError if one failed or fell silent."""
    made: dict[int, str] = {}
    for rank, answer in iterate_answers(
        store, keys, {rank: f"{key} lives" for rank, key in keys.items()}, silence_secs
    ):
        outcome, _, made[rank] = answer.partition(" ")
        if outcome != "done":
            raise dist.DistError(f"rank {rank} failed while the others waited for it")
    return made


def leave_together() -> None:
    """Wait until every rank is here: rank 0 may serve the store, which waiting ranks still poll."""
    if is_shared():
        dist.all_gather_object([None] * dist.get_world_size(), None)
