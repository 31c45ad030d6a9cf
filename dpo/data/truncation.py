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
    *,
    shortened: list[int] | None = None,
    as_reference: bool = True,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses.

    Responses have EOS, which counts. If the prompt with the longest response has more than `max_length` tokens, the
    prompt is replaced by `shortened`, or cut to `max_prompt_length`; `mode` says whether its start or its end is kept.
    If that is not enough, every response is cut to the room that the prompt leaves. By the reference code's rule that
    is `max_length - max_prompt_length` tokens, even if a short prompt leaves room for more.
    """
    longest = max(map(len, responses), default=0)
    if len(prompt) + longest > max_length:
        cut = prompt[:max_prompt_length] if mode == "keep_start" else prompt[-max_prompt_length:]
        prompt = cut if shortened is None else shortened
    if len(prompt) + longest > max_length:
        room = max_length - (max_prompt_length if as_reference else len(prompt))
        responses = [response[:room] for response in responses]
    return prompt, list(responses)
