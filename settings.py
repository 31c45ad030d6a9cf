"""Config validation: every problem found at once, in plain words, before anything is loaded. Imports no torch.

What each key means and its default are in `config/`; here is only what a value must be.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class Processes(NamedTuple):
    """The processes of a run, what there is for them, and what their trainer can do."""

    world_size: int  # of them in all
    tensor_size: int  # how many cut each layer among them
    several: bool  # whether the trainer knows what to do with more than one
    launched: bool  # whether torchrun or Slurm started them
    gpus: int  # of this machine
    cuts_layers: bool = False  # whether tensor_parallel_size and its backend say anything to the trainer
    can_sample: bool = True
    can_autocast: bool = True


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

# what of Hydra's own an override may set: by other keys it would import and call what they name
HYDRAS_OWN = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.verbose",
    "hydra/launcher",
    "hydra/sweeper",
)
OF_HYDRAS_PLUGINS = ("hydra.launcher.", "hydra.sweeper.")

COLUMNS = ("prompt", "chosen", "rejected")  # of own data

NEED_WHOLE_TENSORS = ("Adafactor", "Rprop")  # in torch 2.13 these fail on sharded tensors

HOW_TO_SET = {
    "exp_name": "exp_name=NAME names the run",
    "loss.beta": "loss.beta=0.1 is the paper's choice; the smaller, the further from the reference",
    "model.name_or_path": "choose model=pythia28 or another of config/model, or give model.name_or_path=DIR_OR_HUB_ID",
}


WAITING = object()  # in place of a value made from another key that has a problem of its own


def flatten(config: DictConfig) -> dict[str, Any]:
    """Dotted keys to plain values, `dataset_sources` left whole; '???' and what cannot be resolved stay as they are."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, node: Mapping[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping) and f"{prefix}{key}" != "dataset_sources":
                visit(f"{prefix}{key}.", value)
            else:
                flat[f"{prefix}{key}"] = value

    visit("", OmegaConf.to_container(config, resolve=False))  # type: ignore[arg-type]
    for name, value in flat.items():
        if isinstance(value, str) and "${" in value:
            try:
                flat[name] = OmegaConf.select(config, name)
            except OmegaConfBaseException:
                if any(other in flat for other in re.findall(r"\$\{([\w.]+)\}", value)):
                    flat[name] = WAITING
    return flat


