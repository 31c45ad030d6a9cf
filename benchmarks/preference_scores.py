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
BATCH = 8  # pairs of a forward pass; four times as many samples are drawn at once


# --- intervals -------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean over prompts, with its 95 % interval by resampling."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(*strata: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Average values, one per prompt, with a percentile bootstrap interval.

    The same seed draws the same prompts for another policy's values, so that the difference of two policies' means is
    the mean of their differences. The mean of several strata is the mean of their means; each stratum is resampled
    separately.
    """
    rng = np.random.default_rng(seed)
    mean, resampled_means = 0.0, np.zeros(RESAMPLES)
    for stratum in strata:
        values = np.asarray(stratum, dtype=np.float64)
        mean += values.mean() / len(strata)
        n = len(values)
        resampled_means += np.array([values[rng.integers(n, size=n)].mean() for _ in range(RESAMPLES)]) / len(strata)
    low, high = np.percentile(resampled_means, (2.5, 97.5))
    return Interval(float(mean), float(low), float(high))


def balance_over_length(is_right: np.ndarray, differences: np.ndarray) -> Interval | None:
    """Average the accuracies where chosen is shorter and where it is longer.

    `differences` are chosen minus rejected tokens. Ranking by length alone scores 0.5. Pairs of equal lengths do not
    count. None if chosen is never shorter, or never longer.
    """
    shorter, longer = is_right[differences < 0], is_right[differences > 0]
    return bootstrap(shorter, longer) if len(shorter) and len(longer) else None


def by_prompt(samples: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Average a value over each prompt's samples, (prompts,).

    Samples of one prompt are not independent observations.
    """
    values: dict[int, list[float]] = {}
    for sample in samples:
        values.setdefault(sample["prompt"], []).append(sample[key])
    return np.array([np.mean(values[prompt]) for prompt in sorted(values)])


# --- scores ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pair_logps(model: Any, examples: Sequence[Example], *, max_length: int) -> list[list[float]]:
    """Score each pair as in training: [log pi(chosen), log pi(rejected)]."""
    layout, _ = layout_by_rules("shared_prefix", model, max_length=max_length)
    scores: list[list[float]] = []
    for start in range(0, len(examples), BATCH):
        [microbatch] = layout.split(examples[start : start + BATCH], 1)
        logps = layout.forward(model, microbatch.inputs).logps.sum(-1).T  # (examples, 2)
        order = microbatch.indices.argsort()  # the layout may have reordered the examples
        scores += logps[order].tolist()
    return scores


class Drawn(NamedTuple):
    """A sample of the policy, and its estimates of KL(policy || reference)."""

    prompt: int  # index of the prompt
    text: str
    tokens: int  # number of tokens, with EOS if it ended
    ended: bool
    log_ratio: float  # log pi - log ref of the drawn tokens
    kl: float  # sum over tokens of the KL between the two models' distributions of the token


def draw(
    policy: Any, reference: Any, tokenizer: Any, prompts: Sequence[Tokens], n_samples: int, sampling: Sampling
) -> list[Drawn]:
    """Draw `n_samples` per prompt.

    Sample k of prompt i has the same random numbers for every policy.
    """
    requests = [(i, k) for i in range(len(prompts)) for k in range(n_samples)]  # sample k of prompt i
    requests.sort(key=lambda request: len(prompts[request[0]]))  # prompts of a batch need little padding
    samples = []
    for start in range(0, len(requests), 4 * BATCH):
        batch = requests[start : start + 4 * BATCH]
        sample_numbers = [i * n_samples + k for i, k in batch]  # which determine the random numbers
        answers = answer(policy, tokenizer, [prompts[i] for i, _ in batch], sample_numbers, sampling)
        for (i, _), sampled in zip(batch, answers, strict=True):
            log_ratio, kl = divergence(policy, reference, prompts[i], sampled.tokens)
            samples.append(Drawn(i, sampled.text, len(sampled.tokens), sampled.ended, log_ratio, kl))
    return sorted(samples, key=lambda sample: sample.prompt)


@torch.no_grad()
def divergence(policy: Any, reference: Any, prompt: Tokens, response: Tokens) -> tuple[float, float]:
    """Estimate KL(policy || reference) from a drawn response, in two ways.

    Both estimates are unbiased. The first is the log-ratio of the response. The second sums over the response's tokens
    the exact KL between the two models' distributions of the token, given the tokens before. The second varies less
    (Rao-Blackwell; arXiv 2504.10637).
    """
    input_ids, drawn_ids = torch.tensor([[*prompt, *response]]), torch.tensor(response)[:, None]
    policy_logps, reference_logps = (  # (tokens of the response, vocabulary)
        model(input_ids, logits_to_keep=len(response) + 1).logits[0, :-1].float().log_softmax(-1)
        for model in (policy, reference)
    )
    log_ratios = policy_logps - reference_logps
    return float(log_ratios.gather(1, drawn_ids).sum()), float((policy_logps.exp() * log_ratios).sum())
