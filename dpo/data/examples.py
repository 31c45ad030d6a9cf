"""Examples of a run: their order and their token ids.

Independent of tensors and processes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpo.data.table import Prompt
from dpo.data.tokenization import TextEncoder, append_eos, truncate
from dpo.losses import TRAINS_ON

DIGEST_BYTES = 16


class TextExample(NamedTuple):
    """An example as text: a pair, or an SFT target."""

    prompt: Prompt
    index: int  # among the prompt's examples
    texts: dict[str, str]  # by role


class Example(NamedTuple):
    """An example as token ids for the model: truncated, including EOS."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]  # as many in all examples of a run
    id: tuple[int, int] | None = None  # (index of the prompt in its split, index of the example in its prompt)
    dataset: str = ""
    digest: str = ""  # `text_digest`, which is the same in every run
    truncated: bool = False  # prompt or response
    roles: tuple[str, ...] = TRAINS_ON["pairs"]  # one for each response

    @property
    def n_tokens(self) -> int:
        """Number of tokens, with the prompt once per response."""
        return sum(len(self.prompt) + len(response) for response in self.responses)

    @property
    def n_scored(self) -> tuple[int, ...]:
        """Number of scored tokens per response.

        Without a prompt, nothing predicts the first token.
        """
        return tuple(len(response) - (0 if self.prompt else 1) for response in self.responses)


def text_digest(prompt: str, responses: Iterable[str]) -> str:
    """Digest of an example's texts, independent of its place in the data."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for text in (prompt, *responses):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)  # with lengths, so that ("ab", "c") is not ("a", "bc")
    return digest.hexdigest()


def list_examples(prompt: Prompt) -> list[TextExample]:
    return [TextExample(prompt, index, prompt.texts(index)) for index in range(len(prompt.examples))]


def read_examples(prompts: Sequence[Prompt], places: Iterable[tuple[int, int]]) -> list[TextExample]:
    """Read the examples at `places`.

    A place is (index of the prompt, index of the example in its prompt).
    """
    examples, prompt = [], None
    for number, index in places:
        if prompt is None or prompt.number != number:  # examples of a prompt come one after another: decode it once
            prompt = prompts[number]
        examples.append(TextExample(prompt, index, prompt.texts(index)))
    return examples


def iterate_examples(
    counts: Sequence[int],
    *,
    batch_size: int,
    shuffle: bool,
    n_epochs: int | None,
    n_examples: int | None,
    seed: int,
) -> Iterator[list[tuple[int, int]]]:
    """Yield each batch's example ids in the reference's order.

    Ends when `n_epochs` or `n_examples` is reached. `counts` has the number of examples per prompt. Each epoch shuffles
    the prompts again, starting from the previous order; pairs of a prompt stay together. The partial batch at the end
    of an epoch is dropped, but its examples count towards `n_examples`. With fewer examples than `batch_size`, or
    without any limit, it never ends: callers check that.
    """
    order = array("I", range(len(counts)))  # 4 bytes a prompt, and shuffled like a list
    epoch_seeds = np.random.RandomState(seed)
    epoch = seen = 0
    while n_epochs is None or epoch < n_epochs:
        if shuffle:
            random.Random(int(epoch_seeds.randint(0, 2**32, dtype=np.int64))).shuffle(order)
        batch: list[tuple[int, int]] = []
        for number in order:
            for index in range(counts[number]):
                batch.append((number, index))
                seen += 1
                if len(batch) == batch_size:
                    yield batch
                    batch = []
                    if n_examples is not None and seen >= n_examples:
                        return
        epoch += 1


def iterate_once(
    counts: Sequence[int], *, batch_size: int, n_examples: int, seed: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the first epoch's example ids in batches, each id once.

    The order is that of `iterate_examples`. There are at most `n_examples` ids, and the last batch may be partial.
    """
    singles = iterate_examples(counts, batch_size=1, shuffle=True, n_epochs=1, n_examples=n_examples, seed=seed)
    while batch := [example for [example] in itertools.islice(singles, batch_size)]:
        yield batch


def encode_examples(
    examples: Sequence[TextExample], encode: TextEncoder, *, max_length: int, max_prompt_length: int
) -> list[Example]:
    """Tokenize and truncate examples.

    Raises InputError for a text that contains EOS.
    """
    ids = encode(text for prompt, _, texts in examples for text in (prompt.text, *texts.values()))
    encoded = []
    for prompt, index, texts in examples:
        whole = append_eos(prompt.text, list(texts.values()), ids, encode.tokenizer, rendered=prompt.rendered)
        prompt_ids, responses = truncate(*whole, prompt.truncation_mode, max_length, max_prompt_length)
        encoded.append(
            Example(
                tuple(prompt_ids),
                tuple(map(tuple, responses)),
                (prompt.number, index),
                prompt.dataset,
                text_digest(prompt.text, texts.values()),
                truncated=(prompt_ids, responses) != whole,
                roles=tuple(texts),
            )
        )
    return encoded
