"""Waiting at the store for what another rank does alone, as loading data or writing a checkpoint.

In a collective the others would give up after the group's timeout, however far that rank is, and hear no signal. At the
store they wait as long as it gives signs of life.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
PROGRESS = "progress of rank 0"  # key of a count at the store
BEAT_SECS = 2.0  # between two signs of life
LONGEST_PAUSE = 0.5  # seconds between two looks at the store


def is_shared() -> bool:
    """Whether there are other processes to wait for."""
    return dist.is_initialized() and dist.get_world_size() > 1


def default_store() -> dist.Store:
    """The store at which all processes of the run have met."""
    return dist.distributed_c10d._get_default_store()


def answers(
    store: dist.Store, keys: Mapping[int, str], signs: Mapping[int, str], silence_secs: float
) -> Iterator[tuple[int, str]]:
    """(rank, what it has set under its key) of these ranks as they come. Under `signs` are keys of counts that grow.

    Raises DistError if a rank neither answers nor gives a sign of life for so long.
    """
    heard = dict.fromkeys(keys, (0, time.monotonic()))  # number of signs, and when the last one came
    missing, pause = dict(keys), 0.005
    while missing:
        for rank, key in list(missing.items()):
            if store.check([key]):
                del missing[rank]
                yield rank, store.get(key).decode()
            elif (count := store.add(signs[rank], 0)) != heard[rank][0]:
                heard[rank] = count, time.monotonic()
            elif time.monotonic() - heard[rank][1] > silence_secs:
                raise dist.DistError(f"rank {rank} gave no sign of life for {silence_secs:g} s")
        if missing:
            time.sleep(pause)  # in Python, so that a signal is heard
            pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def signs_of_life(store: dist.Store, key: str, beat_secs: float) -> Iterator[None]:
    """Inside, a count at the store grows again and again."""
    done = threading.Event()

    def beat() -> None:
        with suppress(dist.DistError):  # without a store the others end by themselves
            while not done.wait(beat_secs):
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def made_progress() -> None:
    """Rank 0 has done another piece of what it does alone."""
    if is_shared():
        default_store().add(PROGRESS, 1)


def meet_rank_0(place: str) -> None:
    """Return when rank 0 has come to this place, which nobody has named before; rank 0 does not wait.

    Raises DistError if rank 0 neither comes nor makes progress for as long as a collective may take.
    """
    if not is_shared():
        return
    store, key = default_store(), f"rank 0 at {place}"
    if dist.get_rank() == 0:
        store.set(key, "")
    else:
        dict(answers(store, {0: key}, {0: PROGRESS}, store.timeout.total_seconds()))


def after_rank_0(place: str, act: Callable[[], T]) -> T:
    """What `act` gives: on rank 0 at once, which shows that it lives, on the others when rank 0 has done with it."""
    if not is_shared() or dist.get_rank() != 0:
        meet_rank_0(place)
        return act()
    with signs_of_life(default_store(), PROGRESS, BEAT_SECS):
        done = act()
    meet_rank_0(place)
    return done
