"""The keys of the config: types, bounds, choices, and what a resume may change. Their defaults are in `config/`.

Imports no torch.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from dpo import plugins
from dpo.errors import InputError
from dpo.losses import LOSSES, list_options
from dpo.losses.formulas import Fraction, Positive, Weight
from dpo.system.run_directory import get_local_dir, get_local_run_dir


class Resume(Enum):
    """Whether a resumed run may change a key."""

    KEEP = auto()  # no: another value would make it another run
    CHANGE = auto()  # yes: where it runs, how it rounds, how long it trains, what it logs; changes are printed
    PER_RUN = auto()  # yes: names and paths, which differ from command to command; changes are not printed


KEEP, CHANGE, PER_RUN = Resume
# types that many keys have; a resumed run may change all but a Size
Size = Annotated[int, ">= 1"]
Switch = Annotated[bool, CHANGE]
Count = Annotated[int, ">= 1", CHANGE]
Text = Annotated[str, CHANGE]
Name = Annotated[str, PER_RUN]

# --- names, whose code is in tables beside it -------------------------------------------------------------------------

Optimizer = Literal[  # a class of torch.optim
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
Layout = Literal["padded", "shared_prefix"]
VARLEN = "varlen"
NEED_WHOLE_TENSORS = ("Adafactor", "Rprop")  # optimizers that fail on sharded tensors in torch 2.13
STEPS_OF_LR = ("Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop")  # their steps are about as large as lr
DECAYS_BY_LR = ("AdamW", "Adafactor", "ASGD", "SGD")  # weight_decay makes weights smaller by lr * weight_decay of them
LOST_CHANGE = {"bfloat16": 2**-9, "float16": 2**-12}  # smaller changes of a weight, relative to it, are rounded away
HELD_OUT_SCORE = "online_eval/score"  # the metric that ranks the checkpoints of online runs; higher is better


class TrainerSpec(NamedTuple):
    """A way to use several devices; the reference code's callers name it by a class of `trainers.py`."""

    name: str
    multi_process: bool = False  # whether it runs in several processes, which form a process group
    cuts_layers: bool = False  # whether tensor_parallel_size and tensor_parallel.backend apply


BASIC = TrainerSpec("BasicTrainer")
FSDP = TrainerSpec("FSDPTrainer", multi_process=True)
TENSOR_PARALLEL = TrainerSpec("TensorParallelTrainer", multi_process=True, cuts_layers=True)
PACKAGE = TrainerSpec("PackageTensorParallelTrainer", cuts_layers=True)  # tensor_parallel.backend=tensor_parallel
PRECISION = ("model.autocast", "model.fsdp_policy_mp")  # keys that model.autocast=auto stands for
TRAINERS = {spec.name: spec for spec in (BASIC, FSDP, TENSOR_PARALLEL)}

# --- sections ---------------------------------------------------------------------------------------------------------


