"""What a trainer is made of: models, batches, checkpoints and the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpo.checkpoint.resume import config_for_manifest, inputs_for_manifest
from dpo.checkpoint.saver import Checkpoints, ModelPart, OptimizerPart, Part, RandomPart, RunState
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.models.adapters import REFERENCE, make_adapter_context, policy_part
from dpo.models.loading import FOLLOWING, load_policy, load_reference, model_loaders
from dpo.models.pretrained import (
    DTYPES,
    check_positions,
    checkpoint_activations,
    load_archive,
    refuse_offloading,
    unwrap,
)
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import distribute
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.reporting.events import Callbacks, RunContext
from dpo.reporting.table import list_callbacks
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan
from dpo.system.arithmetic import set_up_torch
from dpo.system.host import GPU
from dpo.system.run_directory import read_run_facts
from dpo.system.waiting import from_rank_0
from dpo.training.batches import Batches
from dpo.training.evaluation import Evaluator
from dpo.training.memory import decide_frozen_weights
from dpo.training.objective import Reference, ReferenceLogps, make_objective
from dpo.training.online import OnlineBatches, Sampler, StopRequest
from dpo.training.optimization import Schedule, make_optimizer


class TrainerParts(RunState):
    """The parts of a trainer, which are made in an order in which each needs only earlier ones."""

    def __init__(
        self, plan: Plan, data: TrainingData, models: tuple | None, *, rank: int, resume_from: Path | None = None
    ):
        """Make all parts; restore those that a checkpoint has, if `resume_from` is one.

        `models` are policy and separate reference, or functions that load them; None: those that the plan names.
        """
        # `dpo.recipe` has done this before, but the reference code's trainers are made without it
        set_up_torch(deterministic=plan.run.deterministic, compiles=plan.training.compile)
        self.plan = plan
        self.data = data
        self.progress = Progress(plan, silent=rank != 0)
        self.mesh = mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
        self.stop = StopRequest(mesh)
        policy, reference = self._make_models(models, resume_from)
        self.policy = policy
        # The plan has both models begin with the same weights; a caller's models may differ.
        models_are_equal = models is None and reference is not None
        self.objective = make_objective(plan, policy, reference, data, mesh, models_are_equal=models_are_equal)
        self.optimizer = make_optimizer(plan.training, policy)
        facts = from_rank_0(read_run_facts(Path(plan.run.local_run_dir)))
        data_size = facts.get("data_size") or mesh.data_size  # of the first attempt, so that its learning rate stays
        self.scheduler = Schedule(plan.training, self.optimizer, updates=data.updates, data_size=data_size)
        batch_size = (plan.online and plan.online.batch_size) or plan.data.eval_batch_size
        # A process answers this many prompts at a time: on fewer processes no more than when the run began.
        rows = max(1, batch_size // (mesh.data_size * plan.n_eval_microbatches))
        sampler = Sampler(data.tokenizer, self.objective, self.progress, self.stop, rows)
        if plan.online:
            self.batches = OnlineBatches(plan, data, sampler)
        else:
            self.batches = Batches(plan, data, self.objective.layout, rank=mesh.data_rank)
        self.evaluator = Evaluator(self.batches, sampler)
        run_dir = Path(plan.run.local_run_dir)
        self.checkpoints = Checkpoints(
            run_dir,
            mesh,
            self.evaluator.interval.keep,
            self.progress.line,
            self.evaluator.n_examples,
            sharded=plan.run.checkpoint_format == "sharded",
        )
        context = RunContext(plan, run_dir, rank, data, self.progress.line, policy)
        self.callbacks = Callbacks(list_callbacks(), context, terminal=self.progress)
        super().__init__(  # what the part `trainer` of a checkpoint has
            reference,
            getattr(policy, "frozen_digest", None),
            objective=self.objective,
            loss_scale=self.objective.loss_scale,
            **self.batches.states,
            checkpoints=self.checkpoints,
            callbacks=self.callbacks,
        )
        self.facts = {  # for the manifests of checkpoints
            "config": config_for_manifest(plan),
            **inputs_for_manifest(data, policy.config),
            "base": getattr(policy, "base_digest", None),  # digest of an adapter's base, checked on loading
        }
        if resume_from:
            self.checkpoints.restore(resume_from, self.list_parts())

    def list_parts(self) -> list[Part]:
        """List the parts of a checkpoint in the order in which they are written.

        They are made anew each time: as they refer to this trainer, an attribute would form a cycle.
        """
        reference = self.objective.reference
        parts = [policy_part(self.policy)]
        if reference and self.plan.follow_every:  # the reference is saved only if it changes
            parts.append(ModelPart(FOLLOWING, reference.model))
        return [
            *parts,
            OptimizerPart("optimizer", self.optimizer, self.mesh),
            Part("scheduler", self.scheduler),
            Part("trainer", self),
            RandomPart("random", self.mesh),
        ]

    def _make_models(self, models: tuple | None, resume_from: Path | None) -> tuple[Any, Reference | None]:
        """Load and distribute policy and reference, if the run has one.

        The reference is the policy with another adapter or none, or a separate model. Raises InputError if the policy's
        vocabulary or its positions do not suffice for the data.
        """
        plan = self.plan
        frozen_whole = agree_on_frozen_weights(plan, self.mesh, self.progress)
        if models:
            policy, reference_model = models
            # They get the checkpoint's weights; with LoRA, `load_policy` loads its adapter.
            if resume_from and plan.lora is None:
                load_archive(unwrap(policy), resume_from)
            if resume_from and reference_model is not None and plan.follow_every:
                load_archive(unwrap(reference_model), resume_from / f"{FOLLOWING}.pt")
        else:
            initial = "random weights" if plan.model.random_init else plan.model.name_or_path
            name = resume_from or plan.model.archive or initial
            self.progress.line(f"loading {name}")
            policy, reference_model = model_loaders(plan, resume_from)
        policy = load_policy(policy, plan, resume_from)
        self.data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, plan.data.max_length)
        if plan.training.activation_checkpointing:
            checkpoint_activations(policy)
        policy = place(plan, policy, self.mesh, frozen_whole=frozen_whole, compute_dtype=plan.compute_dtype)
        reference = None
        logps = make_reference_logps(plan, self.data)
        if plan.reference in ("base", "adapter"):
            adapter = REFERENCE if plan.reference == "adapter" else None
            reference = Reference(policy, policy.frozen_digest, logps, make_adapter_context(policy, adapter))
        elif reference_model is not None:
            model = load_reference(reference_model, plan, resume_from)
            digest = model.frozen_digest
            model = place(plan, model, self.mesh, frozen_whole=frozen_whole, compute_dtype=plan.reference_dtype)
            reference = Reference(model, digest, logps)
        elif plan.reference:
            raise InputError(f"loss={plan.loss.name} needs a reference model")
        return policy, reference


def make_reference_logps(plan: Plan, data: TrainingData) -> ReferenceLogps:
    """Make an empty cache of the reference's log-probabilities, with a row for each example."""
    n_rows = data.train.counts.sum() + data.test.counts.sum()
    identity = (data.identity, plan.data.max_length, plan.data.max_prompt_length)
    if plan.loss.mismatched:
        n_rows *= 2  # a mismatched example for each example
        identity = (*identity, plan.run.seed)  # mismatched examples depend on the seed
    return ReferenceLogps(n_rows, len(plan.loss.reference_columns), repr(identity))


