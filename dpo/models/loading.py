"""Loading of a plan's policy and reference, one after the other, so that a host holds at most one whole model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpo.checkpoint.saver import read_frozen_digest
from dpo.errors import InputError, WarningLine
from dpo.models.adapters import POLICY, REFERENCE, add_adapter, base_weights, load_adapter
from dpo.models.logprobs import install_scalar_head
from dpo.models.paths import ModelPath, find_base, locate_weights, resolve_name
from dpo.models.pretrained import (
    DTYPES,
    check_positions,
    hash_weights,
    load_config,
    load_model,
    load_structure,
    model_digest,
    read_archive,
    take_model,
)
from dpo.models.published import check_names, is_text_part
from dpo.models.quantization import quantize
from dpo.parallel.sharding import choose_device_map, find_blocks, list_ties, untie
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.settings.plan import Plan
from dpo.system.waiting import after_rank_0, from_rank_0, is_rank_0

FOLLOWING = "reference"  # the name of the checkpoint's part with a reference that follows the policy


# --- where models are ------------------------------------------------------------------------------------------------


def find_model_config(plan: Plan) -> Any:
    """Load the config of a plan's model, which may be a checkpoint's text part."""
    config = load_config(find_base(plan))
    return config.get_text_config() if is_text_part(config) else config


def make_structure(plan: Plan, dtype: str | None = None, n_blocks: int | None = None) -> Any:
    """Make the model on the meta device, without adapters, by default in the policy's dtype, and with all blocks."""
    return load_structure(
        find_base(plan),
        dtype=DTYPES[dtype or plan.model.policy_dtype],
        attn_implementation=plan.model.attn_implementation,
        n_blocks=n_blocks,
    )


def make_policy_structure(plan: Plan, n_blocks: int | None = None) -> Any:
    """Make the policy on the meta device, quantized and with its adapters, by default with all blocks."""
    adapters: dict = {POLICY: None} if plan.lora else {}
    if plan.reference == "adapter":
        adapters[REFERENCE] = None
    return _prepare(make_structure(plan, n_blocks=n_blocks), plan, adapters)


def find_start(plan: Plan) -> ModelPath:
    """Find the weights or adapter that `model.archive` names; an empty `ModelPath` if that key is not set.

    Raises InputError if they do not exist, or the keys of `lora` do not match.
    """
    archive = plan.model.archive
    if archive is None:
        return ModelPath()
    start = locate_weights(archive)
    if start.adapter is None and plan.reference == "adapter":
        raise InputError(
            f"model.archive={archive} is not an adapter, which lora.reference=adapter needs: name one, or set "
            "lora.reference=base"
        )
    # With lora.reference=base the reference would be the adapter's base alone.
    if start.adapter is not None and (plan.lora is None or plan.reference == "base"):
        keys = "lora=lora lora.reference=adapter" if plan.loss.reference else "lora=lora"
        raise InputError(
            f"model.archive={archive} is an adapter: set {keys}, or merge it first: dpo export "
            f"{archive} DIR --merge, then model.name_or_path=DIR"
        )
    return start


def notes_on_base(plan: Plan) -> list[str]:
    """Return a list with a warning if the adapter that training starts from names another base than the plan."""
    trained_on = find_start(plan).name
    name = plan.model.name_or_path
    if not trained_on or resolve_name(trained_on) == resolve_name(name):
        return []
    return [
        WarningLine(f"model.archive={plan.model.archive} was trained on {trained_on}, and model.name_or_path={name}")
    ]


# --- checking and loading --------------------------------------------------------------------------------------------


def check_model(plan: Plan) -> ModelPath:
    """Check that the model can be trained, else raise InputError; return what training starts from."""
    start = find_start(plan)
    base = find_base(plan)
    if is_text_part(load_config(base)) and not plan.model.random_init and not plan.loss.scalar_head:
        check_names(make_structure(plan), base)
    check_tensor_parallel(find_model_config(plan), plan.dims.tensor_size)
    return start


def check_blocks(plan: Plan, model: Any = None) -> None:
    """Raise InputError if the model, by default the plan's, lacks the blocks that are sharded or compiled."""
    if plan.trainer.multi_process or plan.model.block_name or plan.training.compile:
        find_blocks(model or make_structure(plan), plan.model.block_name)


def check_parts(plan: Plan) -> None:
    """Raise any InputError that loading would raise, without reading the model's own weights."""
    start = check_model(plan)
    structure = make_structure(plan)
    check_positions(structure, plan.data.max_length)
    if start.archive is not None:
        read_archive(start.archive, structure, stays_in_files=True)
    _prepare(structure, plan, {POLICY: start.adapter} if plan.lora else {})  # only for the errors that it raises


