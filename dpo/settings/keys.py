"""Keys of the config: their values, and which a resume may change.

The meaning and default of each key are in `config/`, and conditions on several keys in `dpo/settings/validation.py`.
Imports no torch.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Collection
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from dpo.losses import LOSSES
from dpo.settings.choices import (
    ATTENTION,
    AUTOCAST_DTYPES,
    BAD_RECORDS,
    CACHES,
    CACHING,
    CHATS,
    DIVERGENCES,
    DTYPES,
    FROZEN_WEIGHTS,
    LABELS,
    LAYOUTS,
    LIST_PAIRS,
    LORA,
    LR_SCALINGS,
    NAN_POLICIES,
    ONLINE,
    OPTIMIZERS,
    REDUCE_DTYPES,
    REFERENCES,
    REWARD_FORMATS,
    SCHEDULES,
    SCORERS,
    TENSOR_PARALLEL_BACKENDS,
    TIES,
    TRAINERS,
    TRUNCATIONS,
)

LARGEST = 3.4e38  # of float32; the bound of a number whose spec has none


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_int(value) or isinstance(value, float)


def is_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def _is_path(value: Any) -> bool:
    return is_text(value) and "\0" not in value


def _are_names(value: Any) -> bool:
    """Return whether a value is a nonempty list of different texts."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value)) and len(value) == len(set(value))


def _is_run_name(value: Any) -> bool:
    return _is_path(value) and not os.path.isabs(value) and ".." not in value.split("/")


