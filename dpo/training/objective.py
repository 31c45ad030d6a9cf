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

from dpo.data.preflight import TrainingData
from dpo.errors import InputError, one_sentence
from dpo.losses import BETWEEN, Loss, Losses, Scores
from dpo.models.adapters import weights_in_use
from dpo.models.layouts import Layout, Longest, Microbatch, choose_layout
from dpo.models.logprobs import TokenLogps
from dpo.models.pretrained import DTYPES
from dpo.numbers import count
from dpo.parallel.mesh import Mesh, from_rank_0
from dpo.parallel.sharding import release_gathered
from dpo.parallel.state import hold_the_same
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, with_mismatched
from dpo.training.metrics import REFERENCE, MicrobatchMetrics, Reduced, reduce_metrics, scale_weights
from dpo.training.reference import Reference, read_logps

NamedTensors = dict[str, torch.Tensor]  # values of B examples by name, each (B,)


def sum_tokens(
    tokens: TokenLogps, microbatch: Microbatch, roles: Sequence[str], *, tails: bool, prefix: str = ""
) -> NamedTensors:
    """Sum a model's log-probabilities over each response's tokens.

    `tokens` are (sides, B, T), with one side for each response of an example. Returns columns of `make_scores`, such as
    `chosen`, and with `tails` also `chosen_tail`, summed over the tokens beyond the shorter response's length.
    """
    lengths = microbatch.lengths  # (sides, B)
    n_examples = lengths.shape[1]
    # a process without examples feeds another process's example, which is dropped here
    logps = tokens.logps[:, :n_examples]
    sums = {"": logps.sum(-1)}  # (sides, B), by suffix of the column
    if tails:
        shorter_length = lengths.amin(0)[:, None]  # (B, 1)
        is_in_tail = torch.arange(logps.shape[-1], device=logps.device) >= shorter_length  # (B, T)
        sums["_tail"] = (logps * is_in_tail).sum(-1)
    if tokens.squares is not None:
        sums["_squares"] = tokens.squares[:, :n_examples].sum(-1)
    return {
        f"{prefix}{role}{suffix}": values
        for suffix, by_side in sums.items()
        for role, values in microbatch.by_role(by_side, roles).items()
    }


def make_scores(columns: NamedTensors, **more: Any) -> Scores:
    """Make the input of a loss from columns, (B,) each, that have the names of its fields.

    In place of `between` there is a column for each role between best and worst.
    """
    fields = dict(columns)
    for form in ("{}", "{}_lengths", "reference_{}"):
        names = [form.format(role) for role in BETWEEN if form.format(role) in fields]
        if names:
            fields[form.format("between")] = torch.stack([fields.pop(name) for name in names], dim=1)  # (B, names)
    return Scores(**fields, **more)


