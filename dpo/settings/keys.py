"""The keys of the config, each declared once.

A key is a field of a section below, under the section's prefix in SECTIONS. The field's type has the key's bounds and
choices, and says whether a resume may change it. Default and meaning are in `config/`, conditions on several keys in
`dpo/settings/validation.py`. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from dpo.losses import LOSSES
from dpo.system.run_directory import get_cache_dir, get_local_dir

LARGEST = 3.4e38  # of float32; the bound of a number that has no other


class Resume(Enum):
    """Permission of a resumed run to change a key."""

    KEEP = "no: another value would make it another run"
    CHANGE = "yes: where it runs, how it rounds, how long it trains, what it logs; changes are printed"
    PER_RUN = "yes: names and paths, which differ from command to command; changes are not printed"


KEEP, CHANGE, PER_RUN = Resume


class Rule(NamedTuple):
    """A test of a value, and its description, which completes "must be"."""

    holds: Callable[[Any], bool]
    wanted: str


class HowToSet(str):
    """Advice for a key that has no value."""


class Key(NamedTuple):
    """The values that a key may have, and whether they may change."""

    rule: Rule
    resume: Resume = KEEP
    how_to_set: str = ""


class Problem(NamedTuple):
    """A problem of a config."""

    key: str  # whose value is the problem; "" for a condition on several keys
    sentence: str


# --- types ------------------------------------------------------------------------------------------------------------


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def is_path(value: Any) -> bool:
    return is_text(value) and "\0" not in value


def are_names(value: Any) -> bool:
    """Return whether a value is a nonempty list of different texts."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value)) and len(value) == len(set(value))


def _matching(pattern: str, wanted: str) -> Rule:
    return Rule(lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)), wanted)


PLAIN = {
    int: Rule(is_int, "an integer"),
    float: Rule(lambda v: is_int(v) or isinstance(v, float), "a number"),
    bool: Rule(lambda v: isinstance(v, bool), "true or false"),
}
Text = Annotated[str, Rule(is_text, "a text")]
LocalPath = Annotated[str, Rule(is_path, "a path")]
RunName = Annotated[
    str,
    Rule(
        lambda v: is_path(v) and not os.path.isabs(v) and ".." not in v.split("/"),
        "a name for the run, relative and without '..'",
    ),
]
Paths = Annotated[list[str], Rule(lambda v: are_names(v) and all(map(is_path, v)), "a list of paths")]
Datasets = Annotated[
    list[str],
    Rule(
        lambda v: is_text(v) or are_names(v),
        "a name, a path or a Hub id, or a list of different ones, such as hh, [hh,shp] or data/mine.csv",
    ),
]
Arguments = Annotated[
    Mapping[str, Any],
    Rule(
        lambda v: isinstance(v, dict) and all(map(is_text, v)),
        "a mapping of names to values, such as {weight_decay: 0.01} or {enable_thinking: false}",
    ),
]
Layers = Annotated[
    str | list[str],
    Rule(
        lambda v: v in ("auto", "all-linear") or are_names(v),
        "auto, or a list of different names of layers, such as [q_proj,v_proj]",
    ),
]
Function = Annotated[str, _matching(r"[^\0]+\.py:[^\W\d]\w*", "a file and a function in it, such as rewards.py:score")]
Date = Annotated[
    str, _matching(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "a date in quotes, such as '2025-12-31'")
]
Tags = Annotated[list[str], Rule(lambda v: v == [] or are_names(v), "a list of different texts, such as [dpo,first]")]
NotNegative = Annotated[float, "[0, 1e30]"]

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
    exp_name: Annotated[RunName, PER_RUN, HowToSet("exp_name=NAME names the run")]
    debug: Annotated[bool, CHANGE]
    local_run_dir: Annotated[LocalPath, PER_RUN]
    local_dirs: Annotated[Paths, PER_RUN]
    resume: Annotated[LocalPath | None, PER_RUN]
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
    name_or_path: Annotated[
        Text,
        HowToSet("choose model=pythia28 or another of config/model, or give model.name_or_path=DIR_OR_HUB_ID"),
    ]
    tokenizer_name_or_path: Text | None
    archive: Annotated[
        LocalPath | None,
        CHANGE,
        HowToSet("give model.archive=RUN_OF_SFT/LATEST, or null to start from the weights of model.name_or_path"),
    ]
    block_name: Annotated[Text | None, CHANGE]
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
class LossKeys:
    """Options that a loss may have; `dpo.losses.find_loss` reads them."""

    beta: Annotated[float, "> 0", HowToSet("loss.beta=0.1 is the DPO paper's choice")]
    label_smoothing: Annotated[float, "[0, 0.5)"]
    reference_free: bool
    average: bool
    gamma: float
    tau: Annotated[float, "> 0"]
    penalty: NotNegative
    alpha: float
    momentum: Annotated[float, "[0, 1]"]
    desirable_weight: NotNegative
    undesirable_weight: NotNegative
    centering: NotNegative
    sft_weight: NotNegative
    wpo: bool
    offset_by_margin: bool
    ld_alpha: Annotated[float, "[0, 1]"]
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"]
    f_alpha: Annotated[float, "(0, 1)"]


