"""Config validation: all problems are reported at once, before anything is loaded.

Conditions on the value of one key are in `dpo/settings/keys.py`. Conditions on several keys, or on keys and the
machine, are the tables below. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dpo.errors import InputError
from dpo.losses import LOSSES, Loss
from dpo.settings.choices import BASIC, NEED_WHOLE_TENSORS, PACKAGE, STEPS_OF_LR, TENSOR_PARALLEL, VARLEN
from dpo.settings.files import CONFIG_DIR, MISSING, dotted, load_defaults, load_file, options_in
from dpo.settings.keys import KEYS, REMOVED, Problem
from dpo.settings.places import Source, find_dataset_problems
from dpo.settings.plan import Plan

Values = Mapping[str, Any]  # by dotted key
WEIGHTS = "loss.weights."
HOW_TO_SET = {
    "model.name_or_path": "choose model=pythia28 or another of config/model, or give model.name_or_path=DIR_OR_HUB_ID",
    "model.archive": "give model.archive=RUN_OF_SFT/LATEST, or null to start from the weights of model.name_or_path",
}


class Check(NamedTuple):
    """A condition under which a config is refused, or warned about.

    A check that reads a key with a wrong value is skipped, as that value is reported. In a sentence, `{lr}` is the
    value of `lr`, and `{processes}` and the like are the facts of `_run_checks`.
    """

    is_broken: Callable[[Values, Plan], Any]
    sentence: str
    keys: str = ""  # if any, it is reported once for each of them that is set: neither null nor at its default


def needs(keys: str, what: str, is_met: Callable[[Values, Plan], Any]) -> Check:
    """Make the check of what keys, separated by spaces, need to have an effect."""
    return Check(lambda v, p: not is_met(v, p), f"{{KEY}}={{VALUE}} needs {what}", keys)


def _list_losses(is_listed: Callable[[Loss], Any]) -> str:
    return f"loss={', '.join(name for name, loss in LOSSES.items() if is_listed(loss))}"


def _has_reference_and_pairs(loss: Loss) -> bool:
    return loss.trains_on == "pairs" and loss.reference


SEVERAL_PROCESSES = "several processes: trainer=FSDPTrainer"

# fmt: off
REFUSED = (  # v: the right values, p: the plan
    needs("fsdp_shard_size model.fsdp_policy_mp", SEVERAL_PROCESSES, lambda v, p: p.trainer.multi_process),
    needs("tensor_parallel_size tensor_parallel.backend", "trainer=TensorParallelTrainer",
         lambda v, p: p.trainer.cuts_layers),
    needs("min_lr_ratio", "schedule=linear or schedule=cosine", lambda v, p: v["schedule"] != "constant"),
    needs("loss.wpo loss.ld_alpha", f"a loss of pairs with a reference: {_list_losses(_has_reference_and_pairs)}",
         lambda v, p: _has_reference_and_pairs(p.loss)),
    needs("loss.f_divergence", "a loss that depends only on the difference of the log-ratios: "
         f"{_list_losses(lambda loss: loss.reference and loss.margin_only)}",
         lambda v, p: p.loss.reference and p.loss.margin_only),
    needs("unpair", f"a loss of labels: {_list_losses(lambda loss: loss.trains_on == 'labels')}",
         lambda v, p: p.loss.trains_on == "labels"),
    needs("online.sync_reference_every",
         f"lora=none and a loss with a reference: {_list_losses(lambda loss: loss.reference)}",
         lambda v, p: p.reference == "model" and p.lora is None),
    # --- processes
    Check(lambda v, p: (p.dims.world_size > 1 or v["world_size"] not in (None, 1)) and not p.trainer.multi_process,
          "trainer={trainer} is one process: several need trainer=FSDPTrainer"),
    Check(lambda v, p: p.launched and v["world_size"] not in (None, p.dims.world_size) and p.trainer.multi_process,
          "world_size={world_size}, but {processes} processes were launched: leave world_size out"),
    Check(lambda v, p: not p.launched and p.trainer.multi_process and 0 < p.gpus < p.dims.world_size,
          "world_size={processes} is more than the {gpus} GPUs of this machine: leave world_size out, or set "
          "CUDA_VISIBLE_DEVICES= to run on the CPU"),
    Check(lambda v, p: v["optimizer"] in NEED_WHOLE_TENSORS and p.trainer.multi_process,
          "optimizer={optimizer} cannot update shards: use another optimizer with trainer={trainer}"),
    Check(lambda v, p: p.dims.world_size % p.dims.tensor_size,
          "tensor_parallel_size={tensor_parallel_size} does not divide the {processes} processes"),
    Check(lambda v, p: p.trainer.multi_process and p.dims.data_size % (v["fsdp_shard_size"] or 1),
          "fsdp_shard_size={fsdp_shard_size} does not divide the {data_processes} processes that see different "
          "examples"),
    Check(lambda v, p: v["batch_size"] % (v["gradient_accumulation_steps"] * p.dims.data_size),
          "batch_size={batch_size} must be divisible by gradient_accumulation_steps * processes = "
          "{gradient_accumulation_steps} * {data_processes}"),
    # --- trainers, packages and hardware
    Check(lambda v, p: p.trainer == PACKAGE and (v["sample_during_eval"] or p.online or v["model.autocast"] or p.lora
                                                 or p.loss.scalar_head or v["optimizer"] == "Adafactor"),
          "tensor_parallel.backend=tensor_parallel takes no sample_during_eval, online=online, model.autocast, "
          "adapter, reward model or Adafactor: leave them out, or set tensor_parallel.backend=dtensor"),
    Check(lambda v, p: p.quantized and p.trainer == TENSOR_PARALLEL,
          "lora=qlora does not work with trainer={trainer}, which cannot cut packed weights: choose "
          "trainer=FSDPTrainer, or lora=lora"),
    Check(lambda v, p: p.quantized and p.gpus > 1 and not p.trainer.multi_process,
          "lora=qlora takes one GPU with trainer={trainer}, and this machine has {gpus}: choose trainer=FSDPTrainer, "
          "or set CUDA_VISIBLE_DEVICES=0"),
    *(Check(lambda v, p, uses=uses, package=package: uses(v, p) and find_spec(package) is None,
            f"{key} needs the package {package}: pip install {package}, or leave it out")
      for key, package, uses in (
          ("lora=qlora", "bitsandbytes", lambda v, p: p.quantized),
          ("tensorboard.enabled=true", "tensorboard", lambda v, p: v["tensorboard.enabled"] and not v["debug"]))),
    # a base held whole is rounded to its compute dtype, and the self-test compares the rounded base with the reference
    Check(lambda v, p: v["fsdp_frozen_weights"] == "whole" and not p.can_hold_frozen_whole,
          "fsdp_frozen_weights=whole rounds the base to {compute_dtype}, and a separate reference in {reference_dtype} "
          "would differ from it: set model.reference_dtype={compute_dtype}, or lora.reference=base"),
    Check(lambda v, p: v["model.attn_implementation"] == VARLEN and not (
              p.gpus and (v["model.autocast"] or "float32" not in (p.compute_dtype, p.reference_dtype))),
          "model.attn_implementation=varlen needs a GPU, and policy and reference in bfloat16 or float16: give "
          "model.autocast=bfloat16, or use sdpa"),
    # --- models, lengths and intervals
    *(Check(lambda v, p, key=key: v[key] and Source(v[key]).local and not Path(v[key]).exists(),
            f"{key}={{{key}}} does not exist: give a directory (~ is not expanded) or a Hub id")
      for key in ("model.name_or_path", "model.tokenizer_name_or_path")),
    Check(lambda v, p: os.path.isabs(v["exp_name"]) or ".." in v["exp_name"].split("/"),
          "exp_name={exp_name} must be a name for the run, relative and without '..'"),
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
    Check(lambda v, p: (v["save_every"] or 0) % v["batch_size"],
          "save_every={save_every} (examples) must be a multiple of batch_size={batch_size}"),
    # --- losses
    Check(lambda v, p: v["loss.name"] == "mix"
          and not any(v[key] for key in v if key.startswith(WEIGHTS) and key != f"{WEIGHTS}sft"),
          "loss=mix adds up no loss of pairs: give loss.weights.dpo=1 or another, or train with loss=sft"),
    Check(lambda v, p: v["loss.reference_free"] and v["loss.f_divergence"] != "reverse_kl",
          "loss.f_divergence={loss.f_divergence} is a divergence from the reference: set loss.reference_free=false"),
    Check(lambda v, p: p.loss.scalar_head and (v["sample_during_eval"] or p.online),
          "loss={loss.name} trains a reward model, which writes no text: set sample_during_eval=false, and leave out "
          "online=online"),
    # --- online pairs
    Check(lambda v, p: p.online and not p.loss.scalar_head and p.loss.trains_on != "pairs",
          "online=online draws pairs, and loss={loss.name} trains on none: choose loss=dpo or another"),
    Check(lambda v, p: p.online and v["loss.offset_by_margin"],
          "loss.offset_by_margin=true needs margins, and the pairs of online=online have none: leave one of them out"),
    Check(lambda v, p: p.online and v["cache_reference_logps"] == "all",
          "cache_reference_logps=all needs pairs that are known before training: leave it out with online=online"),
    Check(lambda v, p: v["online.mix_offline"] and not 0 < p.n_offline < v["batch_size"],
          "online.mix_offline={online.mix_offline} of batch_size={batch_size} gives a batch no pairs of the data, or "
          "only these: give another fraction, or 0"),
    *(Check(lambda v, p, scorer=scorer: v["online.scorer"] == scorer and v[f"online.{scorer}"] is None,
            f"online.scorer={scorer} needs online.{scorer}: give online.{scorer}={value}")
      for scorer, value in {"reward_model": "DIR_OR_HUB_ID", "function": "FILE.py:NAME", "keyword": "TEXT"}.items()),
    Check(lambda v, p: v["online.scorer"] == "function" and v["online.function"]
          and not Path(v["online.function"].rpartition(":")[0]).expanduser().is_file(),
          "online.function={online.function} must be a file that exists, and a function in it: FILE.py:NAME"),
    Check(lambda v, p: v["max_prompt_length"] + v["online.max_new_tokens"] > v["max_length"],
          "max_prompt_length={max_prompt_length} and online.max_new_tokens={online.max_new_tokens} add up to more than "
          "max_length={max_length}: lower one of them, or raise max_length"),
)
WARNED = (
    Check(lambda v, p: p.trainer == BASIC and p.gpus > 1,
          "trainer=BasicTrainer spreads the layers over {gpus} GPUs, which work one after the other: "
          "trainer=FSDPTrainer uses them all at once"),
    Check(lambda v, p: p.gpus and p.trainer != PACKAGE and p.compute_dtype == "float32"
          and not (v["model.autocast"] or v["model.fsdp_policy_mp"]),
          "matrices are multiplied in float32 (TF32): model.autocast=bfloat16, or model.fsdp_policy_mp=bfloat16 with "
          "trainer=FSDPTrainer, is faster on GPUs of the Ampere generation and later, and keeps float32 weights"),
    Check(lambda v, p: v["lr"] < 1e-6 and p.lora and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} is a learning rate for training all weights; for an adapter, try about ten times as much: 5e-6 to "
          "2e-4"),
    # a step is about lr; bfloat16 weights lose steps below 1/512 to 1/256 of their size; adapters are float32
    Check(lambda v, p: v["lr"] < 1e-5 and v["model.policy_dtype"] == "bfloat16" and not p.lora
          and v["optimizer"] in STEPS_OF_LR,
          "lr={lr} has little effect with model.policy_dtype=bfloat16, which rounds most such steps away: use float32 "
          "with model.autocast=bfloat16, or an lr of 1e-5 or more"),
)
# fmt: on


# --- all problems of a plan -------------------------------------------------------------------------------------------


def find_problems(plan: Plan) -> list[Problem]:
    """List the problems of a plan and its values; a sentence has the value and the fix."""
    values = plan.values
    wrong = [*find_value_problems(values), *_find_misplaced(values)]
    wrong_keys = {problem.key for problem in wrong}
    # a check reads which losses a mix names, whether or not their weights are right
    right = {key: value for key, value in values.items() if key not in wrong_keys or key.startswith(WEIGHTS)}
    return [
        *wrong,
        *_run_checks(REFUSED, right, plan),
        *find_dataset_problems(right.get("datasets", []), values.get("dataset_sources", {})),
    ]


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise InputError if there are problems."""
    if problems:
        raise InputError("; ".join(problem.sentence for problem in problems))


