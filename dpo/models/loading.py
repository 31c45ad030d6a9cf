"""Loading of a config's models, one at a time, so that no host holds two before they are distributed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpo.errors import InputError
from dpo.models.adapters import (
    CONFIG,
    POLICY,
    REFERENCE,
    add_adapter,
    find_adapter,
    find_base,
    load_adapter,
    make_adapter_config,
    read_adapter,
)
from dpo.models.pretrained import DTYPES, check_positions, load_config, load_model, load_structure
from dpo.models.quantization import quantize
from dpo.models.weights import find_archive, model_digest, read_archive
from dpo.parallel.sharding import choose_device_map, find_blocks
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.settings.plan import AdapterPlan, Plan

FOLLOWING = "reference"  # the part of a checkpoint with a reference that follows the policy


def find_source(plan: Plan) -> dict[str, Any]:
    """The arguments of `load_config`, `load_model` and so on that say where the model comes from."""
    model = plan.model
    return {
        "name": model.name_or_path,
        "cache_dir": plan.run.cache_dir,
        "trust_remote_code": model.trust_remote_code,
    }


def resolve_place(name: str) -> str:
    """A Hub id unchanged, or a path made absolute, without links, as LATEST will point elsewhere later."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def find_model_config(plan: Plan) -> Any:
    """The model's transformers config. Raises InputError if it cannot be loaded."""
    return load_config(**find_source(plan))


def find_structure(plan: Plan, dtype: str) -> Any:
    """The model without its weights."""
    attention = plan.model.attn_implementation
    return load_structure(**find_source(plan), dtype=DTYPES[dtype], attn_implementation=attention)


def find_policy_structure(plan: Plan, dtype: str) -> Any:
    """The policy without its weights, quantized if the plan says so, with its adapters in float32."""
    policy = find_structure(plan, dtype)
    if plan.quantized:
        quantize(policy)
    if plan.lora is not None:
        names = [POLICY, REFERENCE] if plan.reference == "adapter" else [POLICY]
        _add_adapters(policy, plan.lora, names, seed=plan.run.seed)
    return policy


class Weights(NamedTuple):
    """The sources of a model's weights."""

    base: str | None  # a policy.pt with all weights; None: those of model.name_or_path
    adapter: Path | None  # a directory in PEFT's format

    @classmethod
    def of(cls, archive: str | None) -> Weights:
        """The weights that `model.archive` names; an adapter trained on a `policy.pt` names that as its base."""
        adapter = find_adapter(archive)
        if adapter is None:
            return cls(archive, None)
        base = find_base(adapter).archive
        if base is not None and not base.is_file():
            raise InputError(f"{base}, the base of {adapter}, is not there: name it in {adapter / CONFIG}")
        return cls(base and str(base), adapter)


def find_weights(plan: Plan) -> Weights:
    """The weights that `model.archive` names. Raises InputError if it and the `lora` keys do not match."""
    weights, archive = Weights.of(plan.model.archive), plan.model.archive
    merge = f"merge it first: python -m scripts.export {archive} DIR --merge, then model.name_or_path=DIR"
    if weights.adapter is not None and plan.lora is None:
        choose = "choose lora=lora" + " lora.reference=adapter" * plan.loss.reference
        raise InputError(f"model.archive={archive} is an adapter: {choose}, or {merge}")
    if weights.adapter is not None and plan.reference == "base":
        raise InputError(
            f"model.archive={archive} is an adapter, and with lora.reference=base the reference would be its base, "
            f"without it: choose lora.reference=adapter, or {merge}"
        )
    if weights.adapter is None and plan.reference == "adapter":
        if not Path(archive).expanduser().exists():
            raise InputError(f"model.archive={archive} does not exist")
        raise InputError(
            f"model.archive={archive} is not an adapter, which lora.reference=adapter needs: give a run of lora=lora, "
            f"or choose lora.reference=base"
        )
    if weights.base is not None:
        find_archive(weights.base)
    return weights


def notes_on_base(plan: Plan) -> list[str]:
    """A warning if the adapter of `model.archive` names another base than the model, maybe a copy of it."""
    adapter, name = find_adapter(plan.model.archive), plan.model.name_or_path
    base = adapter and find_base(adapter).name
    if base is None or resolve_place(base) == resolve_place(name):
        return []
    return [f"warning: {adapter} was trained on {base}, and model.name_or_path={name}: make sure that it is the same"]


def check_model(plan: Plan) -> Weights:
    """`find_weights`. Raises InputError for a model that cannot be loaded, or whose layers cannot be sharded."""
    weights = find_weights(plan)
    check_tensor_parallel(find_model_config(plan), plan.dims.tensor_size)
    return weights


def check_parts(plan: Plan) -> None:
    """Raises the InputErrors of loading, as far as possible without reading the model's own weights."""
    weights = check_model(plan)
    model, structure = plan.model, find_structure(plan, plan.model.policy_dtype)
    if model.block_name:
        find_blocks(structure, model.block_name)
    check_positions(structure, plan.data.max_length)
    if weights.base is not None:
        read_archive(weights.base, structure)
    if plan.lora is not None:
        _add_adapters(quantize(structure) if plan.quantized else structure, plan.lora, [POLICY], seed=plan.run.seed)
        if weights.adapter is not None:
            _load(structure, weights.adapter, plan.lora, POLICY)


