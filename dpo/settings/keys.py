"""Keys of the config: rule of each, whether a resumed run may change it, conditions for an effect.

Meaning and default of each key are in `config/`. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from dpo.losses import LOSSES
from dpo.settings.choices import (
    ATTENTION,
    AUTOCAST_DTYPES,
    CACHING,
    DIVERGENCES,
    DTYPES,
    LAYOUTS,
    LORA,
    LR_SCALINGS,
    NAN_POLICIES,
    ONLINE,
    OPTIMIZERS,
    REFERENCES,
    SCHEDULES,
    SCORERS,
    TENSOR_PARALLEL_BACKENDS,
    TIES,
    TRAINERS,
)
from dpo.settings.plan import Plan


class Rule(NamedTuple):
    """Conditions on a value: `holds(value)`, and, if there are `choices`, to be one of them."""

    holds: Callable[[Any], bool]
    wanted: str
    choices: tuple[str, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _or_null(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.holds(v), f"{rule.wanted}, or null", rule.choices)


def _choice(names: Iterable[str]) -> Rule:
    return Rule(lambda v: isinstance(v, str), "a name", tuple(names))


SEED = Rule(lambda v: _is_int(v) and 0 <= v < 2**32, "an integer from 0 to 2**32 - 1")
COUNT = Rule(lambda v: _is_int(v) and v > 0, "an integer >= 1")
RANK = Rule(lambda v: _is_int(v) and 0 < v <= 65536, "an integer from 1 to 65536")
AT_LEAST_2 = Rule(lambda v: _is_int(v) and v >= 2, "an integer >= 2 (the newest may be corrupt)")
SEVERAL_SAMPLES = Rule(
    lambda v: _is_int(v) and 2 <= v <= 1024,
    "an integer from 2, a best and a worst, to 1024: all answers to eval_batch_size prompts are drawn as one batch",
)
NATURAL = Rule(lambda v: _is_int(v) and v >= 0, "an integer >= 0")
NUMBER = Rule(lambda v: _is_number(v) and math.isfinite(v), "a number")
LARGEST = 3.4e38  # of float32
FINITE = Rule(lambda v: _is_number(v) and 0 < v <= LARGEST, "a number above 0")
SECONDS = Rule(lambda v: _is_number(v) and 0 < v <= 10**7, "seconds above 0, ten million at most")
POSITIVE = Rule(lambda v: _is_number(v) and v > 0, "a number above 0")
NON_NEGATIVE = Rule(lambda v: _is_number(v) and v >= 0, "a number, 0 or more")
WEIGHT = Rule(  # which float32 holds, also multiplied by a loss
    lambda v: _is_number(v) and 0 <= v <= 1e30, "a number from 0 to 1e30"
)
FLAG = Rule(lambda v: isinstance(v, bool), "true or false")
TEXT = Rule(lambda v: isinstance(v, str) and bool(v.strip()), "a text")
PROJECT = Rule(
    lambda v: TEXT.holds(v) and len(v) <= 128 and not set(v) & set("/\\#?%:"),
    "a name of at most 128 characters without / \\ # ? % :, as W&B wants it",
)
GROUP = Rule(lambda v: TEXT.holds(v) and len(v) <= 128, "a text of at most 128 characters, as W&B wants it")
TAGS = Rule(
    lambda v: isinstance(v, list) and all(TEXT.holds(tag) and len(tag) <= 64 for tag in v) and len(set(v)) == len(v),
    "a list of different texts of at most 64 characters, as W&B wants them, such as [dpo,first]",
)
PATH = Rule(lambda v: isinstance(v, str) and bool(v.strip()) and "\0" not in v, "a path")
NAMES = Rule(
    lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v) and len(set(v)) == len(v),
    "a list of different names, such as [hh] or [hh,shp]",
)
DATASETS = Rule(
    lambda v: TEXT.holds(v) or NAMES.holds(v),
    "a name, a path or a Hub id, or a list of different ones, such as hh, [hh,shp] or data/mine.csv",
)
PATHS = Rule(lambda v: isinstance(v, list) and bool(v) and all(map(PATH.holds, v)), "a list of paths")
RUN_NAME = Rule(
    lambda v: TEXT.holds(v) and not os.path.isabs(v) and ".." not in v.split("/") and "\0" not in v,
    "a name for the run, relative and without '..'",
)
TOP_P = Rule(lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1")
SHARE = Rule(lambda v: _is_number(v) and 0 <= v < 1, "a number in [0, 1)")
FUNCTION = Rule(
    lambda v: isinstance(v, str) and bool(re.fullmatch(r"[^\0]+\.py:[^\W\d]\w*", v)),
    "a file and a function in it, such as rewards.py:score",
)
FRACTION = Rule(lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
DROPOUT = Rule(lambda v: _is_number(v) and 0 <= v < 1, "a number in [0, 1)")
LAYERS = Rule(
    lambda v: v == "auto" or (NAMES.holds(v)), "auto, or a list of different names of layers, such as [q_proj,v_proj]"
)
SMOOTHING = Rule(lambda v: _is_number(v) and 0 <= v < 0.5, "a number in [0, 0.5): the fraction of flipped pairs")
BETWEEN = Rule(lambda v: _is_number(v) and 0 < v < 1, "a number above 0 and below 1")
ANYTHING = Rule(lambda v: True, "anything")
PORT = Rule(lambda v: _is_int(v) and 0 < v < 65536, "a port from 1 to 65535")
DTYPE = _choice(DTYPES)


class Needs(NamedTuple):
    """Condition for a key to have an effect. If it is not met, a message names the key.

    The run is `refused` instead if it would compute something else than was asked for."""

    what: str
    met: Callable[[Mapping[str, Any], Plan], Any]  # (values by dotted key, plan) -> true or false
    refused: bool = False


SEVERAL = Needs("a trainer of several processes: trainer=FSDPTrainer", lambda values, plan: plan.trainer.multi_process)
DIFFERENT_ROWS = Needs(
    "several processes that see different rows: trainer=FSDPTrainer", lambda values, plan: plan.dims.data_size > 1
)
DECAY = Needs(
    "schedule=linear or schedule=cosine", lambda values, plan: values.get("schedule") != "constant", refused=True
)
FREE_PORT = Needs(
    "processes that train.py starts itself: trainer=FSDPTrainer, without a launcher",
    lambda values, plan: plan.trainer.multi_process and not plan.launched,
)
GATHERED = Needs(
    "a trainer of several processes: trainer=FSDPTrainer, or use model.autocast", SEVERAL.met, refused=True
)
CUT_LAYERS = Needs("trainer=TensorParallelTrainer", lambda values, plan: plan.trainer.cuts_layers, refused=True)
CUT_OR_1 = CUT_LAYERS._replace(met=lambda values, plan: plan.trainer.cuts_layers or values["tensor_parallel_size"] == 1)
REFERENCE = Needs(
    f"a loss with a reference: any but {', '.join(name for name, loss in LOSSES.items() if not loss.reference)}",
    lambda values, plan: plan.loss.reference,
)
TO_THE_REFERENCE = REFERENCE._replace(refused=True)
PAIRS = Needs(
    f"a loss of pairs: any but {', '.join(name for name, loss in LOSSES.items() if not loss.pairwise)}",
    lambda values, plan: plan.loss.pairwise,
    refused=True,
)
MARGIN = Needs(
    "a loss whose log-ratios enter by their difference alone: "
    f"loss={' or '.join(name for name, loss in LOSSES.items() if loss.reference and loss.of_margin)}",
    lambda values, plan: plan.loss.reference and plan.loss.of_margin,
    refused=True,
)
ALPHA = Needs("loss.f_divergence=alpha", lambda values, plan: values.get("loss.f_divergence") == "alpha")
OWN_REFERENCE = REFERENCE._replace(
    what=f"{REFERENCE.what}, and a model of its own that gives it: lora=none, or lora.reference=model",
    met=lambda values, plan: plan.reference == "model",
)
COPIED_REFERENCE = Needs(
    f"{REFERENCE.what}, and lora=none",
    lambda values, plan: plan.reference == "model" and plan.lora is None,
    refused=True,
)
SCORED_BY = {
    name: Needs(f"online.scorer={name}", lambda values, plan, name=name: values.get("online.scorer") == name)
    for name in ("reward_model", "function", "keyword")
}
SAMPLES = Needs(
    "sample_during_eval=true, or online=online", lambda values, plan: values.get("sample_during_eval") or plan.online
)
SAMPLES_OF_EVALUATIONS = Needs("sample_during_eval=true", lambda values, plan: values.get("sample_during_eval"))
FIRST_SAMPLES = Needs(
    "do_first_eval=true and sample_during_eval=true",
    lambda values, plan: values.get("do_first_eval") and values.get("sample_during_eval"),
)
NO_DEBUG = Needs("debug=false", lambda values, plan: not values.get("debug"))
WANDB = Needs(
    "wandb.enabled=true and debug=false", lambda values, plan: values.get("wandb.enabled") and not values.get("debug")
)


class Resume(Enum):
    """Whether a resumed run may change a key."""

    KEEP = "as it was: another value would make it another run"
    CHANGE = "may change: where it runs, how it rounds, how long it trains, what it logs"
    ANEW = "may change, and is not worth a line: each command has its own"


KEEP, CHANGE, ANEW = Resume


class Key(NamedTuple):
    """All conditions on a key."""

    rule: Rule
    resume: Resume
    needs: Needs | None = None
    how_to_set: str = ""  # advice if it has no value; "": give KEY=VALUE


def key_of_option(default: Any) -> Key:
    """Key for a loss's option without a row: a value like its default in `config/loss`, or for '???' a number."""
    if isinstance(default, bool):
        return Key(FLAG, KEEP)
    if _is_number(default) or default == "???":
        return Key(NUMBER, KEEP)
    return Key(TEXT if isinstance(default, str) else ANYTHING, KEEP)


