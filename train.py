"""Entry point: compose and validate the config, then train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists every key. Exit status: 0 after training; 2 for bad input, after one message; 130 after Ctrl-C (the first
saves, the second does not); 143 after another stop signal; 1 after any other error.
Modules that need torch are imported inside functions, when a run starts, so that bad input is refused in less than a
second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.system.host import open_standard_streams, print_whatever_happens
from dpo.system.signals import Stopped, abort, end_on_stop_signals, ending_on_stop_signals

if __name__ == "__main__":  # before the other imports, which take a while: a signal may come during them
    open_standard_streams()
    print_whatever_happens()
    end_on_stop_signals()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, RunError
from dpo.settings.command_line import check_command_line, exit_on, place_job
from dpo.settings.files import differences, load_defaults, options_in, with_defaults
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_problems, find_warnings, raise_problems
from dpo.system.host import (
    is_rank_0,
    never_collect_imports,
    set_allocators,
    silence_bitsandbytes,
    without_collecting_garbage,
)
from dpo.system.launching import launch
from dpo.system.redaction import redact
from dpo.system.run_directory import (
    explaining_full_disk,
    get_local_run_dir,
    leaving_nothing_if_refused,
    read_record,
    write_record,
)
from dpo.system.run_log import RunLog

if TYPE_CHECKING:
    from torch import nn

    from dpo.checkpoint.resume import Run
    from dpo.data.preflight import TrainingData

RUN_LOG = RunLog()

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(Path(__file__).parent), replace=True)


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
    if is_rank_0():
        RUN_LOG.begin()
    try:
        if is_rank_0():
            for warning in find_warnings(plan):
                print(f"warning: {warning}")
        run(plan)
    except (InputError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if error.__cause__ is not None:  # a library's error: the log has all of it
            RUN_LOG.add(traceback.format_exc())
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C changes nothing
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)


def run(plan: Plan) -> None:
    """Run a plan without problems, in as many processes as it says."""
    run_dir = plan.run.local_run_dir
    if plan.run.dry_run:
        if is_rank_0():
            dry_run(plan)
        return
    if is_rank_0():
        print(describe(plan), flush=True)  # flushed, as importing torch takes seconds
    try:
        with ending_on_stop_signals(run_dir):
            launch(
                work,
                plan.dims.world_size,
                plan,
                None,
                RUN_LOG.hand_over(),
                process_group=plan.trainer.multi_process,
                port=plan.run.fsdp_port,
                timeout_secs=plan.run.collective_timeout_secs,
            )
    except (RunError, Stopped):  # what is printed about these belongs to the run, also if rank 0 was another process
        if is_rank_0() and read_record(Path(run_dir)):
            RUN_LOG.open(run_dir)
        raise


def describe(plan: Plan) -> str:
    """The settings that differ from the defaults, as text to print."""
    values, options = redact(plan.nested_values()), options_in(plan.values)
    run_dir = values.pop("local_run_dir")
    chosen = ", ".join(f"{group}={option}" for group, option in options.items() if option != "none")
    title = f"{chosen}; settings that differ from the defaults (all will be in {run_dir}/config.yaml):"
    settings = differences(values, load_defaults(**options))
    return "\n".join([title, *(f"  {setting}" for setting in settings)])


def dry_run(plan: Plan) -> None:
    """Print what a run would do, and the memory it needs.

    Raises InputError wherever the run would. Writes nothing.
    """
    from dpo.checkpoint.resume import check_inputs, fix_template_date, look_at_run
    from dpo.models.loading import check_parts, find_model_config
    from dpo.models.scoring import load_scorer
    from dpo.reporting.table import LOGS
    from dpo.training.evaluation import notes_on_first_work
    from dpo.training.memory import print_prediction
    from dpo.training.optimization import notes_on_scaling
    from preference_datasets import check_columns

    resume_point = look_at_run(plan, LOGS)
    plan = fix_template_date(plan, resume_point)
    check_columns(plan)
    check_parts(plan)
    scorer_notes = list(load_scorer(plan, "meta", rows=1).notes) if plan.online else []
    set_up_torch(plan)  # attention's kernel depends on these settings, and the predicted memory on the kernel
    data = read_data(plan)
    check_inputs(resume_point, data, find_model_config(plan))
    if resume_point is None:  # a resumed run keeps its first learning rate, and its first update is done
        lr_notes = notes_on_scaling(plan.training, plan.dims.data_size)
        notes = [*lr_notes, *scorer_notes, *notes_on_first_work(plan, data)]
    else:
        notes = scorer_notes
    for note in notes:
        print(note)
    print_prediction(plan, data)


# --- the work of one process -----------------------------------------------------------------------------------------


def work(rank: int, world_size: int, plan: Plan, models: tuple[Any, Any] | None = None, printed: str = "") -> None:
    """Open the run's directory, then load and train, in one process.

    `models` are the policy and the reference, if they are loaded already. `printed` is for the run's log.
    """
    if rank == 0:
        RUN_LOG.begin(printed)
    run_dir = plan.run.local_run_dir
    with ending_on_stop_signals(run_dir), explaining_full_disk(run_dir):
        with without_collecting_garbage():
            import trainers  # noqa: F401  (`train` uses it; imported here, as that takes seconds)
            from dpo.checkpoint.resume import open_run
            from dpo.reporting.table import LOGS
        if models is None:  # the caller's models may be in reference cycles, which must stay collectable
            never_collect_imports()
        with leaving_nothing_if_refused(Path(run_dir)) if rank == 0 else nullcontext():
            run = open_run(plan, LOGS) if rank == 0 else None
            with run.lock if run else nullcontext():  # released, as a caller of worker_main may start another run
                work_in_run_dir(run, rank, plan, models)


def work_in_run_dir(run: Run | None, rank: int, plan: Plan, models: tuple[Any, Any] | None) -> None:
    """Load, train and export, in the run's directory.

    `run` is None on all ranks but 0, which has locked the directory.
    """
    silence_bitsandbytes()  # before `transformers.set_seed`, which imports PEFT
    import transformers

    from dpo.checkpoint.files import MANIFEST
    from dpo.checkpoint.resume import check_inputs, find_model_facts, fix_template_date
    from dpo.models.loading import check_model, find_model_config
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.waiting import check_alike, meet_rank_0
    from preference_datasets import check_columns

    meet_rank_0("the run's directory")  # rank 0 alone opens the directory, and may copy a checkpoint and logs into it
    resume_from = from_rank_0(run.checkpoint if run else None)
    # rank 0's, as the processes of a long start may see different days
    plan = plan.change(
        "chat_template_date",
        from_rank_0(fix_template_date(plan, run.resume_point).chat.template_date if run is not None else None),
    )
    transformers.set_seed(plan.run.seed)  # Python's, numpy's and torch's
    set_up_torch(plan)
    if rank != 0 or not sys.stderr.isatty():  # the libraries' bars would fill a log file
        transformers.utils.logging.disable_progress_bar()
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read if a run imports datasets

    if run is not None and run.resume_point is None:
        check_columns(plan)  # before a model is fetched
        if models is None:
            check_model(plan)  # raises now if weights are missing or of no use, as loading the data may take minutes
    data = read_data(plan, silent=rank != 0)
    model_config = models[0].config if models else find_model_config(plan)
    check_alike({"the model's config.json": json.dumps(find_model_facts(model_config), sort_keys=True)})
    if run is not None:
        check_inputs(run.resume_point, data, model_config)
    if from_rank_0(run is not None and run.is_finished(data.report.updates)):
        if rank == 0:
            print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
        export_last(rank, plan)
        return
    if run is not None:
        saved_at = None if run.checkpoint is None else (run.checkpoint / MANIFEST).stat().st_mtime
        facts = {"processes": plan.dims.world_size, "run": run.id, "continues_from": saved_at}
        write_record(run.directory, plan.nested_values(), **facts)
        data.report.write(run.directory / "preflight.json")
        RUN_LOG.open(run.directory)
    train(rank, plan, data, models, resume_from)
    export_last(rank, plan)
    if rank == 0:
        from dpo.analysis.runs import read_run
        from dpo.analysis.verdict import describe_result

        print(f"run directory: {plan.run.local_run_dir}")
        print(describe_result(read_run(Path(plan.run.local_run_dir), ended=True)), flush=True)


def read_data(plan: Plan, *, silent: bool = False) -> TrainingData:
    """Load the data of a run; warn of an unsuitable warm-up."""
    from dpo.training.optimization import check_optimizer, find_warmup_warnings
    from preference_datasets import load_data

    check_optimizer(plan.training)
    data = load_data(plan, silent=silent)
    if not silent:
        for warning in find_warmup_warnings(plan.training, data.report.updates):
            print(f"warning: {warning}", flush=True)
    return data


def train(rank: int, plan: Plan, data: TrainingData, models: tuple[Any, Any] | None, resume_from: Path | None) -> None:
    """Make the trainer, which loads the models and a checkpoint, and train."""
    from dpo.models.loading import find_following_reference, model_loaders
    from dpo.models.weights import load_archive
    from dpo.training.memory import explain_out_of_memory

    with explain_out_of_memory(plan, data):
        if models is None:
            if rank == 0:
                print(f"loading the weights of {plan.model.name_or_path}", flush=True)
            policy, reference = model_loaders(plan, rank=rank, resume_from=resume_from)
        else:
            policy, reference = models
            if resume_from is not None and plan.lora is None:  # the trainer itself loads an adapter
                load_archive(policy, str(resume_from))
            saved_reference = find_following_reference(plan, resume_from)
            if reference is not None and saved_reference:
                load_archive(reference, saved_reference)
        trainer = find_trainer(plan)(
            policy,
            OmegaConf.create(plan.nested_values()),
            plan.run.seed,
            plan.run.local_run_dir,
            reference,
            rank,
            plan.dims.world_size,
            data=data,
            resume_from=resume_from,
            plan=plan,
        )
        trainer.train()


def export_last(rank: int, plan: Plan) -> None:
    """Export a complete run's last checkpoint, if wanted and missing.

    Rank 0 writes the export into `hf` of the checkpoint, and prints a warning if the export fails.
    """
    if not plan.run.export or plan.run.debug:
        return
    from dpo.system.waiting import after_rank_0, leave_together

    after_rank_0("the export", lambda: _export_latest(plan) if rank == 0 else None)
    leave_together()


def _export_latest(plan: Plan) -> None:
    from dpo.checkpoint.files import EXPORTED
    from dpo.models.export import export

    latest = Path(plan.run.local_run_dir) / "LATEST"
    if not latest.exists() or (latest / EXPORTED).exists():
        return
    try:
        is_trusted = plan.model.trust_remote_code  # decided by this run's command line, not by the checkpoint
        out = export(latest, latest.resolve() / EXPORTED, trust_remote_code=is_trusted, verify=False)
        print(f"exported {out}", flush=True)
    except Exception as error:  # no error of an export may fail a run that is complete
        reason = " ".join(str(error).split())  # on one line
        if not isinstance(error, (InputError, RunError)):
            reason = f"{type(error).__name__} {reason}"
        command = f"python -m scripts.export {plan.run.local_run_dir} DIR"
        print(
            f"warning: the run is complete, but its export failed: {reason}; to export it, run {command}",
            file=sys.stderr,
        )


def find_trainer(plan: Plan) -> Any:
    """The plan's trainer class. Imports torch."""
    import trainers

    return trainers.TRAINERS[plan.trainer.name]