class RunPlan(NamedTuple):
    plugins: Annotated[list[str], PER_RUN]
    seed: Annotated[int, "[0, 4294967295]"]
    exp_name: Name
    debug: Switch
    local_run_dir: Name
    local_dirs: Annotated[list[str], PER_RUN]
    resume: Name | None
    save_every: Count | None
    keep_checkpoints: Annotated[int, ">= 2", CHANGE] | None
    export: Switch
    check_disk: Switch
    dry_run: Annotated[bool, PER_RUN]
    deterministic: Switch
    trainer: str  # one of TRAINERS
    world_size: Count | None
    tensor_parallel_size: Count | None
    collective_timeout_secs: Annotated[float, "(0, 1e7]", CHANGE]
    minimum_log_interval_secs: Annotated[float, "[0, inf]", CHANGE]
    ledger: Switch
    report: Switch

    @property
    def local_dir(self) -> str:
        """The directory of this user's runs, caches and stored data."""
        return get_local_dir(self.local_dirs)

    @property
    def cache_dir(self) -> str | None:
        """The directory of downloads; None: the libraries' default, which the environment sets."""
        return None if {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys() else self.local_dir


class FSDPPlan(NamedTuple):
    fsdp_port: Annotated[int, "[1, 65535]", CHANGE] | None
    fsdp_shard_size: Count | None
    fsdp_frozen_weights: Annotated[Literal["whole", "sharded"], CHANGE] | None
    fsdp_reshard_after_forward: Switch
    fsdp_reduce_once: Switch
    fsdp_reduce_dtype: Annotated[Literal["float32", "bfloat16"], CHANGE]


class ModelPlan(NamedTuple):
    name_or_path: str
    tokenizer_name_or_path: str | None
    archive: Text | None
    block_name: Text | None
    policy_dtype: Dtype
    fsdp_policy_mp: Dtype | None
    reference_dtype: Dtype | None
    autocast: Literal["bfloat16", "float16", "auto"] | None  # auto: decided by `keep_choices`, on the run's GPUs
    attn_implementation: Annotated[Literal["eager", "sdpa", "flash_attention_2", "varlen"], CHANGE]
    cache_implementation: Annotated[Literal["static"], CHANGE] | None
    random_init: bool
    trust_remote_code: bool

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_name_or_path or self.name_or_path


class AdapterPlan(NamedTuple):
    name: Literal["none", "lora", "qlora"]
    r: Annotated[int, "[1, 65536]"]
    alpha: Positive
    dropout: Annotated[float, "[0, 1)"]
    target_modules: str | list[str]
    reference: Literal["base", "adapter", "model"]


class OnlinePlan(NamedTuple):
    name: Literal["none", "online"]
    n_samples: Annotated[int, "[2, 1024]"]
    scorer: Literal["reward_model", "function", "keyword", "shorter"]
    reward_model: str | None
    reward_format: Literal["chat", "pair", "text", "text_eos", "policy"] | None
    function: str | None
    keyword: str | None
    temperature: Positive
    top_p: Annotated[float, "(0, 1]"]
    max_new_tokens: Size
    missing_eos_penalty: Weight
    labels: Literal["hard", "bradley_terry"]
    ties: Literal["skip", "keep"]
    sync_reference_every: Size | None
    mix_offline: Annotated[float, "[0, 1)"]
    batch_size: Count | None


class ChatPlan(NamedTuple):
    chat: Literal["auto", "always", "never"]
    chat_template: Text | None  # in place of the tokenizer's
    chat_template_args: Mapping
    chat_template_date: Name | None  # None: that of rendering


class DataPlan(NamedTuple):
    datasets: str | list[str]
    dataset_sources: Mapping  # no key of KEYS: `places.py` checks it
    holdout: Positive | None
    bad_records: Literal["refuse", "skip"]
    unpair: bool
    list_pairs: Literal["all", "best_worst"]
    batch_size: Size
    eval_batch_size: Count
    gradient_accumulation_steps: Count
    max_length: Size
    max_prompt_length: Size
    truncation: Literal["auto", "keep_end", "keep_start", "drop"]
    n_epochs: Count | None
    n_examples: Count | None
    n_eval_examples: Count
    num_workers: Annotated[int, ">= 0", CHANGE]
    layout: Annotated[Layout, CHANGE]


class TrainingPlan(NamedTuple):
    optimizer: Optimizer
    optimizer_args: Mapping
    lr: Positive
    lr_scaling: Literal["none", "linear", "sqrt"]
    warmup_steps: Annotated[int, ">= 0"] | None
    schedule: Literal["constant", "linear", "cosine"]
    min_lr_ratio: Fraction
    max_grad_norm: Annotated[float, "(0, inf]"]
    sft_loss: Literal["sum", "mean"]
    cache_reference_logps: Annotated[Literal["as_needed", "all"], CHANGE]
    activation_checkpointing: Switch
    compile: Switch
    self_test: Switch
    nan_policy: Annotated[Literal["raise", "skip"], CHANGE]


class EvaluationPlan(NamedTuple):
    eval_every: Count | None
    do_first_eval: Switch
    do_first_sampling: Switch
    sample_during_eval: Switch
    n_eval_model_samples: Count
    n_eval_tokens: Count | None
    sample_temperature: Annotated[float, "[0, 1e30]", CHANGE] | None
    sample_top_p: Annotated[float, "(0, 1]", CHANGE] | None
    sample_top_k: Annotated[int, ">= 0", CHANGE] | None


class WandbPlan(NamedTuple):
    enabled: Switch
    entity: Text | None
    project: Text
    group: Name | None
    tags: Annotated[list[str], CHANGE]
    notes: Text | None
    artifacts: Switch


# by their names in a Plan, with what their keys begin with; plan.fsdp.fsdp_port and plan.model.archive are the keys
# fsdp_port and model.archive
SECTIONS = {
    "run": (RunPlan, ""),
    "data": (DataPlan, ""),
    "training": (TrainingPlan, ""),
    "evaluation": (EvaluationPlan, ""),
    "fsdp": (FSDPPlan, ""),
    "chat": (ChatPlan, ""),
    "wandb": (WandbPlan, "wandb."),
    "model": (ModelPlan, "model."),
    "lora": (AdapterPlan, "lora."),
    "online": (OnlinePlan, "online."),
}


# --- types ------------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    holds: Callable[[Any], bool]
    wanted: str  # completes "must be"
    resume: Resume
    choices: tuple[str, ...]  # all values, if they are names


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())  # not blank


