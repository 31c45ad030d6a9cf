"""The types and keys that the parts of a checkpoint must have; checked even if the checksums match.

`find_odd` compares a value with a shape: a `Kind`; a dict from keys to shapes, where extra keys are allowed and keys of
a `Maybe` optional; a list of one shape, of any length; `Each`: one shape under any keys.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.data.examples import KEY_BYTES


class Kind(NamedTuple):
    holds: Callable[[Any], bool]
    wanted: str


class Each(NamedTuple):
    key: Kind
    shape: Any


class Maybe(NamedTuple):
    shape: Any


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _takes(setter: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Whether a random generator accepts a state."""

    def takes(state: Any) -> bool:
        try:
            setter(state)
        except (ValueError, TypeError, OverflowError, IndexError, RuntimeError):
            return False
        return True

    return takes


def set_numpy_state(generator: Any, state: Any) -> None:
    """Set the state of `numpy.random`, or of a generator like it, from a checkpoint."""
    kind, keys, place, *rest = state
    if not (_is_int(place) and 0 <= place <= len(keys)):  # numpy would accept it
        raise ValueError(f"{place} is not an index into {len(keys)} keys")
    generator.set_state((kind, np.array(keys, dtype=np.uint32), place, *rest))


ANY = Kind(lambda v: True, "anything")
COUNT = Kind(lambda v: _is_int(v) and 0 <= v < 2**63, "a count")
FROM_MINUS_1 = Kind(lambda v: _is_int(v) and -1 <= v < 2**63, "a count, or -1")
NUMBER = Kind(lambda v: _is_number(v) and not math.isnan(v), "a number")
FLAG = Kind(lambda v: isinstance(v, bool), "true or false")
TEXT = Kind(lambda v: isinstance(v, str), "a string")
TEXT_OR_NONE = Kind(lambda v: v is None or isinstance(v, str), "a string or None")
NONE = Kind(lambda v: v is None, "None")
TENSOR = Kind(lambda v: isinstance(v, torch.Tensor), "a tensor")
OF_STATE = Kind(lambda v: v is None or isinstance(v, (torch.Tensor, bool)) or _is_number(v), "a tensor or a number")
KEYS = Kind(
    lambda v: TENSOR.holds(v) and not v.is_floating_point() and not v.is_complex() and v.shape[1:] == (KEY_BYTES,),
    f"a tensor of rows of {KEY_BYTES} bytes",
)
VALUES = Kind(lambda v: TENSOR.holds(v) and v.is_floating_point() and v.ndim == 1, "a tensor of one number per key")
BYTES = Kind(lambda v: TENSOR.holds(v) and v.dtype == torch.uint8 and v.ndim == 1, "a tensor of bytes")
OF_PYTHON = Kind(lambda v: isinstance(v, tuple) and _takes(random.Random().setstate)(v), "a state of Python's random")
OF_NUMPY = Kind(_takes(lambda v: set_numpy_state(np.random.RandomState(), v)), "a state of numpy's random")
OF_TORCH = Kind(_takes(lambda v: torch.Generator().set_state(v)), "a state of torch's random generator")

MANIFEST = {
    "sha256": TEXT,
    "examples": COUNT,
    "files": Each(TEXT, {"sha256": TEXT, "bytes": COUNT}),
    "blocks": Maybe(Each(TEXT, [TEXT])),  # absent from the oldest manifests
}
FACTS = {
    "updates": COUNT,
    "evaluated": FLAG,
    "best_at": FROM_MINUS_1,
    "config": Each(TEXT, ANY),
    "data": TEXT,
    "tokens": Maybe(TEXT),  # tokenizer and model are absent from the oldest manifests
    "model": Maybe(Each(TEXT, ANY)),
}
PARTS = {
    "policy": Each(TEXT, TENSOR),
    "reference": Each(TEXT, TENSOR),
    "optimizer": {"state": Each(COUNT, Each(TEXT, OF_STATE)), "param_groups": [{"params": [COUNT], "lr": NUMBER}]},
    "scheduler": {
        "last_epoch": COUNT,
        "base_lrs": [NUMBER],
        "_last_lr": [NUMBER],
        "lr_lambdas": [NONE],
        "updates": Maybe(COUNT),
    },
    "trainer": {
        "example_counter": COUNT,
        "batch_counter": COUNT,
        "evaluated_at": FROM_MINUS_1,
        "saved_at": FROM_MINUS_1,
        "reference": TEXT_OR_NONE,
        "online": Maybe({"scorer": TEXT}),
        "reference_logps": Maybe({"keys": KEYS, "logps": VALUES}),
        "checkpoints": {"best": NUMBER, "best_at": FROM_MINUS_1},
        "callbacks": {
            "nonfinite": {"skipped": COUNT},
            "files": Maybe({"log_bytes": Each(TEXT, COUNT)}),
            "ledger": Maybe({"log_bytes": Each(TEXT, COUNT)}),
            "tensorboard": Maybe({"examples": FROM_MINUS_1}),
            "wandb": Maybe({"wandb_id": TEXT, "run_dir": TEXT, "best": Maybe(NUMBER)}),
            "course": Maybe({"warned": FLAG, "start": Maybe({"loss": NUMBER, "margin": NUMBER})}),
        },
    },
    "random": {"states": [{"python": OF_PYTHON, "numpy": OF_NUMPY, "torch": OF_TORCH, "cuda": [BYTES]}]},
}


