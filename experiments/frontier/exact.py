"""Reward, KL, optima and the objective of exact RL, by enumeration.

Log-probabilities, rewards and scores of all responses to all prompts are arrays (prompts, leaves), in float64. Means
weigh prompts equally. docs/frontier.md has the formulas, and the reason why no policy is above pi*.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from experiments.frontier.task import NONE, Task

AT_ONCE = 3  # prompts whose trees are computed together, so few that a CPU's cache holds them
IN_ROW = 2  # last symbols, in which texts of one row of a tree differ; fewer make more rows, more make longer rows
OPTIMAL_BETAS = np.geomspace(50, 0.02, 61)  # of pi*, close together, as the curve is interpolated between them


class Point(NamedTuple):
    """Means over prompts of E[r] and of KL(policy || reference), in nats."""

    reward: float
    kl: float


# --- trees of a model -------------------------------------------------------------------------------------------------


class Tree:
    """All texts of up to `depth` symbols after prompts, in few rows.

    A row starts with a prompt and `branch` symbols, and there is a row for every choice of these symbols. The texts of
    a row share these tokens. For each longer text the row has one more token, the text's last symbol, which sees
    only the tokens of this text. With `ends`, every text but the longest is also followed by EOS.
    """

    def __init__(self, task: Task, *, depth: int, ends: bool) -> None:
        self.n, self.n_prompt, self.branch = task.symbols, task.prompt_length, max(1, depth - IN_ROW)
        self._tokens: list[int] = []  # of every row, after the prompt and the `branch` symbols
        n_first = self.n_prompt + self.branch
        self._seen = [*np.tril(np.ones((n_first, n_first), dtype=bool))]  # which tokens each token of a row sees
        # _last_places[t] has the places, in a row, of the last tokens of its texts of t symbols: up to t = branch there
        # is one such text. _end_places[t] has those of EOS after these texts; without `ends` it is empty
        self._last_places = [[self.n_prompt - 1 + t] for t in range(self.branch + 1)]
        self._end_places: list[list[int]] = []
        for _ in range(self.branch, depth):
            places = self._last_places[-1]
            self._last_places.append([self._add(place, symbol) for place in places for symbol in range(self.n)])
        if ends:
            self._end_places = [[self._add(place, self.n) for place in places] for places in self._last_places[:-1]]

    def _add(self, last: int, token: int) -> int:
        """Add a token after the text whose last token is at `last`.

        Returns the token's place in the row.
        """
        seen = np.zeros(len(self._seen) + 1, dtype=bool)
        seen[: len(self._seen[last])] = self._seen[last]
        seen[-1] = True
        self._seen.append(seen)
        self._tokens.append(token)
        return len(self._seen) - 1

    def run(self, model: Any, prompts: Any) -> Any:
        """Run a model on the rows of prompts (N, prompt_length), in order."""
        import torch

        n_rows, length = self.n**self.branch, len(self._seen)  # rows of a prompt, and tokens of a row
        branches = torch.cartesian_prod(*[torch.arange(self.n)] * self.branch).view(n_rows, self.branch)
        after = torch.cat([branches, torch.tensor(self._tokens, dtype=torch.long).expand(n_rows, -1)], dim=1)
        input_ids = torch.cat([prompts.repeat_interleave(n_rows, 0), after.repeat(len(prompts), 1)], dim=1)
        is_seen = torch.zeros(length, length, dtype=torch.bool)
        for i, seen in enumerate(self._seen):
            is_seen[i, : len(seen)] = torch.from_numpy(seen)
        mask = torch.zeros(length, length).masked_fill(~is_seen, torch.finfo(torch.float32).min)
        positions = is_seen.sum(-1, keepdim=True).T - 1  # of each token in its text, (1, length)
        return model(
            input_ids,
            attention_mask=mask.expand(len(input_ids), 1, -1, -1),
            position_ids=positions.expand(len(input_ids), -1),
            use_cache=False,
        )

    def take_last(self, values: Any, t: int) -> Any:
        """Take values at last tokens of t-symbol texts, (prompts, n**t, ...).

        `values` (rows, length, ...) are those of all tokens.
        """
        return self._take(values, t, self._last_places[t])

    def take_ends(self, values: Any, t: int) -> Any:
        """Take values at EOS after t-symbol texts, (prompts, n**t, ...)."""
        return self._take(values, t, self._end_places[t])

    def _take(self, values: Any, t: int, places: list[int]) -> Any:
        rows = values.unflatten(0, (-1, self.n**self.branch))  # (prompts, rows of a prompt, length, ...)
        # rows that differ only after the first t symbols have the same texts of t symbols
        different_rows = rows[:, :: self.n ** max(0, self.branch - t)]
        return different_rows[:, :, places].flatten(1, 2)


def compute_logps(model: Any, task: Task, prompts: Any) -> Any:
    """Log-probability of every response to every prompt, a tensor (prompts, leaves).

    The model's vocabulary is the symbols, and then EOS unless all responses have the same length.
    """
    import torch

    n, tree = task.symbols, Tree(task, depth=task.response_length - 1, ends=False)
    logps = tree.run(model, prompts).logits.double().log_softmax(-1)  # (rows, length, vocabulary)
    prefix_logps: Any = torch.zeros(len(prompts), 1, dtype=torch.float64)  # of all texts of t symbols, (prompts, n**t)
    ended_logps = []  # of all texts of t symbols and EOS, for each t
    for t in range(task.response_length):
        token_logps = tree.take_last(logps, t)  # (prompts, n**t, vocabulary)
        if not task.fixed_length:
            ended_logps.append(prefix_logps + token_logps[..., n])
        prefix_logps = (prefix_logps[..., None] + token_logps[..., :n]).flatten(1)
    return torch.cat([*ended_logps, prefix_logps], dim=1)  # the order of `task.leaves`


def compute_scores(trunk: Any, head: Any, task: Task, prompts: Any, *, per_token: bool) -> Any:
    """A reward model's score of every response, (prompts, leaves).

    `head` turns a token's hidden state into a score. A response's score is its last token's, or the sum over its tokens
    if `per_token`. A shorter response is ended by EOS, which is a token like the others.
    """
    import torch

    n, tree = task.symbols, Tree(task, depth=task.response_length, ends=not task.fixed_length)
    token_scores = head(tree.run(trunk, prompts).last_hidden_state).squeeze(-1)  # (rows, length)
    text_scores: Any = torch.zeros(len(prompts), 1)  # of all texts of t symbols, (prompts, n**t)
    ended_scores = []  # of all texts of t symbols and EOS, for each t
    for t in range(task.response_length):
        if not task.fixed_length:
            end_scores = tree.take_ends(token_scores, t)
            ended_scores.append(text_scores + end_scores if per_token else end_scores)
        last_scores = tree.take_last(token_scores, t + 1)
        text_scores = text_scores.repeat_interleave(n, 1) + last_scores if per_token else last_scores
    return torch.cat([*ended_scores, text_scores], dim=1)


def leaf_values(compute: Any, prompts: np.ndarray) -> np.ndarray:
    """Compute values of all leaves, (prompts, leaves), AT_ONCE prompts at a time."""
    import torch

    with torch.no_grad():
        parts = [compute(part).double() for part in torch.from_numpy(prompts).split(AT_ONCE)]
    return torch.cat(parts).numpy()


def leaf_logps(model: Any, task: Task, prompts: np.ndarray) -> np.ndarray:
    """`compute_logps` of any number of prompts, an array (prompts, leaves)."""
    return leaf_values(lambda part: compute_logps(model, task, part), prompts)


def draw(model: Any, task: Task, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a response to each prompt, (prompts, response_length)."""
    import torch

    texts, goes_on = prompts, np.full(len(prompts), True)
    with torch.no_grad():
        for _ in range(task.response_length):
            input_ids = torch.from_numpy(np.where(texts == NONE, 0, texts))  # after EOS any token will do
            logits = model(input_ids).logits[:, -1].double().numpy()
            tokens = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from the softmax of the logits
            goes_on &= tokens < task.symbols  # the only other token is EOS
            texts = np.concatenate([texts, np.where(goes_on, tokens, NONE)[:, None]], axis=1)
    return texts[:, task.prompt_length :]


