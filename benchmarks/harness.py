"""Configs, trainers, fresh processes, rounds in turn and tables for all benchmarks.

`python -m benchmarks.harness ARGUMENTS` (JSON) is one measurement, started by `measure_afresh`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf

import train
from dpo.data.examples import TextExample, iterate_examples, read_examples
from dpo.models.loading import model_loaders
from dpo.settings.command_line import check_command_line
from dpo.settings.files import CONFIG_DIR
from dpo.settings.plan import resolve
from dpo.system.host import set_allocators
from dpo.system.launching import launch
from preference_datasets import load_data

ROOT = CONFIG_DIR.parent
GOLDEN = ROOT / "tests" / "golden"
# updates and little else, on as many examples as a benchmark asks for
COMMON = ("model.reference_dtype=float32", "eval_batch_size=4", "n_eval_examples=4", "sample_during_eval=false",
          "warmup_steps=0", "n_epochs=null", "n_examples=1000000")  # fmt: skip
Name = TypeVar("Name")
Result = TypeVar("Result")


class Failed(Exception):
    """A measurement that failed; the message is one sentence."""


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose overrides of train.py, or exit if it would refuse them."""
    fixed = ["exp_name=benchmark", "wandb.enabled=false", "debug=true", "do_first_eval=false"]
    arguments = check_command_line([*fixed, *overrides])
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra.compose("config", arguments)
    if problems := train.find_config_problems(config):
        sys.exit("\n".join(problems))
    OmegaConf.resolve(config)
    return config


def make_trainer(config: DictConfig, rank: int = 0, world_size: int | None = None) -> Any:
    """Make the trainer of a config as a run does."""
    plan = resolve(config, world_size=world_size)
    train.set_up_torch(plan)
    policy, reference = model_loaders(plan, rank=rank)
    place = (rank, plan.dims.world_size)
    return train.find_trainer(plan)(policy, config, config.seed, config.local_run_dir, reference, *place)


def read_pairs(config: DictConfig, split: str = "train") -> list[TextExample]:
    """Read a run's pairs in order."""
    train = split == "train"
    prompts = getattr(load_data(resolve(config), silent=True), split)
    n_epochs, n_examples = (config.n_epochs, config.n_examples) if train else (1, config.n_eval_examples)
    batches = iterate_examples(
        prompts.counts.tolist(),
        batch_size=config.batch_size if train else 1,
        shuffle=train,
        n_epochs=n_epochs,
        n_examples=n_examples,
        seed=config.seed,
    )
    return read_examples(prompts, [place for batch in batches for place in batch])


# --- fresh processes -------------------------------------------------------------------------------------------------


def run_python(
    *arguments: str,
    python: str = sys.executable,
    watch: Callable[[int], None] = lambda pid: None,
    every: float = 0.05,
    **environment: str,
) -> str:
    """Run a fresh Python and return its output. Raises Failed.

    `watch` gets its id every `every` seconds.
    """
    own = dict(os.environ)
    if python == sys.executable:
        set_allocators(own)  # as train.py does
    # files, because a pipe that nobody reads while `watch` is called would fill and block
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, *arguments], cwd=ROOT, env={**own, **environment}, stdout=out, stderr=errors
        )
        while process.poll() is None:
            watch(process.pid)
            time.sleep(every)
        out.seek(0)
        errors.seek(0)
        said, wrong = out.read(), errors.read()
    if process.returncode:
        words = (wrong.strip() or said.strip() or "no output").splitlines()[-1]
        raise Failed(f"status {process.returncode} (-9: out of memory): {words[:200]}")
    return said


def measure_afresh(function: str, overrides: Sequence[str], *arguments: Any, **options: Any) -> list[Any]:
    """Call `measure_on_ranks` in a fresh process; `options` are of `run_python`. Raises Failed."""
    said = run_python("-m", "benchmarks.harness", json.dumps([function, overrides, *arguments]), **options)
    return json.loads(said.splitlines()[-1])


def measure_on_ranks(function: str, overrides: Sequence[str], *arguments: Any) -> list[Any]:
    """Call `module:function` of the benchmarks on each rank of a run.

    It is given its rank, the number of ranks, the config of `overrides`, and the arguments. Results pass as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose([f"local_run_dir={folder}/run", f"local_dirs=[{folder}]", *overrides])
        plan = resolve(config)
        own = (config, function, arguments, Path(folder))
        launch(_measure_on_rank, plan.dims.world_size, *own, process_group=plan.trainer.multi_process)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(plan.dims.world_size)]


def _measure_on_rank(
    rank: int, world_size: int, config: DictConfig, function: str, arguments: Sequence[Any], folder: Path
) -> None:
    module, name = function.split(":")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    (folder / f"{rank}.json").write_text(json.dumps(measure(rank, world_size, config, *arguments)))


def measure_in_turns(
    measures: Mapping[Name, Callable[[int], Result]], rounds: int, *, warm_up: bool = False
) -> dict[Name, list[Result]]:
    """Measure each `rounds` times, in an order that alternates between rounds.

    Each is given the number of its round. Round 0 warms up and does not count, if there is one.
    """
    found: dict[Name, list[Result]] = {name: [] for name in measures}
    for number in range(0 if warm_up else 1, rounds + 1):
        # a machine that slows down or speeds up does so for each alike
        for name in measures if number % 2 else [*reversed([*measures])]:
            result = measures[name](number)
            if number:
                found[name].append(result)
    return found


# --- tables ----------------------------------------------------------------------------------------------------------


def add_range(values: Sequence[float], form: str = ".2f") -> str:
    """Format the median, with the range of three values or more."""
    text = format(median(values), form)
    return text if len(values) < 3 else f"{text} [{min(values):{form}}, {max(values):{form}}]"


def print_row(name: object, cells: Iterable[object], *, first: int = 34, width: int = 13) -> None:
    print(f"{name:{first}}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


if __name__ == "__main__":
    print(json.dumps(measure_on_ranks(*json.loads(sys.argv[1]))))
