"""Entry point: compose and validate the config, then train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists every key. Exit status: 0 trained, 2 bad input (one message), 130 Ctrl-C (the first saves, the second
does not), 143 stopped by another signal, 1 anything else.
Modules that need torch are imported inside functions, when a run starts: bad input is refused in less than a second.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.system.host import open_standard_streams, print_whatever_happens
from dpo.system.signals import Stopped, abort, before_end, end_on_stop_signals, ending_on_stop_signals

if __name__ == "__main__":  # before the other imports, which take a while
    open_standard_streams()
    print_whatever_happens()
    end_on_stop_signals()

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, RunError
from dpo.settings.command_line import check_command_line, exit_on
from dpo.settings.files import differences, load_defaults, options_in, with_defaults
from dpo.settings.places import place_datasets
from dpo.settings.plan import Plan, resolve
from dpo.settings.sweeps import Sweep
from dpo.settings.validation import find_config_problems, find_warnings
from dpo.system.host import (
    is_rank_0,
    never_collect_imports,
    set_allocators,
    silence_bitsandbytes,
    without_collecting_garbage,
)
from dpo.system.launching import find_rank_env, launch
from dpo.system.redaction import redact
from dpo.system.run_directory import explaining_full_disk, get_local_run_dir, write_record

if TYPE_CHECKING:
    from torch import nn

    from dpo.checkpoint.resume import Run
    from dpo.data.preflight import TrainingData

SWEEP = Sweep()

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(Path(__file__).parent), replace=True)


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(config: DictConfig) -> None:
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if is_sweep and find_rank_env() is not None:
            raise InputError(
                "a sweep (-m) starts its own processes, one job after the other: run it without a launcher"
            )
        plan = resolve(config)
        exit_on(find_config_problems(config, plan))
        if is_rank_0():
            for warning in find_warnings(config, plan):
                print(f"warning: {warning}")
        if is_sweep:
            SWEEP.begin_job(config, HydraConfig.get())
        run(config)
        SWEEP.end_job()
    except (InputError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C changes nothing
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)


def run(config: DictConfig) -> None:
    """Train by a validated config, in the processes it asks for."""
    OmegaConf.resolve(config)  # here, once: the run's directory contains the time
    place_datasets(config)
    config.local_run_dir = os.path.expanduser(config.local_run_dir)
    plan = resolve(config)
    if config.dry_run:
        if is_rank_0():
            dry_run(plan)
        return
    if is_rank_0():
        print(describe(config), flush=True)  # importing torch takes seconds
    with ending_on_stop_signals(config.local_run_dir):
        launch(
            work,
            plan.dims.world_size,
            config,
            process_group=plan.trainer.multi_process,
            port=config.fsdp_port,
            timeout_secs=config.collective_timeout_secs,
        )


def describe(config: DictConfig) -> str:
    """A config's differences from the defaults, and where all of it is."""
    values, options = redact(OmegaConf.to_container(config)), options_in(config)
    run_dir = values.pop("local_run_dir")
    chosen = ", ".join(f"{group}={option}" for group, option in options.items() if option != "none")
    title = f"{chosen}; what differs from the defaults (all of it: {run_dir}/config.yaml):"
    return "\n".join([title, *(f"  {setting}" for setting in differences(values, load_defaults(**options)))])


def dry_run(plan: Plan) -> None:
    """Print the work and the memory of a run.

    Raises InputError as the run would, and writes nothing.
    """
    from dpo.checkpoint.resume import check_inputs, look_at_run
    from dpo.models.layouts import Padded
    from dpo.models.loading import check_parts, find_model_config
    from dpo.models.scoring import check_scorer
    from dpo.training.batches import Batches
    from dpo.training.first_update import FirstUpdate
    from dpo.training.memory import print_prediction
    from dpo.training.optimization import notes_on_scaling

    resume_point = look_at_run(plan)
    check_parts(plan)
    notes = list(check_scorer(plan)) if plan.online else []
    set_up_torch(plan)  # the memory that attention needs depends on its kernel
    data = read_data(plan)
    check_inputs(resume_point, data, find_model_config(plan))
    if resume_point is None:  # a resumed run keeps the rate it began with, and is past its first update
        sizes = Batches(plan, data, Padded(), seed=plan.run.seed).test_sizes()  # they depend on no layout
        scaling = notes_on_scaling(plan.training, plan.dims.data_size)
        notes = [*scaling, *notes, *FirstUpdate.of(plan, data, sizes).messages]
    for note in notes:
        print(note)
    print_prediction(plan, data)


