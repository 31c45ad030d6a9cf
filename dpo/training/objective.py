"""Log-probabilities, losses and metrics of examples, reduced over all processes; the frozen reference and its cache.

In shapes, B counts examples, T tokens, and "sides" the most responses of an example: 2 for pairs.
"""

import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpo.checkpoint.resume import find_model_facts
from dpo.data.examples import Example
from dpo.data.preflight import TrainingData
from dpo.errors import InputError, RunError, WarningLine, explaining_library, one_sentence
from dpo.losses import BETWEEN, RESPONSE_ROLES, Loss, Losses, Scores
from dpo.models.layouts import Layout, Microbatch, Padded, choose_layout
from dpo.models.pretrained import DTYPES
from dpo.numbers import count
from dpo.parallel.mesh import Mesh
from dpo.parallel.sharding import (
    announce_backward,
    gather_part_like,
    local_tensor,
    release_gathered,
)
from dpo.settings.plan import Plan
from dpo.system.host import is_gpu
from dpo.system.plain_files import check_readable, replacing
from dpo.system.waiting import from_rank_0
from dpo.training.batches import Batch
from dpo.training.optimization import LossScale

REFERENCE_PREFIX = "reference_"  # begins the names of the reference's log-probabilities, gathered with the metrics

# For each microbatch: indices of its examples in the global batch, (n,), and their metrics, (n,) each.
MicrobatchMetrics = list[tuple[Tensor, Mapping[str, Tensor]]]
# Columns of values of B examples, (B,) each, by name. Those of scores have the names of the fields of `Scores`, but in
# place of `between` there is a column for each role of `BETWEEN`.
NamedTensors = dict[str, Tensor]


# --- metrics ---------------------------------------------------------------------------------------------------------


class Reduced(NamedTuple):
    """The metrics of a global batch, on the host."""

    examples: dict[str, Tensor]  # metrics, and the reference's log-probabilities, (B,) each
    scalars: Mapping[str, float] = {}  # sums over the processes

    def means(self, examples: Sequence[Example] = (), weights: Sequence[float] = ()) -> dict[str, float]:
        """Return the weighted mean of each metric; without weights, or if all are 0, every example counts alike.

        Given the batch's `examples`, a metric whose name ends in a role is a mean over the examples with such a
        response, and is left out if there are none.
        """
        means = {}
        for name, values in self.examples.items():
            if name.startswith(REFERENCE_PREFIX):
                continue
            values = values.double()
            metric_weights = torch.ones_like(values)
            if any(weights):
                metric_weights = torch.tensor(weights, dtype=torch.float64)
            role = name.rpartition("/")[2]
            if examples and role in RESPONSE_ROLES:
                metric_weights *= torch.tensor([role in example.roles for example in examples])
            metric_weights = scale_weights(metric_weights)
            if metric_weights.any():
                counted = values.where(metric_weights > 0, 0)  # 0 times the infinite loss of a tie would be NaN
                means[name] = ((counted * metric_weights).sum() / metric_weights.sum()).item()
        return means

    def find_kl(self, indices: Sequence[int]) -> dict[str, float]:
        """Return `online/kl` (docs/metrics.md), a mean over the examples at `indices`; nothing without a reference."""
        columns = self.examples
        if not indices or f"{REFERENCE_PREFIX}chosen" not in columns:
            return {}
        log_ratios = [
            columns[f"logps_train/{role}"].double() - columns[f"{REFERENCE_PREFIX}{role}"].double()
            for role in ("chosen", "rejected")
        ]
        return {"online/kl": torch.stack(log_ratios)[:, indices].mean().item()}


# --- the reference, and a cache of its log-probabilities for runs with the same reference, data and lengths ----------