KEYS: dict[str, Key] = {
    "seed": Key(SEED, KEEP),
    "exp_name": Key(RUN_NAME, ANEW, how_to_set="exp_name=NAME names the run"),
    "batch_size": Key(COUNT, KEEP),
    "eval_batch_size": Key(COUNT, CHANGE),
    "debug": Key(FLAG, CHANGE),
    "fsdp_port": Key(_or_null(PORT), CHANGE, FREE_PORT),
    "world_size": Key(_or_null(COUNT), CHANGE),
    "fsdp_shard_size": Key(_or_null(COUNT), CHANGE, SEVERAL._replace(refused=True)),
    "tensor_parallel_size": Key(_or_null(COUNT), CHANGE, CUT_OR_1),
    "tensor_parallel.backend": Key(_choice(TENSOR_PARALLEL_BACKENDS), CHANGE, CUT_LAYERS),
    "collective_timeout_secs": Key(SECONDS, CHANGE, SEVERAL),
    "datasets": Key(DATASETS, KEEP),
    "wandb.enabled": Key(FLAG, CHANGE),
    "wandb.entity": Key(_or_null(TEXT), CHANGE, WANDB),
    "wandb.project": Key(PROJECT, CHANGE, WANDB),
    "wandb.group": Key(_or_null(GROUP), ANEW, WANDB),
    "wandb.tags": Key(TAGS, CHANGE, WANDB),
    "wandb.notes": Key(_or_null(TEXT), CHANGE, WANDB),
    "wandb.artifacts": Key(FLAG, CHANGE, WANDB),
    "tensorboard.enabled": Key(FLAG, CHANGE, NO_DEBUG),
    "local_dirs": Key(PATHS, ANEW),
    "local_run_dir": Key(PATH, ANEW),
    "sample_during_eval": Key(FLAG, CHANGE),
    "n_eval_model_samples": Key(COUNT, CHANGE, SAMPLES),
    "n_eval_tokens": Key(_or_null(COUNT), CHANGE, SAMPLES_OF_EVALUATIONS),
    "do_first_eval": Key(FLAG, CHANGE),
    "do_first_sampling": Key(_or_null(FLAG), CHANGE, FIRST_SAMPLES),
    "lr": Key(FINITE, KEEP),
    "lr_scaling": Key(_choice(LR_SCALINGS), KEEP, DIFFERENT_ROWS),
    "gradient_accumulation_steps": Key(COUNT, CHANGE),
    "max_grad_norm": Key(POSITIVE, KEEP),
    "max_length": Key(COUNT, KEEP),
    "max_prompt_length": Key(COUNT, KEEP),
    "n_epochs": Key(_or_null(COUNT), CHANGE),
    "n_examples": Key(_or_null(COUNT), CHANGE),
    "n_eval_examples": Key(COUNT, CHANGE),
    "trainer": Key(_choice(TRAINERS), CHANGE),
    "optimizer": Key(_choice(OPTIMIZERS), KEEP),
    "warmup_steps": Key(NATURAL, KEEP),
    "schedule": Key(_choice(SCHEDULES), KEEP),
    "min_lr_ratio": Key(FRACTION, KEEP, DECAY),
    "layout": Key(_choice(LAYOUTS), CHANGE),
    "cache_reference_logps": Key(_choice(CACHING), CHANGE, REFERENCE),
    "num_workers": Key(NATURAL, CHANGE),
    "compile": Key(FLAG, CHANGE),
    "activation_checkpointing": Key(FLAG, CHANGE),
    "eval_every": Key(COUNT, CHANGE),
    "save_every": Key(_or_null(COUNT), CHANGE, NO_DEBUG),
    "keep_checkpoints": Key(_or_null(AT_LEAST_2), CHANGE, NO_DEBUG),
    "export": Key(FLAG, CHANGE, NO_DEBUG),
    "resume": Key(_or_null(PATH), ANEW),
    "nan_policy": Key(_choice(NAN_POLICIES), CHANGE),
    "deterministic": Key(FLAG, CHANGE),
    "dry_run": Key(FLAG, ANEW),
    "ledger": Key(FLAG, CHANGE),
    "report": Key(FLAG, CHANGE),
    "minimum_log_interval_secs": Key(NON_NEGATIVE, CHANGE),
    "self_test": Key(FLAG, CHANGE),
    "model.name_or_path": Key(
        TEXT,
        KEEP,
        how_to_set="choose model=pythia28 or another of config/model, or give model.name_or_path=DIR_OR_HUB_ID",
    ),
    "model.tokenizer_name_or_path": Key(_or_null(TEXT), KEEP),
    "model.archive": Key(
        _or_null(PATH),
        CHANGE,
        how_to_set="give model.archive=RUN_OF_SFT/LATEST, or null to start from the weights of model.name_or_path",
    ),
    "model.block_name": Key(_or_null(TEXT), CHANGE),
    "model.policy_dtype": Key(DTYPE, KEEP),
    "model.fsdp_policy_mp": Key(_or_null(DTYPE), KEEP, GATHERED),
    "model.reference_dtype": Key(_or_null(DTYPE), KEEP, OWN_REFERENCE),
    "model.autocast": Key(_or_null(_choice(AUTOCAST_DTYPES)), KEEP),
    "model.attn_implementation": Key(_choice(ATTENTION), CHANGE),
    "model.random_init": Key(FLAG, KEEP),
    "model.trust_remote_code": Key(FLAG, KEEP),
    "loss.name": Key(_choice(LOSSES), KEEP),
    "loss.beta": Key(
        FINITE,
        KEEP,
        how_to_set="loss.beta=0.1 is the DPO paper's choice",
    ),
    "loss.label_smoothing": Key(SMOOTHING, KEEP),
    "loss.reference_free": Key(FLAG, KEEP),
    "loss.average": Key(FLAG, KEEP),
    "loss.gamma": Key(NUMBER, KEEP),
    "loss.tau": Key(FINITE, KEEP),
    "loss.penalty": Key(WEIGHT, KEEP),
    "loss.alpha": Key(NUMBER, KEEP),
    "loss.momentum": Key(FRACTION, KEEP),
    "loss.sft_weight": Key(WEIGHT, KEEP, PAIRS),
    "loss.wpo": Key(FLAG, KEEP, TO_THE_REFERENCE),
    "loss.ld_alpha": Key(FRACTION, KEEP, TO_THE_REFERENCE),
    "loss.f_divergence": Key(_choice(DIVERGENCES), KEEP, MARGIN),
    "loss.f_alpha": Key(BETWEEN, KEEP, ALPHA),
    **{f"loss.weights.{name}": Key(WEIGHT, KEEP) for name, loss in LOSSES.items() if loss.can_be_mixed},
    "lora.name": Key(_choice(LORA), KEEP),
    "lora.r": Key(RANK, KEEP),
    "lora.alpha": Key(FINITE, KEEP),
    "lora.dropout": Key(DROPOUT, KEEP),
    "lora.target_modules": Key(LAYERS, KEEP),
    "lora.reference": Key(_choice(REFERENCES), KEEP, REFERENCE),
    "online.name": Key(_choice(ONLINE), KEEP),
    "online.n_samples": Key(SEVERAL_SAMPLES, KEEP),
    "online.scorer": Key(
        _choice(SCORERS), KEEP, how_to_set=f"give online.scorer={', '.join(SCORERS[:-1])} or {SCORERS[-1]}"
    ),
    "online.reward_model": Key(_or_null(TEXT), KEEP, SCORED_BY["reward_model"]),
    "online.function": Key(_or_null(FUNCTION), KEEP, SCORED_BY["function"]),
    "online.keyword": Key(_or_null(TEXT), KEEP, SCORED_BY["keyword"]),
    "online.temperature": Key(FINITE, KEEP),
    "online.top_p": Key(TOP_P, KEEP),
    "online.max_new_tokens": Key(COUNT, KEEP),
    "online.missing_eos_penalty": Key(WEIGHT, KEEP),
    "online.ties": Key(_choice(TIES), KEEP),
    "online.sync_reference_every": Key(_or_null(COUNT), KEEP, COPIED_REFERENCE),
    "online.mix_offline": Key(SHARE, KEEP),
}

