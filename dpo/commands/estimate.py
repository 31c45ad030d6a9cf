"""Estimate what a run would need on GPUs that are not here: memory, communication, time.

    dpo estimate model=MODEL loss=dpo loss.beta=0.1 datasets=[hh] --gpus h100:8 --gpus h100:64
    dpo estimate --run RUN --gpus h100:8       # the settings of a run, and what it measured

Each way to divide the model over the GPUs is tried with as few backward passes per update as fit into memory, with and
without activation checkpointing. The fastest comes first; what does not fit comes last. The settings are those of
dpo train. The rates of GPUs are assumed, unless --rates names a file: docs/distributed.md has its form.
"""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dpo.commands import command, make_parser
from dpo.errors import InputError
from dpo.numbers import count
from dpo.system.plain_files import read_json

USABLE = 0.95  # the share of a GPU's memory that a process gets
N_SHOWN = 5  # ways that fit, for each list of GPUs
COLUMNS = "{:<44} {:>6} {:>8} {:>9} {:>6} {:>8}"


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("estimate", __doc__)
    parser.add_argument("--gpus", action="append", required=True, metavar="NAME:N", help="N GPUs; may be repeated")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="rates of GPUs by name, as JSON")
    parser.add_argument("--run", type=Path, help="a run, whose processes used the GPUs")
    parser.add_argument("--json", action="store_true", help="print all ways as JSON")
    options, settings = parser.parse_known_args(arguments)

    from dpo.data.preflight import load_data
    from dpo.settings.command_line import check_command_line
    from dpo.settings.plan import make_plan
    from dpo.training.estimate import RATES, Rates

    rates = RATES
    if options.rates:
        rates = {name: Rates(**values) for name, values in read_json(options.rates).items()}
    clusters = [parse_gpus(text, rates) for text in options.gpus]
    measured = {}
    if options.run:
        if settings:
            raise InputError(f"--run has settings already: leave out {' '.join(settings)}")
        plan, measured = read_measured(options.run)
    else:
        _, plan = check_command_line(["exp_name=estimate", "dry_run=true", "trainer=FSDPTrainer", *settings])
    if plan is None:
        raise InputError("estimate takes the settings of one run: no options of Hydra, and no sweep")
    if plan.quantized:
        raise InputError("lora=qlora is not estimated: set lora=lora")
    data = load_data(plan, silent=True)
    found = []
    for name, n_gpus in clusters:
        ways = list_ways(plan, n_gpus, rates[name])
        if options.run:
            gpus = min(n_gpus, rates[name].gpus_per_machine)
            ways = [[make_plan(plan.values, world_size=n_gpus, gpus=gpus)]]
        costs = [measure(way, data, rates[name]) for way in ways]
        costs.sort(key=lambda way: (way["lacking_gb"], way["seconds"]))
        found.append({"gpus": f"{name}:{n_gpus}", "updates": data.report.updates, "ways": costs, **measured})
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for cluster in found:
        show(cluster, settings)


def read_measured(run_dir: Path) -> tuple[Any, dict]:
    """Return the plan of a run, and what it measured: its peak of memory, and the median time of an update."""
    from dpo.analysis.runs import read_run as read_logs
    from dpo.settings.validation import read_plan

    plan = read_plan(run_dir / "config.yaml", prefixes=("",))
    log = read_logs(run_dir).train
    seconds = plan.data.batch_size / np.nanmedian(log["examples_per_second"])
    return plan, {"measured": {"memory_gb": float(np.nanmax(log["memory/peak_gb"])), "seconds": float(seconds)}}


def parse_gpus(text: str, rates: dict) -> tuple[str, int]:
    name, _, number = text.lower().partition(":")
    if name not in rates or not number.isdecimal() or int(number) < 1:
        raise InputError(f"--gpus {text} must be NAME:N, such as h100:8; NAME is one of {', '.join(rates)}")
    return name, int(number)


