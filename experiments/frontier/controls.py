"""Controls for DPO's frontier: no short responses, and reweighted policies.

    python -m experiments.frontier --controls

Training is plain torch, because `train.py` cannot mask EOS, from the sweep's reference and with the sweep's settings.
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

BETAS = (0.1, 0.01)  # of the sweep's DPO: at its highest reward, and the smallest
REWEIGHTED_BETA = 0.3  # of the reweighted policy
SCALES = (1.0, 1.4, 2.0, 2.5, 3.3)  # factors of its log-ratio
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
    tasks = [dataclasses.replace(task, shortest=n) for n in (0, 1, task.response_length)]
    for each in tasks:
        start = exact.leaf_logps(reference, each, each.test_prompts)
        yield {"method": "sft", "shortest": each.shortest, **_measure(start, start, each)}
    runs = [(each, beta) for each in tasks for beta in BETAS] + [(task, REWEIGHTED_BETA)]
    settings = [Setting(each, beta, seed, pairs, epochs) for each, beta in runs for seed in seeds]
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for rows in pool.imap(functools.partial(_judge_run, reference), settings):
            yield from rows


def _judge_run(reference: Any, setting: Setting) -> list[dict[str, Any]]:
    task, beta, seed = setting[:3]
    models = reference, train_dpo(reference, setting)
    start, logps = (exact.leaf_logps(model, task, task.test_prompts) for model in models)
    row = {"shortest": task.shortest, "beta": beta, "seed": seed}
    if beta != REWEIGHTED_BETA:
        return [{"method": "dpo", **row, **_measure(logps, start, task)}]
    reweighted = {scale: exact.optimum(1 / scale, start, logps - start) for scale in SCALES}
    return [
        {"method": "dpo_reweighted", **row, "scale": scale, **_measure(found, start, task)}
        for scale, found in reweighted.items()
    ]


def _measure(logps: np.ndarray, reference: np.ndarray, task: Task) -> dict[str, Any]:
    """`exact.measure`, with the probability of each length from 0 on."""
    rewards = task.reward(task.test_prompts[:, None], task.leaves[None])
    share, lengths = np.exp(logps).mean(0), (task.leaves != NONE).sum(-1)
    found = exact.measure(logps, task, exact.Limit(reference, rewards))
    return {**found, "lengths": np.bincount(lengths, share, task.response_length + 1).tolist()}


def train_dpo(reference: Any, setting: Setting) -> Any:
    """Train a copy of the reference with DPO, in plain torch."""
    import torch
    from torch.nn.functional import logsigmoid

    from dpo.training.optimization import Schedule

    task, beta, seed, n, epochs = setting
    rng = np.random.default_rng([task.seed, 6, seed])  # the sweep's pairs, if short responses are possible
    pairs = draw_pairs(task, task.train_prompts[:n], functools.partial(exact.draw, reference, task, rng=rng), rng)
    chosen, rejected = (_encode(task, pairs.prompts, responses) for responses in pairs[1:])
    with torch.no_grad():
        start = _logps(reference, task, chosen) - _logps(reference, task, rejected)
    policy, updates = copy.deepcopy(reference).train(), epochs * (n // BATCH)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=METHODS["dpo"].lr)
    schedule = Schedule(optimizer, warmup_steps=WARMUP, updates=updates, kind="cosine", min_ratio=0.0)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=order).split(BATCH)[: n // BATCH]:
            margin = _logps(policy, task, chosen, rows) - _logps(policy, task, rejected, rows) - start[rows]
            loss = -logsigmoid(beta * margin).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            optimizer.step()
            schedule.step()
    return policy.eval()


def _encode(task: Task, prompts: np.ndarray, responses: np.ndarray) -> tuple[Any, Any]:
    """Tokens, padded with EOS, and a mask of the scored ones."""
    import torch

    tokens = np.concatenate([prompts, np.where(responses == NONE, task.symbols, responses)], axis=1)
    scored = np.arange(task.response_length) <= (responses != NONE).sum(-1, keepdims=True)  # EOS too, if it fits
    return torch.from_numpy(tokens), torch.from_numpy(scored)


def _logps(model: Any, task: Task, encoded: tuple[Any, Any], rows: Any = slice(None)) -> Any:
    """log pi of each response, (rows,)."""
    tokens, scored = (part[rows] for part in encoded)
    logits = model(tokens, use_cache=False).logits[:, task.prompt_length - 1 : -1]
    logits[:, : task.shortest, task.symbols] = -float("inf")
    logps = logits.log_softmax(-1).gather(-1, tokens[:, task.prompt_length :, None]).squeeze(-1)
    return logps.where(scored, 0.0).sum(-1)
