"""The dropout of adapters, a function of seed, update, layer and text.

The dropout is therefore the same in every layout, with every split into microbatches, and on any number of processes.
Nothing has to be saved for a backward pass that recomputes activations, or for a resumed run.

For an input x of an adapted layer, the adapter gets x_i / (1 - p) for each kept feature i, and 0 for each dropped one.
Feature i is kept if the signed 32-bit product a * b_i is at least (2 p - 1) 2^31. a and b_i are odd numbers: a is a
hash of the seed, the update, the layer, and the token with all tokens before it; b_i is a hash of the seed, the update
and i.
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
from dpo.system.arithmetic import allow_graphs


class Pattern(NamedTuple):
    """The features that dropout drops from a layer's input.

    The module's docstring defines a and b.
    """

    a: torch.Tensor  # (..., 1)
    b: torch.Tensor  # (features,)
    least: int  # the smallest product a * b of a kept feature

    def drop(self, x: torch.Tensor, *, onto: torch.Tensor | None = None) -> torch.Tensor:
        """`x` with zeros for dropped features, not scaled, plus `onto`."""
        if not x.is_cuda or torch.compiler.is_compiling():  # compiled code fuses `_drop` by itself
            return _drop(x, self.a, self.b, self.least, onto)
        # always with two dims: tensors of other dims would be compiled anew, on every GPU
        rows, hashes, onto_rows = (t if t is None else t.flatten(0, -2) for t in (x, self.a, onto))
        return _fuse_drop(x.device)(rows, hashes, self.b, self.least, onto_rows).reshape(x.shape)


def _drop(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, least: int, onto: torch.Tensor | None) -> torch.Tensor:
    kept = x.where(a * b >= least, 0)  # the product overflows on purpose: it is like a random int32
    return kept if onto is None else kept.add_(onto)


@cache
def _fuse_drop(device: torch.device) -> Callable:
    """`_drop` compiled to one kernel with the same results, where possible."""
    allow_graphs()  # the graphs of all GPUs count together
    fused, ones = torch.compile(_drop, dynamic=True), torch.ones(4, 8, device=device)
    try:  # compiles now, for calls without and with `onto`
        for onto in (None, ones.clone()):
            fused(ones, ones[:, :1].int(), ones[0].int(), 0, onto)
    except Exception:  # of various classes, if there is no C compiler, no Python headers or no GPU for Triton
        return _drop
    return fused


class Dropout(torch.nn.Module):
    """Dropout of an adapted layer's input, if `AdapterDropout` turns it on.

    R rows of L tokens are fed to the model. Under tensor parallelism a process may compute with a slice of the
    features, which begins at `first_feature`.
    """

    def __init__(self, p: float, n_features: int) -> None:
        super().__init__()
        self.p, self.n_features, self.first_feature = p, n_features, 0
        self.token_hashes: torch.Tensor | None = None  # a of the module's docstring, (R, L) int32; None: off
        self.feature_hashes: torch.Tensor | None = None  # b, int32, for as many features as the widest layer has

    def find_pattern(self, x: torch.Tensor) -> Pattern | None:
        """The features of `x` to drop, or None if dropout is off."""
        if self.token_hashes is None or self.feature_hashes is None:
            return None
        # layers get (R, L, features) or, in some models, (R * L, features)
        if x.shape[:-1] not in (self.token_hashes.shape, (self.token_hashes.numel(),)):
            raise InputError(
                f"lora.dropout={self.p} needs adapted layers whose input has each token once. The batch has "
                f"{tuple(self.token_hashes.shape)} tokens, and an adapted layer got an input for "
                f"{tuple(x.shape[:-1])}: name other layers in lora.target_modules, or choose lora.dropout=0"
            )
        a = self.token_hashes.to(x.device).view(*x.shape[:-1], 1)
        b = self.feature_hashes.to(x.device)[self.first_feature : self.first_feature + x.shape[-1]]
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
        """Drop features of these inputs, by the pattern of `update`.

        There is no dropout if `update` is None.
        """
        if update is None or not self.modules:
            yield
            return
        n_layers, n_features = len(self.modules), max(module.n_features for module in self.modules)
        text_hashes = hash_paths(inputs)
        update_hash = _mix(_mix(text_hashes.new_full((1,), self.seed)) + update)
        # one hash for each layer, then one for each feature
        hashes = _mix(update_hash + torch.arange(n_layers + n_features, device=text_hashes.device))
        token_hashes = _make_odd(_mix(text_hashes + hashes[:n_layers, None, None]))  # (layers, R, L)
        feature_hashes = _make_odd(hashes[n_layers:])
        try:
            for module, layer_hashes in zip(self.modules, token_hashes, strict=True):
                module.token_hashes, module.feature_hashes = layer_hashes, feature_hashes
            yield
        finally:
            for module in self.modules:
                module.token_hashes = module.feature_hashes = None


def hash_paths(inputs: PaddedRows | Packed) -> torch.Tensor:
    """Hash each token with all tokens before it, to (R, L) int64.

    The tokens before a token are those of its prompt and its own response, so a hash does not depend on where the
    layout puts the token. Hashes of padding mean nothing.
    """
    columns = torch.arange(inputs.input_ids.shape[1], device=inputs.input_ids.device)
    positions = inputs.position_ids if isinstance(inputs, Packed) else columns
    hashes = _mix(_mix(inputs.input_ids) + positions)  # of each token with its position, (R, L)
    sums = hashes.cumsum(1)
    if not isinstance(inputs, Packed):
        return sums
    tree, branch = inputs.tree, inputs.branch  # (R, L)
    # subtract the sum before the token's segment, which is a prompt or a response
    is_start = torch.ones_like(tree, dtype=torch.bool)
    is_start[:, 1:] = (tree[:, 1:] != tree[:, :-1]) | (branch[:, 1:] != branch[:, :-1])
    start_column = columns.where(is_start, 0).cummax(1).values  # (R, L): the first column of each token's segment
    sums -= (sums - hashes).gather(1, start_column)
    # add the sum of a whole prompt to each token of the prompt's responses, unless the prompt is empty
    last_prompt_column = columns.where(branch == NONE, 0).cummax(1).values
    is_own_prompt = (branch.gather(1, last_prompt_column) == NONE) & (tree.gather(1, last_prompt_column) == tree)
    prompt_sums = sums.gather(1, last_prompt_column)
    is_response = branch != NONE
    return sums + prompt_sums.where(is_response & is_own_prompt, 0)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix int64s by the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift right by `n` bits as if `x` were unsigned."""
    return (x >> n) & (2 ** (64 - n) - 1)


def _make_odd(x: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of int64s as odd int32s.

    Products of odd numbers, mod 2^32, take every odd value equally often.
    """
    return (x >> 32).int() | 1
