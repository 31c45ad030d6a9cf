"""Methods that train.py does not have, in plain torch.

They are Unlikelihood, exact RL, and reward models. All start from the sweep's reference, and train on its
pairs or prompts with the optimizer and the schedule of the other methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from dpo.settings.plan import resolve
from dpo.training.optimization import Schedule
from experiments.frontier import exact
from experiments.frontier.task import Pairs, Task

if TYPE_CHECKING:
    from experiments.frontier.sweep import Run

WARMUP = 10  # updates, as in the runs of train.py
MAX_GRAD_NORM = 10.0
Loss = Callable[[np.ndarray], torch.Tensor]  # computes the loss of these rows of the pairs


class RewardModel(torch.nn.Module):
    """The reference with a new head, which gives each token a score.

    A response's score is its last token's, or the sum over its tokens if `per_token`.
    """

    def __init__(self, reference: Any, *, per_token: bool) -> None:
        super().__init__()
        self.trunk, self.per_token = copy.deepcopy(reference.model), per_token
        self.head = torch.nn.Linear(reference.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, prompts: np.ndarray, responses: np.ndarray) -> torch.Tensor:
        """Score responses, (rows,)."""
        token_ids = torch.from_numpy(np.concatenate([prompts, responses], axis=1))
        hidden = self.trunk(token_ids, use_cache=False).last_hidden_state
        scores = self.head(hidden[:, -responses.shape[1] :]).squeeze(-1)  # (rows, response_length)
        return scores.sum(-1) if self.per_token else scores[:, -1]

    def leaf_scores(self, task: Task, prompts: np.ndarray) -> np.ndarray:
        """Score of every response to every prompt, (prompts, leaves)."""

        def compute(part: Any) -> Any:  # for a part of the prompts
            return exact.compute_scores(self.trunk, self.head, task, part, per_token=self.per_token)

        return exact.leaf_values(compute, prompts)


def train(reference: Any, task: Task, pairs: Pairs, run: Run, updates: int) -> Any:
    """Train a copy of the reference, or a reward model."""
    model, compute_loss = MAKERS[run.method](reference, task, pairs, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    training = resolve({"schedule": "cosine", "warmup_steps": WARMUP}).training
    schedule = Schedule(training, optimizer, updates=updates, data_size=1)
    batches = _draw_batches(len(pairs.prompts), run.batch, np.random.default_rng([task.seed, 8, run.seed]))
    for _ in range(updates):
        optimizer.zero_grad()
        compute_loss(next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
    return model.eval()


def _draw_batches(n: int, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield each batch's rows, in a new order in each pass."""
    while True:
        rows = rng.permutation(n)
        for start in range(0, n - size + 1, size):
            yield rows[start : start + size]


# --- losses -----------------------------------------------------------------------------------------------------------


def token_logps(model: Any, prompts: np.ndarray, responses: np.ndarray) -> torch.Tensor:
    """Compute log pi of the tokens of responses, (rows, response_length)."""
    token_ids = torch.from_numpy(np.concatenate([prompts, responses], axis=1))
    n = responses.shape[1]
    logits = model(token_ids, use_cache=False).logits[:, -n - 1 : -1]  # for the next token, (rows, n, vocabulary)
    return logits.log_softmax(-1).gather(-1, token_ids[:, -n:, None]).squeeze(-1)


def make_unlikelihood(reference: Any, task: Task, pairs: Pairs, run: Run) -> tuple[Any, Loss]:
    """Make a policy and the loss of Unlikelihood.

    The loss is -log pi(chosen) - alpha sum_t log(1 - pi(rejected token t)). The second term is from arXiv 1908.04319.
    """
    policy, alpha = copy.deepcopy(reference).train(), run.beta or 0.0

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        chosen = token_logps(policy, pairs.prompts[rows], pairs.chosen[rows]).sum(-1)
        rejected = token_logps(policy, pairs.prompts[rows], pairs.rejected[rows]).clamp(max=-1e-6)  # 1 - pi is above 0
        penalty = torch.log(-torch.expm1(rejected)).sum(-1)  # sum of log(1 - pi)
        return -(chosen + alpha * penalty).mean()

    return policy, compute_loss


def make_exact_rl(reference: Any, task: Task, pairs: Pairs, run: Run) -> tuple[Any, Loss]:
    """Make a policy and the exact objective that PPO estimates."""
    policy, beta = copy.deepcopy(reference).train(), run.beta or 0.0

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        prompts = pairs.prompts[rows]
        rewards = task.reward(prompts[:, None], task.leaves[None])
        reference_logps = exact.leaf_logps(reference, task, prompts)
        return -exact.expected_objective(policy, reference_logps, rewards, beta, task, prompts)

    return policy, compute_loss


def make_reward_model(reference: Any, task: Task, pairs: Pairs, run: Run) -> tuple[Any, Loss]:
    """Make a reward model and the loss of Bradley and Terry."""
    torch.manual_seed(run.seed)
    model = RewardModel(reference, per_token=run.method == "rm_tokens").train()

    def compute_loss(rows: np.ndarray) -> torch.Tensor:
        chosen, rejected = (model(pairs.prompts[rows], responses[rows]) for responses in (pairs.chosen, pairs.rejected))
        return -logsigmoid(chosen - rejected).mean()

    return model, compute_loss


MAKERS = {
    "unlikelihood": make_unlikelihood,
    "exact_rl": make_exact_rl,
    "rm_last": make_reward_model,
    "rm_tokens": make_reward_model,
}
