"""Texts become token ids, labels and padded batches.

The tiny tokenizer gives one token to each of "a" 65, "b" 66, " b" 276, " c" 272, " d" 283, " e" 328, "!" 1; EOS is 0.
"""

import copy

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from dpo.data.examples import text_digest
from dpo.data.tokenization import remove_special_tokens
from dpo.preference_datasets import concatenated_inputs, get_collate_fn, tokenize_batch_element


@pytest.fixture
def tokenizer_with_pad(chat):
    """The tiny tokenizer, with "!" (id 1) as pad token, not EOS."""
    copied = chat(None)
    copied.pad_token = "!"
    return copied


# one tokenized pair


def test_prompt_is_masked_and_each_response_ends_with_eos(tokenizer):
    row = tokenize_batch_element("a b", " c", " d e", "keep_end", tokenizer, max_length=9, max_prompt_length=4)

    assert row == {
        "prompt": "a b",
        "prompt_input_ids": [65, 276],
        "prompt_attention_mask": [1, 1],
        "chosen": "a b c",
        "chosen_response_only": " c",
        "chosen_input_ids": [65, 276, 272, 0],
        "chosen_attention_mask": [1, 1, 1, 1],
        "chosen_labels": [-100, -100, 272, 0],
        "rejected": "a b d e",
        "rejected_response_only": " d e",
        "rejected_input_ids": [65, 276, 283, 328, 0],
        "rejected_attention_mask": [1, 1, 1, 1, 1],
        "rejected_labels": [-100, -100, 283, 328, 0],
    }


def test_prompt_and_response_are_tokenized_apart_without_special_tokens_but_the_final_eos(tokenizer):
    assert tokenizer("ab")["input_ids"] == [442]  # together they would be one token
    adds_bos = copy.deepcopy(tokenizer)
    adds_bos.backend_tokenizer.post_processor = TemplateProcessing(single="! $A !", special_tokens=[("!", 1)])
    assert adds_bos("a")["input_ids"] == [1, 65, 1]
    row = tokenize_batch_element("a", "b", "b", "keep_start", adds_bos, max_length=9, max_prompt_length=4)
    assert row["chosen_input_ids"] == [65, 66, 0]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a <|endoftext|>", "a "),
        ("<|endof<|endoftext|>text|>b", "b"),
        ("§A§", "A"),
        ("<think>", "<think>"),  # a token, but none of control
    ],
)
def test_control_tokens_that_are_spelled_out_are_removed_until_none_is_left(chat, text, left):
    more = chat(None)
    more.add_tokens(["<think>"])
    more.add_special_tokens({"additional_special_tokens": ["§"]})
    assert remove_special_tokens(text, more) == left


# batches


def test_rows_are_padded_right_and_prompts_left(tokenizer_with_pad):
    limits = {"max_length": 9, "max_prompt_length": 4}
    rows = [
        tokenize_batch_element("a b", " c", " d e", "keep_end", tokenizer_with_pad, **limits),
        tokenize_batch_element("a", " b c d", " e", "keep_end", tokenizer_with_pad, **limits),
    ]

    batch = get_collate_fn(tokenizer_with_pad)(rows)

    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    assert {value.dtype for value in tensors.values()} == {torch.int64}
    # the same of rejected
    assert {key: value.tolist() for key, value in tensors.items() if not key.startswith("rejected")} == {
        "prompt_input_ids": [[65, 276], [1, 65]],
        "prompt_attention_mask": [[1, 1], [0, 1]],
        "chosen_input_ids": [[65, 276, 272, 0, 1], [65, 276, 272, 283, 0]],
        "chosen_attention_mask": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        "chosen_labels": [[-100, -100, 272, 0, -100], [-100, 276, 272, 283, 0]],
    }
    assert batch["prompt"] == ["a b", "a"]
    assert batch["chosen"] == ["a b c", "a b c d"]
    assert batch["rejected_response_only"] == [" d e", " e"]


def test_chosen_and_rejected_rows_are_stacked_at_one_length():
    rows = {
        "input_ids": ([5, 6], [5, 7, 8]),
        "attention_mask": ([1, 1], [1, 1, 1]),
        "labels": ([-100, 6], [-100, 7, 8]),
    }
    batch = {f"chosen_{name}": torch.tensor([row]) for name, (row, _) in rows.items()}
    batch |= {f"rejected_{name}": torch.tensor([row]) for name, (_, row) in rows.items()}

    both = concatenated_inputs(batch)

    assert {key: value.tolist() for key, value in both.items()} == {
        "concatenated_input_ids": [[5, 6, 0], [5, 7, 8]],
        "concatenated_attention_mask": [[1, 1, 0], [1, 1, 1]],
        "concatenated_labels": [[-100, 6, -100], [-100, 7, 8]],
    }


def test_an_example_is_known_by_its_texts_with_their_roles_and_by_where_one_ends():
    known = text_digest("a", {"chosen": " b", "rejected": " c"})
    others = {
        text_digest("a b", {"chosen": "", "rejected": " c"}),
        text_digest("a", {"chosen": " c", "rejected": " b"}),
        text_digest("a", {"chosen": " b c"}),
        text_digest("a", {"rejected": " b c"}),
        text_digest("é漢", {"chosen": "\ud800"}),  # any text has one
    }
    assert len(others | {known}) == 6