def list_ways(plan: Any, n_gpus: int, rates: Any) -> Iterator[list[Any]]:
    """Yield plans that differ only in their number of backward passes, few first, for each way to divide the model."""
    from dpo.models.loading import find_model_config
    from dpo.parallel.tensor_parallel import check_tensor_parallel
    from dpo.settings.plan import make_plan
    from dpo.settings.validation import find_problems

    per_machine = min(n_gpus, rates.gpus_per_machine)
    divisions = [{"trainer": "FSDPTrainer"}]
    if n_gpus > per_machine and n_gpus % per_machine == 0:
        divisions.append({"trainer": "FSDPTrainer", "fsdp_shard_size": per_machine})
    tensor_sizes = [size for size in (2, 4, 8) if size <= per_machine and n_gpus % size == 0]
    divisions += [{"trainer": "TensorParallelTrainer", "tensor_parallel_size": size} for size in tensor_sizes]
    config = find_model_config(plan)
    precision = {}
    if plan.model.autocast == "auto":  # these GPUs have bfloat16
        precision = {"model.autocast": None, "model.fsdp_policy_mp": "bfloat16"}
    for division, is_checkpointed in product(divisions, (False, True)):
        try:
            check_tensor_parallel(config, division.get("tensor_parallel_size", 1))
        except InputError:  # the model cannot be cut in this way
            continue
        largest = math.ceil(plan.data.batch_size * division.get("tensor_parallel_size", 1) / n_gpus)
        passes = [2**i for i in range(largest.bit_length()) if 2**i < largest] + [largest]
        values = {**plan.values, "world_size": n_gpus, "activation_checkpointing": is_checkpointed}
        plans = [
            make_plan(
                {**values, **precision, **division, "gradient_accumulation_steps": n},
                world_size=n_gpus,
                gpus=per_machine,
            )
            for n in passes
        ]
        if not find_problems(plans[0]):
            yield plans


def measure(plans: list[Any], data: Any, rates: Any) -> dict:
    """Return the costs of the first plan that fits, or of the last one if none does."""
    from dpo.training.estimate import estimate_memory, estimate_work, find_seconds

    usable_gb = USABLE * rates.memory_gb
    for plan in plans[:-1]:
        memory, notes = estimate_memory(plan, data, rates)
        if memory.total() / 1e9 <= usable_gb:
            break
    else:
        plan = plans[-1]
        memory, notes = estimate_memory(plan, data, rates)
    work = estimate_work(plan, data, rates)
    seconds = find_seconds(plan, memory, work, rates)
    keys = ("trainer", "fsdp_shard_size", "tensor_parallel_size")
    settings = {key: plan.values[key] for key in keys if plan.values.get(key)}
    settings["gradient_accumulation_steps"] = plan.n_microbatches
    if plan.training.activation_checkpointing:
        settings["activation_checkpointing"] = "true"
    return {
        "settings": [f"{key}={value}" for key, value in settings.items()],
        "lacking_gb": max(0.0, memory.total() / 1e9 - usable_gb),
        "memory_gb": {purpose: n_bytes / 1e9 for purpose, n_bytes in memory.items()},
        "collectives": {key: {"calls": n, "gb": work.n_bytes[key] / 1e9} for key, n in sorted(work.calls.items())},
        "tflop": work.flops / 1e12,
        "seconds": seconds.total,
        "seconds_by_purpose": seconds._asdict(),
        "hours": seconds.total * data.report.updates / 3600,
        "notes": [str(note) for note in notes],
    }


def show(cluster: dict, settings: list[str]) -> None:
    """Print a table of the ways that fit, with the command of the first, and then of those that do not."""
    ways = cluster["ways"]
    fitting = [way for way in ways if not way["lacking_gb"]]
    print(f"\n{cluster['gpus']}, {count(cluster['updates'], 'update')}")
    print(COLUMNS.format("", "passes", "GB", "s/update", "waits", "hours"))
    for way in [*fitting[:N_SHOWN], *ways[len(fitting) :]]:
        *division, passes = [text for text in way["settings"] if not text.startswith("activation")]
        checkpointing = " checkpointing" if len(way["settings"]) > len(division) + 1 else ""
        name = " ".join(text.removeprefix("trainer=") for text in division) + checkpointing
        row = COLUMNS.format(
            name,
            passes.partition("=")[2],
            f"{sum(way['memory_gb'].values()):.1f}",
            f"{way['seconds']:.3g}",
            f"{way['seconds_by_purpose']['waiting'] / way['seconds']:.0%}",
            f"{way['hours']:.3g}",
        )
        if way["lacking_gb"]:
            row += f"  lacks {way['lacking_gb']:.1f} GB"
        print(row)
    if measured := cluster.get("measured"):
        print(f"the run measured {measured['memory_gb']:.1f} GB and {measured['seconds']:.3g} s/update")
    elif fitting:
        print(f"the first: dpo train {' '.join([*settings, *fitting[0]['settings']])}")
        for note in fitting[0]["notes"]:
            print(note)
