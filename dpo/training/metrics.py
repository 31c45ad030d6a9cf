"""Per-example metrics of all processes, reduced once per update."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from dpo.data.examples import Example
from dpo.losses import ROLES
from dpo.system.host import list_own_gpus
from dpo.training.batches import Batch

REFERENCE = "reference_"  # prefix of the reference's log-probabilities, which travel with the metrics

# per microbatch: indices of its examples in the global batch, (n,), and their metrics, (n,) each
MicrobatchMetrics = list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


def scale_weights(weights: Sequence[float]) -> list[float]:
    """Divide by the largest, as float32 may not hold the weights."""
    largest = max(weights) or 1.0
    return [weight / largest for weight in weights]


class Reduced(NamedTuple):
    """The metrics of a global batch, on the host."""

    examples: dict[str, torch.Tensor]  # metrics, and log-probabilities under REFERENCE, (B,) each
    scalars: dict[str, float]

    def means(self, examples: Sequence[Example] = (), weights: Sequence[float] = ()) -> dict[str, float]:
        """The weighted mean of each metric; if all weights are 0 (every pair is a tie), every example counts alike.

        Given `examples`, a metric whose name ends in a role, such as `logps_train/rejected`, is a mean over the
        examples with such a response, and is missing without any.
        """
        if not self.examples:
            return {}
        alike = [1.0] * len(next(iter(self.examples.values())))
        all_weights = torch.tensor(scale_weights(weights) if any(weights) else alike, dtype=torch.float64)  # (B,)
        means = {}
        for name, values in self.examples.items():
            if name.startswith(REFERENCE):
                continue
            metric_weights, role = all_weights, name.rpartition("/")[2]
            if examples and role in ROLES:
                metric_weights = all_weights * torch.tensor([role in example.roles for example in examples])
            if metric_weights.any():
                counted = values.double().where(metric_weights > 0, 0)  # the loss of a tie may be infinite
                means[name] = ((counted * metric_weights).sum() / metric_weights.sum()).item()
        return means

    def find_kl(self, indices: Sequence[int]) -> dict[str, float]:
        """`online/kl` (docs/metrics.md): KL(policy || reference) on responses of the examples at `indices`, if any."""
        if not indices or f"{REFERENCE}chosen" not in self.examples:
            return {}
        policy, reference = (
            torch.stack([self.examples[f"{prefix}{role}"] for role in ("chosen", "rejected")]).double()  # (2, B)
            for prefix in ("logps_train/", REFERENCE)
        )
        return {"online/kl": (policy - reference)[:, indices].mean().item()}


def reduce_metrics(
    metrics: MicrobatchMetrics,
    n_examples: int,
    add: Callable[[torch.Tensor], torch.Tensor],
    *,
    counts: bool = True,
    scalars: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Reduced:
    """Combine the metrics of all microbatches and processes, by one collective and one copy, for which the host waits.

    Each process fills the rows of its own examples in a table of zeros, and `add` sums tables and `scalars` over the
    processes. Of processes that see the same examples, one alone `counts`.
    """
    names = list(metrics[0][1])
    indices = torch.cat([microbatch_indices for microbatch_indices, _ in metrics])  # (N,): this process's examples
    values = torch.cat([torch.stack(list(columns.values()), dim=1) for _, columns in metrics])  # (N, names)
    table = values.new_zeros(n_examples, len(names))  # (B, names)
    if counts:
        table.index_copy_(0, indices, values)
    # one tensor for table and scalars, so that one collective and one copy suffice
    flat_scalars = [scalar.detach().to(table).reshape(1) for scalar in scalars.values()]
    sums = add(torch.cat([table.flatten(), *flat_scalars])).cpu()
    table_sums, scalar_sums = sums[: table.numel()].view_as(table), sums[table.numel() :]
    return Reduced(
        dict(zip(names, table_sums.unbind(1), strict=True)), dict(zip(scalars, scalar_sums.tolist(), strict=True))
    )


def measure_costs(batch: Batch, step_seconds: float) -> dict[str, float]:
    """Metrics of the time that an update took, sampling and scoring included, and of memory."""
    seconds = step_seconds + sum(batch.seconds.values())
    metrics = {
        "examples_per_second": len(batch.examples) / seconds,
        "tokens_per_second": sum(example.n_tokens for example in batch.examples) / seconds,
        "memory/peak_gb": peak_memory_gb(),
        **{f"online/{task}_share": task_seconds / seconds for task, task_seconds in batch.seconds.items()},
    }
    if batch.drawn:
        n_tokens = sum(len(answer.tokens) for drawn in batch.drawn.values() for answer in drawn.answers)
        metrics["online/seconds_per_token"] = batch.seconds["sampling"] / n_tokens
    return metrics


def peak_memory_gb() -> float:
    """Peak memory of this process in GB (1e9 bytes): of its GPUs if there are any, else resident."""
    if torch.cuda.is_available():
        gpus = list_own_gpus(multi_process=torch.distributed.is_initialized())
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
