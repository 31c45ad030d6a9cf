"""Libraries set up, a run's policy and reference loaded and distributed, and the parts of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpo.checkpoint.resume import record_config, record_inputs
from dpo.checkpoint.saver import ModelPart, OptimizerPart, Part, RandomPart, RunState
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.models import adapters
from dpo.models.loading import FOLLOWING, find_following_reference, load_policy, load_reference, model_loaders
from dpo.models.pretrained import DTYPES, check_positions, checkpoint_activations
from dpo.models.weights import load_archive
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import distribute, keep_outputs_where_they_are
from dpo.parallel.state import optimized
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.settings.plan import Plan
from dpo.system.arithmetic import set_up_torch
from dpo.system.host import prepare_transformers
from dpo.system.waiting import after_rank_0
from dpo.training.memory import decide_frozen_weights
from dpo.training.objective import Objective
from dpo.training.optimization import Schedule, make_optimizer
from dpo.training.reference import Reference, ReferenceLogps


def set_up_libraries(plan: Plan, *, bars: bool = True) -> None:
    """Seed random generators, choose kernels, and hide the bars of libraries, which would fill a log."""
    prepare_transformers(plan.run.seed, bars=bars)
    set_up_torch(deterministic=plan.run.deterministic, compiles=plan.training.compile)


def find_models(
    plan: Plan, given: tuple[Any, Any] | None, *, rank: int, resume_from: Path | None
) -> tuple[Any, Any | None]:
    """Policy and reference as models or functions that load one, neither quantized nor with adapters.

    The models `given` get the weights of the checkpoint that a run resumes from, as loaded ones do.
    """
    if given is None:
        if rank == 0:
            print(f"loading the weights of {plan.model.name_or_path}", flush=True)
        return model_loaders(plan, rank=rank, resume_from=resume_from)
    policy, reference = given
    if resume_from is not None and plan.lora is None:  # `make_policy` loads an adapter
        load_archive(policy, str(resume_from))
    saved_reference = find_following_reference(plan, resume_from)
    if reference is not None and saved_reference:
        load_archive(reference, saved_reference)
    return policy, reference


def settle_frozen_weights(plan: Plan, rank: int, log: Callable[[str], None]) -> Plan:
    """Decide how frozen weights are held where the config leaves it open, on rank 0 for all."""
    if plan.fsdp.frozen_weights is not None or not plan.trainer.multi_process:
        return plan
    act = partial(decide_frozen_weights, plan) if rank == 0 else (lambda: plan)
    decided = after_rank_0("the decision on frozen weights", act)
    frozen_weights = from_rank_0(decided.fsdp.frozen_weights)
    if frozen_weights is not None:
        log(f"frozen weights are {frozen_weights} on every process (fsdp_frozen_weights)")
    return replace(plan, fsdp=replace(plan.fsdp, frozen_weights=frozen_weights))


def make_policy(
    plan: Plan, policy: Any, data: TrainingData, mesh: Mesh, *, resume_from: Path | None = None
) -> tuple[Any, str | None]:
    """Load, check and distribute the policy; return it with its frozen weights' digest (`load_policy`)."""
    load = partial(load_policy, policy, plan, rank=mesh.rank, resume_from=resume_from)
    policy, frozen_digest = after_rank_0("the policy's weights", load)
    data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
    check_positions(policy, plan.data.max_length)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    return place(plan, policy, mesh, compute_dtype=DTYPES[plan.compute_dtype]), frozen_digest


def make_reference(
    plan: Plan, reference: Any, policy: Any, frozen_digest: str | None, data: TrainingData, mesh: Mesh
) -> Reference | None:
    """Make the reference of the policy's own module, or of a model that is loaded and distributed."""
    n_rows = int(data.train.counts.sum() + data.test.counts.sum())
    identity = (data.identity, plan.data.max_length, plan.data.max_prompt_length)
    if plan.loss.mismatched:
        n_rows *= 2  # a mismatched example for each example
        identity = (*identity, plan.run.seed)  # mismatched examples depend on the seed
    logps = ReferenceLogps(n_rows, len(plan.loss.reference_columns), repr(identity))
    if plan.reference in ("base", "adapter"):
        adapter = adapters.REFERENCE if plan.reference == "adapter" else None
        return Reference(policy, frozen_digest, logps, adapters.switch(policy, adapter))
    if reference is None:
        if plan.reference == "model":
            raise InputError(f"loss={plan.loss.name} needs a reference model")
        return None
    model, digest = after_rank_0("the reference's weights", partial(load_reference, reference, plan, rank=mesh.rank))
    return Reference(place(plan, model, mesh, compute_dtype=DTYPES[plan.reference_dtype]), digest, logps)


def place(plan: Plan, model: Any, mesh: Mesh, *, compute_dtype: torch.dtype) -> Any:
    """Distribute a loaded model over processes, or over the GPUs of this one."""
    if plan.trainer.multi_process:
        return distribute(
            model,
            mesh,
            block_name=plan.model.block_name,
            compute_dtype=compute_dtype,
            reduce_dtype=DTYPES[plan.fsdp.reduce_dtype],
            reshard_after_forward=plan.fsdp.reshard_after_forward,
            frozen_whole=plan.fsdp.frozen_weights == "whole",
        )
    if plan.trainer.cuts_layers:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        n_slices = plan.run.tensor_parallel_size or len(gpus)
        return split_over_devices(model, gpus[:n_slices] if gpus else ["cpu"] * n_slices)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        keep_outputs_where_they_are(model)
    return model


def make_policy_optimizer(plan: Plan, policy: Any) -> torch.optim.Optimizer:
    """The optimizer of a distributed policy."""
    return make_optimizer(plan.training, optimized(adapters.trained_parameters(policy)))


def describe_run(
    plan: Plan,
    data: TrainingData,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scheduler: Schedule,
    frozen_digest: str | None,
    **states: Any,
) -> tuple[RunState, list[Part], dict[str, Any]]:
    """The counters and states of a run; the parts of its checkpoints, in the order of writing; and their facts."""
    mesh, policy, reference = objective.mesh, objective.policy, objective.reference
    state = RunState(reference, frozen_digest, rank=mesh.rank, objective=objective, **states)
    parts: list[Part] = [adapters.policy_part(policy)]
    if objective.follow_every:  # only then does the reference change
        parts.append(ModelPart(FOLLOWING, reference.model))
    parts += [OptimizerPart(optimizer, mesh), Part("scheduler", scheduler), Part("trainer", state), RandomPart(mesh)]
    return state, parts, {"config": record_config(plan), **record_inputs(data, policy.config)}
