"""Estimates of what an update costs on GPUs that this machine does not have.

Memory is counted as for `dry_run`. Collectives and matrix products are counted in an update on fake tensors, which have
no values. Its process group is fake too: this process is rank 0, and the other processes do not exist.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dpo.data.preflight import TrainingData
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.adapters import REFERENCE, make_adapter_context
from dpo.models.layouts import layout_by_rules
from dpo.models.loading import make_policy_structure, make_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations
from dpo.parallel.mesh import CollectiveCounter, Mesh, fake_processes
from dpo.parallel.sharding import clip_gradient, find_blocks, step_optimizer
from dpo.settings.plan import Plan
from dpo.training.batches import Batches
from dpo.training.memory import (
    Bytes,
    count_all,
    find_peak,
    read_batches,
    use_plain_attention,
)
from dpo.training.objective import Objective, Reference
from dpo.training.optimization import count_states, make_optimizer
from dpo.training.parts import make_reference_logps, place

# The whole model's costs are extrapolated from those of models with 2 and with 4 blocks. These are even numbers, as
# blocks of two kinds may alternate.
SMALL, LARGE = 2, 4
LATENCY_SECS = 20e-6  # time of a collective besides that of sending its bytes


class Rates(NamedTuple):
    """A GPU's memory, and the rates that it reaches with large matrices and messages, which are below its peak."""

    memory_gb: float
    tflops: dict[str, float]  # 1e12 floating-point operations a second, by dtype
    memory_gb_per_s: float
    machine_gb_per_s: float  # sent by a GPU to the others of its machine
    network_gb_per_s: float  # sent by a GPU to other machines
    gpus_per_machine: int = 8


# Assumed, not measured: 40 % of the data sheets' dense matrix rates, 80 % of their bandwidths.
RATES = {
    "a100": Rates(80, {"bfloat16": 125, "float16": 125, "float32": 15}, 1600, 240, 20),
    "h100": Rates(80, {"bfloat16": 400, "float16": 400, "float32": 40}, 2700, 340, 40),
    "h200": Rates(141, {"bfloat16": 400, "float16": 400, "float32": 40}, 3800, 340, 40),
    "b200": Rates(180, {"bfloat16": 900, "float16": 900, "float32": 60}, 6400, 720, 40),
}


class Work(NamedTuple):
    """What a process does in an update.

    Collectives are counted by axis of the mesh and kind, with keys such as `shard all_gather`.
    """

    calls: Counter[str]  # numbers of collectives
    n_bytes: Counter[str]  # bytes of the whole tensors that are gathered, reduced or scattered
    flops: int  # floating-point operations of matrix products and attention
    trained_bytes: int  # bytes of the weights that this process's optimizer updates


