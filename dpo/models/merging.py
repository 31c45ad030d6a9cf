"""Merging an adapter into its base, one weight at a time: the model needs no adapter and gives the same logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from dpo.errors import InputError
from dpo.models.adapters import OF_LAYER, StoredAdapter
from dpo.models.loading import find_source
from dpo.models.origin import Origin
from dpo.models.pretrained import DTYPES, load_config, load_model
from dpo.models.quantization import layers_to_quantize, round_to_4bit
from dpo.models.weights import read_archive


class Addition(NamedTuple):
    """The addition of an adapter to a weight: `scaling` times the product of two matrices."""

    left: torch.Tensor  # (rows of the weight, r)
    right: torch.Tensor  # (r, columns)
    scaling: float

    def to(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum of the weight and the addition, in float32."""
        return weight.to(torch.float32, copy=True).addmm_(self.left.float(), self.right.float(), alpha=self.scaling)


def find_additions(stored: StoredAdapter, structure: torch.nn.Module) -> dict[str, Addition]:
    """The additions of an adapter to a model's weights, by name; only names and shapes of the model are used.

    Raises InputError if the adapter does not fit, or would change a weight that another layer shares.
    """
    weights = structure.state_dict(keep_vars=True)  # tied weights are one object
    uses = Counter(id(weight) for weight in weights.values())
    scaling = stored.config.lora_alpha / stored.config.r
    found: dict[str, Addition] = {}
    for layer in sorted({match[1] for match in map(OF_LAYER.fullmatch, stored.weights) if match}):
        a, b = (stored.weights.get(f"{layer}.lora_{part}.weight") for part in "AB")  # (r, in), (out, r)
        name = f"{layer}.weight"
        if a is None or b is None or name not in weights:
            raise InputError(
                f"{stored.directory} does not fit {type(structure).__name__}, which has no such layer: {layer}"
            )
        if not _is_targeted(layer, stored.config):
            raise InputError(f"{stored.directory} has weights for {layer}, which its adapter_config.json does not name")
        if uses[id(weights[name])] > 1:
            raise InputError(
                f"{stored.directory} cannot be merged: {name}, to which it adds, is tied, and what merging would add "
                f"to the other layer the adapter does not"
            )
        # GPT-2 stores a layer's weight as (in, out)
        left, right = (a.T, b.T) if isinstance(structure.get_submodule(layer), Conv1D) else (b, a)
        shape = (left.shape[0], right.shape[1])
        if weights[name].shape != shape or left.shape[1] != right.shape[0]:
            raise InputError(
                f"{stored.directory} does not fit {type(structure).__name__}: {layer} is {tuple(weights[name].shape)} "
                f"in the model and {shape} in the adapter"
            )
        found[name] = Addition(left, right, scaling)
    return found


def _is_targeted(layer: str, config: Any) -> bool:
    """Whether PEFT would adapt a layer. A regular expression is not tried: a foreign one may never finish."""
    if isinstance(config.target_modules, str) or config.layers_pattern or isinstance(config.exclude_modules, str):
        return True
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(config, layer))


def base_reader(origin: Origin, structure: torch.nn.Module) -> Callable[[], Mapping[str, torch.Tensor]]:
    """A function that returns the weights of the base under an adapter, without its run's `rounding_of_base`.

    They are memory-mapped: from a `policy.pt`, or by transformers if they are stored in the dtype that it loads.
    """
    if origin.weights is not None:
        return partial(read_archive, str(origin.weights), structure, key="")
    source, model = find_source(origin.plan), origin.plan.model
    stored_dtype = load_config(**source).dtype or torch.float32
    dtype = DTYPES[model.policy_dtype] if model.random_init else stored_dtype
    load = partial(load_model, **source, dtype=dtype, random_init=model.random_init, seed=origin.plan.run.seed)
    return lambda: load().state_dict()


def rounding_of_base(origin: Origin, structure: torch.nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function (name, weight) that rounds a weight as the run did in its base; without a run, not at all."""
    if origin.run_dir is None:
        return lambda name, weight: weight
    dtype = DTYPES[origin.plan.model.policy_dtype]
    names = layers_to_quantize(structure) if origin.plan.quantized else []
    in_4_bits = {f"{name}.weight": structure.get_submodule(name) for name in names}

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(dtype)
        return weight if weight.is_meta or name not in in_4_bits else round_to_4bit(weight, in_4_bits[name])

    return rounded
