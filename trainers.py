"""The trainers: their shared loop, and where each places its models."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dpo.checkpoint.parts import ModelPart, OptimizerPart, Part, RandomPart, RunState
from dpo.checkpoint.resume import record_config, record_inputs
from dpo.checkpoint.saver import Checkpoints
from dpo.data.collation import PaddedBatch, concatenated_inputs, find_examples  # noqa: F401  (the reference has one here)
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.losses import ROLES, _get_batch_logps, find_loss, preference_loss  # noqa: F401  (the reference has two here)
from dpo.models import adapters
from dpo.models.layouts import Microbatch
from dpo.models.loading import FOLLOWING, load_policy, load_reference, notes_on_base
from dpo.models.pretrained import DTYPES, check_positions, checkpoint_activations, remarks
from dpo.models.scoring import ScorerFailed
from dpo.numbers import clock_time
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import accumulate, distribute, find_blocks, move_less, release_gathered
from dpo.parallel.state import full_tensor
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.reporting.anomalies import NonFinite
from dpo.reporting.events import Callbacks, Evaluation, RunContext, Update
from dpo.reporting.table import CALLBACKS
from dpo.reporting.terminal import Progress
from dpo.settings import choices
from dpo.settings.choices import TrainerSpec
from dpo.settings.files import require, with_defaults
from dpo.settings.plan import resolve
from dpo.system.signals import Stopped, on_stop_signals
from dpo.system.waiting import after_rank_0
from dpo.training.batches import Batch, Batches
from dpo.training.evaluation import Evaluator, notes_on_interval
from dpo.training.first_update import FirstUpdate
from dpo.training.memory import Communication, decide_communication
from dpo.training.metrics import REFERENCE, peak_memory_gb
from dpo.training.objective import BatchContext, NamedTensors, make_objective
from dpo.training.online import OnlineBatches
from dpo.training.optimization import OPTIMIZERS, Schedule
from dpo.training.reference import Reference, ReferenceLogps
from dpo.training.self_test import self_test
from dpo.training.stop import StopRequest
from preference_datasets import load_data

LONG_SECS = 5  # an evaluation predicted to take longer is announced


class Trainer:
    """Trains a policy in this process, which may be one of several.

    Subclasses place the models. `policy` and `reference_model` are models, or functions that load one; the reference is
    loaded once the policy is in place. Keys that `config` lacks get the defaults of `config/`; `run_dir` is created if
    it does not exist.
    """

    def __init__(
        self,
        policy: Any,
        config: DictConfig,
        seed: int,
        run_dir: str | Path,
        reference_model: Any = None,
        rank: int = 0,
        world_size: int = 1,
        data: TrainingData | None = None,
        resume_from: Path | None = None,
    ) -> None:
        config = with_defaults(config, run_dir=run_dir)
        require(config)
        self.config, self.seed, self.run_dir = config, seed, Path(run_dir)  # these five names are the reference's
        self.rank, self.world_size = rank, world_size
        plan = self.plan = resolve(config, trainer=self.spec, world_size=world_size)
        self.loss = plan.loss
        if plan.reference == "model" and reference_model is None:
            raise InputError(f"loss={plan.loss.name} needs a reference model")
        mesh = self.mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
        data = self.data = data or load_data(plan, silent=rank != 0)
        progress = self.progress = Progress.of(plan, silent=rank != 0)
        self.tokenizer = data.tokenizer
        self.policy, frozen = self._place_policy(policy, resume_from)
        self.reference = self._make_reference(reference_model, frozen)
        self.optimizer = self.make_optimizer()  # after placement, which replaces parameters
        self.scheduler = Schedule.of(plan.training, self.optimizer, updates=data.report.updates, size=mesh.data_size)
        # answers of an online run may be as long as max_length allows
        longest = plan.data.max_length if plan.online else data.report.longest(plan.data.max_length)
        objective = self.objective = make_objective(
            plan, self.policy, self.reference, mesh, longest=longest, log=progress.line
        )
        stop = self.stop = StopRequest(mesh)
        self.batches = self._make_batches()
        self.eval_batches = list(self.batches.test())  # kept: every evaluation uses them
        self.first_update = FirstUpdate.of(plan, data, [len(batch.examples) for batch in self.eval_batches])
        self.evaluator = Evaluator(plan, data, objective, self.eval_batches, progress, stop, seed=seed)
        parameters = adapters.count_parameters(self.policy)
        context = RunContext(plan, self.run_dir, rank, data, progress.line, parameters)
        self.callbacks = Callbacks.of(CALLBACKS, context, terminal=progress)
        self.checkpoints = Checkpoints(self.run_dir, mesh, keep=plan.run.keep_checkpoints, log=progress.line)
        states = objective.states | self.batches.states
        states |= {"checkpoints": self.checkpoints, "callbacks": self.callbacks}
        self.state = RunState(self.reference, frozen, rank=rank, **states)
        if resume_from is not None:  # every part exists by now
            self.checkpoints.restore(resume_from, self._parts())
        for note in self.notes():
            progress.line(note)
        self.train_iterator = self.batches.train(skip=self.state.batch_counter)
        self.callbacks.emit("start")

    def _place_policy(self, policy: Any, resume_from: Path | None) -> tuple[Any, str | None]:
        plan = self.plan
        load = partial(load_policy, policy, plan, rank=self.rank, resume_from=resume_from)
        policy, frozen = after_rank_0("the policy's weights", load)
        self.data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, plan.data.max_length)
        if plan.training.activation_checkpointing:
            checkpoint_activations(policy)
        return self.place(policy, compute_dtype=DTYPES[plan.compute_dtype]), frozen

    def _make_reference(self, reference_model: Any, frozen: str | None) -> Reference | None:
        plan = self.plan
        lengths = plan.data.max_length, plan.data.max_prompt_length
        identity = repr((self.data.identity, *lengths))
        logps = ReferenceLogps(self.data.n_examples, len(self.loss.reference_columns), identity)
        if plan.reference in ("base", "adapter"):
            adapter = adapters.REFERENCE if plan.reference == "adapter" else None
            return Reference(self.policy, frozen, logps, adapters.switch(self.policy, adapter))
        if reference_model is None:
            return None
        load = partial(load_reference, reference_model, plan, rank=self.rank)
        model, digest = after_rank_0("the reference's weights", load)
        return Reference(self.place(model, compute_dtype=DTYPES[plan.reference_dtype]), digest, logps)

    def _make_batches(self) -> Batches:
        if self.plan.online:
            return OnlineBatches(self.plan, self.data, self.objective, self.stop, self.progress, seed=self.seed)
        rank, size = self.mesh.data_rank, self.mesh.data_size
        return Batches(self.plan, self.data, self.objective.layout, seed=self.seed, rank=rank, size=size)

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The separate reference model, if it is loaded.

        None if the reference is not a model of its own, or once all its log-probabilities are cached.
        """
        return self.reference.model if self.reference and self.reference.model is not self.policy else None

    # --- defined by subclasses --------------------------------------------------------------------------------------

    spec: TrainerSpec  # abilities of the trainer

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        """Distribute a loaded model over devices and processes."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Messages to log at the start."""
        attention, max_length = self.plan.model.attn_implementation, self.plan.data.max_length
        return [
            *remarks(self.policy, attention=attention, max_length=max_length),
            *notes_on_interval(self.plan),
            *notes_on_base(self.plan),
            *self.scheduler.notes,
        ]

    @property
    def example_counter(self) -> int:
        return self.state.example_counter

    @property
    def batch_counter(self) -> int:
        return self.state.batch_counter

    def make_optimizer(self) -> torch.optim.Optimizer:
        training = self.plan.training
        return OPTIMIZERS[training.optimizer](adapters.trained_parameters(self.policy), lr=training.lr)

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the data, evaluating and saving when due.

        Also evaluates and saves after the last update. On a stop signal it finishes the update (several processes
        possibly one more), saves, and raises Stopped.
        """
        if self.state.batch_counter == 0:
            for note in self.first_update.messages:
                self.progress.line(note)
        self.check_and_score_reference()
        total, done = self.data.report.updates, self.state.batch_counter
        with self._ending_in_order():
            for item in self.progress.updates(self.train_iterator, total=total, done=done):
                self.evaluate_and_save_if_due()
                # an online batch takes long and its scorer may fail, so draw it after the evaluation and save
                batch = self.batches.make_batch(item, update=self.state.batch_counter)
                update = self.train_step(batch)
                self.callbacks.emit("update", update)
                self.checkpoints.check()  # a checkpoint that cannot be written ends the run now, not at the next save
                self.stop.raise_if_agreed()
            self.evaluate_and_save_if_due(last=True)
        saved, (name, sign) = self.checkpoints, self.loss.best
        if saved.best > saved.latest:
            best, latest = sign * saved.best, sign * saved.latest  # values of the metric; the saved qualities rank them
            step = self.run_dir / f"step-{saved.best_at}"
            self.progress.line(f"BEST is {step}, with {name} {best:.4g}; that of LATEST is {latest:.4g}")

    def train_step(self, batch: Batch) -> Update:
        """Make one update on a global batch, the same on every process."""
        start, objective = time.perf_counter(), self.objective
        self.policy.train()
        context = objective.prepare(batch, update=self.state.batch_counter)
        metrics = []
        for i, microbatch in enumerate(batch.microbatches, start=1):
            accumulate(self.policy, last=i == len(batch.microbatches), reduce_once=self.plan.fsdp.reduce_once)
            metrics.append(self._backward(microbatch, context))  # tensors on the device, so the host runs ahead
            self.progress.part(i, len(batch.microbatches), "microbatch")
        release_gathered(self.reference_model)  # a backward pass would do this, but the reference has none
        norm, stop = self.clip_gradient(), bool(self.stop.signals)
        # scalars are summed over the ranks: rank 0 alone adds the norm, equal on all; every rank adds whether to stop
        scalars = {"grad_norm": norm if self.rank == 0 else torch.zeros_like(norm), "stop": torch.full_like(norm, stop)}
        # the only synchronization of host and device in an update; also lets the processes agree on stopping
        reduced = objective.reduce(metrics, len(batch.examples), context.numbers, scalars)
        self.stop.is_agreed = reduced.scalars["stop"] > 0
        [lr] = self.scheduler.get_last_lr()
        counters = self.state.count(len(batch.examples))  # before any veto: skipped updates count
        means = reduced.means(batch.examples, batch.weights)
        means["grad_norm"] = reduced.scalars["grad_norm"]
        means["grad_norm"] = reduced.scalars["grad_norm"]
        update = Update(*counters, batch.examples, reduced.examples, means, batch.drawn)
        if self.callbacks.allow(update) and any(batch.weights):  # if all are ties, momentum would still move weights
            self.optimizer.step()
            self.scheduler.step()
            objective.after_step(update.metrics)
        objective.sync_if_due(update.number)
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start + sum(batch.seconds.values())  # with sampling and scoring
        further_metrics = {
            "lr": lr,
            **batch.metrics,
            **reduced.find_kl([*batch.drawn]),
            "examples_per_second": len(batch.examples) / seconds,
            "tokens_per_second": sum(example.n_tokens for example in batch.examples) / seconds,
            **{f"online/{name}_share": spent / seconds for name, spent in batch.seconds.items()},
            "memory/peak_gb": peak_memory_gb(),
        }
        return update._replace(metrics={**update.metrics, **further_metrics})

    def _backward(self, microbatch: Microbatch, context: BatchContext) -> tuple[torch.Tensor, NamedTensors]:
        """Add a microbatch's gradient; return its indices and metrics.

        As a function of its own, it frees the inputs and the graph when it returns.
        """
        microbatch = microbatch.to(self.objective.device)
        with self.objective.dropout.on(microbatch.inputs, update=self.state.batch_counter):
            losses, metrics = self.objective.losses(microbatch, context, split="train")
            # this part of the mean over the global batch, scaled because FSDP takes the mean over processes
            part = (losses * context.weights[microbatch.indices]).sum()
            (part * self.mesh.data_size / context.total_weight).backward()
        return microbatch.indices, metrics

    def clip_gradient(self) -> torch.Tensor:
        """Clip the gradient by its global norm; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.plan.training.max_grad_norm)
        return full_tensor(norm)

    # --- before, between and after updates ---------------------------------------------------------------------------

    def check_and_score_reference(self) -> None:
        """Run the self-test, then score all pairs with the reference.

        The self-test runs only before the first update, the scoring only with `cache_reference_logps=all`.
        """
        # the self-test expects equal models: after an update the policy differs from the reference
        if self.state.batch_counter == 0 and self.plan.training.self_test:
            start = time.perf_counter()
            self.self_test()
            self._predict_evaluation(time.perf_counter() - start)
        if self.plan.caches_reference_first:
            path = self.reference.logps.find_path(self.plan.run.local_dir, self.reference.digest)
            # also the batches that a resumed run has trained on, so that it writes the same file
            batches = itertools.chain(self.eval_batches, self.batches.train())
            total = len(self.eval_batches) + self.data.report.updates
            progress = self.progress.over(batches, total=total, what="score")
            self.progress.line(self.objective.cache_reference(progress, path))
            self.reference.free()

    def self_test(self) -> None:
        """Run the step-0 self-test on the first two evaluation examples per process."""
        for note in self_test(self.objective, self.eval_batches[0].examples, self.plan):
            self.progress.line(note)

    def _predict_evaluation(self, seconds: float) -> None:
        """Log the predicted time of the first evaluation, if long.

        `seconds` is the time of the self-test.
        """
        lengths = [example.n_tokens for batch in self.eval_batches for example in batch.examples]
        n_tokens, n_tested_tokens = sum(lengths), sum(lengths[: self.first_update.tested])
        n_forwards = 2 if self.loss.reference else 1  # of an evaluation; the self-test runs the policy once more
        predicted = seconds * n_forwards / (n_forwards + 1) * n_tokens / n_tested_tokens
        if self.plan.evaluation.do_first_eval and predicted > LONG_SECS:
            self.progress.line(f"the evaluation takes about {clock_time(predicted)}, at the speed of the self-test")

    @contextmanager
    def _ending_in_order(self) -> Iterator[None]:
        """Handle stop signals inside, and end callbacks and checkpoints in order.

        - success: all processes complete the last checkpoint, then "end" is emitted
        - stopped, or a scorer failed: what is unsaved is saved, and "end" emitted
        - NaN or infinite: "abort" and "end" are emitted; nothing is saved
        - any other error: a checkpoint in progress is finished; other processes may go on, so nothing collective
        """
        with on_stop_signals(self._note_signal):
            try:
                yield
                self.checkpoints.finish()
            except (Stopped, NonFinite, ScorerFailed) as ending:  # on every process
                if isinstance(ending, NonFinite):
                    self.callbacks.emit("abort", str(ending))
                elif self._has_unsaved():
                    self.save()
                # first: rank 0 may upload to W&B for a while, and `finish` lets the others wait for it
                self.callbacks.emit("end")
                self.checkpoints.finish()
                raise
            finally:
                self.progress.close()
                if not isinstance(sys.exception(), KeyboardInterrupt):
                    self.checkpoints.wait()  # finish a checkpoint in progress, whatever else went wrong
        self.callbacks.emit("end")

    def _note_signal(self, number: int) -> str:
        """Record a signal; return a message about its effect."""
        self.stop.signals.append(number)
        saves = self.state.example_counter > 0 and not self.plan.run.debug
        return "stopping after saving a checkpoint" if saves else "stopping"

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    def evaluate_and_save_if_due(self, *, last: bool = False) -> None:
        """Evaluate, sample and save, each if due and not done yet.

        With `last` all are due.
        """
        state, metrics = self.state, None
        if state.evaluated_at != state.example_counter and (last or self.evaluation_is_due()):
            evaluated = self.evaluator.metrics()
            examples = [example for batch in self.eval_batches for example in batch.examples]
            metrics = evaluated.means(examples)
            is_first = state.batch_counter == 0
            is_wanted = self.first_update.draws_samples if is_first else self.plan.evaluation.sample_during_eval
            samples = self.evaluator.samples(n_examples=state.example_counter) if is_wanted else []
            counters = state.batch_counter, state.example_counter
            evaluation = Evaluation(*counters, metrics, samples, examples, evaluated.examples)
            self.callbacks.emit("evaluation", evaluation)
            # None, so that this state is saved, perhaps again, with these metrics
            state.evaluated_at, state.saved_at = state.example_counter, None
        save_every = self.plan.run.save_every or self.plan.eval_interval
        if self._has_unsaved() and (last or state.example_counter % save_every == 0):
            self.save(metrics=metrics)

    def evaluation_is_due(self) -> bool:
        examples = self.state.example_counter
        return examples % self.plan.eval_interval == 0 and (examples > 0 or self.plan.evaluation.do_first_eval)

    def _has_unsaved(self) -> bool:
        examples = self.state.example_counter
        return examples > 0 and examples != self.state.saved_at and not self.plan.run.debug

    def save(self, output_dir: str | Path | None = None, metrics: dict[str, float] | None = None) -> None:
        """Save to `output_dir`, or to the run's `step-N`.

        Such a `step-N` becomes LATEST, and BEST if `metrics` are the best yet.
        """
        state, (name, sign) = self.state, self.loss.best
        if output_dir is None:
            state.saved_at = state.example_counter
        self.checkpoints.save(
            self._parts(),
            step_idx=state.example_counter,
            metrics=metrics,
            quality=None if metrics is None else sign * metrics.get(name, math.nan),
            facts=lambda: {
                "updates": state.batch_counter,
                "evaluated": state.evaluated_at == state.example_counter,
                "config": record_config(self.plan),
                **record_inputs(self.data, self.policy.config),
            },
            elsewhere=output_dir and Path(output_dir),
        )

    def _parts(self) -> list[Part]:
        """The parts of a checkpoint."""
        models: list[Part] = [adapters.policy_part(self.policy)]
        if self.objective.follow_every:
            models.append(ModelPart(FOLLOWING, self.reference_model))
        counters = Part("scheduler", self.scheduler), Part("trainer", self.state)
        return [*models, OptimizerPart(self.optimizer, self.mesh), *counters, RandomPart(self.mesh)]


