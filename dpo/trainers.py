"""The trainer of a plan and its data, and the reference code's trainers, which make both from a config."""

import itertools
import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

# concatenated_inputs, _get_batch_logps and preference_loss are here because the reference code's trainers.py has them
from dpo.checkpoint.files import write_state
from dpo.checkpoint.resume import decide_autocast
from dpo.data.preflight import load_data
from dpo.errors import NonFinite, SamplingFailed, ScorerFailed, WarningLine, is_lost_contact
from dpo.losses import RESPONSE_ROLES, _get_batch_logps, find_loss, preference_loss  # noqa: F401
from dpo.models.adapters import seed_dropout
from dpo.models.pretrained import unwrap
from dpo.parallel.sharding import clip_gradient, step_and_count_changes, step_optimizer
from dpo.preference_datasets import PaddedBatch, concatenated_inputs, find_examples  # noqa: F401
from dpo.reporting.events import Evaluation, Update
from dpo.settings.places import store_rows
from dpo.settings.plan import resolve
from dpo.settings.validation import find_value_problems, raise_problems
from dpo.system.host import count_gpus, list_own_gpus
from dpo.system.run_directory import add_run_facts
from dpo.system.signals import Stopped, on_stop_signals
from dpo.training.batches import Batch
from dpo.training.objective import REFERENCE_PREFIX, BatchContext
from dpo.training.parts import TrainerParts
from dpo.training.start import list_notes, self_test

# Warn if a step at the full rate changes a smaller share of 16-bit weights: the steps of the others are rounded away.
FEW_CHANGED = 0.1


