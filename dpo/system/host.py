"""This process and its host: streams, the allocator, memory, GPUs.

Imports no torch at the top.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import io
import logging
import mmap
import os
import resource
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
DEVICES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # NVIDIA's driver, the same under WSL, AMD's driver


def is_rank_0() -> bool:
    """Return whether a launcher, if any, started this process first."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


# --- standard streams and logs -------------------------------------------------------------------------------------


def open_standard_streams() -> None:
    """Open closed standard streams on the null device, also for child processes.

    Some daemons start a process without them. Then the next file to be opened would become standard output, and Python
    would have no stream to print to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the system gives the lowest free number, which is that of the closed stream
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            stream = os.fdopen(number, mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Log(io.FileIO):
    """A file that hides write errors."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:  # a full disk, a terminal that was closed, a pipe that nobody reads
            written = None
        return memoryview(data).nbytes if written is None else written


def print_whatever_happens() -> None:
    """Keep printing from ever failing, and so from ending a run.

    It does not fail on a full disk, in a pipe that nobody reads, or for characters without an encoding.
    """
    for name in ("stdout", "stderr"):
        former = getattr(sys, name)
        try:
            raw = _Log(former.fileno(), "w", closefd=False)
        except io.UnsupportedOperation:  # no file: a program such as pytest captures the output
            continue
        options = {"encoding": former.encoding, "line_buffering": former.line_buffering or former.write_through}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **options))


def silence_bitsandbytes() -> None:
    """Silence bitsandbytes' request for a kernel package that is not used here.

    Call it before importing PEFT, which imports bitsandbytes if that is installed.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


# --- memory --------------------------------------------------------------------------------------------------------


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """Set variables that torch reads on import, unless the user did."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages: fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # keeps CUDA memory from fragmenting as shapes change
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Inside, no garbage is collected, for faster imports.

    Imports leave none, and looking for it takes a quarter of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def never_collect_imports() -> None:
    """Exempt the objects of a run's imports from garbage collection.

    Acts only once in a process: after the first run of a sweep, garbage of that run would never be collected either.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def raise_open_file_limit() -> None:
    """Raise the limit on open files, for workers that share many tensors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Reuse freed memory, for speed in one process on a CPU.

    By default glibc returns the memory of large tensors to the system, and each page costs a fault when it is needed
    again: a tenth of the time of an update.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**25)  # both values are the largest that glibc accepts
    _set_malloc(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return large freed tensors to the system immediately.

    By default glibc keeps freed tensors of growing sizes. Sharding gathers and frees tensors at every block, so the
    memory that glibc keeps would grow to the size of the whole model.
    """
    _set_malloc(M_MMAP_THRESHOLD, 2**20)


def release_freed_memory() -> None:
    """Return all free memory to the system now.

    By default glibc returns only the free memory at the end of the heap.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _set_malloc(option: int, value: int) -> None:
    if sys.platform == "linux":  # others have no mallopt
        ctypes.CDLL(None).mallopt(option, value)


class HostMemory(NamedTuple):
    """Sizes in bytes; `available` can be allocated without swapping or being killed."""

    total: int
    available: int


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """The machine's memory, or the tightest limit of this process's cgroups."""
    lines = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for line in (proc / "self/cgroup").read_text().splitlines():
        if not line.startswith("0::"):  # version 1, whose limits are not read
            continue
        own = cgroups / line[3:].strip("/")
        for group in (own, *own.parents):
            limit = group / "memory.max"  # the root cgroup has none
            if not limit.exists() or (text := limit.read_text().strip()) == "max":
                continue
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used -= int(stat["inactive_file"])  # the file cache counts as used, but is reclaimable
            total, available = min(total, int(text)), min(available, max(0, int(text) - used))
    return HostMemory(total, available)


def resident_memory() -> int:
    """Bytes that this process holds now."""
    return int((PROC / "self/statm").read_text().split()[1]) * mmap.PAGESIZE


def count_gpus(devices: tuple[str, ...] = DEVICES) -> int:
    """The number of GPUs that torch can use.

    Imports torch, which takes seconds, only if there may be one.
    """
    if "torch" not in sys.modules and not any(map(glob.glob, devices)):
        return 0
    import torch

    return torch.cuda.device_count()