# name in other trainers -> name here
ALIASES = {
    "learning_rate": "lr",
    "optim": "optimizer",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "lr_schedule": "schedule",
    "min_lr": "min_lr_ratio, a fraction of lr",
    "min_lr_rate": "min_lr_ratio",
    "scale_lr": "lr_scaling",
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
    "precompute_ref_log_probs": "cache_reference_logps=all",
    "torch_compile": "compile",
    "eval_strategy": "eval_every, in examples",
    "eval_steps": "eval_every, in examples",
    "save_steps": "save_every, in examples",
    "save_total_limit": "keep_checkpoints",
    "logging_steps": "minimum_log_interval_secs, in seconds",
    "resume_from_checkpoint": "resume",
    "output_dir": "local_run_dir",
    "run_name": "exp_name",
    "report_to": "wandb.enabled, or tensorboard.enabled",
    "use_tensorboard": "tensorboard.enabled",
    "dataset": "datasets",
    "dataset_name": "datasets",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "torch_dtype": "model.policy_dtype",
    "dtype": "model.policy_dtype",
    "bf16": "model.autocast=bfloat16, or model.fsdp_policy_mp=bfloat16 under FSDPTrainer",
    "fp16": "model.policy_dtype",
    "attn_implementation": "model.attn_implementation",
    "trust_remote_code": "model.trust_remote_code",
    "beta": "loss.beta",
    "loss_type": "loss",
    "label_smoothing": "loss.label_smoothing, which TRL's sigmoid ignores; loss=dpo becomes conservative DPO by it",
    "reference_free": "loss.reference_free",
    "loss_weights": "loss=mix, and loss.weights.NAME",
    "rpo_alpha": "loss.sft_weight",
    "use_weighting": "loss.wpo",
    "f_divergence_type": "loss.f_divergence",
    "f_alpha_divergence_coef": "loss.f_alpha, 1 minus it",
    "discopop_tau": "loss.tau",
    "simpo_gamma": "loss.gamma",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "use_peft": "lora=lora",
    "load_in_4bit": "lora=qlora",
    "reward_model_path": "online.reward_model",
    "reward_funcs": "online.function",
    "max_new_tokens": "online.max_new_tokens",
    "num_generations": "online.n_samples",
    "missing_eos_penalty": "online.missing_eos_penalty",
    "ref_model_sync_steps": "online.sync_reference_every, in updates",
    "wandb_project": "wandb.project",
    "wandb_group": "wandb.group",
    "wandb_tags": "wandb.tags",
    "wandb_notes": "wandb.notes",
}
