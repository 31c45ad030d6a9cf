"""Print what a machine has, and what is wrong with it: exit status 1 if anything is.

    python -m scripts.doctor

What may hang or crash (devices, an all-reduce) runs in a child process with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dpo.system.host import host_memory

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECS = 150  # NCCL starts slowly on 8 GPUs
OPTIONAL = ("tensor-parallel", "setuptools")


def list_problems() -> list[str]:
    """Print what there is, and return what is wrong."""
    problems, installed = [], []
    for name, tested in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.txt").read_text("utf-8"), re.M):
        try:
            installed.append(f"{name} {importlib.metadata.version(name)} (tested {tested})")
        except importlib.metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                problems.append(f"{name} is not installed: pip install -r requirements.txt")
    print(f"python {platform.python_version()}, {', '.join(installed)}")
    total, available = host_memory()
    free, cores = shutil.disk_usage(ROOT).free, len(os.sched_getaffinity(0))
    memory = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB of memory"
    print(f"{cores} CPU cores, {memory} and {free / 1e9:.1f} GB of disk available", flush=True)
    if min(available, free) < 2e9:
        problems.append("less than 2 GB of memory or disk is available")
    command = [sys.executable, "-c", "from scripts import doctor; doctor.check_devices()"]
    try:
        child = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS)
        if child.returncode:
            last_line = (child.stderr.strip() or f"status {child.returncode}").splitlines()[-1]
            problems.append(f"devices: {last_line[:300]}; NCCL_DEBUG=INFO shows more of NCCL")
    except subprocess.TimeoutExpired:
        problems.append(f"devices: no answer within {LIMIT_SECS} s")
    return problems


def check_devices() -> None:
    """Multiply on each GPU, and sum a tensor over them, or over two processes."""
    import torch

    n_gpus = torch.cuda.device_count()
    for i in range(n_gpus):
        free, total = torch.cuda.mem_get_info(i)
        ones = torch.ones(512, 512, device=f"cuda:{i}")
        assert (ones @ ones == 512).all(), f"a matrix product is wrong on GPU {i}"
        dtypes = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16"
        print(f"GPU {i}: {torch.cuda.get_device_name(i)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, {dtypes}")
    backend, size = ("nccl", n_gpus) if n_gpus else ("gloo", 2)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sum, (backend, size, folder), nprocs=size)
    print(f"{n_gpus} GPUs (torch for CUDA {torch.version.cuda}); {backend} over {size} processes: the sum is right")


def _sum(rank: int, backend: str, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.FileStore(f"{folder}/meeting", size)  # a file, as another process could take a port first
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    values = torch.full((1_000_000,), rank + 1.0, device=device)
    dist.all_reduce(values)
    assert (values == size * (size + 1) / 2).all(), f"the sum is wrong on rank {rank}"
    dist.destroy_process_group()


if __name__ == "__main__":
    found = list_problems()
    print("\n".join([f"problem: {problem}" for problem in found] or ["no problems"]))
    sys.exit(1 if found else 0)