def find_shares_ranked_right(
    chosen: torch.Tensor, rejected: torch.Tensor, is_chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Find, for each example, the share of opposite labels ranked right.

    All are (B,). A labelled example has one reward, in `chosen` if `is_chosen`, else in `rejected`. Two examples with
    opposite labels are ranked right if the chosen one has the higher reward; equal rewards count half. Shares are by
    weight. Their weighted mean is the area under the ROC curve.
    """

    def find_share_below(values: torch.Tensor, others: torch.Tensor, other_weights: torch.Tensor) -> torch.Tensor:
        """The share of `others`, (N,), below each of `values`, (B,)."""
        others, order = others.sort()
        sums = torch.cat([weights.new_zeros(1), other_weights[order].cumsum(0)])  # (N + 1,): entry k for the k lowest
        below = sums[torch.searchsorted(others, values)]  # (B,)
        below_or_equal = sums[torch.searchsorted(others, values, right=True)]  # (B,)
        return (below + below_or_equal) / (2 * sums[-1])

    below_chosen = find_share_below(chosen, rejected[~is_chosen], weights[~is_chosen])
    below_rejected = find_share_below(rejected, chosen[is_chosen], weights[is_chosen])
    return below_chosen.where(is_chosen, 1 - below_rejected)


class BatchContext(NamedTuple):
    """Values on the device that the microbatches of a global batch of B examples share."""

    weights: torch.Tensor  # (B,), `Batch.weights` divided by the largest
    total_weight: float  # the sum of `weights`, or 1 if all are 0
    reference: torch.Tensor | None = None  # (B, columns of `Loss.reference_columns`): log-probabilities, if known
    statistic: torch.Tensor | None = None  # (B, k): `Scores.batch_statistic`
    rows_to_cache: Sequence[int] = ()  # `Batch.cache_rows`, if `reference` is yet to be computed and cached


class RunningAverage:
    """The running average of `Loss.running_statistic` over updates with the same reference, a part of checkpoints."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Objective:
    """The loss of a policy, whose gradient an update follows.

    - `autocast`: the dtype in which float32 weights are multiplied; None: their own.
    - `models_are_equal`: policy and reference have the same weights. Their rewards differ only by rounding, so
      accuracies are 0.
    - `follow_every`: the number of updates after which the reference becomes a copy of the policy. If it is set, no
      accuracies are logged while the models are equal.
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
    ) -> None:
        self.policy, self.reference, self.layout, self.mesh, self.loss = policy, reference, layout, mesh, loss
        self.average = RunningAverage()
        self.states = {"objective": self} | ({"average": self.average} if loss.running_statistic else {})  # saved
        self.autocast, self.models_are_equal, self.follow_every = autocast, models_are_equal, follow_every
        self.device = next(policy.parameters()).device

    def state_dict(self) -> dict[str, bool]:
        # a resumed run could not tell: rounded to the reference's dtype, models that differ may be equal
        return {"models_are_equal": self.models_are_equal}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        self.models_are_equal = state["models_are_equal"]

    def forward(
        self, model: torch.nn.Module, microbatch: Microbatch, *, with_squares: bool = False, prefix: str = ""
    ) -> NamedTensors:
        """Run a model on a microbatch on the device; return the columns of `sum_tokens`."""
        tokens = self.forward_tokens(model, self.layout, microbatch.inputs, with_squares=with_squares)
        return sum_tokens(tokens, microbatch, self.loss.roles, tails=self.loss.needs_tails, prefix=prefix)

    def forward_tokens(
        self, model: torch.nn.Module, layout: Layout, inputs: Any, *, with_squares: bool = False
    ) -> TokenLogps:
        """Run a model on inputs of a layout, under the run's autocast."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return layout.forward(model, inputs, with_squares=with_squares)

    @torch.no_grad()
    def reference_forward(self, microbatch: Microbatch) -> NamedTensors:
        """Run `forward` on the reference, which must have a model."""
        with self.reference.in_use():
            return self.forward(self.reference.model, microbatch, prefix=REFERENCE)

    def score(
        self, microbatch: Microbatch, cached_reference: torch.Tensor | None = None, *, with_reference: bool
    ) -> NamedTensors:
        """Score a microbatch on the device with policy and reference; return the columns of `make_scores`.

        `cached_reference` has the reference's log-probabilities of the global batch, if known.
        """
        reference: NamedTensors = {}
        if with_reference and cached_reference is not None:
            logps = cached_reference[microbatch.indices].unbind(1)
            reference = dict(zip(self.loss.reference_columns, logps, strict=True))
        elif with_reference:  # before the policy's forward, whose activations stay in memory
            reference = self.reference_forward(microbatch)
        columns = self.forward(self.policy, microbatch, with_squares=self.loss.needs_squares)
        columns |= {name: values.to(columns["chosen"]) for name, values in reference.items()}  # device and dtype
        return columns | self.given_columns(microbatch)

    def given_columns(self, microbatch: Microbatch) -> NamedTensors:
        """The columns of `make_scores` that no model computes: numbers of tokens, and the offset."""
        lengths = microbatch.by_role(microbatch.lengths, self.loss.roles)
        columns = {f"{role}_lengths": n_tokens for role, n_tokens in lengths.items()}
        return columns if microbatch.offsets is None else columns | {"offset": microbatch.offsets}

    def losses(
        self,
        microbatch: Microbatch,
        context: BatchContext | None = None,
        *,
        split: str,
        loss: Loss | None = None,
    ) -> tuple[torch.Tensor, NamedTensors]:
        """Compute the losses of a microbatch on the device, (B,), and detached metrics.

        `loss` replaces the run's loss. The metrics include the reference's log-probabilities. Raises InputError for a
        loss that needs values which the run's forward passes do not compute.
        """
        loss = loss or self.loss
        if loss.needs_tails > self.loss.needs_tails or loss.needs_squares > self.loss.needs_squares:
            raise InputError(
                "loss.ld_alpha and loss.wpo need values that only a run configured with them computes: set them in the "
                "trainer's config"
            )
        columns = self.score(microbatch, context and context.reference, with_reference=loss.reference)
        statistic = None
        if context is not None:
            # examples of weight 0, such as an online run's ties, are detached, as 0 times the gradient of an infinite
            # loss would be NaN
            has_weight = context.weights[microbatch.indices] > 0
            with_gradient = {name: values for name, values in columns.items() if values.requires_grad}
            columns |= {name: values.where(has_weight, values.detach()) for name, values in with_gradient.items()}
            if context.statistic is not None:
                statistic = context.statistic[microbatch.indices]
        output = loss(make_scores(columns, average=self.average.value, batch_statistic=statistic))
        return output.losses, self._metrics(columns, output, split=split)

    def weigh(self, losses: torch.Tensor, microbatch: Microbatch, context: BatchContext) -> torch.Tensor:
        """A microbatch's part of the weighted mean over the global batch."""
        weights = context.weights[microbatch.indices]  # (B,)
        weighted_sum = (losses.where(weights > 0, 0) * weights).sum()  # the loss of a tie may be infinite
        return weighted_sum * self.mesh.data_size / context.total_weight  # data_size undoes FSDP's averaging

    def _metrics(self, columns: NamedTensors, output: Losses, *, split: str) -> NamedTensors:
        """Metrics per example, detached, with the reference's log-probabilities among them."""
        metrics = {f"rewards_{split}/{role}": rewards for role, rewards in output.rewards.items()}
        if output.rewards and self.loss.has_margins:
            chosen, rejected = output.rewards["chosen"], output.rewards["rejected"]
            if self.models_are_equal:  # their rewards differ only by rounding, which must not count as ranking
                accuracies = torch.zeros_like(chosen)
            elif output.accuracies is None:
                accuracies = (chosen > rejected).to(chosen)
            else:
                accuracies = output.accuracies
            if not (self.models_are_equal and self.follow_every):
                metrics[f"rewards_{split}/accuracies"] = accuracies
            metrics[f"rewards_{split}/margins"] = chosen - rejected
        if not self.loss.scalar_head:  # the scores of a reward model are its rewards
            roles = list(output.rewards) or ["chosen"]  # only SFT has no rewards
            for role in reversed(roles):  # rejected first, as in the reference implementation's logs
                metrics[f"logps_{split}/{role}"] = columns[role].detach()
        metrics |= {f"{name}/{split}": values for name, values in output.metrics.items()}
        metrics |= {name: values for name, values in columns.items() if name.startswith(REFERENCE)}
        return metrics | {f"loss/{split}": output.losses.detach()}

    @torch.no_grad()
    def prepare(self, batch: Batch) -> BatchContext:
        """Compute the values that the microbatches of a global batch share.

        A batch statistic costs a forward pass of policy and reference on every microbatch, or on every mismatched one.
        If it covers the microbatches, it also computes what the reference's cache lacks.
        """
        relative_weights = scale_weights(batch.weights)
        weights, total_weight = self._to_device(torch.tensor(relative_weights)), sum(relative_weights) or 1.0
        # a loss that gets the whole batch at once finds its statistic itself, if there are no ties to leave out
        loss_finds_statistic = len(batch.microbatches) == 1 and self.mesh.data_size == 1 and all(batch.weights)
        if self.loss.batch_statistic is not None and batch.mismatched is None and not loss_finds_statistic:
            columns = self._score_all([batch])
            reference = self._to_device(self._stack_reference(columns)) if self.loss.reference else None
            return BatchContext(weights, total_weight, reference, self._compute_statistic(columns, batch.weights))
        statistic = None
        if batch.mismatched is not None:
            statistic = self._compute_statistic(self._score_all([batch.mismatched]), batch.weights)
        reference = self.cached_reference(batch)
        rows_to_cache = batch.cache_rows if reference is None and self.loss.reference else ()
        return BatchContext(weights, total_weight, reference, statistic, rows_to_cache)

    def _compute_statistic(self, columns: NamedTensors, weights: Sequence[float]) -> torch.Tensor | None:
        """Compute the loss's statistic of a global batch, (B, k), on the device.

        Examples of weight 0 (ties) do not count, as in the loss; their rows are zeros. None if all examples are ties.
        """
        if not any(weights):
            return None
        has_weight = torch.tensor([weight > 0 for weight in weights])
        weighted = {name: values[has_weight] for name, values in columns.items()}
        values = self.loss.find_batch_statistic(make_scores(weighted, average=self.average.value))
        statistic = values.new_zeros(len(weights), values.shape[1])
        statistic[has_weight] = values
        return self._to_device(statistic.float())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], mismatched: Iterable[Batch], *, weights: Sequence[float]) -> Reduced:
        """Evaluate all examples of the batches, of these weights, as one batch.

        A running average is replaced by the statistic of this batch, so that the loss depends only on the model and the
        examples. With `loss.momentum=1` the average is disabled and stays 0.
        """
        columns = self._score_all(batches)
        scores = make_scores(columns)
        if self.loss.mismatched:
            mismatched_scores = make_scores(self._score_all(mismatched))
            scores = scores._replace(batch_statistic=self.loss.find_batch_statistic(mismatched_scores))
        output, options = self.loss(scores), self.loss.options
        has_role = {role: getattr(scores, f"{role}_lengths") > 0 for role in output.rewards}  # (B,) each
        has_all_roles = all(has_response.any() for has_response in has_role.values())
        if self.loss.running_statistic and options["momentum"] < 1 and has_all_roles:
            # rewards do not depend on the average, so those of the first call serve to compute it
            means = {role: rewards[has_role[role]].mean().item() for role, rewards in output.rewards.items()}
            average = self.loss.running_statistic(means["chosen"], means["rejected"], options["beta"])
            output = self.loss(scores._replace(average=average))
        metrics = self._metrics(columns, output, split="eval")
        if self.loss.trains_on == "labels" and has_all_roles:
            chosen, rejected = output.rewards["chosen"], output.rewards["rejected"]
            if self.models_are_equal:  # their rewards differ only by rounding, which must not count as ranking
                chosen, rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)
            metrics["rewards_eval/auc"] = find_shares_ranked_right(
                chosen, rejected, has_role["chosen"], torch.tensor(scale_weights(weights), dtype=chosen.dtype)
            )
        return Reduced(metrics, {})

    @torch.no_grad()
    def find_log_ratios(self, batches: Iterable[Batch]) -> list[float]:
        """Log-ratios of examples whose only response is `chosen`."""
        columns = self._score_all(batches)
        return (columns["chosen"] - columns["reference_chosen"]).tolist()

    def _score_all(self, batches: Iterable[Batch]) -> NamedTensors:
        """Score all examples of the batches, in float64 on the host of every process.

        The reference's log-probabilities are also cached.
        """
        microbatch_columns, cache_rows, n_examples, needs_caching = [], [], 0, False
        for batch in batches:
            cached = self.cached_reference(batch)
            needs_caching |= self.loss.reference and cached is None
            for microbatch in batch.microbatches:
                microbatch = microbatch.to(self.device)
                columns = self.score(microbatch, cached, with_reference=self.loss.reference)
                in_float64 = {name: values.double() for name, values in columns.items()}
                microbatch_columns.append((microbatch.indices + n_examples, in_float64))  # indices over all batches
            n_examples += len(batch.examples)
            cache_rows += batch.cache_rows
        return self.reduce(microbatch_columns, n_examples, cache_rows if needs_caching else ()).examples

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Update running values after a step of the optimizer, by means over the global batch."""
        self.models_are_equal = False
        if self.loss.running_statistic:
            beta, momentum = self.loss.options["beta"], self.loss.options["momentum"]
            chosen, rejected = metrics.get("rewards_train/chosen"), metrics.get("rewards_train/rejected")
            if chosen is None or rejected is None:  # all labels of the batch are alike: it has no statistic
                return
            value = self.loss.running_statistic(chosen, rejected, beta)
            self.average.value = momentum * self.average.value + (1 - momentum) * value

    def sync_if_due(self, update: int) -> None:
        """Copy the policy to the reference if due after this update, which a callback may have refused."""
        if self.follow_every and update % self.follow_every == 0:
            self.reference.follow(self.policy)
            self.models_are_equal = True
            self.average.value = 0.0  # it averaged log-ratios to the former reference

    def cached_reference(self, batch: Batch) -> torch.Tensor | None:
        """The reference's log-probabilities, (B, columns) on the device, if all examples are cached."""
        if not self.loss.reference:
            return None
        cached = self.reference.logps.find(batch.cache_rows)
        return None if cached is None else self._to_device(cached)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device asynchronously."""
        if self.device.type != "cuda":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)  # only copies from pinned memory do not block

    def reduce(
        self,
        metrics: MicrobatchMetrics,
        n_examples: int,
        rows_to_cache: Sequence[int],
        scalars: Mapping[str, torch.Tensor] | None = None,
    ) -> Reduced:
        """Gather metrics of all examples and sum `scalars`, on every process.

        The reference's log-probabilities go to `rows_to_cache`, if there are any.
        """
        reduced = reduce_metrics(metrics, n_examples, self.mesh.add, counts=self.mesh.counts, scalars=scalars or {})
        if rows_to_cache:
            self.reference.logps.store(rows_to_cache, self._stack_reference(reduced.examples))
        return reduced

    def _stack_reference(self, columns: NamedTensors) -> torch.Tensor:
        return torch.stack([columns[name] for name in self.loss.reference_columns], dim=1)

    @torch.no_grad()
    def find_reference_logps(self, batch: Batch) -> torch.Tensor:
        """Score a global batch with the reference, on every process: (B, columns of `Loss.reference_columns`)."""
        logps = []
        for microbatch in batch.microbatches:
            microbatch = microbatch.to(self.device)
            logps.append((microbatch.indices, self.reference_forward(microbatch)))
        reduced = reduce_metrics(logps, len(batch.examples), self.mesh.add, counts=self.mesh.counts)
        return self._stack_reference(reduced.examples)

    def cache_reference(self, batches: Iterable[Batch], path: Path) -> str:
        """Cache the reference's log-probabilities of all examples; save them at `path`.

        Examples that an earlier run saved there are read, all others are scored. Returns a message with both numbers.
        Raises InputError if the file disagrees with the reference's current values.
        """
        logps = self.reference.logps
        stored = read_logps(path, logps.shape) if self.mesh.rank == 0 and path.exists() else None
        stored, seed = from_rank_0((stored, secrets.randbits(32)))  # all processes must score the same batches
        n_scored = logps.fill(with_mismatched(batches), self.find_reference_logps, stored, path=path, seed=seed)
        unsaved = ""
        if self.mesh.rank == 0:
            try:
                logps.save(path)
            except OSError as error:  # this run has the scores all the same
                unsaved = f"; warning: they are not saved for other runs ({one_sentence(error)})"
        n_read = 0 if stored is None else int((~np.isnan(stored).any(axis=1)).sum())  # examples without unknown values
        read = f", {count(n_read, 'example')} read from {path}" if n_read else ""
        return f"{count(n_scored, 'example')} scored by the reference{read}{unsaved}"


def make_objective(
    plan: Plan,
    policy: Any,
    reference: Reference | None,
    data: TrainingData,
    mesh: Mesh,
    *,
    log: Callable[[str], None],
) -> Objective:
    """Make the objective, with a layout that both models support.

    If that is not the layout that the config asks for, `log` gets the reason.
    """
    # prompts of an online run, or of mismatched examples, may have responses as long as max_length allows
    has_other_responses = plan.online or plan.loss.mismatched
    longest_example = plan.data.max_length if has_other_responses else data.report.longest(plan.data.max_length)
    layout, fallback_reason = _choose_layout(plan, policy, plan.compute_dtype, mesh, longest_example=longest_example)
    # only a reference of another class may not support the layout chosen for the policy
    if reference is not None and type(reference.model) is not type(policy) and not fallback_reason:
        layout, fallback_reason = _choose_layout(
            plan, reference.model, plan.reference_dtype, mesh, longest_example=longest_example
        )
    if fallback_reason:
        log(fallback_reason)
    models_are_equal = False
    if reference is not None:
        # before `in_use()`: policy and reference may be one module, whose adapter it switches
        policy_weights = weights_in_use(policy)
        with reference.in_use():
            models_are_equal = hold_the_same(policy_weights, weights_in_use(reference.model), mesh)
    return Objective(
        policy,
        reference,
        layout,
        mesh,
        plan.loss,
        autocast=DTYPES.get(plan.model.autocast),
        models_are_equal=models_are_equal,
        follow_every=plan.follow_every,
    )


def _choose_layout(
    plan: Plan, model: Any, compute_dtype: str, mesh: Mesh, *, longest_example: int
) -> tuple[Layout, str | None]:
    """A layout that a model supports, and a message with the reason if it is not `plan.data.layout`."""
    autocast, device = DTYPES.get(plan.model.autocast), next(model.parameters()).device
    batch_size = max(plan.data.batch_size, plan.data.eval_batch_size)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        choice = choose_layout(
            plan.data.layout,
            model,
            max_length=plan.data.max_length,
            compute_dtype=autocast or DTYPES[compute_dtype],
            longest=Longest.of(longest_example, batch_size, plan.data.max_length, n_responses=len(plan.loss.roles)),
            on_any_process=mesh.any,
        )
    release_gathered(model)  # FSDP's root stays gathered after a forward pass without a backward pass
    return choice
