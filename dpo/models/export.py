"""Export of a checkpoint as a model of transformers, or an adapter.

A model consists of config, safetensors, tokenizer, generation config and model card. Weights that stay as they are in
their file are mapped from it and written shard by shard; merged or converted ones are in memory once.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from dpo.checkpoint.files import EXPORTED, MANIFEST, check_complete, sync_directory
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, RunError, explaining
from dpo.models.adapters import CONFIG, WEIGHTS, StoredAdapter, merge_adapter, read_adapter
from dpo.models.card import write_card
from dpo.models.loading import find_source, load_base, resolve_name
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, load_config, load_structure
from dpo.models.quantization import layers_to_quantize, round_to_4bit
from dpo.models.weights import Weights, read_archive
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
    """Write a directory for `AutoModelForCausalLM.from_pretrained`, and return it.

    It is written whole or not at all. `checkpoint` and `model` are as for `find_origin`; `dtype` None keeps that of the
    weights. For an adapter, writes the adapter, which names its base, or, with `merge`, the sum of both. With `verify`
    a checkpoint of ours is first compared with its checksums.
    Raises InputError if the checkpoint cannot be exported or `out` is taken, RunError if writing fails.
    """
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: remove it, or give another directory")
    origin = find_origin(checkpoint, model=model, trust_remote_code=trust_remote_code)
    _check(origin, checkpoint, dtype, merge)
    if verify:
        for policy in {origin.policy, origin.weights.archive if merge else None} - {None}:
            if (policy.parent / MANIFEST).exists():  # not an archive of the published reference
                check_complete(policy.parent, only={policy.name, CONFIG, WEIGHTS})
    after = "nothing of it was left there"
    with explaining((OSError, SafetensorError), lambda why: RunError(f"{out} could not be written ({why}); {after}")):
        with replacing(out) as folder:
            folder.mkdir(parents=True)
            if origin.weights.adapter is not None and not merge:
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
    """Raise InputError if this checkpoint cannot be exported in this form."""
    if origin.weights == Weights():
        raise InputError(f"{checkpoint} is a model's directory, which transformers loads as it is: give a checkpoint")
    if merge and origin.weights.adapter is None:
        raise InputError(f"{checkpoint} holds no adapter that --merge could merge: it is exported without --merge")
    if merge or origin.weights.adapter is None:
        return
    if origin.policy is None:
        raise InputError(f"{checkpoint} is in PEFT's format already: give --merge for a model without an adapter")
    if dtype is not None:
        raise InputError(f"--dtype {dtype} is for a whole model, and {checkpoint} holds an adapter: add --merge")
    _find_base_for_peft(origin)


def _find_base_for_peft(origin: Origin) -> str:
    """The base for PEFT to load under an adapter, or InputError."""
    archive, adapter = origin.weights.archive, origin.weights.adapter
    if archive is not None:
        exported = archive.parent / EXPORTED
        if (exported / "config.json").is_file():
            return str(exported)
        raise InputError(
            f"the base of {adapter} is {archive}, which PEFT cannot load: give --merge, or export it first: "
            f"python -m scripts.export {archive} {exported}"
        )
    if origin.plan.model.random_init:
        raise InputError(f"the base of {adapter} was drawn from a seed, which PEFT cannot load: give --merge")
    return resolve_name(origin.plan.model.name_or_path)


def _fill_with_adapter(folder: Path, origin: Origin) -> None:
    source: Any = origin.weights.adapter
    config = read_json(source / CONFIG)
    config["base_model_name_or_path"] = _find_base_for_peft(origin)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
    _write_tokenizer(folder, origin)
    write_card(folder, origin, adapter=read_adapter(source))


def _fill(folder: Path, origin: Origin, dtype: torch.dtype | None, shard_bytes: int) -> None:
    source = find_source(origin.plan)
    adapter = None if origin.weights.adapter is None else read_adapter(origin.weights.adapter)
    model = load_structure(**source, dtype=torch.float32)
    _load_weights(model, origin, adapter, dtype)
    model.config = config = load_config(**source)  # the structure's has dropout set to 0
    if not model.is_remote_code() and hasattr(config, "auto_map"):  # transformers has the class: code is left out
        del config.auto_map
    model.generation_config = transformers.GenerationConfig()  # the base's own is written below
    model.save_pretrained(folder, max_shard_size=shard_bytes, save_original_format=False)
    try:
        generation = transformers.GenerationConfig.from_pretrained(source["name"], cache_dir=source["cache_dir"])
    except OSError:  # the base has none
        generation = transformers.GenerationConfig.from_model_config(config)
    generation.to_json_file(folder / "generation_config.json")  # unchanged: save_pretrained refuses some published ones
    _write_tokenizer(folder, origin)
    write_card(folder, origin, model=model, adapter=adapter)


def _load_weights(model: Any, origin: Origin, adapter: StoredAdapter | None, dtype: torch.dtype | None) -> None:
    """Give a model without weights those that the export writes.

    Weights that stay as they are in their file are mapped.
    """
    state = read_archive(origin.weights.archive, model, key="") if adapter is None else _merge(origin, adapter, dtype)
    weights = model.state_dict(keep_vars=True)
    # tied weights are one object with several names, of which the state may have any: take the first there
    stored_names = {id(weights[name]): name for name in reversed(weights) if name in state}
    for name in stored_names.values():
        if state[name].is_floating_point():  # one by one, so that there is no second copy of the model
            state[name] = state[name].to(dtype or state[name].dtype)
    model.load_state_dict({name: state[stored_names[id(weight)]] for name, weight in weights.items()}, assign=True)
    model.tie_weights()


def _merge(origin: Origin, adapter: StoredAdapter, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The base's weights as the run rounded them, plus the adapter."""
    plan, has_run = origin.plan, origin.run_dir is not None
    base_dtype = DTYPES[plan.model.policy_dtype] if has_run else None
    base = load_base(plan, base_dtype, origin.weights.archive, attn_implementation="eager")
    if has_run and plan.quantized:
        for layer in map(base.get_submodule, layers_to_quantize(base)):
            layer.weight.data = round_to_4bit(layer.weight.detach(), layer)
    return merge_adapter(base, adapter, dtype)


def _write_tokenizer(folder: Path, origin: Origin) -> None:
    """Write the tokenizer as it was published, without training's pad token."""
    source = find_source(origin.plan) | {"name": origin.plan.model.tokenizer}
    with explaining_load_errors("tokenizer", source["name"]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.pop("name"), **source)
    if tokenizer._auto_class is None:  # as in config.json
        tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(folder)
