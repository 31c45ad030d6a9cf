"""Config validation: every problem found at once, in plain words, before anything is loaded. Imports no torch.

The rules of each key alone are in `dpo/settings/keys.py`, the plan made from the config in `dpo/settings/plan.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.choices import ADAPTED, COLUMNS, NEED_WHOLE_TENSORS, STEPS_OF_LR, explain_unknown
from dpo.settings.files import OPTIONAL, WAITING, dotted, flatten, load_defaults
from dpo.settings.keys import ALIASES, KEYS, SCORED_BY, TEXT, Key, Needs, key_of_option
from dpo.settings.places import Source, built_in, name_datasets
from dpo.settings.plan import Plan, resolve

# Hydra's own keys that an override may set; others can name code, which Hydra would import and call
HYDRAS_OWN = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.verbose",
    "hydra/launcher",
    "hydra/sweeper",
)
OF_HYDRAS_PLUGINS = ("hydra.launcher.", "hydra.sweeper.")

OF_A_CHOICE = tuple(f"{group}." for group in OPTIONAL)  # keys that exist only under some options of the group
WEIGHTS = "loss.weights."
NO_PAIRS = "loss=mix adds up no loss of pairs: give loss.weights.dpo=1 or another, or train with loss=sft"


def did_you_mean(key: str, known: Collection[str]) -> str:
    """`unknown key ...` with its name here, or the nearest known key, if one is near."""
    if name := ALIASES.get(key.rpartition(".")[2]):
        return f"unknown key {key}: here it is {name}"
    by_small_letters = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), by_small_letters, n=1)
    return f"unknown key {key}" + (
        f": did you mean {by_small_letters[near[0]]}?" if near else "; `python train.py --cfg job` shows all keys"
    )


def find_config_problems(config: DictConfig, plan: Plan | None = None) -> list[str]:
    """List the problems of a composed config, one sentence each with the value and the fix; empty if it can run.

    `plan` is the config's plan, if known already.
    """
    plan = plan or resolve(config)
    problems, written = find_problems(flatten(config), plan), OmegaConf.to_container(config)
    assert isinstance(written, dict)
    if config.get("resume") == "auto" and "get_local_run_dir" in str(written["local_run_dir"]):
        problems.append("resume=auto looks into local_run_dir, which is a new one each time: give local_run_dir=DIR")
    return problems


def find_problems(values: Mapping[str, Any], plan: Plan) -> list[str]:
    """`find_config_problems` for values by dotted key."""
    values = dict(values)
    keys = _list_keys(values)
    sources = values.pop("dataset_sources", {})
    absent = [key for key in KEYS if key not in values and not key.startswith(OF_A_CHOICE)]
    problems = [f"{key} was removed from the config: give {key}=VALUE instead of ~{key}" for key in absent]
    for group, options in (("lora", ADAPTED), ("online", ("online",))):
        if (option := values.get(f"{group}.name")) in options:
            lacking = [key for key in KEYS if key.startswith(f"{group}.") and key not in values]
            problems += [f"{group}.name={option} lacks {', '.join(lacking)}: choose {group}={option}"] * bool(lacking)
    values = {key: value for key, value in values.items() if value is not WAITING}
    in_order = sorted(values.items(), key=lambda item: item[0].startswith("loss."))  # as --cfg job: model, then loss
    found = {key: find_value_problem(key, value, keys) for key, value in in_order}
    problems += filter(None, found.values())
    sound = {k: v for k, v in values.items() if k in keys and v != "???" and keys[k].rule.holds(v)}
    problems += _process_problems(sound, plan)
    problems += _combination_problems(sound)
    has_odd_weights = any(problem for key, problem in found.items() if key.startswith(WEIGHTS))
    problems += [problem for problem in _loss_problems(sound, plan) if not (has_odd_weights and problem == NO_PAIRS)]
    problems += _online_problems(sound, plan) if plan.online else []
    problems += _dataset_problems(sound.get("datasets", []), sources)
    return problems


def _list_keys(values: Mapping[str, Any]) -> dict[str, Key]:
    """All keys that a config may have, including options of its loss without a row in `KEYS`."""
    name = values.get("loss.name")
    options = dotted({"loss": load_defaults(name)["loss"]} if name in KEYS["loss.name"].rule.choices else {})
    return {key: key_of_option(default) for key, default in options} | KEYS


def find_value_problem(key: str, value: Any, keys: Mapping[str, Key]) -> str | None:
    """A sentence on a value that is wrong by itself; None if it is valid."""
    if key not in keys and key.startswith(WEIGHTS):
        name, others = key.removeprefix(WEIGHTS), ", ".join(name for name, loss in LOSSES.items() if loss.can_be_mixed)
        why = f"no loss is called {name}"
        if name in LOSSES and LOSSES[name].of_batch is not None:
            why = f"{name} compares the examples of a batch with each other, so it is trained alone, as loss={name}"
        return f"{key}: {why}; a mix adds up {others}"
    if key not in keys:
        return did_you_mean(key, keys)
    rule, how_to_set = keys[key].rule, keys[key].how_to_set
    if value == "???":
        return f"{key} is not set: {how_to_set or f'give {key}=VALUE'}"
    if isinstance(value, str) and "${" in value:
        return f"{key}={value} cannot be resolved: {how_to_set or 'no such key or resolver'}"
    if not rule.holds(value):
        return f"{key}={_typed(value)} must be {rule.wanted}"
    if rule.choices and value is not None and value not in rule.choices:
        return explain_unknown(key, value, rule.choices)
    return None


def _typed(value: Any) -> Any:
    """A value as typed on a command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def find_unused(config: DictConfig, plan: Plan) -> list[str]:
    """A message for each key that was set but has little or no effect with the other keys."""
    values = flatten(config)
    unused = _find_unused(values, plan)
    lines = [f"{key}={_typed(v)} has no effect: it needs {needs.what}" for key, v, needs in unused if not needs.refused]
    sources = {name for name, source in values["dataset_sources"].items() if source is not None}
    names = name_datasets(values["datasets"], values["dataset_sources"]).names
    lines += [
        f"dataset_sources.{name} has no effect: datasets={','.join(names)} does not name it; datasets=[{name}] does"
        for name in sorted(sources - set(names))
    ]
    if values["lora.name"] in ADAPTED and values["optimizer"] in STEPS_OF_LR and values["lr"] < 1e-6:
        lines.append(f"lr={values['lr']} is a rate for all weights; adapters take some ten times as much: 5e-6 to 2e-4")
    # a step is about lr, and a relative change below 1/512 to 1/256 of a weight is rounded away in bfloat16
    lr, dtype = values["lr"], values["model.policy_dtype"]
    trained_in_it = values["lora.name"] not in ADAPTED  # adapters are float32
    if dtype == "bfloat16" and trained_in_it and values["optimizer"] in STEPS_OF_LR and lr < 1e-5:
        lines.append(
            f"lr={lr} has little effect with model.policy_dtype=bfloat16, which rounds most such steps away: "
            f"use float32 with model.autocast=bfloat16, or an lr of 1e-5 or more"
        )
    return lines


