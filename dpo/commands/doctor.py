"""Print what a machine has, and what is wrong with it: exit status 1 if anything is.

    dpo doctor

What may hang or crash (devices, an all-reduce) runs in a child process with a time limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from dpo import __version__
from dpo.redaction import redact
from dpo.system.host import has_bfloat16, host_memory, is_installed, python_command

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # of a clone
LIMIT_SECS = 150  # NCCL starts slowly on 8 GPUs


def read_requirements() -> list[Requirement]:
    """Those of the installed package and its extras; of a clone that is not installed what it always needs."""
    try:
        lines = requires("dpo-train") or []
    except PackageNotFoundError:
        lines = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    found = [Requirement(line) for line in lines if 'extra == "dev"' not in line]
    return [requirement for requirement in found if requirement.name != "dpo-train"]  # an extra that names others


def list_problems() -> list[str]:
    """Print what there is, and return what is wrong."""
    problems, installed, optional = [], [f"python {platform.python_version()}"], []
    for requirement in read_requirements():
        name, wanted = requirement.name, requirement.specifier
        if not is_installed(name) and requirement.marker:
            optional.append(name)
        elif not is_installed(name):
            problems.append(f"{name} is not installed: pip install {name}")
        elif wanted.contains(version(name), prereleases=True):
            installed.append(f"{name} {version(name)}")
        else:
            problems.append(f"{name} {version(name)} does not fit: pip install '{name}{wanted}'")
    print(f"dpo {__version__}, {', '.join(dict.fromkeys(installed))}")
    print(f"optional packages that are not installed: {', '.join(optional) or 'none'}")
    total, available = host_memory()
    free, cores = shutil.disk_usage(".").free, len(os.sched_getaffinity(0))
    memory = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB of memory"
    print(f"{cores} CPU cores, {memory} and {free / 1e9:.1f} GB of disk available", flush=True)
    if min(available, free) < 2e9:
        problems.append("less than 2 GB of memory or disk is available")
    command = python_command("-c", "from dpo.commands import doctor; doctor.check_devices()")
    try:
        child = subprocess.run(**command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS)
        if child.returncode:
            last_line = (redact(child.stderr).strip() or f"status {child.returncode}").splitlines()[-1]
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
        dtypes = "bfloat16" if has_bfloat16() else "no bfloat16"
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


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="dpo doctor", description=__doc__.split("\n")[0]).parse_args(arguments)
    found = list_problems()
    print("\n".join([f"problem: {problem}" for problem in found] or ["no problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
