"""The text part of a checkpoint that also has a vision part.

A model of `AutoModelForCausalLM` has other names for its weights than the checkpoint's files (and our exports) or its
class (and adapters).
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from dpo.models.published import ambiguity, drop_copies, match_names, read_weights, rename_weights


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
    model.names_in_class = match_names(model, model.state_dict(), shapes, model.all_tied_weights_keys.keys())
    if not model.names_in_class:
        raise ambiguity(model, f"the class {model.checkpoint_class}")


def rename_layers(model: Any, names: Mapping[str, Tensor], *, to_class: bool) -> dict[str, Tensor]:
    """Rename an adapter's weights to those in the checkpoint's class, or back."""
    layers = {}
    for own, theirs in getattr(model, "names_in_class", {}).items():
        old, new = (own, theirs) if to_class else (theirs, own)
        layers[old.removesuffix(".weight")] = new.removesuffix(".weight")
    renamed = {}
    for name, tensor in names.items():
        layer, factor, rest = name.partition(".lora_")
        renamed[layers.get(layer, layer) + factor + rest] = tensor
    return renamed


def check_names(model: Any, source: Any) -> None:
    """Raise InputError unless each weight of a text model has one place in the files."""
    state = drop_copies(model, model.state_dict(keep_vars=True))
    if not rename_weights(model, state, read_weights(source)):
        raise ambiguity(model, f"the files of model.name_or_path={source.name}")
