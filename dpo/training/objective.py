"""What a microbatch gives: log-probabilities, losses and metrics of each example, reduced over all processes.

The frozen reference's part is remembered by content, so that no pair is scored by it twice in a run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from dpo.data.tokenization import Batch
from dpo.losses import LOSSES
from dpo.models.layouts import Layout, Logps, Longest, Microbatch, choose_layout
from dpo.models.pretrained import DTYPES
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import hold_the_same
from dpo.training.batches import GlobalBatch
from dpo.training.metrics import Parts, Reduced, reduce_parts
from dpo.training.reference import LogpTable, ReferenceLogps, read_logps

Metrics = dict[str, torch.Tensor]  # per example, each (rows,)
REFERENCE = ("reference/chosen", "reference/rejected")  # columns beside the metrics, to be remembered


def loss_options(loss_config: Mapping[str, Any]) -> dict[str, float | bool]:
    """The keys of `config/loss/NAME.yaml` other than its name."""
    return {key: value for key, value in loss_config.items() if key != "name"}


class Objective:
    """`autocast` is the dtype in which float32 weights are multiplied, None for their own.

    As long as the `models_are_equal`, no pair is ranked right: rewards then differ by what dtypes round, if at all.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        *,
        device: torch.device,
        autocast: torch.dtype | None,
        models_are_equal: bool = False,
    ) -> None:
        self.layout, self.mesh, self.device, self.autocast = layout, mesh, device, autocast
        self.models_are_equal = models_are_equal
        self.reference_logps = ReferenceLogps()

    def forward(self, model: torch.nn.Module, microbatch: Microbatch) -> Logps:
        """Log-probabilities of each example's responses: (chosen, rejected) or, under SFT, (chosen,)."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self.layout.forward(model, microbatch.to(self.device).inputs)

    def whole(self, batch: Batch) -> Microbatch:
        """All rows of a batch of this process as one microbatch."""
        [microbatch] = self.layout.split(batch, 1)
        return microbatch

    def losses(
        self,
        policy: torch.nn.Module,
        reference_model: torch.nn.Module | None,
        microbatch: Microbatch,
        known: torch.Tensor | None,
        *,
        split: str,
        loss_config: Mapping[str, Any],
    ) -> tuple[torch.Tensor, Metrics]:
        """Losses of the examples, (rows,), and their detached metrics.

        `known` are the reference's log-probabilities of the whole global batch, as `known_reference` gives them.
        """
        loss, microbatch = LOSSES[loss_config["name"]], microbatch.to(self.device)
        if not loss.uses_reference:
            [chosen] = self.forward(policy, microbatch)
            losses, metrics = -chosen, {}
        else:
            if known is not None:
                reference = known[microbatch.rows].unbind(1)
            else:  # before the policy's forward, whose activations stay
                with torch.no_grad():
                    reference = self.forward(reference_model, microbatch)
            chosen, rejected = self.forward(policy, microbatch)
            reference = tuple(r.to(chosen) for r in reference)
            losses, chosen_rewards, rejected_rewards = loss.on_pairs(
                chosen, rejected, *reference, **loss_options(loss_config)
            )
            ranked_right = (chosen_rewards > rejected_rewards) & (not self.models_are_equal)
            metrics = {
                f"rewards_{split}/chosen": chosen_rewards,
                f"rewards_{split}/rejected": rejected_rewards,
                f"rewards_{split}/accuracies": ranked_right.to(chosen_rewards),
                f"rewards_{split}/margins": chosen_rewards - rejected_rewards,
                f"logps_{split}/rejected": rejected.detach(),
                **dict(zip(REFERENCE, reference, strict=True)),
            }
        return losses, metrics | {f"logps_{split}/chosen": chosen.detach(), f"loss/{split}": losses.detach()}

    def known_reference(self, batch: GlobalBatch) -> torch.Tensor | None:
        """The reference's log-probabilities of a global batch on the device, (B, 2) float64, if all are known."""
        known = self.reference_logps.find(batch.keys)
        if known is None or self.device.type != "cuda":
            return known
        return known.pin_memory().to(self.device, non_blocking=True)

    def reduce(
        self, parts: Parts, keys: Sequence[tuple[bytes, ...]], scalars: Mapping[str, torch.Tensor] | None = None
    ) -> Reduced:
        """The metrics of all examples on every process, and the sums of `scalars` over the processes."""
        reduced = reduce_parts(parts, len(keys), self.mesh.add, counts=self.mesh.counts, scalars=scalars or {})
        reference = [reduced.examples.pop(name) for name in REFERENCE if name in reduced.examples]
        if reference:
            self.reference_logps.add(keys, torch.stack(reference, dim=1))
        return reduced

    @torch.no_grad()
    def score(self, reference_model: torch.nn.Module, batch: GlobalBatch) -> torch.Tensor:
        """The reference's log-probabilities of a global batch, (B, 2), on every process."""
        parts = [
            (microbatch.rows, dict(zip(REFERENCE, self.forward(reference_model, microbatch), strict=True)))
            for microbatch in (microbatch.to(self.device) for microbatch in batch.microbatches)
        ]
        reduced = reduce_parts(parts, len(batch.keys), self.mesh.add, counts=self.mesh.counts)
        return torch.stack(list(reduced.examples.values()), dim=1)

    def score_all(self, reference_model: torch.nn.Module, batches: Iterable[GlobalBatch], path: Path) -> str:
        """Know all pairs of the batches, from the file at `path` or scored now, and write the file; a line about it.

        Raises InputError if the file holds something else than the reference gives now.
        """
        read = read_logps(path) if self.mesh.rank == 0 and path.exists() else LogpTable()
        read, seed = from_rank_0((read, secrets.randbits(32)))
        n_scored = self.reference_logps.score_all(batches, partial(self.score, reference_model), read, seed=seed)
        if self.mesh.rank == 0:
            self.reference_logps.save(path)
        return f"{n_scored:,} pairs scored by the reference, {len(read):,} responses read from {path}"


def make_objective(
    config: DictConfig,
    policy: Any,
    reference_model: Any,
    mesh: Mesh,
    compute_dtype: str,
    *,
    longest: int,
    log: Callable[[str], None],
) -> Objective:
    """The objective with the layout that both models take; `say` is told why it is not the one asked for.

    `longest` are the most tokens that a prompt has with one response.
    """
    autocast = DTYPES[config.model.autocast] if config.model.autocast else None
    device = next(policy.parameters()).device
    tried = [(policy, compute_dtype)]
    if reference_model is not None and type(reference_model) is not type(policy):  # which may take less
        tried.append((reference_model, config.model.reference_dtype))
    for model, dtype in tried:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            layout, note = choose_layout(
                config.layout,
                model,
                max_length=config.max_length,
                compute_dtype=autocast or DTYPES[dtype],
                longest=Longest.of(longest, max(config.batch_size, config.eval_batch_size), config.max_length),
                vetoed=mesh.any,
            )
        release_gathered(model)
        if note:
            log(note)
            break
    equal = reference_model is not None and hold_the_same(policy, reference_model, mesh)
    return Objective(layout, mesh, device=device, autocast=autocast, models_are_equal=equal)
