"""The recipe: the steps of a run in their order, and how it ends.

Exit status: 0 after training; 2 for bad input; 130 after Ctrl-C; 143 after another stop signal; 1 after any other
error. What needs torch is imported inside functions, so that bad input is refused within a second.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpo.errors import InputError, RunError, explaining_full_disk
from dpo.settings.command_line import check_command_line, exit_with, place_job
from dpo.settings.keys import CONFIG_DIR, PRECISION, load_plugins
from dpo.settings.places import store_rows
from dpo.settings.plan import Plan, describe, resolve
from dpo.settings.validation import find_problems, find_warnings, raise_problems
from dpo.system import host
from dpo.system.launching import choose_backend, get_open_port, init_distributed, launch
from dpo.system.run_directory import FIRST_EXAMPLES, RunLog, exiting_on_failure, read_facts
from dpo.system.signals import ABORTED, Stopped, end_process, ending_on_stop_signals

if TYPE_CHECKING:
    from dpo.checkpoint.resume import Run
    from dpo.data.preflight import TrainingData

RUN_LOG = RunLog()


def start(arguments: list[str]) -> None:
    """Run a command line, in a process of its own; exit after bad input or a failure."""
    try:
        sys.argv[1:], plan = check_command_line(arguments)
        if plan is None:
            main()
        else:
            run_or_exit(plan)
    except KeyboardInterrupt:
        end_process("aborted: nothing more is saved\n", ABORTED)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
def main(config: DictConfig) -> None:
    """Run a job of a sweep (-m); without one, Hydra only shows the config."""
    try:
        plan = place_job(resolve(config, with_plugins=True), HydraConfig.get())
        if problems := find_problems(plan):  # a launcher may use another machine
            exit_with([problem.sentence for problem in problems])
        run_or_exit(plan)
    except SystemExit as ending:
        if ending.code not in (1, 2):  # a stop signal ends the sweep
            raise
        raise RunError("this job failed for the reason above") from None  # Hydra goes on, and ends with status 1


def run_or_exit(plan: Plan) -> None:
    """Run a plan without problems; exit after a failure."""
    if host.is_launched_as_rank_0():
        RUN_LOG.begin()
    with exiting_on_failure(RUN_LOG):
        run(plan)


def run(plan: Plan) -> None:
    is_rank_0 = host.is_launched_as_rank_0()
    for warning in find_warnings(plan) if is_rank_0 else ():
        print(f"warning: {warning}")
    if plan.run.dry_run:
        with explaining_ends():
            if is_rank_0:
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
                None,
                RUN_LOG.hand_over(),
                process_group=plan.trainer.multi_process,
                port=plan.fsdp.fsdp_port,
                timeout_secs=plan.run.collective_timeout_secs,
            )
    except (RunError, Stopped):  # what is printed about these belongs to the run, also if rank 0 was another process
        if is_rank_0 and read_facts(Path(plan.run.local_run_dir)):
            RUN_LOG.open(plan.run.local_run_dir)
        raise


def dry_run(plan: Plan) -> None:
    """Print what a run would do, and the memory it needs; write nothing.

    Raises InputError wherever the run would, except for its disk, or more processes than this machine has GPUs.
    """
    from dpo.checkpoint.resume import check_inputs, keep_choices, keep_template, look_at_run
    from dpo.data.preflight import list_first_examples
    from dpo.models.loading import check_parts, find_model_config
    from dpo.models.scoring import load_scorer
    from dpo.preference_datasets import check_columns, load_data
    from dpo.reporting.table import list_logs
    from dpo.training.memory import print_prediction
    from dpo.training.optimization import check_optimizer
    from dpo.training.start import list_first_tasks, set_up_libraries

    resume_point = look_at_run(plan, list_logs())
    plan = keep_choices(plan, resume_point)
    set_up_libraries(plan)  # attention's kernel depends on these settings, and the predicted memory on the kernel
    check_optimizer(plan.training)
    check_columns(plan)
    check_parts(plan)
    data = load_data(plan.change("chat_template", keep_template(plan, resume_point)))
    check_inputs(resume_point, data, find_model_config(plan))
    for role, text in list_first_examples(plan, data)[0].items():
        print(f"{role} of the first example: {text!r}")
    if resume_point is None:
        print(list_first_tasks(plan))
    if plan.online:
        print(*load_scorer(plan, "meta", rows=1).notes, sep="\n")
    print_prediction(plan, data)


def work(rank: int, world_size: int, plan: Plan, models: tuple | None = None, printed: str = "") -> None:
    """Open the run's directory, then load and train, in one process; `printed` is for the run's log."""
    if rank == 0:
        RUN_LOG.begin(printed)
    with ending_on_stop_signals(plan.run.local_run_dir):
        with host.importing(freeze=models is None):  # the caller's models may be in reference cycles
            import dpo.trainers  # noqa: F401  (`train` uses it; imported here, as that takes seconds)
            from dpo.checkpoint.resume import opening_run
            from dpo.reporting.table import list_logs
        load_plugins(plan.run.plugins)
        with explaining_ends(), opening_run(plan, list_logs()) if rank == 0 else nullcontext() as run:
            work_in_run_dir(run, rank, plan, models)


@contextmanager
def explaining_ends() -> Iterator:
    """Inside, an exit that the user's code asks for is a failure, and so is a full disk."""
    try:
        with explaining_full_disk():
            yield
    except SystemExit as ending:  # its status may be 0
        raise RunError(f"a plugin or other code of yours called sys.exit({ending.code!r})") from ending