def find_warnings(plan: Plan) -> list[str]:
    """List the warnings about a plan without problems, one sentence each."""
    used = plan.data.datasets
    unused = [name for name, source in plan.data.dataset_sources.items() if source is not None and name not in used]
    return [
        *(problem.sentence for problem in _run_checks(WARNED, plan.values, plan)),
        *(f"dataset_sources.{name} has no effect: datasets={','.join(used)} does not name it" for name in unused),
    ]


def _run_checks(checks: Sequence[Check], values: Values, plan: Plan) -> Iterator[Problem]:
    """Yield what the checks find."""
    defaults = dict(dotted(load_defaults(**options_in(values))))
    facts = {
        "processes": plan.dims.world_size,
        "data_processes": plan.dims.data_size,
        "gpus": plan.gpus,
        "compute_dtype": plan.compute_dtype,
        "reference_dtype": plan.reference_dtype,
        **values,
    }
    for check in checks:
        set_keys = [key for key in check.keys.split() if values.get(key) not in (None, defaults.get(key))]
        try:
            if (set_keys or not check.keys) and check.is_broken(values, plan):
                for key in set_keys or [""]:
                    facts |= {"KEY": key, "VALUE": values.get(key)}
                    yield Problem(key, _fill(check.sentence, facts))
        except KeyError as error:  # a key without a right value
            if error.args[0] not in KEYS:  # a fault of the table
                raise


