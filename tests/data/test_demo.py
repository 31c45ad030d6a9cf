"""`datasets=[demo]`: dialogues to learn from, the same on every machine."""

import hashlib
import json
import re

import pytest
from support.runs import ROOT
from transformers import AutoTokenizer

from dpo.data.demo import COURTEOUS, CURT
from preference_datasets import get_dataset


@pytest.fixture(scope="module")
def demo():
    return {split: get_dataset("demo", split) for split in ("train", "test")}


def test_the_demo_data_never_changes(demo):
    content = json.dumps(demo, sort_keys=True).encode()
    assert hashlib.sha256(content).hexdigest() == "76564ae152d83b1b31e32d9d682ab0220c13dd2644b9684f12261886eb505931"


def test_the_better_response_of_a_pair_is_courteous_and_the_other_curt(demo):
    for split in demo.values():
        for entry in split.values():
            better, worse = (entry["responses"][i].strip() for i in entry["pairs"][0])
            assert better.startswith(COURTEOUS)
            assert worse.startswith(CURT)


def test_the_models_tokenizer_has_a_token_for_each_word(demo):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "dpo" / "demo_model")
    texts = [text for prompt, entry in demo["train"].items() for text in (prompt, *entry["responses"])]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]+", text)}
    assert [word for word in sorted(words) if len(tokenizer.tokenize(word)) > 1] == []