def expected_objective(
    model: Any, reference_logps: np.ndarray, rewards: np.ndarray, beta: float, task: Task, prompts: np.ndarray
) -> Any:
    """Mean over prompts of E[r] - beta KL, with its exact gradient."""
    import torch

    logps = compute_logps(model, task, torch.from_numpy(prompts))
    values = torch.from_numpy(rewards) - beta * (logps - torch.from_numpy(reference_logps))
    return (logps.exp() * values).sum(-1).mean()


# --- optima -----------------------------------------------------------------------------------------------------------


def make_point(logps: np.ndarray, reference: np.ndarray, rewards: np.ndarray) -> Point:
    """Compute E[r] and KL(policy || reference) of a policy."""
    probabilities = np.exp(logps)
    log_ratios = np.where(probabilities > 0, logps - reference, 0)
    reward, kl = ((probabilities * values).sum(-1).mean() for values in (rewards, log_ratios))
    return Point(float(reward), float(kl))


def optimum(beta: float, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of pi*, eq. 4 of arXiv 2305.18290.

    pi*(y | x) = pi_ref(y | x) exp(r(x, y) / beta) / Z(x), and `reference` is log pi_ref. With a reward model's scores
    for `rewards`, pi* is the best policy that PPO on this reward model could find.
    """
    logits = reference + rewards / beta
    logits = logits - logits.max(-1, keepdims=True)  # so that exp does not overflow
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def reweight(scale: float, logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Log-probabilities of reference * (policy / reference)^scale, normalized.

    That is pi* for the reward log(policy / reference) with beta = 1 / scale.
    """
    return optimum(1 / scale, reference, logps - reference)


def best_of_n(n: int, reference: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Log-probabilities of the best of n draws from the reference.

    A response of probability 0 has -inf. Ties are decided at random.

    Let p(w) be the reference's probability of a reward w, and F(w) its probability of at most w. The best draw has
    reward w with probability F(w)^n - (F(w) - p(w))^n, which the responses with this reward share in proportion to the
    reference.
    """
    best_logps = np.empty_like(reference)
    for i, (logps, prompt_rewards) in enumerate(zip(reference, rewards, strict=True)):
        levels, level_of_response = np.unique(prompt_rewards, return_inverse=True)  # distinct rewards, increasing
        p = np.bincount(level_of_response, np.exp(logps), minlength=len(levels))  # (levels,)
        f = np.minimum(p.cumsum(), 1)
        with np.errstate(divide="ignore"):
            # F^n (1 - (1 - p / F)^n) is the same, without the cancellation where p is tiny
            log_share = np.log(-np.expm1(n * np.log1p(-np.minimum(p / f, 1))))
            log_best = n * np.log(f) + log_share  # (levels,)
        best_logps[i] = logps + (log_best - np.log(p))[level_of_response]
    return best_logps


class Limit:
    """The reference and the true reward, which determine pi*.

    Both are for all responses to the prompts on which policies are measured, (prompts, leaves).
    """

    def __init__(self, reference: np.ndarray, rewards: np.ndarray) -> None:
        self.reference, self.rewards = reference, rewards  # log-probabilities and rewards

    @cached_property
    def optima(self) -> list[Point]:
        """The points of pi* at OPTIMAL_BETAS."""
        return [self.find_optimum(beta) for beta in OPTIMAL_BETAS]

    def find_optimum(self, beta: float) -> Point:
        return make_point(optimum(beta, self.reference, self.rewards), self.reference, self.rewards)

    def most_reward(self, kl: float) -> float:
        """Highest expected reward of any policy with this mean KL.

        For any beta, pi* maximizes E[r] - beta KL over all policies, so every policy is on or below the line of slope
        beta through the point of pi*. This bound is tight if pi* has about this KL, as the line then touches the
        frontier close by.
        """
        kls = np.array([point.kl for point in self.optima])  # they rise as beta falls
        if kl <= 0:
            return float((np.exp(self.reference) * self.rewards).sum(-1).mean())
        if kl < kls[0]:
            beta = OPTIMAL_BETAS[0] * np.sqrt(kls[0] / kl)  # where beta is large, KL is variance / (2 beta^2)
        else:
            beta = np.exp(np.interp(np.log(kl), np.log(kls), np.log(OPTIMAL_BETAS)))
        point = self.find_optimum(float(beta))
        # at a very high KL the mean reward of the best responses is the tighter bound
        return min(point.reward + beta * (kl - point.kl), float(self.rewards.max(-1).mean()))

    def measure(self, logps: np.ndarray, task: Task, *, optimal: bool = False) -> dict[str, float]:
        """Measure a policy for its row; `optimal`: the policy is pi*."""
        point = make_point(logps, self.reference, self.rewards)
        probabilities, lengths = np.exp(logps), (task.leaves != NONE).sum(-1)
        return {
            **point._asdict(),
            "most_reward": point.reward if optimal else self.most_reward(point.kl),  # of any policy with this KL
            "length": float((probabilities * lengths).sum(-1).mean()),
            "empty": float(probabilities[:, lengths == 0].sum(-1).mean()),
        }
