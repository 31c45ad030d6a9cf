"""Entry point: compose and validate the config, create the run directory, load models, train.

    python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft
    python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST datasets=[hh] exp_name=dpo

`--help` lists every key. Exit status: 0 trained, 2 bad input (one message), 143 stopped by a signal, 1 anything else.
Heavy imports wait until they are needed, so that `--help` and shell completion are quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from command_line import key_of

if TYPE_CHECKING:
    from torch import nn

    from settings import Processes

CONFIG_DIR = Path(__file__).parent / "config"


def _local_run_dir(exp_name: str, local_dirs: list[str]) -> str:
    from utils import get_local_run_dir

    return get_local_run_dir(exp_name, local_dirs)


OmegaConf.register_new_resolver("get_local_run_dir", _local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(Path(__file__).parent), replace=True)


def find_config_problems(config: DictConfig) -> list[str]:
    """Everything wrong with a composed config, with the names that our tables hold today."""
    from health import POLICIES
    from layouts import LAYOUTS
    from losses import LOSSES
    from models import ATTENTION, DTYPES
    from optimization import OPTIMIZERS
    from preference_datasets import BUILT_IN
    from reference_logps import CACHING
    from settings import find_problems
    from trainers import TRAINERS

    choices = {
        "trainer": TRAINERS,
        "tensor_parallel.backend": _tensor_parallel_backends(),
        "optimizer": OPTIMIZERS,
        "loss.name": LOSSES,
        "model.policy_dtype": DTYPES,
        "model.fsdp_policy_mp": DTYPES,
        "model.reference_dtype": DTYPES,
        "model.autocast": ("bfloat16",),
        "model.attn_implementation": ATTENTION,
        "layout": LAYOUTS,
        "cache_reference_logps": CACHING,
        "nan_policy": POLICIES,
    }
    return find_problems(config, choices=choices, data_names=BUILT_IN, processes=count_processes(config))


def _tensor_parallel_backends() -> dict[str, Any]:
    from tensor_parallel_package import PackageTensorParallelTrainer
    from trainers import TensorParallelTrainer

    return {"dtensor": TensorParallelTrainer, "tensor_parallel": PackageTensorParallelTrainer}


def find_trainer(config: DictConfig) -> Any:
    """The class that `trainer` and its backend name; BasicTrainer if they name none."""
    from settings import flatten
    from trainers import TRAINERS, BasicTrainer, TensorParallelTrainer

    values = flatten(config)
    trainer = _named(TRAINERS, values.get("trainer"), BasicTrainer)
    if trainer is TensorParallelTrainer:
        return _named(_tensor_parallel_backends(), values.get("tensor_parallel.backend"), trainer)
    return trainer


def _named(table: dict[str, Any], name: Any, default: Any) -> Any:
    """What a table has under a name that may be anything."""
    return table.get(name, default) if isinstance(name, str) else default


def count_processes(config: DictConfig) -> Processes:
    """How many processes a config runs in, as far as its keys make sense."""
    import torch

    from launching import find_seat
    from settings import COUNT, Processes, flatten

    trainer, seat, gpus, values = find_trainer(config), find_seat(), torch.cuda.device_count(), flatten(config)
    asked, tensor_size = values.get("world_size"), values.get("tensor_parallel_size")
    size = 1
    if seat is not None:
        size = seat.world_size
    elif trainer.multi_process:
        size = asked if COUNT.holds(asked) else max(1, gpus)
    return Processes(
        size,
        trainer.tensor_size(config, size) if tensor_size is None or COUNT.holds(tensor_size) else 1,
        several=trainer.multi_process,
        launched=seat is not None,
        gpus=gpus,
        cuts_layers=trainer.cuts_layers,
        can_sample=trainer.can_sample,
        can_autocast=trainer.can_autocast,
    )


def run(config: DictConfig) -> None:
    """Train as a validated config says, in as many processes as it asks for."""
    from archive import find_archive
    from launching import find_seat, launch
    from loading import check_model
    from memory import dry_run

    OmegaConf.resolve(config)
    config.local_run_dir = os.path.expanduser(config.local_run_dir)
    trainer, world_size = find_trainer(config), count_processes(config).world_size
    if config.dry_run:
        seat = find_seat()
        if seat is None or seat.rank == 0:
            check_model(config, trainer, world_size)
            if config.model.archive is not None:
                find_archive(config.model.archive)
            _set_up_torch(config)  # the memory that attention needs depends on its kernel
            dry_run(config, trainer, world_size)
        return
    launch(
        work,
        world_size,
        config,
        process_group=trainer.multi_process,
        port=config.fsdp_port,
        timeout_secs=config.collective_timeout_secs,
    )


def worker_main(
    rank: int, world_size: int, config: DictConfig, policy: nn.Module, reference_model: nn.Module | None = None
) -> None:
    """The reference's name for what one process does with models that are loaded: join the others, train and save.

    Several are started with `torch.multiprocessing.spawn(worker_main, nprocs=N, args=(N, config, policy, reference))`
    and meet at `config.fsdp_port`. Keys that the config lacks are as in `config/`. Raises InputError for a config that
    cannot run.
    """
    import torch

    from config_files import with_defaults
    from distributed import from_rank_0
    from utils import InputError, get_open_port, init_distributed

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
    from run_directory import explaining_full_disk
    from stopping import on_stop_signals

    with on_stop_signals(_stop_now), explaining_full_disk(config.local_run_dir):
        _work(rank, world_size, config, models)


def _stop_now(number: int) -> None:
    """Asked to stop while there is nothing to save yet."""
    from stopping import Stopped

    raise Stopped


def _work(rank: int, world_size: int, config: DictConfig, models: tuple[Any, Any] | None) -> None:
    import datasets
    import transformers

    from archive import load_archive
    from distributed import from_rank_0
    from loading import model_loaders
    from memory import explaining_out_of_memory
    from preflight import load_data
    from resume import check_data, open_run
    from run_directory import redact, write_record
    from waiting import meet_rank_0

    if rank == 0:
        print(OmegaConf.to_yaml(redact(OmegaConf.to_container(config))), flush=True)
    run = open_run(config) if rank == 0 else None  # and hold it until the end
    meet_rank_0("the run's directory")
    resume_from = from_rank_0(run.checkpoint if run else None)
    transformers.set_seed(config.seed)  # Python's, numpy's and torch's
    _set_up_torch(config)
    if rank != 0 or not sys.stderr.isatty():  # the libraries' bars would fill a log file
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()

    data = load_data(config, silent=rank != 0)
    if run is not None:
        check_data(run, data)
    if from_rank_0(run is not None and run.is_finished(data.report.updates)):
        if rank == 0:
            print(f"{resume_from} is the end of its run: nothing is left to do")
        return
    if run is not None:
        write_record(run.directory, OmegaConf.to_container(config))
        data.report.write(run.directory / "preflight.json")
    trainer_class = find_trainer(config)
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


def _set_up_torch(config: DictConfig) -> None:
    from arithmetic import set_up_torch

    compiles = config.compile or config.model.attn_implementation == "flex_attention"
    set_up_torch(deterministic=config.deterministic, compiles=compiles)


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(config: DictConfig) -> None:
    from launching import find_seat
    from run_directory import redact
    from stopping import STATUS, Stopped
    from utils import InputError, RunError

    sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if sweeps and find_seat() is not None:
            raise InputError(
                "a sweep (-m) starts its own processes, one job after the other: run it without a launcher"
            )
        _exit_on(find_config_problems(config))
        if sweeps:
            _begin_job(config, HydraConfig.get())
        run(config)
        for job in JOBS[-1:]:
            job.finished = True
    except InputError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(1)
    except Stopped:
        print("stopped, as asked; with the same local_run_dir resume=auto goes on", file=sys.stderr)
        sys.exit(STATUS)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _exit_on(problems: list[str]) -> None:
    if problems:
        from run_directory import redact

        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # every rank finds the same
            print(
                "\n".join(["bad configuration:", *(f"  - {redact(problem)}" for problem in problems)]), file=sys.stderr
            )
        sys.exit(2)


JOBS: list[Any] = []  # of the sweep that this process runs


def _begin_job(config: DictConfig, hydra_config: Any) -> None:
    """Give a job of a sweep a directory that names what it overrides: inside the one that was given for the sweep, or,
    under `local_dirs`, one of its own."""
    from sweeps import Job

    constant = set(hydra_config.job.config.override_dirname.exclude_keys)
    overrides = {override: key_of(override) for override in hydra_config.overrides.task}
    job = Job(hydra_config.job.num, [override for override, key in overrides.items() if key not in constant])
    given = "local_run_dir" in overrides.values()
    config.local_run_dir = f"{os.path.expanduser(config.local_run_dir)}{'/' if given else '_'}{job.name}"
    job.directory = Path(config.local_run_dir)
    job.folder = job.directory.parent if given else Path(hydra_config.sweep.dir)
    if not config.dry_run:
        JOBS.append(job)


def _report_sweep() -> None:
    """The table at a sweep's end, whatever ended it; not of jobs that a launcher of Hydra's ran elsewhere."""
    if JOBS:
        from sweeps import report

        report(JOBS, JOBS[0].folder)


def check_command_line(arguments: list[str]) -> list[str]:
    """The arguments as Hydra takes them. Exits with status 2 and a sentence for everything that is wrong with them."""
    from command_line import find_problems, parse
    from config_files import help_text

    try:
        line = parse(arguments)
    except ValueError as error:
        _exit_on([str(error)])
        raise
    if line.wants_help:
        print(help_text())
        sys.exit(0)
    _exit_on(find_problems(line, CONFIG_DIR, find_config_problems))
    return line.arguments


def set_allocators(environ: MutableMapping[str, str]) -> None:
    """What torch is to read from the environment when it is imported, unless the user has set it."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large CPU tensors in huge pages: fewer page faults
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # CUDA's memory does not fragment, though shapes change all the time
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


if __name__ == "__main__":
    set_allocators(os.environ)
    sys.argv[1:] = check_command_line(sys.argv[1:])
    try:
        main()
    finally:
        _report_sweep()