def work_in_run_dir(run: "Run | None", rank: int, plan: Plan, models: tuple | None) -> None:
    """Load data, train and export; `run` is None on all ranks but 0."""
    from dpo.analysis.verdict import print_result
    from dpo.checkpoint.resume import check_inputs, find_model_facts, keep_choices, keep_template
    from dpo.data.preflight import list_first_examples
    from dpo.data.schema import write_lines
    from dpo.models.export import export_last
    from dpo.models.loading import check_blocks, check_model, find_model_config
    from dpo.models.pretrained import take_model
    from dpo.parallel.mesh import from_rank_0
    from dpo.preference_datasets import check_columns, load_data
    from dpo.system.waiting import check_alike, meet_rank_0
    from dpo.training.optimization import check_optimizer
    from dpo.training.start import find_shared_facts, set_up_libraries

    meet_rank_0("the run's directory")  # rank 0 alone opens the directory, and may copy a checkpoint and logs into it
    resume_from = from_rank_0(run.resume_point.path if run and run.resume_point else None)
    plan = keep_choices(plan, run.resume_point) if run else plan
    for key in ("chat_template_date", "holdout", *PRECISION):  # processes of a long start may see different days
        plan = plan.change(key, from_rank_0(plan.values[key]))
    check_alike(find_shared_facts(plan))
    set_up_libraries(plan, bars=rank == 0 and sys.stderr.isatty())

    check_optimizer(plan.training)
    if run and run.resume_point is None:
        check_columns(plan)  # before a model is fetched
        if models is None:
            check_model(plan)  # before data is loaded, which may take minutes
    policy = models and take_model(models[0])
    if run:
        check_blocks(plan, policy)
    kept = from_rank_0(keep_template(plan, run and run.resume_point))
    data = load_data(plan.change("chat_template", kept), silent=rank != 0)
    model_config = policy.config if policy else find_model_config(plan)
    check_alike({"the model's config.json": json.dumps(find_model_facts(model_config), sort_keys=True)})
    if run:
        check_inputs(run.resume_point, data, model_config)

    is_complete = from_rank_0(run is not None and run.is_finished(data.report.updates))
    if not is_complete:
        if run:
            run.record(plan)
            data.report.write(run.directory / "preflight.json")
            write_lines(run.directory / FIRST_EXAMPLES, list_first_examples(plan, data))
            RUN_LOG.open(run.directory)
        train(rank, plan, data, models, resume_from)
    elif run:
        print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
    export_last(plan, rank)
    if run and not is_complete:
        print_result(run.directory)


def train(rank: int, plan: Plan, data: "TrainingData", models: tuple | None, resume_from: Path | None) -> None:
    """Train; afterwards nothing of the trainer is held."""
    from dpo.trainers import Trainer
    from dpo.training.memory import explain_memory_error

    with explain_memory_error(plan, data):
        trainer = Trainer(plan, data, models, rank=rank, resume_from=resume_from)
        if resume_from is not None:
            trainer.checkpoints.restore(resume_from, trainer.parts)
        trainer.train()


def worker_main(rank: int, world_size: int, config: DictConfig, policy: Any, reference_model: Any = None) -> None:
    """Train loaded models in one of `world_size` processes, as `torch.multiprocessing.spawn` starts them.

    They meet at `config.fsdp_port`, or use the process group that exists.
    """
    import torch

    from dpo.parallel.mesh import from_rank_0

    plan = resolve(store_rows(config), world_size=world_size, with_plugins=True)
    if plan.trainer.multi_process:
        plan = plan.change("world_size", world_size)
        if world_size > 1 and plan.fsdp.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError("fsdp_port is null: give all processes the same port, such as utils.get_open_port()")
    raise_problems(find_problems(plan))
    makes_group = plan.trainer.multi_process and not torch.distributed.is_initialized()
    if makes_group:
        init_distributed(rank, world_size, port=plan.fsdp.fsdp_port or get_open_port(), backend=choose_backend())
    # the default name of the directory contains the time, which differs between processes
    plan = plan.change("local_run_dir", from_rank_0(plan.run.local_run_dir))
    described = f"{describe(plan)}\n"
    if rank == 0:
        print(described, end="", flush=True)
    try:
        work(rank, world_size, plan, (policy, reference_model), described)
    finally:
        RUN_LOG.close()
    if makes_group:
        torch.distributed.destroy_process_group()
