"""Entry point: compose and validate the config, create the run directory, load models, train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists every key. Exit status: 0 trained, 2 bad input (one message), 130 Ctrl-C (the first saves, the second
does not), 143 stopped by another signal, 1 anything else.
Heavy imports wait until they are needed, so that `--help` and shell completion are quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpo.run import describe, run, work, worker_main  # noqa: F401
from dpo.settings.resolution import count_processes, find_config_problems, find_trainer  # noqa: F401  (for other scripts)
from dpo.settings.sweeps import Sweep

CONFIG_DIR = Path(__file__).parent / "config"
SWEEP = Sweep()


def _local_run_dir(exp_name: str, local_dirs: list[str]) -> str:
    from dpo.system.paths import get_local_run_dir

    return get_local_run_dir(exp_name, local_dirs)


OmegaConf.register_new_resolver("get_local_run_dir", _local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(Path(__file__).parent), replace=True)


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(config: DictConfig) -> None:
    from dpo.errors import InputError, RunError
    from dpo.settings.validation import find_unused
    from dpo.system.rank_env import find_rank_env
    from dpo.system.redaction import redact
    from dpo.system.signals import Stopped

    sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if sweeps and find_rank_env() is not None:
            raise InputError(
                "a sweep (-m) starts its own processes, one job after the other: run it without a launcher"
            )
        _exit_on(find_config_problems(config))
        if _is_rank_0():
            for line in find_unused(config, count_processes(config)):
                print(f"warning: {line}")
        if sweeps:
            SWEEP.begin_job(config, HydraConfig.get())
        run(config)
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C changes nothing any more
        sys.exit(stopped.status)


def _exit_on(problems: list[str]) -> None:
    if problems:
        from dpo.system.redaction import redact

        if _is_rank_0():  # every rank finds the same
            print(
                "\n".join(["bad configuration:", *(f"  - {redact(problem)}" for problem in problems)]), file=sys.stderr
            )
        sys.exit(2)


def _is_rank_0() -> bool:
    """Of those that a launcher started; true without one."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def check_command_line(arguments: list[str]) -> list[str]:
    """The arguments as Hydra takes them. Exits with status 2 and a sentence for everything that is wrong with them."""
    from dpo.settings.command_line import find_problems, parse
    from dpo.settings.files import help_text

    try:
        line = parse(arguments)
    except ValueError as error:
        _exit_on([str(error)])
        raise
    if line.wants_help:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends like any other tool
        print(help_text())
        sys.exit(0)
    _exit_on(find_problems(line, CONFIG_DIR, find_config_problems))
    return line.arguments


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """What torch is to read from the environment when it is imported, unless the user has set it."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages: fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # CUDA's memory does not fragment, though shapes change all the time
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def abort() -> NoReturn:
    """End at once, whatever is being written in the background."""
    from dpo.system.signals import ABORTED

    print("aborted: nothing more is saved", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ABORTED)


if __name__ == "__main__":
    set_allocators(os.environ)
    try:
        sys.argv[1:] = check_command_line(sys.argv[1:])
        try:
            main()
        finally:
            SWEEP.report()
    except KeyboardInterrupt:
        abort()
