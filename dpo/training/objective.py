"""Log-probabilities, losses and metrics of examples, reduced over all processes.

The frozen reference's log-probabilities are cached by example, so that each example is scored once in a run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.errors import InputError
from dpo.losses import Loss, Losses, Scores
from dpo.models.adapter_dropout import AdapterDropout
from dpo.models.adapters import weights_in_use
from dpo.models.layouts import Layout, Longest, Microbatch, choose_layout
from dpo.models.logprobs import TokenLogps
from dpo.models.pretrained import DTYPES
from dpo.numbers import count
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import hold_the_same
from dpo.settings.plan import Plan
from dpo.training.batches import Batch
from dpo.training.metrics import REFERENCE, MicrobatchMetrics, Reduced, reduce_metrics
from dpo.training.reference import Reference, read_logps

NamedTensors = dict[str, torch.Tensor]  # values of B examples by name, each (B,)


def sum_tokens(tokens: TokenLogps, microbatch: Microbatch, roles: Sequence[str], *, tails: bool) -> NamedTensors:
    """Sum a model's log-probabilities over each response's tokens.

    Returns fields of `Scores` by name. With `tails` also sums over the tokens beyond the shorter response's length.
    """
    lengths = microbatch.lengths  # (sides, B)
    # a process without examples of its own feeds another one, which is dropped here
    logps, squares = (None if values is None else values[:, : lengths.shape[1]] for values in tokens)  # (sides, B, T)
    sums = {"": logps.sum(-1)}
    if tails:
        beyond = torch.arange(logps.shape[-1], device=logps.device) >= lengths.amin(0)[:, None]  # (B, T)
        sums["_tail"] = (logps * beyond).sum(-1)
    if squares is not None:
        sums["_squares"] = squares.sum(-1)
    return {role + kind: row for kind, rows in sums.items() for role, row in microbatch.by_role(rows, roles).items()}


def make_scores(policy: NamedTensors, lengths: NamedTensors, reference: NamedTensors) -> Scores:
    """Make a loss's input from sums of policy and reference.

    `lengths` are the numbers of scored tokens by role.
    """
    named = {f"{role}_lengths": n for role, n in lengths.items()}
    return Scores(**policy, **named, **{f"reference_{name}": values for name, values in reference.items()})


class BatchContext(NamedTuple):
    """Values computed once per global batch, for all its microbatches.

    B is the number of examples; tensors are on the device.
    """

    weights: torch.Tensor  # (B,), from `Batch.weights`
    total_weight: float  # their sum, or 1 if all are 0
    reference: torch.Tensor | None = None  # from `cached_reference`
    statistic: torch.Tensor | None = None  # (B, k): `Scores.batch_statistic`
    numbers: Sequence[int] = ()  # of the examples, if their reference log-probabilities are still to be cached


class RunningAverage:
    """The running average of `Loss.running_statistic` over updates.

    It starts anew when the reference changes. A part of checkpoints.
    """

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Objective:
    """The loss of a policy, whose gradient an update follows.

    `autocast` is the dtype in which float32 weights are multiplied; None keeps their own.

    While `models_are_equal`, rewards differ only by rounding, so accuracies are 0. Every `follow_every` updates the
    reference becomes a copy of the policy. As that makes the models equal repeatedly, no accuracies are then logged.

    `seed` is for the dropout of the policy's adapter, which is on only in updates.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        reference: Reference | None,
        layout: Layout,
        mesh: Mesh,
        loss: Loss,
        *,
        autocast: torch.dtype | None = None,
        models_are_equal: bool = False,
        follow_every: int | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.reference, self.layout, self.mesh, self.loss = policy, reference, layout, mesh, loss
        self.average = RunningAverage()
        self.states = {"average": self.average} if loss.running_statistic else {}  # saved in checkpoints
        self.autocast, self.models_are_equal, self.follow_every = autocast, models_are_equal, follow_every
        self.device = next(policy.parameters()).device
        self.dropout = AdapterDropout(policy, seed=seed)

    def forward(self, model: torch.nn.Module, microbatch: Microbatch, *, with_squares: bool = False) -> NamedTensors:
        """Run a model on a microbatch and sum its log-probabilities.

        Returns the columns of `sum_tokens`. The microbatch is on the device.
        """
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            tokens = self.layout.forward(model, microbatch.inputs, with_squares=with_squares)
        return sum_tokens(tokens, microbatch, self.loss.roles, tails=self.loss.needs_tails)

    def reference_forward(self, microbatch: Microbatch) -> NamedTensors:
        """Run `forward` on the reference, which must have a model."""
        with self.reference.in_use():
            return self.forward(self.reference.model, microbatch)

    def losses(
        self,
        microbatch: Microbatch,
        context: BatchContext | None = None,
        *,
        split: str,
        loss: Loss | None = None,
    ) -> tuple[torch.Tensor, NamedTensors]:
        """Compute the losses of a microbatch, (B,), and detached metrics.

        `loss` replaces the run's loss. The metrics include the reference's log-probabilities, under REFERENCE. Raises
        InputError for a loss that needs values which the run's forward passes do not compute.
        """
        loss = loss or self.loss
        if loss.needs_tails > self.loss.needs_tails or loss.needs_squares > self.loss.needs_squares:
            raise InputError("loss.ld_alpha and loss.wpo can be used only if the run's own config has them")
        cached, statistic = (context.reference, context.statistic) if context else (None, None)
        scores, reference = self._find_scores(microbatch, cached, with_reference=loss.reference)
        if statistic is not None:
            statistic = statistic[microbatch.indices]
        output = loss(scores._replace(average=self.average.value, batch_statistic=statistic))
        return output.losses, self._metrics(scores, reference, output, split=split)

    def _metrics(self, scores: Scores, reference: NamedTensors, output: Losses, *, split: str) -> NamedTensors:
        """Metrics per example, detached, with the reference's log-probabilities."""
        metrics = {f"rewards_{split}/{role}": rewards for role, rewards in output.rewards.items()}
        if output.rewards and self.loss.trains_on == "pairs":
            chosen, rejected = output.rewards["chosen"], output.rewards["rejected"]
            if not (self.models_are_equal and self.follow_every):
                # rewards of equal models differ only by rounding, which must not count as ranking
                is_right = torch.zeros_like(chosen) if self.models_are_equal else (chosen > rejected).to(chosen)
                metrics[f"rewards_{split}/accuracies"] = is_right
            metrics[f"rewards_{split}/margins"] = chosen - rejected
        for role in reversed([*output.rewards] or ["chosen"]):  # as the reference implementation, rejected first
            metrics[f"logps_{split}/{role}"] = getattr(scores, role).detach()
        metrics |= {f"{name}/{split}": values for name, values in output.metrics.items()}
        return metrics | reference | {f"loss/{split}": output.losses.detach()}

    def _find_scores(
        self, microbatch: Microbatch, cached: torch.Tensor | None, *, with_reference: bool
    ) -> tuple[Scores, NamedTensors]:
        """Score a microbatch with policy and reference.

        Returns a loss's input, and the reference's log-probabilities under REFERENCE.
        """
        reference: NamedTensors = {}
        if with_reference and cached is not None:
            reference = dict(zip(self.loss.reference_columns, cached[microbatch.indices].unbind(1), strict=True))
        elif with_reference:  # before the policy's forward, whose activations stay in memory
            with torch.no_grad():
                reference = self.reference_forward(microbatch)
        policy = self.forward(self.policy, microbatch, with_squares=self.loss.needs_squares)
        reference = {name: values.to(policy["chosen"]) for name, values in reference.items()}  # device and dtype
        scores = make_scores(policy, microbatch.by_role(microbatch.lengths, self.loss.roles), reference)
        return scores, {f"{REFERENCE}{name}": values for name, values in reference.items()}

    @torch.no_grad()
    def prepare(self, batch: Batch, *, update: int) -> BatchContext:
        """Compute the values that the microbatches of a global batch share.

        A batch statistic costs a forward pass of the policy on every microbatch, with the dropout of the update. It
        covers the examples with a weight; it is None if the loss has none, or computes it itself from a single
        microbatch.
        """
        weights = torch.tensor(batch.weights)
        device_weights, total_weight = self._to_device(weights), sum(batch.weights) or 1.0
        # a loss that sees the whole batch at once computes its statistic itself
        is_whole = len(batch.microbatches) == 1 and self.mesh.data_size == 1 and all(batch.weights)
        if self.loss.batch_statistic is None or is_whole:
            cached = self.cached_reference(batch)
            to_cache = batch.numbers if cached is None and self.loss.reference else ()
            return BatchContext(device_weights, total_weight, cached, numbers=to_cache)
        all_scores, reference = self._find_all_scores([batch], update=update)
        statistic, has_weight = None, weights > 0
        if any(batch.weights):
            # ties are left out of the statistic, as they are of the loss
            scores = Scores(*(values[has_weight] if torch.is_tensor(values) else values for values in all_scores))
            values = self.loss.find_batch_statistic(scores._replace(average=self.average.value))
            statistic = values.new_zeros(len(has_weight), values.shape[1])
            statistic[has_weight] = values
            statistic = statistic.to(self.device, torch.float32)
        # that pass has scored the reference too
        columns = [reference[f"{REFERENCE}{name}"] for name in self.loss.reference_columns] if reference else []
        cached = self._to_device(torch.stack(columns, dim=1)) if columns else None
        return BatchContext(device_weights, total_weight, cached, statistic)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Reduced:
        """Evaluate all examples of the batches, as one batch.

        A running average has the value here that it would approach if every update were like this batch, so that the
        loss depends only on weights and examples.
        """
        scores, reference = self._find_all_scores(batches)
        output, options = self.loss(scores), self.loss.options
        if self.loss.running_statistic and options["momentum"] < 1:
            chosen, rejected = (output.rewards[role].mean().item() for role in ("chosen", "rejected"))
            average = self.loss.running_statistic(chosen, rejected, options["beta"])
            output = self.loss(scores._replace(average=average))  # with the same rewards
        return Reduced(self._metrics(scores, reference, output, split="eval"), {})

    def _find_all_scores(self, batches: Iterable[Batch], *, update: int | None = None) -> tuple[Scores, NamedTensors]:
        """Score every example of the batches on every process, in float64.

        Also caches the reference's log-probabilities.
        """
        table, numbers, n_examples, nothing_to_cache = [], [], 0, True
        for batch in batches:
            cached = self.cached_reference(batch)
            for microbatch in (microbatch.to(self.device) for microbatch in batch.microbatches):
                with self.dropout.on(microbatch.inputs, update=update):
                    scores, reference = self._find_scores(microbatch, cached, with_reference=self.loss.reference)
                columns = {name: values for name, values in scores._asdict().items() if torch.is_tensor(values)}
                columns = {name: values.double() for name, values in (columns | reference).items()}
                table.append((microbatch.indices + n_examples, columns))
            n_examples += len(batch.examples)
            numbers += batch.numbers
            nothing_to_cache &= cached is not None or not self.loss.reference
        columns = self.reduce(table, n_examples, [] if nothing_to_cache else numbers).examples
        reference = {name: values for name, values in columns.items() if name.startswith(REFERENCE)}
        return Scores(**{name: values for name, values in columns.items() if name not in reference}), reference

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Update running values after a step of the optimizer.

        `metrics` are the means over the global batch.
        """
        self.models_are_equal = False
        if self.loss.running_statistic:
            rewards, options = (metrics["rewards_train/chosen"], metrics["rewards_train/rejected"]), self.loss.options
            value, momentum = self.loss.running_statistic(*rewards, options["beta"]), options["momentum"]
            self.average.value = momentum * self.average.value + (1 - momentum) * value

    def sync_if_due(self, number: int) -> None:
        """Copy the policy to the reference if due after update `number`.

        Skipped updates count too.
        """
        if self.follow_every and number % self.follow_every == 0:
            self.reference.follow(self.policy)
            self.models_are_equal = True
            self.average.value = 0.0  # it averaged log-ratios to the former reference

    def cached_reference(self, batch: Batch) -> torch.Tensor | None:
        """The reference's cached log-probabilities of a global batch, if complete.

        They are (B, columns of `Loss.reference_columns`), on the device; None unless all examples are cached.
        """
        cached = self.reference.logps.find(batch.numbers) if self.loss.reference else None
        return None if cached is None else self._to_device(cached)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device asynchronously."""
        # from pinned memory neither host nor device waits
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values

    def reduce(
        self,
        metrics: MicrobatchMetrics,
        n_examples: int,
        numbers: Sequence[int],
        scalars: Mapping[str, torch.Tensor] | None = None,
    ) -> Reduced:
        """Gather metrics of all examples and sum `scalars`, on every process.

        With `numbers`, also caches the reference's log-probabilities of these examples.
        """
        reduced = reduce_metrics(metrics, n_examples, self.mesh.add, counts=self.mesh.counts, scalars=scalars or {})
        if numbers:
            columns = [reduced.examples[f"{REFERENCE}{name}"] for name in self.loss.reference_columns]
            self.reference.logps.add(numbers, torch.stack(columns, dim=1))
        return reduced

    @torch.no_grad()
    def find_reference_logps(self, batch: Batch) -> torch.Tensor:
        """Score a global batch with the reference, on every process.

        Returns log-probabilities, (B, columns of `Loss.reference_columns`).
        """
        metrics = [
            (microbatch.indices, self.reference_forward(microbatch))
            for microbatch in (microbatch.to(self.device) for microbatch in batch.microbatches)
        ]
        reduced = reduce_metrics(metrics, len(batch.examples), self.mesh.add, counts=self.mesh.counts)
        return torch.stack(list(reduced.examples.values()), dim=1)

    def cache_reference(self, batches: Iterable[Batch], path: Path) -> str:
        """Cache all pairs of the batches, and write the file at `path`.

        Pairs come from that file if it exists, else they are scored. Returns a message about it. Raises InputError if
        the file disagrees with the reference's current values.
        """
        logps = self.reference.logps
        stored = read_logps(path, logps.shape) if self.mesh.rank == 0 and path.exists() else None
        stored, seed = from_rank_0((stored, secrets.randbits(32)))  # all processes must score the same batches
        n_scored = logps.fill(batches, self.find_reference_logps, stored, path=path, seed=seed)
        if self.mesh.rank == 0:
            logps.save(path)
        n_stored = 0 if stored is None else int((~np.isnan(stored).any(axis=1)).sum())  # rows that are complete
        known = f", {count(n_stored, 'example')} read from {path}" if n_stored else ""
        return f"{count(n_scored, 'example')} scored by the reference{known}"


