"""Export of a checkpoint as a model of transformers, or of an adapter in PEFT's format or merged into its base.

A model consists of config, safetensors, tokenizer, generation config and model card. Weights that stay as they are in
their file are mapped from it and written shard by shard; merged or converted ones are in memory once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers.pytorch_utils import Conv1D

from dpo.checkpoint.files import EXPORTED, MANIFEST, check_complete, read_file, sync_directory
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, RunError, explaining
from dpo.models.adapters import CONFIG, FACTOR_NAME, WEIGHTS, StoredAdapter, read_adapter
from dpo.models.card import write_card
from dpo.models.loading import find_source, resolve_place
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, load_config, load_model, load_structure
from dpo.models.quantization import layers_to_quantize, round_to_4bit
from dpo.models.weights import read_archive
from dpo.system.plain_files import read_json, replacing

SHARD_BYTES = 2 * 10**9


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    merge: bool = False,
    trust_remote_code: bool = False,
    verify: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a directory for `AutoModelForCausalLM.from_pretrained(out)`, whole or not at all. Returns `out`.

    `checkpoint` and `model` are as for `find_origin`; `dtype` None keeps that of the weights. For an adapter, writes
    the adapter, which names its base, or, with `merge`, the sum of both. With `verify` a checkpoint of ours is first
    compared with its checksums.
    Raises InputError if the checkpoint cannot be exported or `out` is taken, RunError if writing fails.
    """
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: remove it, or give another directory")
    origin = find_origin(checkpoint, model=model, trust_remote_code=trust_remote_code)
    _check(origin, checkpoint, dtype, merge)
    if verify:
        for policy in {origin.policy, origin.weights if merge else None} - {None}:
            if (policy.parent / MANIFEST).exists():
                check_complete(policy.parent, only={policy.name, CONFIG, WEIGHTS})
    after = "nothing of it was left there"
    with explaining((OSError, SafetensorError), lambda why: RunError(f"{out} could not be written ({why}); {after}")):
        with replacing(out) as folder:
            folder.mkdir(parents=True)
            if origin.adapter is not None and not merge:
                _fill_with_adapter(folder, origin)
            else:
                _fill(folder, origin, dtype and DTYPES[dtype], shard_bytes)
            for file in folder.iterdir():
                shutil.copymode(folder / "README.md", file)  # safetensors makes files that others cannot read
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            sync_directory(folder)
        sync_directory(out.parent)
    return out


def _check(origin: Origin, checkpoint: str | Path, dtype: str | None, merge: bool) -> None:
    """Raises InputError if there is nothing to export, or it cannot be exported in this form."""
    if origin.adapter is None and origin.weights is None:
        raise InputError(f"{checkpoint} is a model's directory, which transformers loads as it is: give a checkpoint")
    if merge and origin.adapter is None:
        raise InputError(f"{checkpoint} holds no adapter that --merge could merge: it is exported without --merge")
    if merge or origin.adapter is None:
        return
    if origin.policy is None:
        raise InputError(f"{checkpoint} is in PEFT's format already: give --merge for a model without an adapter")
    if dtype is not None:
        raise InputError(f"--dtype {dtype} is for a whole model, and {checkpoint} holds an adapter: add --merge")
    _base_for_peft(origin)


def _base_for_peft(origin: Origin) -> str:
    """The base for PEFT to load under an adapter. Raises InputError if PEFT cannot load it."""
    if origin.plan.model.random_init and origin.weights is None:
        raise InputError(f"the base of {origin.adapter} was drawn from a seed, which PEFT cannot load: give --merge")
    if origin.weights is None:
        return resolve_place(origin.plan.model.name_or_path)
    exported = origin.weights.parent / EXPORTED
    if (exported / "config.json").is_file():
        return str(exported)
    raise InputError(
        f"the base of {origin.adapter} is {origin.weights}, which PEFT cannot load: give --merge, or export it first: "
        f"python -m scripts.export {origin.weights} {exported}"
    )


