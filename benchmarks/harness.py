"""Configs, trainers, fresh processes, rounds in turn and tables for all benchmarks.

`measure_afresh` starts this module as a process for each measurement; the process's argument is JSON.
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
# runs that make updates and do little else; benchmarks override the number of examples
COMMON = ("model.reference_dtype=float32", "eval_batch_size=4", "n_eval_examples=4", "sample_during_eval=false",
          "warmup_steps=0", "n_epochs=null", "n_examples=1000000")  # fmt: skip
Name = TypeVar("Name")
Result = TypeVar("Result")


class Failed(Exception):
    """A measurement that failed; the message is one sentence."""


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose overrides of train.py, or exit if they are invalid."""
    fixed = ["exp_name=benchmark", "wandb.enabled=false", "debug=true", "do_first_eval=false"]
    arguments, _ = check_command_line([*fixed, *overrides])
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra.compose("config", arguments)
    OmegaConf.resolve(config)
    return config


def make_trainer(config: DictConfig, rank: int = 0, world_size: int | None = None) -> Any:
    """Make the trainer of a config as a run does."""
    plan = resolve(config, world_size=world_size)
    train.set_up_torch(plan)
    policy, reference = model_loaders(plan, rank=rank)
    trainer_class = train.find_trainer(plan)
    return trainer_class(policy, config, config.seed, config.local_run_dir, reference, rank, plan.dims.world_size)


def read_pairs(config: DictConfig, split: str = "train") -> list[TextExample]:
    """Read a run's pairs in the run's order."""
    is_train = split == "train"
    prompts = getattr(load_data(resolve(config), silent=True), split)
    batches = iterate_examples(
        prompts.counts.tolist(),
        batch_size=config.batch_size if is_train else 1,
        shuffle=is_train,
        n_epochs=config.n_epochs if is_train else 1,
        n_examples=config.n_examples if is_train else config.n_eval_examples,
        seed=config.seed,
    )
    return read_examples(prompts, [example_id for batch in batches for example_id in batch])


# --- fresh processes -------------------------------------------------------------------------------------------------


def run_python(
    *arguments: str,
    python: str = sys.executable,
    watch: Callable[[int], None] = lambda pid: None,
    every: float = 0.05,
    **environment: str,
) -> str:
    """Run a fresh Python and return its output. Raises Failed.

    `watch` is called with the id of the new process every `every` seconds.
    """
    inherited = dict(os.environ)
    if python == sys.executable:  # ours; TRL has another Python
        set_allocators(inherited)  # as train.py does
    # files, because a pipe that nobody reads while `watch` is called would fill and block
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, *arguments], cwd=ROOT, env={**inherited, **environment}, stdout=out, stderr=errors
        )
        while process.poll() is None:
            watch(process.pid)
            time.sleep(every)
        out.seek(0)
        errors.seek(0)
        output, error_output = out.read(), errors.read()
    if process.returncode:
        last_line = (error_output.strip() or output.strip() or "no output").splitlines()[-1]
        raise Failed(f"status {process.returncode} (-9: out of memory): {last_line[:200]}")
    return output


def measure_afresh(function: str, overrides: Sequence[str], *arguments: Any, **options: Any) -> list[Any]:
    """Call `measure_on_ranks` in a fresh process. Raises Failed.

    `options` are those of `run_python`.
    """
    output = run_python("-m", "benchmarks.harness", json.dumps([function, overrides, *arguments]), **options)
    return json.loads(output.splitlines()[-1])


def measure_on_ranks(function: str, overrides: Sequence[str], *arguments: Any) -> list[Any]:
    """Call `module:function` of the benchmarks on each rank of a run.

    The function gets the rank, the number of ranks, the config of `overrides`, and the arguments. Results are passed as
    JSON, and listed by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose([f"local_run_dir={folder}/run", f"local_dirs=[{folder}]", *overrides])
        plan = resolve(config)
        worker_arguments = (config, function, arguments, Path(folder))
        launch(_measure_on_rank, plan.dims.world_size, *worker_arguments, process_group=plan.trainer.multi_process)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(plan.dims.world_size)]


def _measure_on_rank(
    rank: int, world_size: int, config: DictConfig, function: str, arguments: Sequence[Any], folder: Path
) -> None:
    module, name = function.split(":")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    (folder / f"{rank}.json").write_text(json.dumps(measure(rank, world_size, config, *arguments)))


def measure_in_turns(measures: Mapping[Name, Callable[[int], Result]], rounds: int) -> dict[Name, list[Result]]:
    """Call each measure once per round, in an alternating order.

    A measure gets the number of the round. Round 0 warms up, and its results do not count.
    """
    results: dict[Name, list[Result]] = {name: [] for name in measures}
    names = list(measures)
    for round_number in range(rounds + 1):
        # the order alternates, so that a machine that becomes slower or faster affects all measures alike
        for name in names if round_number % 2 == 1 else reversed(names):
            result = measures[name](round_number)
            if round_number > 0:
                results[name].append(result)
    return results


# --- tables ----------------------------------------------------------------------------------------------------------


def add_range(values: Sequence[float]) -> str:
    """Format the median, and the range of three or more values."""
    text = f"{median(values):.2f}"
    return text if len(values) < 3 else f"{text} [{min(values):.2f}, {max(values):.2f}]"


def print_row(name: object, cells: Iterable[object], *, first: int = 34, width: int = 13) -> None:
    print(f"{name:{first}}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


if __name__ == "__main__":
    print(json.dumps(measure_on_ranks(*json.loads(sys.argv[1]))))
