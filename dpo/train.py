"""A run from its command line to its processes, and its exit status.

Exit status: 0 after training; 2 for bad input; 130 after Ctrl-C; 143 after another stop signal; 1 after any other
error. What needs torch, such as `dpo.recipe`, is imported inside functions, so that bad input is refused within a
second.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpo.errors import InputError, RunError, WarningLine, explaining_full_disk
from dpo.settings.command_line import check_command_line, exit_with, set_job_dir
from dpo.settings.keys import CONFIG_DIR, load_plugins
from dpo.settings.places import store_rows
from dpo.settings.plan import Plan, describe, resolve
from dpo.settings.validation import find_plan_warnings, find_problems, raise_problems
from dpo.system import host
from dpo.system.launching import choose_backend, get_open_port, init_distributed, launch
from dpo.system.run_directory import LOG_FILE, RunLog, exiting_on_failure, read_run_facts
from dpo.system.signals import INTERRUPT_STATUS, Stopped, end_process, ending_on_stop_signals

RUN_LOG = RunLog()


def start(arguments: list[str]) -> None:
    """Run `dpo train` with these arguments; end the process after bad input or a failure."""
    try:
        # Hydra reads the checked arguments from sys.argv
        sys.argv[1:], plan = check_command_line(arguments)
        if plan is None:  # Hydra shows something, or starts a sweep
            main()
        else:
            run_or_exit(plan)
    except KeyboardInterrupt:
        end_process("aborted: nothing more is saved\n", INTERRUPT_STATUS)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
def main(config: DictConfig) -> None:
    """Run a job of a sweep (-m). Without a sweep, Hydra shows the config and does not call this."""
    try:
        plan = set_job_dir(resolve(config, with_plugins=True), HydraConfig.get())
        if problems := find_problems(plan):  # checked again, as a sweep's launcher may use another machine
            exit_with([problem.sentence for problem in problems])
        run_or_exit(plan)
    except SystemExit as ending:
        if ending.code not in (1, 2):  # a stop signal ends the sweep
            raise
        # Hydra goes on with the next job, and ends with status 1
        raise RunError("this job failed for the reason above") from None


def run_or_exit(plan: Plan) -> None:
    """Run a plan in which no problems were found; exit after a failure. What rank 0 prints is kept for its log."""
    if host.is_launched_as_rank_0():
        RUN_LOG.begin()
    with exiting_on_failure(RUN_LOG):
        run(plan)


def run(plan: Plan) -> None:
    """Start the processes of a run, and wait for them. A dry run stays in this process, on rank 0 alone."""
    is_rank_0 = host.is_launched_as_rank_0()
    if is_rank_0:
        for warning in find_plan_warnings(plan):
            print(WarningLine(warning))
    if plan.run.dry_run:
        if is_rank_0:
            from dpo.recipe import dry_run

            with explaining_exits():
                dry_run(plan)
        return
    if is_rank_0:
        print(describe(plan), flush=True)  # flushed, as importing torch takes seconds
    try:
        with ending_on_stop_signals(plan.run.local_run_dir):
            launch(
                work,
                plan.dims.world_size,
                plan,
                None,  # no models of a caller: each process loads those that the plan names
                RUN_LOG.take_pending(),
                process_group=plan.trainer.multi_process,
                port=plan.fsdp.fsdp_port,
                timeout_secs=plan.run.collective_timeout_secs,
                heartbeat_timeout_secs=plan.run.heartbeat_timeout_secs,
            )
    except (RunError, Stopped):
        # If the run has begun, its log gets what this process prints about the error; another process has written it
        # so far.
        if is_rank_0 and read_run_facts(Path(plan.run.local_run_dir)):
            RUN_LOG.open(plan.run.local_run_dir)
        raise


def work(rank: int, world_size: int, plan: Plan, models: tuple | None = None, printed: Mapping[str, str] = {}) -> None:
    """Do the work of process `rank`.

    `world_size` is not used, as the plan has it; `launch` passes it to any worker. `models` are policy and reference of
    a caller (see `TrainerParts`), or None: those that the plan names are loaded. `printed` maps names of files in the
    run's directory to what rank 0's parent has printed for them, with which they begin.
    """
    if rank == 0:
        RUN_LOG.begin(printed)
    with ending_on_stop_signals(plan.run.local_run_dir):
        # A caller's models, if they are in reference cycles, could never be freed.
        with host.importing_without_gc(freeze=models is None):
            from dpo.recipe import run_process
        load_plugins(plan.run.plugins)
        with explaining_exits():
            run_process(rank, plan, models, RUN_LOG)


@contextmanager
def explaining_exits() -> Iterator:
    """Raise RunError if the user's code calls sys.exit inside the context, or if the disk is full."""
    try:
        with explaining_full_disk():
            yield
    except SystemExit as ending:  # its status may be 0
        raise RunError(f"a plugin or other code of yours called sys.exit({ending.code!r})") from ending


def worker_main(rank: int, world_size: int, config: DictConfig, policy: Any, reference_model: Any = None) -> None:
    """Train a caller's models in one of `world_size` processes, as `torch.multiprocessing.spawn` starts them.

    The processes form a group at `config.fsdp_port`, unless they have formed one already. Each must call this.
    """
    import torch

    from dpo.system.waiting import from_rank_0

    plan = resolve(store_rows(config), world_size=world_size, with_plugins=True)
    if plan.trainer.multi_process:
        plan = plan.change("world_size", world_size)
        if world_size > 1 and plan.fsdp.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError("fsdp_port is null: give all processes the same port, such as utils.get_open_port()")
    raise_problems(find_problems(plan))
    makes_group = plan.trainer.multi_process and not torch.distributed.is_initialized()
    if makes_group:
        init_distributed(
            rank,
            world_size,
            # Without fsdp_port, either MASTER_PORT is set and counts, or this process is alone and any port will do.
            port=plan.fsdp.fsdp_port or get_open_port(),
            backend=choose_backend(),
        )
    # The default name of the directory contains the time, which differs between processes.
    plan = plan.change("local_run_dir", from_rank_0(plan.run.local_run_dir))
    described = f"{describe(plan)}\n"
    if rank == 0:
        print(described, end="", flush=True)
    try:
        work(rank, world_size, plan, (policy, reference_model), {LOG_FILE: described})
    finally:
        RUN_LOG.close()
    if makes_group:
        torch.distributed.destroy_process_group()
