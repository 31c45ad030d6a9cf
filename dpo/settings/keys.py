"""The keys of the config, each declared once.

A key is a field of a section below, under the section's prefix in SECTIONS, or an option of a loss, which is a
parameter of its formula. The type has the key's bounds and choices, and says whether a resume may change it. Default
and meaning are in `config/`, conditions on several keys in `dpo/settings/validation.py`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from dpo.losses import LOSSES, list_options
from dpo.losses.formulas import Weight
from dpo.system.run_directory import get_cache_dir, get_local_dir


class Resume(Enum):
    """Permission of a resumed run to change a key."""

    KEEP = "no: another value would make it another run"
    CHANGE = "yes: where it runs, how it rounds, how long it trains, what it logs; changes are printed"
    PER_RUN = "yes: names and paths, which differ from command to command; changes are not printed"


KEEP, CHANGE, PER_RUN = Resume


class Key(NamedTuple):
    """The values that a key may have, and whether a resume may change them."""

    holds: Callable[[Any], bool]
    wanted: str  # completes "must be"
    resume: Resume = KEEP


class Problem(NamedTuple):
    """A problem of a config."""

    key: str  # whose value is the problem; "" for a condition on several keys
    sentence: str


TrainerName = Literal["BasicTrainer", "FSDPTrainer", "TensorParallelTrainer"]
Backend = Literal["dtensor", "tensor_parallel"]
Optimizer = Literal[  # a class of torch.optim
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["constant", "linear", "cosine"]
LRScaling = Literal["none", "linear", "sqrt"]
Layout = Literal["padded", "shared_prefix"]
Scorer = Literal["reward_model", "function", "keyword", "shorter"]


# --- sections ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPlan:
    seed: Annotated[int, "[0, 4294967295]"]
    exp_name: Annotated[str, PER_RUN]
    debug: Annotated[bool, CHANGE]
    local_run_dir: Annotated[str, PER_RUN]
    local_dirs: Annotated[list[str], PER_RUN]
    resume: Annotated[str | None, PER_RUN]
    save_every: Annotated[int | None, ">= 1", CHANGE]
    keep_checkpoints: Annotated[int | None, ">= 2", CHANGE]
    export: Annotated[bool, CHANGE]
    dry_run: Annotated[bool, PER_RUN]
    deterministic: Annotated[bool, CHANGE]
    trainer: Annotated[TrainerName, CHANGE]
    world_size: Annotated[int | None, ">= 1", CHANGE]
    fsdp_port: Annotated[int | None, "[1, 65535]", CHANGE]
    fsdp_shard_size: Annotated[int | None, ">= 1", CHANGE]
    tensor_parallel_size: Annotated[int | None, ">= 1", CHANGE]
    collective_timeout_secs: Annotated[float, "(0, 1e7]", CHANGE]

    @property
    def local_dir(self) -> str:
        """The directory of this user's runs, caches and stored data."""
        return get_local_dir(self.local_dirs)

    @property
    def cache_dir(self) -> str | None:
        """The directory of downloaded models and datasets; None: the libraries' default."""
        return get_cache_dir(self.local_dirs)


@dataclass(frozen=True)
class TensorParallelPlan:
    backend: Annotated[Backend, CHANGE]


@dataclass(frozen=True)
class FSDPPlan:
    frozen_weights: Annotated[Literal["whole", "sharded"] | None, CHANGE]
    reshard_after_forward: Annotated[bool, CHANGE]
    reduce_once: Annotated[bool, CHANGE]
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], CHANGE]


@dataclass(frozen=True)
class ModelPlan:
    name_or_path: str
    tokenizer_name_or_path: str | None
    archive: Annotated[str | None, CHANGE]
    block_name: Annotated[str | None, CHANGE]
    policy_dtype: Dtype
    fsdp_policy_mp: Dtype | None
    reference_dtype: Dtype | None
    autocast: Literal["bfloat16"] | None
    attn_implementation: Annotated[Literal["eager", "sdpa", "flash_attention_2", "varlen"], CHANGE]
    cache_implementation: Annotated[Literal["static"] | None, CHANGE]
    random_init: bool
    trust_remote_code: bool

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_name_or_path or self.name_or_path


