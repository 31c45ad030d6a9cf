"""Tensors in sharded checkpoints: every process writes its parts of them, and the reader joins these.

A process writes its parts of a state to one file, in the format of torch.distributed.checkpoint's
HuggingFaceStorageWriter. The state's `NAME.pt` has a tensor on the meta device in place of each tensor whose parts are
in these files. The name of a part is NAME and the tensor's path in the state, joined by dots.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only, tree_map_with_path

from dpo.parallel.sharding import Parts, join_path

SHARD = "shard-{}-{:05}-of-{:05}.safetensors"  # the state's name, the process's number from 1, and how many there are
SHARDS = "shard-*.safetensors"
# The metadata of a file, as torch.distributed.checkpoint writes and reads it: where each part begins in its tensor.
OFFSETS_KEY = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
WITHOUT_VALUES = (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.numel)  # these join no `SplitTensor`


def list_shards(file: Path) -> list[Path]:
    """List the files with the parts of the tensors of a file `NAME.pt`; [] if it has them itself."""
    return sorted(file.parent.glob(SHARDS.replace("*", f"{file.stem}-*")))


def write_parts(path: Path, parts: Parts) -> None:
    offsets = {name: {OFFSETS: list(begin)} for name, (begin, _) in parts.items()}
    tensors = {name: part.contiguous() for name, (_, part) in parts.items()}
    save_file(tensors, path, {"format": "pt", "DCP_VERSION": "1.0", OFFSETS_KEY: json.dumps(offsets)})
    # Safetensors makes files that other users cannot read; the directory has the mode that new files should have.
    path.chmod(path.parent.stat().st_mode & 0o666)


def read_parts(state: Any, file: Path) -> Any:
    """Replace the tensors on the meta device in the state of `NAME.pt` by `SplitTensor`s of the parts in its shards.

    Raises ValueError if parts are missing, and safetensors' errors for damage.
    """
    parts = defaultdict(list)  # by name
    for path in list_shards(file):
        with safe_open(path, "pt") as shard:
            for key, info in json.loads(shard.metadata()[OFFSETS_KEY]).items():
                parts[key].append((tuple(info[OFFSETS]), shard.get_tensor(key)))  # mapped from the file

    def replace(path: tuple, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return SplitTensor(value.shape, value.dtype, parts[join_path(file.stem, path)])
        return value

    return tree_map_with_path(replace, state)


def join_in_files(state: Any, folder: Path) -> Any:
    """Replace the `SplitTensor`s of a state by whole tensors that are mapped from new files in `folder`."""

    def join(tensor: Tensor) -> Tensor:
        file = folder / str(len(list(folder.iterdir())))
        with file.open("wb") as opened:  # else a full disk would kill the process when the mapping is written
            os.posix_fallocate(opened.fileno(), 0, max(1, tensor.numel() * tensor.dtype.itemsize))
        whole = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return whole.view(tensor.shape).copy_(tensor)

    return tree_map_only(SplitTensor, join, state)


class SplitTensor(Tensor):
    """A tensor in several parts, which may be mapped from files; any computation with it joins them first.

    Until then it takes no memory. Raises ValueError if the parts are not those of one tensor.
    """

    parts: list[tuple[tuple[slice, ...], Tensor]]  # the place of each part, and the part

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, parts: list) -> "SplitTensor":
        """Make a tensor of `parts`, pairs of where each part begins in each dim, and the part."""
        whole = torch.empty(shape, dtype=dtype, device="meta")
        tensor = whole.as_subclass(cls)
        tensor.parts = []
        for begin, part in parts:
            place = tuple(slice(start, start + n) for start, n in zip(begin, part.shape, strict=True))
            fits = len(begin) == len(shape) and min(begin, default=0) >= 0 and part.dtype == dtype
            if not fits or whole[place].shape != part.shape:
                raise ValueError("they have a part of another tensor")
            tensor.parts.append((place, part))
        if sum(part.numel() for _, part in parts) != shape.numel():
            raise ValueError("they lack parts of a tensor")
        return tensor

    def join(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for place, part in self.parts:
            whole[place] = part
        return whole

    def to(self, *args: Any, copy: bool = False, **options: Any) -> Tensor:
        """Join and cast; a joined tensor is a copy already."""
        return self.join().to(*args, **options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function in WITHOUT_VALUES:
            return super().__torch_function__(function, types, args, kwargs)
        args, kwargs = tree_map_only(cls, cls.join, (args, kwargs or {}))
        return function(*args, **kwargs)
