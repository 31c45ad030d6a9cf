"""Step-0 self-test: a run's assumptions, checked before the first update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dpo.data.examples import Example
from dpo.errors import InputError
from dpo.models.adapters import list_dropouts
from dpo.models.layouts import Microbatch, Padded
from dpo.models.pretrained import DTYPES
from dpo.settings.plan import Plan
from dpo.system.arithmetic import without_compilation, without_tf32
from dpo.training.objective import NamedTensors, Objective, make_scores

TOLERANCE = 1e-4  # relative rounding error allowed between the log-probabilities of equal models
MAX_EPSILONS = 8  # relative difference allowed between two forwards of the same inputs, in epsilons of the dtype


@torch.no_grad()
def self_test(objective: Objective, examples: Sequence[Example], plan: Plan) -> list[str]:
    """Check the models on two examples per process; return messages.

    The policy is causal, and not random in train mode; log-probabilities are finite; rewards are 0, and the loss is
    that of equal models (ln 2 for DPO). Raises InputError with the failed check and its likely cause. Leaves the policy
    in train mode.
    """
    mesh, loss = objective.mesh, objective.loss
    if not loss.scalar_head:  # a reward model may look both ways
        _check_causality(objective)
    tested = list(examples[: 2 * mesh.data_size])
    tested += tested[:1] * (mesh.data_size - len(tested))  # every process needs an example
    [microbatch] = objective.layout.split(tested, 1, rank=mesh.data_rank, size=mesh.data_size)
    microbatch = microbatch.to(objective.device)
    # under tensor parallelism, forwards of the same inputs may differ by the rounding of the dtype of the forward pass
    rounded_in = DTYPES[plan.model.autocast or plan.compute_dtype] if mesh.tensor_size > 1 else torch.float32
    policy_logps = _score_in_both_modes(objective, microbatch, rounded_in)

    if loss.reference:
        messages = [_check_start(objective, microbatch, policy_logps, plan)]
    else:
        messages = [f"self-test passed: finite {'rewards' if loss.scalar_head else 'log-probabilities'}, dropout off"]
    if plan.lora is not None and plan.lora.dropout:
        messages.append(
            f"self-test: lora.dropout={plan.lora.dropout} was off and not checked, as it is on in updates alone"
        )
    return messages


def _check_causality(objective: Objective) -> None:
    """Raise InputError if log-probabilities depend on later tokens."""
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


def _score_in_both_modes(objective: Objective, microbatch: Microbatch, rounded_in: torch.dtype) -> NamedTensors:
    """The policy's log-probabilities in train mode; InputError if they are not finite, or others in eval mode."""
    policy, with_squares = objective.policy, objective.loss.needs_squares
    policy.eval()
    eval_logps = objective.forward(policy, microbatch, with_squares=with_squares)
    policy.train()
    for dropout in list_dropouts(policy):  # random on purpose
        dropout.eval()
    train_logps = objective.forward(policy, microbatch, with_squares=with_squares)
    _check_finite(train_logps, "policy")
    difference = _find_largest({name: values - eval_logps[name] for name, values in train_logps.items()})
    size = max(1.0, _find_largest(train_logps))  # at least 1: a reward model gives rewards, which may be near 0
    if difference > MAX_EPSILONS * torch.finfo(rounded_in).eps * size:
        raise InputError(
            f"self-test: train-mode and eval-mode log-probabilities differ by {difference:.3g}: "
            f"{type(policy).__name__} is random in train mode: disable dropout or router noise in its config"
        )
    return train_logps


def _check_start(objective: Objective, microbatch: Microbatch, policy_logps: NamedTensors, plan: Plan) -> str:
    """Check that policy and reference start as equal models, if they compute in one dtype; return a message."""
    loss, given = objective.loss, objective.given_columns(microbatch)
    reference_logps = objective.reference_forward(microbatch)
    _check_finite(reference_logps, "reference")
    if_equal = {name: policy_logps[name.removeprefix("reference_")] for name in reference_logps}
    expected_loss = loss(make_scores(given | policy_logps | if_equal)).losses.mean().item()
    beta = loss.options.get("beta", 1.0)
    if not math.isfinite(expected_loss):
        raise InputError(
            f"self-test: the {loss.name} loss of equal models is {expected_loss} with loss.beta={beta}, not a "
            f"finite number: choose a beta closer to 0.1 (loss=exo also needs loss.label_smoothing above 0)"
        )
    output = loss(make_scores(given | policy_logps | reference_logps))
    first_loss, largest_reward = output.losses.mean().item(), _find_largest(output.rewards)
    if plan.compute_dtype != plan.reference_dtype:
        return (
            f"self-test passed: finite log-probabilities, dropout off. The reference computes in another dtype than "
            f"the policy, so they differ by rounding, and rewards by up to {largest_reward:.2g} before the first "
            f"update; model.reference_dtype={plan.compute_dtype} makes these rewards 0"
        )
    # rewards are beta times differences of log-probabilities, whose rounding errors grow with their magnitude
    tolerance = TOLERANCE * beta * max(1.0, _find_largest(policy_logps))
    if largest_reward > tolerance or not math.isclose(first_loss, expected_loss, rel_tol=1e-3, abs_tol=tolerance):
        raise InputError(
            f"self-test: first rewards reach {largest_reward:.3g} instead of 0, and the first {loss.name} loss is "
            f"{first_loss:.6g} instead of {expected_loss:.6g}, so policy and reference do not hold the same weights; "
            f"was only one of the two loaded from model.archive? (self_test=false skips this check)"
        )
    return f"self-test passed: first loss {first_loss:.6f}, rewards within {largest_reward:.1g} of 0, dropout off"


def _check_finite(columns: NamedTensors, of_model: str) -> None:
    if not all(values.isfinite().all() for values in columns.values()):
        raise InputError(
            f"self-test: log-probabilities of the {of_model} are not finite; float16 overflows in many models: "
            f"use bfloat16 or float32, and check the weights"
        )


def _find_largest(columns: Any) -> float:
    """The largest magnitude in the columns."""
    return max(values.abs().max().item() for values in columns.values())