def _is_date(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", value))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # kind: test of a value, and description for messages
    "int": (is_int, "an integer"),
    "number": (is_number, "a number"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "name": (lambda v: isinstance(v, str), "a name"),  # one of the key's choices
    "text": (is_text, "a text"),
    "path": (_is_path, "a path"),
    "paths": (lambda v: isinstance(v, list) and bool(v) and all(map(_is_path, v)), "a list of paths"),
    "datasets": (
        lambda v: is_text(v) or _are_names(v),
        "a name, a path or a Hub id, or a list of different ones, such as hh, [hh,shp] or data/mine.csv",
    ),
    "arguments": (
        lambda v: isinstance(v, dict) and all(map(is_text, v)),
        "a mapping of names to values, such as {weight_decay: 0.01} or {enable_thinking: false}",
    ),
    "layers": (
        lambda v: v in ("auto", "all-linear") or _are_names(v),
        "auto, or a list of different names of layers, such as [q_proj,v_proj]",
    ),
    "run_name": (_is_run_name, "a name for the run, relative and without '..'"),
    "function": (
        lambda v: isinstance(v, str) and bool(re.fullmatch(r"[^\0]+\.py:[^\W\d]\w*", v)),
        "a file and a function in it, such as rewards.py:score",
    ),
    "project": (
        lambda v: is_text(v) and len(v) <= 128 and not set(v) & set("/\\#?%:"),
        "a name of at most 128 characters without / \\ # ? % :, as W&B wants it",
    ),
    "group": (lambda v: is_text(v) and len(v) <= 128, "a text of at most 128 characters, as W&B wants it"),
    "tags": (
        lambda v: v == [] or (_are_names(v) and all(len(tag) <= 64 for tag in v)),
        "a list of different texts of at most 64 characters, as W&B wants them, such as [dpo,first]",
    ),
    "date": (_is_date, "a date in quotes, such as '2025-12-31'"),
    "anything": (lambda v: True, "anything"),
}


class Rule(NamedTuple):
    """A test of a value, and its description, which completes "must be"."""

    holds: Callable[[Any], bool]
    wanted: str


@cache
def read_rule(spec: str) -> Rule:
    """Read a spec: a kind, bounds, "or null", and a reason.

    Only the kind, a key of KINDS, is required. Examples: `int >= 1`, `number [0, 1)`, `path or null`,
    `int >= 2 or null: the newest may be corrupt`.
    """
    condition, colon, reason = spec.partition(":")
    not_null_condition, or_null, _ = condition.partition(" or null")
    kind, _, bounds = not_null_condition.partition(" ")
    is_of_kind, description = KINDS[kind]
    if kind in ("int", "number"):
        in_bounds, bounds_description = _read_bounds(bounds)
        description += bounds_description
    else:
        in_bounds = None
    if or_null:
        description += ", or null"

    def holds(value: Any) -> bool:
        if value is None:
            return bool(or_null)
        return is_of_kind(value) and (in_bounds is None or in_bounds(value))

    return Rule(holds, f"{description}{colon}{reason}")


def _read_bounds(bounds: str) -> tuple[Callable[[float], bool], str]:
    """Read bounds such as `> 0` or `[0, 1)`.

    Returns a test of a number, and the description of the bounds.
    """
    sign, _, number = bounds.partition(" ")
    if not bounds:
        interval, description = f"[-{LARGEST}, {LARGEST}]", ""
    elif sign == ">":
        interval, description = f"({number}, {LARGEST}]", f" above {number}"
    elif sign == ">=":
        interval, description = f"[{number}, {LARGEST}]", f" {bounds}"
    elif bounds.startswith("[") and bounds.endswith("]"):
        interval, description = bounds, f" from {bounds[1:-1].replace(', ', ' to ')}"
    else:
        interval, description = bounds, f" in {bounds}"
    low, high = map(float, interval[1:-1].split(", "))
    is_above = operator.ge if interval.startswith("[") else operator.gt
    is_below = operator.le if interval.endswith("]") else operator.lt
    return lambda v: is_above(v, low) and is_below(v, high), description


class Resume(Enum):
    """Permission of a resumed run to change a key."""

    KEEP = "no: another value would make it another run"
    CHANGE = "yes: where it runs, how it rounds, how long it trains, what it logs; changes are printed"
    PER_RUN = "yes: names and paths, which differ from command to command; changes are not printed"


KEEP, CHANGE, PER_RUN = Resume


class Key(NamedTuple):
    """The values that a key may have, and whether they may change."""

    spec: str  # of its values, for `read_rule`
    resume: Resume
    choices: Collection[str] = ()  # the values that a key of kind "name" may have
    how_to_set: str = ""  # advice for a key without a value; "": give KEY=VALUE


class Problem(NamedTuple):
    """A problem of a config."""

    key: str  # whose value is the problem; "" for a condition on several keys
    sentence: str


def make_option_key(default: Any) -> Key:
    """Make the entry for a loss's option that KEYS lacks.

    The option takes values of the type of its default in `config/loss`. An option without a default ('???') is a
    number.
    """
    if isinstance(default, bool):
        return Key("flag", KEEP)
    if is_number(default) or default == "???":
        return Key("number", KEEP)
    return Key("text" if isinstance(default, str) else "anything or null", KEEP)


KEYS: dict[str, Key] = {
    "seed": Key("int [0, 4294967295]", KEEP),
    "exp_name": Key("run_name", PER_RUN, how_to_set="exp_name=NAME names the run"),
    "batch_size": Key("int >= 1", KEEP),
    "eval_batch_size": Key("int >= 1", CHANGE),
    "debug": Key("flag", CHANGE),
    "fsdp_port": Key("int [1, 65535] or null", CHANGE),
    "world_size": Key("int >= 1 or null", CHANGE),
    "fsdp_shard_size": Key("int >= 1 or null", CHANGE),
    "fsdp_frozen_weights": Key("name or null", CHANGE, FROZEN_WEIGHTS),
    "fsdp_reshard_after_forward": Key("flag", CHANGE),
    "fsdp_reduce_once": Key("flag", CHANGE),
    "fsdp_reduce_dtype": Key("name", CHANGE, REDUCE_DTYPES),
    "tensor_parallel_size": Key("int >= 1 or null", CHANGE),
    "tensor_parallel.backend": Key("name", CHANGE, TENSOR_PARALLEL_BACKENDS),
    "collective_timeout_secs": Key("number (0, 1e7]", CHANGE),
    "datasets": Key("datasets", KEEP),
    "bad_records": Key("name", KEEP, BAD_RECORDS),
    "unpair": Key("flag", KEEP),
    "list_pairs": Key("name", KEEP, LIST_PAIRS),
    "chat": Key("name", KEEP, CHATS),
    "chat_template": Key("path or null", CHANGE),
    "chat_template_args": Key("arguments", KEEP),
    "chat_template_date": Key("date or null", PER_RUN),
    "wandb.enabled": Key("flag", CHANGE),
    "wandb.entity": Key("text or null", CHANGE),
    "wandb.project": Key("project", CHANGE),
    "wandb.group": Key("group or null", PER_RUN),
    "wandb.tags": Key("tags", CHANGE),
    "wandb.notes": Key("text or null", CHANGE),
    "wandb.artifacts": Key("flag", CHANGE),
    "tensorboard.enabled": Key("flag", CHANGE),
    "local_dirs": Key("paths", PER_RUN),
    "local_run_dir": Key("path", PER_RUN),
    "sample_during_eval": Key("flag", CHANGE),
    "n_eval_model_samples": Key("int >= 1", CHANGE),
    "n_eval_tokens": Key("int >= 1 or null", CHANGE),
    "sample_temperature": Key("number [0, 1e30] or null", CHANGE),
    "sample_top_p": Key("number (0, 1] or null", CHANGE),
    "sample_top_k": Key("int >= 0 or null", CHANGE),
    "do_first_eval": Key("flag", CHANGE),
    "do_first_sampling": Key("flag", CHANGE),
    "lr": Key("number > 0", KEEP),
    "lr_scaling": Key("name", KEEP, LR_SCALINGS),
    "gradient_accumulation_steps": Key("int >= 1", CHANGE),
    "max_grad_norm": Key("number (0, inf]", KEEP),
    "max_length": Key("int >= 1", KEEP),
    "max_prompt_length": Key("int >= 1", KEEP),
    "truncation": Key("name", KEEP, TRUNCATIONS),
    "n_epochs": Key("int >= 1 or null", CHANGE),
    "n_examples": Key("int >= 1 or null", CHANGE),
    "n_eval_examples": Key("int >= 1", CHANGE),
    "trainer": Key("name", CHANGE, TRAINERS),
    "optimizer": Key("name", KEEP, OPTIMIZERS),
    "optimizer_args": Key("arguments", KEEP),
    "warmup_steps": Key("int >= 0 or null", KEEP),
    "schedule": Key("name", KEEP, SCHEDULES),
    "min_lr_ratio": Key("number [0, 1]", KEEP),
    "layout": Key("name", CHANGE, LAYOUTS),
    "cache_reference_logps": Key("name", CHANGE, CACHING),
    "num_workers": Key("int >= 0", CHANGE),
    "compile": Key("flag", CHANGE),
    "activation_checkpointing": Key("flag", CHANGE),
    "eval_every": Key("int >= 1 or null", CHANGE),
    "save_every": Key("int >= 1 or null", CHANGE),
    "keep_checkpoints": Key("int >= 2 or null: the newest may be corrupt", CHANGE),
    "export": Key("flag", CHANGE),
    "resume": Key("path or null", PER_RUN),
    "nan_policy": Key("name", CHANGE, NAN_POLICIES),
    "deterministic": Key("flag", CHANGE),
    "dry_run": Key("flag", PER_RUN),
    "ledger": Key("flag", CHANGE),
    "report": Key("flag", CHANGE),
    "minimum_log_interval_secs": Key("number [0, inf]", CHANGE),
    "self_test": Key("flag", CHANGE),
    "model.name_or_path": Key(
        "text",
        KEEP,
        how_to_set="choose model=pythia28 or another of config/model, or give model.name_or_path=DIR_OR_HUB_ID",
    ),
    "model.tokenizer_name_or_path": Key("text or null", KEEP),
    "model.archive": Key(
        "path or null",
        CHANGE,
        how_to_set="give model.archive=RUN_OF_SFT/LATEST, or null to start from the weights of model.name_or_path",
    ),
    "model.block_name": Key("text or null", CHANGE),
    "model.policy_dtype": Key("name", KEEP, DTYPES),
    "model.fsdp_policy_mp": Key("name or null", KEEP, DTYPES),
    "model.reference_dtype": Key("name or null", KEEP, DTYPES),
    "model.autocast": Key("name or null", KEEP, AUTOCAST_DTYPES),
    "model.attn_implementation": Key("name", CHANGE, ATTENTION),
    "model.cache_implementation": Key("name or null", CHANGE, CACHES),
    "model.random_init": Key("flag", KEEP),
    "model.trust_remote_code": Key("flag", KEEP),
    "loss.name": Key("name", KEEP, LOSSES),
    "loss.beta": Key(
        "number > 0",
        KEEP,
        how_to_set="loss.beta=0.1 is the DPO paper's choice",
    ),
    "loss.label_smoothing": Key("number [0, 0.5): the fraction of flipped pairs", KEEP),
    "loss.reference_free": Key("flag", KEEP),
    "loss.average": Key("flag", KEEP),
    "loss.gamma": Key("number", KEEP),
    "loss.tau": Key("number > 0", KEEP),
    "loss.penalty": Key("number [0, 1e30]", KEEP),
    "loss.alpha": Key("number", KEEP),
    "loss.momentum": Key("number [0, 1]", KEEP),
    "loss.desirable_weight": Key("number [0, 1e30]", KEEP),
    "loss.undesirable_weight": Key("number [0, 1e30]", KEEP),
    "loss.centering": Key("number [0, 1e30]", KEEP),
    "loss.sft_weight": Key("number [0, 1e30]", KEEP),
    "loss.wpo": Key("flag", KEEP),
    "loss.offset_by_margin": Key("flag", KEEP),
    "loss.ld_alpha": Key("number [0, 1]", KEEP),
    "loss.f_divergence": Key("name", KEEP, DIVERGENCES),
    "loss.f_alpha": Key("number (0, 1)", KEEP),
    **{f"loss.weights.{name}": Key("number [0, 1e30]", KEEP) for name, loss in LOSSES.items() if loss.can_be_mixed},
    "lora.name": Key("name", KEEP, LORA),
    "lora.r": Key("int [1, 65536]", KEEP),
    "lora.alpha": Key("number > 0", KEEP),
    "lora.dropout": Key("number [0, 1)", KEEP),
    "lora.target_modules": Key("layers", KEEP),
    "lora.reference": Key("name", KEEP, REFERENCES),
    "online.name": Key("name", KEEP, ONLINE),
    "online.n_samples": Key(
        "int [2, 1024]: at least a best and a worst; all answers to a prompt are in one batch", KEEP
    ),
    "online.batch_size": Key("int >= 1 or null", CHANGE),
    "online.scorer": Key(
        "name", KEEP, SCORERS, how_to_set=f"give online.scorer={', '.join(SCORERS[:-1])} or {SCORERS[-1]}"
    ),
    "online.reward_model": Key("text or null", KEEP),
    "online.reward_format": Key("name or null", KEEP, REWARD_FORMATS),
    "online.function": Key("function or null", KEEP),
    "online.keyword": Key("text or null", KEEP),
    "online.temperature": Key("number > 0", KEEP),
    "online.top_p": Key("number (0, 1]", KEEP),
    "online.max_new_tokens": Key("int >= 1", KEEP),
    "online.missing_eos_penalty": Key("number [0, 1e30]", KEEP),
    "online.labels": Key("name", KEEP, LABELS),
    "online.ties": Key("name", KEEP, TIES),
    "online.sync_reference_every": Key("int >= 1 or null", KEEP),
    "online.mix_offline": Key("number [0, 1)", KEEP),
}
