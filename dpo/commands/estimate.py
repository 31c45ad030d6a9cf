"""Estimate what a run would need on GPUs that are not here: memory, communication, time.

    dpo estimate model=MODEL loss=dpo loss.beta=0.1 datasets=[hh] --gpus h100:8 --gpus h100:64
    dpo estimate --run RUN --gpus h100:8       # the settings of a run, and what it measured

Each way to divide the model over the GPUs is tried with as few backward passes per update as fit into memory, with and
without activation checkpointing. The fastest comes first; what does not fit comes last. The settings are those of
dpo train. The rates of GPUs are assumed, unless --rates names a file: docs/distributed.md has its form.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from dpo.analysis.runs import read_run
from dpo.commands import command, make_parser
from dpo.data.preflight import load_data
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.loading import find_model_config
from dpo.numbers import count
from dpo.parallel.tensor_parallel import check_tensor_parallel
from dpo.settings.command_line import check_command_line, parse_key
from dpo.settings.places import check_exists
from dpo.settings.plan import Plan, make_plan
from dpo.settings.validation import find_problems, read_plan
from dpo.system.plain_files import read_json
from dpo.training.estimate import RATES, Estimator, Rates, estimate_seconds
from dpo.training.memory import decide_frozen_weights

USABLE = 0.95  # the share of a GPU's memory that a process gets
SHOWN = (
    "trainer", "fsdp_shard_size", "tensor_parallel_size", "gradient_accumulation_steps", "activation_checkpointing",
)  # fmt: skip
TRIED = (*SHOWN, "world_size", "microbatch_size")  # keys that the command sets, most of them to several values in turn
COLUMNS = "{:<60} {:>6} {:>8} {:>9} {:>6} {:>8}"


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("estimate", __doc__)
    parser.add_argument("--gpus", action="append", required=True, metavar="NAME:N", help="N GPUs; may be repeated")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="rates of GPUs by name, as JSON")
    parser.add_argument("--run", type=Path, help="a run, whose processes used the GPUs")
    parser.add_argument("--json", action="store_true", help="print all ways as JSON")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as for dpo train")
    options = parser.parse_intermixed_args(arguments)
    settings = options.settings
    rates = read_rates(options.rates) if options.rates else RATES
    clusters = [parse_gpus(text, rates) for text in options.gpus]
    measured = {}
    if options.run:
        if settings:
            raise InputError(f"--run has settings already: leave out {' '.join(settings)}")
        plan, measured = read_measured(options.run)
        if not plan.trainer.multi_process:
            raise InputError(
                f"{options.run} is a run of trainer={plan.trainer.name}: estimates are for several processes"
            )
        if wrong := [n for _, n in clusters if n != plan.dims.world_size]:
            raise InputError(f"{options.run} has {plan.dims.world_size} processes: --gpus NAME:{wrong[0]} has others")
    else:
        if typed := [text for text in settings if parse_key(text) in TRIED]:
            raise InputError(f"estimate tries {', '.join(TRIED)}: leave out {' '.join(typed)}")
        if not any(text.startswith("exp_name=") for text in settings):
            settings.append("exp_name=estimate")
        _, plan = check_command_line(["dry_run=true", "trainer=FSDPTrainer", *settings])
    if plan.online:
        raise InputError("online=online is not estimated, as sampling takes most of its time: leave it out")
    data = load_data(plan, silent=True)
    estimates = []
    for name, n_gpus in clusters:
        estimator = Estimator(plan, data, rates[name])
        ways = [[plan]] if options.run else list_ways(plan, n_gpus, rates[name])
        costs = [measure(way, estimator) for way in ways]
        costs.sort(key=lambda cost: (cost["lacking_gb"], cost["seconds"]))
        estimates.append({"gpus": f"{name}:{n_gpus}", "updates": data.updates, "ways": costs, **measured})
    if options.json:
        print(json.dumps(estimates, indent=1))
        return
    for (name, n_gpus), cluster in zip(clusters, estimates, strict=True):
        show(cluster, settings, n_machines=math.ceil(n_gpus / rates[name].gpus_per_machine))


def read_rates(path: Path) -> dict:
    """Read rates of GPUs from a file, and add RATES for other GPUs."""
    check_exists(path)
    problem = f"--rates {path} must map names of GPUs to their rates"
    rates = {**RATES}
    with explaining_library(lambda error: InputError(f"{problem}: {one_sentence(error)}")):
        for name, entry in read_json(path).items():
            given = Rates(**entry)
            numbers = [given.tflops[dtype] for dtype in RATES["h100"].tflops]
            numbers += [rate for key, rate in entry.items() if key != "tflops"]
            if not all(number > 0 for number in numbers):
                raise ValueError(f"{name} has one that is not above 0")
            rates[name.lower()] = given
    return rates


def read_measured(run_dir: Path) -> tuple[Plan, dict]:
    """Return the plan of a run on the processes and GPUs that it had, and what it measured.

    `{"measured": {"memory_gb": ..., "seconds": ...}}` has the peak of memory, and the median time of an update.
    """
    run = read_run(run_dir)
    values = read_plan(run_dir / "config.yaml", prefixes=("",)).values
    plan = make_plan(values, world_size=run.env.get("processes", 1), gpus=len(run.env.get("gpus", ())))
    seconds = plan.data.batch_size / np.nanmedian(run.train["examples_per_second"])
    measured = {"memory_gb": float(np.nanmax(run.train["memory/peak_gb"])), "seconds": float(seconds)}
    return plan, {"measured": measured}


def parse_gpus(text: str, rates: Mapping) -> tuple[str, int]:
    name, _, number = text.lower().partition(":")
    if name not in rates or not number.isdecimal() or int(number) < 1:
        raise InputError(f"--gpus {text} must be NAME:N, such as h100:8; NAME is one of {', '.join(rates)}")
    return name, int(number)


def list_ways(plan: Plan, n_gpus: int, rates: Rates) -> Iterator[list[Plan]]:
    """Yield a list of plans for each way to divide the model, without and with activation checkpointing.

    The plans of a list have 1, 2, 4, ... backward passes per update, and the last one has a pass for each example of a
    process.
    """
    n_here = min(n_gpus, math.ceil(rates.gpus_per_machine))  # JSON may say 8.0
    divisions: list[dict] = [{"trainer": "FSDPTrainer"}]
    if n_gpus > n_here and n_gpus % n_here == 0:
        divisions.append({"trainer": "FSDPTrainer", "fsdp_shard_size": n_here})
    for size in (2, 4, 8):
        if size <= n_here and n_gpus % size == 0:
            divisions.append({"trainer": "TensorParallelTrainer", "tensor_parallel_size": size})
    config = find_model_config(plan)
    precision = {}
    if plan.model.autocast == "auto":  # the GPUs in question have bfloat16
        precision = {"model.autocast": None, "model.fsdp_policy_mp": plan.model.fsdp_policy_mp or "bfloat16"}
    for division, is_checkpointed in product(divisions, (False, True)):
        tensor_size = division.get("tensor_parallel_size", 1)
        try:
            check_tensor_parallel(config, tensor_size)
        except InputError:  # the model cannot be cut in this way
            continue
        values = {**plan.values, **precision, **division, "activation_checkpointing": is_checkpointed}
        most = math.ceil(plan.data.batch_size * tensor_size / n_gpus)  # passes: one for each example of a process
        plans = [
            make_plan({**values, "gradient_accumulation_steps": n}, world_size=n_gpus, gpus=n_here)
            for n in (*(2**i for i in range(most.bit_length()) if 2**i < most), most)
        ]
        if not find_problems(plans[0]):
            yield plans


def measure(plans: Sequence[Plan], estimator: Estimator) -> dict:
    """Return the costs, as `--json` prints them, of the first plan that fits into memory, or of the last if none does.

    The plans have ever more backward passes.
    """
    gpu_gb = estimator.rates.memory_gb
    plan, *others = plans
    frozen = decide_frozen_weights(plan, gpu_gb * 1e9)  # as in a run if all of the GPU's memory is free
    memory, notes = estimator.estimate_memory(plan, frozen)
    lacking_gb = max(0.0, memory.total() / 1e9 - USABLE * gpu_gb)
    if lacking_gb and others:
        return measure(others, estimator)
    work = estimator.estimate_work(plan, frozen)
    seconds = estimate_seconds(plan, work, estimator.rates)
    return {
        "settings": {key: plan.values[key] for key in SHOWN if plan.values.get(key) is not None},
        "lacking_gb": lacking_gb,
        "memory_gb": {purpose: n_bytes / 1e9 for purpose, n_bytes in memory.items()},
        "collectives": {key: {"calls": n, "gb": work.n_bytes[key] / 1e9} for key, n in sorted(work.calls.items())},
        "tflop": work.flops / 1e12,
        "seconds": sum(seconds),
        "seconds_by_purpose": seconds._asdict(),
        "hours": sum(seconds) * estimator.data.updates / 3600,
        "notes": [str(note) for note in notes],
    }


def show(cluster: dict, typed: list[str], *, n_machines: int) -> None:
    """Print a table of the ways, those that fit first, and the command of the first one."""
    ways = cluster["ways"]
    print(f"\n{cluster['gpus']}, {count(cluster['updates'], 'update')}")
    print(COLUMNS.format("", "passes", "GB", "s/update", "waits", "hours"))
    for way in ways:
        settings = way["settings"]
        sizes = [f"{key}={n}" for key, n in settings.items() if key.endswith("_size")]
        name = " ".join([settings["trainer"], *sizes])
        if settings["activation_checkpointing"]:
            name += " checkpointing"
        row = COLUMNS.format(
            name,
            settings["gradient_accumulation_steps"],
            f"{sum(way['memory_gb'].values()):.1f}",
            f"{way['seconds']:.3g}",
            f"{way['seconds_by_purpose']['waiting'] / way['seconds']:.0%}",
            f"{way['hours']:.3g}",
        )
        lack = f"  lacks {way['lacking_gb']:.1f} GB" if way["lacking_gb"] else ""
        print(row + lack)
    if measured := cluster.get("measured"):
        print(f"the run measured {measured['memory_gb']:.1f} GB and {measured['seconds']:.3g} s/update")
    elif ways and not ways[0]["lacking_gb"]:
        start = "dpo train"
        if n_machines > 1:
            start = f"NNODES={n_machines} NODE_RANK=... MASTER_ADDR=... scripts/run_distributed.sh"
        chosen = [f"{key}={str(value).lower()}" for key, value in ways[0]["settings"].items() if key != "trainer"]
        print(f"the first: {start} {shlex.join([*typed, 'trainer=' + ways[0]['settings']['trainer'], *chosen])}")
    for note in {note: None for way in ways for note in way["notes"]}:
        print(note)
