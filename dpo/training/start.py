"""Set-up, notes for the user, and checks before a run's first update."""

import math
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models.adapters import list_dropouts, trained_parameters
from dpo.models.layouts import SharedPrefix
from dpo.models.loading import notes_on_base
from dpo.models.pretrained import DTYPES, describe_model
from dpo.numbers import count
from dpo.plugins import find_digests
from dpo.settings.keys import KEYS, PACKAGE_DIR, ResumeRule
from dpo.settings.plan import Plan
from dpo.system.arithmetic import set_up_torch
from dpo.system.host import list_own_gpus
from dpo.system.run_directory import add_run_facts
from dpo.system.users_code import hash_files
from dpo.system.waiting import gather_all
from dpo.training.evaluation import Evaluator
from dpo.training.objective import REFERENCE_PREFIX, Objective, make_scores
from dpo.training.optimization import count_states

TOLERANCE = 1e-4  # relative rounding error allowed between the log-probabilities of equal models
MAX_EPSILONS = 8  # relative difference allowed between two forwards of the same inputs, in epsilons of the dtype


def set_up_libraries(plan: Plan, *, progress_bars: bool) -> None:
    """Seed the random generators and set up torch.

    Without `progress_bars`, those of transformers and datasets are disabled, as they would fill a log.
    """
    random.seed(plan.run.seed)
    np.random.seed(plan.run.seed)
    torch.manual_seed(plan.run.seed)  # `transformers.set_seed` would import PEFT, which takes a second
    if not progress_bars:
        transformers.utils.logging.disable_progress_bar()
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported
    set_up_torch(deterministic=plan.run.deterministic, compiles=plan.training.compile)


def find_shared_facts(plan: Plan) -> dict[str, str]:
    """Return what processes on several machines must have in common before they read data, for `check_alike`.

    Values with a path are left out, as paths may differ: what is read there is compared once it is read.
    """
    facts = {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "the code of dpo": hash_files(PACKAGE_DIR.rglob("*.py")),
        "the code of plugins": " ".join(find_digests()),
    }
    for key, value in plan.values.items():
        if key in KEYS and KEYS[key].resume is not ResumeRule.PER_RUN and "/" not in str(value):
            facts[key] = str(value)
    return facts


def record_setup(plan: Plan, objective: Objective) -> str:
    """Return a line for the user on the run's processes, their backend and devices, the layout, and the attention.

    Every process must call it; rank 0 writes the facts to `env.json`, too.
    """
    dims = plan.dims
    own_device = {"host": socket.gethostname(), "kind": "CPU", "gpus": []}
    if objective.device.type == "cuda":
        own_device["kind"] = torch.cuda.get_device_name(objective.device)
        own_device["gpus"] = list_own_gpus(multi_process=plan.trainer.multi_process)
    devices = gather_all(own_device)
    n_devices = Counter()
    for device in devices:
        n_devices[f"{device['kind']} of {device['host']}"] += len(device["gpus"]) or 1
    axes = {"replicate": dims.replicate_size, "shard": dims.shard_size, "tensor": dims.tensor_size}
    processes = count(dims.world_size, "process", "processes")
    backend = None
    if dist.is_initialized():
        backend = dist.get_backend()
        sizes = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        processes += f" over {backend} ({sizes})"
    layout = "shared_prefix" if isinstance(objective.layout, SharedPrefix) else "padded"
    attention = {"policy": objective.policy.config._attn_implementation}
    if objective.reference:
        attention["reference"] = objective.reference.model.config._attn_implementation
    if objective.mesh.rank == 0:
        add_run_facts(
            Path(plan.run.local_run_dir),
            backend=backend,
            mesh=axes,
            devices=devices,
            layout=layout,
            layout_note=objective.layout_note,
            attention=attention,
        )
    on = " and ".join(f"{n} x {name}" for name, n in n_devices.items())
    by_role = ", ".join(f"{role} {name}" for role, name in attention.items())
    return (
        f"{plan.trainer.name}: {processes} on {on}; {objective.layout_note or f'layout={layout}'}; attention: {by_role}"
    )


def list_notes(evaluator: Evaluator, *, is_first: bool) -> list[str]:
    """Return notes on processes and devices, the model, the samples, and the disk that the run needs.

    Every process must call it; rank 0 raises InputError if the disk has no room for the run. With `is_first`, before
    the first update, a note names the tasks that come before it.
    """
    plan = evaluator.plan
    objective = evaluator.objective
    notes = [record_setup(plan, objective)]
    n_passes = plan.n_microbatches * plan.dims.data_size
    if plan.data.batch_size % n_passes or plan.n_microbatches != plan.data.gradient_accumulation_steps:
        notes.append(
            f"batch_size={plan.data.batch_size} is split over {n_passes} backward passes of all processes, with "
            f"{plan.data.batch_size / n_passes:,.1f} examples on average (microbatch_size={plan.data.microbatch_size})"
        )
    notes += describe_model(objective.policy, max_length=plan.data.max_length)
    notes += notes_on_base(plan)
    if objective.mesh.rank == 0 and not plan.run.debug:  # rank 0's machine has the run's directory
        notes.append(_check_disk(evaluator))
    if is_first:
        notes.append(list_first_tasks(plan))
    return notes


