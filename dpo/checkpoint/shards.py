"""Tensors in sharded checkpoints: every process writes its parts of them, and whoever reads joins them.

A process writes one file, in the safetensors format of torch.distributed.checkpoint's HuggingFaceStorageWriter. A file
`NAME.pt` has a tensor on the meta device in place of each tensor whose parts are in these files, under the name NAME
and the tensor's path in the state, separated by dots.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


SHARD = "shard-{:05}-of-{:05}.safetensors"  # by the number of the process, from 1, and that of all processes
SHARDS = "shard-*.safetensors"
# The metadata of a file, as torch.distributed.checkpoint writes and reads it: where each part begins in its tensor.
OFFSETS_KEY = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"

Parts = dict[str, tuple[tuple[int, ...], Tensor]]  # by name: where the part begins in each dim, and the part


def take_parts(state: Any, name: str, parts: Parts) -> Any:
    """Replace the DTensors of a state by tensors on the meta device, and add this process's parts of them to `parts`.

    Of the processes that have the same part, the first one takes it. Other tensors are copied to the CPU.
    """
    if isinstance(state, DTensor):
        position = state.device_mesh.get_coordinate() or ()
        is_first = all(index == 0 for index, axis in zip(position, state.placements, strict=True) if axis.is_replicate())
        local = state.to_local().detach()
        if is_first and local.numel():  # the last processes may have no rows
            [chunk] = state.__create_chunk_list__()
            parts[name] = (tuple(chunk.offsets), local.cpu())
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, Mapping):
        return {key: take_parts(value, f"{name}.{key}", parts) for key, value in state.items()}
    return state.detach().cpu() if isinstance(state, Tensor) else state


def write_parts(path: Path, parts: Parts) -> None:
    offsets = {name: {OFFSETS: list(begin)} for name, (begin, _) in parts.items()}
    tensors = {name: part.contiguous() for name, (_, part) in parts.items()}
    save_file(tensors, path, {"format": "pt", "DCP_VERSION": "1.0", OFFSETS_KEY: json.dumps(offsets)})


def join_parts(state: Any, name: str, directory: Path) -> Any:
    """Replace the tensors on the meta device in a state by those whose parts are in the shards of a directory.

    Raises ValueError if parts are missing.
    """
    found: dict[str, list] = defaultdict(list)
    for path in sorted(directory.glob(SHARDS)):
        with safe_open(path, "pt") as file:
            offsets = json.loads(file.metadata()[OFFSETS_KEY])
            for key in file.keys():  # noqa: SIM118 (the file is no mapping)
                if key.startswith(f"{name}."):
                    found[key].append((tuple(offsets[key][OFFSETS]), file.get_tensor(key)))  # mapped from the file

    def join(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {inner: join(item, f"{key}.{inner}") for inner, item in value.items()}
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        return SplitTensor(value.shape, value.dtype, found[key])

    return join(state, name)


def join_in_files(state: Any, folder: Path) -> Any:
    """Replace the `SplitTensor`s of a state by whole tensors that are mapped from new files in `folder`."""

    def join(value: SplitTensor) -> Tensor:
        number = len(list(folder.iterdir()))
        whole = torch.from_file(str(folder / f"{number}"), shared=True, size=value.numel(), dtype=value.dtype)
        return whole.view(value.shape).copy_(value)

    return tree_map_only(SplitTensor, join, state)


class SplitTensor(Tensor):
    """A tensor in several parts, which may be mapped from files: whatever is computed with it joins them first.

    So it takes no memory until then. Raises ValueError if the parts are not those of one tensor.
    """

    parts: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, parts: list) -> "SplitTensor":
        n_elements = 0
        for begin, part in parts:
            ends = [start + length for start, length in zip(begin, part.shape, strict=True)]
            if part.dtype != dtype or len(ends) != len(shape) or any(map(int.__gt__, ends, shape)) or min(begin) < 0:
                raise ValueError("it has a part of another tensor")
            n_elements += part.numel()
        if n_elements != shape.numel():
            raise ValueError("it lacks parts of a tensor")
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        tensor.parts = parts
        return tensor

    def join(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for begin, part in self.parts:
            whole[tuple(slice(start, start + n) for start, n in zip(begin, part.shape, strict=True))] = part
        return whole

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.join, (args, kwargs or {}))
        return function(*args, **kwargs)
