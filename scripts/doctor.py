"""Report what a machine has, and what is wrong with it.

    python -m scripts.doctor
    python -m scripts.doctor --json    # the same as one JSON object

Exit status 1 if there is a problem, else 0. Changes nothing, and uses the network only to see whether the Hugging Face
Hub answers. Probes that may hang or crash (devices, all-reduce, optional packages) run in child processes with a time
limit. torch is imported only where it is needed: without torch there is still a report.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import netrc
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dpo.numbers import count
from dpo.system.host import host_memory

ROOT = Path(__file__).resolve().parents[1]
# seconds after which a child process is killed
HUB_LIMIT = 5
START_LIMIT = 60  # imports and devices
REDUCE_LIMIT = 150  # an all-reduce: NCCL starts slowly on 8 GPUs
OK, WARNING, PROBLEM = "ok", "warning", "problem"
FIXES = {  # what to do, by the name of the check, or by the backend of an all-reduce
    "software": "pip install -r requirements.txt",
    "gpu": "expect CUDA out of memory: nvidia-smi shows which process holds the memory that is not free; end that "
    "process, or list the other GPUs in CUDA_VISIBLE_DEVICES",
    "matmul": "end other processes on that GPU and try again; if the error persists, list only the other GPUs in "
    "CUDA_VISIBLE_DEVICES",
    "bfloat16": "leave model.fsdp_policy_mp unset (float32); float16 needs loss scaling, which is not implemented",
    "cuda": "install a torch with NCCL, which FSDPTrainer needs: pytorch.org/get-started/locally",
    "nccl": "NCCL_DEBUG=INFO shows where it fails; then try NCCL_P2P_DISABLE=1, NCCL_SOCKET_IFNAME=lo, a larger "
    "/dev/shm (docker run --ipc=host), a newer driver",
    "gloo": "set GLOO_SOCKET_IFNAME=lo, and make this machine's host name resolve (/etc/hosts)",
    "host": "end processes that hold memory, or use a larger machine",
    "open files": "a run of several processes may fail with 'too many open files': raise the hard limit to 65536 in "
    "/etc/security/limits.conf, or with docker run --ulimit nofile=65536",
    "disk": "free some space, or set local_dirs=[DIR] and HF_HOME=DIR; debug=true saves no checkpoints",
    "hub": "check network and HTTPS_PROXY, or train on local models and data (dataset_sources) with HF_HUB_OFFLINE=1",
    "wandb": "run wandb login, or set wandb.enabled=false",
}
BACKENDS = {  # optional package: the setting that needs it, the command that installs it
    "tensor_parallel": (
        "tensor_parallel.backend=tensor_parallel",
        "pip install tensor_parallel==2.0.0 'setuptools>=77,<82'",
    ),
    "bitsandbytes": ("lora=qlora", "pip install bitsandbytes"),
    "flash_attn": ("model.attn_implementation=flash_attention_2", "pip install flash-attn --no-build-isolation"),
}


class Gpu(NamedTuple):
    """A GPU, as a probe found it."""

    name: str
    total: int  # bytes of memory
    free: int
    bf16: bool  # supports bfloat16
    error: str | None = None  # of a matrix product, or of the probe


class Finding(NamedTuple):
    """Result of a check."""

    check: str
    level: str  # OK, WARNING or PROBLEM
    text: str
    fix: str | None = None


def make_finding(check: str, level: str, text: str) -> Finding:
    """Make a finding, with the fix of FIXES unless all is well."""
    return Finding(check, level, text, None if level == OK else FIXES[check])


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


def grade(value: float, *, ok: float, warning: float) -> str:
    """Grade a value: OK from `ok` on, WARNING from `warning` on."""
    if value >= ok:
        return OK
    return WARNING if value >= warning else PROBLEM


# --- checks ----------------------------------------------------------------------------------------------------------


def check_software(requirements: Path = ROOT / "requirements.txt") -> list[Finding]:
    """Compare installed packages with the tested ones.

    A missing package is a problem, another major version a warning.
    """
    pins = re.findall(r"^([\w.-]+)==(\S+)", requirements.read_text(encoding="utf-8"), re.M)
    pinned = {name: version for name, version in pins if name.replace("-", "_") not in BACKENDS}
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    if missing := [name for name in pinned if name not in installed]:
        return [make_finding("software", PROBLEM, f"not installed: {', '.join(missing)}")]
    text = ", ".join([f"python {platform.python_version()}", *(f"{name} {installed[name]}" for name in pinned)])
    other_majors = [
        f"{name} {version}"
        for name, version in pinned.items()
        if installed[name].split(".")[0] != version.split(".")[0]
    ]
    if other_majors:
        return [make_finding("software", WARNING, f"{text}; the tests ran with {', '.join(other_majors)}")]
    return [make_finding("software", OK, text)]


# --- probes, in child processes -------------------------------------------------------------------------------------


class ChildError(Exception):
    """Failure or timeout of a child process; the message is one sentence."""


def ask(*command: str, limit: float = 10) -> str:
    """Run a command, and return its output. Raises ChildError.

    `limit` is in seconds. The command and its children have ended when this returns.
    """
    from dpo.system.redaction import redact

    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            start_new_session=True,  # a process group of its own, which is killed as a whole
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise ChildError(f"{command[0]} cannot be run") from error
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no answer within {limit:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        # the last line that Python prints is the exception; a crash may print nothing
        lines = [line.strip() for line in errors.splitlines() if line.strip()] or [f"status {process.returncode}"]
        raise ChildError(redact(lines[-1][:300]))
    return out


def run_probe(call: str, limit: float) -> Any:
    """Evaluate a call of this module in a child process. Raises ChildError."""
    code = f"import json; from scripts.doctor import *; print(json.dumps({call}))"
    return json.loads(ask(sys.executable, "-c", code, limit=limit).splitlines()[-1])


def probe_devices() -> list[Gpu]:
    """Probe every visible GPU with small matrix products."""
    import torch

    gpus = []
    for i in range(torch.cuda.device_count()):
        free, bf16, error = 0, False, None
        try:
            with torch.cuda.device(i):
                free, _ = torch.cuda.mem_get_info()
                bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            error = find_matmul_error(f"cuda:{i}", torch.float32)
            if error is None and bf16:
                error = find_matmul_error(f"cuda:{i}", torch.bfloat16)
        except RuntimeError as failure:  # out of memory, or a broken device: the other GPUs are still probed
            error = str(failure).split("\n")[0][:200]
        properties = torch.cuda.get_device_properties(i)
        gpus.append(Gpu(properties.name, properties.total_memory, free, bf16, error))
    return gpus


def find_matmul_error(device: str, dtype: Any) -> str | None:
    """Describe a matrix product's error; None if the product is right."""
    import torch

    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)  # (512, 512) each
    exact = left.double() @ right.double()
    computed = (left.to(device) @ right.to(device)).double().cpu()
    error = ((computed - exact).abs().max() / exact.abs().max()).item()
    # 1 % allows the rounding of TF32; a NaN is not below 1 % either
    return None if error < 0.01 else f"a {dtype} product is off by {error:.1%}"