def did_you_mean(key: str, known: Collection[str]) -> str:
    """`unknown key ...` with the nearest known key, if one is near."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key}" + (
        f": did you mean {near[0]}?" if near else "; `python train.py --cfg job` shows all keys"
    )


def find_problems(
    config: DictConfig, *, choices: Mapping[str, Collection[str]], data_names: Collection[str], processes: Processes
) -> list[str]:
    """Everything wrong with a composed config, one sentence each with the value and the fix; empty if it can run.

    `choices` maps keys (`trainer`, `loss.name`, ...) to the names their tables hold, `data_names` are the datasets
    that need no source.
    """
    values = flatten(config)
    sources = values.pop("dataset_sources", {})
    absent = [key for key in RULES if key not in values and not key.startswith("loss.")]
    problems = [f"{key} was removed from the config: give {key}=VALUE instead of ~{key}" for key in absent]
    for key, value in values.items():
        if value is WAITING:
            continue
        if key not in RULES:
            problems.append(did_you_mean(key, RULES))
        elif value == "???":
            problems.append(f"{key} is not set: {HOW_TO_SET.get(key, f'give {key}=VALUE')}")
        elif isinstance(value, str) and "${" in value:
            problems.append(f"{key}={value} cannot be resolved: no such key or resolver")
        elif not RULES[key].holds(value):
            problems.append(f"{key}={value} must be {RULES[key].wanted}")
        elif key in choices and value is not None and value not in choices[key]:
            problems.append(f"{key}={value} is not one of {', '.join(sorted(choices[key]))}")
    sound = {k: v for k, v in values.items() if k in RULES and v not in ("???", WAITING) and RULES[k].holds(v)}
    if values.get("resume") == "auto" and "get_local_run_dir" in str(OmegaConf.to_container(config)["local_run_dir"]):
        problems.append("resume=auto looks into local_run_dir, which is a new one each time: give local_run_dir=DIR")
    problems += _process_problems(sound, processes)
    problems += _combination_problems(sound)
    problems += _dataset_problems(sound.get("datasets", []), sources, data_names)
    return problems


def _process_problems(sound: Mapping[str, Any], processes: Processes) -> Iterator[str]:
    """What does not fit the number of processes."""
    size, tensor_size = processes.world_size, processes.tensor_size
    asked = sound.get("world_size")
    if not processes.several and processes.launched and size > 1:
        yield f"trainer={sound.get('trainer')} is one process, and {size} were launched: use trainer=FSDPTrainer"
    elif not processes.several and asked not in (None, 1):
        yield f"world_size={asked} needs a trainer of several processes: trainer=FSDPTrainer"
    elif processes.launched and asked not in (None, size):
        yield f"world_size={asked}, but {size} processes were launched: leave it out"
    if processes.several and sound.get("optimizer") in NEED_WHOLE_TENSORS:
        yield f"optimizer={sound['optimizer']} cannot update shards: use another with trainer={sound.get('trainer')}"
    if processes.several and processes.gpus and not processes.launched and size > processes.gpus:
        yield (
            f"world_size={size} is more than the {processes.gpus} GPUs of this machine: leave it out, or set "
            f"CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if not processes.cuts_layers:
        for key, default in (("tensor_parallel_size", None), ("tensor_parallel.backend", "dtensor")):
            if sound.get(key, default) not in (default, 1):
                yield f"{key}={sound[key]} needs trainer=TensorParallelTrainer"
    if not processes.can_sample and sound.get("sample_during_eval"):
        yield (
            f"sample_during_eval=True does not work with tensor_parallel.backend={sound['tensor_parallel.backend']}: "
            f"set sample_during_eval=false, or tensor_parallel.backend=dtensor"
        )
    if not processes.can_autocast and sound.get("model.autocast"):
        yield (
            f"model.autocast={sound['model.autocast']} does not reach the threads of "
            f"tensor_parallel.backend={sound['tensor_parallel.backend']}: set model.policy_dtype instead"
        )
    if not processes.gpus and sound.get("model.attn_implementation") == "flex_attention":
        yield "model.attn_implementation=flex_attention cannot train on a CPU: use sdpa"
    if size % tensor_size:
        yield f"tensor_parallel_size={tensor_size} does not divide the {size} processes: try {_divisors(size)}"
        return
    data_size = size // tensor_size
    shards = sound.get("fsdp_shard_size")
    if shards is not None and not processes.several:
        yield f"fsdp_shard_size={shards} needs a trainer of several processes: trainer=FSDPTrainer"
    elif shards is not None and data_size % shards:
        yield f"fsdp_shard_size={shards} does not divide the {data_size} processes: try {_divisors(data_size)}"
    yield from _batch_problems(sound, data_size)


def _batch_problems(sound: Mapping[str, Any], data_size: int) -> Iterator[str]:
    """Batches that cannot be shared out evenly to the processes that see different rows."""
    if "batch_size" in sound and "gradient_accumulation_steps" in sound:
        batch, steps = sound["batch_size"], sound["gradient_accumulation_steps"]
        parts = steps * data_size
        if batch % parts:
            fix = f"try batch_size={max(1, round(batch / parts)) * parts}"
            if batch % data_size == 0:
                fix += f", or gradient_accumulation_steps={_divisors(batch // data_size)}"
            elif batch % steps == 0:
                fix += f", or {_divisors(batch // steps)} processes"
            yield (
                f"batch_size={batch} must be divisible by gradient_accumulation_steps * processes = "
                f"{steps} * {data_size} = {parts}: {fix}"
            )
    if "eval_batch_size" in sound and sound["eval_batch_size"] % data_size:
        batch = sound["eval_batch_size"]
        yield (
            f"eval_batch_size={batch} must be divisible by the {data_size} processes: "
            f"try {max(1, round(batch / data_size)) * data_size}, or {_divisors(batch)} processes"
        )


def _divisors(number: int) -> str:
    """`1, 2 or 4`."""
    *most, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _combination_problems(sound: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are right alone and wrong together; `sound` holds only those that are right alone."""

    def have(*keys: str) -> bool:
        return all(key in sound for key in keys)

    if have("max_length", "max_prompt_length") and sound["max_prompt_length"] >= sound["max_length"]:
        yield (
            f"max_prompt_length={sound['max_prompt_length']} must be below max_length={sound['max_length']}, "
            f"or no token is left for a response"
        )
    if have("n_epochs", "n_examples") and sound["n_epochs"] is None and sound["n_examples"] is None:
        yield "n_epochs and n_examples are both null, so training would never end: give one of them"
    if have("eval_every", "batch_size") and sound["eval_every"] < sound["batch_size"]:
        yield f"eval_every={sound['eval_every']} (examples) must be at least batch_size={sound['batch_size']}"
    if have("save_every", "batch_size") and (sound["save_every"] or 0) % sound["batch_size"]:
        fix = max(1, round(sound["save_every"] / sound["batch_size"])) * sound["batch_size"]
        yield f"save_every={sound['save_every']} (examples) must be a multiple of batch_size: try {fix}"


def _dataset_problems(names: list[str], sources: Any, data_names: Collection[str]) -> Iterator[str]:
    if not isinstance(sources, Mapping):
        yield f"dataset_sources={sources} must map names to places, such as dataset_sources.hh=DIR"
        return
    for name in names:
        if name not in data_names and not sources.get(name):
            yield (
                f"datasets names {name!r}, which is none of {', '.join(data_names)}: "
                f"say where it is with dataset_sources.{name}=DIR_FILE_OR_HUB_ID"
            )
    for name, value in sources.items():
        allowed = isinstance(value, Mapping) and "path" in value and set(value) <= {"path", "revision", "columns"}
        if not (value is None or (isinstance(value, str) and value) or allowed):
            yield (
                f"dataset_sources.{name}={value} must be a directory, file or Hub id, or "
                f"{{path: ..., revision: ..., columns: ...}}"
            )
        elif allowed and value.get("columns") is not None:
            yield from _column_problems(name, value["columns"], name in data_names)


def _column_problems(name: str, columns: Any, has_its_own: bool) -> Iterator[str]:
    key = f"dataset_sources.{name}.columns"
    if has_its_own:
        yield f"{key}={columns}: {name} has columns of its own; name your data otherwise"
    elif (
        not isinstance(columns, Mapping)
        or not set(columns) <= set(COLUMNS)
        or not all(map(TEXT.holds, columns.values()))
    ):
        yield f"{key}={columns} must map some of {', '.join(COLUMNS)} to your names: {{prompt: question, chosen: best}}"


def refuse_hydras_own(key: str, override: str) -> str | None:
    """Why an override of one of Hydra's own keys could run code; None if it cannot."""
    if key.partition("@")[0].partition(".")[0].partition("/")[0] != "hydra" and "@hydra" not in key:
        return None
    if (key in HYDRAS_OWN or key.startswith(OF_HYDRAS_PLUGINS)) and "_target_" not in override:
        return None
    return (
        f"{key} could name code to run, which a config may not; of Hydra's own keys {', '.join(HYDRAS_OWN)} may be set"
    )
