"""Near-duplicates between the splits, counted and named."""

from types import SimpleNamespace

import pytest

from dpo.data.custom import DataOptions
from dpo.data.preflight import find_warnings
from dpo.data.report import SplitCounter, SplitReport
from dpo.data.schema import Prompt
from dpo.data.tokenization import TextEncoder
from dpo.settings.plan import make_plan

KEPT = "How long does the battery last?"


def prompt_of(text: str, chosen: str = "a", rejected: str = "b") -> Prompt:
    return Prompt(text, [chosen, rejected], [{"chosen": 0, "rejected": 1}])


def compare(tokenizer, train: list[Prompt], test: list[Prompt]) -> SplitCounter:
    training = SplitCounter(TextEncoder(tokenizer), DataOptions())
    held_out = SplitCounter(TextEncoder(tokenizer), DataOptions(), training.digests)
    for counter, prompts in ((training, train), (held_out, test)):
        assert list(counter.count_texts(prompts)) == prompts
    return held_out


def find(tokenizer, train: list[Prompt], test: list[Prompt]) -> SplitReport:
    return compare(tokenizer, train, test).report


def test_the_records_of_near_duplicates_are_named(tokenizer):
    train = [prompt_of(KEPT, " It lasts ten hours or more.", " No.")]
    test = [each._replace(dataset="mine", rows=[number]) for number, each in enumerate((prompt_of("q "), *train), 1)]
    named = [(problem["record"], problem["problem"]) for problem in compare(tokenizer, train, test).problems]
    assert named == [(2, "prompt like train"), (2, "answer in train")]


@pytest.mark.parametrize(
    ("held_out", "training", "is_alike"),
    [
        (KEPT, KEPT, True),
        ("Wie LANGE hält der  Akku?", "wie lange hält der Akku", True),
        ("電池はどのくらい持ちますか?", "電池はどのくらい持ちますか", True),
        (f"{KEPT} Thanks!", KEPT, False),
        ("?!", "...", False),
        ("3 + 4?", "3 - 4?", False),
        ("वह खाता है 😀", "वह खाती है 😀", False),  # vowel signs
    ],
)
def test_a_prompt_is_found_that_differs_in_case_punctuation_and_white_space(tokenizer, held_out, training, is_alike):
    report = find(tokenizer, [prompt_of("Another"), prompt_of(training)], [prompt_of(held_out)])
    assert (report.prompts_like_train, report.answers_in_train) == (int(is_alike), 0)


@pytest.mark.parametrize(
    ("chosen", "rejected", "n"),
    [
        ("It lasts ten hours, or more!", "b", 1),
        ("a", "it lasts  ten hours or more", 1),
        ("Ten hours.", "b", 0),
    ],
)
def test_an_answer_of_20_characters_is_found_whichever_its_role(tokenizer, chosen, rejected, n):
    train = [prompt_of("q", "It lasts ten hours or more.", "Ten hours.")]
    report = find(tokenizer, train, [prompt_of("Another question", chosen, rejected)])
    assert (report.prompts_like_train, report.answers_in_train) == (0, n)


@pytest.mark.parametrize(("n", "warned"), [(9, 0), (10, 1)])
def test_from_one_percent_on_there_is_a_warning(n, warned):
    reports = {"train": SplitReport(), "test": SplitReport(prompts=1000, examples=1000, prompts_like_train=n)}
    tokenizer = SimpleNamespace(bos_token=None)
    data = SimpleNamespace(tokenizer=tokenizer, reports=reports)
    warnings = [*find_warnings(make_plan({"datasets": ["mine"], "warmup_steps": None}), data)]
    expected = "10 of 1,000 held-out prompts equal a training prompt, so held-out results look too good: move duplic"
    assert [warning[: len(expected)] for warning in warnings] == [expected] * warned
