"""The training loop, for any number of processes. Subclasses in `trainers.py` decide where models live."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dpo.checkpoint.resume import facts_of, inputs_of
from dpo.checkpoint.saver import Checkpoints
from dpo.data.preflight import TrainingData
from dpo.data.tokenization import Batch
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.models.generation import before_each_forward, fed_prompts, sample_batches, sample_rows
from dpo.models.loading import loaded, loaded_reference
from dpo.models.pretrained import DTYPES, check_positions, remarks
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import accumulate, release_gathered
from dpo.parallel.state import full_tensor
from dpo.reporting.files import Sample
from dpo.reporting.metrics import NullLogger, make_logger
from dpo.reporting.terminal import Progress, table
from dpo.settings.choices import TrainerSpec
from dpo.settings.plan import resolve
from dpo.system.paths import get_local_dir
from dpo.system.signals import Stopped, on_stop_signals
from dpo.system.waiting import after_rank_0
from dpo.training.anomalies import Guard, NonFinite
from dpo.training.batches import Batches, GlobalBatch
from dpo.training.metrics import peak_memory_gb
from dpo.training.objective import loss_options, make_objective
from dpo.training.optimization import OPTIMIZERS, warmup
from dpo.training.self_test import self_test

COUNTERS = ("example_counter", "batch_counter", "evaluated_at")
SEQUENCE_MASKS = ("chosen_attention_mask", "rejected_attention_mask")


class Trainer:
    """Trains a policy in this process, which may be one of several; a subclass says where models live.

    `policy` and `reference_model` are models, or functions that load one, the second called when the first is in place.
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
        self.config, self.seed, self.run_dir = config, seed, Path(run_dir)
        self.rank, self.world_size = rank, world_size
        self.plan = resolve(config, trainer=self.spec, world_size=world_size)
        self.mesh = Mesh(rank, self.plan.dims, timeout_secs=config.collective_timeout_secs)
        self.loss = LOSSES[config.loss.name]
        if self.loss.uses_reference and reference_model is None:
            raise InputError(f"loss={config.loss.name} needs a reference model")
        self.data = data or self.load_data(config, silent=rank != 0)
        self.tokenizer = self.data.tokenizer
        each = {"update": config.batch_size, **dict.fromkeys(("evaluate", "sample"), config.eval_batch_size)}
        self.progress = Progress(interval=config.minimum_log_interval_secs, silent=rank != 0, each=each)
        self.policy = self._place_policy(policy)
        self.reference_model, self.reference_digest = self._place_reference(reference_model)
        for note in self.notes():
            self.progress.line(note)
        self.optimizer = self.make_optimizer()
        self.scheduler = warmup(self.optimizer, config.warmup_steps)
        longest, log = self.data.report.longest(config.max_length), self.progress.line
        models = self.policy, self.reference_model
        self.objective = make_objective(config, *models, self.mesh, self.plan.compute_dtype, longest=longest, log=log)
        self.eval_every = config.eval_every - config.eval_every % config.batch_size
        self.example_counter, self.batch_counter, self.evaluated_at = 0, 0, -1
        if self.eval_every != config.eval_every:
            self.progress.line(
                f"warning: eval_every={config.eval_every} is not a multiple of batch_size={config.batch_size}; "
                f"evaluating every {self.eval_every} examples"
            )
        self.batches = Batches.of(
            config, self.data, self.objective.layout, rank=self.mesh.data_rank, size=self.mesh.data_size, seed=seed
        )
        self.eval_batches = list(self.batches.test(config.eval_batch_size, n_examples=config.n_eval_examples))
        self.checkpoints = Checkpoints(self.run_dir, self.mesh, keep=config.keep_checkpoints, log=self.progress.line)
        self.guard = Guard(self.run_dir, self.mesh, policy=config.nan_policy, log=self.progress.line)
        self._asked_to_stop: list[int] = []  # signals that this process had
        self.stop_is_agreed = False  # by all processes, once any of them had one
        self.logger_state: dict[str, Any] = {}
        if resume_from is not None:
            self.checkpoints.restore(resume_from, self._stateful())
        self.train_iterator = self._train_batches(skip=self.batch_counter)
        self.logger = make_logger(config, self.run_dir, self.logger_state) if rank == 0 else NullLogger()

    def _place_policy(self, policy: Any) -> Any:
        config, policy = self.config, after_rank_0("the policy's weights", partial(loaded, policy, self.config))
        self.data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, config.max_length)
        if config.activation_checkpointing:  # the older of the method's two names works on every transformers 5
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        return self.place(policy, compute_dtype=DTYPES[self.plan.compute_dtype])

    def _place_reference(self, reference_model: Any) -> tuple[Any, str | None]:
        """The reference where it will compute, and on rank 0 its digest; None if there is none."""
        if reference_model is None:
            return None, None
        load = partial(loaded_reference, reference_model, self.config, with_digest=self.rank == 0)
        model, digest = after_rank_0("the reference's weights", load)
        return self.place(model, compute_dtype=DTYPES[self.plan.reference_dtype]), digest

    # --- what a subclass says ---------------------------------------------------------------------------------------

    spec: TrainerSpec  # what it can do

    @staticmethod
    def load_data(config: DictConfig, *, silent: bool = False) -> TrainingData:
        """What the config trains on."""
        raise NotImplementedError

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        """Distribute a loaded model over devices and processes."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What the placed models make worth saying at the start."""
        wanted, max_length = self.config.model.attn_implementation, self.config.max_length
        return remarks(self.policy, attention=wanted, max_length=max_length)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.config.optimizer](self.policy.parameters(), lr=self.config.lr)

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the data, evaluating and saving when due and after the last update.

        Asked to stop by a signal, it finishes the update (several processes the next), saves, raises Stopped.
        """
        if self.batch_counter == 0:  # later the policy is not the reference any more
            self.self_test()
        if self.loss.uses_reference and self.config.cache_reference_logps == "all":
            self.score_all_then_free_reference()
        total = self.data.report.updates
        with on_stop_signals(self._asked_to_stop.append):
            try:
                for batch in self.progress.updates(self.train_iterator, total=total, done=self.batch_counter):
                    self.evaluate_and_save()
                    metrics = self.train_step(batch)
                    self.logger.log("train", metrics, examples=self.example_counter, updates=self.batch_counter)
                    self.progress.train(metrics, updates=self.batch_counter)
                    self.guard.watch(metrics, update=self.batch_counter)
                    self.checkpoints.check()
                    if self.stop_is_agreed or (self.world_size == 1 and self._asked_to_stop):
                        raise Stopped(*self._asked_to_stop[:1])
                self.evaluate_and_save(last=True)
                self.checkpoints.finish()
            except (Stopped, NonFinite) as ending:  # on every process
                if isinstance(ending, Stopped) and self._has_unsaved():
                    self.save()
                self.logger.close()  # may take a while to send the rest: before the others end
                self.checkpoints.finish()
                raise
            finally:
                self.progress.close()
                if not isinstance(sys.exception(), KeyboardInterrupt):
                    self.checkpoints.wait()  # whatever else went wrong, what is being written gets whole
        self.logger.close()

    def _stop_if_asked(self) -> None:
        """Raises Stopped on every process if any of them had a signal."""
        if self.mesh.any(bool(self._asked_to_stop)):
            raise Stopped(*self._asked_to_stop[:1])

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One update on a global batch; its metrics, means over the whole batch on every process."""
        start = time.perf_counter()
        self.policy.train()
        losses_of = partial(self.objective.losses, *self._models, split="train", loss_config=self.config.loss)
        parts = []
        known = self.objective.known_reference(batch)
        for number, microbatch in enumerate(batch.microbatches, start=1):
            accumulate(self.policy, last=number == len(batch.microbatches))
            microbatch = microbatch.to(self.objective.device)
            losses, metrics = losses_of(microbatch, known)
            # the mean over the global batch, of which FSDP will take the mean over processes
            (losses.sum() * self.mesh.data_size / self.config.batch_size).backward()
            parts.append((microbatch.rows, metrics))
        release_gathered(self.reference_model)
        # everything that the host asks of the device in an update, and that processes agree on: waits for the device
        reduced = self.objective.reduce(parts, batch.keys, self._scalars(self.clip_gradient()))
        self.stop_is_agreed = reduced.scalars.pop("stop") > 0
        lr = self.scheduler.get_last_lr()[0]
        self.batch_counter += 1
        self.example_counter += self.config.batch_size
        if self.guard.allows(batch, reduced.examples, reduced.scalars["grad_norm"], update=self.batch_counter):
            self.optimizer.step()
            self.scheduler.step()
            self.objective.models_are_equal = False
        self.optimizer.zero_grad()

        metrics, seconds = reduced.means(), time.perf_counter() - start
        tokens = sum(int(batch.batch[key].sum()) for key in SEQUENCE_MASKS if key in batch.batch)
        return metrics | {
            "lr": lr,
            "examples_per_second": self.config.batch_size / seconds,
            "tokens_per_second": tokens / seconds,
            "memory/peak_gb": peak_memory_gb(),
        }

    def _scalars(self, grad_norm: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is summed over the processes beside the metrics: all have one norm, any may be asked to stop."""
        return {
            "grad_norm": grad_norm if self.rank == 0 else torch.zeros_like(grad_norm),
            "stop": torch.full_like(grad_norm, bool(self._asked_to_stop)),
        }

    def clip_gradient(self) -> torch.Tensor:
        """Clip by global norm; the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        return full_tensor(norm)

    @property
    def _models(self) -> tuple[Any, Any]:
        return self.policy, self.reference_model

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over the evaluation batches."""
        self.policy.eval()
        losses_of = partial(self.objective.losses, *self._models, split="eval", loss_config=self.config.loss)
        parts, keys = [], []
        for batch in self.progress.over(self.eval_batches, total=len(self.eval_batches), what="evaluate"):
            known = self.objective.known_reference(batch)
            self._stop_if_asked()
            for microbatch in (microbatch.to(self.objective.device) for microbatch in batch.microbatches):
                _, metrics = losses_of(microbatch, known)
                parts.append((microbatch.rows + len(keys), metrics))
            keys += batch.keys
        release_gathered(self.reference_model)
        return self.objective.reduce(parts, keys).means()

    def evaluate_and_save(self, *, last: bool = False) -> None:
        """Evaluate, sample and save, each if it is due here and was not done; `last`: all are due."""
        examples, metrics = self.example_counter, None
        if self.evaluated_at != examples and (last or self.evaluation_is_due()):
            metrics = self.evaluate()
            samples = self.samples() if self.config.sample_during_eval else []
            self.progress.line(table(f"evaluation after {examples:,} examples", metrics))
            self.logger.log("eval", metrics, examples=examples, updates=self.batch_counter)
            if samples:
                self.logger.log_samples(samples, examples=examples)
            self.evaluated_at, self.checkpoints.saved_at = examples, -1
        if self._has_unsaved() and (last or examples % (self.config.save_every or self.eval_every) == 0):
            self.save(metrics=metrics)

    def evaluation_is_due(self) -> bool:
        return self.example_counter % self.eval_every == 0 and (self.example_counter > 0 or self.config.do_first_eval)

    def _has_unsaved(self) -> bool:
        return 0 < self.example_counter != self.checkpoints.saved_at and not self.config.debug

    def score_all_then_free_reference(self) -> None:
        """Know the reference's log-probabilities of all pairs of the run, from a file or scored now; then free it."""
        path = Path(get_local_dir(self.config.local_dirs)) / "reference_logps" / f"{self.reference_digest}.npz"
        batches = itertools.chain(self.eval_batches, self._train_batches())
        over = self.progress.over(batches, total=len(self.eval_batches) + self.data.report.updates, what="score")
        self.progress.line(self.objective.score_all(self.reference_model, over, path))
        self.reference_model = None
        gc.collect()  # a sharded model is part of reference cycles
        torch.cuda.empty_cache()

    def samples(self) -> list[Sample]:
        """Continuations of the first `n_eval_model_samples` evaluation prompts, in whole batches, at least one."""
        n_batches = max(1, self.config.n_eval_model_samples // self.config.eval_batch_size)
        batches = [batch.batch for batch in self.eval_batches[:n_batches]]
        over = partial(self.progress.over, total=n_batches, what="sample")
        self.policy.eval()
        texts = [
            sample_batches(model, self._continuations, over(batches), self.mesh) for model in self._sampled_models()
        ]
        policy, reference = texts if len(texts) > 1 else (texts[0], [None] * len(texts[0]))
        prompts = [prompt for batch in batches for prompt in fed_prompts(batch, self.data.encode)]
        return list(map(Sample, prompts, policy, reference))

    def get_batch_samples(self, batch: Batch) -> tuple[list[str], list[str]]:
        """(policy, reference) continuations of the batch's prompts; none of a reference that is not there."""
        policy, *reference = (self._continuations(model, batch) for model in self._sampled_models())
        return policy, reference[0] if reference else []

    def _continuations(self, model: Any, batch: Batch) -> list[str]:
        seed, max_length = [self.seed, self.example_counter], self.config.max_length
        most = max_length - batch["prompt_input_ids"].shape[1]
        with before_each_forward(model, lambda token: self._before_token(token, most)):
            return sample_rows(model, batch, self.tokenizer, self.mesh, max_length=max_length, seed=seed)

    def _before_token(self, number: int, most: int) -> None:
        self._stop_if_asked()
        self.progress.part(number, most, "token")

    def _sampled_models(self) -> list[Any]:
        return [self.policy] if self.reference_model is None else [self.policy, self.reference_model]

    def save(self, output_dir: str | Path | None = None, metrics: dict[str, float] | None = None) -> None:
        """Save to `output_dir`, or to `step-N` of the run: its LATEST, and its BEST if `metrics` are the best yet."""
        name, sign = ("rewards_eval/accuracies", 1) if self.loss.uses_reference else ("loss/eval", -1)
        self.checkpoints.save(
            self._stateful(),
            step_idx=self.example_counter,
            metrics=metrics,
            quality=-math.inf if metrics is None else sign * metrics[name],
            facts=lambda: {
                "updates": self.batch_counter,
                "evaluated": self.evaluated_at == self.example_counter,
                "config": facts_of(self.config),
                **inputs_of(self.data, self.policy.config),
            },
            elsewhere=output_dir and Path(output_dir),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs besides the three of the reference."""
        return {name: getattr(self, name) for name in COUNTERS} | {
            "skipped": self.guard.skipped,
            "reference": self.reference_digest,
            "checkpoints": self.checkpoints.state_dict(),
            "reference_logps": self.objective.reference_logps.state_dict(),
            "logger": self.logger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's `state_dict()`. Raises InputError if the reference is not what it was."""
        if self.rank == 0 and state["reference"] != self.reference_digest:
            raise InputError(
                "the reference model has changed since the checkpoint: model.name_or_path or model.archive"
            )
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.guard.skipped = state["skipped"]
        self.checkpoints.load_state_dict(state["checkpoints"])
        self.objective.reference_logps.load_state_dict(state["reference_logps"])
        self.logger_state = state["logger"]

    def _stateful(self) -> dict[str, Any]:
        return {"policy": self.policy, "optimizer": self.optimizer, "scheduler": self.scheduler, "trainer": self}

    # --- helpers ---------------------------------------------------------------------------------------------------

    def self_test(self) -> None:
        """The step-0 checks, on the first two evaluation examples per process."""
        if not self.config.self_test:
            return
        first = self.eval_batches[0].batch
        rows = {key: value[: 2 * self.mesh.data_size] for key, value in first.items()}
        [microbatch] = self.objective.layout.split(rows, 1, rank=self.mesh.data_rank, size=self.mesh.data_size)
        notes = self_test(
            self.policy,
            self.reference_model,
            lambda model: self.objective.forward(model, microbatch),
            loss_name=self.config.loss.name,
            loss_options=loss_options(self.config.loss),
            same_dtype=self.plan.compute_dtype == self.plan.reference_dtype,
            repeats_to=DTYPES[self.plan.autocast or self.plan.compute_dtype] if self.mesh.tensor_size > 1 else None,
        )
        for note in notes:
            self.progress.line(note)

    def _train_batches(self, skip: int = 0) -> Iterator[GlobalBatch]:
        return self.batches.train(
            self.config.batch_size,
            parts=self.config.gradient_accumulation_steps,
            n_epochs=self.config.n_epochs,
            n_examples=self.config.n_examples,
            skip=skip,
        )
