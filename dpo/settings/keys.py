"""Every key of the config: what its value must be, and what it needs to have an effect. Imports no torch.

What each key means and its default are in `config/`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Processes(NamedTuple):
    """The processes of a run, what there is for them, and what their trainer and loss can do."""

    world_size: int  # of them in all
    tensor_size: int  # how many cut each layer among them
    several: bool  # whether the trainer knows what to do with more than one
    launched: bool  # whether torchrun or Slurm started them
    gpus: int  # of this machine
    cuts_layers: bool = False  # whether tensor_parallel_size and its backend say anything to the trainer
    can_sample: bool = True
    can_autocast: bool = True
    uses_reference: bool = True


class Rule(NamedTuple):
    holds: Callable[[Any], bool]
    wanted: str


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _or_null(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.holds(v), f"{rule.wanted}, or null")


SEED = Rule(lambda v: _is_int(v) and 0 <= v < 2**32, "a whole number from 0 to 2**32 - 1")
COUNT = Rule(lambda v: _is_int(v) and v > 0, "a whole number above 0")
AT_LEAST_2 = Rule(lambda v: _is_int(v) and v >= 2, "a whole number, 2 or more: one may prove damaged")
NATURAL = Rule(lambda v: _is_int(v) and v >= 0, "a whole number, 0 or more")
FINITE = Rule(lambda v: _is_number(v) and 0 < v < math.inf, "a number above 0")
SECONDS = Rule(lambda v: _is_number(v) and 0 < v <= 10**7, "seconds above 0, ten million at most")
POSITIVE = Rule(lambda v: _is_number(v) and v > 0, "a number above 0")
NON_NEGATIVE = Rule(lambda v: _is_number(v) and v >= 0, "a number, 0 or more")
FLAG = Rule(lambda v: isinstance(v, bool), "true or false")
TEXT = Rule(lambda v: isinstance(v, str) and bool(v.strip()), "a text")
PROJECT = Rule(
    lambda v: TEXT.holds(v) and len(v) <= 128 and not set(v) & set("/\\#?%:"),
    "a name of at most 128 characters without / \\ # ? % :, as W&B wants it",
)
PATH = Rule(lambda v: isinstance(v, str) and bool(v.strip()) and "\0" not in v, "a path")
NAMES = Rule(
    lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v) and len(set(v)) == len(v),
    "a list of different names, such as [hh] or [hh,shp]",
)
PATHS = Rule(lambda v: isinstance(v, list) and bool(v) and all(map(PATH.holds, v)), "a list of paths")
RUN_NAME = Rule(
    lambda v: TEXT.holds(v) and not os.path.isabs(v) and ".." not in v.split("/") and "\0" not in v,
    "a name for the run, relative and without '..'",
)
SMOOTHING = Rule(lambda v: _is_number(v) and 0 <= v < 0.5, "a number in [0, 0.5): the fraction of flipped pairs")
PORT = Rule(lambda v: _is_int(v) and 0 < v < 65536, "a port from 1 to 65535")
CHOICE = Rule(lambda v: isinstance(v, str), "a name")  # the names themselves come from the tables that hold them

RULES: dict[str, Rule] = {
    "seed": SEED,
    "exp_name": RUN_NAME,
    "batch_size": COUNT,
    "eval_batch_size": COUNT,
    "debug": FLAG,
    "fsdp_port": _or_null(PORT),
    "world_size": _or_null(COUNT),
    "fsdp_shard_size": _or_null(COUNT),
    "tensor_parallel_size": _or_null(COUNT),
    "tensor_parallel.backend": CHOICE,
    "collective_timeout_secs": SECONDS,
    "datasets": NAMES,
    "wandb.enabled": FLAG,
    "wandb.entity": _or_null(TEXT),
    "wandb.project": PROJECT,
    "local_dirs": PATHS,
    "local_run_dir": PATH,
    "sample_during_eval": FLAG,
    "n_eval_model_samples": COUNT,
    "do_first_eval": FLAG,
    "lr": FINITE,
    "gradient_accumulation_steps": COUNT,
    "max_grad_norm": POSITIVE,
    "max_length": COUNT,
    "max_prompt_length": COUNT,
    "n_epochs": _or_null(COUNT),
    "n_examples": _or_null(COUNT),
    "n_eval_examples": COUNT,
    "trainer": CHOICE,
    "optimizer": CHOICE,
    "layout": CHOICE,
    "cache_reference_logps": CHOICE,
    "num_workers": NATURAL,
    "compile": FLAG,
    "warmup_steps": NATURAL,
    "activation_checkpointing": FLAG,
    "eval_every": COUNT,
    "minimum_log_interval_secs": NON_NEGATIVE,
    "self_test": FLAG,
    "resume": _or_null(PATH),
    "save_every": _or_null(COUNT),
    "keep_checkpoints": _or_null(AT_LEAST_2),
    "nan_policy": CHOICE,
    "deterministic": FLAG,
    "dry_run": FLAG,
    "model.name_or_path": TEXT,
    "model.tokenizer_name_or_path": _or_null(TEXT),
    "model.archive": _or_null(PATH),
    "model.block_name": _or_null(TEXT),
    "model.policy_dtype": CHOICE,
    "model.fsdp_policy_mp": _or_null(CHOICE),
    "model.reference_dtype": CHOICE,
    "model.autocast": _or_null(CHOICE),
    "model.attn_implementation": CHOICE,
    "model.random_init": FLAG,
    "model.trust_remote_code": FLAG,
    "loss.name": CHOICE,
    "loss.beta": FINITE,
    "loss.label_smoothing": SMOOTHING,
    "loss.reference_free": FLAG,
}


class Needs(NamedTuple):
    """What a key needs to have an effect. Set without it, it gets a line; or the run is `refused`, if it would compute
    otherwise than was asked for."""

    what: str
    met: Callable[[Mapping[str, Any], Processes], Any]  # of values by dotted key; true or false
    refused: bool = False


SEVERAL = Needs("a trainer of several processes: trainer=FSDPTrainer", lambda values, run: run.several)
CUT_LAYERS = Needs("trainer=TensorParallelTrainer", lambda values, run: run.cuts_layers, refused=True)
REFERENCE = Needs("a loss with a reference: loss=dpo or ipo", lambda values, run: run.uses_reference)
CHECKPOINTS = Needs("debug=false", lambda values, run: not values.get("debug"))
WANDB = Needs(
    "wandb.enabled=true and debug=false", lambda values, run: values.get("wandb.enabled") and not values.get("debug")
)
NEEDS: dict[str, Needs] = {
    "collective_timeout_secs": SEVERAL,
    "fsdp_port": Needs(
        "processes that train.py starts itself: trainer=FSDPTrainer, without a launcher",
        lambda values, run: run.several and not run.launched,
    ),
    "fsdp_shard_size": SEVERAL._replace(refused=True),
    "model.fsdp_policy_mp": Needs(
        "a trainer of several processes: trainer=FSDPTrainer, or use model.autocast",
        lambda values, run: run.several,
        refused=True,
    ),
    "tensor_parallel_size": CUT_LAYERS._replace(
        met=lambda values, run: run.cuts_layers or values["tensor_parallel_size"] == 1
    ),
    "tensor_parallel.backend": CUT_LAYERS,
    "cache_reference_logps": REFERENCE,
    "model.reference_dtype": REFERENCE,
    "n_eval_model_samples": Needs("sample_during_eval=true", lambda values, run: values.get("sample_during_eval")),
    "wandb.entity": WANDB,
    "wandb.project": WANDB,
    "save_every": CHECKPOINTS,
    "keep_checkpoints": CHECKPOINTS,
}

# what other trainers call it -> what it is here
ALIASES = {
    "learning_rate": "lr",
    "optim": "optimizer",
    "train_batch_size": "batch_size, over all processes",
    "per_device_train_batch_size": "batch_size, over all processes",
    "per_device_eval_batch_size": "eval_batch_size, over all processes",
    "num_train_epochs": "n_epochs",
    "num_epochs": "n_epochs",
    "epochs": "n_epochs",
    "max_steps": "n_examples, which is updates * batch_size",
    "warmup_ratio": "warmup_steps, in updates",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "gradient_checkpointing": "activation_checkpointing",
    "eval_steps": "eval_every, in examples",
    "save_steps": "save_every, in examples",
    "save_total_limit": "keep_checkpoints",
    "logging_steps": "minimum_log_interval_secs, in seconds",
    "resume_from_checkpoint": "resume",
    "output_dir": "local_run_dir",
    "run_name": "exp_name",
    "report_to": "wandb.enabled",
    "dataset": "datasets",
    "dataset_name": "datasets",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "torch_dtype": "model.policy_dtype",
    "dtype": "model.policy_dtype",
    "bf16": "model.autocast=bfloat16, or model.fsdp_policy_mp=bfloat16 under FSDPTrainer",
    "fp16": "model.policy_dtype",
    "attn_implementation": "model.attn_implementation",
    "beta": "loss.beta",
    "loss_type": "loss",
    "label_smoothing": "loss.label_smoothing",
    "wandb_project": "wandb.project",
}
