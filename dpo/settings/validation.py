"""Config validation: all problems are reported at once, before anything is loaded.

Conditions on the value of one key are in `dpo/settings/keys.py`. Conditions on several keys, or on keys and the
machine, are the table CHECKS. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dpo.errors import InputError
from dpo.losses import LOSSES, Loss
from dpo.settings.choices import (
    BASIC,
    NEED_WHOLE_TENSORS,
    PACKAGE,
    STEPS_OF_LR,
    TENSOR_PARALLEL,
    VARLEN,
    explain_unknown,
    join_with_or,
)
from dpo.settings.files import CONFIG_DIR, UNRESOLVED, dotted, load_aliases, load_defaults, load_file, options_in
from dpo.settings.keys import KEYS, REMOVED, Problem
from dpo.settings.places import find_dataset_problems
from dpo.settings.plan import Plan

Values = Mapping[str, Any]  # by dotted key
Level = Literal["error", "warning"]
WEIGHTS = "loss.weights."


class Check(NamedTuple):
    """A condition under which a config is refused, or warned about.

    A check with `keys` is reported once for each of the keys that is set, that is, neither null nor at its default. A
    check that reads a key with an invalid value is skipped, as that value is reported separately. In a sentence, `{lr}`
    is the value of `lr`, `{KEY}` one of `keys`, `{VALUE}` its value, `{processes}` and `{gpus}` their numbers.
    """

    is_broken: Callable[[Values, Plan], Any]  # true if the config is refused or warned about
    sentence: str | Callable[[Values, Plan], str]
    level: Level = "error"
    keys: tuple[str, ...] = ()


def needs(keys: str, what: str, is_met: Callable[[Values, Plan], Any], level: Level = "warning") -> Check:
    """Make a check for keys that have no effect unless `is_met`.

    `keys` are separated by spaces; `what` says what they need. With level "error" such a key is refused.
    """
    verb = "needs" if level == "error" else "has no effect: it needs"
    return Check(lambda v, p: not is_met(v, p), f"{{KEY}}={{VALUE}} {verb} {what}", level, tuple(keys.split()))


def _list_losses(is_listed: Callable[[Loss], bool], separator: str = ", ") -> str:
    return separator.join(name for name, loss in LOSSES.items() if is_listed(loss))


# requirements that several keys share
SEVERAL_PROCESSES = "a trainer of several processes: trainer=FSDPTrainer"
LOSS_WITH_REFERENCE = f"a loss with a reference: any but {_list_losses(lambda loss: not loss.reference)}"
LOSS_OF_PAIRS = f"a loss of pairs: any but {_list_losses(lambda loss: loss.trains_on != 'pairs' or loss.scalar_head)}"
LOSS_OF_PAIRS_WITH_REFERENCE = (
    "a loss of pairs with a reference: any but "
    f"{_list_losses(lambda loss: loss.trains_on != 'pairs' or not loss.reference)}"
)
LOSS_OF_LABELS = f"a loss of labels: loss={_list_losses(lambda loss: loss.trains_on == 'labels', ' or loss=')}"
LOSS_OF_MARGIN = (
    "a loss that depends only on the difference of the log-ratios: "
    f"loss={_list_losses(lambda loss: loss.reference and loss.margin_only, ' or ')}"
)

# fmt: off
CHECKS = (
    # --- keys that have an effect only with some values of other keys. v: the values, p: the plan
    needs("fsdp_port", "processes that train.py starts itself: trainer=FSDPTrainer, without a launcher",
          lambda v, p: p.trainer.multi_process and not p.launched),
    needs("collective_timeout_secs", SEVERAL_PROCESSES, lambda v, p: p.trainer.multi_process),
    needs("fsdp_shard_size", SEVERAL_PROCESSES, lambda v, p: p.trainer.multi_process, "error"),
    needs("fsdp_reduce_dtype fsdp_reshard_after_forward lr_scaling", "several processes: trainer=FSDPTrainer",
          lambda v, p: p.dims.data_size > 1),
    needs("fsdp_reduce_once", "gradient_accumulation_steps above 1 and processes that share weights: "
          "trainer=FSDPTrainer", lambda v, p: p.dims.shard_size > 1 and v["gradient_accumulation_steps"] > 1),
    needs("fsdp_frozen_weights", "trainer=FSDPTrainer, and an adapter or a reference that is a second model",
          lambda v, p: p.trainer.multi_process and p.has_frozen_weights),
    needs("model.fsdp_policy_mp", f"{SEVERAL_PROCESSES}, or use model.autocast",
          lambda v, p: p.trainer.multi_process, "error"),
    needs("tensor_parallel_size", "trainer=TensorParallelTrainer",
          lambda v, p: p.trainer.cuts_layers or v["tensor_parallel_size"] == 1, "error"),
    needs("tensor_parallel.backend", "trainer=TensorParallelTrainer", lambda v, p: p.trainer.cuts_layers, "error"),
    needs("min_lr_ratio", "schedule=linear or schedule=cosine", lambda v, p: v["schedule"] != "constant", "error"),
    needs("tensorboard.enabled save_every keep_checkpoints export", "debug=false", lambda v, p: not v["debug"]),
    needs("wandb.entity wandb.project wandb.group wandb.tags wandb.notes wandb.artifacts",
          "wandb.enabled=true and debug=false", lambda v, p: v["wandb.enabled"] and not v["debug"]),
    needs("n_eval_tokens sample_temperature sample_top_p sample_top_k", "sample_during_eval=true",
          lambda v, p: v["sample_during_eval"]),
    needs("model.cache_implementation n_eval_model_samples", "sample_during_eval=true, or online=online",
          lambda v, p: v["sample_during_eval"] or p.online),
    needs("do_first_sampling", "do_first_eval=true and sample_during_eval=true",
          lambda v, p: v["do_first_eval"] and v["sample_during_eval"]),
    needs("loss.wpo loss.ld_alpha", LOSS_OF_PAIRS_WITH_REFERENCE,
          lambda v, p: p.loss.trains_on == "pairs" and p.loss.reference, "error"),
    needs("loss.f_divergence", LOSS_OF_MARGIN, lambda v, p: p.loss.reference and p.loss.margin_only, "error"),
    needs("loss.f_alpha", "loss.f_divergence=alpha", lambda v, p: v["loss.f_divergence"] == "alpha"),
    needs("unpair", LOSS_OF_LABELS, lambda v, p: p.loss.trains_on == "labels", "error"),
    needs("list_pairs", LOSS_OF_PAIRS, lambda v, p: p.loss.trains_on == "pairs"),
    needs("cache_reference_logps lora.reference", LOSS_WITH_REFERENCE, lambda v, p: p.loss.reference),
    needs("model.reference_dtype",
          f"{LOSS_WITH_REFERENCE}, and a reference that is a second model: lora=none, or lora.reference=model",
          lambda v, p: p.reference == "model"),
    needs("online.sync_reference_every", f"{LOSS_WITH_REFERENCE}, and lora=none",
          lambda v, p: p.reference == "model" and p.lora is None, "error"),
    needs("online.reward_model online.reward_format", "online.scorer=reward_model",
          lambda v, p: v["online.scorer"] == "reward_model"),
    needs("online.function", "online.scorer=function", lambda v, p: v["online.scorer"] == "function"),
    needs("online.keyword", "online.scorer=keyword", lambda v, p: v["online.scorer"] == "keyword"),
    # --- processes
    Check(lambda v, p: p.launched and p.dims.world_size > 1 and not p.trainer.multi_process,
          "trainer={trainer} is one process, and {processes} were launched: use trainer=FSDPTrainer"),
    Check(lambda v, p: v["world_size"] not in (None, 1) and p.dims.world_size == 1 and not p.trainer.multi_process,
          f"world_size={{world_size}} needs {SEVERAL_PROCESSES}"),
    Check(lambda v, p: p.launched and v["world_size"] not in (None, p.dims.world_size) and p.trainer.multi_process,
          "world_size={world_size}, but {processes} processes were launched: leave world_size out"),
    Check(lambda v, p: not p.launched and p.trainer.multi_process and 0 < p.gpus < p.dims.world_size,
          "world_size={processes} is more than the {gpus} GPUs of this machine: leave world_size out, or set "
          "CUDA_VISIBLE_DEVICES= to run on the CPU"),
    Check(lambda v, p: v["optimizer"] in NEED_WHOLE_TENSORS and p.trainer.multi_process,
          "optimizer={optimizer} cannot update shards: use another optimizer with trainer={trainer}"),
    Check(lambda v, p: not _tensor_size_fits(p),
          lambda v, p: f"tensor_parallel_size={p.dims.tensor_size} does not divide the {p.dims.world_size} processes: "
          f"try {_list_divisors(p.dims.world_size)}"),
    Check(lambda v, p: p.trainer.multi_process and _tensor_size_fits(p)
          and p.dims.data_size % (v["fsdp_shard_size"] or 1),
          lambda v, p: f"fsdp_shard_size={v['fsdp_shard_size']} does not divide the {p.dims.data_size} processes: "
          f"try {_list_divisors(p.dims.data_size)}"),
    Check(lambda v, p: _tensor_size_fits(p)
          and v["batch_size"] % (v["gradient_accumulation_steps"] * p.dims.data_size),
          lambda v, p: _explain_batch_size(v["batch_size"], v["gradient_accumulation_steps"], p.dims.data_size)),
    # --- trainers, packages and hardware
    Check(lambda v, p: p.trainer == PACKAGE and any(_find_beyond_package(v, p)),
          lambda v, p: f"tensor_parallel.backend=tensor_parallel does not work with "
          f"{', '.join(_find_beyond_package(v, p))}: leave it out, or set tensor_parallel.backend=dtensor"),
    Check(lambda v, p: p.quantized and p.trainer == TENSOR_PARALLEL,
          "lora=qlora does not work with trainer={trainer}, which cannot cut packed weights: choose "
          "trainer=FSDPTrainer, or lora=lora"),
    Check(lambda v, p: (p.quantized or v["model.attn_implementation"] == "flex_attention")
          and p.gpus > 1 and not p.trainer.multi_process,
          lambda v, p: f"{'lora=qlora' if p.quantized else 'model.attn_implementation=flex_attention'} with "
          f"trainer={p.trainer.name} takes one GPU, and this machine has {p.gpus}: choose trainer=FSDPTrainer, or set "
          f"CUDA_VISIBLE_DEVICES=0"),
    Check(lambda v, p: p.quantized and find_spec("bitsandbytes") is None,
          "lora=qlora needs the package bitsandbytes: pip install bitsandbytes, or choose lora=lora"),
    Check(lambda v, p: v["tensorboard.enabled"] and not v["debug"] and find_spec("tensorboard") is None,
          "tensorboard.enabled=true needs the package tensorboard: pip install tensorboard, or leave it off"),
    # a base held whole is rounded to its compute dtype, and the self-test compares the rounded base with the reference
    Check(lambda v, p: v["fsdp_frozen_weights"] == "whole" and not p.can_hold_frozen_whole,
          lambda v, p: f"fsdp_frozen_weights=whole rounds the base to {p.compute_dtype}, and a separate reference in "
          f"{p.reference_dtype} would differ from it: set model.reference_dtype={p.compute_dtype}, or "
          f"lora.reference=base"),
    Check(lambda v, p: v["model.attn_implementation"] in ("flex_attention", VARLEN) and not p.gpus,
          "model.attn_implementation={model.attn_implementation} cannot train on a CPU: use sdpa"),
    Check(lambda v, p: v["model.attn_implementation"] == VARLEN and p.gpus and not v["model.autocast"]
          and "float32" in (p.compute_dtype, p.reference_dtype),
          "model.attn_implementation=varlen takes no float32, in which policy or reference computes: give "
          "model.autocast=bfloat16, or use sdpa"),
    Check(lambda v, p: v["model.attn_implementation"] == VARLEN and v["layout"] == "padded",
          "model.attn_implementation=varlen has no effect with layout=padded: use layout=shared_prefix, or sdpa"),
    Check(lambda v, p: v["model.cache_implementation"] and (p.dims.world_size > 1 or p.gpus > 1),
          "model.cache_implementation={model.cache_implementation} compiles sampling for a model on one device, and "
          "this run has {processes} processes and {gpus} GPUs: use null, or set CUDA_VISIBLE_DEVICES=0"),
    # --- what is slower or larger on GPUs than it could be
    Check(lambda v, p: p.trainer == BASIC and p.gpus > 1,
          "trainer=BasicTrainer spreads the layers over {gpus} GPUs, which work one after the other: "
          "trainer=FSDPTrainer uses them all at once", "warning"),
    Check(lambda v, p: p.gpus and p.trainer != PACKAGE and p.compute_dtype == "float32"
          and not (v["model.autocast"] or v["model.fsdp_policy_mp"]),
          lambda v, p: f"matrices are multiplied in float32 (TF32): "
          f"{'model.fsdp_policy_mp' if p.trainer.multi_process else 'model.autocast'}=bfloat16 is faster on GPUs of "
          f"the Ampere generation and later, and keeps float32 weights", "warning"),
    Check(lambda v, p: p.gpus and v["model.autocast"] and p.reference == "model"
          and p.reference_dtype not in ("float32", v["model.autocast"]),
          "model.reference_dtype={model.reference_dtype} is cast to {model.autocast} in every forward pass: "
          "model.reference_dtype={model.autocast} rounds weights once, and null makes the first rewards 0", "warning"),
    # autograd keeps autocast's copies, which FSDP cannot free
    Check(lambda v, p: v["model.autocast"] and p.trainer.multi_process and p.dims.data_size > 1
          and p.compute_dtype == "float32",
          "model.autocast={model.autocast} with trainer={trainer} gathers float32 weights and keeps a {model.autocast} "
          "copy of all weights until the backward pass: use model.fsdp_policy_mp={model.autocast} instead", "warning"),
    # --- models, lengths, intervals and rates
    *(Check(lambda v, p, key=key: v[key] is not None and _is_missing(v[key]),
            f"{key}={{{key}}} does not exist: give a directory (~ is not expanded) or a Hub id")
      for key in ("model.name_or_path", "model.tokenizer_name_or_path")),
    Check(lambda v, p: v["chat_template"] and not os.path.isfile(v["chat_template"]),
          "chat_template={chat_template} is no file: give the path of a template in Jinja's language"),
    Check(lambda v, p: v["resume"] == "auto" and p.has_new_run_dir,
          "resume=auto looks for checkpoints in local_run_dir, which is a new directory for each run by default: "
          "give local_run_dir=DIR"),
    Check(lambda v, p: v["lora.reference"] == "adapter" and v["model.archive"] is None,
          "lora.reference=adapter needs an adapter: give model.archive=RUN/LATEST of a run with lora=lora"),
    Check(lambda v, p: v["max_prompt_length"] >= v["max_length"],
          "max_prompt_length={max_prompt_length} must be below max_length={max_length}, or no token is left for a "
          "response"),
    Check(lambda v, p: v["n_epochs"] is None and v["n_examples"] is None,
          "n_epochs and n_examples are both null, so training would never end: give one of them"),
    Check(lambda v, p: v["eval_every"] is not None and v["eval_every"] < v["batch_size"],
          "eval_every={eval_every} (examples) must be at least batch_size={batch_size}"),
    Check(lambda v, p: (v["save_every"] or 0) % v["batch_size"],
          lambda v, p: f"save_every={v['save_every']} (examples) must be a multiple of batch_size: "
          f"try {_find_multiple(v['save_every'], v['batch_size'])}"),
    Check(lambda v, p: v["lr"] < 1e-6 and p.lora and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} is a learning rate for training all weights; for an adapter, try about ten times as much: 5e-6 to "
          "2e-4", "warning"),
    # a step is about lr; bfloat16 weights lose steps below 1/512 to 1/256 of their size; adapters are float32
    Check(lambda v, p: v["lr"] < 1e-5 and v["model.policy_dtype"] == "bfloat16" and not p.lora
          and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} has little effect with model.policy_dtype=bfloat16, which rounds most such steps away: use float32 "
          "with model.autocast=bfloat16, or an lr of 1e-5 or more", "warning"),
    # --- losses. An unknown loss in loss.weights counts as a loss of pairs here, and is reported separately
    Check(lambda v, p: p.loss.trains_on == "labels"
          and not (v["loss.desirable_weight"] or v["loss.undesirable_weight"]),
          "loss.desirable_weight=0 and loss.undesirable_weight=0 leave no loss to train on: set one of them above 0"),
    Check(lambda v, p: v["loss.name"] == "mix" and not any(w and _may_weigh_pairs(key) for key, w in v.items()),
          "loss=mix adds up no loss of pairs: give loss.weights.dpo=1 or another, or train with loss=sft"),
    Check(lambda v, p: p.loss.needs_label_smoothing and v["loss.label_smoothing"] == 0,
          "loss.label_smoothing=0 makes the loss infinite: set it above 0, such as loss.label_smoothing=0.001"),
    Check(lambda v, p: v["loss.reference_free"] and v["loss.f_divergence"] != "reverse_kl",
          "loss.f_divergence={loss.f_divergence} is a divergence from the reference: set loss.reference_free=false"),
    Check(lambda v, p: p.loss.scalar_head and (v["sample_during_eval"] or p.online),
          "loss={loss.name} trains a reward model, which writes no text: set sample_during_eval=false, and leave out "
          "online=online"),
    # --- online pairs
    Check(lambda v, p: p.online and not p.loss.scalar_head and p.loss.trains_on != "pairs",
          "online=online draws pairs, and loss={loss.name} trains on none: choose loss=dpo or another"),
    Check(lambda v, p: p.online and v["loss.offset_by_margin"],
          "loss.offset_by_margin=true needs margins, and the pairs of online=online have none: leave out one of the "
          "two"),
    Check(lambda v, p: p.online and v["online.labels"] == "bradley_terry" and v["online.ties"] == "skip",
          "online.labels=bradley_terry needs ties to keep equally good answers equally probable, and online.ties=skip "
          "leaves ties out: use online.ties=keep", "warning"),
    Check(lambda v, p: p.online and v["cache_reference_logps"] == "all",
          "cache_reference_logps=all needs pairs that are known before training: with online=online, leave "
          "cache_reference_logps out"),
    Check(lambda v, p: v["online.mix_offline"] and not 0 < p.n_offline < v["batch_size"],
          lambda v, p: f"online.mix_offline={v['online.mix_offline']} of batch_size={v['batch_size']} gives "
          f"{p.n_offline} pairs of the data per batch, which must be 1 to {v['batch_size'] - 1}: give another "
          f"fraction, or 0"),
    *(Check(lambda v, p, scorer=scorer: v["online.scorer"] == scorer and v[f"online.{scorer}"] is None,
            f"online.scorer={scorer} needs online.{scorer}: give online.{scorer}={value}")
      for scorer, value in {"reward_model": "DIR_OR_HUB_ID", "function": "FILE.py:NAME", "keyword": "TEXT"}.items()),
    Check(lambda v, p: v["online.scorer"] == "function" and v["online.function"] and not _find_script(v).is_file(),
          lambda v, p: f"online.function={v['online.function']}: there is no file {_find_script(v)}"),
    Check(lambda v, p: v["max_prompt_length"] + v["online.max_new_tokens"] > v["max_length"],
          "max_prompt_length={max_prompt_length} and online.max_new_tokens={online.max_new_tokens} add up to more than "
          "max_length={max_length}: lower one of them, or raise max_length"),
)
# fmt: on


def _find_beyond_package(v: Values, p: Plan) -> list[str]:
    """List the settings that need more than the package tensor_parallel can do: sample, or split other layers."""
    settings = {
        "sample_during_eval=true": v["sample_during_eval"],
        "online=online": p.online,
        "model.autocast": v["model.autocast"],  # does not reach the package's threads
        f"lora={v['lora.name']}": p.lora,
        f"loss={p.loss.name}": p.loss.scalar_head,
    }
    return [setting for setting, is_set in settings.items() if is_set]


def _tensor_size_fits(plan: Plan) -> bool:
    return plan.dims.world_size % plan.dims.tensor_size == 0


def _list_divisors(number: int) -> str:
    """List the divisors of a number, as in `1, 2 or 4`."""
    return join_with_or([str(n) for n in range(1, number + 1) if number % n == 0])


def _find_multiple(number: int, factor: int) -> int:
    """Find the positive multiple of `factor` nearest to `number`."""
    return max(1, round(number / factor)) * factor


def _explain_batch_size(batch_size: int, accumulation_steps: int, data_size: int) -> str:
    n_parts = accumulation_steps * data_size
    fix = f"try batch_size={_find_multiple(batch_size, n_parts)}"
    if batch_size % data_size == 0:
        fix += f", or gradient_accumulation_steps={_list_divisors(batch_size // data_size)}"
    elif batch_size % accumulation_steps == 0:
        fix += f", or {_list_divisors(batch_size // accumulation_steps)} processes"
    return (
        f"batch_size={batch_size} must be divisible by gradient_accumulation_steps * processes = "
        f"{accumulation_steps} * {data_size} = {n_parts}: {fix}"
    )


def _is_missing(name: str) -> bool:
    """Return whether a model name is a path that does not exist."""
    return (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).exists()


def _may_weigh_pairs(key: str) -> bool:
    """Return whether a key weighs a loss of pairs, which an unknown loss counts as."""
    loss = LOSSES.get(key.removeprefix(WEIGHTS))
    return key.startswith(WEIGHTS) and (loss is None or (loss.trains_on == "pairs" and not loss.scalar_head))


def _find_script(v: Values) -> Path:
    return Path(v["online.function"].rpartition(":")[0]).expanduser()


def check_values(plan: Plan) -> None:
    """Raise InputError for an unknown key, or a missing or wrong value.

    A trainer that is made in Python needs no `exp_name`, nor what only `train.py` reads.
    """
    defaults = dotted(load_defaults(**options_in(plan.values)))
    missing = {key: default for key, default in defaults if default == "???"}
    problems = _find_value_problems({"loss.name": "???", **missing, **plan.values})
    if sentences := [problem.sentence for problem in problems if problem.key != "exp_name"]:
        raise InputError("; ".join(sentences))


def find_problems(plan: Plan) -> list[Problem]:
    """List the problems of a plan and its values; a sentence has the value and the fix."""
    values = plan.values
    wrong = [*_find_value_problems(values), *_find_misplaced(values)]
    wrong_keys = {problem.key for problem in wrong} | {key for key in values if values[key] is UNRESOLVED}
    # a check reads which losses a mix names, whether or not their weights are valid
    valid = {key: value for key, value in values.items() if key not in wrong_keys or key.startswith(WEIGHTS)}
    return [
        *wrong,
        *_run_checks(valid, plan, "error"),
        *find_dataset_problems(valid.get("datasets", []), values.get("dataset_sources", {})),
    ]


def raise_problems(plan: Plan) -> None:
    """Raise InputError if a plan has problems."""
    if problems := find_problems(plan):
        raise InputError("; ".join(problem.sentence for problem in problems))


def find_warnings(plan: Plan) -> list[str]:
    """List the warnings about a valid plan, one sentence each."""
    sentences = [problem.sentence for problem in _run_checks(plan.values, plan, "warning")]
    names = plan.data.datasets
    for name, source in sorted(plan.data.dataset_sources.items()):
        if source is not None and name not in names:
            used = ",".join(names)
            sentences.append(
                f"dataset_sources.{name} has no effect: datasets={used} does not name it; datasets=[{name}] does"
            )
    return sentences


def _find_value_problems(values: Values) -> list[Problem]:
    """List the values that are wrong by themselves; the loss comes last, as in --cfg job."""
    problems = []
    for key in sorted(values, key=lambda key: key.startswith("loss.")):
        if values[key] is not UNRESOLVED and key != "dataset_sources":
            sentence = find_value_problem(key, values[key])
            problems += [Problem(key, sentence)] if sentence else []
    return problems


def _run_checks(values: Values, plan: Plan, level: Level) -> Iterator[Problem]:
    """Yield the problems that the checks of a level find."""
    defaults = dict(dotted(load_defaults(**options_in(values))))
    facts = {"processes": plan.dims.world_size, "gpus": plan.gpus}
    for check in CHECKS:
        if check.level != level:
            continue
        set_keys = [key for key in check.keys if values.get(key) not in (None, defaults.get(key))]
        if check.keys and not set_keys:
            continue
        with suppress(KeyError):  # raised by a check that reads a key without a valid value
            if not check.is_broken(values, plan):
                continue
            for key in set_keys or [""]:  # a check without keys is reported once
                if isinstance(check.sentence, str):
                    sentence = _fill(check.sentence, {**facts, **values, "KEY": key, "VALUE": values.get(key)})
                else:
                    sentence = check.sentence(values, plan)
                yield Problem(key, sentence)


def _fill(sentence: str, values: Values) -> str:
    """Replace each `{name}` in a sentence by its value."""
    return re.sub(r"\{([\w.]+)\}", lambda match: str(_as_typed(values[match[1]])), sentence)


def _find_misplaced(values: Values) -> Iterator[Problem]:
    """Yield problems of keys that the chosen loss, adapter or online option lacks."""
    for group, option in options_in(values).items():
        if not isinstance(option, str) or option not in KEYS[f"{group}.name"].choices:
            continue
        keys = dict(dotted({group: load_defaults(**{group: option})[group]}))
        for key in values:
            if key in KEYS and key.startswith(f"{group}.") and key not in keys:
                yield Problem(key, _explain_misplaced(key))


def _explain_misplaced(key: str) -> str:
    """Explain which options of its group have a key."""
    group, _, name = key.partition(".")
    files = sorted((CONFIG_DIR / group).glob("*.yaml"))
    having = [file.stem for file in files if name in dict(dotted(load_file(file)))]
    others = [file.stem for file in files if file.stem not in having]
    if len(having) <= len(others):
        return f"{key} does not exist here: it belongs to {' and '.join(f'{group}={option}' for option in having)}"
    return f"{key} does not exist here: it belongs to any {group} but {', '.join(others)}"


def find_value_problem(key: str, value: Any) -> str | None:
    """Explain why a value is wrong by itself, if it is."""
    if key not in KEYS:
        return _explain_weight(key) if key.startswith(WEIGHTS) else explain_unknown_key(key)
    entry = KEYS[key]
    if value == "???":
        return f"{key} is not set: {entry.how_to_set or f'give {key}=VALUE'}"
    if isinstance(value, str) and "${" in value:
        return f"{key}={value} cannot be resolved: {entry.how_to_set or 'no such key or resolver'}"
    if not entry.rule.holds(value):
        return f"{key}={_as_typed(value)} must be {entry.rule.wanted}"
    if not entry.accepts(value):
        return explain_unknown(key, value, entry.choices)
    return None


def _explain_weight(key: str) -> str:
    """Explain why a key under `loss.weights` names no loss of a mix."""
    name, explanation = key.removeprefix(WEIGHTS), "no such loss exists"
    if name in LOSSES:
        explanation = f"{name} is trained alone, as loss={name}, for a mix trains a policy on one pair at a time"
    return f"{key}: {explanation}; a mix adds up {_list_losses(lambda loss: loss.can_be_mixed)}"


def explain_unknown_key(key: str) -> str:
    """Explain that a key is unknown or was removed, and suggest a similar one."""
    if key in REMOVED:
        return f"{key} was removed after {REMOVED[key]}"
    if name := load_aliases().get(key.rpartition(".")[2]):
        return f"unknown key {key}: here it is {name}"
    groups = [path.name for path in CONFIG_DIR.iterdir() if path.is_dir()]
    by_lower_case = {name.lower(): name for name in [*KEYS, "dataset_sources", *groups]}
    similar = difflib.get_close_matches(key.lower(), by_lower_case, n=1)
    if similar:
        return f"unknown key {key}: did you mean {by_lower_case[similar[0]]}?"
    return f"unknown key {key}; `python train.py --cfg job` shows all keys"


def _as_typed(value: Any) -> Any:
    """Write a value as on the command line, such as null."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value