def probe_all_reduce(backend: str, n: int) -> list[dict[str, float]]:
    """Sum a tensor over `n` processes, and list their results by rank."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(all_reduce, (backend, n, folder), nprocs=n)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]


def all_reduce(rank: int, backend: str, n: int, folder: str) -> None:
    """Sum a tensor over all ranks, five times.

    Writes the tensor's bytes, the number of wrong elements in all sums, and the seconds of the fastest to
    FOLDER/RANK.json.
    """
    import torch
    import torch.distributed as dist

    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    values = torch.arange(64_000_000 if on_gpu else 4_000_000, device=device) % 1000 + 1.0  # their sums are exact
    # ranks meet at a file, which unlike a port no other process can take first
    store = dist.FileStore(os.path.join(folder, "rendezvous"), n)
    device_id = device if on_gpu else None  # given a device, NCCL connects now, not at the first sum
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, device_id=device_id)
    expected = values * (n * (n + 1) / 2)  # the sum over ranks of `values * (rank + 1)`
    n_wrong, seconds = 0, []
    for _ in range(5):
        summed = values * (rank + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(summed)
        summed[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        n_wrong += int((summed != expected).sum())
    dist.destroy_process_group()
    result = {"bytes": values.numel() * 4, "wrong": n_wrong, "seconds": min(seconds)}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


@functools.cache
def visible_gpus() -> tuple[list[Gpu], str | None]:
    """List the GPUs that torch sees, and the error if that failed."""
    try:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return [], None
        return [Gpu(*values) for values in run_probe("probe_devices()", START_LIMIT)], None
    except (ChildError, ImportError, OSError) as error:
        return [], str(error)


# --- checks of devices ------------------------------------------------------------------------------------------------


def check_gpu() -> list[Finding]:
    """Check GPUs, driver, CUDA and NCCL."""
    import torch

    gpus, failure = visible_gpus()
    try:
        driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]
    except (ChildError, IndexError):
        driver = None
    if not gpus:
        return [judge_no_gpu(driver, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"), failure)]
    has_nccl = torch.distributed.is_nccl_available()
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"
    text = f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}, NCCL {nccl_version}"
    return [*judge_gpus(gpus), make_finding("cuda", OK if has_nccl else PROBLEM, text)]


def judge_no_gpu(driver: str | None, cuda: str | None, visible: str | None, failure: str | None = None) -> Finding:
    """Say why there is no GPU.

    `cuda` is the CUDA version that torch was built for, `visible` the value of CUDA_VISIBLE_DEVICES, `failure` the
    error of the query for GPUs.
    """
    if driver is None and failure is None:
        return Finding("gpu", OK, "none; runs use the CPU, which is enough for small models")
    if cuda and visible is not None and failure is None:
        fix = "unset CUDA_VISIBLE_DEVICES to use them"
        return Finding("gpu", WARNING, f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs", fix)
    build = f"CUDA {cuda}" if cuda else "the CPU"
    problem = f"failed: {failure}" if failure else "sees no GPU"
    text = f"driver {driver or 'unknown'}, but torch, built for {build}, {problem}"
    fix = "install a torch build for this driver (pytorch.org/get-started/locally), or a newer driver"
    return Finding("gpu", PROBLEM, text, fix)


def judge_gpus(gpus: Sequence[Gpu]) -> list[Finding]:
    """Judge memory, arithmetic and bfloat16."""
    findings = []
    for i, gpu in enumerate(gpus):
        level = grade(gpu.free / gpu.total, ok=0.85, warning=0.5)
        findings.append(make_finding("gpu", level, f"{i}: {gpu.name}, {gb(gpu.free)} of {gb(gpu.total)} free"))
    errors = "; ".join(f"GPU {i}: {gpu.error}" for i, gpu in enumerate(gpus) if gpu.error)
    text = errors or "correct on every GPU, in every dtype that it supports"
    findings.append(make_finding("matmul", PROBLEM if errors else OK, text))
    without_bf16 = ", ".join(str(i) for i, gpu in enumerate(gpus) if not gpu.bf16)
    if without_bf16:
        findings.append(make_finding("bfloat16", WARNING, f"not supported by GPU {without_bf16}"))
    else:
        findings.append(make_finding("bfloat16", OK, "supported by every GPU"))
    return findings


def check_all_reduce() -> list[Finding]:
    gpus, _ = visible_gpus()
    backend, n = ("nccl", len(gpus)) if gpus else ("gloo", 2)
    try:
        results = run_probe(f"probe_all_reduce({backend!r}, {n})", REDUCE_LIMIT)
        return [judge_all_reduce(results, backend)]
    except ChildError as error:
        text = f"{backend} over {count(n, 'process', 'processes')} failed: {error}"
        return [Finding("all-reduce", PROBLEM, text, FIXES[backend])]


def judge_all_reduce(results: Sequence[Mapping[str, float]], backend: str) -> Finding:
    """Judge the sums of all ranks, and the speed of the slowest."""
    n_bytes, seconds = results[0]["bytes"], max(result["seconds"] for result in results)
    errors = ", ".join(
        f"{result['wrong']:.0f} elements on rank {rank}" for rank, result in enumerate(results) if result["wrong"]
    )
    start = f"{backend} over {count(len(results), 'process', 'processes')}"
    if errors:
        return Finding("all-reduce", PROBLEM, f"{start}: the sum is wrong in {errors}", FIXES[backend])
    speed = f"{n_bytes / 1e6:.0f} MB in {seconds * 1e3:.1f} ms: {gb(n_bytes / seconds)}/s"
    return Finding("all-reduce", OK, f"{start}: correct, {speed}")


# --- checks of the host -----------------------------------------------------------------------------------------------


def check_host() -> list[Finding]:
    total, available = host_memory()
    text = f"{len(os.sched_getaffinity(0))} CPU cores, {gb(available)} of {gb(total)} of memory available"
    return [make_finding("host", grade(available, ok=8e9, warning=2e9), text)]


def check_open_files() -> list[Finding]:
    """Check the hard limit, to which a run raises its soft limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    text = f"{soft} soft, {hard} hard; a run raises its soft limit to the hard one"
    return [make_finding("open files", grade(hard, ok=4096, warning=1024), text)]