class Trainer(TrainerParts):
    """A policy's training: the loop, and what is due before, between and after updates."""

    @property
    def reference_model(self) -> nn.Module | None:
        return self.objective.separate_reference

    @cached_property
    def train_iterator(self) -> Iterator:
        """What `Batches.train` yields for the updates to come.

        It is made when it is first read: by then a checkpoint has been restored, and `batch_counter` is known.
        """
        return self.batches.train(skip=self.batch_counter)

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the data; after a stop signal, save and raise Stopped."""
        n_done = self.batch_counter
        for note in list_notes(self.evaluator, is_first=n_done == 0):
            self.progress.line(note)
        self.callbacks.emit("start")
        self.check_and_score_reference()
        with self._finishing():
            for item in self.progress.track_updates(self.train_iterator, total=self.data.updates, done=n_done):
                metrics = self.evaluate_if_due()
                self.save_if_due(metrics)
                self.sample_if_due()
                # An online batch takes long and its scorer may fail, so the state is saved before the batch is made.
                batch = self.batches.make_batch(item, update=self.batch_counter)
                self.callbacks.emit("update", self.train_step(batch))
                self.checkpoints.check()
                self.stop.raise_if_agreed()
            metrics = self.evaluate_if_due(is_last=True)
            self.save_if_due(metrics, is_last=True)
            self.sample_if_due()

    def train_step(self, batch: Batch) -> Update:
        """Make one update on a global batch, and return it; each process runs its own microbatches of the batch."""
        start = time.perf_counter()
        objective = self.objective
        self.policy.train()
        if self.plan.lora and self.plan.lora.dropout:
            # The seed depends on the data rank, not the rank: processes that have slices of the same layer must draw
            # the same masks.
            seed_dropout(self.plan.run.seed, self.batch_counter, self.mesh.data_rank)
        context = objective.prepare(batch)
        metrics = objective.accumulate(batch, context, reduce_once=self.plan.fsdp.fsdp_reduce_once)
        grad_norm = self.clip_gradient()
        reduced = objective.reduce(  # only here does the host wait for the device
            metrics,
            len(batch.examples),
            batch.cache_rows,
            # Scalars are summed over the ranks; the norm is the same on all of them, so only rank 0 adds it.
            grad_norm=grad_norm if self.mesh.rank == 0 else torch.zeros_like(grad_norm),
            n_ranks_to_stop=torch.full_like(grad_norm, bool(self.stop.signals)),
        )
        self.stop.is_agreed = reduced.scalars["n_ranks_to_stop"] > 0
        lr, *_ = self.scheduler.get_last_lr()  # before the scheduler's step: the rate of this update
        self.batch_counter += 1  # an update that a callback refuses counts too
        self.example_counter += len(batch.examples)
        means = reduced.means(batch.examples, batch.weights) | {"grad_norm": reduced.scalars["grad_norm"]}
        if objective.loss_scale.is_adapted:
            means["loss_scale"] = objective.loss_scale.value
        update = Update(self.batch_counter, self.example_counter, batch.examples, reduced.examples, means, batch.drawn)
        is_allowed = self.callbacks.allow(update)
        if is_allowed and not objective.loss_scale.adapt(means["grad_norm"]):
            self.progress.line(
                f"update {update.number} was not applied: its gradient overflows float16 at "
                f"loss_scale={means['loss_scale']:g}, which is halved"
            )
        elif is_allowed and any(batch.weights):  # if all pairs are ties, momentum would still move the policy
            means = means | self.step_optimizer(update.number)
            self.scheduler.step()
            # Running averages count all examples alike, except ties.
            objective.after_step(reduced.means(batch.examples, [float(weight > 0) for weight in batch.weights]))
        objective.sync_if_due(update.number)
        self.policy.zero_grad()  # under FSDP, the optimizer has cleared only the local shards
        others = {
            "lr": lr,
            **batch.metrics,
            **reduced.find_kl(list(batch.drawn)),
            **measure_costs(batch, time.perf_counter() - start),
        }
        return update._replace(metrics=means | others)

    def step_optimizer(self, number: int) -> dict[str, float]:
        """Step the optimizer for update `number`; return further metrics of it, by name.

        At the first step at the full learning rate, rank 0 measures which share of its 16-bit weights the step changes,
        and warns if the share is small.
        """
        # `last_epoch` counts the steps before this one; if the run ends within its warm-up, its last step is measured
        is_full = self.scheduler.last_epoch == min(self.scheduler.warmup_steps, self.data.updates - 1)
        if not (is_full and self.plan.trains_half_precision and self.mesh.rank == 0):
            step_optimizer(self.optimizer)
            return {}
        n_changed, n_weights = step_and_count_changes(self.optimizer)
        if not n_weights:
            return {}
        share = n_changed / n_weights
        if share < FEW_CHANGED:
            self.progress.line(
                WarningLine(
                    f"update {number}, the first at the full lr, changed {100 * share:.2g} % of the weights: "
                    f"{self.plan.model.policy_dtype} rounds small steps away; set {self.plan.precise_settings}"
                )
            )
        return {"changed_weights": share}

    def clip_gradient(self) -> Tensor:
        """Undo the loss scale of the gradient, and clip it to `max_grad_norm`; return its norm before clipping."""
        scale = self.objective.loss_scale.value
        return clip_gradient(self.policy.parameters(), self.plan.training.max_grad_norm, scale)

    # --- before, between and after updates ---------------------------------------------------------------------------

    def check_and_score_reference(self) -> None:
        """Run the self-test of a new run; if the plan says so, score all examples with the reference before training.

        A separate reference model is then freed.
        """
        # The self-test expects equal models: after an update the policy differs from the reference.
        if self.batch_counter == 0 and self.plan.training.self_test:
            self.progress.line(self_test(self.objective, self.evaluator.prompts[0], self.plan))
        if self.plan.caches_all_reference_logps:
            # All training batches are scored, also those before the checkpoint of a resumed run, so that the cache's
            # file has all.
            batches = itertools.chain(self.evaluator.batches, self.batches.train())
            total = len(self.evaluator.batches) + self.data.updates
            batches = self.progress.track(batches, total=total, what="score")
            self.progress.line(self.objective.cache_reference(batches, folder=self.plan.run.local_dir))

    @contextmanager
    def _finishing(self) -> Iterator:
        """Record stop signals inside the context; at its end, finish checkpoints and tell callbacks that the run ends.

        An error that all processes raise together ends the run in the same way; after a stop or a failed scorer, a
        checkpoint is saved first. After any other error no collective is called, as other processes may still train.
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
                # The event comes before `finish`, where the other processes wait for rank 0. So they do not leave with
                # the error while rank 0's upload to W&B takes long.
                self.callbacks.emit("end")
                self.checkpoints.finish()
                raise
            except Exception as error:
                if not is_lost_contact(error):  # else the save may wait for a process that is lost
                    self.checkpoints.let_complete()
                raise
            finally:
                self.progress.close()
        self.callbacks.emit("end")

    def _record_signal(self, signal_number: int) -> str:
        """Note a signal, on which the loop stops later; return what to tell the user."""
        self.stop.signals.append(signal_number)
        will_save = self.example_counter > 0 and not self.plan.run.debug
        return "stopping after saving a checkpoint" if will_save else "stopping"

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    def evaluate_if_due(self, *, is_last: bool = False) -> dict[str, float] | None:
        """Evaluate and return the mean metrics, or return None if no evaluation is due."""
        n_examples = self.example_counter
        is_due = n_examples % self.evaluator.interval.n_examples == 0
        if n_examples == 0:
            is_due = self.plan.evaluation.do_first_eval
        # This state may have been evaluated already, before the run was resumed.
        if not (is_due or is_last) or self.evaluated_at == n_examples:
            return None
        evaluated = self.evaluator.metrics()
        examples = [example for batch in self.evaluator.batches for example in batch.examples]
        metrics = self.batches.evaluate() | evaluated.means(examples, [example.weight for example in examples])
        evaluation = Evaluation(self.batch_counter, n_examples, metrics, examples, evaluated.examples)
        self.callbacks.emit("evaluation", evaluation)
        self.evaluated_at = n_examples
        self.samples_due = self.evaluator.draws_samples(n_examples)
        self.saved_at = None  # a checkpoint of this state, if there is one, lacks these metrics: save it again
        return metrics

    def sample_if_due(self) -> None:
        """Draw samples if the last evaluation said so; before and after training, also draw the verdict's answers.

        If sampling fails, warn and go on.
        """
        n_examples = self.example_counter
        is_first = self.batch_counter == 0
        is_last = self.batch_counter == self.data.updates
        self.samples_due &= self.plan.evaluation.sample_during_eval  # which may have changed since the checkpoint
        samples = []
        # A finished run that is resumed has its last answers already, and no samples are due. No run is resumed at its
        # first state, as no checkpoint is made there.
        try:
            if self.plan.evaluation.sample_during_eval and (is_first or (is_last and self.samples_due)):
                self.callbacks.emit("answers", n_examples, self.evaluator.answers())
            if self.samples_due:
                samples = self.evaluator.samples(n_examples=n_examples)
        except SamplingFailed as error:
            self.progress.line(WarningLine(f"no samples after {n_examples:,} examples: {error}"))
        if self.samples_due:
            self.callbacks.emit("samples", n_examples, samples)
        if samples and is_last and self.mesh.rank == 0:
            add_run_facts(self.checkpoints.run_dir, sampled_at=n_examples)  # so that a resumed run is complete
        self.samples_due = False

    def save_if_due(self, metrics: dict[str, float] | None, *, is_last: bool = False) -> None:
        """Save every `save_every` examples, by default as often as evaluations are due, and after the last update.

        `metrics` are those of an evaluation of the present state; None if none was due.
        """
        save_every = self.plan.run.save_every or self.evaluator.interval.n_examples
        if (is_last or self.example_counter % save_every == 0) and self._is_unsaved():
            self.save(metrics=metrics)

    def _is_unsaved(self) -> bool:
        """Return whether the present state should be saved: not if it was, before any update, or with `debug`."""
        n_examples = self.example_counter
        return n_examples > 0 and n_examples != self.saved_at and not self.plan.run.debug

    def save(self, output_dir: str | Path | None = None, metrics: dict[str, float] | None = None) -> None:
        """Save to `output_dir`; by default to `step-N`, with the link LATEST, and BEST if `metrics` are the best yet.

        `metrics` are those of an evaluation of the present state, if there was one.
        """
        ranking_metric, sign = self.plan.best
        if not output_dir:
            self.saved_at = self.example_counter
        self.checkpoints.save(
            self.list_parts(),
            step_idx=self.example_counter,
            metrics=metrics,
            quality=sign * (metrics or {}).get(ranking_metric, math.nan),
            facts={
                "updates": self.batch_counter,
                "evaluated": self.evaluated_at == self.example_counter,
                "samples_due": self.samples_due,
                **self.facts,
            },
            elsewhere=output_dir and Path(output_dir),
        )


