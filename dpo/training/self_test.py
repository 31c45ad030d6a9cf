"""Step-0 self-test: a run's assumptions, checked before the first update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.losses import Loss
from dpo.models.adapters import list_dropouts
from dpo.models.layouts import Padded
from dpo.models.pretrained import DTYPES
from dpo.settings.plan import Plan
from dpo.system.arithmetic import without_compilation, without_tf32
from dpo.training.metrics import REFERENCE
from dpo.training.objective import NamedTensors, Objective, make_scores

Forward = Callable[[], NamedTensors]
TOLERANCE = 1e-4  # relative rounding error allowed between the log-probabilities of equal models
MAX_EPSILONS = 8  # relative difference allowed between two forwards of the same inputs, in epsilons of the dtype


def self_test(objective: Objective, examples: Sequence[Example], plan: Plan) -> list[str]:
    """Run `check_causality`, and `check_models` on two examples per process.

    Returns the messages to log.
    """
    mesh, loss = objective.mesh, objective.loss
    if not loss.scalar_head:  # a reward model may look both ways
        check_causality(objective)
    tested = list(examples[: 2 * mesh.data_size])
    tested += tested[:1] * (mesh.data_size - len(tested))  # every process needs an example
    [microbatch] = objective.layout.split(tested, 1, rank=mesh.data_rank, size=mesh.data_size)
    microbatch = microbatch.to(objective.device)
    has_same_dtype = plan.compute_dtype == plan.reference_dtype
    forward_dtype = DTYPES[plan.model.autocast or plan.compute_dtype]
    messages = check_models(
        objective.policy,
        partial(objective.forward, objective.policy, microbatch, with_squares=loss.needs_squares),
        partial(objective.reference_forward, microbatch) if loss.reference else None,
        given=objective.given_columns(microbatch),
        loss=loss,
        other_policy_dtype=None if has_same_dtype else plan.compute_dtype,
        # under tensor parallelism, forwards of the same inputs may differ by the rounding of this dtype
        repeat_dtype=forward_dtype if mesh.tensor_size > 1 else None,
    )
    if plan.lora is not None and plan.lora.dropout:
        messages.append(
            f"self-test: lora.dropout={plan.lora.dropout} was off and not checked, as it is on in updates alone"
        )
    return messages


@torch.no_grad()
def check_causality(objective: Objective) -> None:
    """Raise InputError if log-probabilities depend on later tokens.

    Leaves the policy in eval mode.
    """
    policy: Any = objective.policy
    policy.eval()
    n = 4  # tokens of each part
    vocab_size = policy.config.get_text_config().vocab_size
    tokens = tuple(i % vocab_size for i in range(1, 2 * n + 2))
    prompt, common, end = tokens[:1], tokens[1 : n + 1], tokens[n + 1 :]
    padded = Padded()
    [microbatch] = padded.split([Example(prompt, (common + end, common + end[::-1]))] * 2, 1)
    with without_compilation(), without_tf32():
        output = objective.forward_tokens(policy, padded, microbatch.to(objective.device).inputs)
    logps = output.logps[..., :n]  # (2, 2, n): of the common tokens, in two rows of each response
    noise = (logps[:, 0] - logps[:, 1]).abs().max().item()  # of equal rows in other places of the batch
    noise = max(noise, torch.finfo(torch.float32).eps * max(1.0, logps.abs().max().item()))
    if (logps[0] - logps[1]).abs().max().item() > MAX_EPSILONS * noise:
        raise InputError(
            f"self-test: log-probabilities of {type(policy).__name__} depend on later tokens, so it does not predict "
            f"the next token: give a causal model (BERT's kind also needs is_decoder=true in its config.json)"
        )


@torch.no_grad()
def check_models(
    policy: torch.nn.Module,
    forward: Forward,
    reference_forward: Forward | None,
    *,
    given: NamedTensors,
    loss: Loss,
    other_policy_dtype: str | None = None,
    repeat_dtype: torch.dtype | None = None,
) -> list[str]:
    """Check policy and reference on a few examples; return messages.

    Checks that log-probabilities are finite; that train-mode and eval-mode forwards agree up to rounding; that rewards
    are 0; and that the loss is that of equal models (ln 2 for DPO). Raises InputError with the failed check and its
    likely cause. Leaves the policy in train mode.

    - `forward` and `reference_forward` return columns of `make_scores`. `reference_forward` is None if the loss needs
      no reference. `given` are the columns that no model computes.
    - `other_policy_dtype`: the policy's dtype, if the reference computes in another; then rewards need not be 0.
    - `repeat_dtype`: the dtype whose rounding is allowed between two forwards; None: that of the log-probabilities.
    """
    policy_logps, reference_logps = _check_forwards(policy, forward, reference_forward, repeat_dtype)
    if reference_forward is None:
        return [f"self-test passed: finite {'rewards' if loss.scalar_head else 'log-probabilities'}, dropout off"]

    reference_logps_if_equal = {name: policy_logps[name.removeprefix(REFERENCE)] for name in reference_logps}
    expected_loss = loss(make_scores(given | policy_logps | reference_logps_if_equal)).losses.mean().item()
    beta = loss.options.get("beta", 1.0)
    if not math.isfinite(expected_loss):
        raise InputError(
            f"self-test: the {loss.name} loss of equal models is {expected_loss} with loss.beta={beta}, which "
            f"overflows float32: choose a beta closer to 0.1"
        )
    output = loss(make_scores(given | policy_logps | reference_logps))
    largest_reward = max(values.abs().max().item() for values in output.rewards.values())
    if other_policy_dtype:
        return [
            f"self-test passed: finite log-probabilities, dropout off. The reference computes in another dtype than "
            f"the policy, so they differ by rounding, and rewards by up to {largest_reward:.2g} before the first "
            f"update; model.reference_dtype={other_policy_dtype} makes these rewards 0"
        ]
    # rewards are beta times differences of log-probabilities, whose rounding errors grow with their magnitude
    tolerance = TOLERANCE * beta * max(1.0, _find_largest(policy_logps))
    first_loss = output.losses.mean().item()
    if largest_reward > tolerance:
        raise InputError(
            f"self-test: first rewards reach {largest_reward:.3g} instead of 0, so policy and reference do not hold "
            f"the same weights; was only one of the two loaded from model.archive? (self_test=false skips this check)"
        )
    if not math.isclose(first_loss, expected_loss, rel_tol=1e-3, abs_tol=tolerance):
        raise InputError(f"self-test: the first {loss.name} loss is {first_loss:.6g} instead of {expected_loss:.6g}")
    return [f"self-test passed: first loss {first_loss:.6f}, rewards within {largest_reward:.1g} of 0, dropout off"]


def _check_forwards(
    policy: torch.nn.Module,
    forward: Forward,
    reference_forward: Forward | None,
    repeat_dtype: torch.dtype | None,
) -> tuple[NamedTensors, NamedTensors]:
    """Run and check the forwards of policy and reference.

    Returns the log-probabilities of both. Raises InputError if any are not finite, or if the policy's differ between
    train and eval mode.
    """
    policy.eval()
    eval_logps = forward()
    policy.train()
    for dropout in list_dropouts(policy):  # random on purpose
        dropout.eval()
    train_logps = forward()
    reference_logps = reference_forward() if reference_forward is not None else {}
    for model_name, logps in (("policy", train_logps), ("reference", reference_logps)):
        if not all(values.isfinite().all() for values in logps.values()):
            raise InputError(
                f"self-test: log-probabilities of the {model_name} are not finite; float16 overflows in many models: "
                f"use bfloat16 or float32, and check the weights"
            )
    difference = _find_largest({name: values - eval_logps[name] for name, values in train_logps.items()})
    epsilon = torch.finfo(repeat_dtype or train_logps["chosen"].dtype).eps
    size = max(1.0, _find_largest(train_logps))  # at least 1: a reward model gives rewards, which may be near 0
    if difference > MAX_EPSILONS * epsilon * size:
        raise InputError(
            f"self-test: train-mode and eval-mode log-probabilities differ by {difference:.3g}: "
            f"{type(policy).__name__} is random in train mode: disable dropout or router noise in its config"
        )
    return train_logps, reference_logps


def _find_largest(columns: NamedTensors) -> float:
    """The largest magnitude in the columns."""
    return max(values.abs().max().item() for values in columns.values())
