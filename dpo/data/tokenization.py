"""From texts to one padded batch: token ids, truncation, labels, collation. Knows no dataset and no process."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence

from dpo.errors import InputError
from dpo.losses import IGNORE_INDEX

TruncationMode = Literal["keep_start", "keep_end"]


class Batch(TypedDict):
    """Rows of a collated batch. In SFT mode the `rejected` keys are absent and `chosen` holds the SFT target.

    Texts: `chosen` is prompt plus response. Tensors (rows, tokens), int64: chosen and rejected padded on the right,
    prompt on the left (as generation wants it), with the pad token, 0 in masks and -100 in labels.
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


class TextEncoder:
    """A tokenizer that remembers: a text that comes again soon is tokenized once, without special tokens.

    `prime` tokenizes many texts in one call, which fast tokenizers spread over the cores. Ids are kept as 32-bit
    arrays, a seventh of what Python lists of integers take, under a digest of their text. Those asked for longest ago
    go first once all take more than `max_bytes`. Several threads may share it. `largest` is the largest token id yet.
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
        """From now on, too, raises InputError if a text has a token id that the model has no embedding for."""
        self._n_embeddings = n_embeddings
        if self.largest >= n_embeddings:
            raise InputError(
                f"the tokenizer gives token id {self.largest} but the model embeds only {n_embeddings} tokens; "
                f"set model.tokenizer_name_or_path to the model's own tokenizer"
            )

    def __call__(self, text: str) -> list[int]:
        key = _digest(text)
        while (ids := self._find(key)) is None:  # another thread may have pushed it out again
            self.prime([text])
        return ids.tolist()

    def _find(self, key: bytes) -> array | None:
        with self._changing:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
            return ids

    def _keep(self, key: bytes, ids: array) -> None:
        """The newest stays, however long it is."""
        with self._changing:
            self._known[key] = ids
            self._n_bytes += _size(ids)
            while self._n_bytes > self._max_bytes and len(self._known) > 1:
                self._n_bytes -= _size(self._known.popitem(last=False)[1])


ENTRY_BYTES = 280  # of a remembered text beside its ids: digest, array, their places in the dictionary


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
    """Cut a prompt and its responses (EOS included) to `max_length` tokens together, only if the longest is too long.

    First the prompt to `max_prompt_length` (its start or its end is kept), then, if that is not enough, every
    response to `max_length - max_prompt_length`, whatever room a short prompt may leave: the reference's rule.
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
        raise InputError("the tokenizer has no EOS token, which ends every response: set tokenizer.eos_token")
    ids = encode(text)
    if eos in ids and not rendered:
        raise InputError(f"EOS token {encode.tokenizer.eos_token!r} inside a response: {text!r}")
    return [*ids, eos]


def encode_example(
    prompt: str,
    responses: dict[str, str],
    encode: TextEncoder,
    *,
    truncation_mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
    rendered: bool = False,
) -> dict[str, Any]:
    """One row of a batch before padding. `responses` maps `chosen` (and `rejected`) to texts; see `Batch`."""
    prompt_ids = encode(prompt)
    if encode.tokenizer.eos_token_id in prompt_ids and not rendered:
        raise InputError(f"EOS token {encode.tokenizer.eos_token!r} inside a prompt: {prompt!r}")
    response_ids = [encode_with_eos(encode, text, rendered=rendered) for text in responses.values()]
    prompt_ids, response_ids = truncate(prompt_ids, response_ids, truncation_mode, max_length, max_prompt_length)

    row: dict[str, Any] = {"prompt": prompt}
    for (name, text), ids in zip(responses.items(), response_ids, strict=True):
        row[name] = prompt + text
        row[f"{name}_response_only"] = text
        row[f"{name}_input_ids"] = prompt_ids + ids
        row[f"{name}_attention_mask"] = [1] * (len(prompt_ids) + len(ids))
        row[f"{name}_labels"] = [IGNORE_INDEX] * len(prompt_ids) + ids
    row["prompt_input_ids"] = prompt_ids
    row["prompt_attention_mask"] = [1] * len(prompt_ids)
    return row


def tokenize_batch_element(
    prompt: str,
    chosen: str,
    rejected: str,
    truncation_mode: TruncationMode,
    tokenizer: Any,
    max_length: int,
    max_prompt_length: int,
) -> dict[str, Any]:
    """The reference's name for one tokenized pair: texts, and lists of ids, masks and labels (see `Batch`).

    Prompt and responses are tokenized separately, without special tokens; EOS is appended to each response; prompt
    tokens are labelled -100. Raises InputError if a text already contains EOS or the truncation mode is unknown.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise InputError(f"truncation_mode={truncation_mode!r} is neither keep_start nor keep_end")
    return encode_example(
        prompt,
        {"chosen": chosen, "rejected": rejected},
        TextEncoder(tokenizer),
        truncation_mode=truncation_mode,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
    )


def collate(rows: Sequence[dict[str, Any]], pad_token_id: int) -> Batch:
    """Rows of lists padded to one batch of int64 tensors on the CPU; what is no list of tokens stays a list."""
    pad_values = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORE_INDEX}
    batch: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        kind = next((suffix for suffix in pad_values if key.endswith(suffix)), None)
        if kind is None:
            batch[key] = values
            continue
        side = "left" if key.startswith("prompt") else "right"
        tensors = [torch.tensor(value, dtype=torch.int64) for value in values]
        batch[key] = pad_sequence(tensors, batch_first=True, padding_value=pad_values[kind], padding_side=side)
    return batch  # type: ignore[return-value]


def find_pad_token(tokenizer: Any) -> int:
    """The id of the token to pad with: EOS, as in the reference, for a tokenizer that has none of its own.

    Raises InputError if it has neither.
    """
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has neither a pad token nor EOS to pad with: set tokenizer.pad_token")
    return tokenizer.eos_token_id


def get_collate_fn(tokenizer: Any) -> Callable[[list[dict[str, Any]]], Batch]:
    """The reference's name for a function from tokenized rows to a padded `Batch`."""
    return partial(collate, pad_token_id=find_pad_token(tokenizer))


def concatenated_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Chosen rows, then rejected rows, padded to one length: `concatenated_{input_ids,attention_mask,labels}`."""
    length = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    pad_values = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}
    return {
        f"concatenated_{key}": torch.cat(
            [pad_to_length(batch[f"{side}_{key}"], length, value) for side in ("chosen", "rejected")]
        )
        for key, value in pad_values.items()
    }


def slice_and_move_batch_for_device(batch: Mapping, rank: int, world_size: int, device: str | torch.device) -> dict:
    """Part `rank` of `world_size` equal parts of a batch's rows, tensors moved to `device`.

    Raises ValueError if the rows don't divide: the reference dropped the remainder in silence.
    """
    rows = len(next(iter(batch.values())))
    if rows % world_size:
        raise ValueError(f"{rows} rows cannot be cut into {world_size} equal parts")
    part = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    return {k: v[part].to(device) if isinstance(v, torch.Tensor) else v[part] for k, v in batch.items()}


def pad_to_length(tensor: torch.Tensor, length: int, pad_value: int | float, dim: int = -1) -> torch.Tensor:
    """Pad `tensor` on the right of `dim` up to `length`; a tensor that is long enough comes back as it is."""
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)
