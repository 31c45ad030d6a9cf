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

from omegaconf import DictConfig, OmegaConf

from dpo import plugins
from dpo.errors import InputError
from dpo.losses import LOSSES, list_options, list_parameters
from dpo.losses.formulas import Fraction, Positive, Weight
from dpo.system.run_directory import get_local_dir, get_local_run_dir


class ResumeRule(Enum):
    """Whether a resumed run may change a key."""

    FIXED = auto()  # no: another value would make it another run
    CHANGEABLE = auto()  # yes: where it runs, how it rounds, how long it trains, what it logs; changes are printed
    PER_RUN = auto()  # yes: names and paths, which differ from command to command; changes are not printed


FIXED, CHANGEABLE, PER_RUN = ResumeRule
# types that many keys have; a resumed run may change all but a Size
Size = Annotated[int, ">= 1"]
Switch = Annotated[bool, CHANGEABLE]
Count = Annotated[int, ">= 1", CHANGEABLE]
Text = Annotated[str, CHANGEABLE]
Name = Annotated[str, PER_RUN]

# --- optimizers, dtypes and trainers ----------------------------------------------------------------------------------

Optimizer = Literal[  # a class of torch.optim
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
VARLEN = "varlen"
NEED_WHOLE_TENSORS = ("Adafactor", "Rprop")  # optimizers that fail on sharded tensors in torch 2.13
STEPS_OF_LR = ("Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop")  # their steps are about as large as lr
DECAYS_BY_LR = ("AdamW", "Adafactor", "ASGD", "SGD")  # weight_decay shrinks a weight by the share lr * weight_decay
LOST_CHANGE = {"bfloat16": 2**-9, "float16": 2**-12}  # a relative change of a weight below this is rounded away
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
PRECISION = ("model.autocast", "model.fsdp_policy_mp")  # the keys that model.autocast=auto decides
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
    keep_checkpoints: Annotated[int, ">= 2", CHANGEABLE] | None
    checkpoint_format: Annotated[Literal["full", "sharded"], CHANGEABLE]
    export: Switch
    check_disk: Switch
    dry_run: Annotated[bool, PER_RUN]
    deterministic: Switch
    trainer: str  # one of TRAINERS
    world_size: Count | None
    tensor_parallel_size: Count | None
    collective_timeout_secs: Annotated[float, "(0, 1e7]", CHANGEABLE]
    heartbeat_timeout_secs: Annotated[float, "[1, 1e7]", CHANGEABLE]
    minimum_log_interval_secs: Annotated[float, "[0, inf]", CHANGEABLE]
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
    fsdp_port: Annotated[int, "[1, 65535]", CHANGEABLE] | None
    fsdp_shard_size: Count | None
    fsdp_frozen_weights: Annotated[Literal["whole", "sharded"], CHANGEABLE] | None
    fsdp_reshard_after_forward: Switch
    fsdp_reduce_once: Switch
    fsdp_reduce_dtype: Annotated[Literal["float32", "bfloat16"], CHANGEABLE]


class ModelPlan(NamedTuple):
    name_or_path: str
    tokenizer_name_or_path: str | None
    archive: Text | None
    block_name: Text | None
    policy_dtype: Dtype
    fsdp_policy_mp: Dtype | None
    reference_dtype: Dtype | None
    autocast: Literal["bfloat16", "float16", "auto"] | None  # auto: decided by `keep_choices`, on the run's GPUs
    attn_implementation: Annotated[Literal["eager", "sdpa", "flash_attention_2", "varlen"], CHANGEABLE]
    cache_implementation: Annotated[Literal["static"], CHANGEABLE] | None
    random_init: bool
    trust_remote_code: bool

    @property
    def tokenizer(self) -> str:
        """The name or path of the tokenizer, by default the model's."""
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
    chat_template_date: Name | None  # None: the date of rendering


class DataPlan(NamedTuple):
    datasets: str | list[str]
    dataset_sources: Mapping  # not in KEYS, as `places.py` checks it
    holdout: Positive | None
    bad_records: Literal["refuse", "skip"]
    unpair: bool
    list_pairs: Literal["all", "best_worst"]
    batch_size: Size
    eval_batch_size: Count
    gradient_accumulation_steps: Count
    microbatch_size: Count | None
    max_length: Size
    max_prompt_length: Size
    truncation: Literal["auto", "keep_end", "keep_start", "drop"]
    n_epochs: Count | None
    n_examples: Count | None
    n_eval_examples: Count
    num_workers: Annotated[int, ">= 0", CHANGEABLE]
    layout: Annotated[Literal["padded", "shared_prefix"], CHANGEABLE]


class TrainingPlan(NamedTuple):
    optimizer: Optimizer
    optimizer_args: Mapping
    lr: Positive
    lr_scaling: Literal["none", "linear", "sqrt"]
    warmup_steps: Annotated[int, ">= 0"] | None
    schedule: Literal["constant", "linear", "cosine"]
    min_lr_ratio: Fraction
    max_grad_norm: Annotated[float, "(0, inf]"]
    cache_reference_logps: Annotated[Literal["as_needed", "all"], CHANGEABLE]
    activation_checkpointing: Switch
    compile: Switch
    self_test: Switch
    nan_policy: Annotated[Literal["raise", "skip"], CHANGEABLE]


class EvaluationPlan(NamedTuple):
    eval_every: Count | None
    do_first_eval: Switch
    do_first_sampling: Switch
    sample_during_eval: Switch
    n_eval_model_samples: Count
    n_eval_tokens: Count | None
    sample_temperature: Annotated[float, "[0, 1e30]", CHANGEABLE] | None
    sample_top_p: Annotated[float, "(0, 1]", CHANGEABLE] | None
    sample_top_k: Annotated[int, ">= 0", CHANGEABLE] | None


class WandbPlan(NamedTuple):
    enabled: Switch
    entity: Text | None
    project: Text
    group: Name | None
    tags: Annotated[list[str], CHANGEABLE]
    notes: Text | None
    artifacts: Switch


# Sections by their names in a Plan, with the prefix of their keys: plan.fsdp.fsdp_port and plan.model.archive are the
# keys fsdp_port and model.archive.
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
    accepts: Callable[[Any], bool]
    wanted: str  # completes "must be"
    resume: ResumeRule
    choices: tuple[str, ...]  # all allowed values of a Literal, else ()


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())  # not blank


