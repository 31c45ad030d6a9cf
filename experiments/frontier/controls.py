"""Controls for DPO's frontier: no short responses, and reweighted policies.

    python -m experiments.frontier --controls

Training starts from the sweep's reference, with the sweep's settings, but in plain torch: `train.py` cannot forbid EOS.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier import exact
from experiments.frontier.methods import METHODS
from experiments.frontier.task import NONE, Task, draw_pairs

BETAS = (0.1, 0.01)  # the sweep's beta with DPO's highest reward, and its smallest beta
REWEIGHTED_BETA = 0.3  # of the policy that is reweighted
SCALES = (1.0, 1.4, 2.0, 2.5, 3.3)  # factors of that policy's log-ratio
BATCH, WARMUP = 64, 10


class Setting(NamedTuple):
    """Settings of a run; the seed is that of pairs and order."""

    task: Task
    beta: float
    seed: int
    pairs: int
    epochs: int


def run_all(reference: Any, task: Task, *, pairs: int, epochs: int, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield rows of the references, the runs and the reweighted policies."""
    variants = [dataclasses.replace(task, shortest=n) for n in (0, 1, task.response_length)]
    for variant in variants:
        reference_logps = exact.leaf_logps(reference, variant, variant.test_prompts)
        row = {"method": "sft", "shortest": variant.shortest}
        yield row | _measure(reference_logps, reference_logps, variant)
    runs = [(variant, beta) for variant in variants for beta in BETAS] + [(task, REWEIGHTED_BETA)]
    settings = [Setting(variant, beta, seed, pairs, epochs) for variant, beta in runs for seed in seeds]
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for rows in pool.imap(functools.partial(_train_and_measure, reference), settings):
            yield from rows


def _train_and_measure(reference: Any, setting: Setting) -> list[dict[str, Any]]:
    """Train and measure a policy.

    At REWEIGHTED_BETA there is a row for each scale, else a single row.
    """
    task, beta, seed = setting.task, setting.beta, setting.seed
    policy = train_dpo(reference, setting)
    policy_logps, reference_logps = (exact.leaf_logps(model, task, task.test_prompts) for model in (policy, reference))
    row = {"shortest": task.shortest, "beta": beta, "seed": seed}
    if beta != REWEIGHTED_BETA:
        return [{"method": "dpo", **row, **_measure(policy_logps, reference_logps, task)}]
    rows = []
    for scale in SCALES:
        # reference * (policy / reference)^scale, normalized: pi* of the reward log(policy / reference)
        reweighted = exact.optimum(1 / scale, reference_logps, policy_logps - reference_logps)
        rows.append({"method": "dpo_reweighted", **row, "scale": scale, **_measure(reweighted, reference_logps, task)})
    return rows


def _measure(logps: np.ndarray, reference_logps: np.ndarray, task: Task) -> dict[str, Any]:
    """Measure a policy, with the probability of each length from 0 on."""
    rewards = task.reward(task.test_prompts[:, None], task.leaves[None])
    leaf_probabilities, lengths = np.exp(logps).mean(0), (task.leaves != NONE).sum(-1)  # (leaves,) each
    length_probabilities = np.bincount(lengths, leaf_probabilities, task.response_length + 1)
    measured = exact.measure(logps, task, exact.Limit(reference_logps, rewards))
    return {**measured, "lengths": length_probabilities.tolist()}


def train_dpo(reference: Any, setting: Setting) -> Any:
    """Train a copy of the reference with DPO, in plain torch."""
    import torch
    from torch.nn.functional import logsigmoid

    from dpo.training.optimization import Schedule

    task, beta, seed, n_pairs, epochs = setting
    rng = np.random.default_rng([task.seed, 6, seed])  # the same pairs as the sweep's, if short responses are possible
    write = functools.partial(exact.draw, reference, task, rng=rng)
    pairs = draw_pairs(task, task.train_prompts[:n_pairs], write, rng)
    chosen, rejected = (_encode(task, pairs.prompts, responses) for responses in (pairs.chosen, pairs.rejected))
    with torch.no_grad():
        reference_difference = _logps(reference, task, chosen) - _logps(reference, task, rejected)  # (pairs,)
    policy = copy.deepcopy(reference).train()
    updates_per_epoch = n_pairs // BATCH
    optimizer = torch.optim.AdamW(policy.parameters(), lr=METHODS["dpo"].lr)
    schedule = Schedule(
        optimizer, warmup_steps=WARMUP, updates=epochs * updates_per_epoch, kind="cosine", min_ratio=0.0
    )
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(n_pairs, generator=order).split(BATCH)[:updates_per_epoch]:
            policy_difference = _logps(policy, task, chosen, rows) - _logps(policy, task, rejected, rows)
            loss = -logsigmoid(beta * (policy_difference - reference_difference[rows])).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            optimizer.step()
            schedule.step()
    return policy.eval()


def _encode(task: Task, prompts: np.ndarray, responses: np.ndarray) -> tuple[Any, Any]:
    """Encode prompts and responses.

    Returns token ids, padded with EOS, (N, prompt_length + response_length), and a mask of the scored tokens of the
    responses, (N, response_length).
    """
    import torch

    eos = task.symbols
    token_ids = np.concatenate([prompts, np.where(responses == NONE, eos, responses)], axis=1)
    lengths = (responses != NONE).sum(-1, keepdims=True)
    is_scored = np.arange(task.response_length) <= lengths  # the first EOS too, if it fits
    return torch.from_numpy(token_ids), torch.from_numpy(is_scored)


def _logps(model: Any, task: Task, encoded: tuple[Any, Any], rows: Any = slice(None)) -> Any:
    """Compute log pi of the encoded responses, (rows,)."""
    token_ids, is_scored = (tensor[rows] for tensor in encoded)
    logits = model(token_ids, use_cache=False).logits[:, task.prompt_length - 1 : -1]
    eos = task.symbols
    logits[:, : task.shortest, eos] = -float("inf")
    logps = logits.log_softmax(-1).gather(-1, token_ids[:, task.prompt_length :, None]).squeeze(-1)
    return logps.where(is_scored, 0.0).sum(-1)
