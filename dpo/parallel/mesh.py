"""The device mesh of a run's processes, and their collectives."""

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dpo.settings.plan import ParallelDims
from dpo.system.host import GPU, count_gpus
from dpo.system.waiting import has_other_ranks


class Mesh:
    """The ranks as `replicate` x `shard` x `tensor`; neighbours differ in `tensor`, which communicates most.

    Layers are cut along `tensor`; parameters and optimizer states are sharded along `shard` (FSDP). Ranks that differ
    only in `tensor` see the same examples. `add`, `any` and `gather_all` are collectives, which every process must
    call; without other processes, they send nothing.
    """

    def __init__(self, rank: int = 0, dims: ParallelDims = ParallelDims(), *, timeout_secs: float = 1800):
        self.rank = rank
        self.world_size = dims.world_size
        self.tensor_size = dims.tensor_size
        self.data_rank = rank // dims.tensor_size  # below `data_size`; the same on ranks that see the same examples
        self.data_size = dims.data_size
        # Whether metrics count this rank: it is true on exactly one of the ranks that see the same examples.
        self.counts = rank % dims.tensor_size == 0
        self.shard_size = dims.shard_size
        self.device = torch.device("cpu")
        if dist.is_initialized():
            if count_gpus():
                self.device = torch.device(GPU, torch.cuda.current_device())
            # Silence advice to flatten axes, which does not apply to tensors that FSDP and tensor parallelism shard.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            sizes = (dims.replicate_size, dims.shard_size, dims.tensor_size)
            self.device_mesh = init_device_mesh(
                self.device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor")
            )
            if dist.get_backend() != "fake":  # which `dpo estimate` uses, and which has no timeouts
                # Subgroups do not inherit the timeout of the default group.
                for group in self.device_mesh.get_all_groups():
                    _set_pg_timeout(timedelta(seconds=timeout_secs), group)

    def name_groups(self) -> dict[str, str]:
        """Map the name of each process group to its axis, or to `all`; axes of size 1 are left out."""
        names = {str(dist.group.WORLD.group_name): "all"}
        for axis in self.device_mesh.mesh_dim_names or ():
            if self.device_mesh[axis].size() > 1:
                names[str(self.device_mesh[axis].get_group().group_name)] = axis
        return names

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over all processes, in place, and return them."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, here: bool) -> bool:
        """Return whether `here` is true on any process."""
        if self.world_size == 1:
            return here
        return bool(self.add(torch.tensor(int(here), device=self.device)).item())

    def gather_all(self, value: Any) -> list:
        """Return the values of all processes in the order of ranks; they are sent pickled."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank. It is sent pickled; other ranks' values are ignored.

    Every rank must call it.
    """
    if not has_other_ranks():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
