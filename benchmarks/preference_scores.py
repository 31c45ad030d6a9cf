"""Scores of a policy against its reference, for `benchmarks.hh_smollm2`.

Everything is computed by our own code and in float32, whichever code and dtype the policy was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.data.examples import Example
from dpo.models.answers import Sampling, Tokens, answer
from dpo.models.layouts import layout_by_rules

RESAMPLES = 10_000
BATCH = 8  # pairs, and four times as many prompts, in a forward


# --- intervals -------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean over prompts, with its 95 % interval by resampling."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(*strata: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Mean of values, one per prompt, with its percentile bootstrap.

    The same seed draws the same prompts for values of another policy, so that a difference of two policies is the
    mean of the differences. With several strata it is the mean of their means; each is resampled separately.
    """
    draw, parts = np.random.default_rng(seed), [np.asarray(values, dtype=np.float64) for values in strata]
    means = np.mean(
        [[part[draw.integers(len(part), size=len(part))].mean() for _ in range(RESAMPLES)] for part in parts], axis=0
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(np.mean([part.mean() for part in parts])), float(low), float(high))


def balance_over_length(right: np.ndarray, longer: np.ndarray) -> Interval | None:
    """Mean of the accuracies where chosen is shorter and where longer.

    None without pairs of one kind.

    Ranking by length alone scores 0.5. Pairs of equal lengths do not count.
    """
    strata = [right[longer < 0], right[longer > 0]]
    return bootstrap(*strata) if all(map(len, strata)) else None


def by_prompt(samples: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Mean over each prompt's samples, which are not independent observations."""
    values: dict[int, list[float]] = {}
    for sample in samples:
        values.setdefault(sample["prompt"], []).append(sample[key])
    return np.array([np.mean(values[prompt]) for prompt in sorted(values)])


# --- scores ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pair_logps(model: Any, examples: Sequence[Example], *, max_length: int) -> list[list[float]]:
    """Score each pair as in training: [log pi(chosen), log pi(rejected)]."""
    layout, _ = layout_by_rules("shared_prefix", model, max_length=max_length)
    found: list[list[float]] = []
    for start in range(0, len(examples), BATCH):
        [microbatch] = layout.split(examples[start : start + BATCH], 1)
        logps = layout.forward(model, microbatch.inputs).logps.sum(-1).T
        found += [row for _, row in sorted(zip(microbatch.indices.tolist(), logps.tolist(), strict=True))]
    return found


class Drawn(NamedTuple):
    """A sample of the policy, and its estimates of KL(policy || reference)."""

    prompt: int  # index
    text: str
    tokens: int  # EOS too, if it ended
    ended: bool
    log_ratio: float  # log pi - log ref of the drawn tokens
    kl: float  # sum over its tokens of the KL of the next token's distributions


def draw(
    policy: Any, reference: Any, tokenizer: Any, prompts: Sequence[Tokens], n_samples: int, sampling: Sampling
) -> list[Drawn]:
    """Draw `n_samples` per prompt.

    Sample k of prompt i has the same random numbers for every policy.
    """
    asked = [(i, k) for i in range(len(prompts)) for k in range(n_samples)]
    asked.sort(key=lambda ask: len(prompts[ask[0]]))  # neighbours are equally long, so little is padding
    found = []
    for start in range(0, len(asked), 4 * BATCH):
        batch = asked[start : start + 4 * BATCH]
        numbers = [i * n_samples + k for i, k in batch]
        answers = answer(policy, tokenizer, [prompts[i] for i, _ in batch], numbers, sampling)
        for (i, _), said in zip(batch, answers, strict=True):
            estimates = divergence(policy, reference, prompts[i], said.tokens)
            found.append(Drawn(i, said.text, len(said.tokens), said.ended, *estimates))
    return sorted(found, key=lambda one: one.prompt)


@torch.no_grad()
def divergence(policy: Any, reference: Any, prompt: Tokens, response: Tokens) -> tuple[float, float]:
    """Two unbiased estimates of KL(policy || reference) from a drawn response.

    The log-ratio of the response; and the sum over its tokens of the exact KL of the two distributions of that token
    given the tokens before, which varies less (Rao-Blackwell; arXiv 2504.10637).
    """
    ids, drawn = torch.tensor([[*prompt, *response]]), torch.tensor(response)[:, None]
    ours, theirs = (
        model(ids, logits_to_keep=len(response) + 1).logits[0, :-1].float().log_softmax(-1)
        for model in (policy, reference)
    )
    log_ratio = (ours - theirs).gather(1, drawn).sum()
    return float(log_ratio), float((ours.exp() * (ours - theirs)).sum())
