"""The files of a base: its weights with their names and dtypes, and its config in the words of transformers 4 and 5.

A checkpoint may have a vision part, too.
"""

from collections.abc import Set
from functools import partial
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dpo.checkpoint.shards import SplitTensor
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.logprobs import HEAD_WEIGHT

Tensors = dict[str, Tensor]  # weights by their names
LAYER_TYPES = ("gemma3_text", "gemma3n_text", "olmo3")  # transformers 4 has these with rope for each kind of layers


def find_file(source: Any, file: str) -> str | None:
    """Return the path of a file of `source`, a `ModelPath`, fetched from the Hub if needed; None if there is none."""
    return cached_file(source.name, file, cache_dir=source.cache_dir, _raise_exceptions_for_missing_entries=False)


def read_weights(source: Any) -> Tensors:
    """Map all tensors from the files that transformers would read; empty if there are no files."""
    weights = {}
    with explaining_library(lambda error: InputError(f"files of {source.name} cannot be read: {one_sentence(error)}")):
        for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            path = find_file(source, file)
            if path is None:
                continue
            paths: Any = [path]
            if file.endswith(".json"):
                paths, _ = get_checkpoint_shard_files(source.name, path, cache_dir=source.cache_dir)
            for part in paths:
                if part.endswith(".safetensors"):
                    weights |= load_file(part)
                else:  # files of 2019 are no ZIP archives, and cannot be mapped
                    weights |= torch.load(part, "cpu", weights_only=True, mmap=is_zipfile(part))
            break
    return weights


def drop_copies(model: Any, state: Tensors) -> Tensors:
    """Leave out tied weights, unless they differ from what they are tied to."""
    kept = dict(state)
    for name, source in model.all_tied_weights_keys.items():
        if name not in kept:
            continue
        tensor = kept.pop(name)
        first = kept.setdefault(source, tensor)  # a file may have either name
        if tensor is not first and not torch.equal(tensor, first):
            kept[name] = tensor
    return kept


class _WithoutCopies(TorchFunctionMode):
    """Inside it `contiguous` returns the tensor itself, so that what is cut from a tensor stays a view of it."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return args[0] if function == Tensor.contiguous else function(*args, **(kwargs or {}))


def map_weights(structure: Any, source: Any) -> Tensors:
    """Map the weights of a model on the meta device to tensors in its files, several of which may make up one weight.

    Returns {} if transformers computes a weight otherwise from the files, or if the names are unclear.
    """
    stored = read_weights(source)
    expected = {name: torch.empty_like(tensor) for name, tensor in structure.state_dict().items()}  # tied ones apart
    own_names = {tensor.untyped_storage(): name for name, tensor in expected.items()}
    for convert in (dict, partial(revert_weight_conversion, structure)):
        with _WithoutCopies():
            views = convert(expected)  # what transformers would save
        places = {}  # by names in files: the model's own name, and the box there
        for name, view in views.items():
            own = own_names.get(view.untyped_storage())
            box = _find_box(view, expected[own]) if own else None
            if box is None:
                return {}
            places[name] = own, *box
        tied = {name for name, (own, *_) in places.items() if own in structure.all_tied_weights_keys}
        if names := match_names(structure, views, stored, tied):
            parts = {}  # by the model's own names
            for name, theirs in names.items():
                own, begin, shape = places[name]
                parts.setdefault(own, []).append((begin, stored[theirs].reshape(shape)))
            return {
                own: SplitTensor(expected[own].shape, found[0][1].dtype, found) if len(found) > 1 else found[0][1]
                for own, found in parts.items()
            }
    return {}


def _find_box(view: Tensor, whole: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find where a view of a contiguous tensor begins in each dim, and its length there; None if it is not a box."""
    begin = tuple(map(int, np.unravel_index(int(view.storage_offset()), whole.shape)))
    lengths = dict(zip(view.stride(), view.shape, strict=True))
    box = tuple(lengths.get(stride, 1) for stride in whole.stride())
    # In the same order, or it would be transposed.
    return (begin, box) if [n for n in box if n > 1] == [n for n in view.shape if n > 1] else None


def replace_by_stubs(structure: Any, state: Tensors) -> tuple[Tensors, Tensors]:
    """Replace parameters in a state dict by stubs that take no memory; return it, and the parameters.

    Stubs have the dtypes of the model `structure`. A model is loaded from them as from the parameters.
    """
    expected = structure.state_dict(keep_vars=True)
    stubs = drop_copies(structure, state)
    parameters = {}
    for name, tensor in stubs.items():
        if isinstance(expected[name], torch.nn.Parameter) and name != HEAD_WEIGHT:
            parameters[name] = tensor
            # of tied weights that differ in the files, the stubs differ too, so that transformers does not tie them
            value = float(name in structure.all_tied_weights_keys)
            stubs[name] = torch.full((), value, dtype=expected[name].dtype).expand(tensor.shape)
    return stubs, parameters


