"""Waiting for what rank 0 does alone, as verifying or writing a checkpoint, for as long as it gets on with it.

A collective in which the others wait would end the run after the group's timeout, however far rank 0 is. At the store
they wait until it has come to the same place, and give up only if it makes no progress for that long.
"""

from __future__ import annotations

import time

import torch.distributed as dist

PROGRESS = "progress of rank 0"  # key of a count at the store
LONGEST_PAUSE = 0.5  # seconds between two looks at the store


def made_progress() -> None:
    """Rank 0 has done another piece of what it does alone."""
    if _is_shared():
        _store().add(PROGRESS, 1)


def meet_rank_0(place: str) -> None:
    """Return when rank 0 has come to this place, which nobody has named before; rank 0 does not wait.

    Raises DistError if rank 0 neither comes nor makes progress for as long as a collective may take.
    """
    if not _is_shared():
        return
    store, key = _store(), f"rank 0 at {place}"
    if dist.get_rank() == 0:
        store.set(key, "")
        return
    seen, since, pause = None, time.monotonic(), 0.005
    while not store.check([key]):
        time.sleep(pause)  # in Python, so that a signal is heard
        pause = min(2 * pause, LONGEST_PAUSE)
        count = store.add(PROGRESS, 0)
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > store.timeout.total_seconds():
            raise dist.DistError(f"rank 0 makes no progress with what it does before {place}")


def _is_shared() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