def model_loaders(plan: Plan, resume_from: Path | None = None) -> tuple[Callable, Callable | None]:
    """Return a function that loads the policy, and one that loads the separate reference, or None if there is none.

    On rank 0 they load weights; on other ranks they make a model on the meta device.
    """
    policy_archive = reference_archive = check_model(plan).archive
    if resume_from and plan.lora is None:  # a checkpoint with an adapter has no weights of the base
        policy_archive = resume_from
    if resume_from and plan.follow_every:  # a reference that follows the policy is in the checkpoint too
        reference_archive = resume_from / f"{FOLLOWING}.pt"
    # A model that will be sharded or quantized stays on the CPU until then.
    stays_on_cpu = plan.trainer.multi_process or plan.trainer.cuts_layers or plan.quantized
    device_map = None if stays_on_cpu else choose_device_map()

    def load(dtype: str, archive: Path | None) -> Any:
        if not is_rank_0():
            return make_structure(plan, dtype)
        return load_model(
            find_base(plan)._replace(archive=archive),
            dtype=DTYPES[dtype],
            attn_implementation=plan.model.attn_implementation,
            device_map=device_map,
            stays_in_files=plan.trainer.multi_process,
        )

    load_reference_base = None
    if plan.reference == "model":
        load_reference_base = partial(load, plan.reference_dtype, reference_archive)
    return partial(load, plan.model.policy_dtype, policy_archive), load_reference_base


def load_policy(policy: Any, plan: Plan, resume_from: Path | None) -> Any:
    """Load the policy, not yet distributed; `policy` is a model, or a function that loads one.

    Its `frozen_digest` is that of the reference, if its frozen weights are the reference; else, and on all ranks but 0,
    it is None.
    """
    start = find_start(plan) if plan.lora else ModelPath()
    adapters = {POLICY: resume_from or start.adapter} if plan.lora else {}
    if plan.reference == "adapter":
        adapters[REFERENCE] = start.adapter
    is_reference = plan.lora is not None and plan.reference != "model"
    model = _load_on_all_ranks(policy, plan, adapters, resume_from, is_reference=is_reference)
    if plan.lora and (start.archive is not None or not plan.model.random_init):
        base = resolve_name(str(start.archive or plan.model.name_or_path))
        model.adapter_configs[POLICY]["base_model_name_or_path"] = base
    return model


def load_reference(reference: Any, plan: Plan, resume_from: Path | None) -> Any:
    """Load a separate reference, as `load_policy` does; it has no digest if it will follow the policy."""
    directory = find_start(plan).adapter
    adapters = {REFERENCE: directory} if directory else {}
    model = _load_on_all_ranks(reference, plan, adapters, resume_from, is_reference=plan.follow_every is None)
    return model.eval().requires_grad_(False)


def _load_on_all_ranks(
    model_or_loader: Any, plan: Plan, adapters: dict[str, Path | None], resume_from: Path | None, *, is_reference: bool
) -> Any:
    """Load a model on rank 0, then its structure on other ranks, add adapters, and set its `frozen_digest`.

    `model_or_loader` is a model, or a function that loads it. The digest is None unless `is_reference`, and on all
    ranks but 0. Raises InputError if the checkpoint `resume_from` has another one.
    """
    model = model_or_loader
    if not isinstance(model, torch.nn.Module):
        model = after_rank_0("a model's weights", model_or_loader)
    model = take_model(model)
    # Only the tensors of a file tell whether a head is tied, and rank 0 alone reads them.
    untie(model, from_rank_0(list_ties(model)))

    def adapt_and_hash() -> None:
        if POLICY in adapters and is_rank_0():
            model.base_digest = hash_weights(base_weights(model))  # before it is quantized, as an export loads it
        _prepare(model, plan, adapters)
        if plan.training.compile:
            for block in find_blocks(model, plan.model.block_name):
                # Keep dropout out of Inductor's kernels: Triton fails on some that combine dropout and a norm.
                block.compile(dynamic=True, options={"fallback_random": True})
        model.frozen_digest = None
        if not is_reference or not is_rank_0():
            return
        facts = (plan.model.autocast or plan.reference_dtype, REFERENCE if REFERENCE in adapters else None)
        digest = model_digest(model, *facts, with_config=False)
        if resume_from:
            recorded = read_frozen_digest(resume_from)
            if recorded != digest and recorded != model_digest(model, *facts):  # earlier versions hashed the config too
                raise InputError(
                    "the reference or base model has changed since the checkpoint: restore its files "
                    "(model.name_or_path, model.archive), or start a new run"
                )
        model.frozen_digest = digest

    after_rank_0("a model's adapters", adapt_and_hash)
    return model


def _prepare(model: Any, plan: Plan, adapters: dict[str, Path | None]) -> Any:
    """Quantize a model and add adapters, in place, as the plan says, and return the model.

    `adapters` maps names to directories, or to None for a new adapter. Only rank 0 reads the directories, as its
    weights are sent to other ranks later. The first adapter is active.
    """
    if plan.loss.scalar_head:
        install_scalar_head(model)  # `load_model` has done so already, but `model` may be the caller's own
    if plan.quantized:
        quantize(model)
    for name, directory in reversed(adapters.items()):  # reversed, as the last adapter added is active
        lora = plan.lora
        dropout = lora.dropout if name == POLICY else 0.0
        add_adapter(model, lora.r, lora.alpha, lora.target_modules, name=name, dropout=dropout, seed=plan.run.seed)
        if directory is not None and is_rank_0():
            load_adapter(model, directory, name)
    return model
