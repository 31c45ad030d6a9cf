"""A run of a validated config: its processes, and what each of them does."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dpo.settings.resolution import count_processes, find_config_problems, find_trainer

if TYPE_CHECKING:
    from torch import nn


def run(config: DictConfig) -> None:
    """Train as a validated config says, in as many processes as it asks for."""
    from dpo.system.launching import launch
    from dpo.system.rank_env import find_rank_env

    OmegaConf.resolve(config)
    config.local_run_dir = os.path.expanduser(config.local_run_dir)
    trainer, world_size = find_trainer(config), count_processes(config).world_size
    if config.dry_run:
        rank_env = find_rank_env()
        if rank_env is None or rank_env.rank == 0:
            _try_out(config, trainer, world_size)
        return
    launch(
        work,
        world_size,
        config,
        process_group=trainer.multi_process,
        port=config.fsdp_port,
        timeout_secs=config.collective_timeout_secs,
    )


def _try_out(config: DictConfig, trainer: Any, world_size: int) -> None:
    """Say what a run would do and need. Raises InputError as the run would, and writes nothing."""
    from dpo.checkpoint.resume import check_inputs, look_at_run
    from dpo.models.loading import check_parts, find_model_config
    from dpo.training.memory import dry_run

    found = look_at_run(config)
    check_parts(config, trainer, world_size)
    _set_up_torch(config)  # the memory that attention needs depends on its kernel
    data = trainer.load_data(config)
    check_inputs(found, data, find_model_config(config))
    dry_run(config, trainer, world_size, data)


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """The reference's name for what one process does with models that are loaded: join the others, train and save.

    Several are started with `torch.multiprocessing.spawn(worker_main, nprocs=N, args=(N, config, policy, reference))`
    and meet at `config.fsdp_port`. Keys that the config lacks are as in `config/`. Raises InputError for a config that
    cannot run.
    """
    import torch

    from dpo.errors import InputError
    from dpo.parallel.mesh import from_rank_0
    from dpo.settings.files import with_defaults
    from dpo.system.process_group import get_open_port, init_distributed

    config = with_defaults(config)
    trainer = find_trainer(config)
    if trainer.multi_process:
        config.world_size = world_size
        if world_size > 1 and config.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError("fsdp_port is null: give all processes the same, such as utils.get_open_port()")
    if problems := find_config_problems(config):
        raise InputError("; ".join(problems))
    OmegaConf.resolve(config)
    joins = trainer.multi_process and not torch.distributed.is_initialized()
    if joins:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed(rank, world_size, port=config.fsdp_port or get_open_port(), backend=backend)
    config.local_run_dir = from_rank_0(config.local_run_dir)  # which has the time in it, unless it was given
    work(rank, world_size, config, (policy, reference_model))
    if joins:
        torch.distributed.destroy_process_group()


def work(rank: int, world_size: int, config: DictConfig, models: tuple[Any, Any] | None = None) -> None:
    """What one process does: find its run's state, load data and models (or take the policy and reference that are
    given), train."""
    from dpo.system.run_directory import explaining_full_disk
    from dpo.system.signals import Stopped, on_stop_signals

    try:
        with on_stop_signals(_stop_now), explaining_full_disk(config.local_run_dir):
            _work(rank, world_size, config, models)
    except Stopped:
        if rank == 0:
            goes_on = f"local_run_dir={config.local_run_dir} resume=auto"
            print(f"stopped, as asked; to go on: the same command with {goes_on}", file=sys.stderr, flush=True)
        raise


def _stop_now(number: int) -> None:
    """Asked to stop while there is nothing to save yet."""
    from dpo.system.signals import Stopped

    raise Stopped(number)


def _work(rank: int, world_size: int, config: DictConfig, models: tuple[Any, Any] | None) -> None:
    import datasets
    import transformers

    from dpo.checkpoint.resume import check_inputs, open_run
    from dpo.models.loading import find_model_config, model_loaders
    from dpo.models.weights import load_archive
    from dpo.parallel.mesh import from_rank_0
    from dpo.system.run_directory import write_record
    from dpo.system.waiting import meet_rank_0
    from dpo.training.memory import explaining_out_of_memory

    if rank == 0:
        print(describe(config), flush=True)
    run = open_run(config) if rank == 0 else None  # and hold it until the end
    meet_rank_0("the run's directory")
    resume_from = from_rank_0(run.checkpoint if run else None)
    transformers.set_seed(config.seed)  # Python's, numpy's and torch's
    _set_up_torch(config)
    if rank != 0 or not sys.stderr.isatty():  # the libraries' bars would fill a log file
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()

    trainer_class = find_trainer(config)
    data = trainer_class.load_data(config, silent=rank != 0)
    if run is not None:
        check_inputs(run.found, data, models[0].config if models else find_model_config(config))
    if from_rank_0(run is not None and run.is_finished(data.report.updates)):
        if rank == 0:
            print(f"{resume_from} is the end of its run: nothing is left to do")
        return
    if run is not None:
        write_record(run.directory, OmegaConf.to_container(config))
        data.report.write(run.directory / "preflight.json")
    with explaining_out_of_memory(config, trainer_class, world_size, data):
        if models is None:
            policy, reference = model_loaders(config, trainer_class, rank, world_size, resume_from)
        else:
            policy, reference = models
            if resume_from is not None:
                load_archive(policy, str(resume_from))
        trainer = trainer_class(
            policy, config, config.seed, config.local_run_dir, reference, rank, world_size, data, resume_from
        )
        if rank == 0 and config.wandb.enabled and not config.debug:  # which has what is printed since it was started
            print(f"training on\n{data.report.tell(config.batch_size)}", flush=True)
        trainer.train()
    if rank == 0:
        print(f"run directory: {config.local_run_dir}")


def describe(config: DictConfig) -> str:
    """What a config has that `config/` has not, and where the rest is written down."""
    from dpo.reporting.terminal import differences
    from dpo.settings.files import defaults_of
    from dpo.system.redaction import redact

    values = redact(OmegaConf.to_container(config))
    run_dir = values.pop("local_run_dir")
    shown = differences(values, defaults_of(config.loss.name))
    title = f"loss={config.loss.name}; what differs from the defaults (all of it: {run_dir}/config.yaml):"
    return "\n".join([title, *(f"  {setting}" for setting in shown)])


def _set_up_torch(config: DictConfig) -> None:
    from dpo.system.arithmetic import set_up_torch

    compiles = config.compile or config.model.attn_implementation == "flex_attention"
    set_up_torch(deterministic=config.deterministic, compiles=compiles)