def _check_disk(evaluator: Evaluator) -> str:
    """Return a line on the disk space that the run's files need; raise InputError if less is free."""
    plan = evaluator.plan
    interval = evaluator.interval
    # This many checkpoints will be on the disk at the same time.
    n_kept = math.ceil(evaluator.data.updates * plan.data.batch_size / (plan.run.save_every or interval.n_examples))
    if interval.keep:
        n_kept = min(n_kept, interval.keep + 1)  # and BEST
    weights = sum(parameter.nbytes for parameter in trained_parameters(evaluator.objective.policy))
    # A checkpoint has the trained weights and the optimizer's states of each; an export has the weights alone.
    n_bytes = n_kept * weights * (1 + count_states(plan.training)) + plan.run.export * weights
    run_dir = Path(plan.run.local_run_dir)
    # A resumed run has written these bytes already.
    n_written = sum(file.stat().st_size for file in run_dir.glob("step-*/*") if file.is_file())
    free = shutil.disk_usage(run_dir).free
    note = (
        f"the run's files take about {n_bytes / 1e9:.3g} GB on disk, where {free / 1e9:.3g} GB are free: "
        f"{count(n_kept, 'checkpoint')} (keep_checkpoints, export)"
    )
    if n_bytes - n_written > free and plan.run.check_disk:
        raise InputError(f"{note}; or set check_disk=false")
    return note


def list_first_tasks(plan: Plan) -> str:
    """Return a line for the user that names what a new run does before its first update, and the keys for it."""
    tasks = []
    if plan.training.self_test:
        tasks.append("self-test (self_test)")
    if plan.caches_all_reference_logps:
        tasks.append("reference scores (cache_reference_logps)")
    if plan.evaluation.do_first_eval:
        tasks.append(f"evaluation of up to {plan.data.n_eval_examples} examples (do_first_eval, n_eval_examples)")
    if plan.evaluation.sample_during_eval:
        tasks.append("first answers (sample_during_eval)")
    return f"before the first update: {', '.join(tasks) or 'nothing'}"


@torch.no_grad()
def self_test(objective: Objective, examples: Sequence[Example], plan: Plan) -> str:
    """Check that the policy is the same in train and eval mode, with finite log-probabilities.

    Rewards must be 0, as policy and reference are equal before the first update. A few of the `examples` are scored.
    Returns a message for the user, or raises InputError with the likely cause. Every process must call it.
    """
    mesh = objective.mesh
    loss = objective.loss
    policy = objective.policy
    tested = list(islice(cycle(examples), 2 * mesh.data_size))  # every process needs an example
    [microbatch] = objective.layout.split(tested, 1, rank=mesh.data_rank, size=mesh.data_size)
    microbatch = microbatch.to(objective.device)

    eval_logps = objective.forward(policy.eval(), microbatch)
    policy.train()
    for dropout in list_dropouts(policy):  # an adapter's dropout is random on purpose
        dropout.eval()
    columns = objective.score(microbatch, None)
    for name, values in columns.items():
        if name != "offset" and not values.isfinite().all():
            model = "reference" if name.startswith(REFERENCE_PREFIX) else "policy"
            raise InputError(
                f"self-test: log-probabilities of the {model} are not finite: use bfloat16 or float32, and check the "
                f"weights"
            )
    difference = _find_largest({name: values - columns[name] for name, values in eval_logps.items()})
    dtype = torch.float32
    if mesh.tensor_size > 1:  # forwards of the same inputs may differ by the rounding of the dtype of the forward pass
        dtype = DTYPES[plan.model.autocast or plan.compute_dtype]
    magnitude = max(1.0, _find_largest(eval_logps))  # at least 1: a reward model gives rewards, which may be near 0
    if difference > MAX_EPSILONS * torch.finfo(dtype).eps * magnitude:
        raise InputError(
            f"self-test: log-probabilities of {type(policy).__name__} in train and eval mode differ by "
            f"{difference:.3g}: disable dropout or router noise in its config"
        )
    if not loss.reference:
        return "self-test passed: finite scores, dropout off"

    output = loss(make_scores(columns))
    first_loss = output.losses.mean().item()
    largest_reward = _find_largest(output.rewards)
    if not math.isfinite(first_loss):
        raise InputError(
            f"self-test: the first {loss.name} loss is {first_loss}: choose a loss.beta closer to 0.1, or smaller "
            "margins"
        )
    # Rewards are beta times differences of log-probabilities, whose rounding errors grow with their magnitude.
    tolerance = TOLERANCE * loss.options.get("beta", 1.0) * magnitude
    if plan.compute_dtype == plan.reference_dtype and largest_reward > tolerance:
        raise InputError(
            f"self-test: first rewards reach {largest_reward:.3g} instead of 0, so policy and reference do not hold "
            "the same weights: load both from model.archive, or set self_test=false"
        )
    return f"self-test passed: first loss {first_loss:.6f}, rewards within {largest_reward:.1g} of 0, dropout off"


def _find_largest(columns: Mapping[str, torch.Tensor]) -> float:
    """Return the largest absolute value in any of the columns."""
    return max(values.abs().max().item() for values in columns.values())
