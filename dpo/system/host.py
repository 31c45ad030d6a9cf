"""This process and its host. Torch is imported inside functions, as the parent of a run's workers does not need it."""

import ctypes
import gc
import glob
import io
import logging
import mmap
import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dpo.redaction import redact

M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
M_MMAP_THRESHOLD = -3
TROUBLE = re.compile("^(warning|error|bad configuration)(?=:)", re.MULTILINE)  # words that get a color on a terminal
CGROUPS = "/sys/fs/cgroup"  # the root of the groups of processes
DEVICES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # files of the drivers of NVIDIA, NVIDIA under WSL, and AMD


def is_launched_as_rank_0() -> bool:
    """Whether a launcher started this process as rank 0, or none started it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def take_local_rank(arguments: Sequence[str]) -> list[str]:
    """Set LOCAL_RANK from the argument `--local-rank=N` of `torch.distributed.launch`; return the other arguments."""
    others = []
    for argument in arguments:
        if match := re.fullmatch(r"--local[-_]rank=(\d+)", argument):
            os.environ["LOCAL_RANK"] = match[1]
        else:
            others.append(argument)
    return others


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


class _UnfailingFile(io.FileIO):
    """A file whose writes never fail: what cannot be written is lost."""

    def write(self, data: Any) -> int:
        n_written = None
        with suppress(OSError):  # a full disk, a terminal that was closed, a pipe that nobody reads
            n_written = super().write(data)
        if n_written is None:
            n_written = memoryview(data).nbytes  # claim that all was written
        return n_written


class _RedactedText(io.TextIOWrapper):
    """A text stream that hides secrets, and colors warnings on a terminal."""

    def write(self, text: str) -> int:
        redacted = redact(text)
        if self.isatty() and not os.environ.get("NO_COLOR"):
            redacted = TROUBLE.sub("\033[33m\\g<0>\033[0m", redacted)
        super().write(redacted)
        return len(text)


def harden_stdio() -> None:
    """Replace stdout and stderr by streams that hide secrets, and whose writes never raise.

    They raise neither on a full disk, nor for a closed stream, nor for characters that cannot be encoded.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: without this, the next file that is opened would become this stream
            # The lowest free descriptor is the closed stream's; it stays open when the object is replaced below.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            file = _UnfailingFile(stream.fileno(), "w", closefd=False)
        except io.UnsupportedOperation:  # not a file, as a program such as pytest captures the output
            continue
        options = {"encoding": stream.encoding, "line_buffering": stream.line_buffering or stream.write_through}
        setattr(sys, name, _RedactedText(io.BufferedWriter(file), errors="backslashreplace", **options))


@contextmanager
def importing_without_gc(*, freeze: bool = False) -> Iterator:
    """Import modules inside without garbage collection, which would take a quarter of the time.

    With `freeze`, garbage collections afterwards skip all objects that exist by then, which makes them faster. Of these
    objects, those in a reference cycle are never freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freeze and gc.get_freeze_count() == 0:  # once: later in a sweep it would keep the garbage of earlier runs
            gc.freeze()


def python_process_options(*arguments: str, **environment: str) -> dict:
    """Return the keyword arguments `args` and `env` for `subprocess`, which start Python with these `arguments`.

    The new process searches modules where this one does. `-P` keeps it from searching first in the current directory,
    whose files may not be trusted. `environment` has further variables.
    """
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return {"args": [sys.executable, "-P", *arguments], "env": {**os.environ, "PYTHONPATH": paths, **environment}}


@contextmanager
def safe_path_for_children() -> Iterator:
    """Let `multiprocessing` start processes that import nothing from the current directory, which may not be trusted.

    Each of these processes must call `drop_safe_path` first, so that programs which it starts do not inherit this.
    """
    former = os.environ.get("PYTHONSAFEPATH", "")  # empty counts as not set
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = former


def drop_safe_path() -> None:
    """Undo `safe_path_for_children` in a process that was started inside it."""
    os.environ.pop("PYTHONSAFEPATH", None)


def silence_bitsandbytes() -> None:
    """Silence bitsandbytes: when PEFT imports it, it asks for a package of kernels that are not used here."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, as workers share many files; print the change on rank 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if soft != hard and is_launched_as_rank_0():
        print(f"limit of open files raised from {soft:,} to {hard:,}", flush=True)


