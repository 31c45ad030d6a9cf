"""Answers to prompts, each sampled with its own seed.

Unlike the samples of an evaluation (`dpo/models/generation.py`), they do not depend on the other prompts of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from dpo.data.collation import collate_prompts
from dpo.data.examples import Example
from dpo.models.generation import generating_with_sdpa
from dpo.models.layouts import Padded
from dpo.system.arithmetic import for_generation

Tokens = tuple[int, ...]


class Sampling(NamedTuple):
    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0


class Answer(NamedTuple):
    """A model's answer to a prompt."""

    text: str
    tokens: Tokens  # with the one that ended it
    ended: bool  # not cut off at `max_new_tokens`
    score: float = math.nan  # in training; higher is better


class Drawn(NamedTuple):
    """Answers drawn for a prompt in training."""

    prompt: str
    answers: Sequence[Answer]  # in the order drawn
    best: int  # the first of the highest score
    worst: int  # the last of the lowest score

    @property
    def pair(self) -> tuple[Answer, Answer]:
        """The best answer and the worst: the online pair."""
        return self.answers[self.best], self.answers[self.worst]

    @property
    def is_tie(self) -> bool:
        best, worst = self.pair
        return best.score == worst.score or best.tokens == worst.tokens


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Tokens],
    numbers: Sequence[int],
    sampling: Sampling,
    *,
    watch: Callable[[list[int]], bool] | None = None,
    in_step: bool = False,
) -> list[Answer]:
    """Sample answers to prompts, whose numbers are mixed into the seed.

    After each token `watch` gets the tokens of the last answer so far, and ends all answers by returning true.
    `in_step`: several processes hold the model's shards, so each continues until the last has finished.
    """
    device = next(model.parameters()).device
    batch = collate_prompts([Example(prompt, ()) for prompt in prompts], tokenizer)
    ids = batch["prompt_input_ids"].to(device)
    # Only the end tokens of the model's generation config apply: penalties would change the distribution that answers
    # are drawn from.
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    criteria = [] if watch is None else [_Watcher(lambda row: watch(row[ids.shape[1] :].tolist()))]
    with _plain_generation(model):
        out = model.generate(
            ids,
            attention_mask=batch["prompt_attention_mask"].to(device),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # `_Draw` draws
            eos_token_id=sorted(ends),
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=choosing(sampling, numbers, n_prompt=ids.shape[1]),
            stopping_criteria=transformers.StoppingCriteriaList(criteria),
            synced_gpus=in_step,
        )
    answers = []
    for row in out[:, ids.shape[1] :].tolist():
        end = next((i for i, token in enumerate(row, start=1) if token in ends), None)
        tokens = tuple(row[:end])
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answers.append(Answer(text, tokens, end is not None))
    return answers


def choosing(sampling: Sampling, numbers: Sequence[int], *, n_prompt: int) -> transformers.LogitsProcessorList:
    """Processors of logits (B, V) that leave only the token drawn."""
    processors = transformers.LogitsProcessorList()
    if sampling.temperature > 0:
        processors += [transformers.TemperatureLogitsWarper(float(sampling.temperature))]
        processors += [transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        seeds = [[sampling.seed, number] for number in numbers]
        processors += [_Draw(seeds, n_prompt=n_prompt, n_new=sampling.max_new_tokens)]
    return processors


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Take away the model's own generation settings inside."""
    own = model.generation_config
    model.generation_config = transformers.GenerationConfig()
    try:
        with for_generation(), generating_with_sdpa(model):
            yield
    finally:
        model.generation_config = own


class _Draw(transformers.LogitsProcessor):
    """Draw each row's tokens with uniform numbers from its own seed."""

    def __init__(self, seeds: Sequence[Sequence[int]], *, n_prompt: int, n_new: int) -> None:
        self.n_prompt = n_prompt
        self.uniform = torch.from_numpy(np.stack([np.random.default_rng(seed).random(n_new) for seed in seeds]))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.uniform = self.uniform.to(scores.device)
        cumulative = scores.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)  # (B, V)
        # times the last sum, which rounding keeps from being exactly 1
        threshold = self.uniform[:, input_ids.shape[1] - self.n_prompt, None] * cumulative[:, -1:]
        # the first token whose cumulative probability exceeds the threshold, so its own probability is > 0
        drawn = torch.searchsorted(cumulative, threshold, right=True)
        drawn.clamp_(max=scores.shape[1] - 1)  # NaN exceeds every sum, and would give token V
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _Watcher(transformers.StoppingCriteria):
    """End all rows once `ends` returns true for the last one's tokens."""

    def __init__(self, ends: Callable[[torch.Tensor], bool]) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), bool(self.ends(input_ids[-1])), device=input_ids.device)


@torch.no_grad()
def log_probabilities(
    model: Any, prompts: Sequence[Tokens], answers: Sequence[Answer], autocast: torch.dtype | None = None
) -> list[float]:
    """The summed log-probability of each answer, as training scores a response."""
    examples = [Example(prompt, (answer.tokens,)) for prompt, answer in zip(prompts, answers, strict=True)]
    [microbatch] = Padded().split(examples, 1)
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        by_token = Padded().forward(model, microbatch.to(device).inputs).logps  # (1, B, T): one side, the answers
    [sums] = by_token.sum(-1)
    return sums.tolist()
