"""Methods that train.py does not have, in plain torch.

They are Unlikelihood, exact RL, and reward models. All start from the sweep's reference, and train on its
pairs or prompts with the optimizer and the schedule of the other methods.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from dpo.settings.plan import resolve
from dpo.training.optimization import Schedule
from experiments.frontier import exact
from experiments.frontier.methods import REWARD_MODELS
from experiments.frontier.sweep import Run
from experiments.frontier.task import Pairs, Task

WARMUP = 10  # updates, as in the runs of train.py
MAX_GRAD_NORM = 10.0


class RewardModel(torch.nn.Module):
    """The reference with a new head, which gives each token a score.

    A response's score is its last token's, or the sum over its tokens if `per_token`.
    """

    def __init__(self, reference: Any, *, per_token: bool) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(reference.model)
        self.per_token = per_token
        hidden_size = reference.config.hidden_size
        self.head = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, prompts: np.ndarray, responses: np.ndarray) -> torch.Tensor:
        """Score responses, (rows,)."""
        n = responses.shape[1]
        token_ids = torch.from_numpy(np.hstack([prompts, responses]))
        hidden = self.trunk(token_ids, use_cache=False).last_hidden_state
        scores = self.head(hidden[:, -n:]).squeeze(-1)  # (rows, response_length)
        if self.per_token:
            return scores.sum(-1)
        return scores[:, -1]

    def compute_scores(self, task: Task, prompts: Any) -> Any:
        """Score every response to every prompt, a tensor (prompts, leaves)."""
        scores: Any = torch.zeros(len(prompts), 1)  # all texts of t symbols: (prompts, n**t)
        levels = exact.iterate_levels(self.trunk, task, prompts, depth=task.response_length)
        next(levels)  # the prompts alone have no score
        for output in levels:
            last_hidden = output.last_hidden_state[:, -1]
            last_scores = self.head(last_hidden)
            last_scores = last_scores.view(len(prompts), -1)
            if self.per_token:
                # Each text's score is also part of the scores of the texts that continue it.
                earlier_scores = scores.repeat_interleave(task.symbols, 1)
                last_scores = earlier_scores + last_scores
            scores = last_scores
        return scores


def train(reference: Any, task: Task, pairs: Pairs, run: Run, updates: int) -> Any:
    """Train what `run.method` says, a copy of the reference or a reward model, and return it in eval mode.

    The learning rate falls by a cosine to 0 at the last of the `updates`.
    """
    if run.method in REWARD_MODELS:
        torch.manual_seed(run.seed)
        model: Any = RewardModel(reference, per_token=run.method == "rm_tokens")
    else:
        model = copy.deepcopy(reference)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    plan = resolve({"schedule": "cosine", "warmup_steps": WARMUP})
    schedule = Schedule(plan.training, optimizer, updates=updates, data_size=1)
    rng = np.random.default_rng([task.seed, 8, run.seed])
    batches = _draw_batches(pairs, run.batch, rng)
    beta = run.beta or 0.0
    for batch in itertools.islice(batches, updates):
        if run.method == "unlikelihood":
            loss = compute_unlikelihood(model, batch, beta)
        elif run.method == "exact_rl":
            loss = -compute_objective(model, reference, task, batch.prompts, beta)
        else:  # a reward model, by Bradley and Terry
            chosen = model(batch.prompts, batch.chosen)
            rejected = model(batch.prompts, batch.rejected)
            loss = -logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
    return model.eval()


def _draw_batches(pairs: Pairs, size: int, rng: np.random.Generator) -> Iterator[Pairs]:
    """Yield batches of `size` pairs without end. Each pass over the pairs has a new order, and drops a smaller rest."""
    n = len(pairs.prompts)
    while True:
        order = rng.permutation(n)
        for start in range(0, n - size + 1, size):
            rows = order[start : start + size]
            yield Pairs(
                pairs.prompts[rows],
                pairs.chosen[rows],
                pairs.rejected[rows],
            )


def compute_unlikelihood(policy: Any, batch: Pairs, alpha: float) -> torch.Tensor:
    """Compute the mean loss of Unlikelihood, whose second term is from arXiv 1908.04319.

    A pair's loss is -log pi(chosen) - alpha sum_t log(1 - pi(rejected token t)).
    """
    chosen = _token_logps(policy, batch.prompts, batch.chosen).sum(-1)
    rejected = _token_logps(policy, batch.prompts, batch.rejected)
    rejected = rejected.clamp(max=-1e-6)  # so that 1 - pi is above 0
    penalty = torch.log(-torch.expm1(rejected)).sum(-1)  # sum of log(1 - pi)
    objective = chosen + alpha * penalty
    return -objective.mean()


def _token_logps(model: Any, prompts: np.ndarray, responses: np.ndarray) -> torch.Tensor:
    """Compute log pi of the tokens of responses, (rows, response_length)."""
    n = responses.shape[1]
    token_ids = torch.from_numpy(np.hstack([prompts, responses]))
    logits = model(token_ids, use_cache=False).logits
    logits = logits[:, -n - 1 : -1]  # for the next token, (rows, n, vocabulary)
    logps = logits.log_softmax(-1)
    tokens = token_ids[:, -n:, None]
    return logps.gather(-1, tokens).squeeze(-1)


def compute_objective(
    policy: Any,
    reference: Any,
    task: Task,
    prompts: np.ndarray,
    beta: float,
) -> torch.Tensor:
    """Compute the mean over prompts of E[r] - beta KL, exactly and so that autograd gives its exact gradient.

    PPO maximizes estimates of this objective.
    """
    rewards = torch.from_numpy(task.reward_leaves(prompts))
    reference_logps = torch.from_numpy(exact.leaf_logps(reference, task, prompts))
    logps = exact.compute_logps(policy, task, torch.from_numpy(prompts))
    log_ratios = logps - reference_logps
    expected = logps.exp() * (rewards - beta * log_ratios)  # (prompts, leaves)
    return expected.sum(-1).mean()
