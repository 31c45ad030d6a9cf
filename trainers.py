"""The training loop. `BasicTrainer` runs it in one process; subclasses say only how models are spread."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from batches import Batches, GlobalBatch
from checkpoint import full_state, point, write_checkpoint
from distributed import Grid, distribute, find_blocks, full_tensor, keep_root_gathered, release_gathered
from layouts import Logps, choose_layout
from losses import LOSSES, _get_batch_logps, preference_loss  # noqa: F401  (the reference has the last two here)
from metrics import FileLogger, Logger, Loggers, NullLogger, Progress, Sample, WandbLogger, peak_memory_gb
from models import DTYPES, check_positions
from objective import REFERENCE, Objective, loss_options
from optimization import OPTIMIZERS, warmup
from preflight import TrainingData, prepare_data
from reference_logps import model_digest, read_logps
from run_directory import redact
from sampling import sample_batches, sample_rows
from self_test import self_test
from tokenization import Batch, concatenated_inputs  # noqa: F401
from utils import InputError, formatted_dict, get_cache_dir, get_local_dir

SEQUENCE_MASKS = ("chosen_attention_mask", "rejected_attention_mask")


def load_data(config: DictConfig, *, silent: bool = False) -> TrainingData:
    """Tokenizer, prompts of both splits and the preflight, for a config."""
    return prepare_data(
        list(config.datasets),
        config.model.tokenizer_name_or_path or config.model.name_or_path,
        sft_mode=not LOSSES[config.loss.name].uses_reference,
        batch_size=config.batch_size,
        eval_batch_size=config.eval_batch_size,
        max_length=config.max_length,
        max_prompt_length=config.max_prompt_length,
        n_epochs=config.n_epochs,
        n_examples=config.n_examples,
        dataset_sources=OmegaConf.to_container(config.dataset_sources),
        cache_dir=get_cache_dir(config.local_dirs),
        silent=silent,
    )


class BasicTrainer:
    """One process; on several GPUs the layers are spread over them, on none the CPU computes."""

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
    ) -> None:
        self.config, self.seed, self.run_dir = config, seed, Path(run_dir)
        self.rank, self.world_size = rank, world_size
        tensor_size = self.tensor_size(config, world_size)
        self.grid = Grid(rank, world_size, shard_size=config.fsdp_shard_size, tensor_size=tensor_size)
        self.loss = LOSSES[config.loss.name]
        if self.loss.uses_reference and reference_model is None:
            raise InputError(f"loss={config.loss.name} needs a reference model")
        self.data = data or load_data(config, silent=rank != 0)
        self.tokenizer = self.data.tokenizer
        self.data.encode.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, config.max_length)
        self.progress = Progress(interval=config.minimum_log_interval_secs, silent=rank != 0)

        self._place_models(policy, reference_model)
        self.optimizer = OPTIMIZERS[config.optimizer](self.policy.parameters(), lr=config.lr)
        self.scheduler = warmup(self.optimizer, config.warmup_steps)
        self.objective = self._make_objective()
        self.eval_every = config.eval_every - config.eval_every % config.batch_size
        self.example_counter = self.batch_counter = 0
        self.best = -math.inf  # quality of the checkpoint that BEST names
        if self.eval_every != config.eval_every:
            self.progress.line(
                f"warning: eval_every={config.eval_every} is not a multiple of batch_size={config.batch_size}; "
                f"evaluating every {self.eval_every} examples"
            )
        self.batches = Batches(
            self.data,
            self.objective.layout,
            rank=self.grid.data_rank,
            size=self.grid.data_size,
            sft_mode=not self.loss.uses_reference,
            seed=seed,
            num_workers=config.num_workers,
            max_length=config.max_length,
            max_prompt_length=config.max_prompt_length,
        )
        self.eval_batches = list(self.batches.test(config.eval_batch_size, n_examples=config.n_eval_examples))
        self.train_iterator = self._train_batches()
        self.logger = self._make_logger()

    def _place_models(self, policy: Any, reference_model: Any) -> None:
        config, model = self.config, self.config.model
        if config.activation_checkpointing:  # the older of the method's two names works on every transformers 5
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            for whole in (policy,) if reference_model is None else (policy, reference_model):
                for block in find_blocks(whole, model.block_name):
                    block.compile(dynamic=True)
        self.compute_dtype = (model.fsdp_policy_mp if self.multi_process else None) or model.policy_dtype
        self.reference_digest = None
        if self.rank == 0 and config.cache_reference_logps == "all" and reference_model is not None:
            self.reference_digest = model_digest(reference_model, model.autocast or model.reference_dtype)
        self.policy = self.place(policy, compute_dtype=DTYPES[self.compute_dtype])
        self.reference_model = None
        if reference_model is not None:
            self.reference_model = self.place(reference_model.eval(), compute_dtype=DTYPES[model.reference_dtype])

    def _make_objective(self) -> Objective:
        model = self.config.model
        autocast = DTYPES[model.autocast] if model.autocast else None
        device = next(self.policy.parameters()).device
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            layout, note = choose_layout(
                self.config.layout,
                self.policy,
                max_length=self.config.max_length,
                compute_dtype=autocast or DTYPES[self.compute_dtype],
                vetoed=self.grid.any,
            )
        release_gathered(self.policy)
        if note:
            self.progress.line(note)
        return Objective(layout, self.grid, device=device, autocast=autocast)

    # --- what a subclass may override ------------------------------------------------------------------------------

    multi_process = False  # whether several processes share a run, joined by a process group
    cuts_layers = False  # whether `tensor_parallel_size` and its backend say anything
    can_sample = True
    can_autocast = True

    @staticmethod
    def tensor_size(config: DictConfig, world_size: int) -> int:
        """How many processes cut each layer among them."""
        return 1

    @classmethod
    def device_map(cls) -> str | dict | None:
        """Where transformers puts the weights while loading: over all GPUs, on the one, or on the CPU."""
        gpus = torch.cuda.device_count()
        return None if gpus == 0 else {"": 0} if gpus == 1 else "balanced"

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        """Distribute a loaded model over devices and processes; here it is where it was loaded."""
        return model

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the data, evaluating and saving every `eval_every` examples and after the last update."""
        self.self_test()
        if self.loss.uses_reference and self.config.cache_reference_logps == "all":
            self.score_all_then_free_reference()
        for batch in self.progress.over(self.train_iterator, total=self.data.report.updates, what="train"):
            if self.evaluation_is_due():
                self.evaluate_and_save()
            metrics = self.train_step(batch)
            self.logger.log("train", metrics, examples=self.example_counter, updates=self.batch_counter)
            self.progress.train(metrics, examples=self.example_counter)
        self.evaluate_and_save()
        self.logger.close()

    def evaluation_is_due(self) -> bool:
        return self.example_counter % self.eval_every == 0 and (self.example_counter > 0 or self.config.do_first_eval)

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One update on a global batch; its metrics, means over the whole batch on every process."""
        start = time.perf_counter()
        self.policy.train()
        losses_of = partial(self.objective.losses, *self._models, split="train", loss_config=self.config.loss)
        parts = []
        known = self.objective.reference_logps.find(batch.keys)
        for microbatch in batch.microbatches:
            keep_root_gathered(self.policy, microbatch is not batch.microbatches[-1])
            losses, metrics = losses_of(microbatch, known)
            # the mean over the global batch, of which FSDP will take the mean over processes
            (losses.sum() * self.grid.data_size / self.config.batch_size).backward()
            parts.append((microbatch.rows, metrics))
        grad_norm = self.clip_gradient()
        lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.batch_counter += 1
        self.example_counter += self.config.batch_size

        metrics = self.objective.reduce(parts, batch.keys, {"grad_norm": grad_norm})  # waits for the device
        seconds = time.perf_counter() - start
        tokens = sum(int(batch.batch[key].sum()) for key in SEQUENCE_MASKS if key in batch.batch)
        return metrics | {
            "lr": lr,
            "examples_per_second": self.config.batch_size / seconds,
            "tokens_per_second": tokens / seconds,
            "memory/peak_gb": peak_memory_gb(),
        }

    def clip_gradient(self) -> torch.Tensor:
        """Clip by global norm; the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        return full_tensor(norm)

    # --- the loss --------------------------------------------------------------------------------------------------

    def concatenated_forward(self, model: torch.nn.Module, batch: Batch) -> Logps:
        """(chosen, rejected) log-probabilities, each (rows,), of a batch of this process."""
        return self.objective.forward(model, self.objective.whole(batch))

    def get_batch_metrics(
        self, batch: Batch, loss_config: DictConfig, train: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of a batch of this process, and detached per-example metrics, each (rows,)."""
        split, microbatch = "train" if train else "eval", self.objective.whole(batch)
        losses, metrics = self.objective.losses(*self._models, microbatch, None, split=split, loss_config=loss_config)
        return losses.mean(), {name: values for name, values in metrics.items() if name not in REFERENCE}

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
            known = self.objective.reference_logps.find(batch.keys)
            for microbatch in batch.microbatches:
                _, metrics = losses_of(microbatch, known)
                parts.append(([len(keys) + row for row in microbatch.rows], metrics))
            keys += batch.keys
        return self.objective.reduce(parts, keys, {})

    def evaluate_and_save(self) -> None:
        """Evaluate, sample if asked to, and save unless nothing was trained yet or `debug` is set."""
        metrics = self.evaluate()
        self.progress.line(f"eval after {self.example_counter} examples: {formatted_dict(metrics)}")
        self.logger.log("eval", metrics, examples=self.example_counter, updates=self.batch_counter)
        if self.config.sample_during_eval:
            self.logger.log_samples(self.samples(), examples=self.example_counter)
        if self.example_counter > 0 and not self.config.debug:
            self.save(metrics=metrics)
            quality = metrics["rewards_eval/accuracies"] if self.loss.uses_reference else -metrics["loss/eval"]
            if quality > self.best:  # never so for NaN
                self.best = quality
                self._point("BEST")

    def score_all_then_free_reference(self) -> None:
        """Know the reference's log-probabilities of all pairs of the run, from a file or scored now; then free it.

        Raises InputError if the file holds something else than the reference gives now.
        """
        known = self.objective.reference_logps
        path = Path(get_local_dir(self.config.local_dirs)) / "reference_logps" / f"{self.reference_digest}.npz"
        read, seed = self.grid.from_rank_0(
            (read_logps(path) if self.rank == 0 and path.exists() else {}, random.randrange(2**32))
        )
        batches = itertools.chain(self.eval_batches, self._train_batches())
        over = self.progress.over(batches, total=len(self.eval_batches) + self.data.report.updates, what="score")
        n_scored = known.score_all(over, partial(self.objective.score, self.reference_model), read, seed=seed)
        if self.rank == 0:
            known.save(path)
        self.progress.line(f"{n_scored:,} pairs scored by the reference, {len(read):,} responses read from {path}")
        self.reference_model = None

    def samples(self) -> list[Sample]:
        """Continuations of the first `n_eval_model_samples` evaluation prompts, in whole batches, at least one."""
        n_batches = max(1, self.config.n_eval_model_samples // self.config.eval_batch_size)
        batches = [batch.batch for batch in self.eval_batches[:n_batches]]
        over = partial(self.progress.over, total=n_batches, what="sample")
        self.policy.eval()
        texts = [
            sample_batches(model, self._continuations, over(batches), self.grid) for model in self._sampled_models()
        ]
        policy, reference = texts if len(texts) > 1 else (texts[0], [None] * len(texts[0]))
        return list(map(Sample, [prompt for batch in batches for prompt in batch["prompt"]], policy, reference))

    def get_batch_samples(self, batch: Batch) -> tuple[list[str], list[str]]:
        """(policy, reference) continuations of the batch's prompts; none of a reference that is not there."""
        policy, *reference = (self._continuations(model, batch) for model in self._sampled_models())
        return policy, reference[0] if reference else []

    def _continuations(self, model: Any, batch: Batch) -> list[str]:
        seed, max_length = [self.seed, self.example_counter], self.config.max_length
        return sample_rows(model, batch, self.tokenizer, self.grid, max_length=max_length, seed=seed)

    def _sampled_models(self) -> list[Any]:
        return [self.policy] if self.reference_model is None else [self.policy, self.reference_model]

    def save(self, output_dir: str | Path | None = None, metrics: dict[str, float] | None = None) -> None:
        """Write policy, optimizer and scheduler to `output_dir`, or to `step-N` in the run, which LATEST then names."""
        directory = Path(output_dir) if output_dir else self._step_dir()
        stateful = {"policy": self.policy, "optimizer": self.optimizer, "scheduler": self.scheduler}
        states = ((name, full_state(part.state_dict())) for name, part in stateful.items())  # collectives, one by one
        if self.rank != 0:
            deque(states, maxlen=0)
            return
        write_checkpoint(directory, states, step_idx=self.example_counter, metrics=metrics)
        if output_dir is None:
            self._point("LATEST")
        self.progress.line(f"saved {directory}")

    # --- helpers ---------------------------------------------------------------------------------------------------

    def self_test(self) -> None:
        """The step-0 checks, on the first two evaluation examples per process."""
        if not self.config.self_test:
            return
        first = self.eval_batches[0].batch
        rows = {key: value[: 2 * self.grid.data_size] for key, value in first.items()}
        [microbatch] = self.objective.layout.split(rows, 1, rank=self.grid.data_rank, size=self.grid.data_size)
        notes = self_test(
            self.policy,
            self.reference_model,
            lambda model: self.objective.forward(model, microbatch),
            loss_name=self.config.loss.name,
            loss_options=loss_options(self.config.loss),
            same_dtype=self.compute_dtype == self.config.model.reference_dtype,
        )
        for note in notes:
            self.progress.line(note)

    def _train_batches(self) -> Iterator[GlobalBatch]:
        return self.batches.train(
            self.config.batch_size,
            parts=self.config.gradient_accumulation_steps,
            n_epochs=self.config.n_epochs,
            n_examples=self.config.n_examples,
        )

    def _step_dir(self) -> Path:
        return self.run_dir / f"step-{self.example_counter}"

    def _point(self, name: str) -> None:
        if self.rank == 0:
            point(self.run_dir / name, self._step_dir())

    def _make_logger(self) -> Logger:
        config = self.config
        if self.rank != 0:
            return NullLogger()
        files = FileLogger(self.run_dir)
        if config.debug or not config.wandb.enabled:
            return files
        wandb = WandbLogger(
            name=config.exp_name,
            project=config.wandb.project,
            entity=config.wandb.entity,
            config=redact(OmegaConf.to_container(config, resolve=True)),
            run_dir=self.run_dir,
            interval=config.minimum_log_interval_secs,
        )
        return Loggers(files, wandb)


class FSDPTrainer(BasicTrainer):
    """Parameters, gradients and optimizer state sharded over the processes, policy and reference alike."""

    multi_process = True

    @classmethod
    def device_map(cls) -> None:
        return None  # on the CPU until it is sharded

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        return distribute(model, self.grid, block_name=self.config.model.block_name, compute_dtype=compute_dtype)


class TensorParallelTrainer(FSDPTrainer):
    """Every layer cut over `tensor_parallel_size` processes (null: all); the rest of the processes share as in FSDP."""

    cuts_layers = True

    @staticmethod
    def tensor_size(config: DictConfig, world_size: int) -> int:
        return config.tensor_parallel_size or world_size


TRAINERS = {trainer.__name__: trainer for trainer in (BasicTrainer, FSDPTrainer, TensorParallelTrainer)}