def check_disk() -> list[Finding]:
    import yaml

    from dpo.system.run_directory import get_local_dir

    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text("utf-8"))
    local_dir = Path(get_local_dir(config["local_dirs"])).absolute()
    folder = next(path for path in (local_dir, *local_dir.parents) if path.exists())  # the closest that exists
    if not os.access(folder, os.W_OK | os.X_OK):
        return [make_finding("disk", PROBLEM, f"{folder} is not writable")]
    free = shutil.disk_usage(folder).free
    text = f"{gb(free)} free for runs and caches in {folder}; a real run needs about 50 GB"
    return [make_finding("disk", grade(free, ok=50e9, warning=2e9), text)]


def check_hub() -> list[Finding]:
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE:
        return [make_finding("hub", OK, "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: only local and cached files")]
    fetch = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)"
    url = f"{constants.ENDPOINT}/api/models?limit=1"
    try:  # in a child process, because DNS look-ups ignore the timeout of urlopen
        ask(sys.executable, "-P", "-c", fetch, url, limit=HUB_LIMIT)
        return [make_finding("hub", OK, f"{host} answers")]
    except ChildError as error:
        reason = re.sub(r"^[\w.]+: |<urlopen error |>$", "", str(error))  # without the exception's name
        return [make_finding("hub", WARNING, f"{host}: {reason}")]


