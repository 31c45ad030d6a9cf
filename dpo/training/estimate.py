"""What an update would cost on GPUs that are not here.

Memory is counted as for `dry_run`. Collectives and matrix products are counted in an update on fake tensors, which have
no values, in a process group of which this process is rank 0 and the other processes do not exist.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dpo.data.preflight import TrainingData
from dpo.models.adapters import REFERENCE, make_adapter_context
from dpo.models.layouts import layout_by_rules
from dpo.models.loading import find_model_config, make_policy_structure, make_structure
from dpo.models.pretrained import DTYPES, checkpoint_activations
from dpo.parallel.collectives import CollectiveCounter, fake_processes
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import clip_gradient, divide, step_optimizer
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.memory import Bytes, count_all, decide_frozen_weights, find_peak
from dpo.training.objective import MicrobatchMetrics, Objective, Reduced
from dpo.training.optimization import make_optimizer
from dpo.training.reference import Reference, ReferenceLogps

SMALL, LARGE = 2, 4  # numbers of blocks that are counted; a model's other blocks cost as much as those between
N_SEARCHED_BATCHES = 16  # the update is that of the batch among these with the median number of tokens
PLAIN_ATTENTION = "plain_sdpa"  # the CPU's own attention in bfloat16 looks at values
LATENCY_SECS = 20e-6  # of a collective
FLOPS = "flops"


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
    n_bytes: Counter[str]  # of the tensors that are gathered, reduced or scattered, whole
    flops: int  # floating-point operations of matrix products and attention


def estimate_memory(plan: Plan, data: TrainingData, rates: Rates) -> tuple[Bytes, list[str]]:
    """Estimate a process's memory at its peak, in bytes by purpose, and return it with notes for the user."""
    frozen = decide_frozen_weights(plan, rates.memory_gb * 1e9)
    counted = {n: count_all(plan, data, frozen, n) for n in list_sizes(plan)}
    memory = extrapolate({n: found for n, (found, _) in counted.items()}, plan)
    return find_peak(plan, memory), counted[max(counted)][1]


def estimate_work(plan: Plan, data: TrainingData, rates: Rates) -> Work:
    """Estimate what a process does in an update on `plan.dims.world_size` GPUs."""
    frozen = decide_frozen_weights(plan, rates.memory_gb * 1e9)
    with fake_processes(plan.dims) as mesh:
        counted = {n: simulate(plan, data, mesh, frozen, n) for n in list_sizes(plan)}
    calls, n_bytes, flops = [
        extrapolate({n: part[i] for n, part in counted.items()}, plan) for i in range(len(Work._fields))
    ]
    return Work(calls, n_bytes, flops[FLOPS])


def list_sizes(plan: Plan) -> list[int]:
    """List the numbers of blocks of the models that are counted: SMALL and LARGE, or a smaller model's own."""
    n_blocks = find_model_config(plan).num_hidden_layers
    return [n_blocks] if n_blocks <= LARGE else [SMALL, LARGE]


