"""Conversion of texts to token ids, with EOS and truncation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from threading import Lock
from typing import Any, Literal

from dpo.errors import InputError

TruncationMode = Literal["keep_start", "keep_end"]

ESCAPE = "\ufdd0"  # a noncharacter, which no text has; in a control token's string it makes that string ordinary text


@lru_cache(maxsize=4)
def find_control(tokenizer: Any) -> re.Pattern[str]:
    """Pattern of the strings of special tokens that are not escaped."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    strings = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)  # the longest is matched
    # a string of one character has no place inside for ESCAPE, which follows it
    return re.compile("|".join(re.escape(s) + (f"(?!{ESCAPE})" if len(s) == 1 else "") for s in strings if s) or "(?!)")


def escape_control(text: str, tokenizer: Any) -> str:
    """Make the control tokens in a message's text ordinary text.

    ESCAPE is inserted after the first character of each. A chat template keeps it, and `TextEncoder` removes it.
    """
    control, escaped = find_control(tokenizer), unescape(text)
    while (again := control.sub(lambda match: match[0][0] + ESCAPE + match[0][1:], escaped)) != escaped:
        escaped = again  # strings that overlap need another round
    return escaped


def unescape(text: str) -> str:
    """The text as the user gave it."""
    return text.replace(ESCAPE, "")


class TextEncoder:
    """Tokenizes texts without special tokens; threads may share it.

    All texts are tokenized in one call, because fast tokenizers spread the texts of a call over the cores. `largest` is
    the largest token id so far.
    """

    def __init__(self, tokenizer: Any, *, largest: int = -1) -> None:
        self.tokenizer, self.largest = tokenizer, largest
        self._lock = Lock()  # a tokenizer is not safe for threads: a call changes its settings
        self._n_embeddings = math.inf  # unknown until `check_vocabulary`

    def __call__(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Tokenize the distinct texts; return the token ids of each.

        Raises InputError for a token id without an embedding in the model.
        """
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        with self._lock:
            token_ids = self.tokenizer(distinct, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            self.largest = max(self.largest, *(max(ids, default=-1) for ids in token_ids))
        self.check_vocabulary(self._n_embeddings)
        return dict(zip(distinct, token_ids, strict=True))

    def check_vocabulary(self, n_embeddings: float) -> None:
        """Raise InputError for a token id without an embedding.

        The texts tokenized so far are checked now, and later texts when they are tokenized: texts may be tokenized
        before or after the model is loaded.
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


def split_at_cuts(text: str, cuts: Sequence[int]) -> list[str]:
    """Split a response into pieces, scored and not scored in turn.

    The first piece is scored; it is empty if the response begins with text that is not scored. If the number of cuts is
    odd, neither the last piece nor EOS is scored. A response without cuts is one piece. Pieces are tokenized one by
    one, as prompt and response are, so no token is partly scored.
    """
    return [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]


def append_eos(
    prompt: str,
    responses: Sequence[Sequence[str]],
    ids: Mapping[str, list[int]],
    tokenizer: Any,
    *,
    rendered: bool = False,
) -> tuple[list[int], list[list[int]]]:
    """Look up token ids, and append EOS to those of each response.

    A response is a list of pieces. `ids` has the token ids of each text. Returns the ids of the prompt, and those of
    each response. Raises InputError if a text contains EOS, unless a chat template has `rendered` the texts: there EOS
    ends a turn.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no EOS token, which must end every response: set tokenizer.eos_token")
    for kind, text in (("prompt", prompt), *(("response", text) for text in chain(*responses))):
        if eos in ids[text] and not rendered:
            raise InputError(f"EOS token {tokenizer.eos_token!r} inside a {kind}: remove it from {text!r}")
    return ids[prompt], [[*chain(*map(ids.__getitem__, pieces)), eos] for pieces in responses]


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
    token_ids = encode([prompt, *responses])
    pieces = [[response] for response in responses]
    untruncated = append_eos(prompt, pieces, token_ids, encode.tokenizer, rendered=rendered)
    return truncate(*untruncated, truncation_mode, max_length, max_prompt_length)
