"""The device mesh of a run's processes, and their collectives, which can be counted.

They can also be counted for a run whose other processes do not exist (`fake_processes`).
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dpo.settings.plan import ParallelDims
from dpo.system.host import GPU, count_gpus

AXES = ("replicate", "shard", "tensor")
# The kind of collective, and the index of the group among the arguments, by name of the operator: those of
# torch.distributed, and its functional ones.
KINDS = {
    "c10d::_allgather_base_": ("all_gather", 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 2),
    "c10d::allreduce_": ("all_reduce", 1),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 3),
    "_c10d_functional::all_reduce": ("all_reduce", 2),
}


class Mesh:
    """The ranks as `replicate` x `shard` x `tensor`; neighbours differ in `tensor`, which communicates most.

    Layers are cut along `tensor`; parameters and optimizer states are sharded along `shard` (FSDP). Ranks that differ
    only in `tensor` see the same examples. `add` and `any` are collectives, which every process must call; without
    other processes, they send nothing.
    """

    uses_gpus = True  # if there are any

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
            if self.uses_gpus and count_gpus():
                self.device = torch.device(GPU, torch.cuda.current_device())
            # Silence advice to flatten axes, which does not apply to tensors that FSDP and tensor parallelism shard.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            sizes = (dims.replicate_size, dims.shard_size, dims.tensor_size)
            self.device_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=AXES)
            if dist.get_backend() != "fake":  # which `dpo estimate` uses, and which has no timeouts
                # Subgroups do not inherit the timeout of the default group.
                for group in self.device_mesh.get_all_groups():
                    group.set_timeout(timedelta(seconds=timeout_secs))

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


# --- collectives counted ---------------------------------------------------------------------------------------------


class CollectiveCounter(TorchDispatchMode):
    """Counts this process's collectives inside the context by axis of the mesh and kind, such as `shard all_gather`."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        # The axis of each process group, by its name; axes of size 1 are left out.
        self.axes = {str(dist.group.WORLD.group_name): "all"}
        for axis in AXES:
            if mesh.device_mesh[axis].size() > 1:
                self.axes[str(mesh.device_mesh[axis].get_group().group_name)] = axis
        self.calls: Counter[str] = Counter()
        self.n_bytes: Counter[str] = Counter()  # size of the input or the result, whichever is larger

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the DTensor then runs the operator itself, and its collectives come back here
        result = function(*args, **(kwargs or {}))
        if function.name() in KINDS:
            kind, index = KINDS[function.name()]
            group = args[index]
            group_name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
            key = f"{self.axes[group_name]} {kind}"
            self.calls[key] += 1
            sizes = [value.nbytes for value in tree_iter((args, result)) if isinstance(value, torch.Tensor)]
            self.n_bytes[key] += max(sizes)
        return result


class FakeMesh(Mesh):
    """A mesh whose other processes do not exist: sums over it are 0, as the tensors may have no values."""

    uses_gpus = False

    def add(self, values: torch.Tensor) -> torch.Tensor:
        super().add(values)  # so that it is counted
        return torch.zeros(values.shape, dtype=values.dtype)


@contextmanager
def fake_processes(dims: ParallelDims) -> Iterator[Mesh]:
    """Make this process rank 0 of a group without other processes inside the context, and yield the mesh.

    Collectives of this group return at once and send nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # not at the top, as its place is not public

    dist.init_process_group("fake", rank=0, world_size=dims.world_size, store=FakeStore())
    try:
        yield FakeMesh(0, dims)
    finally:
        dist.destroy_process_group()
