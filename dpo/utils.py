"""The reference implementation's small helpers, under its names."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dpo.models.pretrained import disable_dropout  # noqa: F401
from dpo.parallel.sharding import get_block_class_from_model  # noqa: F401
from dpo.system.launching import get_open_port, init_distributed  # noqa: F401
from dpo.system.run_directory import get_local_dir, get_local_run_dir  # noqa: F401


def rank0_print(*args: Any, **kwargs: Any) -> None:
    """`print`, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs)


def all_gather_if_needed(values: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return every rank's `values`, concatenated along dimension 0 in rank order.

    `rank` is not used: it is an argument because the reference code's callers pass it.
    """
    if world_size == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts, dim=0)


def slice_and_move_batch_for_device(batch: Mapping, rank: int, world_size: int, device: str | torch.device) -> dict:
    """Cut the rows of a batch into `world_size` equal parts, and return part `rank` with its tensors on `device`.

    A batch maps names to tensors or lists of the same length.
    """
    n_rows = len(next(iter(batch.values())))
    if n_rows % world_size:  # the reference implementation silently drops the remainder
        raise ValueError(f"{n_rows} rows cannot be cut into {world_size} equal parts: use a multiple")
    part = slice(rank * n_rows // world_size, (rank + 1) * n_rows // world_size)
    parts = {name: values[part] for name, values in batch.items()}
    for name, values in parts.items():
        if isinstance(values, torch.Tensor):
            parts[name] = values.to(device)
    return parts


def pad_to_length(tensor: torch.Tensor, length: int, pad_value: int | float, dim: int = -1) -> torch.Tensor:
    """Pad the end of dimension `dim` to `length`; a tensor that is longer already is returned as it is."""
    padding_shape = list(tensor.shape)
    padding_shape[dim] = length - tensor.shape[dim]
    if padding_shape[dim] <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_full(padding_shape, pad_value)], dim=dim)


def formatted_dict(d: Mapping) -> dict:
    """Return the dict with floats as strings of five significant digits, for printing; other values stay."""
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in d.items()}


def print_gpu_memory(rank: int | None = None, message: str = "") -> None:
    """Print this process's allocated and peak memory on each visible GPU, or on GPU `rank` alone."""
    devices = range(torch.cuda.device_count()) if rank is None else [rank]
    for device in devices:
        now = torch.cuda.memory_allocated(device) / 2**30
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        print(f"{message} GPU {device}: {now:.2f} GiB allocated, {peak:.2f} GiB at the peak")


@contextmanager
def TemporarilySeededRandom(seed: int) -> Iterator:
    """Seed `random` and `numpy.random` inside the context; at its end, restore the states that they had before."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    seed = int(seed)  # Python 3.11's random.seed refuses numpy integers
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
