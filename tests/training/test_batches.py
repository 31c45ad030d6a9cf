"""Batches are prepared ahead, in order, and every text is tokenized once."""

from __future__ import annotations

import time

import pytest

from dpo.data.examples import list_examples, mismatch_examples
from dpo.data.table import Prompt
from dpo.errors import InputError
from dpo.training.batches import prefetch


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_items_however_long_each_takes(workers):
    def prepare(item: int) -> int:
        time.sleep(0.01 * (item % 3 == 0))
        return item * item

    assert list(prefetch(range(20), prepare, workers=workers)) == [i * i for i in range(20)]


def test_the_next_are_prepared_while_one_is_used_and_no_more():
    prepared = []
    results = prefetch(range(10), prepared.append, workers=1, ahead=2)
    next(results)
    deadline = time.monotonic() + 5
    while len(prepared) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert prepared == [0, 1, 2]


def test_a_mismatched_example_has_a_response_to_a_prompt_with_another_text():
    """Though examples of a prompt are neighbours, and two datasets may have one prompt."""
    prompts = []
    for i, (text, n_responses) in enumerate([("a", 3), ("b", 1), ("a", 2), ("b", 4), ("c", 1)]):
        responses = [f"{text}.{j}<|endoftext|>" for j in range(n_responses)]
        examples = [{"chosen" if j % 2 else "rejected": j} for j in range(n_responses)]
        prompts.append(Prompt(text, responses, examples, "keep_end", i >= 2, index_in_split=i))
    examples = [example for prompt in prompts for example in list_examples(prompt)]
    for seed in range(8):
        mismatched = mismatch_examples(prompts, examples, seed=seed)
        assert [(e.prompt, e.example_index) for e in mismatched] == [(e.prompt, e.example_index) for e in examples]
        assert not any(text.startswith(e.prompt.text) for e in mismatched for text in e.texts.values())
        assert mismatch_examples(prompts, examples[2:5], seed=seed) == mismatched[2:5]  # whatever else is in the batch
    with pytest.raises(InputError, match="all prompts have the same text"):
        mismatch_examples([prompts[0], prompts[2]._replace(index_in_split=1)], examples[:1], seed=0)