def _fill(sentence: str, facts: Values) -> str:
    """Replace each `{name}` in a sentence by its value."""
    return re.sub(r"\{([\w.]+)\}", lambda match: str(_as_typed(facts[match[1]])), sentence)


# --- values -----------------------------------------------------------------------------------------------------------


def find_value_problems(values: Values) -> list[Problem]:
    """List the keys that are unknown, and the values that are missing or wrong; those of the loss come last."""
    sentences = {}
    for key in sorted(values, key=lambda key: key.startswith("loss.")):
        if key != "dataset_sources" and (sentence := find_value_problem(key, values[key])):
            sentences[key] = sentence
    return [
        Problem(key, sentence)
        for key, sentence in sentences.items()
        if not any(f"${{{wrong}}}" in str(values[key]) for wrong in sentences)  # then that value is the problem
    ]


def find_value_problem(key: str, value: Any) -> str | None:
    """Explain why a value is wrong by itself, if it is."""
    if key not in KEYS:
        return explain_unknown_key(key)
    allowed = KEYS[key]
    how_to_set = HOW_TO_SET.get(key, f"give {key}=VALUE, {allowed.wanted}")
    if value == MISSING:
        return f"{key} is not set: {how_to_set}"
    if isinstance(value, str) and "${" in value:
        return f"{key}={value} cannot be resolved: {how_to_set}"
    return None if allowed.holds(value) else f"{key}={_as_typed(value)} must be {allowed.wanted}"


