"""Config validation: every problem at once, before anything is loaded.

Conditions on the value of a key alone are in `dpo/settings/keys.py`; those on several keys, or on keys and the machine,
are the table CHECKS. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf

from dpo.losses import LOSSES, Loss
from dpo.settings.choices import (
    ADAPTED,
    BASIC,
    NEED_WHOLE_TENSORS,
    PACKAGE,
    QUANTIZED,
    STEPS_OF_LR,
    TENSOR_PARALLEL,
    explain_unknown,
)
from dpo.settings.files import OPTIONAL, UNRESOLVED, dotted, flatten, load_aliases, load_defaults
from dpo.settings.keys import KEYS, Key, make_option_key, read_rule
from dpo.settings.places import find_dataset_problems, name_datasets
from dpo.settings.plan import Plan, resolve

Values = Mapping[str, Any]  # by dotted key
Level = Literal["error", "warning"]
WEIGHTS = "loss.weights."


class Check(NamedTuple):
    """A condition under which a config is refused, or warned about.

    It is skipped if it reads a key without a valid value. With `keys` it is tried for those that are set: not null, and
    not at their defaults. `{key}` in a sentence is the key's value.
    """

    broken: Callable[[Values, Plan], Any]
    sentence: str | Callable[[Values, Plan], str]
    level: Level = "error"
    keys: tuple[str, ...] = ()


def needs(keys: str, what: str, met: Callable[[Values, Plan], Any], level: Level = "warning") -> Check:
    """A check that keys have an effect, given other keys."""
    why = "needs" if level == "error" else "has no effect: it needs"
    return Check(lambda v, p: not met(v, p), f"{{KEY}}={{VALUE}} {why} {what}", level, tuple(keys.split()))


def _list_losses(fits: Callable[[Loss], bool], between: str = ", ") -> str:
    return between.join(name for name, loss in LOSSES.items() if fits(loss))


SEVERAL = "a trainer of several processes: trainer=FSDPTrainer"
REFERENCE = f"a loss with a reference: any but {_list_losses(lambda loss: not loss.reference)}"
PAIRS = f"a loss of pairs: any but {_list_losses(lambda loss: loss.trains_on != 'pairs')}"
MARGIN = (
    "a loss whose log-ratios enter by their difference alone: "
    f"loss={_list_losses(lambda loss: loss.reference and loss.margin_only, ' or ')}"
)

# fmt: off
CHECKS = (
    # --- keys that have an effect under others alone
    needs("fsdp_port", "processes that train.py starts itself: trainer=FSDPTrainer, without a launcher",
          lambda v, p: p.trainer.multi_process and not p.launched),
    needs("collective_timeout_secs", SEVERAL, lambda v, p: p.trainer.multi_process),
    needs("fsdp_shard_size", SEVERAL, lambda v, p: p.trainer.multi_process, "error"),
    needs("fsdp_reduce_dtype", SEVERAL, lambda v, p: p.trainer.multi_process, "error"),
    needs("fsdp_reshard_after_forward", "processes that share weights: trainer=FSDPTrainer",
          lambda v, p: p.dims.shard_size > 1),
    needs("fsdp_reduce_once", "gradient_accumulation_steps above 1 and processes that share weights: "
          "trainer=FSDPTrainer", lambda v, p: p.dims.shard_size > 1 and v["gradient_accumulation_steps"] > 1),
    needs("fsdp_frozen_weights", "a reference of its own or an adapter, and trainer=FSDPTrainer",
          lambda v, p: p.trainer.multi_process and p.has_frozen_weights),
    needs("model.fsdp_policy_mp", f"{SEVERAL}, or use model.autocast", lambda v, p: p.trainer.multi_process, "error"),
    needs("tensor_parallel_size", "trainer=TensorParallelTrainer",
          lambda v, p: p.trainer.cuts_layers or v["tensor_parallel_size"] == 1, "error"),
    needs("tensor_parallel.backend", "trainer=TensorParallelTrainer", lambda v, p: p.trainer.cuts_layers, "error"),
    needs("lr_scaling", "several processes that see different rows: trainer=FSDPTrainer",
          lambda v, p: p.dims.data_size > 1),
    needs("min_lr_ratio", "schedule=linear or schedule=cosine", lambda v, p: v["schedule"] != "constant", "error"),
    needs("tensorboard.enabled save_every keep_checkpoints export", "debug=false", lambda v, p: not v["debug"]),
    needs("wandb.entity wandb.project wandb.group wandb.tags wandb.notes wandb.artifacts",
          "wandb.enabled=true and debug=false", lambda v, p: v["wandb.enabled"] and not v["debug"]),
    needs("n_eval_tokens", "sample_during_eval=true", lambda v, p: v["sample_during_eval"]),
    needs("n_eval_model_samples", "sample_during_eval=true, or online=online",
          lambda v, p: v["sample_during_eval"] or v["online.name"] == "online"),
    needs("do_first_sampling", "do_first_eval=true and sample_during_eval=true",
          lambda v, p: v["do_first_eval"] and v["sample_during_eval"]),
    needs("loss.sft_weight", PAIRS, lambda v, p: p.loss.trains_on == "pairs", "error"),
    needs("loss.wpo loss.ld_alpha", REFERENCE, lambda v, p: p.loss.reference, "error"),
    needs("loss.f_divergence", MARGIN, lambda v, p: p.loss.reference and p.loss.margin_only, "error"),
    needs("loss.f_alpha", "loss.f_divergence=alpha", lambda v, p: v["loss.f_divergence"] == "alpha"),
    needs("cache_reference_logps lora.reference", REFERENCE, lambda v, p: p.loss.reference),
    needs("model.reference_dtype",
          f"{REFERENCE}, and a model of its own that gives it: lora=none, or lora.reference=model",
          lambda v, p: p.reference == "model"),
    needs("online.sync_reference_every", f"{REFERENCE}, and lora=none",
          lambda v, p: p.reference == "model" and v["lora.name"] not in ADAPTED, "error"),
    needs("online.reward_model", "online.scorer=reward_model", lambda v, p: v["online.scorer"] == "reward_model"),
    needs("online.function", "online.scorer=function", lambda v, p: v["online.scorer"] == "function"),
    needs("online.keyword", "online.scorer=keyword", lambda v, p: v["online.scorer"] == "keyword"),
    # --- processes
    Check(lambda v, p: p.launched and p.dims.world_size > 1 and not p.trainer.multi_process,
          "trainer={trainer} is one process, and {processes} were launched: use trainer=FSDPTrainer"),
    Check(lambda v, p: v["world_size"] not in (None, 1) and p.dims.world_size == 1 and not p.trainer.multi_process,
          f"world_size={{world_size}} needs {SEVERAL}"),
    Check(lambda v, p: p.launched and v["world_size"] not in (None, p.dims.world_size) and p.trainer.multi_process,
          "world_size={world_size}, but {processes} processes were launched: leave it out"),
    Check(lambda v, p: not p.launched and p.trainer.multi_process and 0 < p.gpus < p.dims.world_size,
          "world_size={processes} is more than the {gpus} GPUs of this machine: leave it out, or set "
          "CUDA_VISIBLE_DEVICES= to run on the CPU"),
    Check(lambda v, p: v["optimizer"] in NEED_WHOLE_TENSORS and p.trainer.multi_process,
          "optimizer={optimizer} cannot update shards: use another with trainer={trainer}"),
    Check(lambda v, p: not _is_divided(p),
          lambda v, p: f"tensor_parallel_size={p.dims.tensor_size} does not divide the {p.dims.world_size} processes: "
          f"try {_list_divisors(p.dims.world_size)}"),
    Check(lambda v, p: p.trainer.multi_process and _is_divided(p) and p.dims.data_size % (v["fsdp_shard_size"] or 1),
          lambda v, p: f"fsdp_shard_size={v['fsdp_shard_size']} does not divide the {p.dims.data_size} processes: "
          f"try {_list_divisors(p.dims.data_size)}"),
    Check(lambda v, p: _is_divided(p) and v["batch_size"] % (v["gradient_accumulation_steps"] * p.dims.data_size),
          lambda v, p: _explain_batches(v["batch_size"], v["gradient_accumulation_steps"], p.dims.data_size)),
    # --- trainers, packages and hardware
    Check(lambda v, p: v["sample_during_eval"] and p.trainer is PACKAGE,
          "sample_during_eval=true does not work with tensor_parallel.backend=tensor_parallel: set "
          "sample_during_eval=false, or tensor_parallel.backend=dtensor"),
    Check(lambda v, p: v["online.name"] == "online" and p.trainer is PACKAGE,
          "online=online does not work with tensor_parallel.backend=tensor_parallel, which cannot sample: set "
          "tensor_parallel.backend=dtensor"),
    Check(lambda v, p: v["model.autocast"] and p.trainer is PACKAGE,
          "model.autocast={model.autocast} does not reach the threads of tensor_parallel.backend=tensor_parallel: set "
          "model.policy_dtype instead"),
    Check(lambda v, p: v["lora.name"] in ADAPTED and p.trainer is PACKAGE,
          "lora={lora.name} does not work with tensor_parallel.backend=tensor_parallel, which would split the "
          "adapters' layers too: set tensor_parallel.backend=dtensor"),
    Check(lambda v, p: v["lora.name"] in QUANTIZED and p.trainer is TENSOR_PARALLEL,
          "lora=qlora does not work with trainer={trainer}, which cannot cut packed weights: choose "
          "trainer=FSDPTrainer, or lora=lora"),
    Check(lambda v, p: v["lora.name"] in QUANTIZED and p.trainer is BASIC and p.gpus > 1,
          "lora=qlora with trainer={trainer} takes one GPU, and this machine has {gpus}: choose trainer=FSDPTrainer, "
          "whose processes each hold the 4-bit base, or set CUDA_VISIBLE_DEVICES=0"),
    Check(lambda v, p: v["lora.name"] in QUANTIZED and find_spec("bitsandbytes") is None,
          "lora=qlora needs the package bitsandbytes: pip install bitsandbytes, or choose lora=lora"),
    # whole, the base is rounded to the dtype in which it computes, and the start of a run compares both models
    Check(lambda v, p: v["fsdp_frozen_weights"] == "whole" and not p.can_hold_frozen_whole,
          lambda v, p: f"fsdp_frozen_weights=whole rounds the base to {p.compute_dtype}, and a separate reference in "
          f"{p.reference_dtype} would differ from it: set model.reference_dtype={p.compute_dtype}, or "
          f"lora.reference=base"),
    Check(lambda v, p: v["tensorboard.enabled"] and not v["debug"] and find_spec("tensorboard") is None,
          "tensorboard.enabled=true needs the package tensorboard: pip install tensorboard, or leave it off"),
    Check(lambda v, p: v["model.attn_implementation"] == "flex_attention" and not p.gpus,
          "model.attn_implementation=flex_attention cannot train on a CPU: use sdpa"),
    # --- models, lengths, intervals and rates
    Check(lambda v, p: _is_missing(v["model.name_or_path"]),
          lambda v, p: _explain_missing("model.name_or_path", v)),
    Check(lambda v, p: _is_missing(v["model.tokenizer_name_or_path"] or ""),
          lambda v, p: _explain_missing("model.tokenizer_name_or_path", v)),
    Check(lambda v, p: v["lora.reference"] == "adapter" and v["model.archive"] is None,
          "lora.reference=adapter needs an adapter: give model.archive=RUN/LATEST of a run with lora=lora"),
    Check(lambda v, p: v["max_prompt_length"] >= v["max_length"],
          "max_prompt_length={max_prompt_length} must be below max_length={max_length}, or no token is left for a "
          "response"),
    Check(lambda v, p: v["n_epochs"] is None and v["n_examples"] is None,
          "n_epochs and n_examples are both null, so training would never end: give one of them"),
    Check(lambda v, p: v["eval_every"] < v["batch_size"],
          "eval_every={eval_every} (examples) must be at least batch_size={batch_size}"),
    Check(lambda v, p: (v["save_every"] or 0) % v["batch_size"],
          lambda v, p: f"save_every={v['save_every']} (examples) must be a multiple of batch_size: "
          f"try {_find_multiple(v['save_every'], v['batch_size'])}"),
    Check(lambda v, p: v["lr"] < 1e-6 and v["lora.name"] in ADAPTED and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} is a rate for all weights; adapters take some ten times as much: 5e-6 to 2e-4", "warning"),
    # a step is about lr, and a relative change below 1/512 to 1/256 of a weight is rounded away; adapters are float32
    Check(lambda v, p: v["lr"] < 1e-5 and v["model.policy_dtype"] == "bfloat16" and v["lora.name"] not in ADAPTED
          and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} has little effect with model.policy_dtype=bfloat16, which rounds most such steps away: use float32 "
          "with model.autocast=bfloat16, or an lr of 1e-5 or more", "warning"),
    # --- losses; weights of a mix that are wrong alone have a sentence of their own
    Check(lambda v, p: v["loss.name"] == "mix" and not any(w and _may_be_pairwise(key) for key, w in v.items()),
          "loss=mix adds up no loss of pairs: give loss.weights.dpo=1 or another, or train with loss=sft"),
    Check(lambda v, p: p.loss.needs_label_smoothing and v["loss.label_smoothing"] == 0,
          "loss.label_smoothing=0 makes the loss infinite: set it above 0, such as loss.label_smoothing=0.001"),
    Check(lambda v, p: v["loss.reference_free"] and v["loss.f_divergence"] != "reverse_kl",
          "loss.f_divergence={loss.f_divergence} is a divergence from the reference: set loss.reference_free=false"),
    # --- online pairs
    Check(lambda v, p: v["online.name"] == "online" and p.loss.trains_on != "pairs",
          "online=online draws pairs, and loss={loss.name} trains on none: choose loss=dpo or another"),
    Check(lambda v, p: v["online.name"] == "online" and v["cache_reference_logps"] == "all",
          "cache_reference_logps=all needs pairs that are known before: leave it out with online=online"),
    Check(lambda v, p: v["online.mix_offline"] and not 0 < p.n_offline < v["batch_size"],
          lambda v, p: f"online.mix_offline={v['online.mix_offline']} of batch_size={v['batch_size']} gives "
          f"{p.n_offline} pairs of the data per batch; it must leave 1 to {v['batch_size'] - 1}: give another "
          f"share, or 0"),
    Check(lambda v, p: v["online.scorer"] == "reward_model" and v["online.reward_model"] is None,
          "online.scorer=reward_model needs online.reward_model: give online.reward_model=DIR_OR_HUB_ID"),
    Check(lambda v, p: v["online.scorer"] == "function" and v["online.function"] is None,
          "online.scorer=function needs online.function: give online.function=FILE.py:NAME"),
    Check(lambda v, p: v["online.scorer"] == "keyword" and v["online.keyword"] is None,
          "online.scorer=keyword needs online.keyword: give online.keyword=TEXT"),
    Check(lambda v, p: v["online.scorer"] == "function" and v["online.function"] and not _find_script(v).is_file(),
          lambda v, p: f"online.function={v['online.function']}: there is no file {_find_script(v)}"),
    Check(lambda v, p: v["max_prompt_length"] + v["online.max_new_tokens"] > v["max_length"],
          "max_prompt_length={max_prompt_length} and online.max_new_tokens={online.max_new_tokens} are more than "
          "max_length={max_length}: lower one of them, or raise max_length"),
)
# fmt: on


def _is_divided(plan: Plan) -> bool:
    return plan.dims.world_size % plan.dims.tensor_size == 0


def _list_divisors(number: int) -> str:
    """Divisors of a number in words, such as `1, 2 or 4`."""
    *most, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _find_multiple(number: int, factor: int) -> int:
    return max(1, round(number / factor)) * factor


def _explain_batches(batch: int, steps: int, data_size: int) -> str:
    parts = steps * data_size
    fix = f"try batch_size={_find_multiple(batch, parts)}"
    if batch % data_size == 0:
        fix += f", or gradient_accumulation_steps={_list_divisors(batch // data_size)}"
    elif batch % steps == 0:
        fix += f", or {_list_divisors(batch // steps)} processes"
    return (
        f"batch_size={batch} must be divisible by gradient_accumulation_steps * processes = "
        f"{steps} * {data_size} = {parts}: {fix}"
    )


def _is_missing(name: str) -> bool:
    """Return whether a model's name can only be a missing path."""
    return (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).exists()