# --- the work of one process -----------------------------------------------------------------------------------------


def work(rank: int, world_size: int, config: DictConfig, models: tuple[Any, Any] | None = None) -> None:
    """Open the run, then load and train, in one process.

    `models` are the policy and the reference, if they are loaded already.
    """
    with ending_on_stop_signals(config.local_run_dir), explaining_full_disk(config.local_run_dir):
        plan = resolve(config, world_size=world_size)
        with without_collecting_garbage():
            from dpo.checkpoint.resume import open_run
            from dpo.reporting.table import LOGS

            find_trainer(plan)  # for its imports
        if models is None:  # given models would not be freed if reference cycles hold them
            never_collect_imports()
        run = open_run(plan, LOGS) if rank == 0 else None
        with run.lock if run else nullcontext():  # released here, as a caller of worker_main may go on to another run
            work_in(run, rank, config, plan, models)


def work_in(run: Run | None, rank: int, config: DictConfig, plan: Plan, models: tuple[Any, Any] | None) -> None:
    """The rest of `work`, in the directory that rank 0 has locked."""
    silence_bitsandbytes()  # set_seed's module imports PEFT
    from transformers import set_seed

    from dpo.checkpoint.resume import check_inputs
    from dpo.models.loading import find_model_config, find_weights
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.waiting import meet_rank_0

    meet_rank_0("the run's directory")  # rank 0 alone opens it, and may copy a checkpoint and logs into it
    resume_from = from_rank_0(run.checkpoint if run else None)
    set_seed(plan.run.seed)  # Python's, numpy's and torch's
    set_up_torch(plan)
    if rank != 0 or not sys.stderr.isatty():  # the libraries' bars would fill a log file
        hide_progress_bars()

    if run is not None and run.found is None and models is None:
        find_weights(plan)  # missing ones are refused before the data is loaded, which may take minutes
    data = read_data(plan, silent=rank != 0)
    if run is not None:
        check_inputs(run.found, data, models[0].config if models else find_model_config(plan))
    if from_rank_0(run is not None and run.is_finished(data.report.updates)):
        if rank == 0:
            print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
        export_last(rank, plan)
        return
    if run is not None:
        write_record(run.directory, OmegaConf.to_container(config), processes=plan.dims.world_size)
        data.report.write(run.directory / "preflight.json")
    train(rank, config, plan, data, models, resume_from)
    export_last(rank, plan)
    if rank == 0:
        print(f"run directory: {plan.run.local_run_dir}")


def read_data(plan: Plan, *, silent: bool = False) -> TrainingData:
    """Load the data of a run, and warn about its warm-up."""
    from dpo.training.optimization import find_warmup_warnings
    from preference_datasets import load_data

    data = load_data(plan, silent=silent)
    if not silent:
        for warning in find_warmup_warnings(plan.training, data.report.updates):
            print(f"warning: {warning}", flush=True)
    return data


