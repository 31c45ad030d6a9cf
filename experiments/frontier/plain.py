"""Methods that train.py does not have, in plain torch.

They are Unlikelihood, REINFORCE, exact RL, and reward models. All start from the sweep's reference, and train on its
pairs or prompts with the optimizer and the schedule of the other methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from dpo.training.optimization import Schedule
from experiments.frontier import exact
from experiments.frontier.task import NONE, Pairs, Task

WARMUP = 10  # updates, as in the runs of train.py
MAX_GRAD_NORM = 10.0
Loss = Callable[[np.ndarray], torch.Tensor]  # computes the loss of these rows of the pairs


class Setting(NamedTuple):
    """Settings of a run."""

    method: str
    beta: float | None  # for Unlikelihood, alpha
    seed: int
    lr: float
    updates: int
    batch: int  # pairs or prompts of an update


class RewardModel(torch.nn.Module):
    """The reference with a new head, which gives each token a score.

    A response's score is its last token's, or the sum over its tokens if `per_token`.
    """

    def __init__(self, reference: Any, *, per_token: bool) -> None:
        super().__init__()
        self.trunk, self.per_token = copy.deepcopy(reference.model), per_token
        self.head = torch.nn.Linear(reference.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, token_ids: torch.Tensor, is_scored: torch.Tensor) -> torch.Tensor:
        """Score responses that `encode` has encoded, (rows,)."""
        hidden = self.trunk(token_ids, use_cache=False).last_hidden_state
        scores = self.head(hidden[:, -is_scored.shape[1] :]).squeeze(-1)  # (rows, response_length)
        if self.per_token:
            return (scores * is_scored).sum(-1)
        last = is_scored.sum(-1, keepdim=True) - 1  # (rows, 1)
        return scores.gather(-1, last).squeeze(-1)

    def leaf_scores(self, task: Task, prompts: np.ndarray) -> np.ndarray:
        """Score of every response to every prompt, (prompts, leaves)."""

        def compute(part: Any) -> Any:  # for a part of the prompts
            return exact.compute_scores(self.trunk, self.head, task, part, per_token=self.per_token)

        return exact.leaf_values(compute, prompts)


def train(reference: Any, task: Task, pairs: Pairs, setting: Setting, watch: Callable[[int, Any], None]) -> Any:
    """Train a copy of the reference, or a reward model.

    After each update `watch` gets the number of updates so far, and the model.
    """
    model, compute_loss = MAKERS[setting.method](reference, task, pairs, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
    schedule = Schedule(optimizer, warmup_steps=WARMUP, updates=setting.updates, kind="cosine", min_ratio=0.0)
    batches = _draw_batches(len(pairs.prompts), setting.batch, np.random.default_rng([task.seed, 8, setting.seed]))
    for update in range(setting.updates):
        optimizer.zero_grad()
        compute_loss(next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        watch(update + 1, model)
    return model.eval()


def _draw_batches(n: int, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield each batch's rows, in a new order in each pass."""
    while True:
        rows = rng.permutation(n)
        for start in range(0, n - size + 1, size):
            yield rows[start : start + size]


# --- losses -----------------------------------------------------------------------------------------------------------


def encode(task: Task, prompts: np.ndarray, responses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode prompts and responses.

    Returns token ids, padded with EOS, (N, prompt_length + response_length), and a mask of the scored tokens of the
    responses, (N, response_length).
    """
    token_ids = np.concatenate([prompts, np.where(responses == NONE, task.symbols, responses)], axis=1)
    lengths = (responses != NONE).sum(-1, keepdims=True)
    is_scored = np.arange(task.response_length) <= lengths  # the first EOS too, if it fits
    return torch.from_numpy(token_ids), torch.from_numpy(is_scored)


def token_logps(model: Any, token_ids: torch.Tensor, is_scored: torch.Tensor) -> torch.Tensor:
    """Compute log pi of the tokens of encoded responses, (rows, response_length).

    It is 0 where a token is not scored.
    """
    n = is_scored.shape[1]
    logits = model(token_ids, use_cache=False).logits[:, -n - 1 : -1]  # for the next token, (rows, n, vocabulary)
    logps = logits.log_softmax(-1).gather(-1, token_ids[:, -n:, None]).squeeze(-1)
    return logps.where(is_scored, 0.0)


def make_unlikelihood(reference: Any, task: Task, pairs: Pairs, setting: Setting) -> tuple[Any, Loss]:
    """Make a policy and the loss of Unlikelihood.

    The loss is -log pi(chosen) - alpha sum_t log(1 - pi(rejected token t)). The second term is from arXiv 1908.04319.
    """
    policy, alpha = copy.deepcopy(reference).train(), setting.beta or 0.0

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        chosen = token_logps(policy, *encode(task, pairs.prompts[rows], pairs.chosen[rows])).sum(-1)
        token_ids, is_scored = encode(task, pairs.prompts[rows], pairs.rejected[rows])
        rejected = token_logps(policy, token_ids, is_scored).clamp(max=-1e-6)  # so that 1 - pi is above 0
        penalty = torch.log(-torch.expm1(rejected)).where(is_scored, 0.0).sum(-1)  # sum of log(1 - pi)
        return -(chosen + alpha * penalty).mean()

    return policy, compute_loss


def make_reinforce(reference: Any, task: Task, pairs: Pairs, setting: Setting) -> tuple[Any, Loss]:
    """Make a policy and the loss of REINFORCE.

    Training maximizes true reward - beta KL. Each prompt has two samples; the value of one is the other's baseline.
    """
    policy, beta = copy.deepcopy(reference).train(), setting.beta or 0.0
    rng = np.random.default_rng([task.seed, 9, setting.seed])

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        prompts = pairs.prompts[rows].repeat(2, axis=0)
        responses = exact.draw(policy, task, prompts, rng)
        encoded = encode(task, prompts, responses)
        logps = token_logps(policy, *encoded).sum(-1)
        with torch.no_grad():
            log_ratios = logps - token_logps(reference, *encoded).sum(-1)
            values = torch.from_numpy(task.reward(prompts, responses)) - beta * log_ratios
            by_prompt = values.view(-1, 2)
            advantages = (by_prompt - by_prompt.flip(1)).flatten()
        return -(advantages * logps).mean()

    return policy, compute_loss


def make_exact_rl(reference: Any, task: Task, pairs: Pairs, setting: Setting) -> tuple[Any, Loss]:
    """Make a policy and the exact objective that PPO estimates."""
    policy, beta = copy.deepcopy(reference).train(), setting.beta or 0.0

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        prompts = pairs.prompts[rows]
        rewards = task.reward(prompts[:, None], task.leaves[None])
        reference_logps = exact.leaf_logps(reference, task, prompts)
        return -exact.expected_objective(policy, reference_logps, rewards, beta, task, prompts)

    return policy, compute_loss


def make_reward_model(reference: Any, task: Task, pairs: Pairs, setting: Setting) -> tuple[Any, Loss]:
    """Make a reward model and the loss of Bradley and Terry."""
    torch.manual_seed(setting.seed)
    model = RewardModel(reference, per_token=setting.method == "rm_tokens").train()

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        chosen, rejected = (
            model(*encode(task, pairs.prompts[rows], responses[rows])) for responses in (pairs.chosen, pairs.rejected)
        )
        return -logsigmoid(chosen - rejected).mean()

    return model, compute_loss


MAKERS = {
    "unlikelihood": make_unlikelihood,
    "reinforce": make_reinforce,
    "exact_rl": make_exact_rl,
    "rm_last": make_reward_model,
    "rm_tokens": make_reward_model,
}
