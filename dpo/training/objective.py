"""Log-probabilities, losses and metrics of the examples of microbatches, reduced over all processes.

The frozen reference's part is cached by content, so that it scores no pair twice in a run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpo.errors import InputError
from dpo.losses import Losses, Scores, find_loss, needs_squares, needs_tails
from dpo.models.adapter_dropout import AdapterDropout
from dpo.models.adapters import weights_in_use
from dpo.models.layouts import Layout, Longest, Microbatch, choose_layout
from dpo.models.logprobs import TokenLogps
from dpo.models.pretrained import DTYPES
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import hold_the_same
from dpo.settings.plan import Plan
from dpo.training.batches import GlobalBatch
from dpo.training.metrics import REFERENCE, MicrobatchMetrics, Reduced, reduce_metrics
from dpo.training.reference import LogpTable, Reference, read_logps
from dpo.wording import count

Columns = dict[str, torch.Tensor]  # values of B examples by name, each (B,)
SIDES = ("chosen", "rejected")


def sum_tokens(tokens: TokenLogps, lengths: torch.Tensor, *, tails: bool) -> Columns:
    """A model's fields of `Scores`, by name: sums over the tokens of responses with `lengths`, (sides, B).

    With `tails` also the sums over the tokens beyond the shorter response's length.
    """
    logps, squares = (None if values is None else values[:, : lengths.shape[1]] for values in tokens)
    sums = {"": logps.sum(-1)}
    if tails:
        beyond = torch.arange(logps.shape[-1], device=logps.device) >= lengths.amin(0)[:, None]  # (B, T)
        sums["_tail"] = (logps * beyond).sum(-1)
    if squares is not None:
        sums["_squares"] = squares.sum(-1)
    return {side + kind: row for kind, rows in sums.items() for side, row in zip(SIDES, rows, strict=False)}


def make_scores(policy: Columns, lengths: torch.Tensor, reference: Columns) -> Scores:
    """The inputs of a loss, from the sums of the policy and of the reference (empty if there is none)."""
    named = {f"{side}_lengths": n for side, n in zip(SIDES, lengths, strict=False)}
    return Scores(**policy, **named, **{f"reference_{name}": values for name, values in reference.items()})


class Prepared(NamedTuple):
    """Values computed once per global batch of B examples, for its microbatches."""

    reference: torch.Tensor | None = None  # from `cached_reference`
    constants: torch.Tensor | None = None  # (B, k): `Loss.constants`
    keys: Sequence[tuple[bytes, ...]] = ()  # keys under which to cache the reference's log-probabilities
    counted: torch.Tensor | None = None  # (B,) bool: the examples that count; None: all
    n_counted: int = 1

    def mean(self, losses: torch.Tensor, indices: torch.Tensor, *, times: int) -> torch.Tensor:
        """A microbatch's part of the mean loss over the examples that count, multiplied by `times`."""
        total = losses.sum() if self.counted is None else losses[self.counted[indices]].sum()
        return total * times / max(1, self.n_counted)


