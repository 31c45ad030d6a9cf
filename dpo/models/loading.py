"""Loading of a plan's policy and reference.

One at a time: a host holds at most one whole model before it is distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpo.errors import InputError
from dpo.models.adapters import (
    CONFIG,
    POLICY,
    REFERENCE,
    add_adapter,
    find_adapter,
    load_adapter,
    make_adapter_config,
    read_adapter,
)
from dpo.models.pretrained import DTYPES, check_positions, load_config, load_model, load_structure
from dpo.models.quantization import quantize
from dpo.models.weights import Weights, locate_weights, model_digest, read_archive
from dpo.parallel.sharding import choose_device_map, find_blocks
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.settings.plan import Plan

FOLLOWING = "reference"  # the part of a checkpoint with a reference that follows the policy


# --- where models are ------------------------------------------------------------------------------------------------


def find_source(plan: Plan) -> dict[str, Any]:
    """The arguments of `load_config` and `load_model` that name the model."""
    model = plan.model
    return {"name": model.name_or_path, "cache_dir": plan.run.cache_dir, "trust_remote_code": model.trust_remote_code}


def resolve_place(name: str) -> str:
    """A Hub id unchanged, or an absolute path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name  # without links: LATEST will point elsewhere later


def find_model_config(plan: Plan) -> Any:
    return load_config(**find_source(plan))


def find_structure(plan: Plan, dtype: str) -> Any:
    attention = plan.model.attn_implementation
    return load_structure(**find_source(plan), dtype=DTYPES[dtype], attn_implementation=attention)


def find_policy_structure(plan: Plan, dtype: str) -> Any:
    """The policy without its weights, but quantized and with its adapters."""
    policy = find_structure(plan, dtype)
    if plan.quantized:
        quantize(policy)
    adapters = [POLICY, REFERENCE] if plan.reference == "adapter" else [POLICY]
    _add_adapters(policy, plan, dict.fromkeys(adapters if plan.lora else ()))
    return policy


def find_weights(plan: Plan) -> Weights:
    """The weights that `model.archive` names.

    Raises InputError if there are none, or the `lora` keys do not match.
    """
    archive = plan.model.archive
    if archive is None:
        return Weights()
    if plan.reference == "adapter" and os.path.exists(os.path.expanduser(archive)) and find_adapter(archive) is None:
        raise InputError(
            f"model.archive={archive} is not an adapter, which lora.reference=adapter needs: give a run of lora=lora, "
            f"or choose lora.reference=base"
        )
    weights = locate_weights(archive)
    merge = f"merge it first: python -m scripts.export {archive} DIR --merge, then model.name_or_path=DIR"
    if weights.adapter is not None and plan.lora is None:
        choose = "choose lora=lora" + " lora.reference=adapter" * plan.loss.reference
        raise InputError(f"model.archive={archive} is an adapter: {choose}, or {merge}")
    if weights.adapter is not None and plan.reference == "base":
        raise InputError(
            f"model.archive={archive} is an adapter, and with lora.reference=base the reference would be its base, "
            f"without it: choose lora.reference=adapter, or {merge}"
        )
    if weights.archive is not None and not weights.archive.is_file():
        config = weights.adapter / CONFIG
        raise InputError(f"{weights.archive}, the base of {weights.adapter}, is not there: name it in {config}")
    return weights


def notes_on_base(plan: Plan) -> list[str]:
    """A warning if the adapter of `model.archive` names another base."""
    adapter, name = find_adapter(plan.model.archive), plan.model.name_or_path
    base = adapter and locate_weights(adapter).base
    if base is None or resolve_place(base) == resolve_place(name):
        return []
    return [f"warning: {adapter} was trained on {base}, and model.name_or_path={name}: make sure that it is the same"]


def find_following(plan: Plan, resume_from: Path | None) -> Path | None:
    """The file with a resumed run's reference, if that follows the policy."""
    return resume_from / f"{FOLLOWING}.pt" if resume_from is not None and plan.follow_every else None


# --- checking and loading --------------------------------------------------------------------------------------------


def check_model(plan: Plan) -> Weights:
    """`find_weights`, and InputError for a model that cannot be cut."""
    weights = find_weights(plan)
    check_tensor_parallel(find_model_config(plan), plan.dims.tensor_size)
    return weights


def check_parts(plan: Plan) -> None:
    """Raise the InputErrors of loading, without reading the model's own weights."""
    weights = check_model(plan)
    structure = find_structure(plan, plan.model.policy_dtype)
    if plan.model.block_name:
        find_blocks(structure, plan.model.block_name)
    check_positions(structure, plan.data.max_length)
    if weights.archive is not None:
        read_archive(weights.archive, structure)
    if plan.quantized:
        quantize(structure)
    if plan.lora is not None:
        _add_adapters(structure, plan, {POLICY: weights.adapter})