def check_wandb() -> list[Finding]:
    """Look for an API key of W&B, without showing or trying it."""
    if (mode := os.environ.get("WANDB_MODE")) in ("offline", "disabled"):
        return [Finding("wandb", OK, f"WANDB_MODE={mode}")]
    if os.environ.get("WANDB_API_KEY"):
        return [Finding("wandb", OK, "an API key is in the environment")]
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc.split("@")[-1]
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, files):
        if not os.path.exists(file):
            continue
        try:
            if netrc.netrc(file).authenticators(host):
                return [Finding("wandb", OK, f"an API key for {host} is in {file}")]
        except (netrc.NetrcParseError, OSError):  # the error is not shown: it may quote the file
            return [make_finding("wandb", WARNING, f"{file} cannot be read: runs log offline")]
    return [make_finding("wandb", WARNING, "no API key: without a terminal to ask for one, runs log offline")]


def check_backends() -> list[Finding]:
    """Check whether optional packages that are installed can be imported."""
    findings = []
    for module, (setting, install) in BACKENDS.items():
        try:
            version = importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(module, OK, f"not installed; only {setting} needs it ({install})"))
            continue
        try:
            ask(sys.executable, "-P", "-c", f"import {module}", limit=START_LIMIT)
            findings.append(Finding(module, OK, f"{version} can be imported; used by {setting}"))
        except ChildError as error:
            text = f"{version} cannot be imported: {error}"
            findings.append(Finding(module, WARNING, text, f"{install}; used by {setting}"))
    return findings


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "software": check_software,
    "gpu": check_gpu,
    "all-reduce": check_all_reduce,
    "host": check_host,
    "open files": check_open_files,
    "disk": check_disk,
    "hub": check_hub,
    "wandb": check_wandb,
    "backends": check_backends,
}


def examine(checks: Mapping[str, Callable[[], list[Finding]]]) -> list[Finding]:
    """Run all checks. An exception in a check becomes a finding."""
    findings = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            text = f"could not be checked: {type(error).__name__}: {error}"
            fix = "if the check of software found a problem, fix that first; else report this as a bug"
            findings.append(Finding(name, PROBLEM, text, fix))
    return findings


# --- the report ------------------------------------------------------------------------------------------------------


def format_report(findings: Sequence[Finding]) -> str:
    """Format the report, in at most 100 columns."""
    lines = []
    wrap = functools.partial(textwrap.wrap, break_on_hyphens=False)
    for finding in findings:
        head, indent = f"{finding.level:<9}{finding.check:<17}", " " * 26
        lines += wrap(finding.text, 100, initial_indent=head, subsequent_indent=indent)
        if finding.fix:
            lines += wrap(f"fix: {finding.fix}", 100, initial_indent=indent, subsequent_indent=indent)
    levels = [finding.level for finding in findings]
    total = ", ".join(count(levels.count(level), level) for level in (PROBLEM, WARNING))
    return "\n".join([*lines, "", total])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args()
    findings = examine(CHECKS)
    if options.json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings]}, indent=2, allow_nan=False))
    else:
        print(format_report(findings))
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
