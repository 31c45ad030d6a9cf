"""Print what a machine has, what to train with on it, and what is wrong: exit status 1 if anything is.

    dpo doctor

What may hang or crash (devices, an all-reduce) runs in a child process with a time limit.
"""

import os
import platform
import resource
import shutil
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from dpo import __version__
from dpo.commands import make_parser
from dpo.numbers import count
from dpo.redaction import redact
from dpo.system.host import has_bfloat16, host_memory, is_installed, python_command

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # of a clone
LIMIT_SECS = 150  # NCCL starts slowly on 8 GPUs
FEWEST_OPEN_FILES = 4096  # a hard limit with which several processes, each with data, sockets and checkpoints, get by


def read_requirements() -> list[Requirement]:
    """Those of the installed package and its extras; of a clone that is not installed what it always needs."""
    try:
        lines = requires("dpo-train") or []
    except PackageNotFoundError:
        lines = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    # without extras that name others
    return [Requirement(line) for line in lines if 'extra == "dev"' not in line and not line.startswith("dpo-train")]


def list_problems() -> list[str]:
    """Print what there is, and return what is wrong."""
    problems, installed, optional = [], [f"python {platform.python_version()}"], []
    requirements = read_requirements()
    # extras that are not used
    incomplete = {str(each.marker) for each in requirements if each.marker and not is_installed(each.name)}
    for requirement in requirements:
        name, wanted = requirement.name, requirement.specifier
        if not is_installed(name) and requirement.marker:
            optional.append(name)
        elif not is_installed(name):
            problems.append(f"{name} is not installed: pip install {name}")
        elif wanted.contains(version(name), prereleases=True) or str(requirement.marker) in incomplete:
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"open files: at most {soft:,}, which a run raises to {hard:,}", flush=True)
    if hard < FEWEST_OPEN_FILES:
        problems.append(f"at most {hard:,} open files: raise the hard limit to {FEWEST_OPEN_FILES:,} (ulimit -Hn)")
    command = python_command("-c", "from dpo.commands import doctor; doctor.check_devices()")
    try:
        child = subprocess.run(**command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS)
        if child.returncode:
            last_line = (redact(child.stderr).strip() or f"status {child.returncode}").splitlines()[-1]
            problems.append(f"devices: {last_line[:300]}; NCCL_DEBUG=INFO shows more of NCCL")
    except subprocess.TimeoutExpired:
        problems.append(f"devices: no answer within {LIMIT_SECS} s")
    return problems


class Gpu(NamedTuple):
    name: str
    free: int  # bytes
    total: int
    has_bfloat16: bool


def find_gpus() -> list[Gpu]:
    import torch

    gpus = []
    for i in range(torch.cuda.device_count()):
        ones = torch.ones(512, 512, device=f"cuda:{i}")
        assert (ones @ ones == 512).all(), f"a matrix product is wrong on GPU {i}"
        with torch.cuda.device(i):
            gpus.append(Gpu(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i), has_bfloat16()))
    return gpus


def find_links(n_gpus: int) -> Counter[str]:
    """How many pairs of this machine's GPUs are linked how: by NV4 and the like, which is NVLink, or by what else
    `nvidia-smi topo -m` knows, which is PCIe; without that command, whether one GPU reads the other's memory.
    """
    links, rows = Counter(), []
    if n_gpus > 1 and shutil.which("nvidia-smi"):
        table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in table.splitlines() if line.startswith("GPU")]  # not the heading
    for i, row in enumerate(rows):
        links.update(row[i + 2 : len(rows) + 1])  # each pair once, and none of a GPU with itself
    if not rows:
        import torch

        for one, other in combinations(range(n_gpus), 2):
            links["peer access" if torch.cuda.can_device_access_peer(one, other) else "no peer access"] += 1
    return links


def recommend(gpus: Sequence[Gpu], links: Iterable[str]) -> list[str]:
    """What to train with on such a machine."""
    n, settings = len(gpus), ["trainer=BasicTrainer"]
    if n > 1:
        settings = ["trainer=FSDPTrainer", f"world_size={n}", f"batch_size={8 * n}"]
    dtype = "bfloat16" if all(gpu.has_bfloat16 for gpu in gpus) else "float16"
    if gpus:
        key = "model.fsdp_policy_mp" if n > 1 else "model.autocast"
        settings += [f"{key}={dtype}", f"model.reference_dtype={dtype}"]
    lines = [
        f"recommended: dpo train {' '.join(settings)} ...",
        f"  {count(max(n, 1), 'process', 'processes')} in {dtype if gpus else 'float32'}",
    ]
    if n > 1 and not all(link.startswith("NV") for link in links):
        lines.append(
            "  unless all pairs have NVLink, prefer lora=lora fsdp_frozen_weights=whole, or fsdp_reduce_once=true "
            "fsdp_reduce_dtype=bfloat16"
        )
    return lines


def check_devices() -> None:
    """Multiply on each GPU, recommend, and sum a tensor over the GPUs, or over two processes."""
    import torch

    gpus = find_gpus()
    n_gpus, links = len(gpus), find_links(len(gpus))
    for i, gpu in enumerate(gpus):
        dtypes = "bfloat16" if gpu.has_bfloat16 else "no bfloat16"
        print(f"GPU {i}: {gpu.name}, {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free, {dtypes}")
    for link, n in links.items():
        print(f"{count(n, 'pair')} of GPUs linked by {link}")
    print("\n".join(recommend(gpus, links)), flush=True)
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


def main(arguments: Sequence[str]) -> int:
    make_parser("doctor", __doc__).parse_args(arguments)
    found = list_problems()
    print("\n".join([f"problem: {problem}" for problem in found] or ["no problems"]))
    return 1 if found else 0
