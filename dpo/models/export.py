"""Export of a checkpoint as a model of transformers, or of an adapter in PEFT's format or merged into its base.

A model consists of config, safetensors, tokenizer, generation config and model card. Weights are read from mapped files
and written shard by shard, so that no more than a shard is in memory.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.dynamic_module_utils import custom_object_save

from dpo.checkpoint.files import EXPORTED, MANIFEST, OF_ADAPTER, check_complete, read_file, sync_directory
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, RunError
from dpo.models.adapters import CONFIG, WEIGHTS, read_adapter
from dpo.models.card import write_card
from dpo.models.loading import find_source, resolve_place
from dpo.models.merging import Addition, base_reader, find_additions, rounding_of_base
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, load_config, load_structure
from dpo.models.weights import read_archive
from dpo.system.plain_files import read_json, remove

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
                check_complete(policy.parent, only={policy.name, *OF_ADAPTER})
    temporary = out.with_name(f"{_start(out)}{os.getpid()}.tmp")
    try:
        with _explaining(out):
            _tidy(out)
            temporary.mkdir(parents=True)
            if origin.adapter is not None and not merge:
                _fill_with_adapter(temporary, origin)
            else:
                _fill(temporary, origin, dtype and DTYPES[dtype], shard_bytes)
            for file in temporary.iterdir():
                shutil.copymode(temporary / "README.md", file)  # safetensors makes files that others cannot read
                _sync(file)
            sync_directory(temporary)
            temporary.rename(out)
            sync_directory(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a failure: frees the space
    return out


def _start(out: Path) -> str:
    """The prefix of temporary directories for exports to `out` from this host; the process id follows."""
    return f".{out.name}.{socket.gethostname()}."


def _tidy(out: Path) -> None:
    """Remove the leftovers of killed exports to `out`; other exports may be writing now."""
    for rest in out.parent.glob(f"{glob.escape(_start(out))}*.tmp"):
        process = rest.name.removeprefix(_start(out)).removesuffix(".tmp")
        if process == str(os.getpid()) or (process.isdecimal() and not Path("/proc", process).exists()):
            remove(rest)


@contextmanager
def _explaining(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"{out} could not be written ({reason}); nothing of it was left there") from error


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


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
    structure = load_structure(**source, dtype=torch.float32)
    adapter = None if origin.adapter is None else read_adapter(origin.adapter)
    if adapter is None:
        read, written = partial(read_archive, str(origin.weights), structure, key=""), partial(_cast, dtype)
    else:
        read = base_reader(origin, structure)
        written = partial(_merged, rounding_of_base(origin, structure), find_additions(adapter, structure), dtype)
    dtype = _write_weights(folder, read, written, structure, shard_bytes)
    _write_configs(folder, source, structure, dtype)
    _write_tokenizer(folder, origin)
    content = read_file(origin.policy) if origin.policy else {}
    config = adapter and adapter.config
    write_card(folder, origin, architecture=type(structure).__name__, dtype=dtype, saved=content, adapter=config)


def _cast(dtype: torch.dtype | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _merged(
    rounded: Callable[[str, torch.Tensor], torch.Tensor],
    additions: Mapping[str, Addition],
    dtype: torch.dtype | None,
    name: str,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """A weight of the base as its run had it, plus the adapter's addition."""
    if not tensor.is_floating_point():
        return tensor
    tensor = rounded(name, tensor)
    of_base = tensor.dtype
    if name in additions and not tensor.is_meta:
        tensor = additions[name].to(tensor)
    return tensor.to(dtype or of_base)


def _write_weights(
    folder: Path,
    read: Callable[[], Mapping[str, torch.Tensor]],
    written: Callable[[str, torch.Tensor], torch.Tensor],
    structure: Any,
    shard_bytes: int,
) -> torch.dtype:
    """Write the shards and, if there are several, their index. Returns the dtype of the weights.

    `read` returns all weights, mapped; `written(name, weight)` returns the weight to write.
    """

    def read_once() -> dict[str, torch.Tensor]:
        """All weights, tied ones under their first name only."""
        state = read()
        first: dict[int, str] = {}
        for name, parameter in structure.state_dict(keep_vars=True).items():  # tied weights are one object
            if name in state:
                first.setdefault(id(parameter), name)
        return {name: state[name] for name in first.values()}

    # on the meta device tensors take no memory and share none
    shapes = {name: written(name, tensor.to("meta")) for name, tensor in read_once().items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        state = read_once()  # mapped anew, so that the pages of the former shard leave memory
        tensors = {name: written(name, state[name]).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del state, tensors
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return next(tensor.dtype for tensor in shapes.values() if tensor.is_floating_point())


def _write_configs(folder: Path, source: Mapping[str, Any], structure: Any, dtype: torch.dtype) -> None:
    """Write the base model's `config.json`, its generation config, and its own Python code, if any."""
    config = load_config(**source)  # the structure's config has dropout set to 0
    config.architectures, config.dtype = [type(structure).__name__], dtype
    for made_by_code in (config, structure):
        if made_by_code._auto_class is not None:
            custom_object_save(made_by_code, folder, config=config)
    if not list(folder.glob("*.py")) and hasattr(config, "auto_map"):  # transformers has the class: code is left out
        del config.auto_map
    config.to_json_file(folder / "config.json")
    try:
        generation = transformers.GenerationConfig.from_pretrained(source["name"], cache_dir=source["cache_dir"])
    except OSError:  # it has none: use its config
        generation = structure.generation_config
    generation.to_json_file(folder / "generation_config.json")  # unchanged: save_pretrained refuses some published ones


def _write_tokenizer(folder: Path, origin: Origin) -> None:
    """Write the tokenizer as it was published, without the pad token that training adds."""
    source, name = find_source(origin.plan), origin.plan.model.tokenizer_name_or_path
    found = source | ({"name": name} if name else {})
    with explaining_load_errors("tokenizer", found["name"]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(found.pop("name"), **found)
    if tokenizer._auto_class is None:  # as in config.json
        tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(folder)