@dataclass(frozen=True)
class AdapterPlan:
    name: Literal["none", "lora", "qlora"]
    r: Annotated[int, "[1, 65536]"]
    alpha: Annotated[float, "> 0"]
    dropout: Annotated[float, "[0, 1)"]
    target_modules: str | list[str]
    reference: Literal["base", "adapter", "model"]


@dataclass(frozen=True)
class OnlinePlan:
    name: Literal["none", "online"]
    n_samples: Annotated[int, "[2, 1024]"]
    scorer: Scorer
    reward_model: str | None
    reward_format: Literal["chat", "pair", "text"] | None
    function: str | None
    keyword: str | None
    temperature: Annotated[float, "> 0"]
    top_p: Annotated[float, "(0, 1]"]
    max_new_tokens: Annotated[int, ">= 1"]
    missing_eos_penalty: Weight
    labels: Literal["hard", "bradley_terry"]
    ties: Literal["skip", "keep"]
    sync_reference_every: Annotated[int | None, ">= 1"]
    mix_offline: Annotated[float, "[0, 1)"]
    batch_size: Annotated[int | None, ">= 1", CHANGE]


@dataclass(frozen=True)
class ChatPlan:
    """A chat template in place of the tokenizer's, and what it reads."""

    template: Annotated[str | None, CHANGE]
    template_args: Mapping[str, Any]
    template_date: Annotated[str | None, PER_RUN]  # None: that of rendering


@dataclass(frozen=True)
class DataPlan:
    datasets: str | list[str]
    dataset_sources: Mapping[str, Any]  # no key of KEYS: `places.py` checks it
    bad_records: Literal["refuse", "skip"]
    unpair: bool
    list_pairs: Literal["all", "best_worst"]
    chat: Literal["auto", "always", "never"]
    batch_size: Annotated[int, ">= 1"]
    eval_batch_size: Annotated[int, ">= 1", CHANGE]
    gradient_accumulation_steps: Annotated[int, ">= 1", CHANGE]
    max_length: Annotated[int, ">= 1"]
    max_prompt_length: Annotated[int, ">= 1"]
    truncation: Literal["auto", "keep_end", "keep_start", "drop"]
    n_epochs: Annotated[int | None, ">= 1", CHANGE]
    n_examples: Annotated[int | None, ">= 1", CHANGE]
    n_eval_examples: Annotated[int, ">= 1", CHANGE]
    num_workers: Annotated[int, ">= 0", CHANGE]
    layout: Annotated[Layout, CHANGE]


@dataclass(frozen=True)
class TrainingPlan:
    optimizer: Optimizer
    optimizer_args: Mapping[str, Any]
    lr: Annotated[float, "> 0"]
    lr_scaling: LRScaling
    warmup_steps: Annotated[int | None, ">= 0"]
    schedule: Schedule
    min_lr_ratio: Annotated[float, "[0, 1]"]
    max_grad_norm: Annotated[float, "(0, inf]"]
    cache_reference_logps: Annotated[Literal["as_needed", "all"], CHANGE]
    activation_checkpointing: Annotated[bool, CHANGE]
    compile: Annotated[bool, CHANGE]
    self_test: Annotated[bool, CHANGE]
    nan_policy: Annotated[Literal["raise", "skip"], CHANGE]


@dataclass(frozen=True)
class EvaluationPlan:
    eval_every: Annotated[int | None, ">= 1", CHANGE]
    do_first_eval: Annotated[bool, CHANGE]
    do_first_sampling: Annotated[bool, CHANGE]
    sample_during_eval: Annotated[bool, CHANGE]
    n_eval_model_samples: Annotated[int, ">= 1", CHANGE]
    n_eval_tokens: Annotated[int | None, ">= 1", CHANGE]
    sample_temperature: Annotated[float | None, "[0, 1e30]", CHANGE]
    sample_top_p: Annotated[float | None, "(0, 1]", CHANGE]
    sample_top_k: Annotated[int | None, ">= 0", CHANGE]


@dataclass(frozen=True)
class LoggingPlan:
    """The logs that a run writes beside `metrics.jsonl`."""

    minimum_log_interval_secs: Annotated[float, "[0, inf]", CHANGE]
    ledger: Annotated[bool, CHANGE]
    report: Annotated[bool, CHANGE]


