"""The three trainers: where policy and reference live. The loop they share is in `dpo/training/loop.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dpo.data.tokenization import Batch, concatenated_inputs  # noqa: F401
from dpo.losses import _get_batch_logps, preference_loss  # noqa: F401  (the reference has them here)
from dpo.models.layouts import Logps
from dpo.parallel.device_map import move_less
from dpo.parallel.sharding import distribute, find_blocks
from dpo.parallel.tensor_parallel_package import split_over_devices
from dpo.settings import choices
from dpo.settings.files import require, with_defaults
from dpo.training.loop import Trainer
from dpo.training.objective import REFERENCE
from preference_datasets import load_data


class BasicTrainer(Trainer):
    """One process; on several GPUs the layers are spread over them, on none the CPU computes.

    Keys that `config` lacks have the defaults of `config/`; `run_dir` is made if it is not there.
    """

    def __init__(
        self, policy: Any, config: DictConfig, seed: int, run_dir: str | Path, *others: Any, **named: Any
    ) -> None:
        config = with_defaults(config, run_dir=run_dir)
        require(config)
        super().__init__(policy, config, seed, run_dir, *others, **named)

    spec = choices.BASIC
    load_data = staticmethod(load_data)

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        if len({*getattr(model, "hf_device_map", {}).values()}) > 1:
            move_less(model, find_blocks(model, self.config.model.block_name))
        return model

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


class FSDPTrainer(BasicTrainer):
    """Parameters, gradients and optimizer state sharded over the processes, policy and reference alike."""

    spec = choices.FSDP

    def notes(self) -> list[str]:
        model, shards = self.config.model, self.mesh.data_size > 1 and self.mesh.device.type == "cuda"
        if not shards or model.fsdp_policy_mp or model.autocast or self.plan.compute_dtype != "float32":
            return super().notes()
        gathered_gb = 4e-9 * sum(p.numel() for p in self.policy.parameters()) / self.mesh.tensor_size
        return [
            *super().notes(),
            f"the policy is gathered and computed in float32; model.fsdp_policy_mp=bfloat16 would halve the "
            f"{gathered_gb:.3g} GB that each forward and backward pass gathers, and multiply matrices faster",
        ]

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        return distribute(model, self.mesh, block_name=self.config.model.block_name, compute_dtype=compute_dtype)


class TensorParallelTrainer(FSDPTrainer):
    """Every layer cut over `tensor_parallel_size` processes (null: all); the rest of the processes share as in FSDP."""

    spec = choices.TENSOR_PARALLEL


class PackageTensorParallelTrainer(BasicTrainer):
    """One process; every layer cut over its devices by the package `tensor_parallel`, as the reference did it."""

    spec = choices.PACKAGE

    def place(self, model: Any, *, compute_dtype: torch.dtype) -> Any:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        size = self.config.tensor_parallel_size or len(gpus)
        return split_over_devices(model, gpus[:size] or ["cpu"] * size)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        self.policy.keep_whole_state(optimizer)
        return optimizer


TRAINERS = {
    trainer.spec.name: trainer
    for trainer in (BasicTrainer, FSDPTrainer, TensorParallelTrainer, PackageTensorParallelTrainer)
}