def make_objective(
    plan: Plan,
    policy: Any,
    reference: Reference | None,
    mesh: Mesh,
    *,
    longest: int,
    log: Callable[[str], None],
) -> Objective:
    """Make the objective, with a layout that both models support.

    `log` gets the reason if that is not the layout asked for. `longest` is the largest number of tokens in a prompt
    with one response.
    """
    layout, note = _choose_common_layout(plan, policy, reference, mesh, longest=longest)
    if note:
        log(note)
    are_equal = False
    if reference is not None:
        # listed before `in_use()`, which may replace the adapter of this same model by the reference's
        policy_weights = weights_in_use(policy)
        with reference.in_use():
            are_equal = hold_the_same(policy_weights, weights_in_use(reference.model), mesh)
    return Objective(
        policy,
        reference,
        layout,
        mesh,
        plan.loss,
        autocast=DTYPES.get(plan.model.autocast),
        models_are_equal=are_equal,
        follow_every=plan.follow_every,
        seed=plan.run.seed,
    )


def _choose_common_layout(
    plan: Plan, policy: Any, reference: Reference | None, mesh: Mesh, *, longest: int
) -> tuple[Layout, str | None]:
    """Choose a layout that both models support.

    Returns the layout, and a message if it is not the one asked for.
    """
    layout, note = _choose_layout(plan, policy, plan.compute_dtype, mesh, longest=longest)
    if note or reference is None or type(reference.model) is type(policy):  # models of one class support the same
        return layout, note
    return _choose_layout(plan, reference.model, plan.reference_dtype, mesh, longest=longest)


def _choose_layout(
    plan: Plan, model: Any, compute_dtype: str, mesh: Mesh, *, longest: int
) -> tuple[Layout, str | None]:
    autocast, device = DTYPES.get(plan.model.autocast), next(model.parameters()).device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        choice = choose_layout(
            plan.data.layout,
            model,
            max_length=plan.data.max_length,
            compute_dtype=autocast or DTYPES[compute_dtype],
            longest=Longest.of(longest, max(plan.data.batch_size, plan.data.eval_batch_size), plan.data.max_length),
            vetoed=mesh.any,
        )
    release_gathered(model)  # `choose_layout` runs forward passes alone, after which FSDP's root stays gathered
    return choice