# --- memory ----------------------------------------------------------------------------------------------------------


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """Set the variables in `environ` that torch's allocators read on import, unless the user has set them."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages, which cause fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the variable
        # This keeps CUDA memory from fragmenting as shapes change.
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def keep_freed_memory() -> None:
    """Make glibc keep and reuse the memory of freed tensors: new memory costs a tenth of an update's time on a CPU."""
    # These are sizes in bytes, the largest that glibc accepts.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Make glibc return tensors of a MiB and more to the system when they are freed.

    FSDP frees so many that glibc would otherwise keep a whole model.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def release_freed_memory() -> None:
    """Make glibc return all freed memory to the system now; by default it returns only what is at the heap's end."""
    ctypes.CDLL(None).malloc_trim(0)


def host_memory() -> tuple[int, int]:
    """Return the machine's memory, or what a container or a job may use of it (cgroup v2), as (total, available)."""
    sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    total, available = int(sizes["MemTotal"]) * 1024, int(sizes["MemAvailable"]) * 1024
    group = Path(CGROUPS)
    with suppress(OSError):  # there is no such file
        group /= Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for folder in (group, *group.parents):  # the limits of outer groups count too
        with suppress(OSError, ValueError):  # no limit: there is no file, or it says "max"
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            counts = dict(re.findall(r"(\w+) (\d+)", (folder / "memory.stat").read_text()))
            used -= int(counts["inactive_file"]) + int(counts["active_file"])  # the cache of files gives way
            total = min(total, limit)
            available = min(available, limit - used)
    return total, available


def find_device_memory(world_size: int, *, multi_process: bool) -> int:
    """Return the bytes that this process holds or could get: on its GPUs or, without any, in its share of the host.

    With `multi_process` a process has one GPU, else all.
    """
    if count_gpus():
        import torch

        gpus = list_own_gpus(multi_process=multi_process)
        return sum(torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) for gpu in gpus)
    # The launchers set LOCAL_WORLD_SIZE.
    return (host_memory()[1] + resident_memory()) // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def resident_memory() -> int:
    """Return the bytes of main memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


GPU = "cuda"  # the type of devices that count as GPUs; a test may let CPUs count, to see what would differ there


def is_gpu(device: Any) -> bool:
    return device.type == GPU


def is_cpu(device: Any) -> bool:
    """Whether a device is a CPU, and not the meta device; False in a test that lets CPUs count as GPUs."""
    return device.type == "cpu" and GPU != "cpu"


def choose_device() -> str:
    """Choose the type of device for what one process computes."""
    return GPU if count_gpus() else "cpu"


def count_gpus() -> int:
    """Count the GPUs that torch can use; torch is imported only if a GPU driver is present."""
    if "torch" not in sys.modules and not any(map(glob.glob, DEVICES)):
        return 0
    import torch

    return torch.cuda.device_count()


def has_bfloat16() -> bool:
    """Whether the GPUs compute in bfloat16, and do not only emulate it."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def list_own_gpus(*, multi_process: bool) -> list[int]:
    """List the indices of this process's GPUs: one if the run has a process per GPU (`multi_process`), else all."""
    import torch

    return [torch.cuda.current_device()] if multi_process else list(range(torch.cuda.device_count()))


@cache
def go_offline_without_hub() -> None:
    """Let libraries read only their caches if the Hub's name cannot be resolved, as each would try for a minute."""
    import huggingface_hub

    hub = urlsplit(huggingface_hub.constants.ENDPOINT)
    if getproxies():  # a proxy looks names up itself
        return
    try:
        socket.getaddrinfo(hub.hostname, hub.port)
    except OSError as error:
        print(f"{hub.hostname} is not known here ({error}): only its cache is used", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True