def agree_on_frozen_weights(plan: Plan, mesh: Mesh, progress: Progress) -> bool:
    """Return whether every process holds frozen weights whole: as set, or if they fit on all processes.

    Every process must call it: other programs may use some of the GPUs, so that the weights do not fit there.
    """
    frozen = decide_frozen_weights(plan)
    if mesh.any(frozen == "sharded"):
        frozen = "sharded"
    if frozen != plan.fsdp.fsdp_frozen_weights:
        progress.line(f"frozen weights are {frozen} on every process (fsdp_frozen_weights)")
    return frozen == "whole"


def place(
    plan: Plan,
    model: Any,
    mesh: Mesh,
    *,
    frozen_whole: bool,
    compute_dtype: str,
    receive: Callable | None = None,
) -> Any:
    """Distribute a loaded model over processes, or over the GPUs of this one, as the plan says; return it.

    `frozen_whole`, `compute_dtype` (a name in `DTYPES`) and `receive` are for several processes (see `distribute`).
    """
    if plan.trainer.multi_process:
        return distribute(
            model,
            mesh,
            block_name=plan.model.block_name,
            compute_dtype=DTYPES[compute_dtype],
            reduce_dtype=DTYPES[plan.fsdp.fsdp_reduce_dtype],
            reshard_after_forward=plan.fsdp.fsdp_reshard_after_forward,
            frozen_whole=frozen_whole,
            receive=receive,
        )
    if plan.trainer.cuts_layers:
        n_slices = plan.run.tensor_parallel_size or plan.gpus
        # Without GPUs, as in tests, all slices are on the CPU.
        devices = [f"{GPU}:{i}" for i in range(plan.gpus)] or ["cpu"] * n_slices
        return split_over_devices(model, devices[:n_slices])
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        refuse_offloading(model)
        from accelerate.hooks import remove_hook_from_module  # transformers needed it to place the layers

        # accelerate would move the logits of all tokens back to the first GPU; the model's parts keep their hooks
        remove_hook_from_module(model)
    return model
