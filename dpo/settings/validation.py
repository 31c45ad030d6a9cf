"""Config validation: all problems are reported at once, before anything is loaded. Imports no torch."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpo import plugins
from dpo.errors import InputError, one_sentence, suggest
from dpo.losses import LOSSES
from dpo.numbers import count
from dpo.settings import keys
from dpo.settings.keys import KEYS, MISSING, dotted, find_defaults
from dpo.settings.places import Problem, check_exists, find_dataset_problems, find_local, name_datasets
from dpo.settings.plan import UNCOUNTED, Plan, make_plan
from dpo.system.host import is_installed
from dpo.system.launching import count_processes_here
from dpo.system.plain_files import read_yaml

# --- what a plan is refused for ---------------------------------------------------------------------------------------

Check = tuple[str, str]  # the keys that a check reads, separated by spaces, and the sentence that it reports


def _check_processes(p: Plan) -> Iterator[Check]:
    run, dims, optimizer = p.run, p.dims, p.training.optimizer
    several = p.trainer.multi_process
    processes = dims.world_size
    here = count_processes_here(processes)
    if (processes > 1 or run.world_size not in (None, 1)) and not several:
        yield "world_size trainer", f"trainer={run.trainer} is one process: several need trainer=FSDPTrainer"
    if several and run.world_size not in (None, processes):
        yield "world_size", f"world_size={run.world_size}, but {processes} processes were launched: leave it out"
    if several and p.gpus != UNCOUNTED and dims.replicate_size * dims.shard_size * dims.tensor_size != processes:
        yield (
            "fsdp_shard_size tensor_parallel_size",
            f"fsdp_shard_size={p.fsdp.fsdp_shard_size} times tensor_parallel_size={run.tensor_parallel_size} does not "
            f"divide the {processes} processes",
        )
    if 0 < p.gpus < here and not run.dry_run:
        yield (
            "world_size",
            f"{count(here, 'process', 'processes')} cannot share {count(p.gpus, 'GPU')}: set world_size={p.gpus}, or "
            "start as many on each machine",
        )
    if several and optimizer in keys.NEED_WHOLE_TENSORS:
        yield (
            "optimizer trainer",
            f"optimizer={optimizer} cannot update shards: use another one with trainer={run.trainer}",
        )
    has_autocast = p.model.autocast not in (None, "auto")
    generates = p.evaluation.sample_during_eval or p.online
    if p.trainer == keys.PACKAGE and (
        generates or has_autocast or p.lora or p.loss.scalar_head or optimizer == "Adafactor"
    ):
        yield (
            "tensor_parallel.backend sample_during_eval online.name model.autocast lora.name loss.name optimizer",
            "tensor_parallel.backend=tensor_parallel takes no sample_during_eval, online=online, model.autocast, "
            "adapter, reward model or Adafactor: set tensor_parallel.backend=dtensor",
        )
    if p.quantized and (p.trainer == keys.TENSOR_PARALLEL or (p.gpus > 1 and not several)):
        yield (
            "lora.name trainer",
            f"lora=qlora does not work with trainer={run.trainer} on several GPUs: set trainer=FSDPTrainer",
        )
    if p.fsdp.fsdp_frozen_weights == "whole" and not p.frozen_whole_is_exact:
        yield (
            "fsdp_frozen_weights lora.reference",
            "fsdp_frozen_weights=whole rounds the base, but not a second model as reference: set lora.reference=base",
        )


def _check_training(p: Plan) -> Iterator[Check]:
    run, data, training = p.run, p.data, p.training
    divides_by_eps = training.optimizer in keys.STEPS_OF_LR and "eps" not in training.optimizer_args
    if divides_by_eps and p.lora is None and p.model.policy_dtype == "float16":
        yield (
            "optimizer model.policy_dtype",
            f"optimizer={training.optimizer} divides by its eps, which float16 rounds to 0: set {p.precise_settings}, "
            "or optimizer_args.eps=1e-4",
        )
    if p.model.cache_implementation and (training.compile or p.dims.world_size > 1 or p.gpus > 1):
        yield (
            "model.cache_implementation compile world_size",
            "model.cache_implementation=static needs a single device, and compile=false: leave it out",
        )
    if data.holdout and data.holdout > 1 and data.holdout % 1:
        yield "holdout", f"holdout={data.holdout} must be a share below 1, or a whole number of prompts"
    if data.max_prompt_length >= data.max_length:
        yield (
            "max_prompt_length max_length",
            f"max_prompt_length={data.max_prompt_length} must be below max_length={data.max_length}",
        )
    if data.n_epochs is None and data.n_examples is None:
        yield "n_epochs n_examples", "n_epochs and n_examples are both null: set one of them"
    if run.save_every and run.save_every % data.batch_size:
        yield (
            "save_every batch_size",
            f"save_every={run.save_every} (examples) must be a multiple of batch_size={data.batch_size}",
        )
    if os.path.isabs(run.exp_name) or ".." in run.exp_name.split("/"):
        yield "exp_name", f"exp_name={run.exp_name} must be relative and without '..'"
    if run.resume == "auto" and p.has_new_run_dir:
        yield (
            "resume local_run_dir",
            "resume=auto looks for checkpoints in local_run_dir, by default a new directory: set local_run_dir=DIR",
        )
    if p.lora and p.lora.reference == "adapter" and p.model.archive is None:
        yield (
            "lora.reference model.archive",
            "lora.reference=adapter needs an adapter: set model.archive=RUN/LATEST of a run with lora=lora",
        )


def _check_loss(p: Plan) -> Iterator[Check]:
    options = p.loss.options
    divergence = p.loss.shared.get("f_divergence")
    computed = {p.loss.name, *(part.name for _, part in p.loss.parts)}  # the loss and its parts, if it is a mix
    if computed - {"sft"} == {"mix"}:
        weights = " ".join(key for key in p.values if key.startswith("loss.weights."))
        yield f"loss.name {weights}", "loss=mix adds up no loss of pairs: set loss.weights.dpo=1 or another"
    if options.get("reference_free") and divergence != "reverse_kl":
        yield (
            "loss.reference_free loss.f_divergence",
            f"loss.f_divergence={divergence} is a divergence from the reference: set loss.reference_free=false",
        )
    if "exo" in computed and not options.get("label_smoothing"):
        yield "loss.label_smoothing", "loss=exo divides by loss.label_smoothing=0: set it above 0"
    if p.loss.scalar_head and (p.evaluation.sample_during_eval or p.online):
        yield (
            "loss.name sample_during_eval online.name",
            f"loss={p.loss.name} trains a reward model, which writes no text: set sample_during_eval=false, and leave "
            "out online=online",
        )


def _check_online(p: Plan) -> Iterator[Check]:
    online, data, loss = p.online, p.data, p.loss
    if online is None:
        return
    if not loss.scalar_head and loss.trains_on != "pairs":
        yield "loss.name", f"online=online draws pairs, and loss={loss.name} trains on none: choose loss=dpo or another"
    if loss.needs_margins:
        yield (
            "loss.offset_by_margin",
            "loss.offset_by_margin=true needs margins, and the pairs of online=online have none",
        )
    if p.training.cache_reference_logps == "all":
        yield (
            "cache_reference_logps",
            "cache_reference_logps=all needs pairs that are known before training, unlike those of online=online",
        )
    if online.mix_offline and not 0 < p.n_offline < data.batch_size:
        yield (
            "online.mix_offline batch_size",
            f"online.mix_offline={online.mix_offline} of batch_size={data.batch_size} gives a batch no pairs of the "
            "data, or only these: set another fraction",
        )
    scorer = online.scorer
    if scorer != "shorter" and p.values.get(f"online.{scorer}") is None:
        yield (
            f"online.scorer online.{scorer}",
            f"online.scorer={scorer} needs online.{scorer}: set online.{scorer}=VALUE",
        )
    if data.max_prompt_length + online.max_new_tokens > data.max_length:
        yield (
            "max_prompt_length online.max_new_tokens max_length",
            f"max_prompt_length={data.max_prompt_length} and online.max_new_tokens={online.max_new_tokens} add up to "
            f"more than max_length={data.max_length}: lower one of them",
        )


# --- all problems of a plan -------------------------------------------------------------------------------------------


def find_problems(plan: Plan) -> list[Problem]:
    """List what is wrong with values and datasets, which keys conflict, and which packages are missing."""
    values = plan.values
    problems = find_value_problems(values)
    wrong_keys = {problem.key for problem in problems}
    checks = list(_find_unmet(plan, refused=True))
    for list_checks in (_check_processes, _check_training, _check_loss, _check_online):
        checks += list_checks(plan)
    packages = [
        ("lora=qlora", plan.quantized, "bitsandbytes"),
        ("tensorboard.enabled=true", plan.tensorboard, "tensorboard"),
        ("tensor_parallel.backend=tensor_parallel", plan.trainer == keys.PACKAGE, "tensor-parallel"),
        ("report=true", plan.run.report, "matplotlib"),
        ("datasets=[se]", "se" in plan.data.datasets, "beautifulsoup4"),
        (f"trainer=BasicTrainer on {plan.gpus} GPUs", plan.trainer == keys.BASIC and plan.gpus > 1, "accelerate"),
    ]
    for name, is_needed, package in packages:
        if is_needed and not is_installed(package):
            checks.append(("", f"{name} needs {package}: pip install {package}"))
    for keys_read, sentence in checks:
        # In place of a wrong value the plan has the default, so a check that reads it does not count.
        if wrong_keys.isdisjoint(keys_read.split()):
            problems.append(Problem("", sentence))
    for key in ("model.name_or_path", "model.archive"):
        try:
            # a dry run or an estimate may come before the run whose weights the archive will be
            check_exists(None if key in wrong_keys or plan.run.dry_run else find_local(values[key] or ""))
        except InputError as error:
            problems.append(Problem(key, f"{key}: {error}"))
    datasets = [] if "datasets" in wrong_keys else values["datasets"]
    return [*problems, *find_dataset_problems(datasets, values["dataset_sources"])]


def find_plan_warnings(p: Plan) -> Iterator[str]:
    """Yield warnings about a plan in which `find_problems` finds nothing."""
    lr, optimizer, arguments = p.training.lr, p.training.optimizer, p.training.optimizer_args
    if p.trainer == keys.BASIC and p.gpus > 1:
        yield (
            f"trainer=BasicTrainer spreads the layers over {p.gpus} GPUs, which work one after the other: "
            "set trainer=FSDPTrainer"
        )
    if p.gpus and p.compute_dtype == "float32" and not p.model.autocast:
        yield "the policy computes in float32: model.autocast=auto is faster on GPUs that have bfloat16"
    if p.lora and lr < 1e-6 and optimizer in keys.STEPS_OF_LR:
        yield f"lr={lr} is a learning rate for all weights: for an adapter, try ten times as much"
    decay = arguments.get("weight_decay", 0.01 if optimizer == "AdamW" else 0)
    shrinks = optimizer in (*keys.DECAYS_BY_LR, *plugins.OPTIMIZERS) or arguments.get("decoupled_weight_decay")
    if p.trains_half_precision and shrinks and isinstance(decay, int | float):
        share = lr * decay  # of a weight, which decay takes off it in an update
        if 0 < share < keys.LOST_CHANGE[p.model.policy_dtype]:
            yield (
                f"{p.model.policy_dtype} rounds weight decay away: lr * weight_decay is {share:.3g} of a weight; set "
                f"optimizer_args.weight_decay=0, or {p.precise_settings}"
            )
    reads_model = os.path.isdir(p.model.name_or_path) and not p.model.random_init
    if p.reference_dtype == "float16" != p.compute_dtype and p.gpus == 0 and reads_model:
        yield "model.reference_dtype=float16 is slow on a CPU, and first rewards are not exactly 0: set it to null"
    if p.dims.world_size > 1 and p.model.autocast not in (None, "auto"):
        yield (
            f"model.autocast={p.model.autocast} over several processes keeps copies of weights that FSDP cannot free: "
            f"set model.autocast=null model.fsdp_policy_mp={p.model.autocast}"
        )
    if p.wandb.enabled and not is_installed("wandb"):
        yield "W&B gets nothing, as wandb is not installed"
    datasets = p.data.datasets
    unused = [name for name, source in p.data.dataset_sources.items() if source is not None and name not in datasets]
    if unused:
        yield f"dataset_sources has {', '.join(unused)}, which datasets={datasets} does not name"
    for _, sentence in _find_unmet(p, refused=False):
        yield sentence


def _find_unmet(p: Plan, *, refused: bool) -> Iterator[Check]:
    """Yield a check for each key that is neither null nor its default, but has no effect, as its need is not met.

    With `refused`, only keys whose lack of effect makes a run compute something other than was asked for; else only
    those that deserve a warning.
    """
    loss, several = p.loss, p.trainer.multi_process
    scorer = p.values.get("online.scorer")
    # fmt: off
    if refused:
        needs = [  # keys, whether their need is met, and the need
            ("fsdp_shard_size model.fsdp_policy_mp", several, "several processes: trainer=FSDPTrainer"),
            ("tensor_parallel_size tensor_parallel.backend", p.trainer.cuts_layers, "trainer=TensorParallelTrainer"),
            ("min_lr_ratio", p.training.schedule != "constant", "schedule=linear or schedule=cosine"),
            ("loss.wpo loss.ld_alpha", loss.trains_on == "pairs" and loss.reference,
             "a loss of pairs with a reference, such as loss=dpo"),
            ("loss.f_divergence", loss.reference and loss.margin_only,
             "a loss of the difference of log-ratios, such as loss=dpo"),
            ("unpair", loss.trains_on == "labels", "a loss of labels, such as loss=kto"),
            ("online.sync_reference_every", p.reference == "model" and not p.lora,
             "lora=none and a loss with a reference, such as loss=dpo"),
        ]
    else:
        needs = [
            ("lr_scaling fsdp_frozen_weights fsdp_reshard_after_forward fsdp_reduce_once fsdp_reduce_dtype "
             "checkpoint_format", several, "several processes"),
            ("loss.f_alpha", loss.shared.get("f_divergence") == "alpha", "loss.f_divergence=alpha"),
            ("list_pairs", loss.trains_on == "pairs", "a loss of pairs, such as loss=dpo"),
            ("cache_reference_logps lora.reference", loss.reference, "a loss with a reference, such as loss=dpo"),
            ("online.reward_model online.reward_format", scorer == "reward_model", "online.scorer=reward_model"),
            ("online.function", scorer == "function", "online.scorer=function"),
            ("online.keyword", scorer == "keyword", "online.scorer=keyword"),
        ]
    # fmt: on
    defaults = find_defaults(p.values)
    for names, is_met, need in needs:
        for key in names.split():
            if not is_met and p.values.get(key) not in (None, defaults.get(key)):
                yield key, f"{key}={_write_value(p.values[key])} needs {need}"


def raise_problems(problems: Sequence[Problem]) -> None:
    if problems:
        raise InputError("; ".join(problem.sentence for problem in problems))


# --- values -----------------------------------------------------------------------------------------------------------


def find_value_problems(values: Mapping) -> list[Problem]:
    """List the problems of unknown keys, and of missing or wrong values; those of interpolations come last."""
    existing_keys = find_defaults(values)  # those that the chosen loss, adapter and online options have
    problems = []
    for key in sorted(values, key=lambda key: "${" in str(values[key])):
        if key == "dataset_sources":
            continue
        group = key.partition(".")[0]
        option = values.get(f"{group}.name")
        if key in KEYS and key not in existing_keys and KEYS[f"{group}.name"].accepts(option):
            sentence = f"{key} does not exist with {group}={option}"
        else:
            sentence = find_value_problem(key, values[key], values.get("loss.name"))
        # A value that interpolates a key with a problem is not listed, as its cause is the same.
        if sentence and not any(f"${{{problem.key}}}" in str(values[key]) for problem in problems):
            problems.append(Problem(key, sentence))
    return problems


def find_alias(name: str) -> str | None:
    """Return what a key or option is called here, by its name in another library; None if that name is not known."""
    return read_yaml(keys.CONFIG_DIR / "aliases.yaml").get(name)


def find_value_problem(key: str, value: Any, loss_name: Any = None) -> str | None:
    """Say what is wrong with a key or its value; None if nothing is. A loss's option has its type in the named loss."""
    if removed := keys.find_removed(key, value):
        return removed
    if key not in KEYS:
        if name := find_alias(key.rpartition(".")[2]):
            return f"unknown key {key}: here it is {name}"
        similar = suggest(key, [*KEYS, "dataset_sources", *keys.GROUPS, "model", "experiment"])
        return f"unknown key {key}{similar or ': dpo train --help shows all keys'}"
    allowed = keys.find_key(key, loss_name)
    how_to_set = f"set {key}=VALUE, {allowed.wanted}"
    if key == "model.name_or_path":
        how_to_set = "set model=DIR_OR_HUB_ID, or model=pythia28 or another of config/model"
    if value == MISSING:
        return f"{key} is not set: {how_to_set}"
    if "${" in str(value):
        return f"{key}={value} cannot be resolved: {how_to_set}"
    if allowed.accepts(value):
        return None
    hint = suggest(str(value), allowed.choices)
    shown = _write_value(value)
    advice = ""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not allowed.choices and allowed.accepts(str(value)):  # Hydra reads 2024 as a number
        advice = f": write '{key}=\"{shown}\"'"
    return f"{key}={shown}{hint and f'{hint} It'} must be {allowed.wanted}{advice}"


