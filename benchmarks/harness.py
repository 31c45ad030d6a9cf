"""What benchmarks share: configs and trainers, measurements in fresh processes, rounds in turns, tables."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf

import train
from dpo.models.loading import model_loaders
from dpo.settings.command_line import check_command_line
from dpo.settings.files import CONFIG_DIR
from dpo.settings.plan import resolve

ROOT = CONFIG_DIR.parent
COMMON = ("model.reference_dtype=float32", "eval_batch_size=4", "n_eval_examples=4", "sample_during_eval=false",
          "warmup_steps=0", "n_epochs=null", "n_examples=1000000")  # fmt: skip
Name = TypeVar("Name")
Result = TypeVar("Result")


class Failed(Exception):
    """A measurement that failed; the message is one sentence."""


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of overrides of train.py, without W&B. Exits if train.py would refuse them."""
    fixed = ["exp_name=benchmark", "wandb.enabled=false", "debug=true", "do_first_eval=false"]
    arguments = check_command_line([*fixed, *overrides])
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra.compose("config", arguments)
    if problems := train.find_config_problems(config):
        sys.exit("\n".join(problems))
    OmegaConf.resolve(config)
    return config


def make_trainer(config: DictConfig, rank: int = 0, world_size: int | None = None) -> Any:
    """The trainer of a config, as a run makes it."""
    plan = resolve(config, world_size=world_size)
    policy, reference = model_loaders(config, plan, rank=rank)
    place = (rank, plan.dims.world_size)
    return train.find_class(plan)(policy, config, config.seed, config.local_run_dir, reference, *place)


# --- fresh processes -------------------------------------------------------------------------------------------------


def run_python(*arguments: str, python: str = sys.executable, **environment: str) -> str:
    """What a fresh Python prints. Raises Failed."""
    own = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ} if python == sys.executable else os.environ  # as train.py does
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env={**own, **environment}
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Failed(f"status {done.returncode} (-9: out of memory): {said[:200]}")
    return done.stdout


def measure_afresh(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What a function of a benchmark returns in a fresh process, through JSON. Raises Failed."""
    module = function.__globals__["__spec__"].name  # also where it is run as __main__
    command = ["-m", "benchmarks.harness", f"{module}:{function.__name__}", json.dumps(arguments, default=str)]
    return json.loads(run_python(*command, **environment).splitlines()[-1])


def measure_in_turns(
    measures: Mapping[Name, Callable[[int], Result]], rounds: int, *, warm_up: bool = False
) -> dict[Name, list[Result]]:
    """Results of `rounds` measurements of each, in an order that alternates between rounds.

    Each is given the number of its round; round 0 warms up and does not count, if there is one.
    """
    found: dict[Name, list[Result]] = {name: [] for name in measures}
    for number in range(0 if warm_up else 1, rounds + 1):
        for name in measures if number % 2 else [*reversed([*measures])]:
            result = measures[name](number)
            if number:
                found[name].append(result)
    return found


# --- tables ----------------------------------------------------------------------------------------------------------


def add_interval(values: Sequence[float], form: str = ".2f") -> str:
    """The median in words, with the range of the values if there are several."""
    text = format(median(values), form)
    return text if len(values) < 3 else f"{text} [{min(values):{form}}, {max(values):{form}}]"


def print_row(name: str, cells: Iterable[str], *, first: int = 34, width: int = 13) -> None:
    print(f"{name:{first}}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))))
