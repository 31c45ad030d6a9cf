"""The doctor's probes, in child processes with a time limit: devices, matrix products, an all-reduce.

Not to be run by hand: `python -m scripts.probes NAME RANK COUNT FOLDER` is one such process.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT, WORK_LIMIT = 60, 10  # seconds: for a child's imports and devices, for its work
NCCL_LIMIT = 60  # seconds for NCCL to start, which is slow on 8 GPUs
WORKER = (sys.executable, "-m", "scripts.probes")


class Gpu(NamedTuple):
    """A GPU, with memory in bytes, `peers` whose memory it reads directly, and the `error` of its matmul."""

    name: str
    total: int
    free: int
    bf16: bool
    peers: Sequence[int]
    error: str | None = None


class Products(NamedTuple):
    """FLOP/s of matrix products on the CPU."""

    float32: float
    bfloat16: float


class ChildError(Exception):
    """Failure or timeout of a child process; the message is one sentence."""


def ask(*command: str, limit: float = 10) -> str:
    """Return the output of a command. Raises ChildError; either way the process has ended."""
    from dpo.system.redaction import redact

    try:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False
        )
    except OSError as error:
        raise ChildError(f"{command[0]} cannot be run") from error
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no answer within {limit:g} s") from error
    if done.returncode == -signal.SIGALRM:
        raise ChildError(f"not finished within {WORK_LIMIT} s")
    if done.returncode:  # Python's last line is the exception; a crash may print nothing
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise ChildError(redact(said[-1][:300]))
    return done.stdout


def run_workers(name: str, count: int) -> list[Any]:
    """Run `count` processes of `WORKERS[name]`. Returns results by rank, or raises ChildError; none stays running."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        commands = [(*WORKER, name, str(rank), str(count), folder) for rank in range(count)]
        limit = START_LIMIT + WORK_LIMIT + NCCL_LIMIT * (name == "nccl")
        futures = [pool.submit(ask, *command, limit=limit) for command in commands]
    errors = [error for future in futures if (error := future.exception())]
    if errors:  # if one failed, the others timed out waiting for it: raise its error
        raise min(errors, key=lambda error: " within " in str(error))
    return [json.loads(future.result().splitlines()[-1]) for future in futures]


def work(name: str, rank: str, count: str, folder: str) -> None:
    """Run one worker process, which prints its result as JSON."""
    try:
        print(json.dumps(WORKERS[name](int(rank), int(count), folder)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)  # before anything can print another line or wait for the other ranks


def probe_devices(rank: int, count: int, folder: str) -> list[Gpu]:
    """Probe every visible GPU with small matrix products."""
    import torch

    gpus = range(torch.cuda.device_count())
    found = []
    for i in gpus:
        peers = [other for other in gpus if other != i and torch.cuda.can_device_access_peer(i, other)]
        free, bf16, error = 0, False, None
        try:
            with torch.cuda.device(i):
                free, bf16 = torch.cuda.mem_get_info()[0], torch.cuda.is_bf16_supported(including_emulation=False)
            for dtype in (torch.float32, torch.bfloat16) if bf16 else (torch.float32,):
                error = error or matmul_error(f"cuda:{i}", dtype)
        except RuntimeError as failure:  # out of memory or a broken device: a finding of this GPU; check the others too
            error = str(failure).split("\n")[0][:200]
        properties = torch.cuda.get_device_properties(i)
        found.append(Gpu(properties.name, properties.total_memory, free, bf16, peers, error))
    return found


def matmul_error(device: str, dtype: Any) -> str | None:
    """Compare a product on `device` in `dtype` with float64 on the CPU; None if the error is within rounding."""
    import torch

    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)  # (512, 512) each
    wanted = left.double() @ right.double()
    got = (left.to(device) @ right.to(device)).double().cpu()
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return None if error < 0.01 else f"a {dtype} product is off by {error:.1%}"  # so is NaN; 1 % allows TF32's rounding


def probe_products(rank: int, count: int, folder: str) -> Products:
    """Measure matrix products on the CPU: the fastest within a second, alternating between dtypes."""
    import torch

    signal.alarm(WORK_LIMIT)
    matrices = [torch.randn(2, 1024, 1024).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    best = [math.inf, math.inf]
    began = time.perf_counter()
    while time.perf_counter() - began < 1:
        for i, (left, right) in enumerate(matrices):
            start = time.perf_counter()
            torch.matmul(left, right)
            best[i] = min(best[i], time.perf_counter() - start)
    return Products(*(2 * 1024**3 / seconds for seconds in best))


def all_reduce(rank: int, count: int, folder: str, *, backend: str) -> dict[str, float]:
    """Sum a tensor over the processes.

    Returns its bytes, the number of wrong elements on this rank, and the fastest of 5 times in seconds."""
    import torch
    import torch.distributed as dist

    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    values = torch.arange(64_000_000 if on_gpu else 4_000_000, device=device) % 1000 + 1.0  # sums are exact
    # rendezvous by a file: unlike a port, no other process can take it first
    store = dist.FileStore(os.path.join(folder, "rendezvous"), count)
    store.set(f"started {rank}", "")
    signal.alarm(WORK_LIMIT)  # until the last rank has started; the signal also ends a hang inside NCCL
    store.wait([f"started {other}" for other in range(count)])
    signal.alarm(NCCL_LIMIT if on_gpu else WORK_LIMIT)
    bound = device if on_gpu else None  # makes NCCL connect now
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, device_id=bound)
    dist.barrier()
    signal.alarm(WORK_LIMIT)
    wrong, seconds = 0, []
    for _ in range(5):
        summed = values * (rank + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(summed)
        summed[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        wrong += int((summed != values * (count * (count + 1) / 2)).sum())
    dist.destroy_process_group()
    return {"bytes": values.numel() * 4, "wrong": wrong, "seconds": min(seconds)}


WORKERS: dict[str, Callable[[int, int, str], Any]] = {
    "devices": probe_devices,
    "products": probe_products,
    "nccl": functools.partial(all_reduce, backend="nccl"),
    "gloo": functools.partial(all_reduce, backend="gloo"),
}


if __name__ == "__main__":
    work(*sys.argv[1:])
