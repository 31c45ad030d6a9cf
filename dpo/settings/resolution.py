"""What a composed config comes to with the tables that we have: its trainer, its processes, every problem.

Heavy imports wait until they are needed, so that `train.py --help` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from dpo.settings.keys import Processes


def find_config_problems(config: DictConfig) -> list[str]:
    """Everything wrong with a composed config, with the names that our tables hold today."""
    from dpo.losses import LOSSES
    from dpo.models.layouts import LAYOUTS
    from dpo.models.pretrained import ATTENTION, DTYPES
    from dpo.reporting.anomalies import POLICIES
    from dpo.settings.validation import find_problems
    from dpo.training.optimization import OPTIMIZERS
    from dpo.training.reference import CACHING
    from preference_datasets import BUILT_IN
    from trainers import TENSOR_PARALLEL_BACKENDS, TRAINERS

    choices = {
        "trainer": TRAINERS,
        "tensor_parallel.backend": TENSOR_PARALLEL_BACKENDS,
        "optimizer": OPTIMIZERS,
        "loss.name": LOSSES,
        "model.policy_dtype": DTYPES,
        "model.fsdp_policy_mp": DTYPES,
        "model.reference_dtype": DTYPES,
        "model.autocast": ("bfloat16",),
        "model.attn_implementation": ATTENTION,
        "layout": LAYOUTS,
        "cache_reference_logps": CACHING,
        "nan_policy": POLICIES,
    }
    return find_problems(config, choices=choices, data_names=BUILT_IN, processes=count_processes(config))


def find_trainer(config: DictConfig) -> Any:
    """The class that `trainer` and its backend name; BasicTrainer if they name none."""
    from dpo.settings.validation import flatten
    from trainers import TENSOR_PARALLEL_BACKENDS, TRAINERS, BasicTrainer, TensorParallelTrainer

    values = flatten(config)
    trainer = _named(TRAINERS, values.get("trainer"), BasicTrainer)
    if trainer is TensorParallelTrainer:
        return _named(TENSOR_PARALLEL_BACKENDS, values.get("tensor_parallel.backend"), trainer)
    return trainer


def _named(table: dict[str, Any], name: Any, default: Any) -> Any:
    """What a table has under a name that may be anything."""
    return table.get(name, default) if isinstance(name, str) else default


def count_processes(config: DictConfig) -> Processes:
    """How many processes a config runs in, as far as its keys make sense."""
    import torch

    from dpo.losses import LOSSES
    from dpo.settings.keys import COUNT, Processes
    from dpo.settings.validation import flatten
    from dpo.system.rank_env import find_rank_env

    trainer, rank_env, gpus, values = find_trainer(config), find_rank_env(), torch.cuda.device_count(), flatten(config)
    asked, tensor_size = values.get("world_size"), values.get("tensor_parallel_size")
    size = 1
    if rank_env is not None:
        size = rank_env.world_size
    elif trainer.multi_process:
        size = asked if COUNT.holds(asked) else max(1, gpus)
    return Processes(
        size,
        trainer.tensor_size(config, size) if tensor_size is None or COUNT.holds(tensor_size) else 1,
        several=trainer.multi_process,
        launched=rank_env is not None,
        gpus=gpus,
        cuts_layers=trainer.cuts_layers,
        can_sample=trainer.can_sample,
        can_autocast=trainer.can_autocast,
        uses_reference=_named(LOSSES, values.get("loss.name"), LOSSES["dpo"]).reference,
    )
