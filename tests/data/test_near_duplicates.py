"""Near-duplicates between the splits, counted and named."""

from pathlib import Path

import pytest

from dpo.data.near_duplicates import find_near_duplicates
from dpo.data.report import SplitReport
from dpo.data.schema import Prompt
from dpo.data.table import PromptTable, write_prompts

KEPT = "How long does the battery last?"


def prompt_of(text: str, chosen: str = "a", rejected: str = "b") -> Prompt:
    return Prompt(text, [chosen, rejected], [{"chosen": 0, "rejected": 1}])


def find(tokenizer, folder: Path, train: list[Prompt], test: list[Prompt]) -> SplitReport:
    for split, prompts in (("train", train), ("test", test)):
        write_prompts(folder / f"{split}.jsonl", prompts)
    tables = (PromptTable(folder / f"{split}.jsonl") for split in ("train", "test"))
    return SplitReport(prompts=len(test), examples=len(test), **find_near_duplicates(*tables, tokenizer))


@pytest.mark.parametrize(
    ("held_out", "training", "is_alike"),
    [
        (KEPT, KEPT, True),
        ("Wie LANGE hält der  Akku?", "wie lange hält der Akku", True),
        ("電池はどのくらい持ちますか?", "電池はどのくらい持ちますか", True),
        (f"{KEPT} Thanks!", KEPT, False),
        ("?!", "...", False),
        ("3 + 4?", "3 - 4?", False),
        ("😀", "😀!", True),
    ],
)
def test_a_prompt_is_found_that_differs_in_case_punctuation_and_white_space(
    tokenizer, tmp_path, held_out, training, is_alike
):
    report = find(tokenizer, tmp_path, [prompt_of("Another"), prompt_of(training)], [prompt_of(held_out)])
    assert (report.prompts_like_train, report.answers_in_train) == (int(is_alike), 0)
    assert len(report.like_train) == int(is_alike)
    if is_alike:
        assert all(text in next(report.find_leaks()) for text in ("1 of 1 held-out prompts", training))


@pytest.mark.parametrize(
    ("chosen", "rejected", "n"),
    [
        ("It lasts ten hours, or more!", "b", 1),
        ("b", "電池は持つ!", 1),
        ("a", "it lasts  ten hours or more", 1),
        ("Ten hours.", "b", 0),
    ],
)
def test_an_answer_of_five_words_is_found_whichever_its_role(tokenizer, tmp_path, chosen, rejected, n):
    train = [prompt_of("q", "It lasts ten hours or more.", "Ten hours."), prompt_of("q", "電池は持つ", "電池は")]
    report = find(tokenizer, tmp_path, train, [prompt_of("Another question", chosen, rejected)])
    assert (report.prompts_like_train, report.answers_in_train) == (0, n)
    assert len([*report.find_leaks()]) == n


def test_below_one_percent_nothing_is_said():
    like = [{"held_out": "a", "training": "b"}]
    counts = {"prompts": 1000, "examples": 1000, "answers_in_train": 0, "like_train": like}
    assert [*SplitReport(prompts_like_train=9, **counts).find_leaks()] == []
    [warning] = SplitReport(prompts_like_train=10, **counts).find_leaks()
    assert warning.startswith("10 of 1,000 held-out prompts equal a training prompt, so")
    assert "'a', which is 'b' in training" in warning