def model_loaders(
    plan: Plan, *, rank: int = 0, resume_from: Path | None = None
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Functions that load policy and reference, neither quantized nor with adapters.

    The second is None if the reference needs no separate model. Ranks other than 0 load no weights. Raises
    InputError as `check_model` does.
    """
    base = check_model(plan).base
    # a model that will be sharded or quantized stays on the CPU until then
    whole = not (plan.trainer.multi_process or plan.trainer.cuts_layers or plan.quantized)
    device_map = choose_device_map(plan.gpus) if whole else None

    def load(dtype: str, archive: str | None) -> Any:
        if rank != 0:
            return find_structure(plan, dtype)
        return load_model(
            **find_source(plan),
            dtype=DTYPES[dtype],
            attn_implementation=plan.model.attn_implementation,
            archive=archive,
            random_init=plan.model.random_init,
            seed=plan.run.seed,
            device_map=device_map,
        )

    resumes = resume_from is not None and plan.lora is None
    policy = partial(load, plan.model.policy_dtype, str(resume_from) if resumes else base)
    reference = partial(load, plan.reference_dtype, find_following(plan, resume_from) or base)
    return policy, reference if plan.reference == "model" else None


def find_following(plan: Plan, resume_from: Path | None) -> str | None:
    """The file with a resumed run's reference, if that follows the policy; else None."""
    return str(resume_from / f"{FOLLOWING}.pt") if resume_from is not None and plan.follow_every else None


def load_policy(policy: Any, plan: Plan, *, rank: int, resume_from: Path | None) -> tuple[Any, str | None]:
    """The policy, given or loaded by a function, with the config's adapters and compiled blocks, and a digest.

    The digest is that of the frozen weights in it: the reference, or its base if there is none. It is None without an
    adapter, if the reference is a separate model, and on ranks other than 0.
    """
    model, digest = make_model(policy, plan), None
    if plan.lora is not None:
        weights = find_weights(plan)
        sources = {POLICY: resume_from or weights.adapter}
        if plan.reference == "adapter":
            sources[REFERENCE] = weights.adapter
        _add_adapters(model, plan.lora, list(sources), seed=plan.run.seed)
        model.peft_config[POLICY].base_model_name_or_path = _name_base(plan, weights)
        for name, source in sources.items():
            if source is not None and rank == 0:  # rank 0 sends them to the others
                _load(model, source, plan.lora, name)
        if rank == 0 and plan.reference != "model":
            frozen = REFERENCE if REFERENCE in sources else None
            digest = model_digest(model, plan.model.autocast or plan.reference_dtype, frozen)
    return compile_blocks(model, plan), digest


def load_reference(model: Any, plan: Plan, *, rank: int) -> tuple[Any, str | None]:
    """The reference, given or loaded by a function, and on rank 0 its digest unless it follows the policy.

    The digest costs a pass over its weights.
    """
    model = make_model(model, plan).eval()
    adapter = find_weights(plan).adapter
    if adapter is not None:
        _add_adapters(model, plan.lora, [REFERENCE], seed=plan.run.seed)
        if rank == 0:
            _load(model, adapter, plan.lora, REFERENCE)
    name = None if adapter is None else REFERENCE
    is_frozen = plan.follow_every is None
    digest = model_digest(model, plan.model.autocast or plan.reference_dtype, name) if rank == 0 and is_frozen else None
    return compile_blocks(model, plan), digest


def _name_base(plan: Plan, weights: Weights) -> str | None:
    """A lasting name for the base of an adapter: a Hub id or an absolute path; None if drawn from the seed."""
    if weights.base is not None:
        return resolve_place(str(find_archive(weights.base)))
    return None if plan.model.random_init else resolve_place(plan.model.name_or_path)


def unwrap(model: Any) -> Any:
    """Remove DataParallel and DistributedDataParallel wrappers: trainers distribute models themselves."""
    while isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def make_model(model: Any, plan: Plan) -> Any:
    """A model, given or loaded by a function, quantized (on a GPU if there is one) if the config says so."""
    model = unwrap(model) if isinstance(model, torch.nn.Module) else model()
    if plan.quantized:
        device = "cuda" if plan.gpus else None
        quantize(model, device=device)
        if device and not plan.trainer.multi_process:  # move the rest too
            model.to(device)
    return model


def compile_blocks(model: Any, plan: Plan) -> Any:
    """The model, with its blocks compiled if the config says so.

    Raises InputError if it has no block of the class that the config names, even if blocks are not needed.
    """
    blocks = find_blocks(model, plan.model.block_name) if plan.model.block_name or plan.training.compile else []
    for block in blocks if plan.training.compile else []:
        block.compile(dynamic=True)
    return model


def _add_adapters(model: Any, lora: AdapterPlan, names: list[str], *, seed: int) -> None:
    """Add new adapters; the first becomes the active one."""
    for name in reversed(names):
        add_adapter(
            model,
            make_adapter_config(lora.r, lora.alpha, lora.target_modules),
            name=name,
            dropout=lora.dropout if name == POLICY else 0.0,
            seed=seed,
        )


def _load(model: Any, source: Path, lora: AdapterPlan, name: str) -> None:
    """Load the adapter in a directory. Raises InputError if its r or alpha differs from the config's."""
    stored = read_adapter(source)
    stored_sizes = {"r": (stored.config.r, lora.r), "alpha": (stored.config.lora_alpha, lora.alpha)}
    if differs := [f"lora.{key}={was}" for key, (was, now) in stored_sizes.items() if was != now]:
        raise InputError(f"{stored.directory} is an adapter of another size: give {' '.join(differs)}")
    load_adapter(model, stored, name)
