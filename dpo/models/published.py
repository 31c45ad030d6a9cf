"""A published checkpoint's files: the names and dtypes of weights there, and config keys of transformers 4 and 5.

Some checkpoints have a vision part, too.
"""

from collections.abc import Set
from functools import partial
from statistics import mode
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dpo.checkpoint.shards import SplitTensor
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.logprobs import HEAD_WEIGHT

Tensors = dict[str, Tensor]  # weights by their names
ROPE_BY_KIND = ("gemma3_text", "gemma3n_text", "olmo3")  # types with rope for each kind of layer in transformers 4


def find_file(source: Any, file: str) -> str | None:
    """Return the path of a file of `source`, a `ModelPath`, fetched from the Hub if needed; None if there is none."""
    return cached_file(source.name, file, cache_dir=source.cache_dir, _raise_exceptions_for_missing_entries=False)


def read_weights(source: Any) -> Tensors:
    """Read the tensors of the files that transformers would load, memory-mapped; {} if there are no files."""
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
                weights |= load_state_dict(part)
            break
    return weights


def drop_copies(model: Any, state: Tensors) -> Tensors:
    """Copy a state dict without tied weights, except those that differ from the weight they are tied to."""
    weights = dict(state)
    for name, source in model.all_tied_weights_keys.items():
        if name not in weights:
            continue
        tensor = weights.pop(name)
        original = weights.setdefault(source, tensor)  # a file may have either name
        if tensor is not original and not torch.equal(tensor, original):
            weights[name] = tensor
    return weights


