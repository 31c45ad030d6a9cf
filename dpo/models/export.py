"""A checkpoint as a model of transformers: config, safetensors, tokenizer, generation config, model card.

The weights are read from the mapped `policy.pt` and written shard by shard, so that no more than a shard is in memory.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.dynamic_module_utils import custom_object_save

from dpo.checkpoint.files import MANIFEST, check_complete, read_file, sync_directory
from dpo.data.tokenizer import explaining_load_errors
from dpo.errors import InputError, RunError
from dpo.models.card import write_card
from dpo.models.loading import source_of
from dpo.models.origin import Origin, find_origin
from dpo.models.pretrained import DTYPES, load_config, load_structure
from dpo.models.weights import read_archive
from dpo.system.plain_files import remove

SHARD_BYTES = 2 * 10**9


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write what `AutoModelForCausalLM.from_pretrained(out)` loads, whole or not at all. Returns `out`.

    `checkpoint` and `model` are as `find_origin` takes them; `dtype` None: that of the weights. With `verify` a
    checkpoint of ours is compared with its checksums first.
    Raises InputError if the checkpoint cannot be exported or `out` is taken, RunError if writing fails.
    """
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: remove it, or give another directory")
    origin = find_origin(checkpoint, model=model, trust_remote_code=trust_remote_code)
    if origin.weights is None:
        raise InputError(f"{checkpoint} is a model's directory, which transformers loads as it is: give a checkpoint")
    if verify and (origin.weights.parent / MANIFEST).exists():
        check_complete(origin.weights.parent, only=origin.weights.name)
    temporary = out.with_name(f"{_start(out)}{os.getpid()}.tmp")
    try:
        with _explaining(out):
            _tidy(out)
            temporary.mkdir(parents=True)
            _fill(temporary, origin, dtype and DTYPES[dtype], shard_bytes)
            for file in temporary.iterdir():
                shutil.copymode(temporary / "config.json", file)  # safetensors makes files that others cannot read
                _sync(file)
            sync_directory(temporary)
            temporary.rename(out)
            sync_directory(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a failure: frees the space
    return out


def _start(out: Path) -> str:
    """How the names of temporary directories of exports to `out` from this host begin; then the process's id."""
    return f".{out.name}.{socket.gethostname()}."


def _tidy(out: Path) -> None:
    """Remove what exports to `out` have left behind that were killed; others may be writing just now."""
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


def _fill(folder: Path, origin: Origin, dtype: torch.dtype | None, shard_bytes: int) -> None:
    source = source_of(origin.config)
    structure = load_structure(**source, dtype=torch.float32)
    dtype = _write_weights(folder, origin.weights, structure, dtype, shard_bytes)
    _write_configs(folder, source, structure, dtype)
    _write_tokenizer(folder, origin)
    content = read_file(origin.weights)
    write_card(folder, origin, architecture=type(structure).__name__, dtype=dtype, saved=content)


def _write_weights(
    folder: Path, weights: Path, structure: Any, dtype: torch.dtype | None, shard_bytes: int
) -> torch.dtype:
    """Write the shards and, if there are several, their index. Returns the dtype of the weights."""

    def read() -> dict[str, torch.Tensor]:
        """The weights in the mapped file, tied ones under their first name."""
        state = read_archive(str(weights), structure, key="")
        first: dict[int, str] = {}
        for name, parameter in structure.state_dict(keep_vars=True).items():  # tied weights are one object
            if name in state:
                first.setdefault(id(parameter), name)
        return {name: state[name] for name in first.values()}

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    # on the meta device these take no memory, and no two share any
    shapes = {name: written(tensor.to("meta")) for name, tensor in read().items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        state = read()  # mapped anew: what the former shard read leaves memory
        save_file({name: written(state[name]).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        del state
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return next(tensor.dtype for tensor in shapes.values() if tensor.is_floating_point())


def _write_configs(folder: Path, source: Mapping[str, Any], structure: Any, dtype: torch.dtype) -> None:
    """`config.json` as the base model has it, its generation config, and its own Python code if it brings any."""
    config = load_config(**source)  # that of the structure has no dropout
    config.architectures, config.dtype = [type(structure).__name__], dtype
    for made_by_code in (config, structure):
        if made_by_code._auto_class is not None:
            custom_object_save(made_by_code, folder, config=config)
    if not list(folder.glob("*.py")) and hasattr(config, "auto_map"):  # transformers has its class: names code left out
        del config.auto_map
    config.to_json_file(folder / "config.json")
    try:
        generation = transformers.GenerationConfig.from_pretrained(source["name"], cache_dir=source["cache_dir"])
    except OSError:  # it has none: what its config says
        generation = structure.generation_config
    generation.to_json_file(folder / "generation_config.json")  # as it is: save_pretrained refuses some published ones


def _write_tokenizer(folder: Path, origin: Origin) -> None:
    """The tokenizer as it was published, without the pad token that training gives it."""
    source, name = source_of(origin.config), origin.config.model.tokenizer_name_or_path
    found = source | ({"name": name} if name else {})
    with explaining_load_errors("tokenizer", found["name"]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(found.pop("name"), **found)
    if tokenizer._auto_class is None:  # as in config.json
        tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(folder)
