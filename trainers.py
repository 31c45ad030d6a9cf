"""The training loop. `BasicTrainer` runs it in one process; subclasses say only how models are spread."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from checkpoint import full_state, point, write_checkpoint
from distributed import Layout, distribute, full_tensor, gathered_weights, keep_root_gathered
from losses import (
    LOSSES,
    _get_batch_logps,  # noqa: F401  (this and the next two: the reference has them here)
    preference_loss,  # noqa: F401
)
from metrics import (
    FileLogger,
    Loggers,
    NullLogger,
    Progress,
    Sample,
    WandbLogger,
    peak_memory_gb,
    reduce_metrics,
)
from models import DTYPES, check_positions, chosen_logps, concatenated_forward, sample
from preference_datasets import iterate_batches
from preflight import TrainingData, prepare_data
from run_directory import redact
from self_test import self_test
from tokenization import Batch, concatenated_inputs  # noqa: F401
from utils import (
    InputError,
    formatted_dict,
    get_cache_dir,
    slice_and_move_batch_for_device,
)

OPTIMIZERS = {
    optimizer.__name__: optimizer
    for optimizer in (
        torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
        torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
        torch.optim.Rprop, torch.optim.SGD,
    )
}  # fmt: skip
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
        self.layout = Layout(rank, world_size, shard_size=config.fsdp_shard_size, tensor_size=tensor_size)
        self.loss = LOSSES[config.loss.name]
        if self.loss.uses_reference and reference_model is None:
            raise InputError(f"loss={config.loss.name} needs a reference model")
        self.data = data or load_data(config, silent=rank != 0)
        self.tokenizer = self.data.tokenizer
        self.data.check_vocabulary(policy.get_input_embeddings().num_embeddings)
        check_positions(policy, config.max_length)

        if config.activation_checkpointing:  # the older of the method's two names works on every transformers 5
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        dtypes = config.model
        self.compute_dtype = (dtypes.fsdp_policy_mp if self.multi_process else None) or dtypes.policy_dtype
        self.policy = self.place(policy, compute_dtype=DTYPES[self.compute_dtype])
        self.reference_model = None
        if reference_model is not None:
            self.reference_model = self.place(reference_model.eval(), compute_dtype=DTYPES[dtypes.reference_dtype])
        self.optimizer = OPTIMIZERS[config.optimizer](self.policy.parameters(), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (config.warmup_steps + 1))
        )
        self.eval_every = config.eval_every - config.eval_every % config.batch_size
        self.example_counter = self.batch_counter = 0
        self.best = -math.inf  # quality of the checkpoint that BEST names

        self.progress = Progress(interval=config.minimum_log_interval_secs, silent=rank != 0)
        if self.eval_every != config.eval_every:
            self.progress.line(
                f"warning: eval_every={config.eval_every} is not a multiple of batch_size={config.batch_size}; "
                f"evaluating every {self.eval_every} examples"
            )
        self.eval_batches = list(
            self._batches(self.data.test, config.eval_batch_size, n_epochs=None, n_examples=config.n_eval_examples)
        )
        self.train_iterator = self._batches(
            self.data.train, config.batch_size, n_epochs=config.n_epochs, n_examples=config.n_examples
        )
        self.logger = self._make_logger()

    # --- what a subclass may override ------------------------------------------------------------------------------

    multi_process = False  # whether several processes share a run, joined by a process group
    cuts_layers = False  # whether `tensor_parallel_size` and its backend say anything
    can_sample = True

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

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One update on a global batch; its metrics, means over the whole batch on every process."""
        start = time.perf_counter()
        self.policy.train()
        accumulation = self.config.gradient_accumulation_steps
        microbatches = []
        for i in range(accumulation):
            keep_root_gathered(self.policy, i < accumulation - 1)
            rows = self._local_rows(slice_and_move_batch_for_device(batch, i, accumulation, "cpu"))
            loss, metrics = self.get_batch_metrics(rows, self.config.loss, train=True)
            (loss / accumulation).backward()
            microbatches.append(metrics)
        grad_norm = self.clip_gradient()
        lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.batch_counter += 1
        self.example_counter += self.config.batch_size

        metrics = reduce_metrics(microbatches, {"grad_norm": grad_norm}, self.layout.gather)  # waits for the device
        seconds = time.perf_counter() - start
        tokens = sum(int(batch[key].sum()) for key in SEQUENCE_MASKS if key in batch)
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

    def concatenated_forward(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(chosen, rejected) log-probabilities, each (rows,)."""
        return concatenated_forward(model, batch)

    def get_batch_metrics(
        self, batch: Batch, loss_config: DictConfig, train: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of a batch of this process, and detached per-example metrics, each (rows,)."""
        split = "train" if train else "eval"
        loss = LOSSES[loss_config.name]
        if not loss.uses_reference:
            chosen = chosen_logps(self.policy, batch)
            losses, metrics = -chosen, {}
        else:
            chosen, rejected = self.concatenated_forward(self.policy, batch)
            with torch.no_grad():
                reference = self.concatenated_forward(self.reference_model, batch)
            losses, chosen_rewards, rejected_rewards = loss.on_pairs(
                chosen, rejected, *reference, **loss_options(loss_config)
            )
            metrics = {
                f"rewards_{split}/chosen": chosen_rewards,
                f"rewards_{split}/rejected": rejected_rewards,
                f"rewards_{split}/accuracies": (chosen_rewards > rejected_rewards).float(),
                f"rewards_{split}/margins": chosen_rewards - rejected_rewards,
                f"logps_{split}/rejected": rejected.detach(),
            }
        metrics |= {f"logps_{split}/chosen": chosen.detach(), f"loss/{split}": losses.detach()}
        return losses.mean(), metrics

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over the evaluation batches."""
        self.policy.eval()
        batches = self.progress.over(self.eval_batches, total=len(self.eval_batches), what="evaluate")
        metrics = [self.get_batch_metrics(self._local_rows(b), self.config.loss, train=False)[1] for b in batches]
        return reduce_metrics(metrics, {}, self.layout.gather)

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

    def samples(self) -> list[Sample]:
        """Continuations of the first `n_eval_model_samples` evaluation prompts, in whole batches, at least one."""
        n_batches = max(1, self.config.n_eval_model_samples // self.config.eval_batch_size)
        batches = self.eval_batches[:n_batches]
        self.policy.eval()
        texts = []
        for model in self._sampled_models():  # one after the other: gathered weights of both may not fit
            with gathered_weights(model):
                over = self.progress.over(batches, total=n_batches, what="sample")
                rows = [self.layout.gather_list(self._continuations(model, self._local_rows(b))) for b in over]
            texts.append([text for part in rows for text in part])
        policy, reference = texts if len(texts) > 1 else (texts[0], [None] * len(texts[0]))
        return list(map(Sample, [prompt for batch in batches for prompt in batch["prompt"]], policy, reference))

    def get_batch_samples(self, batch: Batch) -> tuple[list[str], list[str]]:
        """(policy, reference) continuations of the batch's prompts; no reference under SFT."""
        policy, *reference = (self._continuations(model, batch) for model in self._sampled_models())
        return policy, reference[0] if reference else []

    def _continuations(self, model: Any, batch: Batch) -> list[str]:
        seed = np.random.SeedSequence([self.seed, self.example_counter, self.layout.data_rank]).generate_state(1)[0]
        return sample(
            model,
            batch,
            self.tokenizer,
            max_length=self.config.max_length,
            seed=int(seed),
            in_step=self.world_size > 1,
        )

    def _sampled_models(self) -> list[Any]:
        return [self.policy, self.reference_model] if self.loss.uses_reference else [self.policy]

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
        """The step-0 checks, on the first two rows of the first evaluation batch of this process."""
        if not self.config.self_test:
            return
        rows = self._local_rows(self.eval_batches[0])
        notes = self_test(
            self.policy,
            self.reference_model,
            {key: value[:2] for key, value in rows.items()},
            loss_name=self.config.loss.name,
            loss_options=loss_options(self.config.loss),
            same_dtype=self.compute_dtype == self.config.model.reference_dtype,
        )
        for note in notes:
            self.progress.line(note)

    def _batches(
        self, prompts: list, batch_size: int, *, n_epochs: int | None, n_examples: int | None
    ) -> Iterator[Batch]:
        return iterate_batches(
            prompts,
            self.data.encode,
            batch_size=batch_size,
            shuffle=True,
            max_length=self.config.max_length,
            max_prompt_length=self.config.max_prompt_length,
            sft_mode=not self.loss.uses_reference,
            n_epochs=n_epochs,
            n_examples=n_examples,
            seed=self.seed,
        )

    def _local_rows(self, batch: Batch) -> dict[str, Any]:
        """This process's rows, on its device."""
        device = next(self.policy.parameters()).device
        return slice_and_move_batch_for_device(batch, self.layout.data_rank, self.layout.data_size, device)

    def _step_dir(self) -> Path:
        return self.run_dir / f"step-{self.example_counter}"

    def _point(self, name: str) -> None:
        if self.rank == 0:
            point(self.run_dir / name, self._step_dir())

    def _make_logger(self) -> Any:
        if self.rank != 0:
            return NullLogger()
        files = FileLogger(self.run_dir)
        if self.config.debug or not self.config.wandb.enabled:
            return files
        return Loggers(
            files,
            WandbLogger(
                name=self.config.exp_name,
                project=self.config.wandb.project,
                entity=self.config.wandb.entity,
                config=redact(OmegaConf.to_container(self.config, resolve=True)),
                run_dir=self.run_dir,
                interval=self.config.minimum_log_interval_secs,
            ),
        )


def loss_options(loss_config: DictConfig) -> dict[str, float | bool]:
    """The keys of `config/loss/NAME.yaml` other than its name."""
    return {key: value for key, value in loss_config.items() if key != "name"}


class FSDPTrainer(BasicTrainer):
    """Parameters, gradients and optimizer state sharded over the processes, policy and reference alike."""

    multi_process = True

    @classmethod
    def device_map(cls) -> None:
        return None  # on the CPU until it is sharded

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        return distribute(model, self.layout, block_name=self.config.model.block_name, compute_dtype=compute_dtype)


class TensorParallelTrainer(FSDPTrainer):
    """Every layer cut over `tensor_parallel_size` processes (null: all); the rest of the processes share as in FSDP."""

    cuts_layers = True

    @staticmethod
    def tensor_size(config: DictConfig, world_size: int) -> int:
        return config.tensor_parallel_size or world_size


TRAINERS = {trainer.__name__: trainer for trainer in (BasicTrainer, FSDPTrainer, TensorParallelTrainer)}