def _fill_with_adapter(folder: Path, origin: Origin) -> None:
    stored = read_adapter(origin.adapter)
    config = read_json(origin.adapter / CONFIG)
    config["base_model_name_or_path"] = _base_for_peft(origin)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(origin.adapter / WEIGHTS, folder / WEIGHTS)
    _write_tokenizer(folder, origin)
    write_card(folder, origin, saved=read_file(origin.policy), adapter=stored.config)


def _fill(folder: Path, origin: Origin, dtype: torch.dtype | None, shard_bytes: int) -> None:
    source = find_source(origin.plan)
    model = load_structure(**source, dtype=torch.float32)
    adapter = None if origin.adapter is None else read_adapter(origin.adapter)
    _load_weights(model, origin, adapter, dtype)
    model.config = config = load_config(**source)  # the structure's has dropout set to 0
    if not model.is_remote_code() and hasattr(config, "auto_map"):  # transformers has the class: code is left out
        del config.auto_map
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder, max_shard_size=shard_bytes, save_original_format=False)
    try:
        generation = transformers.GenerationConfig.from_pretrained(source["name"], cache_dir=source["cache_dir"])
    except OSError:  # the base has none
        generation = transformers.GenerationConfig.from_model_config(config)
    generation.to_json_file(folder / "generation_config.json")  # unchanged: save_pretrained refuses some published ones
    _write_tokenizer(folder, origin)
    write_card(
        folder,
        origin,
        architecture=type(model).__name__,
        dtype=model.dtype,
        saved=read_file(origin.policy) if origin.policy else {},
        adapter=adapter and adapter.config,
    )


def _read_weights(origin: Origin, structure: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Read the weights of the model, or of an adapter's base; they are mapped where the file can be."""
    if origin.weights is not None:
        return read_archive(str(origin.weights), structure, key="")
    source, model = find_source(origin.plan), origin.plan.model
    dtype = DTYPES[model.policy_dtype] if model.random_init else load_config(**source).dtype or torch.float32
    return load_model(**source, dtype=dtype, random_init=model.random_init, seed=origin.plan.run.seed).state_dict()


def _load_weights(model: Any, origin: Origin, adapter: StoredAdapter | None, dtype: torch.dtype | None) -> None:
    """Load the weights to write into a model without weights: the base's as its run rounded them, merged, in `dtype`.

    A weight that stays as it is in its file is mapped; others are converted one by one.
    """
    additions = {} if adapter is None else find_additions(adapter, model)
    of_run = adapter is not None and origin.run_dir is not None
    in_4_bits = layers_to_quantize(model) if of_run and origin.plan.quantized else ()
    state, named = _read_weights(origin, model), model.state_dict(keep_vars=True)
    stored = {id(named[name]): name for name in reversed(named) if name in state}  # tied weights are one object
    for name in stored.values():
        weight = state[name]
        if not weight.is_floating_point():
            continue
        if of_run:
            weight = weight.to(DTYPES[origin.plan.model.policy_dtype])
        if (layer := name.removesuffix(".weight")) in in_4_bits:
            weight = round_to_4bit(weight, model.get_submodule(layer))
        merged = additions[name].to(weight) if name in additions else weight
        state[name] = merged.to(dtype or weight.dtype)
    model.load_state_dict({name: state[stored[id(weight)]] for name, weight in named.items()}, assign=True)
    model.tie_weights()


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
    for layer in sorted({match[1] for match in map(FACTOR_NAME.fullmatch, stored.weights) if match}):
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
    """Return whether PEFT would adapt a layer. A regular expression is not tried: a foreign one may never finish."""
    if isinstance(config.target_modules, str) or config.layers_pattern or isinstance(config.exclude_modules, str):
        return True
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(config, layer))


def _write_tokenizer(folder: Path, origin: Origin) -> None:
    """Write the tokenizer as it was published, without the pad token that training adds."""
    source, name = find_source(origin.plan), origin.plan.model.tokenizer_name_or_path
    found = source | ({"name": name} if name else {})
    with explaining_load_errors("tokenizer", found["name"]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(found.pop("name"), **found)
    if tokenizer._auto_class is None:  # as in config.json
        tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(folder)
