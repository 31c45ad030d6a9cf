"""The reference code's padded batch, for `get_batch_iterator` and the trainers' public methods.

Beside texts it has `NAME_input_ids`, `NAME_attention_mask` and `NAME_labels` (not of the prompt), padded with the pad
token, 0 and -100: prompts on the left, others on the right. In SFT mode there is no `rejected`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpo.data.examples import Example, TextExample, encode_examples, list_examples, make_labels
from dpo.data.schema import Prompt, TruncationMode
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.losses import IGNORE_INDEX

PaddedBatch = dict  # texts in lists, and int64 tensors (rows, tokens)


def make_rows(examples: Sequence[TextExample], encode: TextEncoder, **limits: int) -> list[dict]:
    """Make the rows of a `PaddedBatch`, before padding."""
    rows = []
    for (example_prompt, index), ids in zip(examples, encode_examples(examples, encode, **limits), strict=True):
        prompt, n_prompt = example_prompt.text, len(ids.prompt)
        row = {"prompt": prompt}
        for (role, text), (response, cuts) in zip(example_prompt.texts(index).items(), ids.cut_responses, strict=True):
            row[role] = prompt + text
            row[f"{role}_response_only"] = text
            row[f"{role}_input_ids"] = [*ids.prompt, *response]
            row[f"{role}_attention_mask"] = [1] * (n_prompt + len(response))
            row[f"{role}_labels"] = [IGNORE_INDEX] * n_prompt + make_labels(response, cuts)
        rows.append(row | {"prompt_input_ids": [*ids.prompt], "prompt_attention_mask": [1] * n_prompt})
    return rows


def tokenize_batch_element(
    prompt: str,
    chosen: str,
    rejected: str,
    truncation_mode: TruncationMode,
    tokenizer: Any,
    max_length: int,
    max_prompt_length: int,
) -> dict:
    """Make a row of a `PaddedBatch`, with lists for tensors; raises InputError for EOS in a text or an unknown mode."""
    if truncation_mode not in ("keep_start", "keep_end"):
        raise InputError(f"truncation_mode={truncation_mode!r} is neither keep_start nor keep_end")
    pair = Prompt(prompt, [chosen, rejected], [{"chosen": 0, "rejected": 1}], truncation_mode, rendered=False)
    return make_rows(
        list_examples(pair), TextEncoder(tokenizer), max_length=max_length, max_prompt_length=max_prompt_length
    )[0]


def find_examples(batch: PaddedBatch) -> list[Example]:
    """Recover the examples of a padded batch; a prompt ends before the first scored token."""
    rows = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in batch.items()}
    roles = tuple(role for role in ("chosen", "rejected") if f"{role}_input_ids" in rows)
    examples = []
    for row in range(len(rows["chosen_input_ids"])):
        scored = {role: [label != IGNORE_INDEX for label in rows[f"{role}_labels"][row]] for role in roles}
        n_prompt = min(each.index(True) for each in scored.values())
        prompts, responses, cuts = [], [], []
        for role in roles:
            length = sum(rows[f"{role}_attention_mask"][row])
            ids = rows[f"{role}_input_ids"][row][:length]
            prompts.append(tuple(ids[:n_prompt]))
            responses.append(tuple(ids[n_prompt:]))
            # a cut is where scoring stops or starts again
            neighbours = pairwise([True, *scored[role][n_prompt:length], True])
            cuts.append(tuple(i for i, (before, here) in enumerate(neighbours) if before != here))
        assert all(prompt == prompts[0] for prompt in prompts), "chosen and rejected have one prompt"
        examples.append(Example(prompts[0], tuple(responses), roles=roles, cuts=tuple(cuts) if any(cuts) else ()))
    return examples


def collate_prompts(prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Tensor]:
    """Pad prompts on the left, for generation, to ids and masks of shape (prompts, tokens)."""
    rows = [{"prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)} for ids in prompts]
    return get_collate_fn(tokenizer)(rows)


def get_collate_fn(tokenizer: Any) -> Callable[[list[dict]], PaddedBatch]:
    """Pads with the pad token, or else with EOS."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    pad_values = {"input_ids": pad, "attention_mask": 0, "labels": IGNORE_INDEX}

    def collate(rows: Sequence[dict]) -> PaddedBatch:
        batch = {key: [row[key] for row in rows] for key in rows[0]}
        for key, values in batch.items():
            for suffix in filter(key.endswith, pad_values):  # not of texts
                side = "left" if key.startswith("prompt") else "right"
                tensors = [torch.tensor(value, dtype=torch.int64) for value in values]
                batch[key] = pad_sequence(
                    tensors, batch_first=True, padding_value=pad_values[suffix], padding_side=side
                )
        return batch

    return collate


def concatenated_inputs(batch: PaddedBatch) -> dict[str, Tensor]:
    """Return `concatenated_input_ids`, `_attention_mask` and `_labels`, each (2 * rows, tokens), chosen first."""
    length = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    pad_values = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}
    return {
        f"concatenated_{key}": torch.cat(
            [pad_to_length(batch[f"{role}_{key}"], length, value) for role in ("chosen", "rejected")]
        )
        for key, value in pad_values.items()
    }


def pad_to_length(tensor: Tensor, length: int, pad_value: int | float, dim: int = -1) -> Tensor:
    """Pad at the end of `dim`, unless the tensor is long enough."""
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    if shape[dim] <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)
