"""Step-0 self-test: a run's assumptions, checked before the first update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.losses import Loss
from dpo.models.pretrained import DTYPES
from dpo.settings.plan import Plan
from dpo.training.objective import NamedTensors, Objective, make_scores

Forward = Callable[[], NamedTensors]
TOLERANCE = 1e-4  # largest relative difference between equal models' log-probabilities, from rounding
ULPS = 8  # largest relative difference between two forwards of the same inputs, in epsilons of the dtype


def self_test(objective: Objective, examples: Sequence[Example], plan: Plan) -> list[str]:
    """Run `check_models` on the first two examples per process.

    The adapter's dropout is off, and a message says so.
    """
    mesh = objective.mesh
    tested = list(examples[: 2 * mesh.data_size])
    tested += tested[:1] * (mesh.data_size - len(tested))  # every process needs an example
    [microbatch] = objective.layout.split(tested, 1, rank=mesh.data_rank, size=mesh.data_size)
    microbatch = microbatch.to(objective.device)
    notes = check_models(
        objective.policy,
        partial(objective.forward, objective.policy, microbatch, with_squares=objective.loss.needs_squares),
        partial(objective.reference_forward, microbatch) if plan.loss.reference else None,
        lengths=microbatch.by_role(microbatch.lengths, objective.loss.roles),
        loss=objective.loss,
        other_dtype=plan.compute_dtype if plan.compute_dtype != plan.reference_dtype else None,
        repeats_to=DTYPES[plan.model.autocast or plan.compute_dtype] if mesh.tensor_size > 1 else None,
    )
    if plan.lora is not None and (rate := plan.lora.dropout):
        notes.append(f"self-test: was without lora.dropout={rate}, which is on in updates alone and was not checked")
    return notes


@torch.no_grad()
def check_models(
    policy: torch.nn.Module,
    forward: Forward,
    reference_forward: Forward | None,
    *,
    lengths: NamedTensors,
    loss: Loss,
    other_dtype: str | None = None,
    repeats_to: torch.dtype | None = None,
) -> list[str]:
    """Check policy and reference on a few examples; return messages.

    Checks that log-probabilities are finite; that train-mode and eval-mode forwards agree up to rounding; that rewards
    are 0; and that the loss is that of equal models (ln 2 for DPO). Raises InputError with the failed check and its
    likely cause. Leaves the policy in train mode.

    `forward` returns the policy's log-probabilities as `Objective.forward` does, `reference_forward` the reference's;
    it is None if the loss needs none. `lengths` are the numbers of scored tokens by role. `other_dtype` is the policy's
    dtype if the reference computes in another: then rewards need not be 0. `repeats_to` is the dtype whose rounding is
    allowed between forwards, if not that of the log-probabilities.
    """
    policy_logps, reference_logps, scale = _check_forwards(policy, forward, reference_forward, repeats_to)
    if reference_forward is None:
        return ["self-test passed: finite log-probabilities, dropout off"]

    scores = make_scores(policy_logps, lengths, reference_logps)
    scores_if_equal = make_scores(policy_logps, lengths, {name: policy_logps[name] for name in reference_logps})
    name, beta = loss.name, loss.options.get("beta", 1.0)
    expected = loss(scores_if_equal).losses.mean().item()
    if not math.isfinite(expected):
        raise InputError(
            f"self-test: the {name} loss of equal models is {expected} with loss.beta={beta}, which overflows float32: "
            f"choose a beta closer to 0.1"
        )
    losses, rewards, _ = loss(scores)
    reward = max(values.abs().max().item() for values in rewards.values())
    if other_dtype:
        return [
            f"self-test passed: finite log-probabilities, dropout off. The reference computes in another dtype than "
            f"the policy, so the first rewards are rounding errors of up to {reward:.2g}; for 0 set "
            f"model.reference_dtype={other_dtype}"
        ]
    # rewards are beta times differences of log-probabilities, whose rounding errors grow with their size
    tolerance = TOLERANCE * beta * max(1.0, scale)
    first_loss = losses.mean().item()
    if reward > tolerance:
        raise InputError(
            f"self-test: first rewards reach {reward:.3g} instead of 0, so policy and reference do not hold the same "
            f"weights; was only one of them loaded from model.archive? (self_test=false skips this check)"
        )
    if not math.isclose(first_loss, expected, rel_tol=1e-3, abs_tol=tolerance):
        raise InputError(f"self-test: the first {name} loss is {first_loss:.6g} instead of {expected:.6g}")
    return [f"self-test passed: first loss {first_loss:.6f}, rewards within {reward:.1g} of 0, dropout off"]


def _check_forwards(
    policy: torch.nn.Module,
    forward: Forward,
    reference_forward: Forward | None,
    repeats_to: torch.dtype | None,
) -> tuple[NamedTensors, NamedTensors, float]:
    """Run and check the forwards of policy and reference.

    Returns the log-probabilities of both, and the policy's largest magnitude. Raises InputError if any are not finite,
    or if the policy's differ between train and eval mode.
    """
    policy.eval()
    in_eval = forward()
    policy.train()
    in_train = forward()
    reference_logps = reference_forward() if reference_forward is not None else {}
    for who, columns in (("policy", in_train), ("reference", reference_logps)):
        if not all(values.isfinite().all() for values in columns.values()):
            raise InputError(
                f"self-test: log-probabilities of the {who} are not finite; float16 overflows in many models: "
                f"use bfloat16 or float32, and check the weights"
            )
    difference = max((values - in_eval[name]).abs().max().item() for name, values in in_train.items())
    scale = max(values.abs().max().item() for values in in_train.values())
    if difference > ULPS * torch.finfo(repeats_to or in_train["chosen"].dtype).eps * scale:
        raise InputError(
            f"self-test: train-mode and eval-mode log-probabilities differ by {difference:.3g}: "
            f"{type(policy).__name__} is random in train mode (dropout, router noise); disable that in its config"
        )
    return in_train, reference_logps, scale
