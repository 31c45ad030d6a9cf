"""Counts of collectives, also of a run whose other processes do not exist (`fake_processes`)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpo.parallel.mesh import Mesh
from dpo.settings.plan import ParallelDims

NAMESPACES = ("c10d", "_c10d_functional")  # torch.distributed's operators, and its functional ones
KINDS = {  # by name of the operator: the kind of collective, and the index of the group among the arguments
    "_allgather_base_": ("all_gather", 2),
    "_reduce_scatter_base_": ("reduce_scatter", 2),
    "allreduce_": ("all_reduce", 1),
    "all_gather_into_tensor": ("all_gather", 2),
    "reduce_scatter_tensor": ("reduce_scatter", 3),
    "all_reduce": ("all_reduce", 2),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts this process's collectives inside the context by axis of the mesh and kind, such as `shard all_gather`."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.axes = mesh.name_groups()
        self.calls: Counter[str] = Counter()
        self.n_bytes: Counter[str] = Counter()  # size of the input or the result, whichever is larger

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the DTensor then runs the operator itself, and its collectives come back here
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace in NAMESPACES and name in KINDS:
            kind, index = KINDS[name]
            group = args[index]
            group_name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
            key = f"{self.axes[group_name]} {kind}"
            self.calls[key] += 1
            self.n_bytes[key] += max(_largest_nbytes(args), _largest_nbytes(result))
        return result


def _largest_nbytes(value: Any) -> int:
    """Return the size in bytes of the largest tensor in nested lists and tuples, or 0 if there is none."""
    if isinstance(value, Tensor):
        return value.nbytes
    return max(map(_largest_nbytes, value), default=0) if isinstance(value, list | tuple) else 0


@contextmanager
def fake_processes(dims: ParallelDims) -> Iterator[Mesh]:
    """Make this process rank 0 of a group without other processes inside the context, and yield the mesh.

    Collectives of this group return at once and send nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # not at the top, as its place is not public

    dist.init_process_group("fake", rank=0, world_size=dims.world_size, store=FakeStore())
    try:
        yield Mesh(0, dims)
    finally:
        dist.destroy_process_group()
