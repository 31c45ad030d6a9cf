"""Truncation of examples that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

TruncationMode = Literal["keep_start", "keep_end"]


def truncate(
    prompt: list[int],
    responses: Sequence[list[int]],
    mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses by the reference code's rule.

    Responses have EOS, which counts. If the prompt with the longest response has more than `max_length` tokens, the
    prompt is cut to `max_prompt_length`; `mode` says whether its start or its end is kept. If that is not enough, every
    response is cut to `max_length - max_prompt_length` tokens, even if a short prompt leaves room for more.
    """
    longest = max(map(len, responses), default=0)
    if len(prompt) + longest > max_length:
        prompt = prompt[:max_prompt_length] if mode == "keep_start" else prompt[-max_prompt_length:]
    if len(prompt) + longest > max_length:
        responses = [response[: max_length - max_prompt_length] for response in responses]
    return prompt, list(responses)