OLD_TRAINER = {  # before 2026-11-22
    "example_counter": COUNT,
    "batch_counter": COUNT,
    "evaluated_at": FROM_MINUS_1,
    "skipped": COUNT,
    "reference": TEXT_OR_NONE,
    "checkpoints": {"saved_at": FROM_MINUS_1, "best": NUMBER, "best_at": FROM_MINUS_1},
    "reference_logps": {"keys": KEYS, "logps": VALUES},
    "logger": {"log_bytes": Maybe(Each(TEXT, COUNT)), "wandb_id": Maybe(TEXT), "run_dir": Maybe(TEXT)},
}


def as_now(name: str, state: Any) -> Any:
    """The state of a part as this version writes it, whatever version wrote it."""
    if name != "trainer" or find_odd(state, OLD_TRAINER):
        return state
    logger = state["logger"]
    callbacks = {"nonfinite": {"skipped": state["skipped"]}, "files": {"log_bytes": logger.get("log_bytes", {})}}
    if "wandb_id" in logger and "run_dir" in logger:
        callbacks["wandb"] = {"wandb_id": logger["wandb_id"], "run_dir": logger["run_dir"]}
    return {**state, "saved_at": state["checkpoints"]["saved_at"], "callbacks": callbacks}


def find_odd(value: Any, shape: Any, place: str = "") -> str | None:
    """Where and how a value does not match a shape; None if it does."""
    if isinstance(shape, Kind):
        return None if shape.holds(value) else _tell(place, value, shape.wanted)
    if isinstance(shape, list):
        if not isinstance(value, (list, tuple)):
            return _tell(place, value, "a list")
        return _first(find_odd(item, shape[0], f"{place}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, Mapping):
        return _tell(place, value, "a mapping")
    if isinstance(shape, Each):
        if odd := _first(find_odd(key, shape.key, f"a key of {place or 'it'}") for key in value):
            return odd
        return _first(find_odd(item, shape.shape, f"{place}[{key!r:.60}]") for key, item in value.items())
    if missing := [key for key in shape if key not in value and not isinstance(shape[key], Maybe)]:
        return f"{place or 'it'} lacks {', '.join(missing)}"
    return _first(
        find_odd(value[key], inner.shape if isinstance(inner, Maybe) else inner, f"{place}[{key!r}]")
        for key, inner in shape.items()
        if key in value
    )


def _first(found: Any) -> str | None:
    return next((odd for odd in found if odd), None)


def _tell(place: str, value: Any, wanted: str) -> str:
    found = type(value).__name__ if isinstance(value, (torch.Tensor, Mapping, list, tuple)) else f"{value!r:.60}"
    return f"{place or 'it'} is {found}, not {wanted}"


def find_odd_part(name: str, state: Any) -> str | None:
    """What is wrong with the state of a checkpoint's part; None if nothing is."""
    if odd := find_odd(state, PARTS[name]):
        return odd
    logps = state.get("reference_logps") if name == "trainer" else None
    if logps and len(logps["keys"]) != len(logps["logps"]):
        return f"['reference_logps'] has {len(logps['keys'])} keys and {len(logps['logps'])} values"
    return None if name != "random" or state["states"] else "['states'] is empty"


def find_misfit(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Why a state of the right shape does not fit this optimizer; None if it does.

    The parameters are counted in `optimizer.state_dict()`, which is that of the whole model also if each device holds
    slices.
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
    keys = _keys_of_state(kind, 2 if shape is None else len(shape))
    if set(values) != keys:
        return f"its keys are {', '.join(values)}, not {', '.join(sorted(keys))}"
    for key, value in values.items():
        if shape is not None and isinstance(value, torch.Tensor) and not _spreads_to(value.shape, shape):
            return f"{key} has shape {tuple(value.shape)}, not {tuple(shape)}"
    return None


def _numbered(groups: list[dict[str, Any]]) -> Any:
    """Yields each group with the number of parameters before it."""
    before = 0
    for group in groups:
        yield before, group
        before += len(group["params"])


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two settings have the same type; all numbers do, and None, lists and tuples match anything."""
    if _is_number(ours):
        return _is_number(theirs)
    return ours is None or theirs is None or isinstance(theirs, type(ours)) or isinstance(ours, (list, tuple))


@cache
def _keys_of_state(kind: Callable[..., torch.optim.Optimizer], ndim: int) -> set[str]:
    """The keys of an optimizer class's state per parameter, found by updating one."""
    parameter = torch.nn.Parameter(torch.zeros((2,) * ndim))
    parameter.grad = torch.zeros_like(parameter)
    probe = kind([parameter], lr=1.0)
    probe.step()
    return set(probe.state[parameter])


def _spreads_to(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a shape broadcasts to a parameter's: the same, one value in all, or one per row or column."""
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))
