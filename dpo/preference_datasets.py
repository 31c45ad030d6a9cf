"""The names of the reference code's `preference_datasets.py`, and its batch iterator; trainers do not use them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpo.data.collation import PaddedBatch, get_collate_fn, make_rows, tokenize_batch_element  # noqa: F401
from dpo.data.examples import iterate_examples, read_examples
from dpo.data.loading import get_dataset, load_splits  # noqa: F401
from dpo.data.preflight import load_data  # noqa: F401
from dpo.data.published import (  # noqa: F401
    extract_anthropic_prompt,
    get_hh,
    get_se,
    get_shp,
    strings_match_up_to_spaces,
    strip_html_tags,
)
from dpo.data.schema import SPLITS
from dpo.data.table import number_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError


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
    sources = dataset_sources or {}
    loaded = []  # one split of each dataset
    for name in names:
        splits = load_splits(name, tokenizer, sources, cache_dir=cache_dir, silent=silent, trains_on=trains_on)
        loaded.append(splits[SPLITS.index(split)])
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
