"""Allocator settings and limits of this process. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """Set the environment variables that torch reads on import, unless the user has set them."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages: fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # keeps CUDA memory from fragmenting as shapes change
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Inside, garbage is not collected: imports leave none, and looking for it takes a quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def never_collect_imports() -> None:
    """Exempt the objects of a run's imports, which stay anyway, from garbage collection.

    Acts only once in a process: after the first run of a sweep there may be garbage, which would stay too.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard one: workers that share many tensors exceed the soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def keep_freed_memory() -> None:
    """Let tensors of up to 32 MB reuse freed memory, in a single process on a CPU.

    By default glibc returns that memory to the system, and each page costs a fault when it is needed again: a tenth of
    the time of an update.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**25)  # the most that glibc accepts
    _set_malloc(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return large freed tensors to the system immediately.

    By default glibc comes to keep ever larger ones. Sharding gathers and frees tensors at every block, so the memory
    that glibc keeps would grow to the size of the whole model.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**20)


def release_freed_memory() -> None:
    """Return all free memory to the system now, whatever the settings: for use after a model has shrunk."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _set_malloc(option: int, value: int) -> None:
    if sys.platform == "linux":  # others have no mallopt
        ctypes.CDLL(None).mallopt(option, value)
