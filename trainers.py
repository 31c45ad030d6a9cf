"""The trainers: the training loop, and how each trainer distributes its models."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

# concatenated_inputs, _get_batch_logps and preference_loss are here because the reference code's trainers.py has them
from dpo.checkpoint.parts import ModelPart, OptimizerPart, Part, RandomPart, RunState
from dpo.checkpoint.resume import record_config, record_inputs
from dpo.checkpoint.saver import Checkpoints
from dpo.data.collation import PaddedBatch, concatenated_inputs, find_examples  # noqa: F401
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.losses import ROLES, _get_batch_logps, find_loss, preference_loss  # noqa: F401
from dpo.models import adapters
from dpo.models.layouts import Microbatch
from dpo.models.loading import FOLLOWING, load_policy, load_reference, notes_on_base
from dpo.models.pretrained import DTYPES, check_positions, checkpoint_activations, remarks
from dpo.models.scoring import ScorerFailed
from dpo.numbers import count
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import accumulate, distribute, keep_outputs_where_they_are, release_gathered
from dpo.parallel.state import clip_gradient, step_optimizer
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.reporting.anomalies import NonFinite
from dpo.reporting.events import Callbacks, Evaluation, RunContext, Update
from dpo.reporting.table import CALLBACKS
from dpo.reporting.terminal import Progress
from dpo.settings import choices
from dpo.settings.choices import TrainerSpec
from dpo.settings.files import with_defaults
from dpo.settings.plan import Plan, resolve
from dpo.settings.rows import store_rows
from dpo.settings.validation import check_values
from dpo.system.signals import Stopped, on_stop_signals
from dpo.system.waiting import after_rank_0
from dpo.training.batches import Batch, Batches
from dpo.training.drawing import SamplingFailed
from dpo.training.evaluation import Evaluator, Interval, notes_on_disk, notes_on_first_work, notes_on_interval
from dpo.training.memory import decide_frozen_weights
from dpo.training.metrics import REFERENCE, MicrobatchMetrics, Reduced, peak_memory_gb
from dpo.training.objective import BatchContext, NamedTensors, make_objective
from dpo.training.online import OnlineBatches
from dpo.training.optimization import Schedule, make_optimizer
from dpo.training.reference import Reference, ReferenceLogps
from dpo.training.self_test import self_test
from dpo.training.stop import StopRequest
from preference_datasets import load_data


class Trainer:
    """Trains a policy in this process, which may be one of several.

    `policy` and `reference_model` are models, or functions that load one. The reference is loaded after the policy was
    distributed, so that host memory holds one whole model at a time. `plan` is that of `config`, if it is made already;
    else keys missing from `config` get the defaults of `config/`. `run_dir` is created if it does not exist. Subclasses
    say how models are distributed (`place`).
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
        plan: Plan | None = None,
    ) -> None:
        if plan is None:
            config = with_defaults(store_rows(config), run_dir=run_dir)
            plan = resolve(config, trainer=self.spec, world_size=world_size)
            check_values(plan)
        # the reference implementation's trainer has these five attributes
        self.config, self.seed, self.run_dir = config, seed, Path(run_dir)
        self.rank, self.world_size = rank, world_size

        self.plan = plan
        self.loss = plan.loss
        if plan.reference == "model" and reference_model is None:
            raise InputError(f"loss={plan.loss.name} needs a reference model")
        mesh = self.mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
        data = self.data = data or load_data(plan, silent=rank != 0)
        progress = self.progress = Progress.of(plan, silent=rank != 0)
        self.tokenizer = data.tokenizer

        self.policy, frozen_digest = self._load_policy(policy, resume_from)
        self.reference = self._load_reference(reference_model, frozen_digest)
        self.optimizer = self.make_optimizer()  # after placement, which replaces parameters
        self.scheduler = Schedule.of(plan.training, self.optimizer, updates=data.report.updates, size=mesh.data_size)
        # prompts of an online run, or of mismatched examples, may have responses as long as max_length allows
        has_other_responses = plan.online or plan.loss.mismatched
        longest_example = plan.data.max_length if has_other_responses else data.report.longest(plan.data.max_length)
        objective = self.objective = make_objective(
            plan, self.policy, self.reference, mesh, longest_example=longest_example, log=progress.line
        )
        self.interval = Interval.of(plan, data.report.updates)
        stop = self.stop = StopRequest(mesh)
        self.batches = self._make_batches()
        self.eval_batches = list(self.batches.test())  # prepared once, as every evaluation uses all of them
        # an online run may have no evaluation batches: samples are then of held-out prompts
        self.eval_examples = [batch.examples for batch in self.eval_batches] or self.batches.held_out_examples()
        self.evaluator = Evaluator(
            plan, data, objective, self.eval_batches, self.eval_examples, progress, stop, seed=seed
        )

        n_parameters = adapters.count_parameters(self.policy)
        context = RunContext(plan, self.run_dir, rank, data, progress.line, n_parameters)
        self.callbacks = Callbacks.of(CALLBACKS, context, terminal=progress)
        keep, n_evaluated = self.interval.keep, sum(map(len, self.eval_examples))
        self.checkpoints = Checkpoints(self.run_dir, mesh, keep=keep, log=progress.line, n_evaluated=n_evaluated)
        states = objective.states | self.batches.states
        states |= {"checkpoints": self.checkpoints, "callbacks": self.callbacks}
        self.state = RunState(self.reference, frozen_digest, rank=rank, **states)
        if resume_from is not None:
            self.checkpoints.restore(resume_from, self._list_parts())  # last, as it restores all the objects above

        for note in self.notes():
            progress.line(note)
        self.train_iterator = self.batches.train(skip=self.state.batch_counter)
        self.callbacks.emit("start")

    def _load_policy(self, policy: Any, resume_from: Path | None) -> tuple[Any, str | None]:
        """Load, check and distribute the policy.

        Returns the policy, and the digest of its frozen weights as from `load_policy`.
        """
        plan = self.plan
        load = partial(load_policy, policy, plan, rank=self.rank, resume_from=resume_from)
        policy, frozen_digest = after_rank_0("the policy's weights", load)
        self.data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, plan.data.max_length)
        if plan.training.activation_checkpointing:
            checkpoint_activations(policy)
        return self.place(policy, compute_dtype=DTYPES[plan.compute_dtype]), frozen_digest

    def _load_reference(self, reference_model: Any, frozen_digest: str | None) -> Reference | None:
        """Make the reference from the policy's own module or a loaded model."""
        plan = self.plan
        n_rows, identity = self.data.n_examples, (self.data.identity, plan.data.max_length, plan.data.max_prompt_length)
        if self.loss.mismatched:
            n_rows *= 2  # a mismatched example for each example
            identity = (*identity, self.seed)  # mismatched examples depend on the seed
        logps = ReferenceLogps(n_rows, len(self.loss.reference_columns), repr(identity))
        if plan.reference in ("base", "adapter"):
            adapter = adapters.REFERENCE if plan.reference == "adapter" else None
            return Reference(self.policy, frozen_digest, logps, adapters.switch(self.policy, adapter))
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

        None if the reference is the policy itself (without its adapter, or with another), or if the separate model was
        freed because all examples are cached.
        """
        if self.reference is None or self.reference.model is self.policy:
            return None
        return self.reference.model

    @property
    def example_counter(self) -> int:
        return self.state.example_counter

    @property
    def batch_counter(self) -> int:
        return self.state.batch_counter

    # --- defined by subclasses --------------------------------------------------------------------------------------

    spec: TrainerSpec  # the name of the trainer and its abilities

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        """Distribute a loaded model over devices and processes."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Messages to log at the start."""
        attention, max_length = self.plan.model.attn_implementation, self.plan.data.max_length
        return [
            *remarks(self.policy, attention=attention, max_length=max_length),
            *notes_on_interval(self.plan, self.interval),
            *self.evaluator.notes,
            *notes_on_base(self.plan),
            *self.scheduler.notes,
        ]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.plan.training, adapters.trained_parameters(self.policy))

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the data, evaluating and saving when due.

        Also evaluates and saves after the last update. After a stop signal, finishes the update, saves and raises
        Stopped. Several processes may make one more update first, in which they agree to stop.
        """
        if self.rank == 0:
            for note in notes_on_disk(self.plan, self.interval, self.data.report.updates, self.policy, self.run_dir):
                self.progress.line(note)
        if self.state.batch_counter == 0:
            for note in notes_on_first_work(self.plan, self.data):
                self.progress.line(note)
        self.check_and_score_reference()
        n_updates, n_done = self.data.report.updates, self.state.batch_counter
        with self._finishing():
            for item in self.progress.updates(self.train_iterator, total=n_updates, done=n_done):
                self.save_if_due(metrics=self.evaluate_if_due())
                self.sample_if_due()
                # an online batch takes long and its scorer may fail, so the state is saved before the batch is made
                batch = self.batches.make_batch(item, update=self.state.batch_counter)
                update = self.train_step(batch)
                self.callbacks.emit("update", update)
                self.checkpoints.check()  # a checkpoint that cannot be written ends the run now, not at the next save
                self.stop.raise_if_agreed()
            self.save_if_due(metrics=self.evaluate_if_due(is_last=True), is_last=True)
            self.sample_if_due()
        self._report_best()

    def train_step(self, batch: Batch) -> Update:
        """Make one update on a global batch.

        All processes get the same batch, each with its own microbatches.
        """
        start = time.perf_counter()
        self.policy.train()
        if self.plan.lora is not None and self.plan.lora.dropout:
            adapters.seed_dropout(self.seed, self.state.batch_counter, self.mesh.data_rank)  # slices drop alike
        context = self.objective.prepare(batch)
        metrics, n_microbatches = [], len(batch.microbatches)
        for i, microbatch in enumerate(batch.microbatches, start=1):
            # declares only whether the next backward pass is the last
            accumulate(self.policy, last=(i == n_microbatches), reduce_once=self.plan.fsdp.reduce_once)
            metrics.append(self._backward(microbatch, context))  # metrics stay on the device: the host need not wait
            self.progress.part(i, n_microbatches, "microbatch")
        # FSDP frees gathered weights in the backward pass, but the reference has no backward pass
        release_gathered(self.reference_model)
        reduced = self._reduce(metrics, self.clip_gradient(), len(batch.examples), context.rows_to_cache)
        [lr] = self.scheduler.get_last_lr()  # before the scheduler's step: the rate of this update
        state = self.state
        state.count_update(len(batch.examples))  # an update that a callback refuses counts too
        means = reduced.means(batch.examples, batch.weights)
        means["grad_norm"] = reduced.scalars["grad_norm"]
        update = Update(
            state.batch_counter, state.example_counter, batch.examples, reduced.examples, means, batch.drawn
        )
        has_loss = any(batch.weights)  # false if all pairs are ties: a step would still move the policy, by momentum
        if self.callbacks.allow(update) and has_loss:
            step_optimizer(self.optimizer)
            self.scheduler.step()
            self.objective.after_step(update.metrics)
        self.objective.sync_if_due(update.number)
        self.optimizer.zero_grad()
        further_metrics = {
            "lr": lr,
            **batch.metrics,
            **reduced.find_kl(list(batch.drawn)),
            **_measure_speed(batch, time.perf_counter() - start),
            "memory/peak_gb": peak_memory_gb(),
        }
        return update._replace(metrics={**update.metrics, **further_metrics})

    def _reduce(
        self, metrics: MicrobatchMetrics, grad_norm: torch.Tensor, n_examples: int, rows_to_cache: Sequence[int]
    ) -> Reduced:
        """Reduce an update's metrics and gradient norm; agree on stopping.

        Only here, and for a batch statistic, does the host wait for the device in an update.
        """
        has_signal = bool(self.stop.signals)
        scalars = {  # summed over the ranks
            # the norm is the same on all ranks, so the sum takes it from rank 0 alone
            "grad_norm": grad_norm if self.rank == 0 else torch.zeros_like(grad_norm),
            "n_ranks_to_stop": torch.full_like(grad_norm, float(has_signal)),
        }
        reduced = self.objective.reduce(metrics, n_examples, rows_to_cache, scalars)
        self.stop.is_agreed = reduced.scalars["n_ranks_to_stop"] > 0
        return reduced

    def _backward(self, microbatch: Microbatch, context: BatchContext) -> tuple[torch.Tensor, NamedTensors]:
        """Add a microbatch's gradient; return its indices and metrics.

        This is a function of its own so that inputs and graph are freed before the next microbatch.
        """
        microbatch = microbatch.to(self.objective.device)
        losses, metrics = self.objective.losses(microbatch, context, split="train")  # (B,) each
        weights = context.weights[microbatch.indices]  # (B,)
        weighted_sum = (losses.where(weights > 0, 0) * weights).sum()  # the loss of a tie may be infinite
        # data_size undoes FSDP's averaging over processes, as the loss is a weighted mean over the global batch
        (weighted_sum * self.mesh.data_size / context.total_weight).backward()
        return microbatch.indices, metrics

    def clip_gradient(self) -> torch.Tensor:
        """Clip the gradient by its global norm; return the norm before clipping."""
        return clip_gradient(self.policy.parameters(), self.plan.training.max_grad_norm)

    # --- before, between and after updates ---------------------------------------------------------------------------

    def check_and_score_reference(self) -> None:
        """Run the self-test, then score all pairs with the reference.

        The self-test runs only before the first update, the scoring only with `cache_reference_logps=all`.
        """
        # the self-test expects equal models: after an update the policy differs from the reference
        if self.state.batch_counter == 0 and self.plan.training.self_test:
            self.self_test()
        if self.plan.caches_reference_first:
            path = self.reference.logps.find_path(self.plan.run.local_dir, self.reference.digest)
            if self.rank == 0 and (obstacle := self.reference.logps.find_obstacle(path)):
                self.progress.line(f"warning: the reference's scores will serve this run alone: {obstacle}")
            # every training batch, even if the run was resumed, so that the file is the same
            batches = itertools.chain(self.eval_batches, self.batches.train())
            n_batches = len(self.eval_batches) + self.data.report.updates
            batches = self.progress.over(batches, total=n_batches, what="score")
            self.progress.line(self.objective.cache_reference(batches, path))
            self.reference.free()

    def self_test(self) -> None:
        """Run the step-0 self-test on the first two evaluation examples per process."""
        for note in self_test(self.objective, self.eval_examples[0], self.plan):
            self.progress.line(note)

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Handle stop signals inside; on leaving, finish checkpoints and callbacks.

        - After success, all processes complete the last checkpoint, then "end" is emitted.
        - After a stop signal or a scorer's failure, an unsaved state is saved, and "end" is emitted.
        - After a NaN or infinite value nothing is saved, and "abort" and "end" are emitted.
        - After any other error this process completes its checkpoint. It calls no collective, as the other processes
          may not have failed.
        """
        with on_stop_signals(self._record_signal):
            try:
                yield
                self.checkpoints.finish()
            except (Stopped, NonFinite, ScorerFailed) as error:  # every process raises these at the same update
                if isinstance(error, NonFinite):
                    self.callbacks.emit("abort", str(error))
                elif self._is_unsaved():
                    self.save()
                # before `finish`: there the other processes wait for rank 0, whose upload to W&B may take long
                self.callbacks.emit("end")
                self.checkpoints.finish()
                raise
            finally:
                self.progress.close()
                if not isinstance(sys.exception(), KeyboardInterrupt):  # a second Ctrl-C abandons the checkpoint
                    self.checkpoints.wait()
        self.callbacks.emit("end")

    def _record_signal(self, signal_number: int) -> str:
        """Record a stop signal; return a message about its effect."""
        self.stop.signals.append(signal_number)
        will_save = self.state.example_counter > 0 and not self.plan.run.debug
        return "stopping after saving a checkpoint" if will_save else "stopping"

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    def evaluate_if_due(self, *, is_last: bool = False) -> dict[str, float] | None:
        """Evaluate, if due and not done yet.

        With `is_last`, after the last update, an evaluation is always due. Returns the mean metrics, or None without an
        evaluation.
        """
        state = self.state
        is_due = is_last or self._is_evaluation_due()
        if not is_due or state.evaluated_at == state.example_counter:
            return None
        evaluated = self.evaluator.metrics()
        examples = [example for batch in self.eval_batches for example in batch.examples]
        means = evaluated.means(examples, [example.weight for example in examples])
        metrics = {**self.batches.evaluate(), **means}
        plan = self.plan.evaluation
        is_wanted = (
            plan.do_first_sampling if state.batch_counter == 0 else self.interval.samples_after(state.example_counter)
        )
        draws_samples = plan.sample_during_eval and is_wanted
        evaluation = Evaluation(
            state.batch_counter, state.example_counter, metrics, examples, evaluated.examples, draws_samples
        )
        self.callbacks.emit("evaluation", evaluation)
        state.evaluated_at, state.samples_due = state.example_counter, draws_samples
        state.saved_at = None  # a checkpoint of this state, if there is one, lacks these metrics: save it again
        return metrics

    def _is_evaluation_due(self) -> bool:
        n_examples = self.state.example_counter
        return n_examples % self.interval.n_examples == 0 and (n_examples > 0 or self.plan.evaluation.do_first_eval)

    def sample_if_due(self) -> None:
        """Draw an evaluation's samples, once its checkpoint is saved.

        Before the first update and after the last one, the policy also answers some prompts, for the verdict on the
        run. A failure costs a warning. A resumed run draws the samples that are missing.
        """
        state = self.state
        is_first, is_last = state.batch_counter == 0, state.batch_counter == self.data.report.updates
        if self.plan.evaluation.sample_during_eval and (is_first or state.samples_due):
            n_examples, samples = state.example_counter, []
            try:
                if is_first or is_last:
                    self.callbacks.emit("answers", n_examples, self.evaluator.answers())
                if state.samples_due:
                    samples = self.evaluator.samples(n_examples=n_examples)
            except SamplingFailed as error:
                self.progress.line(
                    f"warning: no samples after {count(n_examples, 'example')}, as they could not be drawn: {error}; "
                    f"training goes on (sample_during_eval=false draws none)"
                )
            if state.samples_due:
                self.callbacks.emit("samples", n_examples, samples)
        state.samples_due = False

    def save_if_due(self, *, metrics: dict[str, float] | None, is_last: bool = False) -> None:
        """Save a checkpoint with the metrics, if due and not saved yet.

        With `is_last`, after the last update, a checkpoint is always due.
        """
        save_every = self.plan.run.save_every or self.interval.n_examples
        is_due = is_last or self.state.example_counter % save_every == 0
        if is_due and self._is_unsaved():
            self.save(metrics=metrics)

    def _is_unsaved(self) -> bool:
        """Return whether a checkpoint of the current state is wanted and missing."""
        n_examples = self.state.example_counter
        return n_examples > 0 and n_examples != self.state.saved_at and not self.plan.run.debug

    def save(self, output_dir: str | Path | None = None, metrics: dict[str, float] | None = None) -> None:
        """Save to `output_dir`, or to the run's `step-N`.

        A new `step-N` gets the link LATEST, and BEST if `metrics` are the best yet; `output_dir` gets no link.
        """
        state, (ranking_metric, sign) = self.state, self.plan.best
        if output_dir is None:
            state.saved_at = state.example_counter
        self.checkpoints.save(
            self._list_parts(),
            step_idx=state.example_counter,
            metrics=metrics,
            quality=None if metrics is None else sign * metrics.get(ranking_metric, math.nan),
            facts=lambda: {
                "updates": state.batch_counter,
                "evaluated": state.evaluated_at == state.example_counter,
                "samples_due": state.samples_due,
                "config": record_config(self.plan),
                **record_inputs(self.data, self.policy.config),
            },
            elsewhere=output_dir and Path(output_dir),
        )

    def _report_best(self) -> None:
        """Log which checkpoint BEST names, if it is better than LATEST."""
        metric, sign = self.plan.best
        best, latest = self.checkpoints.best, self.checkpoints.latest  # the metric times its sign: higher is better
        if best > latest:
            step = self.run_dir / f"step-{self.checkpoints.best_at}"
            self.progress.line(
                f"BEST is {step}, with {metric} {sign * best:.4g}; LATEST has {metric} {sign * latest:.4g}"
            )

    def _list_parts(self) -> list[Part]:
        """The parts of a checkpoint, in the order of writing."""
        parts: list[Part] = [adapters.policy_part(self.policy)]
        if self.objective.follow_every:  # only then does the reference change
            parts.append(ModelPart(FOLLOWING, self.reference_model))
        parts += [OptimizerPart(self.optimizer, self.mesh), Part("scheduler", self.scheduler)]
        return [*parts, Part("trainer", self.state), RandomPart(self.mesh)]


