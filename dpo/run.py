"""A run of a validated config: its processes, and the work of each.

Modules that need torch or transformers are imported inside functions: `train.py` refuses bad input without them, and
the parent of several processes needs no trainer. `find_class` returns the class of a plan's trainer, as the package
contains no trainers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError, RunError
from dpo.settings.files import differences, load_defaults, options_in, with_defaults
from dpo.settings.places import place_datasets
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_config_problems
from dpo.system.launching import launch
from dpo.system.library_logs import silence_bitsandbytes
from dpo.system.malloc import never_collect_imports, without_collecting_garbage
from dpo.system.rank_env import is_rank_0
from dpo.system.redaction import redact
from dpo.system.signals import ending_on_stop_signals

if TYPE_CHECKING:
    from torch import nn

    from dpo.checkpoint.resume import Run

FindClass = Callable[[Plan], Any]


def run(config: DictConfig, plan: Plan, find_class: FindClass) -> None:
    """Train according to a validated config, in as many processes as it asks for."""
    OmegaConf.resolve(config)
    place_datasets(config)
    config.local_run_dir = os.path.expanduser(config.local_run_dir)
    if is_rank_0() and not config.dry_run:
        print(describe(config), flush=True)  # importing torch takes seconds
    if config.dry_run:
        if is_rank_0():
            _try_out(config, plan, find_class)
        return
    with ending_on_stop_signals(config.local_run_dir):
        launch(
            work,
            plan.dims.world_size,
            *(config, plan, find_class),
            process_group=plan.trainer.multi_process,
            port=config.fsdp_port,
            timeout_secs=config.collective_timeout_secs,
        )


def _try_out(config: DictConfig, plan: Plan, find_class: FindClass) -> None:
    """Print the work and the memory of a run. Raises InputError as the run would, and writes nothing."""
    from dpo.checkpoint.resume import check_inputs, look_at_run
    from dpo.models.layouts import Padded
    from dpo.models.loading import check_parts, find_model_config
    from dpo.models.scoring import check_scorer
    from dpo.training.batches import Batches
    from dpo.training.first_update import FirstUpdate
    from dpo.training.memory import dry_run
    from dpo.training.optimization import notes_on_scaling

    found = look_at_run(config)
    check_parts(config, plan)
    notes = check_scorer(config) if plan.online else ()
    _set_up_torch(config)  # the memory that attention needs depends on its kernel
    data = find_class(plan).load_data(config)
    check_inputs(found, data, find_model_config(config))
    if found is None:  # a resumed run keeps the rate it began with
        for line in notes_on_scaling(config, plan.dims.data_size):
            print(line)
    for note in notes:
        print(note)
    if found is None:
        sizes = Batches(config, data, Padded(), seed=config.seed).test_sizes()  # whatever the layout
        for line in FirstUpdate.of(config, plan, data, sizes).tell():
            print(line)
    dry_run(config, plan, data)


def work_with_models(
    rank: int,
    world_size: int,
    config: DictConfig,
    find_class: FindClass,
    policy: nn.Module,
    reference_model: nn.Module | None,
) -> None:
    """Join the other processes, train and save, in one process with loaded models (`train.worker_main`).

    Several are started with `torch.multiprocessing.spawn(worker_main, nprocs=N, args=(N, config, policy, reference))`
    and meet at `config.fsdp_port`. Keys that the config lacks get the defaults of `config/`. Raises InputError for a
    config that cannot run.
    """
    import torch

    from dpo.models.loading import unwrap
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.process_group import get_open_port, init_distributed

    config = with_defaults(config)
    models = unwrap(policy), unwrap(reference_model)
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
    work(rank, world_size, config, plan, find_class, models)
    if joins:
        torch.distributed.destroy_process_group()


def work(
    rank: int,
    world_size: int,
    config: DictConfig,
    plan: Plan,
    find_class: FindClass,
    models: tuple[Any, Any] | None = None,
) -> None:
    """Find the run's state, load data and models, and train, in one process.

    `models` are the policy and the reference, if they are loaded already.
    """
    from dpo.system.run_directory import explaining_full_disk

    run_dir = config.local_run_dir
    with ending_on_stop_signals(run_dir), explaining_full_disk(run_dir):
        _work(rank, config, plan, find_class, models)


def _work(rank: int, config: DictConfig, plan: Plan, find_class: FindClass, models: tuple[Any, Any] | None) -> None:
    with without_collecting_garbage():
        from dpo.checkpoint.resume import open_run
        from dpo.reporting.table import LOGS

        trainer_class = find_class(plan)
    if models is None:  # given models would not be freed if reference cycles hold them
        never_collect_imports()

    run = open_run(config, LOGS) if rank == 0 else None
    try:
        _work_in(run, rank, config, plan, trainer_class, models)
    finally:
        if run is not None:
            run.lock.close()  # the caller of worker_main may go on


def _work_in(
    run: Run | None, rank: int, config: DictConfig, plan: Plan, trainer_class: Any, models: tuple[Any, Any] | None
) -> None:
    """The rest of `work`, in the run's directory, which rank 0 has opened and locked."""
    silence_bitsandbytes()  # set_seed's module imports PEFT
    from transformers import set_seed

    from dpo.checkpoint.resume import check_inputs
    from dpo.models.loading import find_model_config, find_weights
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.run_directory import write_record
    from dpo.system.waiting import meet_rank_0

    meet_rank_0("the run's directory")
    resume_from = from_rank_0(run.checkpoint if run else None)
    set_seed(config.seed)  # Python's, numpy's and torch's
    _set_up_torch(config)
    if rank != 0 or not sys.stderr.isatty():  # the libraries' bars would fill a log file
        _hide_progress_bars()

    if run is not None and run.found is None and models is None:
        find_weights(config, plan)  # before the data, which may take minutes
    data = trainer_class.load_data(config, silent=rank != 0)
    if run is not None:
        check_inputs(run.found, data, models[0].config if models else find_model_config(config))
    if from_rank_0(run is not None and run.is_finished(data.report.updates)):
        if rank == 0:
            print(f"{resume_from}: this run is already complete; a larger n_epochs or n_examples extends it")
        _export(rank, config)
        return
    if run is not None:
        write_record(run.directory, OmegaConf.to_container(config), processes=plan.dims.world_size)
        data.report.write(run.directory / "preflight.json")
    _train(rank, config, plan, trainer_class, data, models, resume_from)
    _export(rank, config)
    if rank == 0:
        print(f"run directory: {config.local_run_dir}")


