"""Conversion of texts to token ids: a caching tokenizer, EOS, truncation. Independent of datasets and processes."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Literal

from dpo.errors import InputError

TruncationMode = Literal["keep_start", "keep_end"]


class TextEncoder:
    """A caching tokenizer: a text that recurs soon is tokenized once, without special tokens.

    `prime` tokenizes many texts in one call, which fast tokenizers spread over the cores. Ids are cached as 32-bit
    arrays, a seventh of the size of Python lists of integers, under a digest of their text. The least recently used are
    dropped once all take more than `max_bytes`. Threads may share it. `largest` is the largest token id so far.
    """

    def __init__(self, tokenizer: Any, *, max_bytes: int = 2**28, largest: int = -1) -> None:
        self.tokenizer, self.largest = tokenizer, largest
        self._in_use = Lock()  # tokenizers change their settings while they work
        self._known: OrderedDict[bytes, array] = OrderedDict()
        self._changing = Lock()
        self._n_bytes, self._max_bytes = 0, max_bytes
        self._n_embeddings = math.inf

    def prime(self, texts: Iterable[str], *, chunk: int = 10_000) -> None:
        named = {_digest(text): text for text in texts}
        with self._in_use:
            new = [(key, text) for key, text in named.items() if self._find(key) is None]
            for start in range(0, len(new), chunk):
                part = new[start : start + chunk]
                rows = self.tokenizer([text for _, text in part], add_special_tokens=False)["input_ids"]
                for (key, _), ids in zip(part, rows, strict=True):
                    self.largest = max(self.largest, max(ids, default=-1))
                    self._keep(key, array("i", ids))
        self.check_vocabulary(self._n_embeddings)

    def check_vocabulary(self, n_embeddings: float) -> None:
        """Raise InputError, now or later, once a text has a token id without an embedding in the model."""
        self._n_embeddings = n_embeddings
        if self.largest >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {self.largest}, but the model has only {n_embeddings} embeddings; "
                f"set model.tokenizer_name_or_path to the model's own tokenizer"
            )

    def __call__(self, text: str) -> list[int]:
        key = _digest(text)
        while (ids := self._find(key)) is None:  # another thread may have evicted it
            self.prime([text])
        return ids.tolist()

    def _find(self, key: bytes) -> array | None:
        with self._changing:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
            return ids

    def _keep(self, key: bytes, ids: array) -> None:
        """Cache a text's ids; the newest entry stays, however long it is."""
        with self._changing:
            self._known[key] = ids
            self._n_bytes += _size(ids)
            while self._n_bytes > self._max_bytes and len(self._known) > 1:
                self._n_bytes -= _size(self._known.popitem(last=False)[1])


ENTRY_BYTES = 280  # of a cached text in addition to its ids: digest, array, dictionary entry


def _size(ids: array) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def truncate(
    prompt: list[int],
    responses: Sequence[list[int]],
    mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses (EOS included) to `max_length` tokens together, if the longest is too long.

    The reference's rule: first the prompt to `max_prompt_length` (keeping its start or its end), then, if that is not
    enough, every response to `max_length - max_prompt_length`, even if a short prompt leaves more room.
    """
    longest = max(map(len, responses))
    if len(prompt) + longest > max_length:
        prompt = prompt[:max_prompt_length] if mode == "keep_start" else prompt[-max_prompt_length:]
    if len(prompt) + longest > max_length:
        responses = [response[: max_length - max_prompt_length] for response in responses]
    return prompt, list(responses)


def encode_with_eos(encode: TextEncoder, text: str, *, rendered: bool = False) -> list[int]:
    """Token ids of a response, EOS appended.

    Raises InputError if the text contains EOS, unless a chat template has `rendered` it: there EOS ends a turn.
    """
    eos = encode.tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no EOS token, which must end every response: set tokenizer.eos_token")
    ids = encode(text)
    if eos in ids and not rendered:
        raise InputError(f"EOS token {encode.tokenizer.eos_token!r} inside a response: {text!r}")
    return [*ids, eos]


def encode_whole(
    prompt: str, responses: Sequence[str], encode: TextEncoder, *, rendered: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of its responses, EOS appended. Raises InputError if a text contains EOS."""
    prompt_ids = encode(prompt)
    if encode.tokenizer.eos_token_id in prompt_ids and not rendered:
        raise InputError(f"EOS token {encode.tokenizer.eos_token!r} inside a prompt: {prompt!r}")
    return prompt_ids, [encode_with_eos(encode, text, rendered=rendered) for text in responses]


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
    """Token ids of a prompt and of its responses, EOS appended, truncated together."""
    whole = encode_whole(prompt, responses, encode, rendered=rendered)
    return truncate(*whole, truncation_mode, max_length, max_prompt_length)
