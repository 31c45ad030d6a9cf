"""Files with a model's weights, of this project or the reference code, read without running code; digests of models."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpo.checkpoint.files import read_state
from dpo.checkpoint.shards import SplitTensor
from dpo.errors import InputError
from dpo.models.adapters import POLICY, adapter_weights, base_weights
from dpo.models.logprobs import HEAD_WEIGHT, LM_HEAD, find_scalar_head
from dpo.models.paths import find_archive
from dpo.models.published import Tensors
from dpo.parallel.sharding import read_weight

# Transformers stored these buffers in 2023, and computes them today.
OBSOLETE_BUFFER = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|embed_positions)$|\.rotary_emb\.\w+$")
RENAMED = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's head, by its name in 2023


def read_archive(archive: str | Path, model: torch.nn.Module, *, stays_in_files: bool = False) -> Tensors:
    """Read the weights in a `policy.pt`, by today's names; InputError if they do not fit `model`.

    The weights of a language model, without a scalar head, fit a reward model, too. With `stays_in_files`, tensors of a
    sharded checkpoint are joined only when something is computed with them.
    """
    path = find_archive(archive)
    state = read_state(path)
    if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
        raise InputError(f"{path} is not a policy.pt: its 'state' does not map names to tensors")
    expected = model.state_dict(keep_vars=True)
    named = {}
    for name, tensor in state.items():
        if name not in expected:
            name = RENAMED.get(str(name), str(name))
        if name in expected or not OBSOLETE_BUFFER.search(name):
            named[name] = tensor
    if find_scalar_head(model) is not None and HEAD_WEIGHT not in named:  # the weights of a language model
        named = {name: tensor for name, tensor in named.items() if name not in LM_HEAD}
        del expected[HEAD_WEIGHT]
    # Tied weights are one object with several names in the model, and a file may have any of these names.
    in_file = {expected.get(name) for name in named}  # the model's weights for which the file has a value
    problems = [f"it lacks {name}" for name, weight in expected.items() if weight not in in_file]
    for name, tensor in named.items():
        if name not in expected:
            problems.append(f"{name} is not in the model")
        elif tensor.shape != expected[name].shape:
            problems.append(f"{name} has another shape")
    if problems:
        raise InputError(f"{path} does not fit the model ({type(model).__name__}): {'; '.join(problems[:5])}")
    if stays_in_files:
        return named
    return {name: tensor.join() if isinstance(tensor, SplitTensor) else tensor for name, tensor in named.items()}


def load_archive(model: torch.nn.Module, archive: str | Path) -> None:
    """Copy the weights in a `policy.pt` into a model; InputError if they do not fit."""
    model.load_state_dict(read_archive(archive, model), strict=False)  # a file may lack names of tied weights


def model_digest(model: Any, dtype: str, adapter: str | None = None, *, with_config: bool = True) -> str:
    """Hash what determines log-probabilities: weights, config, compute `dtype`, the `adapter` in use.

    Without the config, whose keys differ between versions of transformers, `check_inputs` has to compare it.
    """
    config = {}
    if with_config:
        config = model.config.to_dict()
        for key in ("_name_or_path", "transformers_version"):  # differ between copies of a model
            config.pop(key, None)
    facts = json.dumps([dtype, config], sort_keys=True, default=str)
    weights = base_weights(model)
    # A scalar head that is trained with the policy's adapter is not part of the base.
    if HEAD_WEIGHT in adapter_weights(model, POLICY):
        del weights[HEAD_WEIGHT]
    if adapter:
        weights |= adapter_weights(model, adapter)
        adapter_config = model.adapter_configs[adapter]
        facts += f"scaled by {adapter_config['lora_alpha'] / adapter_config['r']}"
    return hash_weights(weights, facts)


def hash_weights(weights: Tensors, facts: str = "") -> str:
    """Hash weights and `facts`; the config is left out, as its keys differ between versions of transformers."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(read_weight(tensor).cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
