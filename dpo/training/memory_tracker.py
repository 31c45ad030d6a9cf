"""Memory of tensors by purpose, tracked as operations create and free them.

Tensors are real or fake; fake ones have shapes and lifetimes but no data (`torch._subclasses.FakeTensorMode`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dpo.models.adapters import trained_parameters


class MemoryTracker(TorchDispatchMode):
    """Track the storages of all tensors created inside this context.

    `live` has the bytes in use now, by purpose; `peak` is a copy of `live` from the moment when its sum without
    gradients was largest. Storages are counted once, however many tensors view them.
    """

    def __init__(self, held: Iterable[torch.Tensor], *, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        # the purpose of each storage, by its address; `held` tensors existed before, and are not counted
        self._purposes = {tensor.untyped_storage()._cdata: "held" for tensor in held}

    @classmethod
    def of(cls, model: Any) -> MemoryTracker:
        """Make a tracker that distinguishes gradients and logits from activations."""
        head = model.get_output_embeddings()  # None in a reward model
        vocabulary = None if head is None else head.weight.shape[0]
        tracker = cls((*model.parameters(), *model.buffers()), vocabulary=vocabulary)
        for parameter in trained_parameters(model):
            parameter.register_post_accumulate_grad_hook(tracker._reclassify_gradient)
        return tracker

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._purposes:
            return
        # logits are known by their shape, as an operation does not tell what its result is for
        is_logits = tensor.ndim > 0 and tensor.shape[-1] == self.vocabulary
        self._purposes[address] = "logits" if is_logits else "activations"
        n_bytes = storage.nbytes()
        self.live[self._purposes[address]] += n_bytes
        weakref.finalize(storage, self._forget, address, n_bytes)  # a later storage may have the same address
        if self.live.total() - self.live["gradients"] > self.peak.total() - self.peak["gradients"]:
            self.peak = self.live.copy()

    def _forget(self, address: int, n_bytes: int) -> None:
        self.live[self._purposes.pop(address)] -= n_bytes

    def _reclassify_gradient(self, parameter: torch.nn.Parameter) -> None:
        storage = parameter.grad.untyped_storage()
        purpose = self._purposes.get(storage._cdata)
        if purpose not in (None, "gradients"):
            self.live[purpose] -= storage.nbytes()
            self.live["gradients"] += storage.nbytes()
            self._purposes[storage._cdata] = "gradients"


def materialize(model: Any, device: str, dtype: torch.dtype | None) -> Any:
    """Replace a model's tensors on the meta device by empty ones.

    Parameters get the `dtype`; None keeps their own. In a FakeTensorMode the new tensors take no memory. (A model
    cannot be built in that mode instead, as PEFT could not add adapters to it.)
    """
    made: dict[torch.Tensor, torch.Tensor] = {}  # new tensors by the old ones, so that tied parameters stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new.to(dtype), requires_grad=tensor.requires_grad)
                    made[tensor] = new
                tensors[name] = made[tensor]
    return model
