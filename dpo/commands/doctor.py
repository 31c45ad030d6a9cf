"""Print what a machine has, recommended settings, and problems; the exit status is 1 if there are any.

    dpo doctor

What may hang or crash (devices, an all-reduce) runs in a child process with a time limit.
"""

import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import version

from dpo import __version__
from dpo.commands import make_parser
from dpo.numbers import count
from dpo.redaction import redact
from dpo.system.host import has_bfloat16, host_memory, is_installed, python_process_options
from dpo.system.launching import choose_backend
from dpo.system.run_directory import PACKAGES

LIMIT_SECS = 150  # NCCL starts slowly on 8 GPUs
FEWEST_OPEN_FILES = 4096  # a hard limit that suffices for several processes, each with data, sockets and checkpoints


def main(arguments: list[str]) -> int:
    make_parser("doctor", __doc__).parse_args(arguments)
    problems = []
    versions = [f"{name} {version(name)}" for name in PACKAGES.split() if is_installed(name)]
    print(f"dpo {__version__}, python {platform.python_version()}, {', '.join(versions)}")
    total, available = host_memory()
    free = shutil.disk_usage(".").free
    memory = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB of memory"
    print(f"{len(os.sched_getaffinity(0))} CPU cores, {memory} and {free / 1e9:.1f} GB of disk available")
    if min(available, free) < 2e9:
        problems.append("less than 2 GB of memory or disk is available")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"open files: at most {soft:,}, which a run raises to {hard:,}", flush=True)
    if hard < FEWEST_OPEN_FILES:
        problems.append(f"at most {hard:,} open files: raise the hard limit to {FEWEST_OPEN_FILES:,} (ulimit -Hn)")
    command = python_process_options("-c", "from dpo.commands import doctor; doctor.check_devices()")
    try:
        child = subprocess.run(**command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS)
        if child.returncode:
            last_line = (redact(child.stderr).strip() or f"status {child.returncode}").splitlines()[-1]
            problems.append(f"devices: {last_line[:300]}; NCCL_DEBUG=INFO shows more of NCCL")
    except subprocess.TimeoutExpired:
        problems.append(f"devices: no answer within {LIMIT_SECS} s")
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        return 1
    print("no problems")
    return 0


def find_links(n_gpus: int) -> Counter[str]:
    """Count the pairs of this machine's GPUs by their link, as far as `nvidia-smi` knows.

    The links are those of `nvidia-smi topo -m`: NV4 and the like are NVLink, all others go over PCIe.
    """
    links = Counter()
    if n_gpus > 1 and shutil.which("nvidia-smi"):
        table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in table.splitlines() if line.startswith("GPU")]  # not the heading
        for i, row in enumerate(rows):
            # A row has GPUi, its link to each GPU (X to itself), and other columns. Take the links to later GPUs.
            links.update(row[i + 2 : len(rows) + 1])
    return links


def recommend(have_bfloat16: list[bool], links: Counter[str]) -> list[str]:
    """Return the lines that recommend settings for a machine with these GPUs and links.

    `have_bfloat16` has a value for each GPU: whether it computes in bfloat16.
    """
    n = len(have_bfloat16)
    settings = "trainer=BasicTrainer"
    dtype_key = "model.autocast"
    dtype = "float32"
    if n > 1:
        settings = f"trainer=FSDPTrainer world_size={n} batch_size={8 * n}"
        dtype_key = "model.fsdp_policy_mp"
    if have_bfloat16:
        dtype = "bfloat16" if all(have_bfloat16) else "float16"
        settings += f" {dtype_key}={dtype} model.reference_dtype={dtype}"
    lines = [f"recommended: dpo train {settings} ...", f"  {count(max(n, 1), 'process', 'processes')} in {dtype}"]
    if n > 1 and not (links and all(link.startswith("NV") for link in links)):
        lines.append(
            "  unless all pairs have NVLink, prefer lora=lora fsdp_frozen_weights=whole, or fsdp_reduce_once=true "
            "fsdp_reduce_dtype=bfloat16"
        )
    return lines


def check_devices() -> None:
    """Test each GPU, recommend settings, and sum a tensor over one process per GPU, or two without GPUs.

    An error, such as a wrong result, ends the process.
    """
    import torch

    n_gpus = torch.cuda.device_count()
    have_bfloat16 = []  # by GPU
    for i in range(n_gpus):
        ones = torch.ones(512, 512, device=f"cuda:{i}")
        assert (ones @ ones == 512).all(), f"a matrix product is wrong on GPU {i}"
        with torch.cuda.device(i):
            have_bfloat16.append(has_bfloat16())
        free, total = torch.cuda.mem_get_info(i)
        dtypes = "bfloat16" if have_bfloat16[i] else "no bfloat16"
        print(f"GPU {i}: {torch.cuda.get_device_name(i)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, {dtypes}")
    links = find_links(n_gpus)
    for link, n in links.items():
        print(f"{count(n, 'pair')} of GPUs linked by {link}")
    print("\n".join(recommend(have_bfloat16, links)), flush=True)
    backend = choose_backend()
    size = n_gpus or 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sum, (backend, size, folder), nprocs=size)
    print(f"{n_gpus} GPUs (torch for CUDA {torch.version.cuda}); {backend} over {size} processes: the sum is right")


def _sum(rank: int, backend: str, size: int, folder: str) -> None:
    """Check in one of `size` processes that an all-reduce sums rightly; they meet through a file in `folder`."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.FileStore(f"{folder}/meeting", size)  # a file, as another process could take a port first
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    values = torch.full((1_000_000,), rank + 1.0, device=device)
    dist.all_reduce(values)
    assert (values == size * (size + 1) / 2).all(), f"the sum is wrong on rank {rank}"
    dist.destroy_process_group()
