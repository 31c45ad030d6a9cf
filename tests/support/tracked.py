"""The memory of tensors, as it is allocated and freed."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Tracker(TorchDispatchMode):
    """The most bytes that new tensors take at a time; `held` tensors existed before.

    FSDP frees and allocates tensors by resizing their storages, which is no operation of torch.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in held}  # new bytes, by address of a storage
        self.live = 0
        self.peak = 0

    def __enter__(self) -> "Tracker":
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            self.set_size(storage._cdata, n_bytes)
            return resize(storage, n_bytes)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_iter(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.set_size(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self.forget, storage._cdata)
        return out

    def set_size(self, address: int, n_bytes: int) -> None:
        self.live += n_bytes - self.sizes.get(address, 0)
        self.sizes[address] = n_bytes
        self.peak = max(self.peak, self.live)

    def forget(self, address: int) -> None:
        self.live -= self.sizes.pop(address)
