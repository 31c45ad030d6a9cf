"""Near-duplicates between the splits, counted and named."""

import pytest

from dpo.data.report import SplitCounter, SplitReport
from dpo.data.schema import Prompt
from dpo.data.tokenization import TextEncoder

KEPT = "How long does the battery last?"


def prompt_of(text: str, chosen: str = "a", rejected: str = "b") -> Prompt:
    return Prompt(text, [chosen, rejected], [{"chosen": 0, "rejected": 1}])


def find(tokenizer, train: list[Prompt], test: list[Prompt]) -> SplitReport:
    training = SplitCounter(TextEncoder(tokenizer))
    held_out = SplitCounter(TextEncoder(tokenizer), training=training.digests)
    for counter, prompts in ((training, train), (held_out, test)):
        assert list(counter.count_texts(prompts)) == prompts
    return held_out.report


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
def test_a_prompt_is_found_that_differs_in_case_punctuation_and_white_space(tokenizer, held_out, training, is_alike):
    report = find(tokenizer, [prompt_of("Another"), prompt_of(training)], [prompt_of(held_out)])
    assert (report.prompts_like_train, report.answers_in_train) == (int(is_alike), 0)
    assert report.like_train == [" ".join(held_out.split())] * is_alike
    if is_alike:
        assert "1 of 1 held-out prompts" in next(report.find_leaks())


@pytest.mark.parametrize(
    ("chosen", "rejected", "n"),
    [
        ("It lasts ten hours, or more!", "b", 1),
        ("b", "電池は持つ!", 1),
        ("a", "it lasts  ten hours or more", 1),
        ("Ten hours.", "b", 0),
    ],
)
def test_an_answer_of_five_words_is_found_whichever_its_role(tokenizer, chosen, rejected, n):
    train = [prompt_of("q", "It lasts ten hours or more.", "Ten hours."), prompt_of("q", "電池は持つ", "電池は")]
    report = find(tokenizer, train, [prompt_of("Another question", chosen, rejected)])
    assert (report.prompts_like_train, report.answers_in_train) == (0, n)


def test_below_one_percent_nothing_is_said():
    counts = {"prompts": 1000, "examples": 1000, "like_train": ["a"]}
    assert [*SplitReport(prompts_like_train=9, **counts).find_leaks()] == []
    [warning] = SplitReport(prompts_like_train=10, **counts).find_leaks()
    assert warning.startswith("10 of 1,000 held-out prompts equal a training prompt, so")
    assert warning.endswith("such as 'a'")
