"""The examples of a run: their order, and each as the token ids that a model is fed. Knows no tensor and no process."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpo.data.prompts import Prompt
from dpo.data.tokenization import TextEncoder, encode_texts

KEY_BYTES = 16


class TextExample(NamedTuple):
    """An example as text: a pair, or an SFT target."""

    prompt: Prompt
    index: int  # its place among the prompt's examples
    texts: dict[str, str]  # chosen (under SFT the target) and, of a pair, rejected


class Example(NamedTuple):
    """An example as a model is fed it: token ids after truncation, EOS included."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]  # chosen, rejected; under SFT the target
    id: tuple[int, int] | None = None  # the prompt's place in its split, the example's place in the prompt

    @property
    def n_tokens(self) -> int:
        """Tokens of each response with its prompt."""
        return sum(len(self.prompt) + len(response) for response in self.responses)

    @property
    def n_scored(self) -> tuple[int, ...]:
        """Tokens of each response that something predicts: without a prompt nothing predicts the first."""
        return tuple(len(response) - (not self.prompt) for response in self.responses)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The `content_key` of each response."""
        return tuple(content_key(self.prompt, response) for response in self.responses)


def content_key(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    """A digest of the token ids that the model is fed, after truncation."""
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(array("q", (*prompt, *response)).tobytes())
    return digest.digest()


def examples_of(prompt: Prompt, *, sft_mode: bool) -> Iterator[TextExample]:
    """The examples of a prompt: its SFT target, or every pair."""
    for index, texts in enumerate(prompt.examples(sft_mode)):
        yield TextExample(prompt, index, texts)


def iterate_examples(
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    shuffle: bool,
    sft_mode: bool,
    n_epochs: int | None,
    n_examples: int | None,
    seed: int,
) -> Iterator[list[TextExample]]:
    """The examples of each batch in the reference's order, until `n_epochs` or `n_examples` is reached.

    Each epoch shuffles the order left by the one before, prompt by prompt; all pairs of a prompt follow each other.
    The partial batch at an epoch's end is dropped, though its examples count towards `n_examples`.
    """
    order = array("I", range(len(prompts)))
    epoch_seeds = np.random.RandomState(seed)
    epoch = seen = 0
    while n_epochs is None or epoch < n_epochs:
        if shuffle:
            random.Random(int(epoch_seeds.randint(0, 2**32, dtype=np.int64))).shuffle(order)
        batch: list[TextExample] = []
        for prompt in map(prompts.__getitem__, order):
            for example in examples_of(prompt, sft_mode=sft_mode):
                batch.append(example)
                seen += 1
                if len(batch) == batch_size:
                    yield batch
                    batch = []
                    if n_examples is not None and seen >= n_examples:
                        return
        epoch += 1


def prime(examples: Iterable[TextExample], encode: TextEncoder) -> None:
    """Tokenize all their texts in one call."""
    encode.prime(text for example in examples for text in (example.prompt.text, *example.texts.values()))


def encode_examples(
    examples: Sequence[TextExample], encode: TextEncoder, *, max_length: int, max_prompt_length: int
) -> list[Example]:
    """Tokenize and truncate. Raises InputError for a text that contains EOS."""
    prime(examples, encode)
    encoded = []
    for prompt, index, texts in examples:
        ids, responses = encode_texts(
            prompt.text,
            list(texts.values()),
            encode,
            truncation_mode=prompt.truncation_mode,
            max_length=max_length,
            max_prompt_length=max_prompt_length,
            rendered=prompt.rendered,
        )
        encoded.append(Example(tuple(ids), tuple(map(tuple, responses)), (prompt.number, index)))
    return encoded