@dataclass(frozen=True)
class AdapterPlan:
    name: Literal["none", "lora", "qlora"]
    r: Annotated[int, "[1, 65536]"]
    alpha: Annotated[float, "> 0"]
    dropout: Annotated[float, "[0, 1)"]
    target_modules: Layers
    reference: Literal["base", "adapter", "model"]


@dataclass(frozen=True)
class OnlinePlan:
    name: Literal["none", "online"]
    n_samples: Annotated[int, "[2, 1024]"]
    scorer: Annotated[Scorer, HowToSet("give online.scorer=reward_model, function, keyword or shorter")]
    reward_model: Text | None
    reward_format: Literal["chat", "pair", "text"] | None
    function: Function | None
    keyword: Text | None
    temperature: Annotated[float, "> 0"]
    top_p: Annotated[float, "(0, 1]"]
    max_new_tokens: Annotated[int, ">= 1"]
    missing_eos_penalty: NotNegative
    labels: Literal["hard", "bradley_terry"]
    ties: Literal["skip", "keep"]
    sync_reference_every: Annotated[int | None, ">= 1"]
    mix_offline: Annotated[float, "[0, 1)"]
    batch_size: Annotated[int | None, ">= 1", CHANGE]


@dataclass(frozen=True)
class ChatPlan:
    """A chat template in place of the tokenizer's, and what it reads."""

    template: Annotated[LocalPath | None, CHANGE]
    template_args: Arguments
    template_date: Annotated[Date | None, PER_RUN]  # None: that of rendering


@dataclass(frozen=True)
class DataPlan:
    datasets: Datasets
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
    optimizer_args: Arguments
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
    entity: Annotated[Text | None, CHANGE]
    project: Annotated[Text, CHANGE]
    group: Annotated[Text | None, PER_RUN]
    tags: Annotated[Tags, CHANGE]
    notes: Annotated[Text | None, CHANGE]
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
    LossKeys: "loss.",
    AdapterPlan: "lora.",
    OnlinePlan: "online.",
}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_key(annotation: Any) -> Key:
    """Read the type of a field, such as `Annotated[int | None, ">= 1", CHANGE]`.

    Its marks are bounds, such as `> 0`, `>= 1` or `[0, 1)`, and a Rule, a Resume and a HowToSet, in any order.
    """
    marks: dict[type, Any] = {}

    def take_marks(annotation: Any) -> Any:
        if get_origin(annotation) is not Annotated:
            return annotation
        plain, *given = get_args(annotation)
        marks.update({type(mark): mark for mark in given})
        return plain

    plain = take_marks(annotation)
    may_be_null = NoneType in get_args(plain)
    if may_be_null:
        [plain] = [take_marks(option) for option in get_args(plain) if option is not NoneType]
    if get_origin(plain) is Literal:
        rule = Rule(lambda v: v in get_args(plain), f"one of {', '.join(get_args(plain))}")
    elif plain in (int, float):
        rule = _bound(PLAIN[plain], marks.get(str, ""))
    else:
        rule = marks.get(Rule) or PLAIN[plain]
    if may_be_null:
        plain_rule = rule
        rule = Rule(lambda v: v is None or plain_rule.holds(v), f"{rule.wanted}, or null")
    return Key(rule, marks.get(Resume, KEEP), marks.get(HowToSet, ""))


def _bound(rule: Rule, bounds: str) -> Rule:
    """Narrow the rule of a number by bounds such as `> 0`, `>= 1` or `[0, 1)`; none are LARGEST."""
    interval, wanted = bounds, f" in {bounds}"
    if not bounds:
        interval, wanted = f"[-{LARGEST}, {LARGEST}]", ""
    elif bounds.startswith(">"):
        sign, number = bounds.split()
        interval = f"{'[' if sign == '>=' else '('}{number}, {LARGEST}]"
        wanted = f" {bounds.replace('> ', 'above ')}"
    low, high = map(float, interval[1:-1].split(", "))

    def holds(value: Any) -> bool:
        if not rule.holds(value):
            return False
        is_above = value >= low if interval.startswith("[") else value > low
        return is_above and (value <= high if interval.endswith("]") else value < high)

    return Rule(holds, rule.wanted + wanted)


def _list_keys() -> dict[str, Key]:
    keys = {}
    for section, prefix in SECTIONS.items():
        types = get_type_hints(section, include_extras=True)
        names = [field.name for field in fields(section) if field.name != "dataset_sources"]
        keys |= {f"{prefix}{name}": read_key(types[name]) for name in names}
    keys["loss.name"] = read_key(Literal[tuple(LOSSES)])
    mixed = [name for name, loss in LOSSES.items() if loss.can_be_mixed]
    return keys | {f"loss.weights.{name}": read_key(NotNegative) for name in mixed}


KEYS = _list_keys()
REMOVED = {  # keys that went: the last commit that had it, and what to use
    "dataset_sources.NAME.format": (
        "9949121b; leave it out, as columns are recognized by their names, or name them with "
        "dataset_sources.NAME.columns"
    ),
}
