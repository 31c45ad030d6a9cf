"""This process and its host: standard streams, allocators, memory, GPUs.

Does not import torch at the top, as a parent starts its workers before it imports torch.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import io
import logging
import mmap
import os
import random
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
DEVICES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # of the GPU drivers of NVIDIA, NVIDIA under WSL, AMD


def is_rank_0() -> bool:
    """Return whether this process is rank 0, or no launcher started it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


# --- standard streams and logs -------------------------------------------------------------------------------------


class _Log(io.FileIO):
    """A file that ignores write errors."""

    def write(self, data: Any) -> int:
        try:
            n_written = super().write(data)
        except OSError:  # a full disk, a terminal that was closed, a pipe that nobody reads
            n_written = None
        return memoryview(data).nbytes if n_written is None else n_written  # after an error, claim all was written


def open_standard_streams() -> None:
    """Open closed standard streams on the null device, or the next file that is opened would become one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the system gives the lowest free descriptor, which is the closed stream's
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def print_whatever_happens() -> None:
    """Make printing never fail: on a full disk, into a pipe that nobody reads, of characters that cannot be encoded."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            file = _Log(stream.fileno(), "w", closefd=False)
        except io.UnsupportedOperation:  # not a file, as a program such as pytest captures the output
            continue
        options = {"encoding": stream.encoding, "line_buffering": stream.line_buffering or stream.write_through}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), errors="backslashreplace", **options))


def silence_bitsandbytes() -> None:
    """Silence bitsandbytes' request for a kernel package that is not used here, before PEFT imports it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def prepare_transformers(seed: int, *, bars: bool) -> None:
    """Import transformers, and seed Python's, numpy's and torch's generators by it.

    Without `bars`, libraries show no progress bars.
    """
    import numpy as np
    import torch
    import transformers

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # `transformers.set_seed` would import PEFT, which takes a second
    if not bars:
        transformers.utils.logging.disable_progress_bar()
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read if a run imports datasets


# --- memory --------------------------------------------------------------------------------------------------------


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """Set allocator variables that torch reads on import, unless the user did."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages, which cause fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the variable
        # keeps CUDA memory from fragmenting as shapes change
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Turn garbage collection off inside: it takes a quarter of the time of imports, which leave no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def never_collect_imports() -> None:
    """Exempt the objects that exist after a run's imports from garbage collection.

    In a sweep only the first call has an effect, as a later one would also exempt the garbage of earlier runs.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of large tensors, whose page faults take a tenth of an update's time on a CPU."""
    # the largest values that glibc accepts
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Make glibc return large freed tensors to the system immediately.

    Sharding gathers and frees tensors at every block, so what glibc keeps would grow to the size of the whole model.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def release_freed_memory() -> None:
    """Return all free memory to the system now; by default glibc returns only that at the end of the heap."""
    ctypes.CDLL(None).malloc_trim(0)


class HostMemory(NamedTuple):
    """A host's memory in bytes."""

    total: int
    available: int  # can be allocated without swapping, and without being killed


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """The machine's memory, or what cgroups allow this process of it."""
    meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())  # values such as "1024 kB"
    total, available = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    version_2 = [line for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")]
    for cgroup in (cgroups / line[3:].strip("/") for line in version_2):
        # the limits of its parents count too; the root cgroup has none
        for limit_file in (group / "memory.max" for group in (cgroup, *cgroup.parents)):
            if not limit_file.exists() or limit_file.read_text().strip() == "max":
                continue
            limit, used = (int(limit_file.with_name(f"memory.{name}").read_text()) for name in ("max", "current"))
            stat = dict(line.split() for line in limit_file.with_name("memory.stat").read_text().splitlines())
            used -= int(stat["inactive_file"])  # the file cache counts as used, but can be reclaimed
            total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def find_device_memory(world_size: int, *, multi_process: bool) -> int:
    """Bytes of a process's GPUs or, without GPUs, of its share of free host memory."""
    if count_gpus():
        import torch

        gpus = list_own_gpus(multi_process=multi_process)
        return sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    n_processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # the launchers set it
    return (host_memory().available + resident_memory()) // n_processes_here


def resident_memory() -> int:
    """The bytes of memory that this process holds now."""
    return int((PROC / "self/statm").read_text().split()[1]) * mmap.PAGESIZE


def count_gpus(devices: tuple[str, ...] = DEVICES) -> int:
    """The number of GPUs that torch can use; torch is imported only if a GPU driver is present."""
    if "torch" not in sys.modules and not any(map(glob.glob, devices)):
        return 0
    import torch

    return torch.cuda.device_count()


def list_own_gpus(*, multi_process: bool) -> list[int]:
    """The GPUs that this process uses: one under `multi_process`, else all."""
    import torch

    return [torch.cuda.current_device()] if multi_process else list(range(torch.cuda.device_count()))