def rename_weights(model: Any, state: Tensors, stored: Tensors) -> Tensors:
    """Rename the model's weights as in its files, whose weights are `stored`; empty if the names are unclear.

    `state` is from `drop_copies`. Files may have the weights of each expert apart, and a tied weight twice: so does the
    result.
    """
    twice = dict(state)
    for name, source in model.all_tied_weights_keys.items():
        twice.setdefault(name, state[source])
    # The names are first those of the model, then those under which transformers would save.
    for convert in (dict, partial(revert_weight_conversion, model)):
        weights = convert(twice)
        copies = weights.keys() - convert(state).keys()
        if names := match_names(model, weights, stored, copies):
            return {theirs: weights[own] for own, theirs in names.items()}
    return {}


def match_names(model: Any, weights: Tensors, stored: Tensors, optional: Set[str]) -> dict[str, str]:
    """Map names of weights to names in `stored`, which may have other prefixes; empty if that is ambiguous.

    All weights of the base model have one prefix there, and those of its head one that may differ. The `optional`
    weights may be missing.
    """
    embeddings = model.get_input_embeddings()
    [path] = [name for name, module in model.named_modules() if module is embeddings]
    base = path.partition(".")[0] + "."
    of_base = {}
    of_head = {}
    for name in weights:
        group = of_base if name.startswith(base) else of_head
        group[name.removeprefix(base)] = name
    names = {}
    for group in (of_base, of_head):
        required = {short: name for short, name in group.items() if name not in optional}
        first = next(iter(required or group), "")
        # Every prefix of the first weight's name there is a candidate.
        prefixes = {key.removesuffix(first) for key in stored if f".{key}".endswith(f".{first}")}
        for short, name in required.items():
            for prefix in list(prefixes):
                if prefix + short not in stored or stored[prefix + short].shape != weights[name].shape:
                    prefixes.remove(prefix)
        if len(prefixes) != 1 and required:
            return {}
        for prefix in prefixes:
            names |= {name: prefix + short for short, name in group.items() if prefix + short in stored}
    return names


def spell_both_ways(written: dict, config: Any) -> None:
    """Add entries to a config, so that both transformers 4 and 5 find the parameters of rope and Qwen3's experts."""
    if "num_local_experts" in written:
        written.setdefault("num_experts", written["num_local_experts"])
    rope = config.to_dict().get("rope_parameters") or {}
    old = {"rope_parameters": rope}
    whole = rope  # the parameters of layers with full attention
    if config.model_type in LAYER_TYPES:
        whole = rope["full_attention"]
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if "rope_theta" not in whole:
        return
    old["rope_theta"] = whole["rope_theta"]
    old["rope_scaling"] = None
    scaling = {key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") != "default":
        old["rope_scaling"] = scaling
    if "partial_rotary_factor" in whole:
        old["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if config.model_type == "gpt_neox":
        old["rotary_emb_base"] = whole["rope_theta"]
        old["rotary_pct"] = whole["partial_rotary_factor"]
    for key, value in old.items():
        written.setdefault(key, value)


# --- the text part of a checkpoint that also has a vision part. A model of `AutoModelForCausalLM` has other names for
# --- its weights than the checkpoint's files (and our exports) or its class (and adapters)


def ambiguity(model: Any, place: str) -> InputError:
    return InputError(
        f"in {place} the weights of the text part ({type(model).__name__}) cannot be told from the others: use "
        f"a text-only model"
    )


def is_text_part(config: Any) -> bool:
    """Return whether `AutoModelForCausalLM` makes only the text part of a checkpoint, by its own rule."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text_config = config.sub_configs.get("text_config")
    return text_config is not None and getattr(model_class, "config_class", None) is text_config


def name_in_class(model: Any, config: Any) -> None:
    """Set `checkpoint_class` and `names_in_class` of a text model: the checkpoint's class, and its names of weights.

    Other models do not get these attributes. Raises InputError if names are ambiguous.
    """
    if not is_text_part(config) or type(model.config) is type(config):  # the latter if it has all parts
        return
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    model.checkpoint_class = type(whole).__name__
    tied = model.all_tied_weights_keys.keys()
    model.names_in_class = match_names(model, model.state_dict(), whole.state_dict(), tied)
    if not model.names_in_class:
        raise ambiguity(model, f"the class {model.checkpoint_class}")


def rename_layers(model: Any, tensors: Tensors, *, to_checkpoint_class: bool) -> Tensors:
    """Rename an adapter's weights from the model's names to those in the checkpoint's class, or back."""
    new_names = getattr(model, "names_in_class", {})
    if not to_checkpoint_class:
        new_names = {theirs: own for own, theirs in new_names.items()}
    renamed = {}
    for name, tensor in tensors.items():
        layer, factor, rest = name.partition(".lora_")
        weight = f"{layer}.weight"
        renamed[new_names.get(weight, weight).removesuffix(".weight") + factor + rest] = tensor
    return renamed


def check_names(model: Any, source: Any) -> None:
    """Raise InputError unless each weight of a text model has one place in the files."""
    state = drop_copies(model, model.state_dict(keep_vars=True))
    if not rename_weights(model, state, read_weights(source)):
        raise ambiguity(model, f"the files of model.name_or_path={source.name}")
