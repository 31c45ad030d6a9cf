"""The reference code's way to a trainer: a constructor that gets models and a config.

It calls what `train.py` calls, in the same order (docs/porting.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dpo.checkpoint.saver import Checkpoints
from dpo.data.preflight import TrainingData
from dpo.errors import InputError
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.reporting.events import Callbacks, RunContext
from dpo.reporting.table import CALLBACKS
from dpo.reporting.terminal import Progress
from dpo.settings.plan import Plan, resolve
from dpo.settings.rows import store_rows
from dpo.settings.validation import find_problems, find_value_problems, raise_problems
from dpo.system.launching import get_open_port, init_distributed
from dpo.training.evaluation import Evaluator
from dpo.training.objective import make_objective
from dpo.training.online import make_batches
from dpo.training.optimization import Schedule
from dpo.training.setting_up import (
    describe_run,
    make_policy,
    make_policy_optimizer,
    make_reference,
    settle_frozen_weights,
)
from dpo.training.stop import StopRequest


def complete_config(
    config: DictConfig, *, trainer: str, seed: int, run_dir: str | Path, world_size: int
) -> tuple[Any, Plan]:
    """The config with defaults for missing keys, and its plan.

    Raises InputError for wrong values, but not as `train.py` for those that do not suit each other. The run needs no
    name.
    """
    given = {"trainer": trainer, "seed": seed, "local_run_dir": str(run_dir)}
    stored: Any = store_rows(config)
    nested: Any = OmegaConf.to_container(OmegaConf.create(stored), resolve=False)
    plan = resolve(nested | given, world_size=world_size)
    raise_problems([problem for problem in find_value_problems(plan.values) if problem.key != "exp_name"])
    return OmegaConf.create(plan.nested_values()), plan


def plan_worker(config: DictConfig, world_size: int) -> Plan:
    """The plan of one of `world_size` processes that a caller starts. Raises InputError for any problem."""
    plan = resolve(store_rows(config), world_size=world_size)
    if plan.trainer.multi_process:
        plan = plan.change("world_size", world_size)
        if world_size > 1 and plan.run.fsdp_port is None and "MASTER_PORT" not in os.environ:
            raise InputError(
                "fsdp_port is null, but all processes need the same port: set config.fsdp_port to "
                "utils.get_open_port() before the processes start"
            )
    raise_problems(find_problems(plan))
    return plan


@contextmanager
def joining_processes(plan: Plan, rank: int) -> Iterator[Plan]:
    """Context in a group of the plan's processes, if its trainer needs one; gives the plan with one directory for all.

    A group that exists already is used, and left as it is.
    """
    makes_group = plan.trainer.multi_process and not torch.distributed.is_initialized()
    if makes_group:
        backend, port = "nccl" if torch.cuda.is_available() else "gloo", plan.run.fsdp_port or get_open_port()
        init_distributed(rank, plan.dims.world_size, port=port, backend=backend)
    # the default name of the directory contains the time, which differs between processes
    yield plan.change("local_run_dir", from_rank_0(plan.run.local_run_dir))
    if makes_group:
        torch.distributed.destroy_process_group()


def make_parts(plan: Plan, data: TrainingData, policy: Any, reference: Any, *, rank: int) -> tuple[Any, ...]:
    """All that a trainer uses, in the order of its fields."""
    progress = Progress.of(plan, silent=rank != 0)
    mesh = Mesh(rank, plan.dims, timeout_secs=plan.run.collective_timeout_secs)
    plan = settle_frozen_weights(plan, rank, progress.line)
    policy, frozen_digest = make_policy(plan, policy, data, mesh)
    reference = make_reference(plan, reference, policy, frozen_digest, data, mesh)
    objective = make_objective(plan, policy, reference, data, mesh, log=progress.line)
    optimizer = make_policy_optimizer(plan, policy)
    scheduler = Schedule.of(plan.training, optimizer, updates=data.report.updates, size=mesh.data_size)
    stop = StopRequest(mesh)
    batches = make_batches(plan, data, objective, stop, progress)
    evaluator = Evaluator(plan, data, objective, batches, progress, stop)
    run_dir, keep, n_evaluated = Path(plan.run.local_run_dir), evaluator.interval.keep, evaluator.n_examples
    checkpoints = Checkpoints(run_dir, mesh, keep=keep, log=progress.line, n_evaluated=n_evaluated)
    context = RunContext(plan, run_dir, rank, data, progress.line, policy)
    callbacks = Callbacks.of(CALLBACKS, context, terminal=progress)
    made = (plan, data, objective, optimizer, scheduler)
    recorded = describe_run(*made, frozen_digest, **batches.states, checkpoints=checkpoints, callbacks=callbacks)
    return (*made, batches, evaluator, checkpoints, callbacks, *recorded, progress, stop)
