"""Work that one process of each machine does for all of its machine, while the others wait as long as it takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
POLL_SECS, BEAT_SECS = 0.1, 2.0


def once_per_machine(
    make: Callable[[], T], *, give: Callable[[T], str], take: Callable[[str], T], silence_secs: float
) -> T:
    """What `make` gives in the first process of each machine, and `take(give(made))` in the others.

    Every process must call it; it returns once all machines are done. Nobody waits in a collective, which has a timeout
    and lets no signal through: whoever makes says at the store every few seconds that it is alive. Raises DistError
    where another process failed, or was silent for `silence_secs`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, _machine())
    first = machines.index(machines[rank])
    key = f"once per machine, call {store.add(f'calls of {rank}', 1)}, rank"
    made = None
    if rank == first:
        made = _make(make, give, store, f"{key} {rank}", min(BEAT_SECS, silence_secs / 4))
    said = _wait(store, {other: f"{key} {other}" for other in map(machines.index, machines)}, silence_secs)
    return take(said[first]) if rank != first else made


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
                store.add(f"{key} lives", 1)

    thread = threading.Thread(target=beat, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait(store: dist.Store, keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """What these ranks say under their keys when they are done. Raises DistError if one failed or is silent."""
    heard = dict.fromkeys(keys, (0, time.monotonic()))  # number of signs of life, and when the last one came
    said: dict[int, str] = {}
    while missing := keys.keys() - said.keys():
        for rank in missing:
            if store.check([keys[rank]]):
                outcome, _, said[rank] = store.get(keys[rank]).decode().partition(" ")
                if outcome != "done":
                    raise dist.DistError(f"rank {rank} failed while the others waited for it")
            elif (signs := store.add(f"{keys[rank]} lives", 0)) != heard[rank][0]:
                heard[rank] = signs, time.monotonic()
            elif time.monotonic() - heard[rank][1] > silence_secs:
                raise dist.DistError(f"rank {rank} gave no sign of life for {silence_secs:g} s")
        time.sleep(POLL_SECS if len(said) < len(keys) else 0)
    return said
