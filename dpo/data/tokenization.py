"""Tokenizes a user's conversation as one text, and divides the tokens among its parts.

The parts are the prompt and the pieces of the response. If a token would span two of them, they are tokenized apart, as
texts of the reference code's datasets are.
"""

import copy
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from dpo.data.schema import Prompt
from dpo.errors import InputError
from dpo.redaction import redact

# A marker is put before a text that follows another but is tokenized apart, so that the tokenizer adds no space before
# it. The first marker is used whose characters do not share a token with those of the text.
MARKERS = ("\n", "|", "x", "\ue000")
SHOWN = 100  # characters that a message shows before and after a token in a text

Parts = tuple[str, ...]  # a text in parts
Ids = list[list[int]]  # the token ids of each part


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Make a pattern that matches any of the texts; without texts, it matches nowhere."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


@lru_cache(maxsize=4)
def compile_special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Compile a pattern that matches the string of any special token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens) - {""}
    return match_any(sorted(special, key=len, reverse=True))  # the longest first, as one may begin with another


def remove_special_tokens(text: str, tokenizer: Any) -> str:
    """Remove the strings of special tokens, including those that only form when others are removed."""
    control = compile_special_tokens(tokenizer)
    while (shorter := control.sub("", text)) != text:
        text = shorter
    return text


def list_end_strings(tokenizer: Any) -> list[str]:
    """List the strings of the tokens that end an answer: `end_tokens` (`set_end_and_media_tokens`), and EOS."""
    return [token for token in (*getattr(tokenizer, "end_tokens", ()), getattr(tokenizer, "eos_token", None)) if token]


def remove_final_eos(text: str, tokenizer: Any) -> str:
    """Remove the EOS that ends a response, and white space after it, as tokenization appends EOS."""
    stripped = text.rstrip()
    eos = getattr(tokenizer, "eos_token", None)
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text


def quote_around(text: str, position: int) -> str:
    """Quote what is before and after a position in a text, for a message."""
    return repr(redact(text[:position])[-SHOWN:] + redact(text[position:])[:SHOWN])


def refuse_eos(prompt: Prompt, tokenizer: Any) -> None:
    """Raise InputError for a text of a prompt or its responses that has EOS among its tokens.

    A prompt that is not tokenized apart may have it, as it may be a chat that the user has rendered; so may all texts
    that a chat template has rendered.
    """
    eos = getattr(tokenizer, "eos_token", None)
    if prompt.rendered or not eos:
        return
    texts = [*prompt.responses, prompt.text] if prompt.apart else prompt.responses
    for text in texts:
        # only a text with EOS in its characters is tokenized, as tokenizing all texts would take long
        if eos in text and tokenizer.eos_token_id in tokenizer(text, verbose=False)["input_ids"]:
            raise InputError(
                f"a text contains the EOS token {eos!r}, which the model would take for the end of the text: "
                f"remove it from {quote_around(text, text.index(eos))}"
            )


class Tokens(NamedTuple):
    """Token ids of a prompt and its responses' pieces, without EOS."""

    prompt: list[int]
    responses: list[Ids]  # for each response, the ids of its pieces


