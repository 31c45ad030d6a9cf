"""A user's conversation is tokenized as one text, whose tokens are cut where its parts meet.

If a token lies on both sides, the parts are tokenized apart, as texts of the reference code's datasets are.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from threading import Lock
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from dpo.errors import InputError

ESCAPE = "\ufdd0"  # a noncharacter, which no text has; in a control token's string it makes that string ordinary text
# Before a text that does not begin the whole, so that no space is put before it. The first one is taken whose tokens
# do not join those of the text.
MARKERS = ("\n", "|", "x", "\ue000")
SHOWN_AROUND = 150  # characters that a message shows before and after the EOS in a text
PRIVATE = "\ufdd1"  # a noncharacter, as ESCAPE is; around a number it stands for a control token

Parts = tuple[str, ...]  # of a text
Ids = list[list[int]]  # of each part of a text


def list_control(tokenizer: Any) -> list[str]:
    """Strings of the special tokens, the longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(special | set(tokenizer.all_special_tokens) - {""}, key=lambda token: (-len(token), token))


@lru_cache(maxsize=4)
def find_control(tokenizer: Any) -> re.Pattern[str]:
    """Pattern of the strings of special tokens that are not escaped."""
    # a string of one character has no place inside for ESCAPE, which follows it
    choices = (re.escape(s) + (f"(?!{ESCAPE})" if len(s) == 1 else "") for s in list_control(tokenizer))
    return re.compile("|".join(choices) or "(?!)")


def escape_control(text: str, tokenizer: Any) -> str:
    """Make control tokens ordinary text, by an ESCAPE in each; a chat template keeps it, `TextEncoder` removes it."""
    control, escaped = find_control(tokenizer), unescape(text)
    while (again := control.sub(lambda match: match[0][0] + ESCAPE + match[0][1:], escaped)) != escaped:
        escaped = again  # strings that overlap need another round
    return escaped


def unescape(text: str) -> str:
    """The text as the user gave it."""
    return text.replace(ESCAPE, "")


def remove_final_eos(text: str, tokenizer: Any) -> str:
    """Remove the EOS that ends a response, as tokenization appends one."""
    eos, stripped = getattr(tokenizer, "eos_token", None), text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text


def refuse_eos(texts: Iterable[str], tokenizer: Any) -> None:
    eos = getattr(tokenizer, "eos_token", None)
    for text in texts:
        # only a text with EOS in its characters is tokenized, as tokenizing all texts would take long
        start = text.find(eos) if eos else -1
        if start >= 0 and tokenizer.eos_token_id in tokenizer(text, verbose=False)["input_ids"]:
            around = text[max(0, start - SHOWN_AROUND) : start + SHOWN_AROUND]
            raise InputError(
                f"a text contains the EOS token {eos!r}, which the model would take for the end of the text: "
                f"remove it from {around!r}"
            )


class Tokens(NamedTuple):
    """Token ids of a prompt and its responses' pieces, without EOS."""

    prompt: list[int]
    responses: list[Ids]
    crosses: bool  # a token would cross a limit, so the parts are tokenized apart


