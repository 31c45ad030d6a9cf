"""Conversion of texts to token ids, with EOS and truncation.

Independent of datasets and processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Literal

from dpo.errors import InputError

TruncationMode = Literal["keep_start", "keep_end"]


class TextEncoder:
    """A tokenizer without special tokens, which threads may share.

    Many texts are tokenized in one call, which fast tokenizers spread over the cores. `largest` is the largest token id
    so far.
    """

    def __init__(self, tokenizer: Any, *, largest: int = -1) -> None:
        self.tokenizer, self.largest = tokenizer, largest
        self._in_use = Lock()  # tokenizers change their settings while they work
        self._n_embeddings = math.inf

    def __call__(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Tokenize each distinct text.

        Raises InputError for a token id without an embedding in the model.
        """
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        with self._in_use:
            rows = self.tokenizer(distinct, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            self.largest = max(self.largest, *(max(ids, default=-1) for ids in rows))
        self.check_vocabulary(self._n_embeddings)
        return dict(zip(distinct, rows, strict=True))

    def check_vocabulary(self, n_embeddings: float) -> None:
        """Raise InputError, now or later, for an id without an embedding.

        The model may be loaded after some texts were tokenized.
        """
        self._n_embeddings = n_embeddings
        if self.largest >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {self.largest}, but the model has only {n_embeddings} embeddings; "
                f"set model.tokenizer_name_or_path to the model's own tokenizer"
            )


def truncate(
    prompt: list[int],
    responses: Sequence[list[int]],
    mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses to `max_length` tokens together.

    EOS counts. If the prompt with the longest response is too long, the reference's rule applies: first the prompt is
    cut to `max_prompt_length` (keeping its start or its end), then, if that is not enough, every response to
    `max_length - max_prompt_length`, even if a short prompt leaves more room.
    """
    longest = max(map(len, responses))
    if len(prompt) + longest > max_length:
        prompt = prompt[:max_prompt_length] if mode == "keep_start" else prompt[-max_prompt_length:]
    if len(prompt) + longest > max_length:
        responses = [response[: max_length - max_prompt_length] for response in responses]
    return prompt, list(responses)


def append_eos(
    prompt: str, responses: Sequence[str], ids: Mapping[str, list[int]], tokenizer: Any, *, rendered: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Append EOS to the token ids of responses.

    Returns the prompt's ids, and each response's with EOS. Raises InputError if a text contains EOS, unless a chat
    template has `rendered` it: there EOS ends a turn.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no EOS token, which must end every response: set tokenizer.eos_token")
    for kind, text in (("prompt", prompt), *(("response", text) for text in responses)):
        if eos in ids[text] and not rendered:
            raise InputError(f"EOS token {tokenizer.eos_token!r} inside a {kind}: {text!r}")
    return ids[prompt], [[*ids[text], eos] for text in responses]


def encode_texts(
    prompt: str,
    responses: Sequence[str],
    encode: TextEncoder,
    *,
    truncation_mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
    rendered: bool = False,
) -> tuple[list[int], list[list[int]]]:
    """Tokenize a prompt and its responses, append EOS, and truncate them together."""
    whole = append_eos(prompt, responses, encode([prompt, *responses]), encode.tokenizer, rendered=rendered)
    return truncate(*whole, truncation_mode, max_length, max_prompt_length)