def set_up_torch(plan: Plan) -> None:
    from dpo.system import arithmetic

    compiles = plan.training.compile or plan.model.attn_implementation == "flex_attention"
    arithmetic.set_up_torch(deterministic=plan.run.deterministic, compiles=compiles)


# --- from Python, as in the reference implementation ------------------------------------------------------------------


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """Train loaded models, in this process or together with others.

    It is called as in the reference implementation: `torch.multiprocessing.spawn(worker_main, nprocs=N, args=(N,
    config, policy, reference))` starts N processes, which meet at `config.fsdp_port`. Keys missing from the config get
    the defaults of `config/`. Raises InputError for a config that cannot run.
    """
    import torch

    from dpo.models.loading import unwrap
    from dpo.parallel.mesh import from_rank_0
    from dpo.settings.rows import store_rows
    from dpo.system.launching import get_open_port, init_distributed

    plan = resolve(with_defaults(store_rows(config)), world_size=world_size)
    if plan.trainer.multi_process:
        plan = plan.change("world_size", world_size)
        if world_size > 1 and plan.run.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError(
                "fsdp_port is null, but all processes need the same port: set config.fsdp_port to "
                "utils.get_open_port() before the processes start"
            )
    raise_problems(plan)
    makes_process_group = plan.trainer.multi_process and not torch.distributed.is_initialized()
    if makes_process_group:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed(rank, world_size, port=plan.run.fsdp_port or get_open_port(), backend=backend)
    # one directory for all ranks: the default name contains the time, which differs between them
    plan = plan.change("local_run_dir", from_rank_0(plan.run.local_run_dir))
    if rank == 0:
        RUN_LOG.begin()
        print(describe(plan), flush=True)
    try:
        work(rank, world_size, plan, (unwrap(policy), unwrap(reference_model)), RUN_LOG.hand_over())
    finally:
        RUN_LOG.close()
    if makes_process_group:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    set_allocators(os.environ)
    try:
        sys.argv[1:], plan = check_command_line(sys.argv[1:])
        if plan is None:
            main()
        else:
            run_or_exit(plan)
    except KeyboardInterrupt:
        abort()