class BasicTrainer(Trainer):
    """One process, with layers spread over all its GPUs.

    Without a GPU it computes on the CPU.
    """

    spec = choices.BASIC

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        if len({*getattr(model, "hf_device_map", {}).values()}) > 1:
            move_less(model, find_blocks(model, self.plan.model.block_name))
        return model

    def concatenated_forward(self, model: torch.nn.Module, batch: PaddedBatch) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of this process's batch: (chosen, rejected), each (B,).

        Under SFT only (chosen,).
        """
        columns = self.objective.forward(model, self._make_microbatch(batch))
        return tuple(columns[role] for role in ROLES if role in columns and f"{role}_input_ids" in batch)

    def get_batch_metrics(
        self, batch: PaddedBatch, loss_config: DictConfig, train: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean loss and per-example metrics of this process's batch.

        The metrics are detached, each (B,).
        """
        split = "train" if train else "eval"
        microbatch, loss = self._make_microbatch(batch), find_loss(loss_config)
        losses, metrics = self.objective.losses(microbatch, split=split, loss=loss)
        return losses.mean(), {name: values for name, values in metrics.items() if not name.startswith(REFERENCE)}

    def get_batch_samples(self, batch: PaddedBatch) -> tuple[list[str], list[str]]:
        """(policy, reference) continuations of the batch's prompts.

        The second is empty without a reference.
        """
        continue_prompts = partial(self.evaluator.continuations, n_examples=self.state.example_counter)
        policy, *reference = (continue_prompts(model, batch) for model in self.evaluator.sampled_models())
        return policy, reference[0] if reference else []

    def _make_microbatch(self, batch: PaddedBatch) -> Microbatch:
        [microbatch] = self.objective.layout.split(find_examples(batch), 1)
        return microbatch.to(self.objective.device)