def read_logps(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read a table that `ReferenceLogps.save` wrote; raise InputError for another file, or another shape."""
    problem = f"{path} is not a file of reference log-probabilities"
    check_readable(path)
    with explaining_library(lambda error: InputError(f"{problem} ({one_sentence(error)}): remove it")):
        logps = np.load(path, allow_pickle=False)["logps"].astype(np.float64)
    if logps.shape != shape:
        raise InputError(f"{problem} of shape {shape}: remove it")
    return logps


class ReferenceLogps:
    """The reference's log-probabilities, a row per example; NaN where unknown. Columns are `Loss.reference_columns`.

    `identity` names the data and length limits, on which token ids depend.
    """

    def __init__(self, n_examples: int, n_columns: int, identity: str = ""):
        self.table = np.full((n_examples, n_columns), np.nan)
        self.identity = identity

    def store(self, rows: Sequence[int], logps: Tensor) -> None:
        """Write values, (B, columns) on the host, into these rows; values that are not finite become NaN."""
        self.table[rows] = logps.double().where(logps.isfinite(), np.nan).numpy()

    def find(self, rows: Sequence[int]) -> Tensor | None:
        """Return the values of these rows, (B, columns) in float64; None if any is unknown, or without rows."""
        values = self.table[rows]
        return torch.from_numpy(values) if len(rows) and not np.isnan(values).any() else None

    def state_dict(self) -> dict:
        return {"logps": torch.from_numpy(self.table.copy())}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the table of a checkpoint, which was made with the same data and length limits (`check_inputs`)."""
        self.table = state["logps"].numpy().astype(np.float64)

    def save(self, path: Path) -> None:
        """Write the table to an .npz file, which is complete or not there; `read_logps` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, logps=self.table)
            file.flush()
            os.fsync(file.fileno())


@dataclass(eq=False)
class Reference:
    """The frozen reference: a model and the cache of its log-probabilities.

    The model is None once it was freed, as all examples are cached. It may be the policy's own module, which is the
    reference only inside `in_use()`, where it has another adapter or none.
    """

    model: nn.Module | None
    digest: str | None  # see `model_digest`, without the config; on rank 0 only
    logps: ReferenceLogps
    in_use: Callable[[], AbstractContextManager] = nullcontext

    @torch.no_grad()
    def follow(self, policy: nn.Module) -> None:
        """Copy the policy's weights into the separate reference model, and empty the cache."""
        release_gathered(policy)  # so that parameters are shards, on every process
        release_gathered(self.model)
        for reference_weight, policy_weight in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_tensor(reference_weight).copy_(gather_part_like(policy_weight, reference_weight))
        self.logps.table.fill(np.nan)


# --- the objective ---------------------------------------------------------------------------------------------------


def make_scores(columns: NamedTensors, **other_fields: Any) -> Scores:
    """Make `Scores` of columns, and of `other_fields`.

    The columns of the roles `BETWEEN` are stacked, (B, ranks): their log-probabilities become `between`, their lengths
    `between_lengths`, and the reference's log-probabilities `reference_between`.
    """
    fields = dict(columns)
    for pattern in ("{}", "{}_lengths", "reference_{}"):
        by_rank = [fields.pop(pattern.format(role)) for role in BETWEEN if pattern.format(role) in fields]
        if by_rank:
            fields[pattern.format("between")] = torch.stack(by_rank, dim=1)  # (B, ranks)
    return Scores(**fields, **other_fields)


def scale_weights(weights: Sequence[float] | Tensor) -> Tensor:
    """Return the weights in float64, divided by a power of two so that the largest is about 1.

    Their sum then neither overflows nor vanishes, and their ratios are exact.
    """
    values = np.asarray(weights, dtype=np.float64)
    _, exponent = np.frexp(values.max(initial=0.0))
    return torch.from_numpy(np.ldexp(values, -exponent))


def per_example_auc(rewards: Tensor, is_chosen: Tensor, weights: Tensor) -> Tensor:
    """Return, for each example, the weighted share of the other label's examples against which it is ranked right.

    A desirable example (`is_chosen`) should have a higher reward than an undesirable one; a tie counts half. The
    weighted mean of the shares is the area under the ROC curve. Arguments and result are (B,).
    """
    shares = []
    for reward, label in zip(rewards, is_chosen, strict=True):
        is_opposite = is_chosen != label
        other_rewards = rewards[is_opposite]
        other_weights = scale_weights(weights[is_opposite])
        is_right = other_rewards < reward if label else other_rewards > reward
        right = other_weights[is_right].sum() + other_weights[other_rewards == reward].sum() / 2
        shares.append(right / other_weights.sum())
    return torch.stack(shares).to(rewards.dtype)


class BatchContext(NamedTuple):
    """Values on the device that the microbatches of a global batch of B examples share."""

    weights: Tensor  # (B,), `Batch.weights` scaled to the sum 1, unless all are 0
    reference: Tensor | None = None  # (B, columns of `Loss.reference_columns`): log-probabilities, if known
    statistic: Tensor | None = None  # (B, k): `Scores.batch_statistic`


@dataclass(eq=False)
class Objective:
    """The loss of a policy with its metrics: for the gradient of an update, and for evaluations."""

    policy: nn.Module
    reference: Reference | None
    layout: Layout
    mesh: Mesh
    loss: Loss
    layout_note: str | None = None  # why the layout is not the one asked for
    autocast: torch.dtype | None = None  # dtype of forward passes with float32 weights; None: no autocast
    follow_every: int | None = None  # updates after which the reference becomes a copy of the policy
    average: float = 0.0  # running average of `Loss.running_statistic` over updates with the same reference
    models_are_equal: bool = False  # policy and reference have the same weights
    loss_scale: LossScale = field(default_factory=LossScale)

    def __post_init__(self):
        self.device = next(self.policy.parameters()).device

    @property
    def separate_reference(self) -> nn.Module | None:
        """The reference model; None if it is the policy's module, or was freed as all examples are cached."""
        return self.reference.model if self.reference and self.reference.model is not self.policy else None

    def state_dict(self) -> dict:
        return {"models_are_equal": self.models_are_equal, "average": self.average}

    def load_state_dict(self, state: Mapping) -> None:
        self.models_are_equal = state["models_are_equal"]
        self.average = state["average"]

    # --- scores ------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, microbatch: Microbatch, *, prefix: str = "") -> NamedTensors:
        """Return a model's log-probabilities of the responses of a microbatch on the device, summed over tokens, (B,).

        Columns are named PREFIX + role, such as `reference_chosen`. If the loss needs them, there are also sums over
        the tails of responses, with the suffix `_tail`, and sums of the policy's squares (`Scores`), with `_squares`.
        """
        with self.autocasting():  # squares are those of the policy, which has no prefix
            tokens = self.layout.forward(model, microbatch.inputs, with_squares=self.loss.needs_squares and not prefix)
        lengths = microbatch.lengths  # (sides, B)
        n_examples = lengths.shape[1]
        # A process without examples runs a dummy example, which is dropped here.
        logps = tokens.logps[:, :n_examples]  # (sides, B, T)
        sums = {"": logps.sum(-1)}  # (sides, B), by suffix of the name
        if self.loss.needs_tails:
            # The tail of a response is its part beyond the length of the shortest response of its example.
            is_in_tail = torch.arange(logps.shape[-1], device=logps.device) >= lengths.amin(0)[:, None]  # (B, T)
            sums["_tail"] = (logps * is_in_tail).sum(-1)
        if tokens.squares is not None:
            sums["_squares"] = tokens.squares[:, :n_examples].sum(-1)
        columns = {}
        for suffix, by_side in sums.items():
            for role, values in microbatch.by_role(by_side, self.loss.roles).items():
                columns[f"{prefix}{role}{suffix}"] = values
        return columns

    def autocasting(self) -> torch.autocast:
        """Return the context of all forward passes: `autocast`, or nothing if that is None."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    @torch.no_grad()
    def reference_forward(self, microbatch: Microbatch) -> NamedTensors:
        """Return what `forward` does, for the reference and without gradients."""
        with self.reference.in_use():
            columns = self.forward(self.reference.model, microbatch, prefix=REFERENCE_PREFIX)
        # FSDP frees gathered weights in the backward pass, but the reference has no backward pass.
        release_gathered(self.separate_reference)
        return columns

    def score(self, microbatch: Microbatch, cached: Tensor | None) -> NamedTensors:
        """Return the columns of a microbatch's `Scores`: of the policy, of the reference, lengths and offsets.

        `cached` has the reference's log-probabilities of the global batch, (B, columns); None: the reference runs, if
        the loss needs one.
        """
        reference = {}
        if cached is not None:
            reference = dict(zip(self.loss.reference_columns, cached[microbatch.indices].unbind(1), strict=True))
        elif self.loss.reference:  # before the policy's forward, whose activations stay in memory
            reference = self.reference_forward(microbatch)
        columns = self.forward(self.policy, microbatch)
        # The reference's values are moved to the device and dtype of the policy's.
        columns |= {name: values.to(columns["chosen"]) for name, values in reference.items()}
        for role, n_tokens in microbatch.by_role(microbatch.lengths, self.loss.roles).items():
            columns[f"{role}_lengths"] = n_tokens
        if microbatch.offsets is not None:
            columns["offset"] = microbatch.offsets
        return columns

    # --- an update ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, batch: Batch) -> BatchContext:
        """Compute what the microbatches of a batch share, before any of them is run for its gradient.

        The statistic of the batch (`Loss.batch_statistic`), if the loss has one, costs an additional forward pass of
        policy and reference on all microbatches.
        """
        weights = scale_weights(batch.weights)  # in float64, as float32 may not hold them
        weights = self._to_device((weights / (weights.sum() or 1.0)).float())  # all are 0 if all examples are ties
        reference = self._find_cached(batch)
        statistic = None
        # A loss that gets the whole batch at once finds its statistic itself, if there are no ties to leave out.
        loss_finds_statistic = len(batch.microbatches) == 1 and self.mesh.data_size == 1 and all(batch.weights)
        if batch.mismatched:
            statistic = self._find_statistic(self.score_all([batch.mismatched]), batch.weights)
        elif self.loss.batch_statistic and not loss_finds_statistic:
            columns = self.score_all([batch])
            statistic = self._find_statistic(columns, batch.weights)
            if self.loss.reference:  # `score_all` has run it, so the microbatches need not run it again
                reference = self._to_device(self._stack_reference(columns))
        return BatchContext(weights, reference, statistic)

    def _find_statistic(self, columns: NamedTensors, weights: Sequence[float]) -> Tensor | None:
        """Return the loss's statistic of a global batch, (B, k), or None if all its examples are ties.

        Ties, which have weight 0, do not count: their rows are 0.
        """
        if not any(weights):
            return None
        has_weight = torch.tensor([weight > 0 for weight in weights])
        weighted = {name: values[has_weight] for name, values in columns.items()}
        values = self.loss.find_batch_statistic(make_scores(weighted, average=self.average))
        statistic = values.new_zeros(len(weights), values.shape[1])
        statistic[has_weight] = values
        return self._to_device(statistic.float())

    def accumulate(self, batch: Batch, context: BatchContext, *, reduce_once: bool) -> MicrobatchMetrics:
        """Add up the gradients of all microbatches, and return their metrics, which stay on the device.

        `reduce_once` is the key fsdp_reduce_once.
        """
        metrics = []
        n_microbatches = len(batch.microbatches)
        for i, microbatch in enumerate(batch.microbatches, start=1):
            announce_backward(self.policy, is_last=i == n_microbatches, reduce_once=reduce_once)
            microbatch = microbatch.to(self.device)
            losses, columns = self.losses(microbatch, context, split="train")  # (B,) each
            self.weigh(losses, microbatch, context).backward()
            metrics.append((microbatch.indices, columns))
            del microbatch, losses  # inputs and graph are freed before the next microbatch is run
        return metrics

    def losses(self, microbatch: Microbatch, context: BatchContext, *, split: str) -> tuple[Tensor, NamedTensors]:
        """Return the losses of a microbatch on the device, (B,), and its detached metrics, (B,) each (`_metrics`).

        `split`, "train" or "eval", is a part of the metrics' names.
        """
        columns = self.score(microbatch, context.reference)
        # Examples of weight 0, such as ties, are detached: 0 times the gradient of an infinite loss would be NaN.
        has_weight = context.weights[microbatch.indices] > 0
        for name, values in columns.items():
            if values.requires_grad:
                columns[name] = values.where(has_weight, values.detach())
        statistic = context.statistic
        if statistic is not None:
            statistic = statistic[microbatch.indices]
        output = self.loss(make_scores(columns, average=self.average, batch_statistic=statistic))
        return output.losses, self._metrics(columns, output, split=split)

    def weigh(self, losses: Tensor, microbatch: Microbatch, context: BatchContext) -> Tensor:
        """Return a microbatch's part of the weighted mean over the global batch, times the loss scale."""
        weights = context.weights[microbatch.indices]  # (B,)
        weighted = losses.where(weights > 0, 0) * weights  # 0 times the infinite loss of a tie would be NaN
        return weighted.sum() * self.mesh.data_size * self.loss_scale.value  # data_size undoes FSDP's averaging

    def _metrics(self, columns: NamedTensors, output: Losses, *, split: str) -> NamedTensors:
        """Return metrics per example, (B,) each, and with them the reference's log-probabilities, for its cache."""
        metrics = {f"rewards_{split}/{role}": rewards for role, rewards in output.rewards.items()}
        if self.loss.trains_on in ("pairs", "lists"):
            chosen = output.rewards["chosen"]
            rejected = output.rewards["rejected"]
            if not self.models_are_equal:
                is_right = (chosen > rejected).to(chosen) if output.accuracies is None else output.accuracies
                metrics[f"rewards_{split}/accuracies"] = is_right
            # The rewards of equal models differ only by rounding, which must not count as ranking. If the reference
            # follows the policy, the models are equal after every sync, and the metric is absent instead of 0.
            elif not self.follow_every:
                metrics[f"rewards_{split}/accuracies"] = torch.zeros_like(chosen)
            metrics[f"rewards_{split}/margins"] = chosen - rejected
        if not self.loss.scalar_head:  # the scores of a reward model are its rewards
            # Only SFT has no rewards. The rejected ones come first, as in the reference implementation's logs.
            for role in reversed(list(output.rewards) or ["chosen"]):
                metrics[f"logps_{split}/{role}"] = columns[role].detach()
        metrics |= {f"{name}/{split}": values for name, values in output.metrics.items()}
        metrics |= {name: values for name, values in columns.items() if name.startswith(REFERENCE_PREFIX)}
        return metrics | {f"loss/{split}": output.losses.detach()}

    def reduce(
        self, metrics: MicrobatchMetrics, n_examples: int, cache_rows: Sequence[int], **scalars: Tensor
    ) -> Reduced:
        """Gather the metrics of a batch's `n_examples` examples from all processes, and sum scalars over the processes.

        The host waits for the device here, for one collective and one copy. All processes must have metrics of the same
        names in the same order. The reference's log-probabilities are stored in the rows `cache_rows` of its cache;
        without rows nothing is stored, as for examples that do not come again.
        """
        names = list(metrics[0][1])
        indices = torch.cat([microbatch_indices for microbatch_indices, _ in metrics])  # (N,): this process's examples
        values = torch.cat([torch.stack(list(columns.values()), dim=1) for _, columns in metrics])  # (N, names)
        table = values.new_zeros(n_examples, len(names))  # (B, names)
        # The rows of other processes' examples stay 0, so the sum over processes gathers all rows. Of the processes
        # that see the same examples, only one fills in the rows.
        if self.mesh.counts:
            table.index_copy_(0, indices, values)
        # Table and scalars are one tensor, so that one collective and one copy suffice.
        flat_scalars = [scalar.detach().to(table).reshape(1) for scalar in scalars.values()]
        sums = self.mesh.add(torch.cat([table.flatten(), *flat_scalars])).cpu()
        reduced = Reduced(
            dict(zip(names, sums[: table.numel()].view_as(table).unbind(1), strict=True)),
            dict(zip(scalars, sums[table.numel() :].tolist(), strict=True)),
        )
        if self.loss.reference and cache_rows:
            self.reference.logps.store(cache_rows, self._stack_reference(reduced.examples))
        return reduced

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Note that the policy has changed, and update the running average; `metrics` are means over the batch."""
        self.models_are_equal = False
        chosen = metrics.get("rewards_train/chosen")
        rejected = metrics.get("rewards_train/rejected")
        # A batch whose labels are all alike has no statistic.
        if self.loss.running_statistic and chosen is not None and rejected is not None:
            value = self.loss.running_statistic(chosen, rejected, self.loss.options["beta"])
            momentum = self.loss.options["momentum"]
            self.average = momentum * self.average + (1 - momentum) * value

    def sync_if_due(self, update: int) -> None:
        """Copy the policy to the reference if that is due after update number `update`."""
        if self.follow_every and update % self.follow_every == 0:
            self.reference.follow(self.policy)
            self.models_are_equal = True
            self.average = 0.0  # it averaged log-ratios to the former reference

    # --- many batches ------------------------------------------------------------------------------------------------

    def evaluate(self, batches: list[Batch], iterate: Callable[[list[Batch]], Iterable[Batch]]) -> Reduced:
        """Return the metrics of all examples, with losses as if they were one global batch.

        As the running average of training depends on past updates, the statistic of these examples replaces it.
        `iterate` yields the batches that it gets, and shows progress.
        """
        self.policy.eval()
        columns = self.score_all(iterate(batches))
        scores = make_scores(columns)
        if self.loss.mismatched:
            mismatched_scores = make_scores(self.score_all(iterate([batch.mismatched for batch in batches])))
            scores = scores._replace(batch_statistic=self.loss.find_batch_statistic(mismatched_scores))
        self.release()
        output = self.loss(scores)
        options = self.loss.options
        has_role = {role: columns[f"{role}_lengths"] > 0 for role in output.rewards}  # (B,) each
        all_roles_occur = all(has_response.any() for has_response in has_role.values())
        if self.loss.running_statistic and options["momentum"] < 1 and all_roles_occur:  # else the average stays 0
            # Rewards do not depend on the average, so those of the first call serve to compute it.
            means = {role: rewards[has_role[role]].mean().item() for role, rewards in output.rewards.items()}
            average = self.loss.running_statistic(means["chosen"], means["rejected"], options["beta"])
            output = self.loss(scores._replace(average=average))
        metrics = self._metrics(columns, output, split="eval")
        if self.loss.trains_on == "labels" and all_roles_occur:
            rewards = output.rewards["chosen"].where(has_role["chosen"], output.rewards["rejected"])
            if self.models_are_equal:  # their rewards differ only by rounding, which must not count as ranking
                rewards = torch.zeros_like(rewards)
            weights = torch.tensor([weight for batch in batches for weight in batch.weights], dtype=torch.float64)
            metrics["rewards_eval/auc"] = per_example_auc(rewards, has_role["chosen"], weights)
        return Reduced(metrics)

    def release(self) -> None:
        """Free the weights of both models that forward passes without a backward pass leave gathered."""
        release_gathered(self.policy)
        release_gathered(self.separate_reference)

    @torch.no_grad()
    def score_all(self, batches: Iterable[Batch], *, with_policy: bool = True) -> NamedTensors:
        """Return the columns of `score` for all examples of the batches, by name: one tensor each, (examples,).

        Without the policy, only the reference runs.

        They are gathered from all processes, which must all call this, and are in float64 on the host, in the order of
        the examples. As a side effect, the reference's log-probabilities are stored in the batches' `cache_rows` of its
        cache.
        """
        microbatch_columns = []
        cache_rows = []
        n_examples = 0
        for batch in batches:
            cached = self._find_cached(batch)
            for microbatch in batch.microbatches:
                microbatch = microbatch.to(self.device)
                columns = self.score(microbatch, cached) if with_policy else self.reference_forward(microbatch)
                columns = {name: values.double() for name, values in columns.items()}
                microbatch_columns.append((microbatch.indices + n_examples, columns))  # indices over all batches
            n_examples += len(batch.examples)
            cache_rows += batch.cache_rows
        return self.reduce(microbatch_columns, n_examples, cache_rows).examples

    @torch.no_grad()
    def cache_reference(self, batches: Iterable[Batch], *, folder: str) -> str:
        """Fill the reference's cache: read its file in `folder`, if any, score what is missing, and write the file.

        The reference model is then freed, unless its module is the policy's. Returns a message for the user, which is a
        warning if writing fails.
        """
        reference = self.reference
        logps = reference.logps
        model_facts = sorted(find_model_facts(reference.model.config).items())
        identity = repr((f"{reference.digest} {model_facts}", logps.identity, logps.table.shape))
        path = Path(folder, "reference_logps", f"{hashlib.sha256(identity.encode()).hexdigest()}.npz")
        stored = logps.table
        if self.mesh.rank == 0 and path.exists():
            stored = read_logps(path, stored.shape)
        logps.table = np.where(np.isnan(logps.table), from_rank_0(stored), logps.table)  # this run's take precedence
        n_scored = 0
        for batch in batches:
            for part in (batch, batch.mismatched):
                if part is None or logps.find(part.cache_rows) is not None:
                    continue
                self.score_all([part], with_policy=False)
                if logps.find(part.cache_rows) is None:
                    raise RunError(
                        "log-probabilities of the reference are not finite: set model.reference_dtype=float32"
                    )
                n_scored += len(part.examples)
        message = f"{count(n_scored, 'example')} scored by the reference; all are in {path}"
        if self.mesh.rank == 0:
            try:
                logps.save(path)
            except OSError as error:  # this run, and its checkpoints, have them
                message = WarningLine(
                    f"{path} could not be written, so another run scores the reference's examples again: "
                    f"{one_sentence(error)}"
                )
        if reference.in_use is nullcontext:  # otherwise the model is the policy, whose adapters `in_use` switches
            reference.model = None
            gc.collect()  # objects of a sharded model refer to each other in cycles
            torch.cuda.empty_cache()
        return message

    def _find_cached(self, batch: Batch) -> Tensor | None:
        """Return the reference's log-probabilities, (B, columns) on the device; None unless all examples are cached."""
        if not self.loss.reference:
            return None
        cached = self.reference.logps.find(batch.cache_rows)
        return None if cached is None else self._to_device(cached)

    def _stack_reference(self, columns: NamedTensors) -> Tensor:
        """Return the reference's log-probabilities in the order of its cache, (B, columns of `reference_columns`)."""
        return torch.stack([columns[name] for name in self.loss.reference_columns], dim=1)

    def _to_device(self, values: Tensor) -> Tensor:
        """Copy values from the host to the device, without waiting for the copy."""
        if not is_gpu(self.device):
            return values
        return values.pin_memory().to(self.device, non_blocking=True)  # only copies from pinned memory do not block


def make_objective(
    plan: Plan, policy: Any, reference: Reference | None, data: TrainingData, mesh: Mesh, *, models_are_equal: bool
) -> Objective:
    """Make an objective, with a layout that both models support."""
    # A scaled loss keeps small gradients of activations from becoming 0 in float16. The gradients of float16 weights
    # are in float16 themselves, so scaling them back would lose what is small in any case.
    trains_float16 = plan.lora is None and plan.model.policy_dtype == "float16"
    scales_loss = (plan.model.autocast or plan.compute_dtype) == "float16" and not trains_float16
    objective = Objective(
        policy,
        reference,
        Padded(),  # until the layout is chosen below
        mesh,
        plan.loss,
        autocast=DTYPES.get(plan.model.autocast),
        follow_every=plan.follow_every,
        models_are_equal=models_are_equal,
        loss_scale=LossScale(is_adapted=scales_loss),
    )
    max_length = plan.data.max_length
    # Drawn answers and mismatched responses may be longer than the longest example of the data.
    has_other_responses = plan.online or plan.loss.mismatched
    with objective.autocasting():
        objective.layout, objective.layout_note = choose_layout(
            plan.data.layout,
            policy,
            reference=reference and reference.model,
            max_length=max_length,
            compute_dtype=objective.autocast or DTYPES[plan.compute_dtype],
            longest=max_length if has_other_responses else data.longest(max_length),
            n_responses=max(2, len(plan.loss.roles)) * max(plan.data.batch_size, plan.data.eval_batch_size),
            on_any_process=mesh.any,
        )
    release_gathered(policy)  # choosing the layout may have run the policy, which leaves FSDP's root gathered
    return objective
