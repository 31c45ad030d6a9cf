"""Joining the process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def get_open_port() -> int:
    """A TCP port that is currently free on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return server.getsockname()[1]


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
    """Join the default process group, through `store` or the environment's `MASTER_ADDR` and `MASTER_PORT`.

    `timeout` is the longest wait of a collective; None is torch's default. `local_rank`, by default `rank`, is the rank
    within the machine, and under NCCL the index of its GPU.
    """
    if store is None:
        os.environ.setdefault("MASTER_ADDR", master_addr)
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None
    if backend == "nccl":  # before joining, or NCCL takes GPU 0 on every rank
        device = torch.device("cuda", (rank if local_rank is None else local_rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, store=store, device_id=device)
