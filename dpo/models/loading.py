"""Loads the models that a config names, one at a time, so that no host holds two before they are distributed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dpo.models.pretrained import DTYPES, check_positions, load_config, load_model, load_structure
from dpo.models.weights import model_digest, read_archive
from dpo.parallel.device_map import choose_device_map
from dpo.parallel.sharding import find_blocks
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.settings.plan import Plan
from dpo.system.paths import get_cache_dir


def source_of(config: DictConfig) -> dict[str, Any]:
    """The arguments of `load_config` and its siblings that say where the model comes from."""
    model = config.model
    return {
        "name": model.name_or_path,
        "cache_dir": get_cache_dir(config.local_dirs),
        "trust_remote_code": model.trust_remote_code,
    }


def find_model_config(config: DictConfig) -> Any:
    """The model's transformers config. Raises InputError if it cannot be loaded."""
    return load_config(**source_of(config))


def find_structure(config: DictConfig, dtype: str, device: str = "meta") -> Any:
    """The model without its weights."""
    attention = config.model.attn_implementation
    return load_structure(**source_of(config), dtype=DTYPES[dtype], attn_implementation=attention, device=device)


def check_model(config: DictConfig, plan: Plan) -> None:
    """Raises InputError for a model that cannot be loaded, or whose layers cannot be sharded as configured."""
    check_tensor_parallel(find_model_config(config), plan.dims.tensor_size)


def check_parts(config: DictConfig, plan: Plan) -> None:
    """Raises the InputErrors of loading that can be found without reading the model's own weights."""
    check_model(config, plan)
    model, structure = config.model, find_structure(config, config.model.policy_dtype)
    if model.block_name:
        find_blocks(structure, model.block_name)
    check_positions(structure, config.max_length)
    if model.archive is not None:
        read_archive(model.archive, structure)


def model_loaders(
    config: DictConfig, plan: Plan, *, rank: int = 0, resume_from: Path | None = None
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Functions that load the policy and the reference (None if the loss needs none).

    Ranks other than 0 load no weights. Raises InputError as `check_model` does.
    """
    check_model(config, plan)
    # a model that is to be sharded stays on the CPU until then
    whole = not (plan.trainer.multi_process or plan.trainer.cuts_layers)
    device_map = choose_device_map(plan.gpus) if whole else None

    def load(dtype: str, archive: str | None) -> Any:
        if rank != 0:
            return find_structure(config, dtype)
        return load_model(
            **source_of(config),
            dtype=DTYPES[dtype],
            attn_implementation=config.model.attn_implementation,
            archive=archive,
            random_init=config.model.random_init,
            seed=config.seed,
            device_map=device_map,
        )

    archive = config.model.archive
    policy = partial(load, config.model.policy_dtype, archive if resume_from is None else str(resume_from))
    reference = partial(load, plan.reference_dtype, archive)
    return policy, reference if plan.loss.reference else None


def loaded(model: Any, config: DictConfig) -> Any:
    """A model, or the one that a function loads; its blocks compiled if the config says so.

    Raises InputError if it has no block of the class that the config names, even if blocks are not needed.
    """
    model = model if isinstance(model, torch.nn.Module) else model()
    blocks = find_blocks(model, config.model.block_name) if config.model.block_name or config.compile else []
    for block in blocks if config.compile else []:
        block.compile(dynamic=True)
    return model


def loaded_reference(model: Any, config: DictConfig, plan: Plan, *, with_digest: bool) -> tuple[Any, str | None]:
    """The frozen reference, and its digest if wanted, which takes a pass over its weights."""
    model = loaded(model, config).eval()
    return model, model_digest(model, plan.autocast or plan.reference_dtype) if with_digest else None