def measure_costs(batch: Batch, step_seconds: float) -> dict[str, float]:
    """Return metrics of an update's speed and memory.

    `step_seconds` is the time of `train_step`. The answers of an online batch were drawn and scored before it; rates
    count that time too.
    """
    seconds = step_seconds + sum(batch.seconds.values())
    metrics = {
        "examples_per_second": len(batch.examples) / seconds,
        "tokens_per_second": sum(example.n_tokens for example in batch.examples) / seconds,
        "memory/peak_gb": peak_memory_gb(),
        **{f"online/{task}_share": task_seconds / seconds for task, task_seconds in batch.seconds.items()},
    }
    if batch.drawn:
        n_tokens = sum(len(answer.tokens) for drawn in batch.drawn.values() for answer in drawn.answers)
        metrics["online/seconds_per_token"] = batch.seconds["sampling"] / n_tokens
    return metrics


def peak_memory_gb() -> float:
    """Return this process's peak memory in GB (1e9 bytes): on its GPUs if there are any, else its resident memory."""
    if count_gpus():
        gpus = list_own_gpus(multi_process=torch.distributed.is_initialized())
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


class BasicTrainer(Trainer):
    """The reference code's trainer (docs/porting.md).

    `policy` and `reference_model` are models, or functions that load them.
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
    ):
        # The reference code's trainers have these attributes.
        self.seed = seed
        self.run_dir = Path(run_dir)
        self.rank = rank
        self.world_size = world_size
        stored: Any = store_rows(config)
        values: Any = OmegaConf.to_container(OmegaConf.create(stored))
        values |= {"trainer": self.name, "seed": seed, "local_run_dir": str(run_dir)}
        plan = decide_autocast(resolve(values, world_size=world_size, with_plugins=True))
        # Unlike `dpo train`, this class refuses only values that are wrong by themselves, and needs no exp_name.
        raise_problems([problem for problem in find_value_problems(plan.values) if problem.key != "exp_name"])
        self.config = OmegaConf.create(plan.nested_values())
        self.run_dir.mkdir(parents=True, exist_ok=True)
        data = load_data(plan, silent=rank != 0)
        super().__init__(plan, data, (policy, reference_model), rank=rank)
        self.tokenizer = data.tokenizer
        self.eval_batches = self.evaluator.batches

    name = "BasicTrainer"  # the value of the key `trainer`, whatever the config says

    def concatenated_forward(self, model: nn.Module, batch: PaddedBatch) -> tuple[Tensor, ...]:
        """Log-probabilities of this process's batch: (chosen, rejected), or only (chosen,) under SFT, each (B,)."""
        logps = self.objective.forward(unwrap(model), self._make_microbatch(batch))
        # A batch of pairs has rejected responses, which SFT does not score. A batch without responses of some role has
        # zeros for it in `logps`, which are left out.
        return tuple(logps[role] for role in RESPONSE_ROLES if role in logps and f"{role}_input_ids" in batch)

    def get_batch_metrics(
        self, batch: PaddedBatch, loss_config: DictConfig, train: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of this process's batch, and its detached metrics by name, (B,) each."""
        split = "train" if train else "eval"
        objective = replace(self.objective, loss=find_loss(loss_config))
        microbatch = self._make_microbatch(batch)
        # The reference code has no weights of examples.
        context = BatchContext(weights=torch.ones(len(microbatch.indices), device=objective.device))
        losses, columns = objective.losses(microbatch, context, split=split)
        return losses.mean(), {
            name: values for name, values in columns.items() if not name.startswith(REFERENCE_PREFIX)
        }

    def get_batch_samples(self, batch: PaddedBatch) -> tuple[list[str], list[str]]:
        """Return continuations of the batch's prompts by the policy, and by the reference: none without a reference."""
        texts = self.evaluator.apply(partial(self.evaluator.continue_batch, batch, self.example_counter))
        return texts[0], texts[1] if len(texts) > 1 else []

    def write_state_dict(
        self,
        step: int,
        state: Mapping,
        metrics: Mapping[str, float] | None,
        filename: str,
        dir_name: str | Path | None = None,
    ) -> None:
        """Write `state` in the format of a checkpoint's files, by default to LATEST/`filename` in the run's directory.

        Raises InputError if that directory is a checkpoint of the run, whose checksums the file would break.
        """
        content = {"step_idx": step, "state": state, "metrics": metrics or {}}
        write_state(Path(dir_name or self.run_dir / "LATEST", filename), content)

    def _make_microbatch(self, batch: PaddedBatch) -> Any:
        """Return all examples of this process's batch as one microbatch on the device."""
        [microbatch] = self.objective.layout.split(find_examples(batch), 1)
        return microbatch.to(self.objective.device)


class FSDPTrainer(BasicTrainer):
    name = "FSDPTrainer"  # trained weights are sharded; frozen weights are sharded or whole


class TensorParallelTrainer(BasicTrainer):
    name = "TensorParallelTrainer"  # layers are cut, over processes or, by the package `tensor_parallel`, over devices
