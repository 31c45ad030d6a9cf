"""Counts of the data and their description, before training starts.

" b", " c", " d", " e" and "a" are one token each; max_length is 6 and max_prompt_length 2 unless a test says otherwise.
"""

import re
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
from support.pytests import refused

import dpo.data.report
from dpo.data.custom import DataOptions
from dpo.data.examples import iterate_examples
from dpo.data.preflight import count_updates
from dpo.data.report import SplitCounter, SplitReport
from dpo.data.schema import Prompt
from dpo.data.table import PromptTable, write_prompts
from dpo.data.tokenization import TextEncoder


def prompt_of(text: str, *pairs: tuple[str, str], rendered: bool = False) -> Prompt:
    responses = [response for pair in pairs for response in pair]
    examples = [{"chosen": 2 * i, "rejected": 2 * i + 1} for i in range(len(pairs))]
    return Prompt(text, responses, examples, rendered=rendered)


def inspect(tokenizer, *prompts: Prompt, max_length: int = 6, trains_on: str = "pairs") -> SplitReport:
    options = DataOptions(trains_on=trains_on, max_length=max_length, max_prompt_length=2)
    counter = SplitCounter(TextEncoder(tokenizer), options)
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder) / "split.jsonl", counter.count_texts(prompts))
        counter.count_tokens(PromptTable(Path(folder) / "split.jsonl"))
    return counter.report


def test_the_predicted_updates_are_those_that_the_batches_give():
    assert count_updates(10, batch_size=4, n_epochs=None, n_examples=10**20) == 25 * 10**18  # no walk through epochs
    numbers = (None, 1, 2, 3, 5, 6, 7, 8, 13, 20)
    for examples, size, n_epochs, n_examples in product(range(1, 8), range(1, 8), (None, 0, 1, 2, 3), numbers):
        if size <= examples and (n_epochs, n_examples) != (None, None):  # else it never ends
            stop = {"batch_size": size, "n_epochs": n_epochs, "n_examples": n_examples}
            batches = iterate_examples([1] * examples, shuffle=False, seed=0, **stop)
            assert (stop, sum(1 for _ in batches)) == (stop, count_updates(examples, **stop))


COUNTED = {
    "nothing to remark": ([prompt_of("a", (" b", " c"))], {}),
    "no space before a response": ([prompt_of("a", ("b", " c")), prompt_of("\u3042", ("b", "c"))], {"joined_texts": 1}),
    # 4 + 2 + EOS = 7 > 6: the prompt goes to 2, and the responses fit
    "a long prompt": ([prompt_of("a b c d", (" b c", " c"))], {"truncated_prompts": 1}),
    # 1 + 5 + EOS = 7 > 6: the prompt is short, the responses go to 4
    "a long response": ([prompt_of("a", (" b", " b c d e b"))], {"truncated_responses": 1}),
    # 1 + 4 + EOS = 6 fits; with a prompt of 2 only EOS would be lost, and that counts
    "a response that loses only its EOS": (
        [prompt_of("a", (" b", " b c d e")), prompt_of("a b", (" b", " b c d e"))],
        {"truncated_responses": 1},
    ),
    "empty responses": ([prompt_of("a", ("", " b"), (" c", " \n"))], {"empty_responses": 2}),
    # both " b c d e" after the cut to 4
    "no difference, from the start or after truncation": (
        [prompt_of("a", (" b", " b")), prompt_of("a", (" b c d e b", " b c d e c"))],
        {"identical_pairs": 1, "pairs_cut_alike": 1, "truncated_responses": 1},
    ),
    "the same before it is cut": (
        [prompt_of("a", (" b c d e b", " b c d e b"))],
        {"identical_pairs": 1, "truncated_responses": 1},
    ),
    # a pair without a difference is not its own reverse
    "no difference, twice": (
        [prompt_of("a", (" b", " b"), (" b", " b"))],
        {"identical_pairs": 2, "duplicated_pairs": 1},
    ),
    # the same pair under another prompt is another pair
    "a pair twice": (
        [prompt_of("a", (" b", " c"), (" b", " c"), (" b", " d")), prompt_of("a b", (" b", " c"))],
        {"duplicated_pairs": 1},
    ),
    "a pair in two datasets, and both ways": (
        [prompt_of("a", (" b", " c")), prompt_of("a", (" b", " c"), (" d", " e")), prompt_of("a", (" e", " d"))],
        {"duplicated_pairs": 1, "contradictory_examples": 1},
    ),
}


@pytest.mark.parametrize(("prompts", "found"), COUNTED.values(), ids=COUNTED)
def test_each_count_counts_its_own_examples_and_nothing_else(tokenizer, prompts, found):
    report = asdict(inspect(tokenizer, *prompts))
    noted = {key: report[key] for key in report.keys() - {"longest"} if type(report[key]) is int and report[key]}
    n = sum(len(prompt.examples) for prompt in prompts)
    assert noted == {"prompts": len(prompts), "examples": n, "tokenized": n, **found}


