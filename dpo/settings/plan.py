"""Plan of a run from its config: trainer, layout of processes, dtypes. Imports no torch.

`resolve` alone decides these; validation, launch, memory prediction and trainers read the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from omegaconf import DictConfig

from dpo.losses import LOSSES, Loss, find_loss
from dpo.settings.choices import (
    ADAPTED,
    BASIC,
    QUANTIZED,
    REFERENCES,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_BACKENDS,
    TRAINERS,
    TrainerSpec,
)
from dpo.settings.files import flatten
from dpo.system.gpus import count_gpus
from dpo.system.rank_env import find_rank_env


class ParallelDims(NamedTuple):
    """Numbers of processes, in all and in each group: the axes of `dpo.parallel.mesh.Mesh`."""

    world_size: int = 1
    shard_size: int = 1  # share one copy of weights, gradients and optimizer state
    tensor_size: int = 1  # cut each layer

    @classmethod
    def of(cls, world_size: int, *, shard_size: int | None = None, tensor_size: int = 1) -> ParallelDims:
        """Fill in the sizes; `shard_size` None: one copy for all processes."""
        return cls(world_size, shard_size or world_size // tensor_size, tensor_size)

    @property
    def data_size(self) -> int:
        """Number of processes that see different rows."""
        return self.world_size // self.tensor_size

    @property
    def replicate_size(self) -> int:
        """Number of whole copies of weights, gradients and optimizer state."""
        return self.data_size // self.shard_size


@dataclass(frozen=True)
class Plan:
    """A config resolved on this machine."""

    trainer: TrainerSpec
    dims: ParallelDims
    compute_dtype: str  # of the policy
    reference_dtype: str
    autocast: str | None
    loss: Loss
    reference: str | None  # source of its log-probabilities, one of choices.REFERENCES; None: the loss needs none
    launched: bool  # whether torchrun or Slurm started the processes
    gpus: int  # of this machine
    quantized: bool = False  # whether the base under an adapter is 4-bit
    trains_all: bool = True  # all weights; else those of an adapter
    online: bool = False  # pairs are drawn from the policy
    follow_every: int | None = None  # updates after which the reference becomes a copy of the policy


def resolve(config: DictConfig, *, trainer: TrainerSpec | None = None, world_size: int | None = None) -> Plan:
    """Plan a run from the valid keys of its config; validation reports the problems of the others.

    Callers give `trainer` and `world_size` if the trainer is constructed and the processes are started already.
    """
    values, rank_env, gpus = flatten(config), find_rank_env(), count_gpus()
    trainer = trainer or _find_trainer(values)
    size = world_size or 1
    if world_size is None and rank_env is not None:
        size = rank_env.world_size
    elif world_size is None and trainer.multi_process:
        size = _count(values, "world_size") or max(1, gpus)
    tensor_size = 1
    if trainer.cuts_layers and trainer.multi_process:
        every_process = values.get("tensor_parallel_size") is None
        tensor_size = size if every_process else _count(values, "tensor_parallel_size") or 1
    gathered_dtype = values.get("model.fsdp_policy_mp") if trainer.multi_process else None
    compute_dtype = gathered_dtype or values.get("model.policy_dtype")
    loss = _find_loss(values)
    reference = _find_reference(values) if loss.reference else None
    return Plan(
        trainer=trainer,
        dims=ParallelDims.of(size, shard_size=_count(values, "fsdp_shard_size"), tensor_size=tensor_size),
        compute_dtype=compute_dtype,
        reference_dtype=(values.get("model.reference_dtype") if reference == "model" else None) or compute_dtype,
        autocast=values.get("model.autocast"),
        loss=loss,
        reference=reference,
        launched=rank_env is not None,
        gpus=gpus,
        quantized=values.get("lora.name") in QUANTIZED,
        trains_all=values.get("lora.name") not in ADAPTED,
        online=values.get("online.name") == "online",
        follow_every=_count(values, "online.sync_reference_every"),
    )


def _find_trainer(values: Mapping[str, Any]) -> TrainerSpec:
    """The trainer that `trainer` and `tensor_parallel.backend` name; BasicTrainer if they name none."""
    trainer = _named(TRAINERS, values.get("trainer"), BASIC)
    if trainer is TENSOR_PARALLEL:
        return _named(TENSOR_PARALLEL_BACKENDS, values.get("tensor_parallel.backend"), trainer)
    return trainer


def _find_loss(values: Mapping[str, Any]) -> Loss:
    """The loss that `loss.name` and, for a mix, `loss.weights` name; DPO if they name none."""
    name = values.get("loss.name")
    weights = {key.removeprefix("loss.weights."): value for key, value in values.items() if "loss.weights." in key}
    known = {part: weight for part, weight in weights.items() if part in LOSSES and LOSSES[part].can_be_mixed}
    return find_loss({"name": name, "weights": known}) if isinstance(name, str) and name in LOSSES else LOSSES["dpo"]


def _find_reference(values: Mapping[str, Any]) -> str:
    """The source of the reference's log-probabilities; without an adapter, a separate model."""
    if values.get("lora.name") not in ADAPTED:
        return "model"
    wanted = values.get("lora.reference")
    return wanted if wanted in REFERENCES else "base"


def _named(table: Mapping[str, Any], name: Any, default: Any) -> Any:
    """The table's entry for a name, or the default if there is none or the name is not a text."""
    return table.get(name, default) if isinstance(name, str) else default


def _count(values: Mapping[str, Any], key: str) -> int | None:
    """A key's value if it is a positive integer."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