def _explain_missing(key: str, v: Values) -> str:
    return f"{key}={v[key]} is not there: no such directory{' (~ is not expanded)' * v[key].startswith('~')}"


def _may_be_pairwise(key: str) -> bool:
    """Return whether a key weighs pairs, or an unknown loss."""
    loss = LOSSES.get(key.removeprefix(WEIGHTS))
    return key.startswith(WEIGHTS) and (loss is None or loss.trains_on == "pairs")


def _find_script(v: Values) -> Path:
    return Path(v["online.function"].rpartition(":")[0]).expanduser()


def find_config_problems(config: DictConfig, plan: Plan | None = None) -> list[str]:
    """List the problems of a composed config, one sentence each.

    A sentence has the value and the fix. `plan` is the config's plan, if known already.
    """
    problems = find_problems(flatten(config), plan or resolve(config))
    written: Any = OmegaConf.to_container(config)
    if config.get("resume") == "auto" and "get_local_run_dir" in str(written["local_run_dir"]):
        problems.append("resume=auto looks into local_run_dir, which is a new one each time: give local_run_dir=DIR")
    return problems


def find_problems(values: Values, plan: Plan) -> list[str]:
    """`find_config_problems` for values by dotted key."""
    sources, keys = values.get("dataset_sources", {}), _list_keys(values)
    resolved = {k: value for k, value in values.items() if value is not UNRESOLVED and k != "dataset_sources"}
    in_order = sorted(resolved, key=lambda key: key.startswith("loss."))  # as --cfg job: model, then loss
    invalid = {key: problem for key in in_order if (problem := find_value_problem(key, resolved[key], keys))}
    # weights stay even if invalid: a check asks which losses a mix names, whatever their weights
    valid = {k: value for k, value in values.items() if k.startswith(WEIGHTS) or (k in resolved and k not in invalid)}
    return [
        *_find_absent(values),
        *invalid.values(),
        *_find_broken(valid, plan, "error"),
        *find_dataset_problems(valid.get("datasets", []), sources),
    ]