def _write_value(value: Any) -> Any:
    """Return null, true or false for None, True or False, as a command line has them; other values stay as they are."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


# --- the config of an earlier run -------------------------------------------------------------------------------------


def read_plan(path: Path, *, prefixes: tuple[str, ...]) -> Plan:
    """Read a run's `config.yaml`, ours or the reference implementation's.

    Raises InputError if it is not a config, names no model, or has a wrong value of a key that begins with one of
    `prefixes`; also for an interpolation, which could put this machine's environment into an export.
    """
    config = read_yaml(path)
    try:
        if interpolation := re.search(r"\$\{[^}]*\}?", str(config)):
            raise ValueError(f"{interpolation[0]!r:.100} is an interpolation, not a value")
        recorded = keys.update_recorded(dict(dotted(config)))
        _leave_removed_out(recorded, path)
        if recorded.get("plugins") and recorded["loss.name"] not in LOSSES:
            # A command that reads an earlier run's config needs no loss of a plugin.
            recorded = {key: value for key, value in recorded.items() if not key.startswith("loss.")}
        plan = make_plan(name_datasets(find_defaults(recorded) | recorded))
    except Exception as error:  # the file may be any YAML, which fails in any way
        raise InputError(f"{path} is not the config of a run: {one_sentence(error)}") from error
    set_values = {key: value for key, value in plan.values.items() if key in KEYS and value != MISSING}
    problems = find_value_problems({"model.name_or_path": MISSING, **set_values})
    problems += find_dataset_problems([], plan.values["dataset_sources"])
    if sentences := [problem.sentence for problem in problems if problem.key.startswith(prefixes)]:
        raise InputError(f"{path}: {'; '.join(sentences)}")
    return plan


def _leave_removed_out(config: dict, path: Path, prefix: str = "") -> None:
    """Delete keys that are in REMOVED from a config that was read from `path`, at all depths, and print each."""
    for name, value in [*config.items()]:
        if isinstance(value, dict):
            _leave_removed_out(value, path, f"{prefix}{name}.")
        elif removed := keys.find_removed(f"{prefix}{name}", value):
            print(f"{path}: ignored, as {removed}")
            del config[name]