class FSDPTrainer(BasicTrainer):
    """Sharded parameters, gradients and optimizer state, for policy and reference alike."""

    spec = choices.FSDP

    @cached_property
    def communication(self) -> Communication:
        """Rank 0's decision on frozen weights, with its notes."""
        decide = partial(decide_communication, self.plan, self.data)
        return from_rank_0(after_rank_0("the predicted memory", lambda: decide() if self.rank == 0 else None))

    def notes(self) -> list[str]:
        notes = [*super().notes(), *self.communication.notes]
        chosen = self.plan.model.fsdp_policy_mp or self.plan.model.autocast
        shards = self.mesh.data_size > 1 and self.mesh.device.type == "cuda"
        if chosen or not shards or self.plan.compute_dtype != "float32":
            return notes
        gathered_gb = 4e-9 * sum(p.numel() for p in self.policy.parameters()) / self.mesh.tensor_size
        return [
            *notes,
            f"the policy is gathered and computed in float32; model.fsdp_policy_mp=bfloat16 would halve the "
            f"{gathered_gb:.3g} GB that each forward and backward pass gathers, and multiply matrices faster",
        ]

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        fsdp = self.plan.fsdp
        return distribute(
            model,
            self.mesh,
            block_name=self.plan.model.block_name,
            compute_dtype=compute_dtype,
            reduce_dtype=DTYPES[fsdp.reduce_dtype],
            reshard_after_forward=fsdp.reshard_after_forward,
            frozen_whole=self.communication.frozen_weights == "whole",
        )


class TensorParallelTrainer(FSDPTrainer):
    """Layers sliced over `tensor_parallel_size` processes, with FSDP across such groups.

    With null, a layer is sliced over all processes.
    """

    spec = choices.TENSOR_PARALLEL


class PackageTensorParallelTrainer(BasicTrainer):
    """One process, with layers split by the package `tensor_parallel`.

    A layer is spread over the process's devices, as in the reference implementation.
    """

    spec = choices.PACKAGE

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        size = self.plan.run.tensor_parallel_size or len(gpus)
        return split_over_devices(model, gpus[:size] or ["cpu"] * size)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        self.policy.keep_whole_state(optimizer)
        return optimizer


TRAINERS = {
    trainer.spec.name: trainer
    for trainer in (BasicTrainer, FSDPTrainer, TensorParallelTrainer, PackageTensorParallelTrainer)
}
