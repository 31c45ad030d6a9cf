"""Work that one process per machine does for all processes of that machine, while they wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dpo.system.waiting import BEAT_SECS, answers, default_store, is_shared, signs_of_life

T = TypeVar("T")


def once_per_machine(
    make: Callable[[], T], *, give: Callable[[T], str], take: Callable[[str], T], silence_secs: float
) -> T:
    """The result of `make()` in the first process of each machine, and of `take(give(made))` in the others.

    Every process must call it; it returns once all machines are done. No process waits in a collective, which would
    time out and block signals; instead, the first processes send heartbeats through the store. Raises DistError if one
    of them failed, or sent no heartbeat for `silence_secs`.
    """
    if not is_shared():
        return make()
    rank, store = dist.get_rank(), default_store()
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, _machine())
    first = machines.index(machines[rank])
    key = f"once per machine, call {store.add(f'calls of {rank}', 1)}, rank"
    made: Any = None
    if rank == first:
        made = _make(make, give, store, f"{key} {rank}", min(BEAT_SECS, silence_secs / 4))
    said = _wait(store, {other: f"{key} {other}" for other in map(machines.index, machines)}, silence_secs)
    if rank == first:
        return made
    try:
        return take(said[first])
    except OSError as error:  # /proc may be mounted so that processes cannot see each other's files
        print(f"rank {rank} cannot open the data of rank {first} ({error}), so it loads its own copy", flush=True)
        return make()


def _wait(store: dist.Store, keys: Mapping[int, str], silence_secs: float) -> dict[int, str]:
    """Wait for these ranks and return what they give. Raises DistError if one failed or fell silent."""
    given: dict[int, str] = {}
    for rank, answer in answers(store, keys, {rank: _signs(key) for rank, key in keys.items()}, silence_secs):
        outcome, _, given[rank] = answer.partition(" ")
        if outcome != "done":
            raise dist.DistError(f"rank {rank} failed while the others waited for it")
    return given


def _signs(key: str) -> str:
    return f"{key} lives"


def _machine() -> str:
    """An id shared by processes that can open each other's files under /proc.

    They have the same boot, PID and user namespace, and user. (Different machines may have the same host name.)
    """
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    return " ".join([booted, *namespaces, str(os.getuid())])


def _make(make: Callable[[], T], give: Callable[[T], str], store: dist.Store, key: str, beat_secs: float) -> T:
    try:
        with signs_of_life(store, _signs(key), beat_secs):
            made = make()
        store.set(key, f"done {give(made)}")
        return made
    except BaseException:
        with suppress(dist.DistError):  # the first error is the one to raise
            store.set(key, "failed")
        raise