def find_warnings(config: DictConfig, plan: Plan) -> list[str]:
    """List the keys of a valid config that have little effect."""
    values = flatten(config)
    names = name_datasets(values["datasets"], values["dataset_sources"]).names
    placed = {name for name, source in values["dataset_sources"].items() if source is not None}
    unused = (
        f"dataset_sources.{name} has no effect: datasets={','.join(names)} does not name it; datasets=[{name}] does"
        for name in sorted(placed - set(names))
    )
    return [*_find_broken(values, plan, "warning"), *unused]


def _find_broken(values: Values, plan: Plan, level: Level) -> Iterator[str]:
    """Yield the sentences of a level's checks that the values break."""
    defaults = dict(dotted(load_defaults(**{group: values.get(f"{group}.name") for group in OPTIONAL})))
    facts = {"processes": plan.dims.world_size, "gpus": plan.gpus}
    for broken, sentence, _, keys in (check for check in CHECKS if check.level == level):
        set_keys = [key for key in keys if values.get(key) not in (None, defaults.get(key))]
        with suppress(KeyError):  # the check reads a key without a valid value, which is a problem of its own
            if (keys and not set_keys) or not broken(values, plan):
                continue
            for key in set_keys or ("",):  # a check without keys is reported once
                fillers = {**facts, **values, "KEY": key, "VALUE": values.get(key)}
                yield _fill(sentence, fillers) if isinstance(sentence, str) else sentence(values, plan)


