"""Answers to prompts. Each has random numbers of its own, so its batch changes an answer only by rounding."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from dpo.data.examples import Example
from dpo.data.schema import Prompt
from dpo.data.tokenization import compile_special_tokens
from dpo.settings.keys import KEYS
from dpo.system.arithmetic import without_compilation

TokenIds = tuple[int, ...]


class Answer(NamedTuple):
    text: str
    tokens: TokenIds  # including the end token, if any
    ended: bool  # by an end token, not cut off at `max_new_tokens`
    score: float = math.nan  # the scorer's, in online training; higher is better


class OnlinePair(NamedTuple):
    prompt: str
    answers: Sequence[Answer]  # in the order drawn
    best: int  # an index into answers
    worst: int
    is_flipped: bool = False  # true if a label drawn at random makes the worst answer the chosen one

    @property
    def pair(self) -> tuple[Answer, Answer]:
        """The chosen and the rejected answer."""
        best, worst = self.answers[self.best], self.answers[self.worst]
        return (worst, best) if self.is_flipped else (best, worst)

    @property
    def is_tie(self) -> bool:
        chosen, rejected = self.pair
        return chosen.score == rejected.score or chosen.tokens == rejected.tokens


class Sampling(NamedTuple):
    max_new_tokens: int = 0
    temperature: float = 1.0  # 0: the most probable token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    end_tokens: Sequence[int] = ()
    seed: tuple[int, ...] = (0,)
    cache_implementation: str | None = None  # for transformers' `generate`

    def __str__(self) -> str:
        if not self.temperature:
            return "temperature 0, the most probable token"
        return f"temperature {self.temperature:g}, top-p {self.top_p:g}, top-k {self.top_k or 'none'}"


CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # transformers' own, with which the reference code samples


def choose_sampling(model: Any, tokenizer: Any, wanted: Mapping, *, chat: bool = False, **fields: Any) -> Sampling:
    """Choose temperature, top-p and top-k: the value in `wanted`, else the generation config's, else a default.

    `wanted` has None for a value that the user did not set; `fields` are other fields of `Sampling`. Besides these
    values, only the end tokens of a generation config are used: penalties, for instance, would show another
    distribution than the model's.
    """
    config = model.generation_config
    chosen = dict(CHAT_DEFAULTS if chat else DEFAULTS)
    for name in chosen:
        published = getattr(config, name, None)
        if wanted[name] is not None:
            chosen[name] = wanted[name]
        elif published is not None and KEYS[f"sample_{name}"].accepts(published):
            chosen[name] = published
    return Sampling(**chosen, end_tokens=list_end_tokens(config, tokenizer), **fields)


def list_end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """List the ids of the tokens that end an answer; EOS, which ends responses in training, is the first."""
    published = generation_config.eos_token_id
    if not isinstance(published, list):
        published = [published]
    tokens = dict.fromkeys([tokenizer.eos_token_id, *published])
    return [token for token in tokens if token is not None]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[TokenIds],
    numbers: Sequence[int],
    sampling: Sampling,
    *,
    synced: bool = False,
) -> list[Answer]:
    """Generate an answer to each prompt.

    The random numbers of an answer are seeded by `sampling.seed` and the answer's number in `numbers`.
    With `synced`, every process continues until all have finished, as each holds shards of the model.
    """
    device = next(model.parameters()).device
    encoded = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad(encoded, padding_value=tokenizer.pad_token_id).to(device)
    mask = pad([torch.ones_like(row) for row in encoded]).to(device)
    n_prompt = ids.shape[1]  # the same for all prompts, which are padded on the left
    processors = transformers.LogitsProcessorList()  # none for greedy answers
    if sampling.temperature > 0:
        processors.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            processors.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(transformers.TopPLogitsWarper(sampling.top_p))
        generators = [np.random.default_rng([*sampling.seed, number]) for number in numbers]
        uniform = np.stack([generator.random(sampling.max_new_tokens) for generator in generators])  # (B, new tokens)
        processors.append(partial(_draw_token, torch.from_numpy(uniform).to(device), n_prompt))
    own_config = model.generation_config
    # Settings of the model that are not in `sampling`, such as penalties, must have no effect.
    model.generation_config = transformers.GenerationConfig()
    try:
        with without_compilation(cache_implementation=sampling.cache_implementation):
            rows = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,  # `_draw_token` draws
                eos_token_id=sampling.end_tokens or None,
                pad_token_id=tokenizer.pad_token_id,
                logits_processor=processors,
                synced_gpus=synced,
                cache_implementation=sampling.cache_implementation,
            )
    finally:
        model.generation_config = own_config
    answers = []
    for tokens in rows[:, n_prompt:].tolist():
        ends = [i for i, token in enumerate(tokens, start=1) if token in sampling.end_tokens]
        token_ids = tuple(tokens[: ends[0]] if ends else tokens)  # padding follows the first end token
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answers.append(Answer(text, token_ids, ended=bool(ends)))
    return answers


def _draw_token(uniform: torch.Tensor, n_prompt: int, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row of logits, (B, V), and return logits that allow only this token.

    `uniform`, (B, new tokens), has a random number in [0, 1) for each token of each answer.
    """
    cumulative = scores.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)  # (B, V)
    # The threshold is a random share of the sum of all probabilities, which after rounding is not exactly 1: (B, 1).
    threshold = uniform[:, input_ids.shape[1] - n_prompt, None] * cumulative[:, -1:]
    # Take the first token whose cumulative probability exceeds the threshold, so that its own probability is > 0.
    drawn = torch.searchsorted(cumulative, threshold, right=True)  # (B, 1)
    drawn.clamp_(max=scores.shape[1] - 1)  # if the sums are NaN, the index is V
    return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


CUT = "[...]"  # replaces the truncated part of a prompt


def mark_truncation(example: Example, prompt: Prompt, tokenizer: Any) -> str:
    """Return a prompt's text as the model gets it, with CUT where text is missing, unless whole turns were left out."""
    if not example.prompt_is_truncated:
        return prompt.text
    part = tokenizer.decode(list(example.prompt), clean_up_tokenization_spaces=False)
    if prompt.truncation_mode == "keep_turns":
        return part
    return f"{part} {CUT}" if prompt.truncation_mode == "keep_start" else f"{CUT} {part}"


def format_for_readers(prompt: Prompt, text: str, tokenizer: Any) -> str:
    """Format a prompt for people, without special tokens: a chat as lines "role: content", any other prompt as `text`.

    `text` is the prompt as the model gets it. If it differs from the prompt's own text, it was truncated, and is
    returned for a chat, too.
    """
    if not prompt.messages or text != prompt.text:
        return compile_special_tokens(tokenizer).sub("", text).strip()
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt.messages)