def are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value)) and len(value) == len(set(value))


TYPES = {  # by type: a check of a value, and what completes "must be"
    int: (lambda v: type(v) is int, "an integer"),  # `isinstance` would accept a bool
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


def parse_annotation(annotation: Any) -> Key:
    """Make a Key of a type such as `Annotated[int, ">= 1", CHANGEABLE] | None`; without a ResumeRule it is FIXED."""
    may_be_null = NoneType in get_args(annotation)
    plain = get_args(annotation)[0] if may_be_null else annotation
    marks = []
    if get_origin(plain) is Annotated:
        plain, *marks = get_args(plain)
    bounds = ""
    resume = FIXED
    for mark in marks:
        if isinstance(mark, ResumeRule):
            resume = mark
        else:
            bounds = mark
    choices = ()
    # `wanted` is for error messages, such as "an integer >= 1" or "a number above 0".
    if get_origin(plain) is Literal:
        choices = get_args(plain)
        has_type, wanted = choices.__contains__, f"one of {', '.join(choices)}"
    else:
        has_type, wanted = TYPES[plain]
    if "," in bounds:
        wanted += f" in {bounds}"
    elif bounds:
        wanted += f" {bounds}".replace(" > ", " above ")
    if may_be_null:
        wanted += ", or null"

    def accepts(value: Any) -> bool:
        if value is None:
            return may_be_null
        return has_type(value) and (plain not in (int, float) or is_within(value, bounds))

    return Key(accepts, wanted, resume, choices)


def is_within(value: float, bounds: str) -> bool:
    """Whether a number is within bounds such as `> 0` or `[0, 1)`; "" stands for no bounds.

    Infinity is only within an interval that names it, such as `(0, inf]`.
    """
    if "," in bounds:
        low, high = map(float, bounds[1:-1].split(","))
        return low < value < high or (value == low and bounds[0] == "[") or (value == high and bounds[-1] == "]")
    low = float(bounds.lstrip(">= ") or -math.inf)
    return low < value < math.inf or (value == low and bounds.startswith(">="))


def _list_keys() -> dict[str, Key]:
    """Make the table of all keys, to which plugins that have run add options of losses and names of optimizers."""
    types: dict = {
        "tensor_parallel.backend": Annotated[Literal["dtensor", "tensor_parallel"], CHANGEABLE],
        "tensorboard.enabled": Switch,
        "loss.name": Literal[tuple(LOSSES)],
    }
    for name, option_type in list_options().items():
        types[f"loss.{name}"] = option_type
    for name, loss in LOSSES.items():
        if loss.can_be_mixed:
            types[f"loss.weights.{name}"] = Weight
    for section, prefix in SECTIONS.values():
        for name, key_type in get_type_hints(section, include_extras=True).items():
            types[f"{prefix}{name}"] = key_type
    del types["dataset_sources"]  # `places.py` checks it
    types["trainer"] = Annotated[Literal[tuple(TRAINERS)], CHANGEABLE]
    types["optimizer"] = Literal[(*get_args(Optimizer), *plugins.OPTIMIZERS)]
    return {key: parse_annotation(key_type) for key, key_type in types.items()}


KEYS = _list_keys()


def find_key(key: str, loss_name: Any) -> Key:
    """Return the Key of a dotted key; for `loss.OPTION`, the one with the type that OPTION has in the named loss.

    Options of two losses may have the same name and different types. If the named loss is unknown or lacks the option,
    the type may be any loss's.
    """
    group, _, option = key.partition(".")
    if group == "loss" and KEYS["loss.name"].accepts(loss_name):
        types = list_parameters(LOSSES[loss_name])
        if option in types:
            return parse_annotation(types[option])
    return KEYS[key]


def load_plugins(files: Any) -> None:
    """Run the user's files that add losses and more (`dpo.plugins`), and add their keys to KEYS.

    Call it before a config is checked. Raises InputError if a file fails, or takes the name of one of our optimizers.
    """
    if are_names(files):  # a wrong value is reported when the key `plugins` is checked
        plugins.run_plugins(files)
        if taken := {*get_args(Optimizer)} & plugins.OPTIMIZERS.keys():
            raise InputError(f"plugins: the optimizers {', '.join(taken)} have names of built-in ones: choose others")
        KEYS.update(_list_keys())
        _compose.cache_clear()  # it may have composed a config before its loss was added


# --- configs of earlier versions --------------------------------------------------------------------------------------

REMOVED = {  # patterns of keys and values -> the last commit that had them, and what to use
    ("dataset_sources.*.format", "*"): "9949121b; leave it out, or name the columns in dataset_sources.NAME.columns",
    ("model.attn_implementation", "flex_attention"): "9949121b; use sdpa or eager",
    ("sft_loss", "*"): "6151c369; use loss=sft loss.average=VALUE, or leave it out",
}


def find_removed(key: str, value: Any) -> str | None:
    """Say what to use instead of a removed key or value; None if it is not removed."""
    for (keys, values), instead in REMOVED.items():
        if fnmatchcase(key, keys) and fnmatchcase(str(value), values):
            return f"{key}={value} was removed after {instead.replace('VALUE', str(value))}"
    return None


def update_recorded(config: Mapping) -> dict:
    """Translate the config of an earlier run, nested or by dotted key, to today's keys."""
    updated = {"holdout": 0.1, **config}  # runs from before this key held out this share
    average = updated.pop("sft_loss", "sum")
    loss = updated.get("loss")
    if isinstance(loss, Mapping) and loss.get("name") == "sft":
        updated["loss"] = {"average": average, **loss}
    elif updated.get("loss.name") == "sft":
        updated.setdefault("loss.average", average)
    return updated


# --- composing without Hydra ------------------------------------------------------------------------------------------

PACKAGE_DIR = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE_DIR / "config"
GROUPS = ("loss", "lora", "online")  # groups whose options have different keys
OPEN_MAPPINGS = ("dataset_sources", "optimizer_args", "chat_template_args")  # mappings whose keys the user chooses
MISSING = "???"  # the value of a key that has no default

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("package_dir", lambda: str(PACKAGE_DIR), replace=True)


def compose_config(**chosen: str) -> dict:
    """Compose `config.yaml` as Hydra does, with options of its groups, such as `loss="dpo"`.

    An unknown option counts as `none`, and an unknown loss as MISSING.
    """
    return OmegaConf.to_container(_compose(**chosen))  # type: ignore[return-value]


@cache  # the files do not change while a process runs
def _compose(**chosen: str) -> DictConfig:
    config = OmegaConf.load(CONFIG_DIR / "config.yaml")
    options = {}
    for entry in config.pop("defaults"):
        if entry != "_self_":
            options |= entry
    options |= chosen
    del config["hydra"]
    for group in ("model", *GROUPS):
        files = {file.stem: file for file in CONFIG_DIR.glob(f"{group}/*.yaml")}
        name = options[group]
        if group == "loss" and name in plugins.ADDED_LOSSES:
            config[group] = _merge_defaults(describe_added_loss(name), CONFIG_DIR / group)
        elif file := files.get(name) or files.get("none"):
            config[group] = _load_options(file)
        else:
            config[group] = {"name": MISSING}
    return config  # type: ignore[return-value]


def _load_options(file: Path) -> DictConfig:
    return _merge_defaults(OmegaConf.load(file), file.parent)  # type: ignore[arg-type]


def _merge_defaults(content: DictConfig, folder: Path) -> DictConfig:
    """Merge a file's content, `_self_`, with the files that its `defaults` list names, in the list's order."""
    parts = []
    for entry in content.pop("defaults", ["_self_"]):
        file = folder / f"{entry.partition('@')[0]}.yaml"
        parts.append(content if entry == "_self_" else _load_options(file))
    return OmegaConf.merge(*parts)  # type: ignore[return-value]


def describe_added_loss(name: str) -> DictConfig:
    """Return the content that a file of `config/loss` would have for a plugin's loss."""
    loss = LOSSES[name]
    defaults = ["_self_"]
    # As in our own files, a loss of pairs has the options of_pairs, which with_reference includes; a reward model's has
    # none of them.
    if loss.trains_on == "pairs" and not loss.scalar_head:
        defaults.append("options/with_reference@_here_" if loss.reference else "options/of_pairs@_here_")
    if loss.takes_offset:
        defaults.append("options/with_margin@_here_")
    return OmegaConf.create({"defaults": defaults, "name": name, **plugins.ADDED_LOSSES[name]})


def choose_defaults(values: Mapping) -> dict:
    """Compose the default config, nested, with the options of GROUPS that `values`, by dotted key, choose."""
    return compose_config(**{group: str(values.get(f"{group}.name", MISSING)) for group in GROUPS})


def find_defaults(values: Mapping) -> dict:
    """Return the config of `choose_defaults` flat, by dotted key."""
    return dict(dotted(choose_defaults(values)))


def dotted(node: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a mapping that is empty or one of OPEN_MAPPINGS is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in OPEN_MAPPINGS:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