def test_lengths_are_in_tokens_with_eos_after_truncation(tokenizer):
    first = prompt_of("a", (" b c", " b"), (" b", " c"))  # 3 and 2 tokens, 2 and 2
    report = inspect(tokenizer, first, prompt_of("a", (" b c d e b c", " b")))  # 7 cut to 4, and 2
    assert (report.mean_chosen_tokens, report.mean_rejected_tokens, report.longest) == (3, 2, 5)
    assert report.chosen_longer == pytest.approx(2 / 3)


def test_prompts_alone_count_if_they_will_be_answered(tokenizer):
    prompts = [Prompt(text, [], []) for text in ("a b", " b c d e f g h i", "a")]
    offline, online = (inspect(tokenizer, *prompts, trains_on=kind) for kind in ("pairs", "prompts"))
    assert (offline.prompts, offline.examples, offline.tokenized) == (3, 0, 0)
    assert (online.prompts, online.examples, online.tokenized, online.truncated_prompts) == (3, 0, 3, 1)
    assert next(online.describe("train")) == "train: prompts 3, tokenized 3, truncated prompts 1, longest 2"


def test_labels_are_counted(tokenizer):
    examples = [{"chosen": 0}, {"rejected": 1}, {"rejected": 0}, {"chosen": 0}]
    labelled = Prompt("a", [" b", " c d"], examples, weights=[2.0, 1.0, 1.0, 4.0])
    report = inspect(tokenizer, labelled, trains_on="labels")
    assert report.effective_examples == pytest.approx(8**2 / (4 + 1 + 1 + 16))
    said, warned = report.describe("train")
    assert warned.endswith("says the opposite: remove one of them")
    assert said.startswith("train: prompts 1, examples 4, desirable 2, undesirable 2, effective examples 2.91, contra")


def test_a_text_with_eos_stops_the_run_also_beyond_the_sample(tokenizer, monkeypatch):
    monkeypatch.setattr(dpo.data.report, "COUNTED_WHOLE", 1)
    monkeypatch.setattr(dpo.data.report, "SAMPLE_SIZE", 1)
    good, bad = prompt_of("fine", (" b", " c")), prompt_of("fine too", (" guilty<|endoftext|> response", " c"))
    with refused(r"remove it from ' guilty<\|endoftext\|> response'"):
        inspect(tokenizer, *[good] * 30, bad)
    # a chat template may write it
    assert inspect(tokenizer, prompt_of("a<|endoftext|>", (" b", " c"), rendered=True)).examples == 1


@pytest.mark.parametrize(
    ("counts", "warned"),  # of 10,000 examples, of which 4,000 are tokenized
    [
        ({"truncated_prompts": 39, "identical_pairs": 99, "pairs_cut_alike": 39}, []),
        ({"truncated_prompts": 40}, ["in 40 of 4,000 examples .*max_length.*truncation"]),
        ({"identical_pairs": 100}, ["in 100 of 10,000 examples .* are the same, as written"]),
        ({"pairs_cut_alike": 40}, ["in 40 of 4,000 examples .* are the same after cutting"]),
    ],
)
def test_what_concerns_one_percent_is_a_warning(counts, warned):
    _, *found = SplitReport(examples=10_000, tokenized=4_000, **counts).describe("train")
    for said, each in zip(found, warned, strict=True):
        assert re.match(f"warning: {each}", said)


def test_the_format_of_each_datasets_prompts_is_noted(tokenizer):
    talk = "\n\nHuman: a\n\nAssistant:"
    kinds = [("talks", talk), ("chats", talk), ("texts", "a b"), ("mixed", talk), ("mixed", "a")]
    prompts = [prompt_of(text, (" b", " c"), rendered=name == "chats")._replace(dataset=name) for name, text in kinds]
    found = inspect(tokenizer, *prompts).prompt_formats
    assert found == {"talks": "hh", "chats": "chat", "texts": "raw", "mixed": "raw"}


@pytest.mark.parametrize(("whole", "tokenized"), [(100, 100), (99, 20)])
def test_of_a_large_split_texts_are_counted_and_the_tokens_of_a_sample(whole, tokenized, tokenizer, monkeypatch):
    prompts = [prompt_of("a b c d", (" b c", " c"), ("", " b")) for _ in range(50)]  # the prompt is cut for the first
    for name, value in {"COUNTED_WHOLE": whole, "SAMPLE_SIZE": 20, "TOKENIZED_AT_ONCE": 7}.items():
        monkeypatch.setattr(dpo.data.report, name, value)
    report = inspect(tokenizer, *prompts)
    assert (report.examples, report.empty_responses, report.tokenized) == (100, 50, tokenized)
    assert 0 < report.truncated_prompts < tokenized
    assert f"tokenized {tokenized}," in next(report.describe("train"))
