"""The plan of a run: its config as typed values.

Fields have the names of the config's keys. Validation, launch, memory prediction and trainers read the plan; packages
below `settings` do not read the config. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig

from dpo.losses import LOSSES, Loss, find_loss
from dpo.settings.choices import (
    ADAPTED,
    BASIC,
    HELD_OUT_SCORE,
    QUANTIZED,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_BACKENDS,
    TRAINERS,
    TrainerSpec,
)
from dpo.settings.files import flatten, load_defaults
from dpo.settings.keys import (
    KEYS,
    SECTIONS,
    AdapterPlan,
    ChatPlan,
    DataPlan,
    EvaluationPlan,
    FSDPPlan,
    LoggingPlan,
    ModelPlan,
    OnlinePlan,
    RunPlan,
    TrainingPlan,
    WandbPlan,
)
from dpo.system.host import count_gpus
from dpo.system.launching import find_rank_env


class ParallelDims(NamedTuple):
    """Numbers of processes along the axes of `dpo.parallel.mesh.Mesh`."""

    world_size: int = 1
    shard_size: int = 1  # processes that share one copy of weights, gradients and optimizer state
    tensor_size: int = 1  # processes that share each layer

    @classmethod
    def of(cls, world_size: int, *, shard_size: int | None = None, tensor_size: int = 1) -> ParallelDims:
        """Find the sizes; without `shard_size`, all processes share one copy."""
        return cls(world_size, shard_size or world_size // tensor_size, tensor_size)

    @property
    def data_size(self) -> int:
        """Number of processes that see different examples."""
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
    compute_dtype: str  # dtype in which the policy computes
    reference_dtype: str
    loss: Loss
    # source of the reference's log-probabilities, a choice of `lora.reference`; None: the loss has no reference
    reference: str | None
    launched: bool  # whether torchrun or Slurm started the processes
    gpus: int  # number of this machine's GPUs
    run: RunPlan
    fsdp: FSDPPlan
    model: ModelPlan
    lora: AdapterPlan | None  # None: all weights are trained
    online: OnlinePlan | None  # None: the pairs are those of the data
    chat: ChatPlan
    data: DataPlan
    training: TrainingPlan
    evaluation: EvaluationPlan
    logging: LoggingPlan
    wandb: WandbPlan
    tensorboard: bool
    values: Mapping[str, Any]  # of all keys, by dotted key

    @property
    def quantized(self) -> bool:
        """Return whether the base of the adapter is stored in 4 bits."""
        return self.lora is not None and self.lora.name in QUANTIZED

    @property
    def has_frozen_weights(self) -> bool:
        """Return whether there is a separate reference, or an adapter's base."""
        return self.reference == "model" or self.lora is not None

    @property
    def can_hold_frozen_whole(self) -> bool:
        """Return whether `fsdp_frozen_weights=whole` keeps base and reference equal.

        Held whole, an adapter's base is rounded to the dtype in which it computes. A reference that is a second model
        still equals the base if the base had this dtype before, or if the reference has this dtype too.
        """
        if self.lora is None or self.reference != "model":
            return True
        return self.compute_dtype in (self.model.policy_dtype, self.reference_dtype)

    @property
    def best(self) -> tuple[str, int]:
        """The metric that ranks checkpoints; +1 if higher is better, else -1."""
        return (HELD_OUT_SCORE, +1) if self.online else self.loss.best

    @property
    def follow_every(self) -> int | None:
        """Number of updates between syncs of the reference; None: no syncs."""
        return self.online.sync_reference_every if self.online else None

    @property
    def prompts_at_a_time(self) -> int:
        """Number of prompts that a process answers at a time in training."""
        batch_size = (self.online and self.online.batch_size) or self.data.eval_batch_size
        return max(1, batch_size // self.dims.data_size)

    @property
    def n_offline(self) -> int:
        """Number of examples of a batch that come from the datasets."""
        share = self.online.mix_offline if self.online else 1.0
        return round(share * self.data.batch_size)

    @property
    def caches_reference_first(self) -> bool:
        """Return whether the reference scores all pairs before the first update."""
        return self.reference is not None and self.training.cache_reference_logps == "all"

    def nested_values(self) -> dict[str, Any]:
        """Nest `values`: `{"a.b": 1}` becomes `{"a": {"b": 1}}`."""
        nested: dict[str, Any] = {}
        for dotted_key, value in self.values.items():
            *groups, name = dotted_key.split(".")
            mapping = nested
            for group in groups:
                mapping = mapping.setdefault(group, {})
            mapping[name] = value
        return nested

    def change(self, key: str, value: Any) -> Plan:
        """Make the plan with another value of one key.

        If the key is `lora`, the value is another option of that group, such as `qlora`.
        """
        if key == "lora":
            lora_defaults = {f"lora.{name}": default for name, default in load_defaults(lora=value)["lora"].items()}
            values = {**lora_defaults, **self.values, "lora.name": value}
        else:
            values = {**self.values, key: value}
        return make_plan(values, trainer=self.trainer, world_size=self.dims.world_size)


def resolve(config: DictConfig, *, trainer: TrainerSpec | None = None, world_size: int | None = None) -> Plan:
    """Make the plan of a config, whose values may be invalid.

    Validation reports invalid values, with the help of this plan. `trainer` and `world_size` are given once the trainer
    is constructed and its processes are started; until then they follow from the config and the machine.
    """
    return make_plan(flatten(config), trainer=trainer, world_size=world_size)


def make_plan(values: Mapping[str, Any], *, trainer: TrainerSpec | None = None, world_size: int | None = None) -> Plan:
    """Make the plan of values by dotted key; see `resolve`."""
    rank_env, gpus = find_rank_env(), count_gpus()
    trainer = trainer or _find_trainer(values)
    if world_size is None and rank_env is not None:
        world_size = rank_env.world_size
    fsdp_dtype = values.get("model.fsdp_policy_mp") if trainer.multi_process else None
    compute_dtype = fsdp_dtype or values.get("model.policy_dtype")
    loss = _find_loss(values)
    reference = _find_reference(values) if loss.reference else None
    # without a model of its own, the reference computes in the policy's dtype
    reference_dtype = values.get("model.reference_dtype") if reference == "model" else None
    return Plan(
        trainer=trainer,
        dims=_find_dims(values, trainer, world_size=world_size, gpus=gpus),
        compute_dtype=compute_dtype,
        reference_dtype=reference_dtype or compute_dtype,
        loss=loss,
        reference=reference,
        launched=rank_env is not None,
        gpus=gpus,
        run=_read(RunPlan, values),
        fsdp=_read(FSDPPlan, values),
        model=_read(ModelPlan, values),
        lora=_read(AdapterPlan, values) if values.get("lora.name") in ADAPTED else None,
        online=_read(OnlinePlan, values) if values.get("online.name") == "online" else None,
        chat=_read(ChatPlan, values),
        data=_read(DataPlan, values),
        training=_read(TrainingPlan, values),
        evaluation=_read(EvaluationPlan, values),
        logging=_read(LoggingPlan, values),
        wandb=_read(WandbPlan, values),
        tensorboard=bool(values.get("tensorboard.enabled")),
        values=values,
    )


Section = TypeVar("Section")


def _read(section: type[Section], values: Mapping[str, Any]) -> Section:
    """Read a section of the plan; missing keys are None."""
    prefix = SECTIONS[section]
    return section(**{field.name: values.get(prefix + field.name) for field in fields(section)})  # type: ignore[arg-type]


def _find_trainer(values: Mapping[str, Any]) -> TrainerSpec:
    """Find the trainer; BasicTrainer stands for an unknown name."""
    trainer = _look_up(TRAINERS, values.get("trainer"), BASIC)
    if trainer is TENSOR_PARALLEL:
        return _look_up(TENSOR_PARALLEL_BACKENDS, values.get("tensor_parallel.backend"), trainer)
    return trainer


def _find_dims(values: Mapping[str, Any], trainer: TrainerSpec, *, world_size: int | None, gpus: int) -> ParallelDims:
    """Find the numbers of processes; `world_size` is None until decided."""
    if world_size is None and not trainer.multi_process:
        world_size = 1
    elif world_size is None:
        world_size = _read_size(values, "world_size") or max(1, gpus)
    tensor_size = 1
    if trainer.cuts_layers and trainer.multi_process:
        if values.get("tensor_parallel_size") is None:
            tensor_size = world_size
        else:
            tensor_size = _read_size(values, "tensor_parallel_size") or 1  # 1 stands for an invalid value
    return ParallelDims.of(world_size, shard_size=_read_size(values, "fsdp_shard_size"), tensor_size=tensor_size)


def _find_loss(values: Mapping[str, Any]) -> Loss:
    """Find the loss that `loss.name` names.

    DPO stands for an unknown name, and losses that cannot be mixed are left out of a mix: validation reports both.
    """
    name = values.get("loss.name")
    if not isinstance(name, str) or name not in LOSSES:
        return LOSSES["dpo"]
    options: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key, value in values.items():
        group, _, option = key.partition(".")
        if group != "loss":
            continue
        option_name, _, mixed_loss = option.partition(".")
        if option_name != "weights":
            options[option] = value
        elif mixed_loss in LOSSES and LOSSES[mixed_loss].can_be_mixed:
            weights[mixed_loss] = value
    return find_loss({**options, "weights": weights} if weights else options)


def _find_reference(values: Mapping[str, Any]) -> str:
    """Find the source of the reference's log-probabilities, a choice of `lora.reference`.

    Without an adapter, the source is a second model. `base` stands for an unknown name.
    """
    if values.get("lora.name") not in ADAPTED:
        return "model"
    source = values.get("lora.reference")
    return str(source) if source in KEYS["lora.reference"].choices else "base"


def _look_up(table: Mapping[str, Any], name: Any, default: Any) -> Any:
    """Look up a name, which may be a value of any type."""
    return table.get(name, default) if isinstance(name, str) else default


def _read_size(values: Mapping[str, Any], key: str) -> int | None:
    """Return a key's value if it is valid, else None."""
    value = values.get(key)
    return value if KEYS[key].rule.holds(value) else None
