"""Answers to prompts, each drawn from a seed of its own, and the log-probabilities that a model gives them.

Unlike samples during training (`dpo/models/generation.py`) they do not depend on the prompts beside them in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from dpo.data.collation import collate_prompts
from dpo.data.examples import Example
from dpo.models.layouts import Padded

Tokens = tuple[int, ...]


class Sampling(NamedTuple):
    """How answers are drawn."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0


class Answer(NamedTuple):
    """What a model said; the tokens end with the one that ended it, unless there were `max_new_tokens` before."""

    text: str
    tokens: Tokens


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Tokens],
    numbers: Sequence[int],
    sampling: Sampling,
    *,
    watch: Callable[[list[int]], bool] | None = None,
) -> list[Answer]:
    """The model's answer to each prompt, whose number is mixed into the seed.

    After each token `watch` gets those of the last answer so far, and whether it returns true ends all.
    """
    device = next(model.parameters()).device
    batch = collate_prompts([Example(prompt, ()) for prompt in prompts], tokenizer)
    ids = batch["prompt_input_ids"].to(device)
    ends = _ends(model, tokenizer)
    processors = transformers.LogitsProcessorList()
    if sampling.temperature > 0:
        processors += [transformers.TemperatureLogitsWarper(float(sampling.temperature))]
        processors += [transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        processors += [_Noise([[sampling.seed, number] for number in numbers])]
    criteria = transformers.StoppingCriteriaList()
    if watch is not None:
        criteria.append(_Watcher(lambda rows: watch(rows[-1, ids.shape[1] :].tolist())))
    out = model.generate(
        ids,
        attention_mask=batch["prompt_attention_mask"].to(device),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,  # the noise draws
        num_beams=1,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
        logits_processor=processors,
        stopping_criteria=criteria,
    )
    answers = []
    for row in out[:, ids.shape[1] :].tolist():
        end = next((i for i, token in enumerate(row, start=1) if token in ends), len(row))
        answers.append(Answer(tokenizer.decode(row[:end], skip_special_tokens=True), tuple(row[:end])))
    return answers


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: those of the model's generation config, and EOS, which ends every response."""
    of_model = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])} - {None}


class _Noise(transformers.LogitsProcessor):
    """Gumbel noise, each row's from a generator of its own: the largest sum is a draw from the softmax."""

    def __init__(self, seeds: Sequence[Sequence[int]]) -> None:
        states = (int(np.random.SeedSequence(seed).generate_state(1)[0]) for seed in seeds)
        self.generators = [torch.Generator().manual_seed(state) for state in states]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shape = scores.shape[1:]
        noise = [-torch.empty(shape).exponential_(generator=generator).log() for generator in self.generators]
        return scores + torch.stack(noise).to(scores.device)


class _Watcher(transformers.StoppingCriteria):
    """Ends all rows once `ends` says so of the tokens so far."""

    def __init__(self, ends: Callable[[torch.Tensor], bool]) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), bool(self.ends(input_ids)), device=input_ids.device)


@torch.no_grad()
def log_probabilities(
    model: Any, prompts: Sequence[Tokens], answers: Sequence[Answer], autocast: torch.dtype | None = None
) -> list[float]:
    """The summed log-probability of each answer after its prompt, as training scores a response."""
    examples = [Example(prompt, (of_prompt.tokens,)) for prompt, of_prompt in zip(prompts, answers, strict=True)]
    [microbatch] = Padded().split(examples, 1)
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        [logps] = Padded().forward(model, microbatch.to(device).inputs)
    return logps.tolist()
