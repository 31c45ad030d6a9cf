"""The plan of a run: its config as typed values, under the names of its keys. Imports no torch."""

import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpo.losses import LOSSES, Loss, find_loss
from dpo.redaction import redact
from dpo.settings import keys
from dpo.settings.keys import KEYS, choose_defaults, dotted, find_defaults, find_key, load_plugins
from dpo.settings.places import name_datasets
from dpo.system.host import count_gpus
from dpo.system.launching import find_rank_env

UNCOUNTED = -1  # the number of GPUs in a plan that is made before they are counted, which may import torch


class ParallelDims(NamedTuple):
    """Numbers of processes along the axes of `dpo.parallel.mesh.Mesh`."""

    world_size: int = 1
    shard_size: int = 1  # processes that share one copy of weights, gradients and optimizer state
    tensor_size: int = 1  # processes that share each layer

    @property
    def data_size(self) -> int:
        """Number of groups of processes that see different examples; the processes of a group share tensors."""
        return self.world_size // self.tensor_size

    @property
    def replicate_size(self) -> int:
        """Number of copies of weights, gradients and optimizer state."""
        return self.data_size // self.shard_size


@dataclass(frozen=True)
class Plan:
    """A config resolved on this machine."""

    trainer: keys.TrainerSpec
    dims: ParallelDims
    compute_dtype: str  # dtype in which the policy computes
    reference_dtype: str
    loss: Loss
    # The source of the reference's log-probabilities, a choice of `lora.reference`; None: the loss has no reference.
    reference: str | None
    gpus: int  # number of this machine's GPUs, or UNCOUNTED
    tensorboard: bool
    has_new_run_dir: bool  # whether local_run_dir is the default, a directory that no other run has
    values: Mapping  # the values of all keys, by dotted key; also wrong ones, so that they can be reported
    # --- the keys by section
    run: keys.RunPlan
    data: keys.DataPlan
    training: keys.TrainingPlan
    evaluation: keys.EvaluationPlan
    fsdp: keys.FSDPPlan
    chat: keys.ChatPlan
    wandb: keys.WandbPlan
    model: keys.ModelPlan
    lora: keys.AdapterPlan | None  # None: all weights are trained
    online: keys.OnlinePlan | None  # None: the pairs are those of the data

    @property
    def quantized(self) -> bool:
        return self.lora is not None and self.lora.name == "qlora"

    @property
    def frozen_whole_is_exact(self) -> bool:
        """Whether policy and reference start out equal under `fsdp_frozen_weights=whole`.

        It rounds the base to the dtype in which the policy computes. A second model as reference is not rounded, so it
        differs, unless it has this dtype anyway, or the base has.
        """
        dtypes = (self.model.policy_dtype, self.reference_dtype)
        return self.lora is None or self.reference != "model" or self.compute_dtype in dtypes

    @property
    def trains_half_precision(self) -> bool:
        """Whether the trained weights have 16 bits; an adapter's weights always have 32."""
        return self.lora is None and self.model.policy_dtype != "float32"

    @property
    def precise_settings(self) -> str:
        """The overrides with which a run computes as fast as with 16-bit weights, and loses no update to rounding."""
        key = "model.fsdp_policy_mp" if self.trainer.multi_process else "model.autocast"
        return f"model.policy_dtype=float32 {key}={self.model.policy_dtype}"

    @property
    def best(self) -> tuple[str, int]:
        """The metric that ranks checkpoints, and +1 if higher is better, else -1."""
        return (keys.HELD_OUT_SCORE, +1) if self.online else self.loss.best

    @property
    def follow_every(self) -> int | None:
        """Number of updates between syncs of the reference; None: no syncs."""
        return self.online.sync_reference_every if self.online else None

    @property
    def n_microbatches(self) -> int:
        """Number of backward passes of an update in each process."""
        fewest = 1  # such that no microbatch has more than `microbatch_size` examples
        if self.data.microbatch_size:
            fewest = math.ceil(self.data.batch_size / (self.data.microbatch_size * self.dims.data_size))
        return max(fewest, self.data.gradient_accumulation_steps)

    @property
    def n_eval_microbatches(self) -> int:
        """Number of forward passes for an evaluation batch in each process.

        It is 1, or more if `microbatch_size` asks for more passes of an update than gradient_accumulation_steps, as
        after a resume with fewer processes.
        """
        n_passes = math.ceil(self.n_microbatches / self.data.gradient_accumulation_steps)
        return min(n_passes, math.ceil(self.data.eval_batch_size / self.dims.data_size))

    @property
    def n_offline(self) -> int:
        """Number of examples of a batch that come from the datasets."""
        share = self.online.mix_offline if self.online else 1.0
        return round(share * self.data.batch_size)

    @property
    def caches_all_reference_logps(self) -> bool:
        """Whether the reference scores all examples before training, after which its memory is freed."""
        return self.reference is not None and self.training.cache_reference_logps == "all"

    def nested_values(self) -> dict:
        """Return `{"a": {"b": 1}}` for the values `{"a.b": 1}`."""
        return _nest(self.values)

    def change(self, key: str, value: Any) -> "Plan":
        """Return a plan with another value of one key, and what follows from it; GPUs and processes stay as counted."""
        return make_plan(
            {**self.values, key: value},
            world_size=self.dims.world_size,
            gpus=self.gpus,
            has_new_run_dir=self.has_new_run_dir,
        )


