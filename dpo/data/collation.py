"""The reference's padded batch, for `get_batch_iterator` and the trainers' public methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence

from dpo.data.examples import Example, TextExample, encode_examples
from dpo.data.tokenization import TextEncoder, TruncationMode, encode_texts
from dpo.errors import InputError
from dpo.losses import IGNORE_INDEX


class PaddedBatch(TypedDict):
    """Rows of a collated batch.

    In SFT mode there are no `rejected` keys, and `chosen` holds the SFT target. Texts: `chosen` is prompt plus
    response. Tensors (rows, tokens), int64: chosen and rejected padded on the right, prompt on the left (as generation
    wants it), with the pad token, 0 in masks and -100 in labels.
    """

    prompt: list[str]
    chosen: list[str]
    chosen_response_only: list[str]
    chosen_input_ids: torch.Tensor
    chosen_attention_mask: torch.Tensor
    chosen_labels: torch.Tensor
    prompt_input_ids: torch.Tensor
    prompt_attention_mask: torch.Tensor
    rejected: NotRequired[list[str]]
    rejected_response_only: NotRequired[list[str]]
    rejected_input_ids: NotRequired[torch.Tensor]
    rejected_attention_mask: NotRequired[torch.Tensor]
    rejected_labels: NotRequired[torch.Tensor]


def batch_element(
    prompt: str, texts: Mapping[str, str], prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """One element of a `PaddedBatch` before padding."""
    element: dict[str, Any] = {"prompt": prompt}
    for (name, text), ids in zip(texts.items(), responses, strict=True):
        element[name] = prompt + text
        element[f"{name}_response_only"] = text
        element[f"{name}_input_ids"] = [*prompt_ids, *ids]
        element[f"{name}_attention_mask"] = [1] * (len(prompt_ids) + len(ids))
        element[f"{name}_labels"] = [IGNORE_INDEX] * len(prompt_ids) + [*ids]
    element["prompt_input_ids"] = list(prompt_ids)
    element["prompt_attention_mask"] = [1] * len(prompt_ids)
    return element


def tokenize_batch_element(
    prompt: str,
    chosen: str,
    rejected: str,
    truncation_mode: TruncationMode,
    tokenizer: Any,
    max_length: int,
    max_prompt_length: int,
) -> dict[str, Any]:
    """Tokenize one pair; the name is the reference's.

    Returns texts, and lists of ids, masks and labels (see `PaddedBatch`). Prompt and responses are tokenized
    separately, without special tokens; EOS is appended to each response; prompt tokens are labelled -100. Raises
    InputError if a text already contains EOS or the truncation mode is unknown.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise InputError(f"truncation_mode={truncation_mode!r} is neither keep_start nor keep_end")
    texts = {"chosen": chosen, "rejected": rejected}
    ids, responses = encode_texts(
        prompt,
        list(texts.values()),
        TextEncoder(tokenizer),
        truncation_mode=truncation_mode,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
    )
    return batch_element(prompt, texts, ids, responses)


def find_examples(batch: PaddedBatch) -> list[Example]:
    """Recover the examples of a padded batch.

    Prompt tokens are those labelled -100.
    """
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
    return [Example(p, r, roles=tuple(sides)) for p, r in zip(prompts[0], zip(*responses, strict=True), strict=True)]


def padded_batch(
    examples: Sequence[TextExample], encode: TextEncoder, *, max_length: int, max_prompt_length: int
) -> PaddedBatch:
    """Tokenize, truncate and pad the examples of a batch."""
    encoded = encode_examples(examples, encode, max_length=max_length, max_prompt_length=max_prompt_length)
    elements = [
        batch_element(text.prompt.text, text.texts, ids.prompt, ids.responses)
        for text, ids in zip(examples, encoded, strict=True)
    ]
    return collate(elements, find_pad_token(encode.tokenizer))


def collate_prompts(examples: Sequence[Example], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Pad the prompts of examples on the left, for generation.

    Returns `prompt_{input_ids,attention_mask}`.
    """
    elements = [{"prompt_input_ids": list(e.prompt), "prompt_attention_mask": [1] * len(e.prompt)} for e in examples]
    batch: Any = collate(elements, find_pad_token(tokenizer))
    return batch


def collate(rows: Sequence[dict[str, Any]], pad_token_id: int) -> PaddedBatch:
    """Pad rows of token lists to a batch of int64 tensors.

    The tensors are on the CPU. Values of other keys are collected in lists.
    """
    pad_values = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORE_INDEX}
    batch: Any = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        kind = next((suffix for suffix in pad_values if key.endswith(suffix)), None)
        if kind is None:
            batch[key] = values
            continue
        side = "left" if key.startswith("prompt") else "right"
        tensors = [torch.tensor(value, dtype=torch.int64) for value in values]
        batch[key] = pad_sequence(tensors, batch_first=True, padding_value=pad_values[kind], padding_side=side)
    return batch


def find_pad_token(tokenizer: Any) -> int:
    """Id of the pad token, or of EOS, as in the reference.

    Raises InputError for a tokenizer with neither.
    """
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has neither a pad token nor EOS to pad with: set tokenizer.pad_token")
    return tokenizer.eos_token_id


def get_collate_fn(tokenizer: Any) -> Callable[[list[dict[str, Any]]], PaddedBatch]:
    """Make a function from tokenized rows to a `PaddedBatch`; the reference's name."""
    return partial(collate, pad_token_id=find_pad_token(tokenizer))


def concatenated_inputs(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """Concatenate chosen rows, then rejected rows, padded to one length.

    Returns `concatenated_{input_ids,attention_mask,labels}`.
    """
    rows: dict[str, Any] = {**batch}
    length = max(rows["chosen_input_ids"].shape[1], rows["rejected_input_ids"].shape[1])
    pad_values = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}
    return {
        f"concatenated_{key}": torch.cat(
            [pad_to_length(rows[f"{side}_{key}"], length, value) for side in ("chosen", "rejected")]
        )
        for key, value in pad_values.items()
    }


def pad_to_length(tensor: torch.Tensor, length: int, pad_value: int | float, dim: int = -1) -> torch.Tensor:
    """Pad a tensor on the right of `dim` up to `length`.

    One that is long enough is returned unchanged.
    """
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)
