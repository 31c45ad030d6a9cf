"""`datasets=[demo]`: the same made-up dialogues on every machine, which one can learn from but not by a trick."""

from __future__ import annotations

import hashlib
import json

import pytest

from preference_datasets import get_dataset


@pytest.fixture(scope="module")
def demo():
    return {split: get_dataset("demo", split) for split in ("train", "test")}


def test_the_demo_data_never_changes(demo):
    content = json.dumps(demo, sort_keys=True).encode()
    assert hashlib.sha256(content).hexdigest() == "3049af6cbfc9d5cb33e2c50140e854d3719c9486a8bbc6c576621285c6466128"


def test_no_test_prompt_is_trained_on(demo):
    assert (len(demo["train"]), len(demo["test"])) == (2048, 128)
    assert not set(demo["train"]) & set(demo["test"])


def test_neither_a_constant_nor_length_tells_the_better_response(demo):
    better, worse = zip(
        *(
            (entry["responses"][i], entry["responses"][j])
            for entry in demo["train"].values()
            for i, j in entry["pairs"]
        ),
        strict=True,
    )
    assert len(better) == 2048
    assert not set(better) & set(worse)
    for responses in (better, worse):
        assert len(set(responses)) > 1000
    longer = sum(len(b) > len(w) for b, w in zip(better, worse, strict=True)) / len(better)
    assert 0.3 < longer < 0.7


def test_the_sft_target_is_either_response_about_as_often(demo):
    better = [entry["sft_target"] == entry["responses"][entry["pairs"][0][0]] for entry in demo["train"].values()]
    assert all(entry["sft_target"] in entry["responses"] for entry in demo["train"].values())
    assert 0.45 < sum(better) / len(better) < 0.55


def test_prompts_and_responses_are_in_the_format_of_hh(demo):
    for prompt, entry in demo["train"].items():
        assert prompt.startswith("\n\nHuman: ")
        assert prompt.endswith("\n\nAssistant:")
        assert all(response.startswith(" ") and "{" not in response for response in entry["responses"])
    assert demo["train"].truncation_mode == "keep_end"