class RunningAverage:
    """The running average over updates of the value that a loss averages (`Loss.averaged`).

    All of these updates have the same reference. A part of checkpoints.
    """

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float, *, momentum: float) -> None:
        self.value = momentum * self.value + (1 - momentum) * value

    def reset(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Objective:
    """The loss of a policy, whose gradient an update follows.

    `loss_config` has the name of the loss and its options. `autocast` is the dtype in which float32 weights are
    multiplied, None for their own. While the `models_are_equal`, rewards differ only by rounding, so accuracies are 0.
    Every `follow_every` updates the reference becomes a copy of the policy; as that makes the models equal repeatedly,
    no accuracies are logged while they are. `seed` is for the `dropout` of the policy's adapter, which is on only in
    updates.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        reference: Reference | None,
        layout: Layout,
        mesh: Mesh,
        loss_config: Mapping[str, Any],
        *,
        autocast: torch.dtype | None = None,
        models_are_equal: bool = False,
        follow_every: int | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.reference, self.layout, self.mesh = policy, reference, layout, mesh
        self.loss, self.loss_config = find_loss(loss_config), loss_config
        # fields of `Scores` that a forward gives beside sums; for the reference only tails
        self.tails, self.squares = needs_tails(loss_config), needs_squares(loss_config)
        self.cached_columns = [*SIDES, *(f"{side}_tail" for side in SIDES if self.tails)]
        self.average = RunningAverage()
        self.parts = {"average": self.average} if self.loss.averaged else {}  # parts of checkpoints
        self.autocast, self.models_are_equal, self.follow_every = autocast, models_are_equal, follow_every
        self.device = next(policy.parameters()).device
        self.dropout = AdapterDropout(policy, seed=seed)

    def forward(self, model: torch.nn.Module, microbatch: Microbatch, *, with_squares: bool = False) -> Columns:
        """Run a model on a microbatch on the device and return `sum_tokens` of its examples."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            tokens = self.layout.forward(model, microbatch.inputs, with_squares=with_squares)
        return sum_tokens(tokens, microbatch.lengths, tails=self.tails)

    def reference_forward(self, microbatch: Microbatch) -> Columns:
        """The same for the reference, which must have a model."""
        with self.reference.in_use():
            return self.forward(self.reference.model, microbatch)

    def losses(
        self,
        microbatch: Microbatch,
        prepared: Prepared = Prepared(),
        *,
        split: str,
        loss_config: Mapping[str, Any] | None = None,
    ) -> tuple[torch.Tensor, Columns]:
        """Losses of the examples of a microbatch on the device, (B,), and their detached metrics.

        `loss_config` replaces the run's. The metrics include the reference's log-probabilities, under REFERENCE.
        Raises InputError for a loss that needs values which the run's forwards do not compute.
        """
        loss_config = loss_config or self.loss_config
        if needs_tails(loss_config) > self.tails or needs_squares(loss_config) > self.squares:
            raise InputError("loss.ld_alpha and loss.wpo can be used only if the run's own config has them")
        loss = find_loss(loss_config)
        scores, reference = self._score(microbatch, prepared.reference, with_reference=loss.reference)
        if prepared.constants is not None:
            scores = scores._replace(of_batch=prepared.constants[microbatch.indices])
        found = loss(scores._replace(average=self.average.value), loss_config)
        return found.losses, self._metrics(scores, reference, found, split=split)

    def _metrics(self, scores: Scores, reference: Columns, found: Losses, *, split: str) -> Columns:
        """The metrics of each example, detached, and the reference's log-probabilities."""
        losses, chosen, rejected = found
        metrics: Columns = {}
        if chosen is not None and rejected is not None:
            metrics = {f"rewards_{split}/chosen": chosen, f"rewards_{split}/rejected": rejected}
            if not (self.models_are_equal and self.follow_every):
                ranked_right = (chosen > rejected) & (not self.models_are_equal)
                metrics[f"rewards_{split}/accuracies"] = ranked_right.to(chosen)
            metrics[f"rewards_{split}/margins"] = chosen - rejected
            metrics[f"logps_{split}/rejected"] = scores.rejected.detach()
        metrics |= reference
        return metrics | {f"logps_{split}/chosen": scores.chosen.detach(), f"loss/{split}": losses.detach()}

    def _score(
        self, microbatch: Microbatch, cached: torch.Tensor | None, *, with_reference: bool
    ) -> tuple[Scores, Columns]:
        """The inputs of a loss for a microbatch, and the reference's part of them, under REFERENCE."""
        reference: Columns = {}
        if with_reference and cached is not None:
            reference = dict(zip(self.cached_columns, cached[microbatch.indices].unbind(1), strict=True))
        elif with_reference:  # before the policy's forward, whose activations stay
            with torch.no_grad():
                reference = self.reference_forward(microbatch)
        policy = self.forward(self.policy, microbatch, with_squares=self.squares)
        reference = {name: values.to(policy["chosen"]) for name, values in reference.items()}
        scores = make_scores(policy, microbatch.lengths, reference)
        return scores, {f"{REFERENCE}{name}": values for name, values in reference.items()}

    @torch.no_grad()
    def prepare(self, batch: GlobalBatch, *, update: int) -> Prepared:
        """Values computed once per global batch, for its microbatches.

        The constants cost a forward of the policy on every microbatch, with the dropout of the update. They are None if
        the loss needs none, or if the batch is a single microbatch whose examples all count.
        """
        loss, cached = self.loss, self.cached_reference(batch)
        counted = None if batch.counted is None else batch.counted.to(self.device)
        is_whole = len(batch.microbatches) == 1 and self.mesh.data_size == 1 and counted is None
        if loss.of_batch is None or is_whole:
            return Prepared(cached, None, batch.keys if cached is None else (), counted, batch.n_counted)
        whole, _ = self._score_all([batch], update=update)
        of_batch = torch.ones(len(batch.examples), dtype=torch.bool) if batch.counted is None else batch.counted
        if not of_batch.any():
            return Prepared(self.cached_reference(batch), None, (), counted, batch.n_counted)
        scores = Scores(*(values[of_batch] if torch.is_tensor(values) else values for values in whole))
        of_counted = loss.constants(scores._replace(average=self.average.value), self.loss_config)
        constants = of_counted.new_zeros(len(batch.examples), *of_counted.shape[1:])
        constants[of_batch] = of_counted
        constants = constants.to(self.device, torch.float32)
        return Prepared(self.cached_reference(batch), constants, (), counted, batch.n_counted)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[GlobalBatch]) -> Reduced:
        """The metrics of all examples of the batches; the loss is computed as for one batch of them all.

        The running average over updates is replaced by its limit if every update were like this, so that the loss
        depends only on weights and examples.
        """
        scores, reference = self._score_all(batches)
        found = self.loss(scores, self.loss_config)
        if self.loss.averaged and self.loss_config["momentum"] < 1:
            chosen, rejected = (values.mean().item() for values in found[1:])
            average = self.loss.averaged(chosen, rejected, self.loss_config["beta"])
            found = self.loss(scores._replace(average=average), self.loss_config)
        return Reduced(self._metrics(scores, reference, found, split="eval"), {})

    def _score_all(self, batches: Iterable[GlobalBatch], *, update: int | None = None) -> tuple[Scores, Columns]:
        """`_score` for every example of the batches, on every process, in float64; caches the reference's part."""
        table, keys, n_examples, is_cached = [], [], 0, True
        for batch in batches:
            cached = self.cached_reference(batch)
            for microbatch in (microbatch.to(self.device) for microbatch in batch.microbatches):
                with self.dropout.on(microbatch.inputs, update=update):
                    scores, reference = self._score(microbatch, cached, with_reference=self.loss.reference)
                columns = {name: values for name, values in scores._asdict().items() if torch.is_tensor(values)}
                columns = {name: values.double() for name, values in (columns | reference).items()}
                table.append((microbatch.indices + n_examples, columns))
            n_examples, keys = n_examples + len(batch.examples), keys + batch.keys
            is_cached &= cached is not None
        whole = self.reduce(table, n_examples, [] if is_cached else keys).examples
        reference = {name: values for name, values in whole.items() if name.startswith(REFERENCE)}
        return Scores(**{name: values for name, values in whole.items() if name not in reference}), reference

    def applied(self, metrics: Mapping[str, float]) -> None:
        """Record that the optimizer took a step on a global batch with these metrics."""
        self.models_are_equal = False
        if self.loss.averaged:
            rewards = metrics["rewards_train/chosen"], metrics["rewards_train/rejected"]
            value = self.loss.averaged(*rewards, self.loss_config["beta"])
            self.average.add(value, momentum=self.loss_config["momentum"])

    def sync_if_due(self, number: int) -> None:
        """Make the reference a copy of the policy if that is due after update `number`, applied or not."""
        if self.follow_every and number % self.follow_every == 0:
            self.reference.follow(self.policy)
            self.models_are_equal = True
            self.average.reset()  # it averaged log-ratios to the former reference

    def cached_reference(self, batch: GlobalBatch) -> torch.Tensor | None:
        """The reference's cached log-probabilities of a global batch, on the device; None unless all are cached.

        (B, 2), or (B, 4) with tails.
        """
        cached = self.reference.logps.find(batch.keys) if self.reference else None
        if cached is None or self.device.type != "cuda":
            return cached
        return cached.pin_memory().to(self.device, non_blocking=True)

    def reduce(
        self,
        metrics: MicrobatchMetrics,
        n_examples: int,
        keys: Sequence[tuple[bytes, ...]],
        scalars: Mapping[str, torch.Tensor] | None = None,
    ) -> Reduced:
        """The metrics of all examples, on every process, and the sums of `scalars` over the processes.

        With `keys`, also caches the reference's log-probabilities.
        """
        reduced = reduce_metrics(metrics, n_examples, self.mesh.add, counts=self.mesh.counts, scalars=scalars or {})
        if keys:
            columns = [reduced.examples[f"{REFERENCE}{name}"] for name in self.cached_columns]
            self.reference.logps.add(keys, torch.stack(columns, dim=1))
        return reduced

    @torch.no_grad()
    def score(self, batch: GlobalBatch) -> torch.Tensor:
        """The reference's log-probabilities of a global batch, (B, 2) or with tails (B, 4), on every process."""
        metrics = [
            (microbatch.indices, self.reference_forward(microbatch))
            for microbatch in (microbatch.to(self.device) for microbatch in batch.microbatches)
        ]
        reduced = reduce_metrics(metrics, len(batch.examples), self.mesh.add, counts=self.mesh.counts)
        return torch.stack(list(reduced.examples.values()), dim=1)

    def score_all(self, batches: Iterable[GlobalBatch], path: Path) -> str:
        """Cache all pairs of the batches, from the file at `path` or scored now, and write the file.

        Returns a message about it. Raises InputError if the file disagrees with the reference's current values.
        """
        read = read_logps(path) if self.mesh.rank == 0 and path.exists() else LogpTable()
        read, seed = from_rank_0((read, secrets.randbits(32)))
        n_scored = self.reference.logps.score_all(batches, self.score, read, seed=seed)
        if self.mesh.rank == 0:
            self.reference.logps.save(path)
        known = f", {count(len(read), 'response')} read from {path}" if len(read) else ""
        return f"{count(n_scored, 'pair')} scored by the reference{known}"


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

    `log` gets the reason if that is not the layout asked for. `longest` is the largest number of tokens of a prompt
    with one response.
    """
    autocast = DTYPES[plan.model.autocast] if plan.model.autocast else None
    device = next(policy.parameters()).device
    tried = [(policy, plan.compute_dtype)]
    if reference is not None and type(reference.model) is not type(policy):  # may not support the same layout
        tried.append((reference.model, plan.reference_dtype))
    layout = None
    for model, dtype in tried:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            layout, note = choose_layout(
                plan.data.layout,
                model,
                max_length=plan.data.max_length,
                compute_dtype=autocast or DTYPES[dtype],
                longest=Longest.of(longest, max(plan.data.batch_size, plan.data.eval_batch_size), plan.data.max_length),
                vetoed=mesh.any,
            )
        release_gathered(model)
        if note:
            log(note)
            break
    equal = reference is not None and _are_equal(policy, reference, mesh)
    assert layout is not None
    return Objective(
        policy,
        reference,
        layout,
        mesh,
        plan.loss_options,
        autocast=autocast,
        models_are_equal=equal,
        follow_every=plan.follow_every,
        seed=plan.run.seed,
    )


def _are_equal(policy: Any, reference: Reference, mesh: Mesh) -> bool:
    ours = weights_in_use(policy)
    with reference.in_use():
        return hold_the_same(ours, weights_in_use(reference.model), mesh)