def _find_unused(values: Mapping[str, Any], plan: Plan) -> Iterator[tuple[str, Any, Needs]]:
    """Keys that differ from their defaults and whose needs are not met; null needs nothing."""
    defaults = flatten(OmegaConf.create(load_defaults(**{group: values.get(f"{group}.name") for group in OPTIONAL})))
    for key, (_, _, needs, _) in KEYS.items():
        value = values.get(key)
        if needs is not None and value not in (None, defaults.get(key)) and not needs.met(values, plan):
            yield key, value, needs


def _process_problems(sound: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Problems with the number of processes, and with the trainer's abilities."""
    size, several, asked = plan.dims.world_size, plan.trainer.multi_process, sound.get("world_size")
    if not several and plan.launched and size > 1:
        yield f"trainer={sound.get('trainer')} is one process, and {size} were launched: use trainer=FSDPTrainer"
    elif not several and asked not in (None, 1):
        yield f"world_size={asked} needs a trainer of several processes: trainer=FSDPTrainer"
    elif plan.launched and asked not in (None, size):
        yield f"world_size={asked}, but {size} processes were launched: leave it out"
    if several and sound.get("optimizer") in NEED_WHOLE_TENSORS:
        yield f"optimizer={sound['optimizer']} cannot update shards: use another with trainer={sound.get('trainer')}"
    if several and plan.gpus and not plan.launched and size > plan.gpus:
        yield (
            f"world_size={size} is more than the {plan.gpus} GPUs of this machine: leave it out, or set "
            f"CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    for key, value, needs in _find_unused(sound, plan):
        if needs.refused:
            yield f"{key}={_typed(value)} needs {needs.what}"
    if not plan.trainer.can_sample and sound.get("sample_during_eval"):
        yield (
            f"sample_during_eval=true does not work with tensor_parallel.backend={sound['tensor_parallel.backend']}: "
            f"set sample_during_eval=false, or tensor_parallel.backend=dtensor"
        )
    if not plan.trainer.can_autocast and sound.get("model.autocast"):
        yield (
            f"model.autocast={sound['model.autocast']} does not reach the threads of "
            f"tensor_parallel.backend={sound['tensor_parallel.backend']}: set model.policy_dtype instead"
        )
    if not plan.trainer.takes_adapters and sound.get("lora.name") in ADAPTED:
        yield (
            f"lora={sound['lora.name']} does not work with tensor_parallel.backend={sound['tensor_parallel.backend']}, "
            f"which would split the adapters' layers too: set tensor_parallel.backend=dtensor"
        )
    elif plan.quantized:
        yield from _quantization_problems(plan)
    if not plan.gpus and sound.get("model.attn_implementation") == "flex_attention":
        yield "model.attn_implementation=flex_attention cannot train on a CPU: use sdpa"
    yield from _dims_problems(sound, plan)


def _quantization_problems(plan: Plan) -> Iterator[str]:
    """Problems of a 4-bit base with the trainer or a missing package."""
    if find_spec("bitsandbytes") is None:
        yield "lora=qlora needs the package bitsandbytes: pip install bitsandbytes, or choose lora=lora"
    if plan.trainer.cuts_layers:
        yield (
            f"lora=qlora does not work with trainer={plan.trainer.name}, which cannot cut packed weights: "
            f"choose trainer=FSDPTrainer, or lora=lora"
        )
    elif not plan.trainer.multi_process and plan.gpus > 1:
        yield (
            f"lora=qlora with trainer={plan.trainer.name} takes one GPU, and this machine has {plan.gpus}: choose "
            f"trainer=FSDPTrainer, whose processes each hold the 4-bit base, or set CUDA_VISIBLE_DEVICES=0"
        )


def _dims_problems(sound: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Problems of process groups of unequal size, and of batches that they cannot share."""
    size, tensor_size, data_size = plan.dims.world_size, plan.dims.tensor_size, plan.dims.data_size
    if size % tensor_size:
        yield f"tensor_parallel_size={tensor_size} does not divide the {size} processes: try {_divisors(size)}"
        return
    shards = sound.get("fsdp_shard_size")
    if shards is not None and plan.trainer.multi_process and data_size % shards:
        yield f"fsdp_shard_size={shards} does not divide the {data_size} processes: try {_divisors(data_size)}"
    yield from _batch_problems(sound, data_size)


def _batch_problems(sound: Mapping[str, Any], data_size: int) -> Iterator[str]:
    """Problems of training batches that do not divide evenly among processes that see different rows."""
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


def _divisors(number: int) -> str:
    """Divisors of a number in words, such as `1, 2 or 4`."""
    *most, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _combination_problems(sound: Mapping[str, Any]) -> Iterator[str]:
    """Problems of keys that are valid alone and wrong together; `sound` holds the keys valid alone."""

    def have(*keys: str) -> bool:
        return all(key in sound for key in keys)

    for key in ("model.name_or_path", "model.tokenizer_name_or_path"):
        name = sound.get(key) or ""
        if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).exists():
            yield f"{key}={name} is not there: no such directory" + " (~ is not expanded)" * name.startswith("~")
    if have("max_length", "max_prompt_length") and sound["max_prompt_length"] >= sound["max_length"]:
        yield (
            f"max_prompt_length={sound['max_prompt_length']} must be below max_length={sound['max_length']}, "
            f"or no token is left for a response"
        )
    if sound.get("lora.reference") == "adapter" and sound.get("model.archive", "") is None:
        yield "lora.reference=adapter needs an adapter: give model.archive=RUN/LATEST of a run with lora=lora"
    if sound.get("tensorboard.enabled") and not sound.get("debug") and find_spec("tensorboard") is None:
        yield "tensorboard.enabled=True needs the package tensorboard: pip install tensorboard, or leave it off"
    if have("n_epochs", "n_examples") and sound["n_epochs"] is None and sound["n_examples"] is None:
        yield "n_epochs and n_examples are both null, so training would never end: give one of them"
    if have("eval_every", "batch_size") and sound["eval_every"] < sound["batch_size"]:
        yield f"eval_every={sound['eval_every']} (examples) must be at least batch_size={sound['batch_size']}"
    if have("save_every", "batch_size") and (sound["save_every"] or 0) % sound["batch_size"]:
        fix = max(1, round(sound["save_every"] / sound["batch_size"])) * sound["batch_size"]
        yield f"save_every={sound['save_every']} (examples) must be a multiple of batch_size: try {fix}"


def _loss_problems(sound: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Problems of a loss's options that are valid alone and wrong together."""
    weights = {key.rpartition(".")[2]: weight for key, weight in sound.items() if key.startswith("loss.weights.")}
    if sound.get("loss.name") == "mix" and not any(
        LOSSES[name].pairwise and weight for name, weight in weights.items()
    ):
        yield NO_PAIRS
    if plan.loss.smoothed and sound.get("loss.label_smoothing") == 0:
        yield "loss.label_smoothing=0 makes the loss infinite: set it above 0, such as loss.label_smoothing=0.001"
    if sound.get("loss.reference_free") and sound.get("loss.f_divergence", "reverse_kl") != "reverse_kl":
        yield (
            f"loss.f_divergence={sound['loss.f_divergence']} is a divergence from the reference: "
            f"set loss.reference_free=false"
        )


def _online_problems(sound: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Problems of settings that rule out drawing pairs from the policy, and of missing scorers."""
    if not plan.loss.pairwise:
        yield f"online=online draws pairs, and loss={sound.get('loss.name')} trains on none: choose loss=dpo or another"
    if not plan.trainer.can_sample:
        yield (
            f"online=online does not work with tensor_parallel.backend={sound['tensor_parallel.backend']}, which "
            f"cannot sample: set tensor_parallel.backend=dtensor"
        )
    if sound.get("cache_reference_logps") == "all":
        yield "cache_reference_logps=all needs pairs that are known before: leave it out with online=online"
    share, batch = sound.get("online.mix_offline", 0), sound.get("batch_size", 1)
    if share and not 0 < round(share * batch) < batch:
        yield (
            f"online.mix_offline={share} of batch_size={batch} is {round(share * batch)} pairs of the data, and "
            f"one at least must be, and one drawn: give another share, or 0"
        )
    scorer = sound.get("online.scorer")
    if scorer in SCORED_BY and sound.get(f"online.{scorer}", "") is None:
        example = {"reward_model": "DIR_OR_HUB_ID", "function": "FILE.py:NAME", "keyword": "TEXT"}[scorer]
        yield f"online.scorer={scorer} needs online.{scorer}: give online.{scorer}={example}"
    file = (sound.get("online.function") or "").rpartition(":")[0]
    if scorer == "function" and file and not Path(file).expanduser().is_file():
        yield f"online.function={sound['online.function']}: there is no file {file}"
    lengths = [sound.get(key) for key in ("max_prompt_length", "online.max_new_tokens", "max_length")]
    if None not in lengths and lengths[0] + lengths[1] > lengths[2]:
        yield (
            f"max_prompt_length={lengths[0]} and online.max_new_tokens={lengths[1]} are more than max_length="
            f"{lengths[2]}: lower one of them, or raise max_length"
        )


def _dataset_problems(given: str | list[str], sources: Any) -> Iterator[str]:
    if not isinstance(sources, Mapping):
        yield f"dataset_sources={sources} must map names to places, such as dataset_sources.hh=DIR"
        return
    datasets = name_datasets(given, sources)
    yield from datasets.problems
    for name, value in datasets.sources.items():
        try:
            columns = {} if value is None else Source.parse(name, value).columns
        except InputError as error:
            yield str(error)
        else:
            yield from _column_problems(name, columns) if columns else ()


def _column_problems(name: str, columns: Any) -> Iterator[str]:
    key = f"dataset_sources.{name}.columns"
    if name in built_in():
        yield f"{key}={columns}: {name} has columns of its own; name your data otherwise"
    elif (
        not isinstance(columns, Mapping)
        or not set(columns) <= set(COLUMNS)
        or not all(map(TEXT.holds, columns.values()))
    ):
        yield f"{key}={columns} must map some of {', '.join(COLUMNS)} to your names: {{prompt: question, chosen: best}}"


def refuse_hydras_own(key: str, override: str) -> str | None:
    """A sentence on why an override of one of Hydra's own keys is refused; None if it is harmless."""
    if key.partition("@")[0].partition(".")[0].partition("/")[0] != "hydra" and "@hydra" not in key:
        return None
    if (key in HYDRAS_OWN or key.startswith(OF_HYDRAS_PLUGINS)) and "_target_" not in override:
        return None
    return f"{key} may not be set: Hydra's own keys can name code to run, and of them only {', '.join(HYDRAS_OWN)} may"
