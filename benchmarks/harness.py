"""Configs, trainers, fresh processes and tables for all benchmarks.

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

import trainers
from dpo.models.loading import model_loaders
from dpo.settings.command_line import check_command_line
from dpo.settings.keys import CONFIG_DIR
from dpo.settings.plan import resolve
from dpo.system.host import set_allocators
from dpo.system.launching import launch
from dpo.training.start import set_up_libraries

ROOT = CONFIG_DIR.parents[1]
# runs that make updates and do little else; benchmarks override the number of examples
COMMON = (
    "model.reference_dtype=float32",
    "eval_batch_size=4",
    "n_eval_examples=4",
    "sample_during_eval=false",
    "warmup_steps=0",
    "n_epochs=null",
    "n_examples=1000000",
)


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
    set_up_libraries(plan, progress_bars=True)
    policy, reference = model_loaders(plan)
    trainer_class = getattr(trainers, plan.trainer.name)
    return trainer_class(policy, config, config.seed, config.local_run_dir, reference, rank, plan.dims.world_size)


# --- fresh processes -------------------------------------------------------------------------------------------------


def run_python(*arguments: str, python: str = sys.executable, watch: Callable[[int], None] = lambda pid: None) -> str:
    """Run a fresh Python and return its output. Raises Failed.

    `watch` is called with the id of the new process, again and again.
    """
    environment = dict(os.environ)
    if python == sys.executable:  # ours; TRL has another Python
        set_allocators(environment)  # as train.py does
    # files, because a pipe that nobody reads while `watch` is called would fill and block
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([python, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=errors)
        while process.poll() is None:
            watch(process.pid)
            time.sleep(0.05)
        out.seek(0)
        errors.seek(0)
        output, error_output = out.read(), errors.read()
    if process.returncode:
        last_line = (error_output.strip() or output.strip() or "no output").splitlines()[-1]
        raise Failed(f"status {process.returncode} (-9: out of memory): {last_line[:200]}")
    return output


def measure_afresh(function: str, overrides: Sequence[str], *arguments: Any) -> list[Any]:
    """Call `measure_on_ranks` in a fresh process. Raises Failed."""
    output = run_python("-m", "benchmarks.harness", json.dumps([function, overrides, *arguments]))
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


def print_row(name: object, cells: Iterable[object], *, first: int = 34, width: int = 13) -> None:
    print(f"{name:{first}}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


if __name__ == "__main__":
    print(json.dumps(measure_on_ranks(*json.loads(sys.argv[1]))))