class Estimator:
    """Estimates what a process of a run needs.

    Plans that are passed to its methods may differ from the first in how they divide the model and the batch.
    """

    def __init__(self, plan: Plan, data: TrainingData, rates: Rates):
        self.data = data
        self.rates = rates
        self.batches = read_batches(plan, data)
        structure = make_policy_structure(plan)
        blocks = find_blocks(structure, plan.model.block_name)
        self.n_blocks = structure.config.get_text_config().num_hidden_layers
        # Blocks of two kinds may alternate, for instance in their attention. If blocks differ in another way, only the
        # whole model is counted.
        n_bytes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
        alternate = n_bytes == [n_bytes[i % 2] for i in range(self.n_blocks)]
        # The costs of models with these numbers of blocks are counted.
        self.block_counts = [SMALL, LARGE] if alternate and self.n_blocks > LARGE else [self.n_blocks]

    def estimate_memory(self, plan: Plan, frozen: str | None) -> tuple[Bytes, list[str]]:
        """Estimate a process's memory at its peak, in bytes by purpose, and return it with notes for the user.

        `frozen` is the result of `decide_frozen_weights` (`dpo.training.memory`).
        """
        counted = [count_all(plan, self.data, self.batches, frozen, n) for n in self.block_counts]
        memory = self.extrapolate([memory for memory, _ in counted])
        # The backward pass of one block needs as much, however many there are.
        memory["block_backward"] = counted[-1][0]["block_backward"]
        return find_peak(plan, memory), counted[0][1]

    def estimate_work(self, plan: Plan, frozen: str | None) -> Work:
        """Estimate what a process does in an update on the batch with the median number of tokens."""
        n_tokens = [sum(example.n_tokens for example in examples) for examples in self.batches]
        median_index = n_tokens.index(median_high(n_tokens))
        with fake_processes(plan.dims) as mesh:
            simulated = [simulate(plan, self.data, median_index, mesh, frozen, n) for n in self.block_counts]
        calls, n_bytes, totals = [self.extrapolate(counts) for counts in zip(*simulated, strict=True)]
        return Work(calls, n_bytes, totals["flops"], totals["trained_bytes"])

    def extrapolate(self, counts: Sequence[Counter]) -> Counter:
        """Extrapolate counts of models with `block_counts` blocks to the whole model, linearly in the blocks."""
        if len(counts) == 1:
            return counts[0]
        small, large = counts
        n_more = self.n_blocks - LARGE
        return Counter({key: n + (n - small[key]) * n_more // (LARGE - SMALL) for key, n in large.items()})


def simulate(
    plan: Plan, data: TrainingData, batch_index: int, mesh: Mesh, frozen: str | None, n_blocks: int
) -> tuple[Counter, ...]:
    """Make an update of a model with `n_blocks` blocks on fake tensors; count collectives, their bytes, and totals.

    Raises InputError if the model cannot run on tensors without values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def receive(_: str, tensor: Tensor) -> Tensor:
        """Return a fake tensor in place of the weight that rank 0 would send."""
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def distribute_fake(model: Any, compute_dtype: str) -> Any:
        """Distribute a model as a run does, with fake tensors as its weights."""
        use_plain_attention(model)
        is_whole = frozen == "whole"
        return place(plan, model, mesh, frozen_whole=is_whole, compute_dtype=compute_dtype, receive=receive)

    policy = make_policy_structure(plan, n_blocks)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    policy = distribute_fake(policy, plan.compute_dtype)
    reference = Reference(None, None, make_reference_logps(plan, data))
    if plan.caches_all_reference_logps:
        reference.logps.table.fill(0)  # any value but NaN, which means that an example is not cached
    elif plan.reference == "model":
        structure = make_structure(plan, plan.reference_dtype, n_blocks).eval().requires_grad_(False)
        reference.model = distribute_fake(structure, plan.reference_dtype)
    elif plan.reference:
        reference.model = policy
        reference.in_use = make_adapter_context(policy, REFERENCE if plan.reference == "adapter" else None)
    objective = Objective(policy, reference, layout, mesh, plan.loss, autocast=DTYPES.get(plan.model.autocast))
    optimizer = make_optimizer(plan.training, policy)
    batch = next(Batches(plan, data, layout).train(skip=batch_index))
    counter = CollectiveCounter(mesh)
    flop_counter = FlopCounterMode(display=False)
    policy.train()
    explaining = explaining_library(
        lambda error: InputError(
            f"{plan.model.name_or_path} does not run on tensors without values: {one_sentence(error)} (mixtures of "
            f"experts may need model.fsdp_policy_mp=bfloat16)"
        )
    )
    # The counter knows matrix products, of which the kernel MATH consists, but not a CPU's other kernels.
    with counter, flop_counter, explaining, sdpa_kernel(SDPBackend.MATH):
        context = objective.prepare(batch)  # outside of `fake`, as it reads values: the weights of the examples
        with fake:
            metrics = objective.accumulate(batch, context, reduce_once=plan.fsdp.fsdp_reduce_once)
            norm = clip_gradient(policy.parameters(), plan.training.max_grad_norm)
            step_optimizer(optimizer)
        # There are two scalars, as in `train_step`.
        objective.reduce(metrics, len(batch.examples), (), grad_norm=norm, n_ranks_to_stop=norm)
    trained = sum(tensor.nbytes for group in optimizer.param_groups for tensor in group["params"])
    totals = Counter(flops=flop_counter.get_total_flops(), trained_bytes=trained)
    return counter.calls, counter.n_bytes, totals


class Seconds(NamedTuple):
    """How long an update takes, by what the time is spent on."""

    compute: float
    waiting: float  # for collectives that do not overlap with compute
    optimizer: float


def estimate_seconds(plan: Plan, work: Work, rates: Rates) -> Seconds:
    """Find how long an update takes: FSDP's collectives overlap with compute, those of tensor parallelism do not."""
    compute = work.flops / (rates.tflops[plan.model.autocast or plan.compute_dtype] * 1e12)
    dims = plan.dims
    groups = {  # by axis: how many processes a collective has, and the distance between their ranks
        "tensor": (dims.tensor_size, 1),
        "shard": (dims.shard_size, dims.tensor_size),
        "replicate": (dims.replicate_size, dims.tensor_size * dims.shard_size),
        "all": (dims.world_size, 1),
    }
    seconds_by_axis = Counter()
    for key, n_bytes in work.n_bytes.items():
        axis, kind = key.split()
        size, distance = groups[axis]
        rate = rates.machine_gb_per_s
        if size * distance > rates.gpus_per_machine:
            # The group spans machines; each of its GPUs in a machine sends over a network card of its own.
            rate = min(rate, rates.network_gb_per_s * max(1, rates.gpus_per_machine // distance))
        rounds = 2 if kind == "all_reduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
        seconds_by_axis[axis] += rounds * n_bytes * (1 - 1 / size) / (rate * 1e9) + work.calls[key] * LATENCY_SECS
    overlapping = seconds_by_axis["shard"] + seconds_by_axis["replicate"]
    waiting = seconds_by_axis["tensor"] + seconds_by_axis["all"] + max(0.0, overlapping - compute)
    # The optimizer reads weights, gradients and its states, and writes weights and states.
    n_values = 3 + 2 * count_states(plan.training)
    return Seconds(compute, waiting, n_values * work.trained_bytes / (rates.memory_gb_per_s * 1e9))
