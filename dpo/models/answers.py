"""Answers to prompts, each sampled with its own seed.

Unlike the samples of an evaluation (`dpo/models/generation.py`), an answer does not depend on the other prompts of its
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from dpo.data.collation import collate_prompts
from dpo.data.examples import Example
from dpo.models.generation import Sampling, cut_at_end, list_end_tokens, plain_generation
from dpo.models.layouts import Padded

Tokens = tuple[int, ...]


class Answer(NamedTuple):
    """A model's answer to a prompt."""

    text: str
    tokens: Tokens  # including the end token, if any
    ended: bool  # by an end token, not cut off at `max_new_tokens`
    score: float = math.nan  # of the scorer, in online training; higher is better


class Drawn(NamedTuple):
    """Answers drawn for a prompt in training."""

    prompt: str
    answers: Sequence[Answer]  # in the order drawn
    best: int  # index of the first answer with the highest score
    # index of the last answer with the lowest score, among those whose tokens are not the best's if there are any
    worst: int
    is_flipped: bool = False  # true if a label drawn at random makes the worst answer the chosen one
    turns: str = ""  # the prompt for readers, without control tokens

    @property
    def pair(self) -> tuple[Answer, Answer]:
        """The online pair, (chosen, rejected)."""
        best, worst = self.answers[self.best], self.answers[self.worst]
        return (worst, best) if self.is_flipped else (best, worst)

    @property
    def is_tie(self) -> bool:
        chosen, rejected = self.pair
        return chosen.score == rejected.score or chosen.tokens == rejected.tokens


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
    """Sample one answer to each prompt.

    An answer's random numbers follow from `sampling.seed` and the prompt's number in `numbers`. After each step `watch`
    gets the last prompt's new tokens, and ends all answers by returning true. `in_step`: several processes hold shards
    of the model and answer in lockstep, so each continues until all have finished.
    """
    device = next(model.parameters()).device
    batch = collate_prompts([Example(prompt, ()) for prompt in prompts], tokenizer)
    prompt_ids = batch["prompt_input_ids"].to(device)
    n_prompt = prompt_ids.shape[1]  # the same for all prompts, which are padded on the left
    end_tokens = list_end_tokens(model.generation_config, tokenizer)
    criteria = []
    if watch is not None:
        criteria.append(_StopIf(lambda row: watch(row[n_prompt:].tolist())))
    with plain_generation(model, sampling.cache_implementation):
        rows = model.generate(
            prompt_ids,
            attention_mask=batch["prompt_attention_mask"].to(device),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # `_DrawToken` draws
            eos_token_id=end_tokens,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=make_logits_processors(sampling, numbers, n_prompt=n_prompt),
            stopping_criteria=transformers.StoppingCriteriaList(criteria),
            synced_gpus=in_step,
            cache_implementation=sampling.cache_implementation,
        )
    answers = []
    for new_tokens in rows[:, n_prompt:].tolist():
        tokens, ended = cut_at_end(new_tokens, end_tokens)  # padding follows the end token
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answers.append(Answer(text, tokens, ended))
    return answers


def make_logits_processors(
    sampling: Sampling, numbers: Sequence[int], *, n_prompt: int
) -> transformers.LogitsProcessorList:
    """Make processors of logits (B, V) that leave only the token drawn.

    Greedy answers need none. `numbers` has a number for each of the B prompts of `n_prompt` tokens.
    """
    processors = transformers.LogitsProcessorList()
    if sampling.temperature <= 0:  # greedy
        return processors
    processors.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    seeds = [[sampling.seed, number] for number in numbers]
    processors.append(_DrawToken(seeds, n_prompt=n_prompt, n_new=sampling.max_new_tokens))
    return processors


class _DrawToken(transformers.LogitsProcessor):
    """Draw each row's next token, from the row's own seed."""

    def __init__(self, seeds: Sequence[Sequence[int]], *, n_prompt: int, n_new: int) -> None:
        self.n_prompt = n_prompt
        by_row = [np.random.default_rng(seed).random(n_new) for seed in seeds]
        self.uniform = torch.from_numpy(np.stack(by_row))  # (B, n_new)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.uniform = self.uniform.to(scores.device)
        cumulative = scores.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)  # (B, V)
        step = input_ids.shape[1] - self.n_prompt
        # a random share of the sum of all probabilities, which after rounding is not exactly 1: (B, 1)
        threshold = self.uniform[:, step, None] * cumulative[:, -1:]
        # the first token whose cumulative probability exceeds the threshold, so its own probability is > 0
        drawn = torch.searchsorted(cumulative, threshold, right=True)  # (B, 1)
        drawn.clamp_(max=scores.shape[1] - 1)  # if the sums are NaN, the index is V
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _StopIf(transformers.StoppingCriteria):
    """End all rows once `should_stop` returns true for the last row's tokens."""

    def __init__(self, should_stop: Callable[[torch.Tensor], bool]) -> None:
        self.should_stop = should_stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), bool(self.should_stop(input_ids[-1])), device=input_ids.device)


@torch.no_grad()
def log_probabilities(
    model: Any, prompts: Sequence[Tokens], answers: Sequence[Answer], autocast: torch.dtype | None = None
) -> list[float]:
    """The summed log-probability of each answer, as training scores a response."""
    examples = [Example(prompt, (answer.tokens,)) for prompt, answer in zip(prompts, answers, strict=True)]
    [microbatch] = Padded().split(examples, 1)
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        by_token = Padded().forward(model, microbatch.to(device).inputs).logps  # (1, B, T)
    return by_token[0].sum(-1).tolist()