def model_loaders(
    plan: Plan, *, rank: int = 0, resume_from: Path | None = None
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Functions that load policy and reference, neither quantized nor with adapters.

    The second is None if the reference needs no separate model. Ranks other than 0 load no weights. Raises
    InputError as `check_model` does.
    """
    archive = check_model(plan).archive
    # a model that will be sharded or quantized stays on the CPU until then
    stays_on_cpu = plan.trainer.multi_process or plan.trainer.cuts_layers or plan.quantized
    device_map = None if stays_on_cpu else choose_device_map(plan.gpus)

    def load(dtype: str, archive: Path | None) -> Any:
        if rank != 0:
            return find_structure(plan, dtype)
        return load_base(plan, DTYPES[dtype], archive, device_map=device_map)

    policy_archive = resume_from if resume_from and plan.lora is None else archive  # an adapter keeps its base
    policy = partial(load, plan.model.policy_dtype, policy_archive)
    reference = partial(load, plan.reference_dtype, find_following(plan, resume_from) or archive)
    return policy, reference if plan.reference == "model" else None


def load_base(
    plan: Plan,
    dtype: torch.dtype | None,
    archive: Path | None,
    *,
    attn_implementation: str | None = None,
    device_map: str | dict | None = None,
) -> Any:
    """Load a plan's model in one process, without adapters.

    `dtype` None is that of the model's own config; `attn_implementation` None, the plan's.
    """
    source = find_source(plan)
    return load_model(
        **source,
        dtype=dtype or load_config(**source).dtype or torch.float32,
        attn_implementation=attn_implementation or plan.model.attn_implementation,
        archive=archive,
        random_init=plan.model.random_init,
        seed=plan.run.seed,
        device_map=device_map,
    )


def load_policy(policy: Any, plan: Plan, *, rank: int, resume_from: Path | None) -> tuple[Any, str | None]:
    """The policy, ready for training except for its distribution, and a digest.

    `policy` is a model or a function that loads it. The digest is that of the frozen weights in it: the reference, or
    its base if there is none. It is None without an adapter, if the reference is a separate model, and on ranks other
    than 0.
    """
    if plan.lora is None:
        return _prepare(policy, plan, {}, rank=rank), None
    weights = find_weights(plan)
    adapters = {POLICY: resume_from or weights.adapter}
    if plan.reference == "adapter":
        adapters[REFERENCE] = weights.adapter
    model = _prepare(policy, plan, adapters, rank=rank)
    model.peft_config[POLICY].base_model_name_or_path = _name_base(plan, weights)
    if rank != 0 or plan.reference == "model":
        return model, None
    return model, digest_reference(model, plan, REFERENCE if REFERENCE in adapters else None)


def load_reference(model: Any, plan: Plan, *, rank: int) -> tuple[Any, str | None]:
    """A separate reference, and on rank 0 its digest.

    There is no digest of one that follows the policy.
    """
    adapter = find_weights(plan).adapter
    name = None if adapter is None else REFERENCE
    model = _prepare(model, plan, {} if adapter is None else {REFERENCE: adapter}, rank=rank)
    model.eval().requires_grad_(False)
    return model, digest_reference(model, plan, name) if rank == 0 and plan.follow_every is None else None


def digest_reference(model: Any, plan: Plan, adapter: str | None) -> str:
    """The digest of a run's reference, which reads all its weights."""
    return model_digest(model, plan.model.autocast or plan.reference_dtype, adapter)


def unwrap(model: Any) -> Any:
    """Remove DataParallel and DistributedDataParallel wrappers: trainers distribute models themselves."""
    while isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def _prepare(model: Any, plan: Plan, adapters: dict[str, Path | None], *, rank: int) -> Any:
    """Quantize, adapt and compile a model as the plan says.

    `model` may be a function that loads it. `adapters` maps names to directories in PEFT's format, or to None for a new
    adapter; only rank 0 reads them. Raises InputError if there is no block of the class that the plan names, even if
    blocks are not needed.
    """
    model = unwrap(model) if isinstance(model, torch.nn.Module) else model()
    if plan.quantized:
        device = "cuda" if plan.gpus else None
        quantize(model, device=device)
        if device and not plan.trainer.multi_process:
            model.to(device)  # the layers that are not quantized
    _add_adapters(model, plan, adapters if rank == 0 else dict.fromkeys(adapters))  # rank 0 sends the weights
    if plan.model.block_name or plan.training.compile:
        for block in find_blocks(model, plan.model.block_name):
            if plan.training.compile:
                block.compile(dynamic=True)
    return model


def _add_adapters(model: Any, plan: Plan, adapters: dict[str, Path | None]) -> None:
    """Add adapters, of which the first becomes the active one.

    Raises InputError if one in a directory does not fit, or has another r or alpha than the plan.
    """
    lora: Any = plan.lora
    for name, directory in reversed(adapters.items()):
        config = make_adapter_config(lora.r, lora.alpha, lora.target_modules)
        add_adapter(model, config, name=name, dropout=lora.dropout if name == POLICY else 0.0, seed=plan.run.seed)
        if directory is not None:
            stored = read_adapter(directory)
            sizes = {"r": (stored.r, lora.r), "alpha": (stored.alpha, lora.alpha)}
            if differs := [f"lora.{key}={was}" for key, (was, now) in sizes.items() if was != now]:
                raise InputError(f"{stored.directory} is an adapter of another size: give {' '.join(differs)}")
            load_adapter(model, stored, name)


def _name_base(plan: Plan, weights: Weights) -> str | None:
    """A lasting name for an adapter's base, unless drawn from a seed."""
    if weights.archive is not None:
        return resolve_place(str(weights.archive))
    return None if plan.model.random_init else resolve_place(plan.model.name_or_path)
