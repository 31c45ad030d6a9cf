"""The dropout of adapters, a function of the text.

So it is the same in every layout, split and number of processes. For an input x of an adapted layer, the adapter sees
x_i / (1 - p) for kept features i, and 0 for the others. Feature i is kept if the signed 32-bit product a * b_i is at
least (2 p - 1) 2^31. The odd numbers a and b_i are hashes: a of the seed, the update, the layer, and the token with all
tokens before it; b_i of the seed, the update and i. Nothing has to be saved for a backward pass that recomputes
activations, or for a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from dpo.errors import InputError
from dpo.models.layouts import PaddedRows
from dpo.models.packing import NONE, Packed


class Pattern(NamedTuple):
    """The features that a layer drops, by token."""

    a: torch.Tensor  # int32, (..., 1)
    b: torch.Tensor  # int32, (features,)
    least: int  # product of a and b for which a feature is kept

    def drop(self, x: torch.Tensor, *, onto: torch.Tensor | None = None) -> torch.Tensor:
        """`x` without what is dropped, and plus `onto`; not scaled."""
        return (_fused_drop() if x.is_cuda else _drop)(x, *self, onto)


def _drop(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, least: int, onto: torch.Tensor | None) -> torch.Tensor:
    kept = x.where(a * b >= least, 0)
    return kept if onto is None else kept.add_(onto)


@cache
def _fused_drop() -> Callable:
    """`_drop` as one kernel: its numbers are the same."""
    return torch.compile(_drop, dynamic=True)


class Dropout(torch.nn.Module):
    """Dropout of an adapted layer's input, if `AdapterDropout` turns it on.

    `first_feature` is not 0 if a process computes with a slice of the features.
    """

    def __init__(self, p: float, n_features: int) -> None:
        super().__init__()
        self.p, self.n_features, self.first_feature = p, n_features, 0
        self.tokens: torch.Tensor | None = None  # (R, L) int32: a
        self.features: torch.Tensor | None = None  # int32, for at least all features of the layer: b

    def find_pattern(self, x: torch.Tensor) -> Pattern | None:
        """The features of `x` to drop, or None if dropout is off."""
        if self.tokens is None or self.features is None:
            return None
        if x.shape[:-1] not in (self.tokens.shape, (self.tokens.numel(),)):
            raise InputError(
                f"lora.dropout={self.p} needs adapted layers that are given each token once: one is given "
                f"{tuple(x.shape[:-1])} for {tuple(self.tokens.shape)} tokens: name others in lora.target_modules, or "
                f"choose lora.dropout=0"
            )
        a = self.tokens.to(x.device).view(*x.shape[:-1], 1)
        b = self.features.to(x.device)[self.first_feature : self.first_feature + x.shape[-1]]
        return Pattern(a, b, int(self.p * 2**32) - 2**31)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class AdapterDropout:
    """Switch for the dropout of a policy's adapter, if it has any."""

    def __init__(self, policy: torch.nn.Module, *, seed: int) -> None:
        self.modules = [module for module in policy.modules() if isinstance(module, Dropout)]
        self.seed = seed

    @contextmanager
    def on(self, inputs: PaddedRows | Packed, *, update: int | None) -> Iterator[None]:
        """Turn on the dropout of `update` for these inputs; None: off."""
        if update is None or not self.modules:
            yield
            return
        n_layers, n_features = len(self.modules), max(module.n_features for module in self.modules)
        paths = hash_paths(inputs)
        salt = _mix(_mix(paths.new_full((1,), self.seed)) + update)
        salts = _mix(salt + torch.arange(n_layers + n_features, device=paths.device))
        tokens = _odd(_mix(paths + salts[:n_layers, None, None]))  # (layers, R, L)
        features = _odd(salts[n_layers:])
        try:
            for module, of_layer in zip(self.modules, tokens, strict=True):
                module.tokens, module.features = of_layer, features
            yield
        finally:
            for module in self.modules:
                module.tokens = module.features = None


def hash_paths(inputs: PaddedRows | Packed) -> torch.Tensor:
    """Hashes of each token and all before it, (R, L) int64.

    A hash does not depend on the token's place in the microbatch. Hashes of padding mean nothing.
    """
    column = torch.arange(inputs.input_ids.shape[1], device=inputs.input_ids.device)
    packed = isinstance(inputs, Packed)
    terms = _mix(_mix(inputs.input_ids) + (inputs.position_ids if packed else column))
    sums = terms.cumsum(1)
    if not packed:
        return sums
    tree, branch = inputs.tree, inputs.branch
    begins = torch.ones_like(tree, dtype=torch.bool)  # where a prompt or a response begins
    begins[:, 1:] = (tree[:, 1:] != tree[:, :-1]) | (branch[:, 1:] != branch[:, :-1])
    begin = column.where(begins, 0).cummax(1).values
    sums -= (sums - terms).gather(1, begin)
    prompt_end = column.where(branch == NONE, 0).cummax(1).values  # the last token of a prompt so far
    after_prompt = (branch != NONE) & (branch.gather(1, prompt_end) == NONE) & (tree.gather(1, prompt_end) == tree)
    return sums + sums.gather(1, prompt_end).where(after_prompt, 0)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix an int64 by the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift right as if `x` were unsigned."""
    return (x >> n) & (2 ** (64 - n) - 1)


def _odd(x: torch.Tensor) -> torch.Tensor:
    """The upper half of an int64, made odd."""
    # products of odd numbers take every odd value equally often
    return (x >> 32).int() | 1
