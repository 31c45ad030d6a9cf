"""The text part of a checkpoint that also has a vision part.

A model of `AutoModelForCausalLM` has other names for its weights than the checkpoint's files (and our exports) or its
class (and adapters).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dpo.errors import InputError, explaining_library, one_sentence


def is_text_part(config: Any) -> bool:
    """Return whether `AutoModelForCausalLM` takes the `text_config` alone, by its own rule."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text_config = config.sub_configs.get("text_config")
    return text_config is not None and getattr(model_class, "config_class", None) is text_config


def name_in_class(model: Any, config: Any) -> None:
    """Note in a text model its weights' names in the checkpoint's class."""
    if not is_text_part(config) or type(model.config) is type(config):
        return
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    model.checkpoint_class = type(whole).__name__
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    model.names_in_class = _match_names(model, model.state_dict(), shapes)
    if not model.names_in_class:
        raise _ambiguous(f"the class {model.checkpoint_class}", model)


def rename_layers(model: Any, names: Mapping[str, Tensor], *, to_class: bool) -> dict[str, Tensor]:
    """Rename an adapter's weights to those in the checkpoint's class, or back."""
    layers = {}
    for weights in getattr(model, "names_in_class", {}).items():
        own, theirs = (weight.removesuffix(".weight") for weight in weights)
        layers |= {own: theirs} if to_class else {theirs: own}
    renamed = {}
    for name, tensor in names.items():
        layer, factor, rest = name.partition(".lora_")
        renamed[layers.get(layer, layer) + factor + rest] = tensor
    return renamed


def name_in_files(model: Any, name: str, cache_dir: str | None) -> dict[str, Tensor]:
    """Weights by their names in the files; InputError unless each has one place there."""
    shapes, own = {}, model.state_dict()
    with explaining_library(lambda error: InputError(f"the files of {name} cannot be read: {one_sentence(error)}")):
        for path in _find_files(name, cache_dir):
            with safe_open(path, framework="pt") as file:
                stored = file.keys()  # the file is no mapping
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in stored}
    for weights in (own, revert_weight_conversion(model, own)):  # published files may have each expert apart
        if names := _match_names(model, weights, shapes):
            tensors = {theirs: weights[ours] for ours, theirs in names.items()}
            # an expert is a view of all experts, and a file takes no views
            return {k: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for k, t in tensors.items()}
    raise _ambiguous(f"the files of model.name_or_path={name}", model)


def complete_checkpoint(model: Any, name: str, cache_dir: str | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A checkpoint's tensors, in `dtype` if given, with a text model's in their places."""
    trained = name_in_files(model, name, cache_dir)
    stored = {key: tensor for path in _find_files(name, cache_dir) for key, tensor in load_file(path).items()}
    complete = stored | trained
    return {k: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for k, tensor in complete.items()}


def _match_names(model: Any, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Names of weights elsewhere, which differ in a prefix; none if that is ambiguous.

    The base model's weights share a prefix, those of its head perhaps another. A tied head may be missing.
    """
    embeddings = model.get_input_embeddings()
    base = next(name for name, module in model.named_modules() if module is embeddings).partition(".")[0] + "."
    tied = set(model.all_tied_weights_keys)
    names = {}
    for is_base in (True, False):
        group = {
            name.removeprefix(base) if is_base else name: name for name in weights if name.startswith(base) is is_base
        }
        required = {short: name for short, name in group.items() if name not in tied}
        first = next(iter(required or group), "")
        prefixes = {match[1] for key in shapes if (match := re.fullmatch(rf"((?:.+\.)?){re.escape(first)}", key))}
        fitting = [
            prefix
            for prefix in prefixes
            if all(shapes.get(prefix + short) == weights[name].shape for short, name in required.items())
        ]
        if len(fitting) != 1 and required:
            return {}
        names |= {name: fitting[0] + short for short, name in group.items() if fitting and fitting[0] + short in shapes}
    return names


def _ambiguous(place: str, model: Any) -> InputError:
    return InputError(
        f"in {place}, which has more parts than text, the weights of the text part ({type(model).__name__}) cannot be "
        f"told from the others: give a model for text alone"
    )


def find_file(name: str, file: str, cache_dir: str | None) -> str | None:
    """The path of a file of a directory or Hub id, which may be fetched."""
    name = str(Path(name).expanduser())
    return cached_file(name, file, cache_dir=cache_dir, _raise_exceptions_for_missing_entries=False)


def _find_files(name: str, cache_dir: str | None) -> list[str]:
    """The safetensors files of a directory or Hub id."""
    if index := find_file(name, SAFE_WEIGHTS_INDEX_NAME, cache_dir):
        return get_checkpoint_shard_files(str(Path(name).expanduser()), index, cache_dir=cache_dir)[0] or []
    file = find_file(name, SAFE_WEIGHTS_NAME, cache_dir)
    return [file] if file else []
