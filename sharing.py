"""Work that one process of each machine does for all of its machine, while the others wait as long as it takes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

from waiting import answers, default_store, is_shared

T = TypeVar("T")
BEAT_SECS = 2.0


def once_per_machine(
    make: Callable[[], T], *, give: Callable[[T], str], take: Callable[[str], T], silence_secs: float
) -> T:
    """What `make` gives in the first process of each machine, and `take(give(made))` in the others.

    Every process must call it; it returns once all machines are done. Nobody waits in a collective, which has a timeout
    and lets no signal through: whoever makes says at the store every few seconds that it is alive. Raises DistError
    where another process failed, or was silent for `silence_secs`.
    """
    if not is_shared():
        return make()
    rank, store = dist.get_rank(), default_store()
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, _machine())
    first = machines.index(machines[rank])
    key = f"once per machine, call {store.add(f'calls of {rank}', 1)}, rank"
    made = None
    if rank == first:
        made = _make(make, give, store, f"{key} {rank}", min(BEAT_SECS, silence_secs / 4))
    said = _wait(store, {other: f"{key} {other}" for other in map(machines.index, machines)}, silence_secs)
    return take(said[first]) if rank != first else made


def _wait(store: dist.Store, keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """What these ranks give when they are done. Raises DistError if one failed or is silent."""
    given: dict[int, str] = {}
    for rank, answer in answers(store, keys, {rank: _signs(key) for rank, key in keys.items()}, silence_secs):
        outcome, _, given[rank] = answer.partition(" ")
        if outcome != "done":
            raise dist.DistError(f"rank {rank} failed while the others waited for it")
    return given


def _signs(key: str) -> str:
    return f"{key} lives"


def _machine() -> str:
    """What processes have in common that can open each other's files under /proc."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _make(make: Callable[[], T], give: Callable[[T], str], store: dist.Store, key: str, beat_secs: float) -> T:
    try:
        with _alive(store, key, beat_secs):
            made = make()
        store.set(key, f"done {give(made)}")
        return made
    except BaseException:
        with suppress(dist.DistError):  # what is raised is what went wrong first
            store.set(key, "failed")
        raise


@contextmanager
def _alive(store: dist.Store, key: str, beat_secs: float) -> Iterator[None]:
    """Say so at the store, again and again."""
    done = threading.Event()

    def beat() -> None:
        with suppress(dist.DistError):  # without a store the others end by themselves
            while not done.wait(beat_secs):
                store.add(_signs(key), 1)

    thread = threading.Thread(target=beat, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