def resolve(
    config: DictConfig | Mapping,
    *,
    world_size: int | None = None,
    gpus: int | None = None,
    with_plugins: bool = False,
    typed: Collection[str] = (),
) -> Plan:
    """Make the plan of a config, which may lack keys; `find_problems` says what is wrong with it.

    `world_size` and `gpus` follow from config and machine, unless they are given. `with_plugins` runs the plugins that
    the config names: never do so with the config of an earlier run, which may be someone else's. `typed` are the keys
    that a command line sets. An option that the chosen loss lacks is wrong if it is typed; in a config file, which may
    be for several losses, it has no effect.
    """
    nested: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    if with_plugins:
        load_plugins(nested.get("plugins"))
    composed = OmegaConf.merge(choose_defaults(dict(dotted(nested))), nested)
    values = name_datasets(flatten(composed))
    if isinstance(values["local_run_dir"], str):
        values["local_run_dir"] = os.path.expanduser(values["local_run_dir"])
    if keys.is_text(values["chat_template"]):  # a later command may run in another directory
        values["chat_template"] = os.path.abspath(os.path.expanduser(values["chat_template"]))
    if keys.are_names(values["plugins"]):
        values["plugins"] = [os.path.abspath(os.path.expanduser(file)) for file in values["plugins"]]
    defaults = find_defaults(values)
    # Config files may set options of other losses. Drop an option that the chosen loss lacks; replace a value by the
    # default if only other losses accept it, as their options of the same name may have other types.
    for key in [key for key in values if key in KEYS and key.startswith("loss.") and key not in typed]:
        fits = {name: find_key(key, name).accepts(values[key]) for name in LOSSES}  # whether a loss accepts the value
        if key not in defaults:
            del values[key]
        elif any(fits.values()) and not fits.get(str(values["loss.name"])):
            values[key] = defaults[key]
    has_new_run_dir = "get_local_run_dir" in str(composed)  # the default's resolver makes a name for each run
    return make_plan(values, world_size=world_size, gpus=gpus, has_new_run_dir=has_new_run_dir)


def flatten(config: DictConfig) -> dict:
    """Return the config as one flat dict, from dotted keys to plain values, with interpolations resolved.

    MISSING and interpolations that cannot be resolved are kept as they are, for the checks to report.
    """
    values = {}
    for key, value in dotted(OmegaConf.to_container(config)):  # type: ignore[arg-type]
        if "${" in str(value):
            with suppress(OmegaConfBaseException):
                value = OmegaConf.select(config, key)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
        # An empty mapping is a section without keys, which is left out, unless it is itself the value of a key, such as
        # `optimizer_args`. `dataset_sources` is such a key too, but not in KEYS, as `places.py` checks it.
        if value != {} or key in KEYS or key == "dataset_sources":
            values[key] = value
    return values


def make_plan(
    unchecked: Mapping, *, world_size: int | None = None, gpus: int | None = None, has_new_run_dir: bool = False
) -> Plan:
    """Make the plan of values by dotted key on this machine; a wrong or missing value counts as its default.

    `world_size` and `gpus` are found out unless they are passed.
    """
    values = find_defaults(unchecked)
    for key, value in unchecked.items():
        if key not in KEYS or find_key(key, unchecked.get("loss.name")).accepts(value):
            values[key] = value
    if gpus is None:
        gpus = count_gpus()
    trainer = keys.TRAINERS[values["trainer"]]
    if trainer.cuts_layers and values["tensor_parallel.backend"] == "tensor_parallel":
        trainer = keys.PACKAGE
    if world_size is None:
        world_size = 1
        if launched := find_rank_env():
            world_size = launched.world_size
        elif trainer.multi_process:
            world_size = values["world_size"] or max(1, gpus)
    tensor_size = 1
    if trainer == keys.TENSOR_PARALLEL:
        tensor_size = values["tensor_parallel_size"] or world_size
    shard_size = values["fsdp_shard_size"] or max(1, world_size // tensor_size)  # by default all share one copy
    loss = LOSSES["dpo"]  # if the name is wrong
    if values["loss.name"] in LOSSES:
        loss = find_loss(_nest({key: value for key, value in values.items() if key in KEYS})["loss"])
    sections: dict = {}
    for name, (section, prefix) in keys.SECTIONS.items():
        sections[name] = None
        if values.get(f"{name}.name") != "none":  # only `lora` and `online` can be none
            sections[name] = section(**{field: values[prefix + field] for field in section._fields})
    fsdp_dtype = values["model.fsdp_policy_mp"] if trainer.multi_process else None
    compute_dtype = fsdp_dtype or values["model.policy_dtype"]
    reference = None
    if loss.reference:
        reference = values["lora.reference"] if sections["lora"] else "model"
    reference_dtype = compute_dtype  # without a model of its own, the reference computes in the policy's dtype
    if reference == "model" and values["model.reference_dtype"]:
        reference_dtype = values["model.reference_dtype"]
    return Plan(
        trainer=trainer,
        dims=ParallelDims(world_size, shard_size, tensor_size),
        compute_dtype=compute_dtype,
        reference_dtype=reference_dtype,
        loss=loss,
        reference=reference,
        gpus=gpus,
        tensorboard=values["tensorboard.enabled"],
        has_new_run_dir=has_new_run_dir,
        values=unchecked,
        **sections,
    )


def _nest(values: Mapping) -> dict:
    nested = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        section = nested
        for group in groups:
            section = section.setdefault(group, {})
        section[name] = value
    return nested


def describe(plan: Plan) -> str:
    """List the settings that differ from the defaults, and which option of each group is chosen."""
    values = redact(dict(plan.values))
    defaults = find_defaults(plan.values)
    lines = ["settings that differ from the defaults:"]
    for key, value in values.items():
        if key.endswith(".name") or value != defaults.get(key):
            lines.append(f"  {key}={value!r}")
    return "\n".join(lines)
