"""The parts of a trainer, made in their order."""

from pathlib import Path
from typing import Any

from dpo.checkpoint.saver import Checkpoints, ModelPart, OptimizerPart, Part, RandomPart, RunState
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.models.adapters import REFERENCE, policy_part, switch
from dpo.models.loading import FOLLOWING, load_policy, load_reference, model_loaders
from dpo.models.pretrained import DTYPES, check_positions, checkpoint_activations, refuse_offloading, unwrap
from dpo.models.weights import load_archive
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.reporting.events import Callbacks, RunContext
from dpo.reporting.table import list_callbacks
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.system.arithmetic import set_up_torch
from dpo.system.host import GPU
from dpo.training.batches import Batches
from dpo.training.evaluation import Evaluator
from dpo.training.memory import decide_frozen_weights
from dpo.training.objective import make_objective
from dpo.training.online import OnlineBatches
from dpo.training.optimization import Schedule, make_optimizer
from dpo.training.reference import Reference, ReferenceLogps
from dpo.training.stop import StopRequest


def make_parts(
    plan: Plan, data: TrainingData, models: tuple | None, *, rank: int, resume_from: Path | None = None
) -> tuple:
    """What a `Trainer` uses, in the order of its fields; of the `models` given, or of those that the plan names."""
    set_up_torch(deterministic=plan.run.deterministic, compiles=plan.training.compile)
    progress = Progress(plan, silent=rank != 0)
    mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
    frozen_whole = place_frozen_weights(plan, mesh, progress)
    policy, reference = load_models(plan, models, progress, rank=rank, resume_from=resume_from)
    policy, digest = make_policy(plan, policy, data, mesh, frozen_whole, resume_from=resume_from)
    reference = make_reference(plan, reference, policy, digest, data, mesh, frozen_whole)
    objective = make_objective(plan, policy, reference, data, mesh)
    optimizer = make_optimizer(plan.training, policy)
    scheduler = Schedule(plan.training, optimizer, updates=data.report.updates, data_size=mesh.data_size)
    stop = StopRequest(mesh)
    if plan.online:
        batches = OnlineBatches(plan, data, objective, stop, progress)
    else:
        batches = Batches(plan, data, objective.layout, rank=mesh.data_rank, size=mesh.data_size)
    evaluator, run_dir = Evaluator(objective, batches, progress, stop), Path(plan.run.local_run_dir)
    checkpoints = Checkpoints(
        run_dir, mesh, keep=evaluator.interval.keep, log=progress.line, n_evaluated=evaluator.n_examples
    )
    context = RunContext(plan, run_dir, mesh.rank, data, progress.line, policy)
    callbacks = Callbacks(list_callbacks(), context, terminal=progress)
    state = RunState(
        reference,
        digest,
        objective=objective,
        loss_scale=objective.loss_scale,
        **batches.states,
        checkpoints=checkpoints,
        callbacks=callbacks,
    )
    parts = [policy_part(policy)]  # a checkpoint's, in the order of writing
    if reference and plan.follow_every:  # the reference is saved only if it changes
        parts.append(ModelPart(FOLLOWING, reference.model))
    parts += [OptimizerPart(optimizer, mesh), Part("scheduler", scheduler), Part("trainer", state), RandomPart(mesh)]
    trained = (plan, data, objective, optimizer, scheduler, batches, evaluator)
    return *trained, checkpoints, callbacks, state, parts, progress, stop


def place_frozen_weights(plan: Plan, mesh: Mesh, progress: Progress) -> bool:
    """Whether frozen weights are whole on every process: if they fit on each, as GPUs may be in use by others."""
    frozen = decide_frozen_weights(plan)
    if mesh.any(frozen == "sharded"):
        frozen = "sharded"
    if frozen != plan.fsdp.fsdp_frozen_weights:
        progress.line(f"frozen weights are {frozen} on every process (fsdp_frozen_weights)")
    return frozen == "whole"


def load_models(plan: Plan, given: tuple | None, progress: Progress, rank: int, resume_from: Path | None) -> tuple:
    """Policy and separate reference: those given, with a checkpoint's weights, or functions that load them."""
    if given is None:
        stored = resume_from or plan.model.archive or (not plan.model.random_init and plan.model.name_or_path)
        progress.line(f"loading the weights of {stored}" if stored else "drawing random weights")
        return model_loaders(plan, rank=rank, resume_from=resume_from)
    policy, reference = given
    if resume_from is not None and plan.lora is None:  # `make_policy` loads an adapter
        load_archive(unwrap(policy), resume_from)
    if resume_from is not None and reference is not None and plan.follow_every:
        load_archive(unwrap(reference), resume_from / f"{FOLLOWING}.pt")
    return policy, reference


def make_policy(
    plan: Plan, policy: Any, data: TrainingData, mesh: Mesh, frozen_whole: bool, resume_from: Path | None
) -> tuple[Any, str | None]:
    """The loaded and distributed policy, and its frozen weights' digest (`load_policy`)."""
    policy, frozen_digest = load_policy(policy, plan, rank=mesh.rank, resume_from=resume_from)
    data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
    check_positions(policy, plan.data.max_length)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    return place(plan, policy, mesh, frozen_whole, plan.compute_dtype), frozen_digest


def make_reference(
    plan: Plan,
    reference: Any,
    policy: Any,
    frozen_digest: str | None,
    data: TrainingData,
    mesh: Mesh,
    frozen_whole: bool,
) -> Reference | None:
    n_rows = int(data.train.counts.sum() + data.test.counts.sum())
    identity = (data.identity, plan.data.max_length, plan.data.max_prompt_length)
    if plan.loss.mismatched:
        n_rows *= 2  # a mismatched example for each example
        identity = (*identity, plan.run.seed)  # mismatched examples depend on the seed
    logps = ReferenceLogps(n_rows, len(plan.loss.reference_columns), repr(identity))
    if plan.reference in ("base", "adapter"):
        adapter = REFERENCE if plan.reference == "adapter" else None
        return Reference(policy, frozen_digest, logps, switch(policy, adapter))
    if reference is None:
        if plan.reference == "model":
            raise InputError(f"loss={plan.loss.name} needs a reference model")
        return None
    model, digest = load_reference(reference, plan, rank=mesh.rank)
    return Reference(place(plan, model, mesh, frozen_whole, plan.reference_dtype), digest, logps)


def place(plan: Plan, model: Any, mesh: Mesh, frozen_whole: bool, compute_dtype: str) -> Any:
    """Distribute a loaded model over processes, or over the GPUs of this one."""
    if plan.trainer.multi_process:
        return distribute(
            model,
            mesh,
            block_name=plan.model.block_name,
            compute_dtype=DTYPES[compute_dtype],
            reduce_dtype=DTYPES[plan.fsdp.fsdp_reduce_dtype],
            reshard_after_forward=plan.fsdp.fsdp_reshard_after_forward,
            frozen_whole=frozen_whole,
        )
    if plan.trainer.cuts_layers:
        gpus = [f"{GPU}:{i}" for i in range(plan.gpus)]
        n_slices = plan.run.tensor_parallel_size or len(gpus)
        return split_over_devices(model, gpus[:n_slices] if gpus else ["cpu"] * n_slices)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        refuse_offloading(model)
        from accelerate.hooks import remove_hook_from_module  # transformers needed it to place the layers

        # accelerate would move the logits of all tokens back to the first GPU; the model's parts keep their hooks
        remove_hook_from_module(model)
    return model
