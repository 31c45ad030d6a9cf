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

REFERENCE = "reference/"  # prefix of the reference's log-probabilities, which travel with the metrics

# per microbatch: indices of its examples in the global batch, (n,), and their metrics, (n,) each
MicrobatchMetrics = Sequence[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


class Reduced(NamedTuple):
    """The metrics of a global batch over all processes, on the host."""

    examples: dict[str, torch.Tensor]  # metrics, and log-probabilities under REFERENCE, (B,) each
    scalars: dict[str, float]

    def means(self, examples: Sequence[Example] = (), weights: Sequence[float] = ()) -> dict[str, float]:
        """Compute the means of the metrics.

        Without `weights`, or if all are 0, every example counts alike. Given `examples`, a metric whose name ends in a
        role is a mean over the examples with a response of that role; it is missing if there are none.
        """
        n_examples = len(next(iter(self.examples.values())))
        # a batch of ties has no weights, but metrics all the same
        weight = torch.tensor(weights if any(weights) else [1.0] * n_examples)  # (B,)
        by_role = {role: weight * torch.tensor([role in e.roles for e in examples]) for role in ROLES if examples}
        means = {}
        for name, values in self.examples.items():
            if name.startswith(REFERENCE):
                continue
            counted = by_role.get(name.rpartition("/")[2], weight)
            if counted.any():
                means[name] = ((values.double() * counted).sum() / counted.sum()).item()
        return means

    def find_kl(self, places: Sequence[int]) -> dict[str, float]:
        """`online/kl`, KL(policy || reference) on the responses of these examples.

        `places` are indices in the batch. Empty without places or reference. See docs/metrics.md for the estimator.
        """
        if not places or f"{REFERENCE}chosen" not in self.examples:
            return {}
        log_ratios = [
            self.examples[f"logps_train/{role}"] - self.examples[f"{REFERENCE}{role}"]
            for role in ("chosen", "rejected")
        ]
        table = torch.stack(log_ratios).double()  # (2, B)
        return {"online/kl": table[:, places].mean().item()}


def reduce_metrics(
    metrics: MicrobatchMetrics,
    n_examples: int,
    add: Callable[[torch.Tensor], torch.Tensor],
    *,
    counts: bool = True,
    scalars: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Reduced:
    """Combine the metrics of all microbatches and processes.

    Takes one collective and one copy to the host, which waits for the device. `add` sums a tensor over the processes;
    each holds zeros for the examples of others. Where several processes see the same examples, `counts` is true on one.
    `scalars` are summed too.
    """
    names = list(metrics[0][1])
    values = torch.cat([torch.stack(list(columns.values()), dim=1) for _, columns in metrics])  # (examples here, names)
    table = values.new_zeros(n_examples, len(names))
    if counts:
        table.index_copy_(0, torch.cat([indices for indices, _ in metrics]), values)
    sums = add(torch.cat([table.flatten(), *(value.detach().to(table).reshape(1) for value in scalars.values())]))
    sums = sums.cpu()
    columns = sums[: table.numel()].view(n_examples, len(names)).unbind(1)
    return Reduced(
        dict(zip(names, columns, strict=True)), dict(zip(scalars, sums[table.numel() :].tolist(), strict=True))
    )


def peak_memory_gb() -> float:
    """Peak memory of this process in GB (1e9 bytes).

    Memory allocated on its GPUs if there are any, else resident memory. A process of several has one GPU.
    """
    if torch.cuda.is_available():
        shared = torch.distributed.is_initialized()
        gpus = [torch.cuda.current_device()] if shared else range(torch.cuda.device_count())
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
