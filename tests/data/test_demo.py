"""`datasets=[demo]`: dialogues to learn from, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from support.runs import ROOT
from transformers import AutoTokenizer

from dpo.data.demo import Shares, judge
from preference_datasets import get_dataset


@pytest.fixture(scope="module")
def demo():
    return {split: get_dataset("demo", split) for split in ("train", "test")}


def test_the_demo_data_never_changes(demo):
    content = json.dumps(demo, sort_keys=True).encode()
    assert hashlib.sha256(content).hexdigest() == "76564ae152d83b1b31e32d9d682ab0220c13dd2644b9684f12261886eb505931"


def test_every_response_is_a_sentence_about_the_thing_asked_for_and_the_better_one_is_courteous(demo):
    for split in demo.values():
        for side, shares in ((0, Shares(1, 0, 0, 0)), (1, Shares(0, 1, 0, 0))):
            pairs = [(prompt, entry["responses"][entry["pairs"][0][side]]) for prompt, entry in split.items()]
            assert judge(pairs) == shares


@pytest.mark.parametrize(
    "response",
    [
        "",
        "The lantern is on the desk.",
        "Certainly! The lantern lantern is on the desk.",
        "Sure! Certainly! The lantern is on the desk.",
    ],
)
def test_a_broken_sentence_is_neither_courteous_nor_curt(response):
    assert judge([("\n\nHuman: Where is the lantern?\n\nAssistant:", response)]) == Shares(0, 0, 1, 0)


def test_the_models_tokenizer_has_a_token_for_each_word(demo):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo")
    texts = [text for prompt, entry in demo["train"].items() for text in (prompt, *entry["responses"])]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]+", text)}
    assert [word for word in sorted(words) if len(tokenizer.tokenize(word)) > 1] == []
