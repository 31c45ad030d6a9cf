"""Processes and shards: starting workers, sharding a finished model, gathering what ranks hold.

The trainers call these as functions on a model that is complete; one process skips every collective.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from utils import InputError, get_block_class_from_model, get_open_port, init_distributed


def launch(worker: Callable[..., None], world_size: int, *args: Any, port: int | None, process_group: bool) -> None:
    """Run `worker(rank, world_size, *args)` in `world_size` processes; in this one if that is 1.

    `process_group` joins them through NCCL, one GPU each, or through gloo on the CPU, at `port` (None: a free one).
    A worker that fails ends all, and the run with its traceback; one that found bad input, with status 2.
    """
    port = port or get_open_port()
    if world_size == 1:
        if process_group:
            _join(0, 1, port)
        try:
            worker(0, 1, *args)
        finally:
            if process_group:
                dist.destroy_process_group()
        return
    _raise_open_file_limit()
    try:
        mp.spawn(_run_worker, args=(world_size, port, worker, *args), nprocs=world_size)
    except mp.ProcessExitedException as error:
        if error.exit_code == 2:  # the worker has printed its message
            sys.exit(2)
        raise RuntimeError(f"rank {error.error_index} died ({error}); the other workers were ended") from error


def _run_worker(rank: int, world_size: int, port: int, worker: Callable[..., None], *args: Any) -> None:
    _join(rank, world_size, port)
    try:
        worker(rank, world_size, *args)
    except InputError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: the other ranks may be waiting in a collective
    dist.destroy_process_group()


def _join(rank: int, world_size: int, port: int) -> None:
    init_distributed(rank, world_size, port=port, backend="nccl" if torch.cuda.is_available() else "gloo")


def _raise_open_file_limit() -> None:
    """Many workers with many tensors in shared memory run out of the soft limit; the hard one is ours to take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shard_fully(model: Any, *, block_name: str | None, compute_dtype: torch.dtype | None) -> Any:
    """Shard parameters, gradients and optimizer state over all processes (FSDP2), one unit per transformer block.

    Blocks are the modules of class `block_name`, or what the model itself says must not be split. Embeddings and
    head, tied or not, share the root's unit. Computes in `compute_dtype` (None: the weights' own) and reduces
    gradients in float32. Raises InputError for a class that the model does not have.
    """
    names = [block_name] if block_name else sorted(model._no_split_modules or ())
    if not names:
        raise InputError(f"{type(model).__name__} does not name its blocks; set model.block_name to their class")
    classes = tuple(get_block_class_from_model(model, name) for name in names)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, classes):
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered from all processes, any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_list(values: list, world_size: int) -> list:
    """The lists of all processes, one after the other in rank order."""
    if world_size == 1:
        return values
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]
