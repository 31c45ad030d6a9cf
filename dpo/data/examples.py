"""One example: token ids of a prompt and its responses, and its name by content."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpo.data.prompts import Prompt
from dpo.data.tokenization import Batch, TextEncoder, collate, encode_example, find_pad_token
from dpo.losses import IGNORE_INDEX

KEY_BYTES = 16


class Example(NamedTuple):
    """Token ids of a prompt and its responses (chosen, rejected; under SFT the target), EOS included."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]


def find_examples(batch: Batch) -> list[Example]:
    """The examples of a padded batch; prompts are what is labelled -100."""
    sides = [side for side in ("chosen", "rejected") if f"{side}_input_ids" in batch]
    responses, prompts = [], []
    for side in sides:
        ids, mask, labels = (batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask", "labels"))
        lengths = mask.sum(1).tolist()
        starts = ((labels == IGNORE_INDEX) & (mask == 1)).sum(1).tolist()
        rows = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        prompts.append([tuple(row[:start]) for row, start in zip(rows, starts, strict=True)])
        responses.append([tuple(row[start:]) for row, start in zip(rows, starts, strict=True)])
    assert all(p == prompts[0] for p in prompts), "chosen and rejected have one prompt"
    return [Example(p, r) for p, r in zip(prompts[0], zip(*responses, strict=True), strict=True)]


def content_key(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    """A digest of the token ids that the model is fed, after truncation."""
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(array("q", (*prompt, *response)).tobytes())
    return digest.digest()


Row = tuple[Prompt, dict[str, str]]  # a prompt with the texts of one example


def iterate_rows(
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    shuffle: bool,
    sft_mode: bool,
    n_epochs: int | None,
    n_examples: int | None,
    seed: int,
) -> Iterator[list[Row]]:
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
        rows: list[Row] = []
        for prompt, texts in ((p, texts) for p in map(prompts.__getitem__, order) for texts in p.examples(sft_mode)):
            rows.append((prompt, texts))
            seen += 1
            if len(rows) == batch_size:
                yield rows
                rows = []
                if n_examples is not None and seen >= n_examples:
                    return
        epoch += 1


def encode_rows(rows: Sequence[Row], encode: TextEncoder, *, max_length: int, max_prompt_length: int) -> Batch:
    """Tokenize, truncate and pad the rows of a batch."""
    encode.prime(text for prompt, texts in rows for text in (prompt.text, *texts.values()))
    encoded = [
        encode_example(
            prompt.text,
            texts,
            encode,
            truncation_mode=prompt.truncation_mode,
            max_length=max_length,
            max_prompt_length=max_prompt_length,
            rendered=prompt.rendered,
        )
        for prompt, texts in rows
    ]
    return collate(encoded, find_pad_token(encode.tokenizer))