@dataclass(frozen=True)
class WandbPlan:
    enabled: Annotated[bool, CHANGE]
    entity: Annotated[str | None, CHANGE]
    project: Annotated[str, CHANGE]
    group: Annotated[str | None, PER_RUN]
    tags: Annotated[list[str], CHANGE]
    notes: Annotated[str | None, CHANGE]
    artifacts: Annotated[bool, CHANGE]


@dataclass(frozen=True)
class TensorBoardPlan:
    enabled: Annotated[bool, CHANGE]


SECTIONS: dict[type, str] = {  # each with the prefix of its keys
    RunPlan: "",
    DataPlan: "",
    TrainingPlan: "",
    EvaluationPlan: "",
    LoggingPlan: "",
    FSDPPlan: "fsdp_",
    TensorParallelPlan: "tensor_parallel.",
    ChatPlan: "chat_",
    WandbPlan: "wandb.",
    TensorBoardPlan: "tensorboard.",
    ModelPlan: "model.",
    AdapterPlan: "lora.",
    OnlinePlan: "online.",
}


# --- reading ----------------------------------------------------------------------------------------------------------


def is_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def are_names(value: Any) -> bool:
    """Return whether a value is a list of different texts."""
    return isinstance(value, list) and all(map(is_text, value)) and len(value) == len(set(value))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda v: is_number(v) and isinstance(v, int), "an integer"),
    float: (is_number, "a number"),
    bool: (lambda v: isinstance(v, bool), "true or false"),
    str: (is_text, "a text"),
    list[str]: (are_names, "a list of different texts, such as [a,b]"),
    str | list[str]: (lambda v: is_text(v) or (are_names(v) and v), "a text, or a list of different ones"),
    Mapping[str, Any]: (
        lambda v: isinstance(v, dict) and all(map(is_text, v)),
        "a mapping of names to values, such as {weight_decay: 0.01}",
    ),
}


def read_key(annotation: Any) -> Key:
    """Read a type, such as `Annotated[int | None, ">= 1", CHANGE]`, whose marks are bounds and a Resume."""
    plain, *marks = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    may_be_null = NoneType in get_args(plain)
    if may_be_null:
        plain = get_args(plain)[0]
    choices = get_args(plain) if get_origin(plain) is Literal else ()
    has_type, wanted = TYPES.get(plain, (lambda v: v in choices, f"one of {', '.join(choices)}"))
    [bounds] = [mark for mark in marks if isinstance(mark, str)] or [""]
    [resume] = [mark for mark in marks if isinstance(mark, Resume)] or [KEEP]

    def holds(value: Any) -> bool:
        if value is None:
            return may_be_null
        return bool(has_type(value)) and (not is_number(value) or _is_within(value, bounds))

    if bounds:
        wanted += f" {bounds}".replace(" > ", " above ") if bounds.startswith(">") else f" in {bounds}"
    return Key(holds, f"{wanted}, or null" if may_be_null else wanted, resume)


def _is_within(value: float, bounds: str) -> bool:
    """Return whether a number is within bounds such as `> 0`, `>= 1` or `[0, 1)`; without any, it must be finite."""
    if not bounds:
        return -math.inf < value < math.inf
    if bounds.startswith(">"):
        sign, low = bounds.split()
        return (value >= float(low) if sign == ">=" else value > float(low)) and value < math.inf
    low, high = map(float, bounds[1:-1].split(", "))
    return low < value < high or (value == low and bounds[0] == "[") or (value == high and bounds[-1] == "]")


def _list_keys() -> dict[str, Key]:
    keys = {}
    for section, prefix in SECTIONS.items():
        types = get_type_hints(section, include_extras=True)
        names = [field.name for field in fields(section) if field.name != "dataset_sources"]
        keys |= {f"{prefix}{name}": read_key(types[name]) for name in names}
    options = {"name": Literal[tuple(LOSSES)], **list_options()}
    options |= {f"weights.{name}": Weight for name, loss in LOSSES.items() if loss.can_be_mixed}
    return keys | {f"loss.{name}": read_key(annotation) for name, annotation in options.items()}


KEYS = _list_keys()
REMOVED = {  # keys that went: the last commit that had it, and what to use
    "dataset_sources.NAME.format": (
        "9949121b; leave it out, as columns are recognized by their names, or name them with "
        "dataset_sources.NAME.columns"
    ),
}
