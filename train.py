"""Entry point: compose and validate the config, create the run directory, load models, train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists every key. Exit status: 0 trained, 2 bad input (one message), 130 Ctrl-C (the first saves, the second
does not), 143 stopped by another signal, 1 anything else.
Modules that need torch are imported when a run starts, so that everything before that takes less than a second.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.system.entry import open_standard_streams, print_whatever_happens
from dpo.system.signals import Stopped, abort, before_end, end_on_stop_signals

if __name__ == "__main__":  # before the other imports, which take a while
    open_standard_streams()
    print_whatever_happens()
    end_on_stop_signals()

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import dpo.run
from dpo.errors import InputError, RunError
from dpo.settings.command_line import check_command_line, exit_on
from dpo.settings.plan import Plan, resolve
from dpo.settings.sweeps import Sweep
from dpo.settings.validation import find_config_problems, find_warnings
from dpo.system.malloc import set_allocators
from dpo.system.paths import get_local_run_dir
from dpo.system.rank_env import find_rank_env, is_rank_0
from dpo.system.redaction import redact

if TYPE_CHECKING:
    from torch import nn

SWEEP = Sweep()

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(Path(__file__).parent), replace=True)


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(config: DictConfig) -> None:
    sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if sweeps and find_rank_env() is not None:
            raise InputError(
                "a sweep (-m) starts its own processes, one job after the other: run it without a launcher"
            )
        plan = resolve(config)
        exit_on(find_config_problems(config, plan))
        if is_rank_0():
            for warning in find_warnings(config, plan):
                print(f"warning: {warning}")
        if sweeps:
            SWEEP.begin_job(config, HydraConfig.get())
        run(config, plan)
        SWEEP.end_job()
    except InputError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(1)
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C changes nothing
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)


def find_class(plan: Plan) -> Any:
    """The class of a plan's trainer."""
    import trainers

    return trainers.TRAINERS[plan.trainer.name]


def run(config: DictConfig, plan: Plan | None = None) -> None:
    """Train according to a validated config, in as many processes as it asks for."""
    dpo.run.run(config, plan or resolve(config), find_class)


def work(rank: int, world_size: int, config: DictConfig) -> None:
    """Do the work of one process of a run."""
    dpo.run.work(rank, world_size, config, resolve(config, world_size=world_size), find_class)


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """The reference implementation's name for `dpo.run.work_with_models`."""
    dpo.run.work_with_models(rank, world_size, config, find_class, policy, reference_model)


if __name__ == "__main__":
    set_allocators(os.environ)
    before_end.append(SWEEP.report)
    try:
        sys.argv[1:] = check_command_line(sys.argv[1:])
        try:
            main()
        finally:
            SWEEP.report()
    except KeyboardInterrupt:
        abort()
