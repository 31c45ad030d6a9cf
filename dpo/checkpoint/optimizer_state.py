"""Checks that a saved state fits an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch


def find_misfit(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Why a state of the right form does not fit this optimizer; None if it does.

    Parameters are counted in `optimizer.state_dict()`, which is that of the whole model even if devices hold slices.
    """
    ours, theirs = optimizer.state_dict()["param_groups"], state["param_groups"]
    numbers = [[*range(n, n + len(group["params"]))] for n, group in _numbered(ours)]
    if [list(group["params"]) for group in theirs] != numbers:
        return f"it has {sum(len(group['params']) for group in theirs)} parameters, not {sum(map(len, numbers))}"
    for our, their in zip(ours, theirs, strict=True):
        if odd := [key for key in our if key in their and not _alike(our[key], their[key])]:
            return f"its settings {', '.join(odd)} should be {', '.join(str(our[key]) for key in odd)}"
    shapes: list[Any] = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    if len(shapes) != sum(map(len, numbers)):
        shapes = [None] * sum(map(len, numbers))  # shapes of slices cannot be compared
    for number, values in state["state"].items():
        if number >= len(shapes):
            return f"it has state for parameter {number} of only {len(shapes)}"
        if odd := _find_odd_state(type(optimizer), values, shapes[number]):
            return f"parameter {number}: {odd}"
    return None


def _find_odd_state(
    kind: type[torch.optim.Optimizer], values: Mapping[str, Any], shape: torch.Size | None
) -> str | None:
    keys = _list_state_keys(kind, 2 if shape is None else len(shape))
    if set(values) != keys:
        return f"its keys are {', '.join(values)}, not {', '.join(sorted(keys))}"
    for key, value in values.items():
        if shape is not None and isinstance(value, torch.Tensor) and not _spreads_to(value.shape, shape):
            return f"{key} has shape {tuple(value.shape)}, not {tuple(shape)}"
    return None


def _numbered(groups: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each group with the number of parameters before it."""
    before = 0
    for group in groups:
        yield before, group
        before += len(group["params"])


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two settings have the same type; numbers all match, and None, lists and tuples match anything."""
    if _is_number(ours):
        return _is_number(theirs)
    return ours is None or theirs is None or isinstance(theirs, type(ours)) or isinstance(ours, (list, tuple))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache
def _list_state_keys(kind: Callable[..., torch.optim.Optimizer], ndim: int) -> set[str]:
    """The keys of an optimizer class's state per parameter, found by updating one."""
    parameter = torch.nn.Parameter(torch.zeros((2,) * ndim))
    parameter.grad = torch.zeros_like(parameter)
    probe = kind([parameter], lr=1.0)
    probe.step()
    return set(probe.state[parameter])


def _spreads_to(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a shape broadcasts to a parameter's: the same, one value in all, or one per row or column."""
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))
