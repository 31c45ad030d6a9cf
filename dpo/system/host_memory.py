"""Memory available to this process on its machine, container or job, and memory that it holds."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Sizes in bytes; `available` can be allocated without swapping or being killed."""

    total: int
    available: int


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """The machine's memory, or the tightest limit among the cgroups (version 2) of this process."""
    lines = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limits = list(_limits(proc, cgroups))
    return HostMemory(min([total, *(a for a, _ in limits)]), min([available, *(b for _, b in limits)]))


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, remaining bytes) of each cgroup that has a limit.

    The file cache counts as used there, but is reclaimable.
    """
    paths = [line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")]
    own = [cgroups / path.strip("/") for path in paths]
    for group in (directory for path in own for directory in (path, *path.parents)):
        if not group.is_relative_to(cgroups) or not (group / "memory.max").exists():
            continue  # the root cgroup has no limit
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield int(limit), max(0, int(limit) - used + int(cached["inactive_file"]))


def resident_memory() -> int:
    """Bytes that this process holds now."""
    return int((PROC / "self/statm").read_text().split()[1]) * mmap.PAGESIZE


def give_back_freed_memory() -> None:
    """Return all free heap pages to the system; by default glibc returns only those at the end of the heap."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
