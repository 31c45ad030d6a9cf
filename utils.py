"""The reference's small helpers, under their names. Anything with a better home lives there instead."""

from __future__ import annotations

import getpass
import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class InputError(ValueError):
    """Bad input from a user: one sentence with the value and the fix.

    `train.py` prints it without a traceback and exits with status 2; every other exception is a bug of ours.
    """


class RunError(RuntimeError):
    """What ends a run through no fault of ours: one sentence with the cause and the way on. Exit status 1."""


def get_open_port() -> int:
    """A TCP port that is free on this machine now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def rank0_print(*args: Any, **kwargs: Any) -> None:
    """`print`, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs)


def get_local_dir(prefixes: Sequence[str]) -> str:
    """`PREFIX/USER` for the first prefix that exists, else for the last. Creates nothing (the reference did)."""
    prefix = next((p for p in prefixes if os.path.exists(p)), prefixes[-1])
    return os.path.join(prefix, getpass.getuser())


def get_cache_dir(local_dirs: Sequence[str]) -> str | None:
    """Where models and datasets are cached: `LOCAL_DIR/USER`, or None to leave it to the libraries, if the user's
    environment says where (`XDG_CACHE_HOME`, `HF_HOME`)."""
    return None if {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys() else get_local_dir(local_dirs)


def get_remote_file(remote_path: str, local_path: str | None = None) -> str:
    """Copy `HOST:PATH` by scp to `local_path`, by default the same path here; the path of the copy.

    What is there already, and a path of this machine, is not copied. Raises InputError for what is no HOST:PATH, and
    RunError if scp fails; then there is no half of a file.
    """
    host, colon, path = remote_path.partition(":")
    if not (host and colon and path) or host.startswith("-"):  # which would be an option of scp
        raise InputError(f"remote_path={remote_path} is not HOST:PATH")
    name = socket.gethostname()
    if host in (name, name.partition(".")[0]):
        return path
    local = Path(local_path or path)
    if local.exists():
        return str(local)
    local.parent.mkdir(parents=True, exist_ok=True)
    beside = local.with_name(f".{local.name}.{os.getpid()}")
    print(f"copying {remote_path} to {local}")
    try:
        copied = subprocess.run(["scp", "--", remote_path, str(beside)], stderr=subprocess.PIPE, text=True, check=False)
        if copied.returncode:
            raise RunError(f"scp cannot copy {remote_path}: {copied.stderr.strip()[:300]}")
        beside.replace(local)
    except FileNotFoundError as error:
        raise RunError(f"{remote_path} cannot be copied: this machine has no scp, or it left no file") from error
    finally:
        beside.unlink(missing_ok=True)
    return str(local)


def get_local_run_dir(exp_name: str, local_dirs: Sequence[str]) -> str:
    """`LOCAL_DIR/EXP_NAME_TIMESTAMP`, to the microsecond so that quick sweeps don't collide. Creates nothing."""
    return os.path.join(get_local_dir(local_dirs), f"{exp_name}_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")


def slice_and_move_batch_for_device(batch: Mapping, rank: int, world_size: int, device: str | torch.device) -> dict:
    """Part `rank` of `world_size` equal parts of a batch's rows, tensors moved to `device`.

    Raises ValueError if the rows don't divide: the reference dropped the remainder in silence.
    """
    rows = len(next(iter(batch.values())))
    if rows % world_size:
        raise ValueError(f"{rows} rows cannot be cut into {world_size} equal parts")
    part = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    return {k: v[part].to(device) if isinstance(v, torch.Tensor) else v[part] for k, v in batch.items()}


def pad_to_length(tensor: torch.Tensor, length: int, pad_value: int | float, dim: int = -1) -> torch.Tensor:
    """Pad `tensor` on the right of `dim` up to `length`; a tensor that is long enough comes back as it is."""
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)


def all_gather_if_needed(values: torch.Tensor, rank: int, world_size: int, *, group: Any = None) -> torch.Tensor:
    """Every rank's `values` concatenated along dimension 0, in rank order; `values` itself on one process."""
    if world_size == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=0)


def formatted_dict(d: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to five significant digits, for printing."""
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in d.items()}


def disable_dropout(model: torch.nn.Module) -> None:
    """Turn dropout off for good, in train mode too.

    Many transformers models apply dropout functionally, from a float attribute of the module or of its config
    (`attention_dropout`, `resid_pdrop`, `layerdrop`, ...), so zeroing the `nn.Dropout` modules alone is not enough.
    """
    holders: list[Any] = list(model.modules())
    # a config is shared by many modules and may nest others (multimodal models): zero each one once
    configs = {id(c): c for m in holders for c in (getattr(m, "config", None),) if c is not None}
    for config in list(configs.values()):
        configs.update({id(c): c for c in vars(config).values() if hasattr(c, "to_dict")})
    for holder in [*holders, *configs.values()]:
        if isinstance(holder, torch.nn.modules.dropout._DropoutNd):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if type(value) in (int, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(holder, name, type(value)(0))  # some configs insist on their int


def print_gpu_memory(rank: int | None = None, message: str = "") -> None:
    """One line per visible GPU with the memory this process has allocated and its peak; nothing without a GPU."""
    for device in range(torch.cuda.device_count()):
        if rank is not None and device != rank:
            continue
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        print(f"{message} GPU {device}: {now / 2**30:.2f} GiB allocated, {peak / 2**30:.2f} GiB at the peak")


def get_block_class_from_model(model: torch.nn.Module, block_class_name: str) -> type[torch.nn.Module]:
    """The class named `block_class_name` among the model's modules.

    Raises InputError that lists the classes of repeated modules, the candidates for a transformer block.
    """
    for module in model.modules():
        if type(module).__name__ == block_class_name:
            return type(module)
    repeated = {type(m[0]).__name__ for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
    raise InputError(
        f"model.block_name={block_class_name} is not a module class of {type(model).__name__}; "
        f"its repeated blocks are {', '.join(sorted(repeated))}, and model.block_name=null takes those it names itself"
    )


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str = "localhost",
    port: int = 12355,
    backend: str = "nccl",
    timeout: timedelta | None = None,
    store: dist.Store | None = None,
    local_rank: int | None = None,
) -> None:
    """Join the default process group, at `store` or where `MASTER_ADDR` and `MASTER_PORT` in the environment say.

    `timeout` is how long a collective may wait; None leaves it to torch. `local_rank`, by default `rank`, is the
    process's among those of its machine: the GPU it takes under NCCL.
    """
    if store is None:
        os.environ.setdefault("MASTER_ADDR", master_addr)
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None
    if backend == "nccl":  # first, or NCCL takes GPU 0 for every rank
        device = torch.device("cuda", (rank if local_rank is None else local_rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store, device_id=device)


class TemporarilySeededRandom:
    """Context in which `random` and `numpy.random` are seeded; their earlier states return afterwards."""

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)  # Python 3.11's random.seed refuses numpy integers

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state()
        random.seed(self.seed)
        np.random.seed(self.seed)

    def __exit__(self, *exception: object) -> None:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