def _find_misplaced(values: Values) -> Iterator[Problem]:
    """Yield problems of keys that the chosen loss, adapter or online option lacks."""
    for group, option in options_in(values).items():
        files = {file.stem: dict(dotted(load_file(file))) for file in sorted((CONFIG_DIR / group).glob("*.yaml"))}
        own_keys = files.get(str(option), {})  # empty for an unknown option
        for key in values if own_keys else ():
            name = key.removeprefix(f"{group}.")
            if key in KEYS and key != name and name not in own_keys:
                having = ", ".join(other for other, keys in files.items() if name in keys)
                yield Problem(key, f"{key} does not exist with {group}={option}: it belongs to {group}={having}")


def explain_unknown_key(key: str) -> str:
    """Explain that a key is unknown or was removed, and suggest a similar one."""
    if key in REMOVED:
        return f"{key} was removed after {REMOVED[key]}"
    if key.startswith(WEIGHTS):
        return f"{key}: a mix adds up {_list_losses(lambda loss: loss.can_be_mixed)}, and no other loss"
    if name := load_file(CONFIG_DIR / "aliases.yaml").get(key.rpartition(".")[2]):
        return f"unknown key {key}: here it is {name}"
    if similar := suggest(key, [*KEYS, "dataset_sources", "model", "experiment"]):
        return f"unknown key {key}: did you mean {similar}?"
    return f"unknown key {key}; `python train.py --cfg job` shows all keys"


def suggest(given: str, names: Sequence[str]) -> str | None:
    """The name that a user may have meant, if one is similar."""
    by_lower_case = {name.lower(): name for name in names}
    similar = difflib.get_close_matches(given.lower(), by_lower_case, n=1)
    return by_lower_case[similar[0]] if similar else None


def _as_typed(value: Any) -> Any:
    """Write a value as on the command line, such as null."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value
