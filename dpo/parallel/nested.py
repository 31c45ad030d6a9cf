"""Tensors in nested mappings, lists and tuples, such as the state of an optimizer or the arguments of a function."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Any, str], Any], value: Any, name: str = "") -> Any:
    """Copy nested mappings, lists and tuples, with `change(tensor, its name)` in place of each tensor, in their order.

    The name of a tensor is `name`, that of the whole, and the keys of the mappings in which it is, joined by dots.
    """
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, item, f"{name}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(change, item, name) for item in value)
    return value