def are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value)) and len(value) == len(set(value))


TYPES = {
    int: (lambda v: type(v) is int, "an integer"),  # no bool
    float: (lambda v: type(v) in (int, float), "a number"),
    bool: (lambda v: type(v) is bool, "true or false"),
    str: (is_text, "a text"),
    list[str]: (are_names, "a list of distinct texts, such as [a,b]"),
    str | list[str]: (lambda v: is_text(v) or (are_names(v) and v), "a text, or a list of distinct ones"),
    Mapping: (
        lambda v: isinstance(v, dict) and all(map(is_text, v)),
        "a mapping of names to values, such as {weight_decay: 0.01}",
    ),
}


def read_key(annotation: Any) -> Key:
    """Read a type such as `Annotated[int, ">= 1", CHANGE] | None`."""
    may_be_null = NoneType in get_args(annotation)
    if may_be_null:
        annotation = get_args(annotation)[0]
    plain, *marks = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    bounds = "".join(mark for mark in marks if isinstance(mark, str))
    resume = next((mark for mark in marks if isinstance(mark, Resume)), KEEP)
    choices = get_args(plain) if get_origin(plain) is Literal else ()
    has_type, wanted = TYPES.get(plain, (lambda v: v in choices, f"one of {', '.join(choices)}"))
    if bounds:
        wanted += f" in {bounds}" if "," in bounds else f" {bounds}".replace(" > ", " above ")

    def holds(value: Any) -> bool:
        if value is None:
            return may_be_null
        return bool(has_type(value)) and (plain not in (int, float) or is_within(value, bounds))

    return Key(holds, f"{wanted}, or null" if may_be_null else wanted, resume, choices)


def is_within(value: float, bounds: str) -> bool:
    """Whether a number is within bounds such as `> 0` or `[0, 1)`; without any, it must be finite."""
    if "," in bounds:
        low, high = map(float, bounds[1:-1].split(","))
        return low < value < high or (value == low and bounds[0] == "[") or (value == high and bounds[-1] == "]")
    low = float(bounds.lstrip(">= ") or -math.inf)
    return low < value < math.inf or (value == low and bounds.startswith(">="))


def _list_keys() -> dict[str, Key]:
    """All keys, those of plugins too."""
    annotations: dict = {
        "tensor_parallel.backend": Annotated[Literal["dtensor", "tensor_parallel"], CHANGE],
        "tensorboard.enabled": Annotated[bool, CHANGE],
        "loss.name": Literal[tuple(LOSSES)],
        **{f"loss.{name}": annotation for name, annotation in list_options().items()},
        **{f"loss.weights.{name}": Weight for name, loss in LOSSES.items() if loss.can_be_mixed},
    }
    for section, prefix in SECTIONS.values():
        types = get_type_hints(section, include_extras=True)
        annotations |= {f"{prefix}{name}": annotation for name, annotation in types.items()}
    del annotations["dataset_sources"]  # `places.py` reads it
    annotations["trainer"] = Annotated[Literal[tuple(TRAINERS)], CHANGE]
    annotations["optimizer"] = Literal[(*get_args(Optimizer), *plugins.OPTIMIZERS)]
    return {key: read_key(annotation) for key, annotation in annotations.items()}


