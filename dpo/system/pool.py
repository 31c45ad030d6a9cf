"""A function applied to many items in several processes."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from types import ModuleType
from typing import Any

import tqdm

from dpo.errors import RunError
from dpo.system.host import drop_safe_path, safe_path_for_children

ITEMS_PER_CHUNK = 1000
WORKER = {}  # in a worker process: the function that it applies to items, by the key "function"


def map_chunks(
    function: Callable, items: Iterable, n_items: int, description: str, per_worker: int | None, *, silent: bool = False
) -> Iterator:
    """Yield `function(chunk)` for lists of up to ITEMS_PER_CHUNK items, in order, with a progress bar on a terminal.

    `n_items` is how many items there are. There is a process for each `per_worker` of them, at most one a core; with
    None, or too few items for two processes, this process does it all.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, ITEMS_PER_CHUNK)), [])  # ends at an empty list
    workers = 1
    if per_worker:
        workers = min(len(os.sched_getaffinity(0)), n_items // per_worker)
    # Starting a single worker would only cost time.
    results = _map_in_processes(function, chunks, workers) if workers > 1 else map(function, chunks)
    # disable=None: the bar is only drawn on a terminal
    with tqdm.tqdm(total=n_items, desc=description, unit="record", disable=True if silent else None) as bar:
        for result in results:
            yield result
            bar.update(min(ITEMS_PER_CHUNK, n_items - bar.n))


def _map_in_processes(function: Callable, items: Iterable, workers: int) -> Iterator:
    """Yield `function(item)` in order, computed in new processes, which are not forked.

    At most two items per process, and one more, are read ahead of the results.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # otherwise each worker would run the user's script again
    with safe_path_for_children():  # the pool starts multiprocessing's resource tracker
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, (function,))
    pending = deque()
    try:
        for item in items:
            with safe_path_for_children():
                pending.append(pool.submit(_call_function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RunError("a process that prepares the data was ended; the machine may lack memory") from error
    finally:
        sys.modules["__main__"] = main
        pool.shutdown(cancel_futures=True)


def _begin_worker(function: Callable) -> None:
    """Prepare a worker process; `function` is sent once, here, and not with each item."""
    drop_safe_path()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads the results
    WORKER["function"] = function


def _call_function(item: Any) -> Any:
    """Call the function that `_begin_worker` kept in this worker process."""
    return WORKER["function"](item)
