"""Files with a model's weights, loaded as data; digests of models.

A `policy.pt` may be ours or the reference implementation's. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpo.checkpoint.files import DamagedCheckpoint, read_state
from dpo.errors import InputError
from dpo.models.adapters import FACTOR_NAME, adapter_weights, base_weights, find_adapter, read_base

# buffers that transformers stored in 2023 and now computes
OBSOLETE_BUFFER = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|embed_positions)$|\.rotary_emb\.\w+$")
RENAMED = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's head


class Weights(NamedTuple):
    """Files with weights, in place of those that a model has itself."""

    archive: Path | None = None  # a policy.pt; under an adapter, with the weights of its base
    adapter: Path | None = None  # a directory in PEFT's format
    base: str | None = None  # the model under the adapter, a directory or a Hub id, if the adapter names one


def locate_weights(path: str | Path, *, key: str = "model.archive=") -> Weights:
    """The weights that a path names, a `policy.pt` or an adapter.

    Whether the base exists is not checked. Raises InputError, which puts the `key` that gave the path before it, if
    there are no weights.
    """
    adapter = find_adapter(path)
    if adapter is None:
        return Weights(find_archive(path, key=key))
    base = read_base(adapter)
    if base is not None and (base.endswith(".pt") or Path(base).is_file()):  # as our runs name a policy.pt
        return Weights(Path(base), adapter)
    return Weights(None, adapter, base)


def find_archive(archive: str | Path, *, key: str = "model.archive=") -> Path:
    """The `policy.pt` that a path names: the file, its directory, or LATEST."""
    path = Path(os.path.expanduser(archive))  # pathlib raises for a user who does not exist
    for candidate in (path, path / "policy.pt", path / "LATEST" / "policy.pt"):
        if candidate.is_file():
            return candidate
    if not path.exists():
        raise InputError(f"{key}{archive} does not exist")
    raise InputError(f"{key}{archive} is neither a policy.pt nor a directory that contains one")


def read_archive(
    archive: str | Path, model: torch.nn.Module, *, key: str = "model.archive="
) -> dict[str, torch.Tensor]:
    """Read the weights in a `policy.pt`, under their current names.

    `model`, for which they are, gives only names and shapes. Raises InputError if the file is missing, is not a
    `policy.pt`, or is for another architecture.
    """
    path = find_archive(archive, key=key)
    try:
        state = read_state(path)
    except DamagedCheckpoint as error:
        raise InputError(f"{key}{path} is not a policy.pt (which is data, never code): {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise InputError(f"{key}{path} is not a policy.pt: its 'state' does not map names to tensors")
    if any(FACTOR_NAME.fullmatch(name) for name in state):
        raise InputError(f"{key}{path} holds an adapter, not the weights of a model: give the checkpoint that it is of")
    expected = model.state_dict(keep_vars=True)  # tied weights are one object
    for old, new in RENAMED.items():
        if old in state and new in expected:
            state = {new if name == old else name: tensor for name, tensor in state.items()}
    state = {k: tensor for k, tensor in state.items() if k in expected or not OBSOLETE_BUFFER.search(k)}
    known = [name for name in state if name in expected]
    unknown = sorted(state.keys() - expected.keys())
    stored = {id(expected[name]) for name in known}  # tied weights may be stored under one of their names
    missing = sorted(name for name in expected.keys() - state.keys() if id(expected[name]) not in stored)
    reshaped = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(expected[name].shape)} in the model"
        for name in known
        if state[name].shape != expected[name].shape
    ]
    if unknown or missing or reshaped:
        details = [f"unexpected: {', '.join(unknown[:3])}"] * bool(unknown)
        details += [f"missing: {', '.join(missing[:3])}"] * bool(missing) + reshaped[:2]
        raise InputError(
            f"{key}{path} does not match the architecture of the model ({type(model).__name__}): {'; '.join(details)}"
        )
    return state


def load_archive(model: torch.nn.Module, archive: str | Path) -> None:
    """Copy the weights in a `policy.pt` into a model, as `read_archive` allows."""
    expected = model.state_dict()
    with torch.no_grad():
        for name, tensor in read_archive(archive, model).items():
            expected[name].copy_(tensor)  # casts to the model's dtype


def model_digest(model: Any, dtype: str, adapter: str | None = None) -> str:
    """A digest of all that determines a model's log-probabilities.

    These are weights, architecture and compute `dtype`. `adapter` names the adapter that the model computes with; None:
    the digest is that of the base alone.
    """
    varies = ("_name_or_path", "transformers_version")  # between copies of one model
    config = {key: value for key, value in model.config.to_dict().items() if key not in varies}
    digest = hashlib.sha256(json.dumps([dtype, config], sort_keys=True, default=str).encode())
    weights = base_weights(model)
    if adapter:
        weights |= adapter_weights(model, adapter)
        digest.update(f"scaled by {model.peft_config[adapter].lora_alpha / model.peft_config[adapter].r}".encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