def _fill(sentence: str, values: Values) -> str:
    return re.sub(r"\{([\w.]+)\}", lambda name: str(_as_typed(values[name[1]])), sentence)


def _find_absent(values: Values) -> Iterator[str]:
    for key in KEYS:
        if key not in values and not key.startswith(tuple(f"{group}." for group in OPTIONAL)):
            yield f"{key} was removed from the config: give {key}=VALUE instead of ~{key}"
    for group, options in (("lora", ADAPTED), ("online", ("online",))):
        lacking = [key for key in KEYS if key.startswith(f"{group}.") and key not in values]
        if (option := values.get(f"{group}.name")) in options and lacking:
            yield f"{group}.name={option} lacks {', '.join(lacking)}: choose {group}={option}"


def _list_keys(values: Values) -> dict[str, Key]:
    """All keys of a config, with its loss's options without a row."""
    name = values.get("loss.name")
    options = dotted({"loss": load_defaults(name)["loss"]} if isinstance(name, str) and name in LOSSES else {})
    return {key: make_option_key(default) for key, default in options} | KEYS


def find_value_problem(key: str, value: Any, keys: Mapping[str, Key]) -> str | None:
    """A sentence on a value that is wrong by itself, or None."""
    if key not in keys and key.startswith(WEIGHTS):
        return _explain_weight(key)
    if key not in keys:
        return explain_unknown_key(key, keys)
    spec, _, choices, how_to_set = keys[key]
    rule = read_rule(spec)
    if value == "???":
        return f"{key} is not set: {how_to_set or f'give {key}=VALUE'}"
    if isinstance(value, str) and "${" in value:
        return f"{key}={value} cannot be resolved: {how_to_set or 'no such key or resolver'}"
    if not rule.holds(value):
        return f"{key}={_as_typed(value)} must be {rule.wanted}"
    if choices and value is not None and value not in choices:
        return explain_unknown(key, value, choices)
    return None


def _explain_weight(key: str) -> str:
    name = key.removeprefix(WEIGHTS)
    why = f"no loss is called {name}"
    if name in LOSSES and LOSSES[name].batch_statistic is not None:
        why = f"{name} compares the examples of a batch with each other, so it is trained alone, as loss={name}"
    return f"{key}: {why}; a mix adds up {_list_losses(lambda loss: loss.can_be_mixed)}"


def explain_unknown_key(key: str, known: Collection[str]) -> str:
    """A sentence on an unknown key, with the one that was meant."""
    if name := load_aliases().get(key.rpartition(".")[2]):
        return f"unknown key {key}: here it is {name}"
    by_small_letters = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), by_small_letters, n=1)
    return f"unknown key {key}" + (
        f": did you mean {by_small_letters[near[0]]}?" if near else "; `python train.py --cfg job` shows all keys"
    )


def _as_typed(value: Any) -> Any:
    return json.dumps(value) if value is None or isinstance(value, bool) else value