class _WithoutCopies(TorchFunctionMode):
    """A context in which `contiguous` returns the tensor itself, so that slices of a tensor stay views of it."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return args[0] if function == Tensor.contiguous else function(*args, **(kwargs or {}))


def map_weights(structure: Any, source: Any) -> Tensors:
    """Map the weights of a model on the meta device to tensors in its files, several of which may make up one weight.

    Returns {} if transformers does more than join tensors of the files into weights, or if the names are ambiguous.
    """
    stored = read_weights(source)
    # Transformers' conversion for saving is run on tensors without values. The storage of each result shows of which
    # weight it is a view, as every weight has a storage of its own here, even if it is tied.
    expected = {name: torch.empty_like(tensor) for name, tensor in structure.state_dict().items()}
    own_names = {tensor.untyped_storage(): name for name, tensor in expected.items()}
    # The files have the model's own names, or those under which transformers would save.
    for convert in (dict, partial(revert_weight_conversion, structure)):
        with _WithoutCopies():
            views = convert(expected)
        places = {}  # name when saved -> (the model's own name, begin and shape of the view in that weight)
        for name, view in views.items():
            own = own_names.get(view.untyped_storage())
            box = _find_box(view, expected[own]) if own else None
            if box is None:
                return {}
            places[name] = own, *box
        tied = {name for name, (own, *_) in places.items() if own in structure.all_tied_weights_keys}
        names = match_names(views, stored, tied)
        if not names:
            continue
        parts = {}  # by the model's own names
        for name, stored_name in names.items():
            own, begin, shape = places[name]
            parts.setdefault(own, []).append((begin, stored[stored_name].reshape(shape)))
        weights = {}
        try:
            for own, pieces in parts.items():
                _, first = pieces[0]
                weights[own] = SplitTensor(expected[own].shape, first.dtype, pieces)
                if len(pieces) == 1:
                    weights[own] = first
        except ValueError:  # pieces of several dtypes, or that are not boxes
            return {}
        return weights
    return {}


def _find_box(view: Tensor, whole: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find where a view of a contiguous tensor begins in each dim, and its length there; None for other strides.

    The view may lack the first dims, which an index has taken away, as that of an expert.
    """
    n_missing = whole.ndim - view.ndim
    if view.stride() != whole.stride()[n_missing:]:
        return None
    begin = []
    offset = int(view.storage_offset())
    for stride in whole.stride():
        begin.append(offset // stride)
        offset %= stride
    return tuple(begin), (1,) * n_missing + tuple(view.shape)


def replace_by_stubs(structure: Any, state: Tensors) -> tuple[Tensors, Tensors]:
    """Return a copy of a state dict in which parameters are stubs that take no memory, and the parameters by name.

    Stubs have the shapes of the parameters, and the dtypes of the model `structure`, so `from_pretrained` loads them.
    The scalar head is no stub, as loading an adapter may write into it.
    """
    expected = dict(structure.named_parameters(remove_duplicate=False))
    stubs = drop_copies(structure, state)
    parameters = {}
    for name, tensor in stubs.items():
        if name in expected and name != HEAD_WEIGHT:
            parameters[name] = tensor
            # The stubs of tied weights that differ in the files differ too, so that transformers does not tie them.
            value = float(name in structure.all_tied_weights_keys)
            stubs[name] = torch.full((), value, dtype=expected[name].dtype).expand(tensor.shape)
    return stubs, parameters


def rename_weights(model: Any, state: Tensors, stored: Tensors) -> Tensors:
    """Rename the model's weights as in its files, whose weights are `stored`; {} if the names are ambiguous.

    `state` is from `drop_copies`. Where the files have a tensor for each expert, or a tied weight twice, so does the
    result.
    """
    with_copies = dict(state)
    for name, source in model.all_tied_weights_keys.items():
        with_copies.setdefault(name, state[source])
    # The files have the model's own names, or those under which transformers would save.
    for convert in (dict, partial(revert_weight_conversion, model)):
        weights = convert(with_copies)
        copies = weights.keys() - convert(state).keys()
        if names := match_names(weights, stored, copies):
            return {stored_name: weights[name] for name, stored_name in names.items()}
    return {}


def match_names(weights: Tensors, stored: Tensors, optional: Set[str]) -> dict[str, str]:
    """Map names of weights to names in `stored`, which may have other prefixes; {} if that is ambiguous.

    In `stored`, all weights of the body have one prefix, and those of the head have one that may differ. The body is
    the submodule with most of the weights, such as `model` of Llama. The `optional` weights may be missing.
    """
    body_prefix = mode(name.partition(".")[0] for name in weights) + "."
    names = {}
    for is_body in (True, False):
        # By the name without the prefix.
        group = {name.removeprefix(body_prefix): name for name in weights if name.startswith(body_prefix) == is_body}
        required = {short: name for short, name in group.items() if name not in optional}
        first = next(iter(required or group), "")
        # The candidates are all prefixes with which `stored` has the first weight; the dots keep whole components.
        prefixes = {key.removesuffix(first) for key in stored if f".{key}".endswith(f".{first}")}
        for short, name in required.items():
            found = {prefix for prefix in prefixes if prefix + short in stored}
            prefixes = {prefix for prefix in found if stored[prefix + short].shape == weights[name].shape}
        if len(prefixes) != 1 and required:
            return {}
        for prefix in prefixes:
            names |= {name: prefix + short for short, name in group.items() if prefix + short in stored}
    return names


def add_keys_for_both_versions(written: dict, config: Any) -> None:
    """Add entries to `written`, the content of a config file, so that both transformers 4 and 5 can read it.

    Their keys for rope and for Qwen3's experts differ. `config` is the text part's.
    """
    if "num_local_experts" in written:
        written.setdefault("num_experts", written["num_local_experts"])
    rope = config.to_dict().get("rope_parameters") or {}
    full = rope  # the parameters of layers with full attention
    if config.model_type in ROPE_BY_KIND:
        full = rope["full_attention"]
        written.setdefault("rope_local_base_freq", rope["sliding_attention"]["rope_theta"])
    if "rope_theta" not in full:
        return
    scaling = dict(full)
    added = {"rope_parameters": rope, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": None}
    if "partial_rotary_factor" in full:
        added["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if scaling.get("rope_type", "default") != "default":
        added["rope_scaling"] = scaling
    if config.model_type == "gpt_neox":
        added["rotary_emb_base"] = full["rope_theta"]
        added["rotary_pct"] = full["partial_rotary_factor"]
    for key, value in added.items():
        written.setdefault(key, value)


# --- the text part of a checkpoint that also has a vision part. Its weights have different names in a model of
# --- `AutoModelForCausalLM`, in the checkpoint's files (and our exports), and in the checkpoint's class (and adapters)


def ambiguity(model: Any, place: str) -> InputError:
    return InputError(
        f"in {place} the weights of the text part ({type(model).__name__}) cannot be told from the others: use "
        f"a text-only model"
    )


def is_text_part(config: Any) -> bool:
    """Return whether `AutoModelForCausalLM` makes only the text part of a checkpoint, by transformers' own rule."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text_config = config.sub_configs.get("text_config")
    return text_config is not None and getattr(model_class, "config_class", None) is text_config


def set_names_in_class(model: Any, config: Any) -> None:
    """Set `names_in_class` of a text part's model, a map from names of weights to those in the checkpoint's class.

    Other models do not get this attribute. Raises InputError if names are ambiguous.
    """
    if not is_text_part(config) or type(model.config) is type(config):  # the latter if the model has all parts
        return
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    tied = model.all_tied_weights_keys.keys()
    model.names_in_class = match_names(model.state_dict(), whole.state_dict(), tied)
    if not model.names_in_class:
        raise ambiguity(model, f"the class {type(whole).__name__}")


def rename_layers(model: Any, tensors: Tensors, *, to_checkpoint_class: bool) -> Tensors:
    """Rename an adapter's weights from the model's names to those in the checkpoint's class, or back."""
    new_names = getattr(model, "names_in_class", {})
    if not to_checkpoint_class:
        new_names = {in_class: name for name, in_class in new_names.items()}
    renamed = {}
    for name, tensor in tensors.items():
        layer, separator, factor = name.partition(".lora_")  # without a separator it is the scalar head's weight
        weight = f"{layer}.weight"
        renamed[new_names.get(weight, weight).removesuffix(".weight") + separator + factor] = tensor
    return renamed


def check_names(model: Any, source: Any) -> None:
    """Raise InputError unless each weight of a text part's model has one name in the files of `source`."""
    state = drop_copies(model, model.state_dict(keep_vars=True))
    if not rename_weights(model, state, read_weights(source)):
        raise ambiguity(model, f"the files of model.name_or_path={source.name}")