class TextEncoder:
    """Tokenizes texts without special tokens; threads may share it.

    Fast tokenizers spread the texts of one call over the cores. Once `n_embeddings` is known, every call raises
    InputError for a token id without an embedding.
    """

    def __init__(self, tokenizer: Any, *, largest_id: int = -1):
        self.tokenizer = tokenizer
        self.largest_id = largest_id  # in all texts so far; -1 before the first
        self.n_embeddings = math.inf  # the model's, once `check_vocabulary` knows it
        self.eos = tokenizer.eos_token_id  # kept, as transformers looks it up at each access
        self.ends = tuple(list_end_strings(tokenizer))  # strings of the tokens that end an answer

    def __call__(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Tokenize each text by itself; return token ids by text."""
        return {text: ids[0] for (text,), ids in self._encode((text,) for text in texts).items()}

    def encode_conversations(self, conversations: Iterable[tuple[str, Iterable[Sequence[str]]]]) -> list[Tokens]:
        """Tokenize each prompt with each of its responses as one text; return the tokens of each conversation.

        A conversation is a prompt and all its responses, each in pieces. Its parts are tokenized apart if a token would
        span two of them, or if the prompt's tokens depend on the response that follows.
        """
        texts: list[list[Parts]] = []  # for each prompt, its text with each response, or alone if it has none
        for prompt, responses in conversations:
            texts.append([(prompt, *pieces) for pieces in responses] or [(prompt,)])
        whole = self._encode(chain.from_iterable(texts))
        are_apart = []  # for each conversation
        crossing = []  # the texts of those conversations
        for conversation in texts:
            ids = [whole[parts] for parts in conversation]
            crosses = None in ids or any(ids_of_parts[0] != ids[0][0] for ids_of_parts in ids)
            are_apart.append(crosses)
            if crosses:
                crossing += conversation
        prompt_ids = self(parts[0] for parts in crossing)
        piece_ids = self._encode_after_text(list(chain.from_iterable(parts[1:] for parts in crossing)))
        apart = {parts: [prompt_ids[parts[0]], *(piece_ids[piece] for piece in parts[1:])] for parts in crossing}
        encoded = []
        for conversation, crosses in zip(texts, are_apart, strict=True):
            ids = [(apart if crosses else whole)[parts] for parts in conversation]
            responses = [ids_of_parts[1:] for ids_of_parts in ids if len(ids_of_parts) > 1]
            encoded.append(Tokens(ids[0][0], responses))
        return encoded

    def _encode_after_text(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Tokenize each text by itself, as if another text were before it; return token ids by text."""
        encoded = {}
        for marker in MARKERS:
            marked = self._encode((marker, text) for text in texts if text not in encoded)
            # ids is None if a token has characters of the marker and of the text
            encoded |= {text: ids[1] for (_, text), ids in marked.items() if ids is not None}
        # the remaining texts share a token with every marker
        return encoded | self(text for text in texts if text not in encoded)

    def _encode(self, texts: Iterable[Parts]) -> dict[Parts, Ids | None]:
        """Tokenize each distinct text; return the token ids of its parts, or None if a token spans two parts."""
        distinct = list(dict.fromkeys(texts))
        if self.tokenizer.is_fast:
            encodings = self._backend.encode_batch(["".join(parts) for parts in distinct], add_special_tokens=False)
            divided = map(self._divide, distinct, encodings)
        else:
            divided = map(self._encode_in_python, distinct)
        encoded = dict(zip(distinct, divided, strict=True))
        for ids_of_parts in encoded.values():
            self.largest_id = max([self.largest_id, *chain.from_iterable(ids_of_parts or ())])
        self.check_vocabulary(self.n_embeddings)
        return encoded

    def check_vocabulary(self, n_embeddings: float) -> None:
        """Raise InputError if a text so far has a token id without an embedding; later texts are checked as well."""
        self.n_embeddings = n_embeddings
        if self.largest_id >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {self.largest_id}, but the model has only {n_embeddings} embeddings: "
                f"set model.tokenizer_name_or_path to the model's own tokenizer"
            )

    def _encode_in_python(self, parts: Parts) -> Ids | None:
        """Tokenize a text with a tokenizer that gives no offsets.

        The parts can be told apart if the whole begins with the tokens of each beginning; returns None if it does not.
        """
        beginnings = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in accumulate(parts)]
        whole = beginnings[-1]
        limits = [len(ids) for ids in beginnings]
        if any(whole[: len(ids)] != ids for ids in beginnings):
            return None
        return [whole[i:j] for i, j in pairwise([0, *limits])]

    @cached_property
    def _backend(self) -> Tokenizer:
        """A copy of a fast tokenizer that neither adds special tokens nor truncates or pads.

        So every token has a position in the text.
        """
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend

    def _divide(self, parts: Parts, encoding: Encoding) -> Ids | None:
        """Divide the token ids of a text among its parts; None if a token spans two of them."""
        text = "".join(parts)
        limits = [0]
        for position in accumulate(map(len, parts[:-1])):
            offsets = encoding.offsets
            n_before = bisect_left(offsets, (position,))  # the tokens that start earlier
            start, end = offsets[n_before - 1] if n_before else (0, 0)
            if end > position:  # perhaps only because the offsets of an added token include the spaces beside it
                token = self._backend.get_added_tokens_decoder().get(encoding.ids[n_before - 1])
                if token is None or not (token.lstrip or token.rstrip):
                    return None
                if text[start:position].isspace():
                    n_before -= 1
                elif not text[position:end].isspace():
                    return None
            limits.append(n_before)
        return [encoding.ids[i:j] for i, j in pairwise([*limits, None])]
