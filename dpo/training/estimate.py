"""What an update would cost on GPUs that are not here.

Memory is counted as for `dry_run`. Collectives and matrix products are counted in an update on fake tensors, which have
no values, in a process group of which this process is rank 0 and the other processes do not exist.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dpo.data.preflight import TrainingData
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.models.adapters import REFERENCE, make_adapter_context
from dpo.models.attention import find_attention
from dpo.models.layouts import layout_by_rules
from dpo.models.loading import make_policy_structure, make_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations
from dpo.parallel.collectives import CollectiveCounter, fake_processes
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import clip_gradient, find_blocks, step_optimizer
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.memory import Bytes, count_all, decide_frozen_weights, find_peak, read_batches
from dpo.training.objective import MicrobatchMetrics, Objective, Reduced
from dpo.training.optimization import count_states, make_optimizer
from dpo.training.parts import place
from dpo.training.reference import Reference, ReferenceLogps

SMALL, LARGE = 2, 4  # blocks of the models that are counted: two more blocks cost as much as two of these
PLAIN_ATTENTION = "plain_sdpa"
LATENCY_SECS = 20e-6  # what a collective takes beside sending


class Rates(NamedTuple):
    """What a GPU does, as much of its peak as large matrices and messages get."""

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
    """What a process does in an update: its collectives by axis of the mesh and kind, such as `shard all_gather`."""

    calls: Counter[str]
    n_bytes: Counter[str]  # bytes of the whole tensors that are gathered, reduced or scattered
    flops: int  # floating-point operations of matrix products and attention
    trained_bytes: int  # bytes of the weights that this process's optimizer updates


class Estimator:
    """Estimates what a process of a run needs; its plans may differ in how they divide the model and the batch."""

    def __init__(self, plan: Plan, data: TrainingData, rates: Rates):
        self.data = data
        self.rates = rates
        self.batches = read_batches(plan, data)
        structure = make_policy_structure(plan)
        blocks = find_blocks(structure, plan.model.block_name)
        self.n_blocks = structure.config.get_text_config().num_hidden_layers
        # Blocks may alternate, such as in their attention. If they differ in other ways, all are counted.
        n_bytes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
        alternate = n_bytes == [n_bytes[i % 2] for i in range(self.n_blocks)]
        self.counted = [SMALL, LARGE] if alternate and self.n_blocks > LARGE else [self.n_blocks]

    def decide_frozen_weights(self, plan: Plan) -> str | None:
        return decide_frozen_weights(plan, self.rates.memory_gb * 1e9)

    def estimate_memory(self, plan: Plan, frozen: str | None) -> tuple[Bytes, list[str]]:
        """Estimate a process's memory at its peak, in bytes by purpose, and return it with notes for the user."""
        found = [count_all(plan, self.data, self.batches, frozen, n) for n in self.counted]
        memory = self.extrapolate([memory for memory, _ in found])
        memory["block_backward"] = found[-1][0]["block_backward"]  # a mean over blocks, which does not grow with them
        return find_peak(plan, memory), found[0][1]

    def estimate_work(self, plan: Plan, frozen: str | None) -> Work:
        """Estimate what a process does in an update on the batch with the median number of tokens."""
        n_tokens = [sum(example.n_tokens for example in examples) for examples in self.batches]
        median = n_tokens.index(sorted(n_tokens)[len(n_tokens) // 2])
        with fake_processes(plan.dims) as mesh:
            simulated = [simulate(plan, self.data, median, mesh, frozen, n) for n in self.counted]
        calls, n_bytes, others = map(self.extrapolate, zip(*simulated, strict=True))
        return Work(calls, n_bytes, others["flops"], others["trained_bytes"])

    def extrapolate(self, counts: Sequence[Counter]) -> Counter:
        """Return the counts of the whole model from those of models with `counted` blocks."""
        if len(counts) == 1:
            return counts[0]
        small, large = counts
        n_more = self.n_blocks - LARGE
        return Counter({key: n + (n - small[key]) * n_more // (LARGE - SMALL) for key, n in large.items()})


def simulate(
    plan: Plan, data: TrainingData, batch_index: int, mesh: Mesh, frozen: str | None, n_blocks: int
) -> tuple[Counter, Counter, Counter]:
    """Make an update on fake tensors, of a model with `n_blocks` blocks; return what `Work` has.

    Raises InputError if the model cannot run on tensors without values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def receive(_: str, tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def distribute_fake(model: Any, compute_dtype: str) -> Any:
        """Distribute a model as a run does, with fake tensors in place of weights that it loads."""
        use_plain_attention(model)  # our own attention on a CPU reads values
        is_whole = frozen == "whole"
        return place(plan, model, mesh, frozen_whole=is_whole, compute_dtype=compute_dtype, receive=receive)

    policy = make_policy_structure(plan, n_blocks)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    policy = distribute_fake(policy, plan.compute_dtype)
    is_cached = plan.caches_reference_first
    logps = ReferenceLogps(plan.data.batch_size, len(plan.loss.reference_columns))
    logps.table.fill(0)
    reference = Reference(None, None, logps)
    if plan.reference == "model" and not is_cached:
        structure = make_structure(plan, plan.reference_dtype, n_blocks).eval().requires_grad_(False)
        reference = Reference(distribute_fake(structure, plan.reference_dtype), None, logps)
    elif plan.reference in ("base", "adapter"):
        in_use = make_adapter_context(policy, REFERENCE if plan.reference == "adapter" else None)
        reference = Reference(policy, None, logps, in_use)
    objective = FakeObjective(policy, reference, layout, mesh, plan.loss, autocast=DTYPES.get(plan.model.autocast))
    optimizer = make_optimizer(plan.training, policy)
    batch = find_batch(Batches(plan, data, layout), batch_index, is_cached=is_cached)
    counter = CollectiveCounter(mesh)
    flop_counter = FlopCounterMode(display=False)
    policy.train()
    problem = f"{plan.model.name_or_path} cannot be estimated, as it does not run on tensors without values"
    advice = "a mixture of experts may need model.fsdp_policy_mp=bfloat16"
    explaining = explaining_library(lambda error: InputError(f"{problem}: {one_sentence(error)} ({advice})"))
    with counter, flop_counter, explaining:
        context = objective.prepare(batch)  # outside of `fake`, as it reads the weights of the examples
        with fake:
            metrics = objective.accumulate(batch, context, reduce_once=plan.fsdp.fsdp_reduce_once, show=lambda *_: None)
            norm = clip_gradient(policy.parameters(), plan.training.max_grad_norm)
            objective.reduce(metrics, len(batch.examples), (), grad_norm=norm, n_ranks_to_stop=norm)
            step_optimizer(optimizer)
    trained = sum(tensor.nbytes for group in optimizer.param_groups for tensor in group["params"])
    others = Counter(flops=flop_counter.get_total_flops(), trained_bytes=trained)
    return counter.calls, counter.n_bytes, others


class FakeObjective(Objective):
    """An objective whose metrics have no values: they are 0 once they are reduced, and nothing is cached."""

    def reduce(
        self, metrics: MicrobatchMetrics, n_examples: int, cache_rows: Sequence[int], **scalars: Tensor
    ) -> Reduced:
        columns = metrics[0][1]
        values = next(iter(columns.values()))
        self.mesh.add(torch.zeros(n_examples * len(columns) + len(scalars), dtype=values.dtype))
        return Reduced({name: torch.zeros(n_examples) for name in columns}, {})


def use_plain_attention(model: Any) -> None:
    """Take transformers' own attention in place of ours for CPUs, which reads values."""
    if find_attention(model.config) == "sdpa":
        AttentionInterface.register(PLAIN_ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(PLAIN_ATTENTION, sdpa_mask)
        model.set_attn_implementation(PLAIN_ATTENTION)


def find_batch(batches: Batches, index: int, *, is_cached: bool = False) -> Batch:
    """Return a training batch, whose first examples are those of the reference's cache if they are cached."""
    batch = next(batches.train(skip=index))
    rows = range(len(batch.examples)) if is_cached else ()
    mismatched = batch.mismatched and batch.mismatched._replace(cache_rows=rows)
    return batch._replace(cache_rows=rows, mismatched=mismatched)


class Seconds(NamedTuple):
    """How long an update takes, by what it waits for."""

    compute: float
    waiting: float  # for collectives that do not overlap with compute
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def find_seconds(plan: Plan, work: Work, rates: Rates) -> Seconds:
    """Find how long an update takes: FSDP's collectives overlap with compute, those of tensor parallelism do not."""
    compute = work.flops / (rates.tflops[plan.model.autocast or plan.compute_dtype] * 1e12)
    dims = plan.dims
    groups = {  # by axis: how many processes a collective has, and the distance between their ranks
        "tensor": (dims.tensor_size, 1),
        "shard": (dims.shard_size, dims.tensor_size),
        "replicate": (dims.replicate_size, dims.tensor_size * dims.shard_size),
        "all": (dims.world_size, 1),
    }
    by_axis = Counter()
    for key, n_bytes in work.n_bytes.items():
        axis, kind = key.split()
        size, distance = groups[axis]
        rate = rates.machine_gb_per_s
        if size * distance > rates.gpus_per_machine:  # the group's GPUs in a machine have a network card each
            rate = min(rate, rates.network_gb_per_s * max(1, rates.gpus_per_machine // distance))
        rounds = 2 if kind == "all_reduce" else 1  # a ring scatters and gathers
        by_axis[axis] += rounds * n_bytes * (1 - 1 / size) / (rate * 1e9) + work.calls[key] * LATENCY_SECS
    overlapping = by_axis["shard"] + by_axis["replicate"]
    waiting = by_axis["tensor"] + by_axis["all"] + max(0.0, overlapping - compute)
    # The optimizer reads weights, gradients and its states, and writes weights and states.
    n_values = 3 + 2 * count_states(plan.training)
    return Seconds(compute, waiting, n_values * work.trained_bytes / (rates.memory_gb_per_s * 1e9))