def _measure_speed(batch: Batch, step_seconds: float) -> dict[str, float]:
    """Metrics of the time that an update took, sampling and scoring included."""
    seconds = step_seconds + sum(batch.seconds.values())
    metrics = {
        "examples_per_second": len(batch.examples) / seconds,
        "tokens_per_second": sum(example.n_tokens for example in batch.examples) / seconds,
        **{f"online/{task}_share": task_seconds / seconds for task, task_seconds in batch.seconds.items()},
    }
    if batch.drawn:
        n_tokens = sum(len(answer.tokens) for drawn in batch.drawn.values() for answer in drawn.answers)
        metrics["online/seconds_per_token"] = batch.seconds["sampling"] / n_tokens
    return metrics


class BasicTrainer(Trainer):
    """One process, with layers spread over all its GPUs.

    Without a GPU it computes on the CPU.
    """

    spec = choices.BASIC

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        devices = set(getattr(model, "hf_device_map", {}).values())
        if len(devices) > 1:
            keep_outputs_where_they_are(model)
        return model

    def concatenated_forward(self, model: torch.nn.Module, batch: PaddedBatch) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of this process's batch: (chosen, rejected), each (B,).

        Under SFT only (chosen,).
        """
        logps = self.objective.forward(model, self._make_microbatch(batch))
        return tuple(logps[role] for role in ROLES if role in logps and f"{role}_input_ids" in batch)

    def get_batch_metrics(
        self, batch: PaddedBatch, loss_config: DictConfig, train: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean loss and per-example metrics of this process's batch.

        The metrics are detached, each (B,).
        """
        split = "train" if train else "eval"
        losses, metrics = self.objective.losses(self._make_microbatch(batch), split=split, loss=find_loss(loss_config))
        return losses.mean(), {name: values for name, values in metrics.items() if not name.startswith(REFERENCE)}

    def get_batch_samples(self, batch: PaddedBatch) -> tuple[list[str], list[str]]:
        """Continuations of the batch's prompts by policy and reference.

        Without a reference the second list is empty.
        """
        texts: list[list[str]] = []  # by model
        for model in self.evaluator.sampled_models():
            texts.append(self.evaluator.continuations(model, batch, n_examples=self.state.example_counter))
        return texts[0], (texts[1] if len(texts) == 2 else [])

    def _make_microbatch(self, batch: PaddedBatch) -> Microbatch:
        [microbatch] = self.objective.layout.split(find_examples(batch), 1)
        return microbatch.to(self.objective.device)