def train(
    rank: int,
    config: DictConfig,
    plan: Plan,
    data: TrainingData,
    models: tuple[Any, Any] | None,
    resume_from: Path | None,
) -> None:
    from dpo.models.loading import find_following, model_loaders
    from dpo.models.weights import load_archive
    from dpo.training.memory import explaining_out_of_memory

    with explaining_out_of_memory(plan, data):
        if models is None:
            if rank == 0:
                print(f"loading the weights of {plan.model.name_or_path}", flush=True)
            policy, reference = model_loaders(plan, rank=rank, resume_from=resume_from)
        else:
            policy, reference = models
            if resume_from is not None and plan.lora is None:  # the trainer itself loads an adapter
                load_archive(policy, str(resume_from))
            if reference is not None and (following := find_following(plan, resume_from)):
                load_archive(reference, following)
        trainer = find_trainer(plan)(
            policy,
            config,
            plan.run.seed,
            plan.run.local_run_dir,
            reference,
            rank,
            plan.dims.world_size,
            data=data,
            resume_from=resume_from,
        )
        # again, as W&B, which the trainer has started, logs only the output from then on
        if rank == 0 and plan.wandb.enabled and not plan.run.debug:
            print(f"training on\n{data.report.describe(plan.data.batch_size)}", flush=True)
        trainer.train()


def export_last(rank: int, plan: Plan) -> None:
    """Export a complete run's last checkpoint, if wanted and not yet done.

    Rank 0 writes it to the checkpoint's `hf`, and prints a warning if that fails.
    """
    if not plan.run.export or plan.run.debug:
        return
    from dpo.checkpoint.files import EXPORTED
    from dpo.models.export import export
    from dpo.system.waiting import after_rank_0, leave_together

    def write() -> None:
        latest = Path(plan.run.local_run_dir) / "LATEST"
        if rank != 0 or not latest.exists() or (latest / EXPORTED).exists():
            return
        try:
            trusted = plan.model.trust_remote_code  # by this run's command line
            out = export(latest, latest.resolve() / EXPORTED, trust_remote_code=trusted, verify=False)
            print(f"exported {out}", flush=True)
        except Exception as error:  # any error, as the run is complete
            name = "" if isinstance(error, (InputError, RunError)) else f"{type(error).__name__} "
            reason = " ".join(f"{name}{error}".split())  # on one line
            command = f"python -m scripts.export {plan.run.local_run_dir} DIR"
            print(f"warning: the run is complete, but not exported: {reason}; {command} does it later", file=sys.stderr)

    after_rank_0("the export", write)
    leave_together()


def find_trainer(plan: Plan) -> Any:
    import trainers

    return trainers.TRAINERS[plan.trainer.name]


def hide_progress_bars() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read if a run imports datasets


def set_up_torch(plan: Plan) -> None:
    from dpo.system import arithmetic

    compiles = plan.training.compile or plan.model.attn_implementation == "flex_attention"
    arithmetic.set_up_torch(deterministic=plan.run.deterministic, compiles=compiles)


# --- from Python, as in the reference implementation ------------------------------------------------------------------


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """Train loaded models, in this process or together with others.

    It is the reference implementation's function. Processes are started with `torch.multiprocessing.spawn(worker_main,
    nprocs=N, args=(N, config, policy, reference))` and meet at `config.fsdp_port`. Keys that the config lacks get the
    defaults of `config/`. Raises InputError for a config that cannot run.
    """
    import torch

    from dpo.models.loading import unwrap
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.launching import get_open_port, init_distributed

    config = with_defaults(config)
    plan = resolve(config, world_size=world_size)
    if plan.trainer.multi_process:
        config.world_size = world_size
        if world_size > 1 and config.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError("fsdp_port is null: give all processes the same, such as utils.get_open_port()")
    if problems := find_config_problems(config, plan):
        raise InputError("; ".join(problems))
    OmegaConf.resolve(config)
    place_datasets(config)
    joins = plan.trainer.multi_process and not torch.distributed.is_initialized()
    if joins:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed(rank, world_size, port=config.fsdp_port or get_open_port(), backend=backend)
    config.local_run_dir = from_rank_0(config.local_run_dir)  # contains the time, unless it was given
    if rank == 0:
        print(describe(config), flush=True)
    work(rank, world_size, config, (unwrap(policy), unwrap(reference_model)))
    if joins:
        torch.distributed.destroy_process_group()


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