def extrapolate(counted: dict[int, Counter], plan: Plan) -> Counter:
    """Return the counts of the whole model, from those of models with fewer blocks, which are alike two by two."""
    n_blocks = find_model_config(plan).num_hidden_layers
    large = counted[max(counted)]
    if len(counted) == 1:
        return large
    small = counted[SMALL]
    return Counter({key: n + (n - small[key]) * (n_blocks - LARGE) // (LARGE - SMALL) for key, n in large.items()})


def simulate(
    plan: Plan, data: TrainingData, mesh: Mesh, frozen: str | None, n_blocks: int
) -> tuple[Counter, Counter, Counter]:
    """Make an update on fake tensors, of a model with `n_blocks` blocks; return what `Work` has."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def place(model: Any, compute_dtype: str) -> Any:
        def receive(_: str, tensor: Tensor) -> Tensor:
            with fake:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

        return divide(
            model,
            mesh,
            receive,
            block_name=plan.model.block_name,
            compute_dtype=DTYPES[compute_dtype],
            reduce_dtype=DTYPES[plan.fsdp.fsdp_reduce_dtype],
            reshard_after_forward=plan.fsdp.fsdp_reshard_after_forward,
            frozen_whole=frozen == "whole",
        )

    policy = make_policy_structure(plan, n_blocks)
    layout, _ = layout_by_rules(plan.data.layout, policy, max_length=plan.data.max_length)
    if plan.training.activation_checkpointing:
        checkpoint_activations(policy)
    reference = None
    n_columns = len(plan.loss.reference_columns)
    if plan.reference == "model":
        structure = make_structure(plan, plan.reference_dtype, n_blocks).eval().requires_grad_(False)
        use_plain_attention(structure)
        reference = Reference(place(structure, plan.reference_dtype), None, ReferenceLogps(0, n_columns))
    use_plain_attention(policy)
    policy = place(policy, plan.compute_dtype)
    if plan.reference in ("base", "adapter"):
        in_use = make_adapter_context(policy, REFERENCE if plan.reference == "adapter" else None)
        reference = Reference(policy, None, ReferenceLogps(0, n_columns), in_use)
    objective = FakeObjective(policy, reference, layout, mesh, plan.loss, autocast=DTYPES.get(plan.model.autocast))
    optimizer = make_optimizer(plan.training, policy)
    batch = find_median_batch(Batches(plan, data, layout))
    counter = CollectiveCounter(mesh)
    flop_counter = FlopCounterMode(display=False)
    policy.train()
    with counter, flop_counter:
        context = objective.prepare(batch)  # whose weights are real
        with fake:
            metrics = objective.accumulate(batch, context, reduce_once=plan.fsdp.fsdp_reduce_once, show=lambda *_: None)
            norm = clip_gradient(policy.parameters(), plan.training.max_grad_norm)
            objective.reduce(metrics, len(batch.examples), (), grad_norm=norm, n_ranks_to_stop=norm)
            step_optimizer(optimizer)
    return counter.calls, counter.n_bytes, Counter({FLOPS: flop_counter.get_total_flops()})


class FakeObjective(Objective):
    """An objective whose metrics have no values: they are 0 once they are reduced."""

    def reduce(
        self, metrics: MicrobatchMetrics, n_examples: int, cache_rows: Sequence[int], **scalars: Tensor
    ) -> Reduced:
        columns = metrics[0][1]
        values = next(iter(columns.values()))
        self.mesh.add(torch.zeros(n_examples * len(columns) + len(scalars), dtype=values.dtype))
        return Reduced({name: torch.zeros(n_examples) for name in columns}, {})


def use_plain_attention(model: Any) -> None:
    AttentionInterface.register(PLAIN_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(PLAIN_ATTENTION, sdpa_mask)
    model.set_attn_implementation(PLAIN_ATTENTION)


def find_median_batch(batches: Batches) -> Batch:
    """Find the batch with the median number of tokens among the first ones, as if nothing of it were cached."""
    searched = list(islice(batches.train(), N_SEARCHED_BATCHES))
    by_tokens = sorted(searched, key=lambda batch: sum(part.n_tokens for part in batch.microbatches))
    median = by_tokens[len(by_tokens) // 2]
    mismatched = median.mismatched and median.mismatched._replace(cache_rows=())
    return median._replace(cache_rows=(), mismatched=mismatched)


class Seconds(NamedTuple):
    """How long an update takes, by what it waits for."""

    compute: float
    waiting: float  # for collectives that do not overlap with compute
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def find_seconds(plan: Plan, memory: Bytes, work: Work, rates: Rates) -> Seconds:
    """Find how long an update takes: FSDP's collectives overlap with compute, those of tensor parallelism do not."""
    compute = work.flops / (rates.tflops[plan.model.autocast or plan.compute_dtype] * 1e12)
    dims = plan.dims
    sizes = {"tensor": dims.tensor_size, "shard": dims.shard_size, "replicate": dims.replicate_size}
    sizes["all"] = dims.world_size
    spans = {"tensor": dims.tensor_size, "shard": dims.tensor_size * dims.shard_size}  # neighbouring ranks of a group
    by_axis = Counter()
    for key, n_bytes in work.n_bytes.items():
        axis, kind = key.split()
        is_inside = spans.get(axis, dims.world_size) <= rates.gpus_per_machine
        rate = 1e9 * (rates.machine_gb_per_s if is_inside else rates.network_gb_per_s)
        rounds = 2 if kind == "all_reduce" else 1  # a ring scatters and gathers
        by_axis[axis] += rounds * n_bytes * (1 - 1 / sizes[axis]) / rate
        by_axis[axis] += work.calls[key] * LATENCY_SECS
    overlapping = by_axis["shard"] + by_axis["replicate"]
    waiting = by_axis["tensor"] + by_axis["all"] + max(0.0, overlapping - compute)
    # The optimizer reads and writes weights, gradients and its states.
    held = memory["policy"] + memory["optimizer"]
    return Seconds(compute, waiting, 3 * held / (rates.memory_gb_per_s * 1e9))
