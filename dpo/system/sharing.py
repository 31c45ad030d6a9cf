"""Work that one process of each machine does for all of its machine, while the others wait as long as it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from dpo.system.waiting import BEAT_SECS, answers, default_store, is_shared, signs_of_life

T = TypeVar("T")


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
    if rank == first:
        return made
    try:
        return take(said[first])
    except OSError as error:  # /proc may be mounted so that processes do not see into each other
        print(f"rank {rank} cannot open what rank {first} gives ({error}), and makes its own", flush=True)
        return make()


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
    """What processes have in common that can open each other's files under /proc: the booted system, its namespaces of
    processes and users, and the user. (Host names may be the same on several machines.)"""
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
        with suppress(dist.DistError):  # what is raised is what went wrong first
            store.set(key, "failed")
        raise