KEYS = _list_keys()


def load_plugins(files: Any) -> None:
    """Let files of the user add losses, and more (`dpo.plugins`), before a config is checked."""
    if are_names(files):  # else the check of this key says what is wrong
        plugins.run_plugins(files)
        if taken := {*get_args(Optimizer)} & plugins.OPTIMIZERS.keys():
            raise InputError(f"plugins: the optimizers {', '.join(taken)} have names of ours: choose others")
        KEYS.update(_list_keys())


BEFORE = {"holdout": 0.1}  # what holds for runs that were made before there was such a key, and that give none
REMOVED = {  # patterns of keys and values that went: the last commit that had them, and what to use
    ("dataset_sources.*.format", "*"): "9949121b; leave it out, or name the columns in dataset_sources.NAME.columns",
    ("model.attn_implementation", "flex_attention"): "9949121b; use sdpa or eager",
}


def find_removed(key: str, value: Any) -> str | None:
    """Say what to use instead of a removed key or value."""
    for (removed, values), use in REMOVED.items():
        if fnmatchcase(key, removed) and fnmatchcase(str(value), values):
            return f"{key}={value} was removed after {use}"
    return None


# --- defaults, from `config/` without Hydra ---------------------------------------------------------------------------

PACKAGE_DIR = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE_DIR / "config"
GROUPS = ("loss", "lora", "online")  # groups whose options have different keys
OPEN_MAPPINGS = ("dataset_sources", "optimizer_args", "chat_template_args")  # mappings whose keys the user chooses
MISSING = "???"  # the value of a key that has no default

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("package_dir", lambda: str(PACKAGE_DIR), replace=True)


def dotted(node: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a mapping that is empty or one of OPEN_MAPPINGS is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in OPEN_MAPPINGS:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_defaults(values: Mapping) -> dict:
    """Find the defaults by dotted key, with the options of GROUPS that these values choose."""
    return dict(dotted(load_defaults(**{group: values.get(f"{group}.name") for group in GROUPS})))


def load_defaults(**options: Any) -> dict:
    """Load the defaults; an option of GROUPS that is None or unknown counts as `none`, an unknown loss as MISSING."""
    defaults = load_file(CONFIG_DIR / "config.yaml") | {"model": load_file(CONFIG_DIR / "model" / "blank_model.yaml")}
    for group in GROUPS:
        files = {file.stem: file for file in (CONFIG_DIR / group).glob("*.yaml")}
        file = files.get(str(options.get(group)), files.get("none"))
        defaults[group] = load_file(file) if file else {"name": MISSING}
    if str(options.get("loss")) in plugins.ADDED_LOSSES:
        defaults["loss"] = find_added_loss(options["loss"])
    return defaults


def find_added_loss(name: str) -> dict:
    """The options of a plugin's loss, with those that it shares with ours."""
    loss, folder = LOSSES[name], CONFIG_DIR / "loss" / "options"
    of_pairs = loss.trains_on == "pairs" and not loss.scalar_head
    shared = {"of_pairs": of_pairs, "with_reference": of_pairs and loss.reference, "with_margin": loss.takes_offset}
    options = {"name": name, **plugins.ADDED_LOSSES[name]}
    return options | {
        k: v for file, has in shared.items() if has for k, v in load_file(folder / f"{file}.yaml").items()
    }


@cache  # the files do not change while a process runs
def load_file(file: Path) -> dict:
    """Load the keys that a file and its defaults list set; later entries of the list override earlier ones."""
    content = OmegaConf.to_container(OmegaConf.load(file))
    own_keys = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    values = {}
    for entry in content.get("defaults", ["_self_"]):
        if isinstance(entry, str):  # {loss: sft} and the like choose options, which `load_defaults` loads
            name = entry.partition("@")[0]
            values |= own_keys if name == "_self_" else load_file(file.parent / f"{name}.yaml")
    return values