class FSDPTrainer(BasicTrainer):
    """Sharded parameters, gradients and optimizer state, for policy and reference alike."""

    spec = choices.FSDP

    @cached_property
    def frozen_weights(self) -> str | None:
        """How frozen weights are held: as `fsdp_frozen_weights` says, or as rank 0 decides."""

        def decide_on_rank_0() -> str | None:
            return decide_frozen_weights(self.plan).fsdp.frozen_weights if self.rank == 0 else None

        return from_rank_0(after_rank_0("the decision on frozen weights", decide_on_rank_0))

    def notes(self) -> list[str]:
        is_decided = self.plan.fsdp.frozen_weights is None and self.frozen_weights is not None
        decision = f"frozen weights are {self.frozen_weights} on every process (fsdp_frozen_weights)"
        return [*super().notes(), *[decision] * is_decided]

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        fsdp = self.plan.fsdp
        return distribute(
            model,
            self.mesh,
            block_name=self.plan.model.block_name,
            compute_dtype=compute_dtype,
            reduce_dtype=DTYPES[fsdp.reduce_dtype],
            reshard_after_forward=fsdp.reshard_after_forward,
            frozen_whole=self.frozen_weights == "whole",
        )


class TensorParallelTrainer(FSDPTrainer):
    """Layers sliced over `tensor_parallel_size` processes, and FSDP over these groups.

    With `tensor_parallel_size=null` each layer is sliced over all processes.
    """

    spec = choices.TENSOR_PARALLEL


class PackageTensorParallelTrainer(BasicTrainer):
    """One process, with layers split by the package `tensor_parallel`.

    A layer is spread over the process's devices, as in the reference implementation.
    """

    spec = choices.PACKAGE

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        n_slices = self.plan.run.tensor_parallel_size or len(gpus)
        devices = gpus[:n_slices] if gpus else ["cpu"] * n_slices
        return split_over_devices(model, devices)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        self.policy.keep_whole_state(optimizer)
        return optimizer


TRAINERS = {
    trainer.spec.name: trainer
    for trainer in (BasicTrainer, FSDPTrainer, TensorParallelTrainer, PackageTensorParallelTrainer)
}