def _train(
    rank: int,
    config: DictConfig,
    plan: Plan,
    trainer_class: Any,
    data: Any,
    models: tuple[Any, Any] | None,
    resume_from: Any,
) -> None:
    """Load the models, unless they are given, and train."""
    from dpo.models.loading import find_following, model_loaders
    from dpo.models.weights import load_archive
    from dpo.training.memory import explaining_out_of_memory

    with explaining_out_of_memory(config, plan, data):
        if models is None:
            if rank == 0:
                print(f"loading the weights of {config.model.name_or_path}", flush=True)
            policy, reference = model_loaders(config, plan, rank=rank, resume_from=resume_from)
        else:
            policy, reference = models
            if resume_from is not None and config.lora.name == "none":  # else its adapter is loaded by the trainer
                load_archive(policy, str(resume_from))
            if reference is not None and (following := find_following(plan, resume_from)):
                load_archive(reference, following)
        trainer = trainer_class(
            policy, config, config.seed, config.local_run_dir, reference, rank, plan.dims.world_size, data, resume_from
        )
        if rank == 0 and config.wandb.enabled and not config.debug:  # wandb's log has only output since its start
            print(f"training on\n{data.report.tell(config.batch_size)}", flush=True)
        trainer.train()


def _export(rank: int, config: DictConfig) -> None:
    """Export a complete run's last checkpoint to its `hf`, on rank 0, if wanted and not done yet.

    Prints a warning if that fails.
    """
    if not config.export or config.debug:
        return
    from dpo.checkpoint.files import EXPORTED
    from dpo.models.export import export
    from dpo.system.waiting import after_rank_0, leave_together

    def write() -> None:
        latest = Path(config.local_run_dir) / "LATEST"
        if rank != 0 or not latest.exists() or (latest / EXPORTED).exists():
            return
        try:
            trusted = config.model.trust_remote_code  # by this run's command line
            out = export(latest, latest.resolve() / EXPORTED, trust_remote_code=trusted, verify=False)
            print(f"exported {out}", flush=True)
        except Exception as error:  # any error, as the run is complete
            known = isinstance(error, (InputError, RunError))
            reason = " ".join(f"{'' if known else type(error).__name__} {error}".split())
            again = f"python -m scripts.export {config.local_run_dir} DIR"
            print(f"warning: the run is complete, but not exported: {reason}; {again} does it later", file=sys.stderr)

    after_rank_0("the export", write)
    leave_together()


def _hide_progress_bars() -> None:
    """Hide the progress bars of the libraries' downloads and conversions."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read if a run imports datasets


def describe(config: DictConfig) -> str:
    """A config's differences from the defaults in `config/`, and the file with the whole config."""
    values = redact(OmegaConf.to_container(config))
    run_dir = values.pop("local_run_dir")
    shown = differences(values, load_defaults(**options_in(config)))
    options = {group: option for group, option in options_in(config).items() if option != "none"}
    chosen = ", ".join(f"{group}={option}" for group, option in options.items())
    title = f"{chosen}; what differs from the defaults (all of it: {run_dir}/config.yaml):"
    return "\n".join([title, *(f"  {setting}" for setting in shown)])


def _set_up_torch(config: DictConfig) -> None:
    from dpo.system.arithmetic import set_up_torch

    compiles = config.compile or config.model.attn_implementation == "flex_attention"
    set_up_torch(deterministic=config.deterministic, compiles=compiles)
