"""Entry point: compose and validate the config, then train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists the keys. Exit status: 0 after training; 2 for bad input, after one message; 130 after Ctrl-C (the first
saves, the second does not); 143 after another stop signal; 1 after any other error.
Modules that need torch are imported inside functions, when a run starts: bad input is refused within a second.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.system import host
from dpo.system.signals import Stopped, abort, end_on_stop_signals, ending_on_stop_signals

if __name__ == "__main__":  # before the other imports, which take a while: a signal may come during them
    host.open_standard_streams()
    host.print_whatever_happens()
    end_on_stop_signals()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpo.errors import RunError
from dpo.settings.command_line import check_command_line, exit_on, place_job
from dpo.settings.plan import Plan, describe, resolve
from dpo.settings.validation import find_problems, find_warnings
from dpo.system.launching import launch
from dpo.system.run_directory import RunLog, exiting_on_failure, explaining_full_disk, read_record

if TYPE_CHECKING:
    from torch import nn

    from dpo.checkpoint.resume import Run
    from dpo.data.preflight import TrainingData

RUN_LOG = RunLog()


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(config: DictConfig) -> None:
    """Run a job of a sweep (-m); without one, Hydra only shows the config."""
    try:
        plan = place_job(resolve(config), HydraConfig.get())
        exit_on([problem.sentence for problem in find_problems(plan)])  # a launcher may use another machine
        run_or_exit(plan)
    except SystemExit as ending:
        if ending.code not in (1, 2):  # a stop signal ends the sweep
            raise
        raise RunError("this job failed for the reason above") from None  # Hydra goes on, and ends with status 1


def run_or_exit(plan: Plan) -> None:
    """Run a plan without problems; exit after a failure."""
    if host.is_rank_0():
        RUN_LOG.begin()
    with exiting_on_failure(RUN_LOG):
        run(plan)


def run(plan: Plan) -> None:
    """Run a plan without problems, in as many processes as it says."""
    is_rank_0 = host.is_rank_0()
    for warning in find_warnings(plan) if is_rank_0 else ():
        print(f"warning: {warning}")
    if plan.run.dry_run:
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
                *(plan, None, RUN_LOG.hand_over()),
                process_group=plan.trainer.multi_process,
                port=plan.run.fsdp_port,
                timeout_secs=plan.run.collective_timeout_secs,
            )
    except (RunError, Stopped):  # what is printed about these belongs to the run, also if rank 0 was another process
        if is_rank_0 and read_record(Path(plan.run.local_run_dir)):
            RUN_LOG.open(plan.run.local_run_dir)
        raise


def dry_run(plan: Plan) -> None:
    """Print what a run would do, and the memory it needs; write nothing. Raises InputError wherever the run would."""
    from dpo.checkpoint.resume import check_inputs, fix_template_date, look_at_run
    from dpo.models.loading import check_parts, find_model_config
    from dpo.reporting.table import LOGS
    from dpo.training.optimization import check_optimizer
    from dpo.training.outlook import print_outlook
    from dpo.training.setting_up import set_up_libraries
    from preference_datasets import check_columns, load_data

    resume_point = look_at_run(plan, LOGS)
    plan = fix_template_date(plan, resume_point)
    set_up_libraries(plan)  # attention's kernel depends on these settings, and the predicted memory on the kernel
    check_optimizer(plan.training)
    check_columns(plan)
    check_parts(plan)
    data = load_data(plan)
    check_inputs(resume_point, data, find_model_config(plan))
    print_outlook(plan, data, is_first=resume_point is None)


# --- the work of one process -----------------------------------------------------------------------------------------


def work(rank: int, world_size: int, plan: Plan, models: tuple[Any, Any] | None = None, printed: str = "") -> None:
    """Open the run's directory, then load and train, in one process of `world_size`.

    `models` are the policy and the reference, if they are loaded already. `printed` is for the run's log.
    """
    if rank == 0:
        RUN_LOG.begin(printed)
    with ending_on_stop_signals(plan.run.local_run_dir), explaining_full_disk(plan.run.local_run_dir):
        with host.without_collecting_garbage():
            import trainers  # noqa: F401  (`train` uses it; imported here, as that takes seconds)
            from dpo.checkpoint.resume import opening_run
            from dpo.reporting.table import LOGS
        if models is None:  # the caller's models may be in reference cycles, which must stay collectable
            host.never_collect_imports()
        with opening_run(plan, LOGS) if rank == 0 else nullcontext() as run:
            work_in_run_dir(run, rank, plan, models)


def work_in_run_dir(run: Run | None, rank: int, plan: Plan, models: tuple[Any, Any] | None) -> None:
    """Load data, train and export; `run` is the directory, and None on all ranks but 0."""
    from dpo.analysis.verdict import print_result
    from dpo.checkpoint.resume import check_inputs, find_model_facts, fix_template_date
    from dpo.models.export import export_last
    from dpo.models.loading import check_model, find_model_config
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.waiting import check_alike, meet_rank_0
    from dpo.training.optimization import check_optimizer
    from dpo.training.setting_up import set_up_libraries
    from preference_datasets import check_columns, load_data

    meet_rank_0("the run's directory")  # rank 0 alone opens the directory, and may copy a checkpoint and logs into it
    resume_from = from_rank_0(run.resume_point.path if run and run.resume_point else None)
    date = fix_template_date(plan, run.resume_point).chat.template_date if run else None
    plan = plan.change("chat_template_date", from_rank_0(date))  # processes of a long start may see different days
    set_up_libraries(plan, bars=rank == 0 and sys.stderr.isatty())

    check_optimizer(plan.training)
    if run and run.resume_point is None:
        check_columns(plan)  # before a model is fetched
        if models is None:
            check_model(plan)  # before data is loaded, which may take minutes
    data = load_data(plan, silent=rank != 0)
    model_config = models[0].config if models else find_model_config(plan)
    check_alike({"the model's config.json": json.dumps(find_model_facts(model_config), sort_keys=True)})
    if run:
        check_inputs(run.resume_point, data, model_config)

    is_complete = from_rank_0(run is not None and run.is_finished(data.report.updates))
    if run and not is_complete:
        run.record(plan)
        data.report.write(run.directory / "preflight.json")
        RUN_LOG.open(run.directory)
    if not is_complete:
        train(rank, plan, data, models, resume_from)
    elif rank == 0:
        print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
    export_last(plan, rank)
    if rank == 0 and not is_complete:
        print_result(Path(plan.run.local_run_dir))


def train(rank: int, plan: Plan, data: TrainingData, models: tuple[Any, Any] | None, resume_from: Path | None) -> None:
    """Make all that a trainer uses, and train; afterwards nothing of it is held."""
    from dpo.checkpoint.saver import Checkpoints
    from dpo.parallel.mesh import Mesh
    from dpo.reporting import events, table, terminal
    from dpo.training import evaluation, memory, optimization, setting_up
    from dpo.training.objective import make_objective
    from dpo.training.online import make_batches
    from dpo.training.stop import StopRequest
    from trainers import Trainer

    with memory.explain_out_of_memory(plan, data):
        progress = terminal.Progress.of(plan, silent=rank != 0)
        mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
        plan = setting_up.settle_frozen_weights(plan, rank, progress.line)
        policy, reference = setting_up.find_models(plan, models, rank=rank, resume_from=resume_from)
        policy, frozen_digest = setting_up.make_policy(plan, policy, data, mesh, resume_from=resume_from)
        reference = setting_up.make_reference(plan, reference, policy, frozen_digest, data, mesh)
        objective = make_objective(plan, policy, reference, data, mesh, log=progress.line)
        optimizer = setting_up.make_policy_optimizer(plan, policy)
        scheduler = optimization.Schedule.of(plan.training, optimizer, updates=data.report.updates, size=mesh.data_size)
        stop = StopRequest(mesh)
        batches = make_batches(plan, data, objective, stop, progress)
        evaluator = evaluation.Evaluator(plan, data, objective, batches, progress, stop)
        run_dir, keep, n_evaluated = Path(plan.run.local_run_dir), evaluator.interval.keep, evaluator.n_examples
        checkpoints = Checkpoints(run_dir, mesh, keep=keep, log=progress.line, n_evaluated=n_evaluated)
        context = events.RunContext(plan, run_dir, rank, data, progress.line, policy)
        callbacks = events.Callbacks.of(table.CALLBACKS, context, terminal=progress)
        states = {**batches.states, "checkpoints": checkpoints, "callbacks": callbacks}
        made = (plan, data, objective, optimizer, scheduler)
        recorded = setting_up.describe_run(*made, frozen_digest, **states)
        trainer = Trainer(*made, batches, evaluator, checkpoints, callbacks, *recorded, progress, stop)
        if resume_from is not None:
            checkpoints.restore(resume_from, trainer.parts)
        trainer.train()


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """Train loaded models, as `torch.multiprocessing.spawn(worker_main, nprocs=N, args=(N, config, policy, reference))`
    starts it in N processes, which meet at `config.fsdp_port`. Missing keys get the defaults of `config/`.
    """
    from dpo.models.loading import unwrap
    from dpo.training.porting import joining_processes, plan_worker

    plan = plan_worker(config, world_size)
    with joining_processes(plan, rank) as plan:
        if rank == 0:
            RUN_LOG.begin()
            print(describe(plan), flush=True)
        try:
            work(rank, world_size, plan, (unwrap(policy), unwrap(reference_model)), RUN_LOG.hand_over())
        finally:
            RUN_LOG.close()


if __name__ == "__main__":
    host.set_allocators(os.environ)
    try:
        sys.argv[1:], plan = check_command_line(sys.argv[1:])
        if plan is None:
            main()
        else:
            run_or_exit(plan)
    except KeyboardInterrupt:
        abort()
