"""Tensors in sharded checkpoints: every process writes its parts of them, and the reader joins these.

A process writes its parts of a state to one file, in the format of torch.distributed.checkpoint's
HuggingFaceStorageWriter. The state's `NAME.pt` has a tensor on the meta device in place of each tensor whose parts are
in these files. The name of a part is NAME and the tensor's path in the state, joined by dots.
"""

import json
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpo.parallel.sharding import Parts

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
    parts: dict[str, list] = {}  # by name, for each tensor on the meta device
    _replace_meta(state, file.stem, lambda key, tensor: parts.setdefault(key, []))
    if not parts:
        return state
    for path in list_shards(file):
        with safe_open(path, "pt") as shard:
            offsets = json.loads(shard.metadata()[OFFSETS_KEY])
            for key in offsets.keys() & parts.keys():
                parts[key].append((tuple(offsets[key][OFFSETS]), shard.get_tensor(key)))  # mapped from the file
    return _replace_meta(state, file.stem, lambda key, tensor: SplitTensor(tensor.shape, tensor.dtype, parts[key]))


def _replace_meta(value: Any, name: str, make: Callable[[str, Tensor], Any]) -> Any:
    """Copy nested mappings, with `make(name, tensor)` in place of each tensor on the meta device."""
    if isinstance(value, Mapping):
        return {key: _replace_meta(item, f"{name}.{key}", make) for key, item in value.items()}
    return make(name, value) if isinstance(value, Tensor) and value.is_meta else value


def join_in_files(state: Any, folder: Path) -> Any:
    """Replace the `SplitTensor`s of a state by whole tensors that are mapped from new files in `folder`."""

    def join(tensor: Tensor) -> Tensor:
        file = folder / str(len(list(folder.iterdir())))
        with file.open("wb") as opened:  # else a full disk would kill the process when the mapping is written
            os.posix_fallocate(opened.fileno(), 0, max(1, tensor.numel() * tensor.dtype.itemsize))
        whole = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return whole.view(tensor.shape).copy_(tensor)

    return _replace_split(state, join)


def _replace_split(value: Any, change: Callable[[Any], Tensor]) -> Any:
    """Apply `change` to the `SplitTensor`s in nested mappings, lists and tuples."""
    if isinstance(value, SplitTensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _replace_split(item, change) for key, item in value.items()}
    return type(value)(_replace_split(item, change) for item in value) if type(value) in (list, tuple) else value


class SplitTensor(Tensor):
    """A tensor in several parts, which may be mapped from files; any computation with it joins them first.

    Until then it takes no memory. Raises ValueError if the parts are not those of one tensor.
    """

    parts: list[tuple[tuple[int, ...], Tensor]]  # where each begins in each dim, and the part

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, parts: list) -> "SplitTensor":
        for begin, part in parts:
            ends = [start + length for start, length in zip(begin, part.shape, strict=True)]
            if (
                part.dtype != dtype
                or len(ends) != len(shape)
                or any(map(operator.gt, ends, shape))
                or min(begin, default=0) < 0
            ):
                raise ValueError("they have a part of another tensor")
        if sum(part.numel() for _, part in parts) != shape.numel():
            raise ValueError("they lack parts of a tensor")
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.parts = parts
        return tensor

    def join(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for begin, part in self.parts:
            whole[tuple(slice(start, start + n) for start, n in zip(begin, part.shape, strict=True))] = part
        return whole

    def to(self, *args: Any, copy: bool = False, **options: Any) -> Tensor:
        """Join and cast; a joined tensor is a copy already."""
        return self.join().to(*args, **options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function in WITHOUT_VALUES:
            return super().__torch_function__(function, types, args, kwargs)
        return function(*_replace_split(args, cls.join), **_replace_split(kwargs or {}, cls.join))