class TextEncoder:
    """Tokenizes texts without special tokens; threads may share it.

    Fast tokenizers spread the texts of one call over the cores. Raises InputError for a token id without an embedding,
    once `n_embeddings` is known.
    """

    def __init__(self, tokenizer: Any, *, largest: int = -1) -> None:
        self.tokenizer, self.largest, self.n_embeddings = tokenizer, largest, math.inf
        self._lock = Lock()  # backends are made once

    def __call__(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Tokenize the distinct texts, each apart."""
        return {text: ids[0] for (text,), ids in self._encode((text,) for text in texts).items()}

    def encode_whole(self, conversations: Iterable[tuple[str, Iterable[Sequence[str]]]]) -> list[Tokens]:
        """Tokenize prompts with their responses, which are pieces, each conversation as one text.

        The parts are tokenized apart if a token crosses a limit, or a prompt's responses do not continue the same
        tokens.
        """
        texts = [[(prompt, *pieces) for pieces in responses] or [(prompt,)] for prompt, responses in conversations]
        whole = self._encode(chain.from_iterable(texts))
        fitting = []
        for of_prompt in texts:
            found = [whole[parts] for parts in of_prompt]
            fits = None not in found and all(ids[0] == found[0][0] for ids in found)
            fitting.append(found if fits else None)
        divided = [of_prompt for of_prompt, found in zip(texts, fitting, strict=True) if found is None]
        begins = self(of_prompt[0][0] for of_prompt in divided)
        continues = self._encode_behind([part for of_prompt in divided for parts in of_prompt for part in parts[1:]])
        encoded = []
        for of_prompt, found in zip(texts, fitting, strict=True):
            ids = found or [[begins[prompt], *map(continues.__getitem__, pieces)] for prompt, *pieces in of_prompt]
            responses = [each[1:] for each in ids if len(each) > 1]
            encoded.append(Tokens(ids[0][0], responses, crosses=found is None))
        return encoded

    def _encode_behind(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Tokenize texts that do not begin the whole."""
        found = {}
        for marker in MARKERS:
            marked = self._encode((marker, text) for text in texts if text not in found)
            found |= {text: ids[1] for (_, text), ids in marked.items() if ids is not None}
        return found | self(text for text in texts if text not in found)

    def _encode(self, texts: Iterable[Parts]) -> dict[Parts, Ids | None]:
        """Tokenize the distinct texts, and cut their tokens where parts meet; None if a token crosses a limit."""
        distinct = list(dict.fromkeys(texts))
        if self.tokenizer.is_fast:
            escaped = [parts for parts in distinct if ESCAPE in "".join(parts)]
            plain = [parts for parts in distinct if ESCAPE not in "".join(parts)]
            with self._lock:
                encoded = self._plain.encode(plain)
                if escaped:
                    encoded |= self._twin.encode(escaped)
        else:
            encoded = {parts: self._encode_in_python(parts) for parts in distinct}
        found = (token for cut in encoded.values() for ids in cut or () for token in ids)
        self.largest = max(self.largest, max(found, default=-1))
        self.check_vocabulary(self.n_embeddings)
        return encoded

    def check_vocabulary(self, n_embeddings: float) -> None:
        """Raise InputError for a token id without an embedding, now and in later texts."""
        self.n_embeddings = n_embeddings
        if self.largest >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {self.largest}, but the model has only {n_embeddings} embeddings; set "
                f"model.tokenizer_name_or_path to the model's own tokenizer"
            )

    def _encode_in_python(self, parts: Parts) -> Ids | None:
        """Without offsets, one limit is found if the first part alone has the same tokens."""
        text = "".join(parts)
        if ESCAPE in text:
            raise InputError(
                f"{self.tokenizer.__class__.__name__} is a tokenizer in Python, which cannot take the control tokens "
                f"in the message {unescape(text)[:200]!r} for ordinary text: remove them"
            )
        first, ids = (self.tokenizer(each, add_special_tokens=False)["input_ids"] for each in (parts[0], text))
        if len(parts) == 1:
            return [ids]
        return [first, ids[len(first) :]] if len(parts) == 2 and ids[: len(first)] == first else None

    @cached_property
    def _plain(self) -> Backend:
        return Backend(self.tokenizer, {})

    @cached_property
    def _twin(self) -> Backend:
        control = list_control(self.tokenizer)
        return Backend(self.tokenizer, {token: f"{PRIVATE}{i}{PRIVATE}" for i, token in enumerate(control)})


class Backend:
    """A fast tokenizer without what changes offsets.

    With private `names` for control tokens, their own names are ordinary text.
    """

    def __init__(self, tokenizer: Any, names: dict[str, str]) -> None:
        self.names, self._control = names, find_control(tokenizer)
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        settings |= {"post_processor": None, "truncation": None, "padding": None}
        if names:
            _rename_tokens(settings, names)
        self._tokens = Tokenizer.from_str(json.dumps(settings))
        self._tokens.encode_special_tokens = not names and bool(getattr(tokenizer, "split_special_tokens", False))
        ids = {self._tokens.token_to_id(name): tokenizer.convert_tokens_to_ids(token) for token, name in names.items()}
        self._renamed = {private: token for private, token in ids.items() if private != token}
        added = settings["added_tokens"]
        self._stripping = {token["content"] for token in added if token["lstrip"] or token["rstrip"]}

    def encode(self, texts: Sequence[Parts]) -> dict[Parts, Ids | None]:
        read, encoded = texts, {}
        if self.names:  # escaped control tokens become letters
            read = [
                tuple(unescape(self._control.sub(lambda match: self.names[match[0]], part)) for part in parts)
                for parts in texts
            ]
        encodings = self._tokens.encode_batch(["".join(parts) for parts in read], add_special_tokens=False)
        for text, parts, encoding in zip(texts, read, encodings, strict=True):
            positions = accumulate(map(len, parts[:-1]))
            limits = [self._find_limit(encoding, position, parts) for position in positions]
            ids = [self._renamed.get(token, token) for token in encoding.ids] if self._renamed else encoding.ids
            cuts = pairwise((0, *limits, len(ids)))
            encoded[text] = None if None in limits else [ids[i:j] for i, j in cuts]
        return encoded

    def _find_limit(self, encoding: Encoding, position: int, parts: Parts) -> int | None:
        """Count the tokens before a position; None if one lies across it."""
        offsets = encoding.offsets
        n_before = bisect_left(offsets, (position,))  # the tokens that start earlier
        if n_before == 0 or offsets[n_before - 1][1] <= position:
            return n_before
        token = self._tokens.id_to_token(encoding.ids[n_before - 1])
        begin = "".join(parts).find(token, offsets[n_before - 1][0]) if token in self._stripping else -1
        if position <= begin:  # only the spaces that the token takes from the text beside it are before
            return n_before - 1
        return n_before if 0 <= begin <= position - len(token) else None


def _rename_tokens(settings: dict[str, Any], names: dict[str, str]) -> None:
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    # a word may be a control token too, and then merges make it of letters: its name stays in the vocabulary
    merges = (merge if isinstance(merge, list) else merge.split(" ") for merge in model.get("merges", ()))
    merged = {"".join(merge) for merge in merges}
    renamed = {token: name for token, name in names.items() if token not in merged}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram's pieces with their scores
        model["vocab"] = [[renamed.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
