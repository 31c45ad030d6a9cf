"""How this process takes and returns memory and files. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """What torch is to read from the environment when it is imported, unless the user has set it."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages: fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # CUDA's memory does not fragment, though shapes change all the time
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """For imports: they leave no garbage, and looking for it takes a quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def raise_open_file_limit() -> None:
    """Many workers with many tensors in shared memory run out of the soft limit; the hard one is ours to take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let tensors of up to 32 MB reuse what was freed, as one process on a CPU can afford.

    glibc would return it to the system, and every page that comes from there anew costs a fault: a tenth of an update.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**25)  # the most that glibc takes
    _set_malloc(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Give large freed tensors back to the system at once.

    glibc keeps them, in ever larger pieces; among the tensors that sharding gathers and frees at every block, that
    holds as much memory as the whole model would have taken.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**20)


def _set_malloc(option: int, value: int) -> None:
    if sys.platform == "linux":  # others have no mallopt
        ctypes.CDLL(None).mallopt(option, value)
