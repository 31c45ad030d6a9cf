"""Batches are prepared ahead, in order, and every text is tokenized once."""

import time

import pytest

from dpo.data.examples import list_examples, mismatch_examples
from dpo.data.schema import Prompt
from dpo.training.batches import prefetch


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_items_however_long_each_takes(workers):
    def prepare(item: int) -> int:
        time.sleep(0.01 * (item % 3 == 0))
        return item * item

    assert list(prefetch(range(20), prepare, workers=workers)) == [i * i for i in range(20)]


def test_two_items_are_prepared_ahead_and_no_more():
    prepared = []
    results = prefetch(range(10), prepared.append, workers=1)
    next(results)
    deadline = time.monotonic() + 5
    while len(prepared) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert prepared == [0, 1, 2]


def test_a_mismatched_example_has_a_response_to_another_prompt():
    """Examples of a prompt are neighbours, and there are fewer responses to some prompts than to others."""
    prompts = []
    for i, n_responses in enumerate([3, 1, 2, 4]):
        responses = [f"{i}.{j}<|endoftext|>" for j in range(n_responses)]
        examples = [{"chosen" if j % 2 else "rejected": j} for j in range(n_responses)]
        prompts.append(Prompt(str(i), responses, examples, rendered=i >= 2, index_in_split=i))
    examples = [example for prompt in prompts for example in list_examples(prompt)]
    for seed in range(8):
        mismatched = mismatch_examples(prompts, examples, seed=seed)
        assert [(prompt.text, index) for prompt, index in mismatched] == [(prompt.text, i) for prompt, i in examples]
        assert not any(text.startswith(prompt.text) for prompt, i in mismatched for text in prompt.texts(i).values())
        assert mismatch_examples(prompts, examples[2:5], seed=seed) == mismatched[2:5]  # whatever else is in the batch
