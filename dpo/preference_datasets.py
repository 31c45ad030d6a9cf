"""The names of the reference code's `preference_datasets.py`, and its padded batch.

For each NAME of prompt, chosen and rejected a batch has texts, and the tensors `NAME_input_ids`, `NAME_attention_mask`
and `NAME_labels`. Token ids are padded with the pad token, masks with 0 and labels with -100, prompts on the left and
the others on the right. There are no `prompt_labels`. In SFT mode there is no `rejected`. A trainer needs such batches
only for its public methods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpo.data.examples import Example, TextExample, encode_examples, iterate_examples, make_labels, read_examples
from dpo.data.loading import get_dataset, load_splits
from dpo.data.published import extract_anthropic_prompt, strings_match_up_to_spaces, strip_html_tags  # noqa: F401
from dpo.data.schema import Prompt, TruncationMode
from dpo.data.table import number_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.losses import IGNORE_INDEX
from dpo.settings.places import store_rows

PaddedBatch = dict  # texts in lists, and int64 tensors (rows, tokens)

# The reference code has a function for each dataset, of (split, silent=False, cache_dir=None).
get_hh = partial(get_dataset, "hh")
get_shp = partial(get_dataset, "shp")
get_se = partial(get_dataset, "se")


def get_batch_iterator(
    names: Sequence[str],
    tokenizer: Any,
    split: str = "train",
    batch_size: int = 1,
    shuffle: bool = True,
    max_length: int = 512,
    max_prompt_length: int = 128,
    sft_mode: bool = False,
    n_epochs: int | None = None,
    n_examples: int | None = None,
    seed: int = 0,
    silent: bool = False,
    cache_dir: str | None = None,
    dataset_sources: Mapping | None = None,
) -> Iterator[PaddedBatch]:
    """Yield padded batches as the reference code does, in the order of `iterate_examples`.

    If `n_examples` is given and `n_epochs` is not, epochs follow one another until there are that many examples.
    """
    if n_epochs is None and n_examples is None:
        raise InputError("give n_epochs or n_examples: without either the batches would never end")
    trains_on = "targets" if sft_mode else "pairs"
    sources = store_rows({"dataset_sources": dataset_sources or {}})["dataset_sources"]
    loaded = []  # one split of each dataset
    for name in names:
        loaded += load_splits(
            name, tokenizer, sources, splits=[split], cache_dir=cache_dir, silent=silent, trains_on=trains_on
        )
    prompts = list(number_prompts(zip(names, loaded, strict=True)))
    counts = [len(prompt.examples) for prompt in prompts]
    if sum(counts) < batch_size:
        raise InputError(
            f"the {split} split has {sum(counts)} examples, too few for one batch of batch_size={batch_size}"
        )
    encode, collate = TextEncoder(tokenizer), get_collate_fn(tokenizer)
    for example_ids in iterate_examples(
        counts, batch_size=batch_size, shuffle=shuffle, n_epochs=n_epochs, n_examples=n_examples, seed=seed
    ):
        examples = read_examples(prompts, example_ids)
        yield collate(make_rows(examples, encode, max_length=max_length, max_prompt_length=max_prompt_length))


def make_rows(examples: Sequence[TextExample], encode: TextEncoder, **limits: int) -> list[dict]:
    """Make the rows of a `PaddedBatch`, before padding; the limits are those of `encode_examples`."""
    rows = []
    encoded = encode_examples(examples, encode, **limits)
    for (prompt, index), example in zip(examples, encoded, strict=True):
        n_prompt = len(example.prompt)
        row = {"prompt": prompt.text, "prompt_input_ids": list(example.prompt), "prompt_attention_mask": [1] * n_prompt}
        texts = prompt.texts(index)
        for (role, text), (response, cuts) in zip(texts.items(), example.responses_with_cuts, strict=True):
            row[role] = prompt.text + text
            row[f"{role}_response_only"] = text
            row[f"{role}_input_ids"] = [*example.prompt, *response]
            row[f"{role}_attention_mask"] = [1] * (n_prompt + len(response))
            row[f"{role}_labels"] = [IGNORE_INDEX] * n_prompt + make_labels(response, cuts)
        rows.append(row)
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
    """Make a row of a `PaddedBatch`, with lists in place of tensors.

    Raises InputError for EOS in a text, and for an unknown mode.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise InputError(f"truncation_mode={truncation_mode!r} is neither keep_start nor keep_end")
    pair = Prompt(prompt, [chosen, rejected], [{"chosen": 0, "rejected": 1}], truncation_mode)
    [row] = make_rows([(pair, 0)], TextEncoder(tokenizer), max_length=max_length, max_prompt_length=max_prompt_length)
    return row


def find_examples(batch: PaddedBatch) -> list[Example]:
    """Recover the examples of a padded batch. A prompt ends before the first token that is scored in any response."""
    roles = tuple(role for role in ("chosen", "rejected") if f"{role}_input_ids" in batch)
    scored = {role: batch[f"{role}_labels"] != IGNORE_INDEX for role in roles}  # each (rows, tokens)
    examples = []
    for row in range(len(batch["chosen_input_ids"])):
        # argmax of zeros and ones is the position of the first 1
        n_prompt = min(int(scored[role][row].int().argmax()) for role in roles)
        prompts = set()
        responses = []
        cuts = []
        for role in roles:
            length = int(batch[f"{role}_attention_mask"][row].sum())
            ids = batch[f"{role}_input_ids"][row, :length].tolist()
            prompts.add(tuple(ids[:n_prompt]))
            responses.append(tuple(ids[n_prompt:]))
            # cuts are where scoring stops and starts again; what is before and after the response counts as scored
            flags = scored[role][row, n_prompt:length].tolist()
            neighbours = enumerate(pairwise([True, *flags, True]))
            cuts.append(tuple(i for i, (before, here) in neighbours if before != here))
        [prompt] = prompts  # chosen and rejected have the same prompt
        examples.append(Example(prompt, tuple(responses), roles=roles, cuts=tuple(cuts)))
    return examples


def get_collate_fn(tokenizer: Any) -> Callable[[list[dict]], PaddedBatch]:
    """Make a function that pads rows with the pad token, or else with EOS."""
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    pad_values = {"input_ids": pad, "attention_mask": 0, "labels": IGNORE_INDEX}

    def collate(rows: Sequence[dict]) -> PaddedBatch:
        batch: PaddedBatch = {}
        for key in rows[0]:
            batch[key] = [row[key] for row in rows]
            name, _, kind = key.partition("_")  # such as "chosen" and "input_ids"
            if kind in pad_values:  # other kinds are texts
                batch[key] = pad_sequence(
                    [torch.LongTensor(ids) for ids in batch[key]],
                    batch_first=True,
                    padding_value=pad_values[kind],
                    padding_side="left" if name == "prompt" else "right",
                )
        return batch

    return collate


def concatenated_inputs(batch: PaddedBatch) -> dict[str, Tensor]:
    """Return `concatenated_input_ids`, `_attention_mask` and `_labels`, each (2 * rows, tokens), chosen first."""
    concatenated = {}
    for kind in ("input_ids", "attention_mask", "labels"):
        rows = [*batch[f"chosen_{kind}"], *batch[f"rejected_{kind}"]]
        pad_value = IGNORE_INDEX if kind == "labels" else 0  # for token ids too, as in the reference code
        concatenated[f"concatenated_{kind}"] = pad_sequence(rows, batch_first=True, padding_value=pad_value)
    return concatenated
