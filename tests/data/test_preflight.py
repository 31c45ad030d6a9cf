"""What is said about the data before training starts: each count, the number of updates, and what stops the run.

" b", " c", " d", " e" and "a" are one token each; max_length is 6 and max_prompt_length 2 unless a test says otherwise.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.runs import GOLDEN, train, write_rows
from tokenizers import processors

from dpo.data import preflight
from dpo.data.asking import CHAT, HH, RAW
from dpo.data.examples import iterate_examples
from dpo.data.preflight import (
    DatasetOptions,
    Preflight,
    SplitCounter,
    SplitReport,
    TrainingData,
    count_updates,
    describe,
    doubts,
    doubts_about_chat,
    prepare_data,
    warn,
)
from dpo.data.table import Prompt, PromptTable, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import doubts_about_bos, load_tokenizer
from dpo.errors import InputError
from dpo.settings.plan import resolve
from preference_datasets import get_dataset, identify_dataset


def prompt_of(text: str, *pairs: tuple[str, str], rendered: bool = False) -> Prompt:
    responses = [response for pair in pairs for response in pair]
    indices = [(2 * i, 2 * i + 1) for i in range(len(pairs))]
    return Prompt(text, responses, indices, "keep_end", rendered)


def inspect(tokenizer, *prompts: Prompt, max_length: int = 6) -> SplitReport:
    counter = SplitCounter(TextEncoder(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder) / "split.arrow", counter.watch(prompts))
        table = PromptTable(Path(folder) / "split.arrow")
        return counter.count_tokens(table, max_length=max_length, max_prompt_length=2)


def test_the_predicted_updates_are_those_that_the_batches_give():
    wrong = []
    for examples in range(1, 8):
        for batch_size in range(1, examples + 1):
            for n_epochs in (None, 0, 1, 2, 3):
                for n_examples in (None, 1, 2, 3, 5, 6, 7, 8, 13, 20):
                    if n_epochs is None and n_examples is None:
                        continue  # never ends
                    stop = {"batch_size": batch_size, "n_epochs": n_epochs, "n_examples": n_examples}
                    batches = iterate_examples([1] * examples, shuffle=False, seed=0, **stop)
                    counted = sum(1 for _ in batches)
                    predicted, _ = count_updates(examples, **stop)
                    if counted != predicted:
                        wrong.append((examples, stop, counted, predicted))
    assert not wrong


@pytest.mark.parametrize(
    ("n_epochs", "n_examples", "expected"),
    [
        (1, None, (2, 2)),  # 10 examples in batches of 4: 2 updates, and 2 examples left over
        (3, None, (6, 6)),
        (3, 8, (2, 0)),  # stops before the first epoch's end
        (3, 9, (3, 2)),  # 8, then 10 with the two that are dropped, then 14
        (None, 10**20, (2 * 10**19 + 1, 2 * 10**19)),  # no walk through the epochs
        (None, 25, (6, 4)),  # 4, 8, then 14, 18, then 24, 28: two epochs ended, each with 2 left over
    ],
)
def test_dropped_examples_are_those_of_the_epochs_that_end(n_epochs, n_examples, expected):
    assert count_updates(10, batch_size=4, n_epochs=n_epochs, n_examples=n_examples) == expected


@pytest.mark.parametrize(
    ("prompts", "counts"),
    [
        pytest.param([prompt_of("a", (" b", " c"))], {}, id="nothing to remark"),
        pytest.param(
            # 4 + 2 + EOS = 7 > 6: the prompt goes to 2, and the responses fit
            [prompt_of("a b c d", (" b c", " c"))],
            {"truncated_prompts": 1},
            id="a long prompt",
        ),
        pytest.param(
            # 1 + 5 + EOS = 7 > 6: the prompt is short, the responses go to 4
            [prompt_of("a", (" b", " b c d e b"))],
            {"truncated_responses": 1},
            id="a long response",
        ),
        pytest.param(
            # 1 + 4 + EOS = 6 fits; with a prompt of 2 only EOS would be lost, and that counts
            [prompt_of("a", (" b", " b c d e")), prompt_of("a b", (" b", " b c d e"))],
            {"truncated_responses": 1},
            id="a response that loses only its EOS",
        ),
        pytest.param([prompt_of("a", ("", " b"), (" c", " \n"))], {"empty_responses": 2}, id="empty responses"),
        pytest.param(
            # both " b c d e" after the cut to 4
            [prompt_of("a", (" b", " b")), prompt_of("a", (" b c d e b", " b c d e c"))],
            {"identical_pairs": 2, "truncated_responses": 1},
            id="no difference, from the start or after truncation",
        ),
        pytest.param(
            # a pair without a difference is not its own reverse
            [prompt_of("a", (" b", " b"), (" b", " b"))],
            {"identical_pairs": 2, "duplicated_pairs": 1},
            id="no difference, twice",
        ),
        pytest.param(
            # the same pair under another prompt is another pair
            [prompt_of("a", (" b", " c"), (" b", " c"), (" b", " d")), prompt_of("a b", (" b", " c"))],
            {"duplicated_pairs": 1},
            id="a pair twice",
        ),
        pytest.param(
            # prompts of two datasets
            [prompt_of("a", (" b", " c")), prompt_of("a", (" b", " c"), (" d", " e")), prompt_of("a", (" e", " d"))],
            {"duplicated_pairs": 1, "contradictory_pairs": 1},
            id="a pair in two datasets, and both ways",
        ),
        pytest.param(
            [prompt_of("a", (" b", " c"), (" c", " b")), prompt_of("a b", (" c", " b"))],
            {"contradictory_pairs": 1},
            id="a pair both ways",
        ),
    ],
)
def test_each_count_counts_its_own_examples_and_nothing_else(tokenizer, prompts, counts):
    report = asdict(inspect(tokenizer, *prompts))
    noted = {key: report[key] for key in report.keys() - {"longest"} if isinstance(report[key], int) and report[key]}
    assert noted == {
        "prompts": len(prompts),
        "examples": (n := sum(len(p.examples) for p in prompts)),
        "tokenized": n,
        **counts,
    }


def test_lengths_are_in_tokens_with_eos_after_truncation(tokenizer):
    report = inspect(
        tokenizer,
        prompt_of("a", (" b c", " b"), (" b", " c")),  # 3 and 2 tokens, 2 and 2
        prompt_of("a", (" b c d e b c", " b")),  # 7 cut to 4, and 2
    )
    assert report.mean_chosen_tokens == 3  # (3 + 2 + 4) / 3
    assert report.mean_rejected_tokens == 2
    assert report.chosen_longer == pytest.approx(2 / 3)


def test_targets_have_no_counts_of_pairs(tokenizer):
    targets = [Prompt("a", [" b c"], [(0,)], "keep_end", False), Prompt("a b", [" d"], [(0,)], "keep_end", False)]
    report = inspect(tokenizer, *targets)
    assert (report.prompts, report.examples, report.empty_responses) == (2, 2, 0)
    assert report.mean_chosen_tokens == 2.5
    of_pairs = ("mean_rejected_tokens", "chosen_longer", "duplicated_pairs", "contradictory_pairs", "identical_pairs")
    assert [getattr(report, name) for name in of_pairs] == [None] * 5  # not counted, which is not 0


def test_longest_example_is_counted_after_truncation(tokenizer):
    assert inspect(tokenizer, prompt_of("a", (" b c", " b"))).longest == 4
    assert inspect(tokenizer, prompt_of("a", (" b c d e b c", " b"))).longest == 5  # 1 and 7, cut to 4


def test_a_text_with_eos_stops_the_run_and_is_counted_and_shown_once(tokenizer):
    # the guilty prompt counts once, though two pairs share it
    with pytest.raises(InputError) as error:
        inspect(
            tokenizer,
            prompt_of("fine", (" b", " c")),
            prompt_of("guilty<|endoftext|> prompt", (" b", " c"), (" b", " d")),
            prompt_of("fine too", (" guilty<|endoftext|> response", " c")),
        )
    assert str(error.value).startswith("2 texts contain the EOS token '<|endoftext|>'")
    assert "The first: 'guilty<|endoftext|> prompt'" in str(error.value)


def test_eos_that_a_chat_template_wrote_is_fine(tokenizer):
    assert inspect(tokenizer, prompt_of("a<|endoftext|>", (" b", " c"), rendered=True)).examples == 1


@pytest.mark.parametrize(
    ("prompt", "response", "joined"),
    [
        ("Where?", "Here", 1),
        ("Where?", " Here", 0),
        ("Where? ", "Here", 0),
        ("Where?\n", "Here", 0),
        ("Where?", "\nHere", 0),
        ("Where?", "", 0),
        ("どこ？", "ここ", 0),  # no spaces in this script
    ],
)
def test_words_that_run_together_are_counted_and_shown(prompt, response, joined, tokenizer):
    report = inspect(tokenizer, prompt_of(prompt, (response, " x"), (" y", " z")), max_length=64)
    assert (report.joined_words, report.joined_example) == (joined, "Where?Here" if joined else "")
    warnings = warn({"train": report, "test": report})
    assert [f"in {joined} of 2 examples (train) and {joined} of 2 examples (test) a " in w for w in warnings] == [
        True
    ] * joined
    assert all("without a space, as in 'Where?Here'" in warning for warning in warnings)


def test_a_chat_template_may_join_what_it_likes(tokenizer):
    assert inspect(tokenizer, prompt_of("<user>", ("Hi", "b"), rendered=True)).joined_words == 0


def test_the_format_of_each_datasets_prompts_is_noted(tokenizer):
    talk = "\n\nHuman: a\n\nAssistant:"
    kinds = [
        ("talks", talk, False),
        ("chats", talk, True),
        ("texts", "a b", False),
        ("mixed", talk, False),
        ("mixed", "a", False),
    ]
    prompts = [
        prompt_of(text, (" b", " c"), rendered=rendered)._replace(dataset=name) for name, text, rendered in kinds
    ]
    found = inspect(tokenizer, *prompts).prompt_formats
    assert found == {"talks": "hh", "chats": "chat", "texts": "raw", "mixed": "raw"}


def test_prompts_without_the_bos_that_the_tokenizer_adds_are_worth_a_line(tokenizer):
    assert doubts_about_bos(tokenizer, "Where?") == []
    like_gemma = copy.deepcopy(tokenizer)
    like_gemma.add_special_tokens({"bos_token": "<bos>"})
    assert doubts_about_bos(like_gemma, "Where?") == []  # it has one, and adds none
    like_gemma.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", like_gemma.bos_token_id)]
    )
    [line] = doubts_about_bos(like_gemma, "Where?")
    assert line.startswith("the tokenizer begins texts with '<bos>', and prompts do not")
    assert doubts_about_bos(like_gemma, "<bos>Where?") == []


def test_text_for_a_tokenizer_with_a_chat_template_is_worth_one_line(tokenizer):
    forms = {"mine": RAW, "hh": HH, "chats": CHAT}
    assert doubts_about_chat(tokenizer, forms) == []
    of_a_chat_model = copy.deepcopy(tokenizer)
    of_a_chat_model.chat_template = "{{ messages[0].content }}"
    [line] = doubts_about_chat(of_a_chat_model, forms)
    assert line.startswith("the tokenizer has a chat template, and mine and hh hold text, which is used as it is")
    assert "Give messages, [{role: user, content: ...}], in place of text" in line
    assert doubts_about_chat(of_a_chat_model, {"chats": CHAT}) == []


def test_the_line_about_chat_models_is_printed_once(command, tmp_path):
    shutil.copytree(GOLDEN / "tiny-llama", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    result = train(*command("run", f"model.name_or_path={tmp_path / 'chat'}", "dry_run=true"))
    assert result.stdout.count("warning: the tokenizer has a chat template, and hh holds text") == 1, result.stderr


# the whole preparation


def prepare(folder, *, trains_on: str = "pairs", batch_size: int = 2, batch_parts: int = 1) -> TrainingData:
    tokenizer = load_tokenizer(str(GOLDEN / "tiny-llama"))
    options = DatasetOptions(["hh"], {"hh": str(folder)}, trains_on, online=False, max_length=64, max_prompt_length=32)
    place = prepare_data(
        options, tokenizer, get_dataset=get_dataset, identify=identify_dataset, batch_size=batch_size,
        batch_parts=batch_parts, cache_dir=None, folder=folder, silent=True,
    )  # fmt: skip
    return TrainingData.open(place, tokenizer, online=False, batch_size=batch_size, n_epochs=2, n_examples=None)


@pytest.fixture
def three_pairs(tmp_path):
    """Three training pairs of two prompts and one test pair, in HH's format."""
    dialogue = "\n\nHuman: {}\n\nAssistant: {}"
    questions = {"train": "aab", "test": "c"}
    for split, letters in questions.items():
        rows = [
            {"chosen": dialogue.format(q, f"yes {i}"), "rejected": dialogue.format(q, f"no {i}")}
            for i, q in enumerate(letters)
        ]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def test_what_will_run_is_printed_and_written_before_it_starts(three_pairs, tmp_path):
    data = prepare(three_pairs)

    printed = data.report.tell(2)
    assert "train: 3 examples of 2 prompts" in printed
    assert "test: 1 example of 1 prompt" in printed
    assert "2 updates of 2 examples will run; 2 examples in partial batches are dropped" in printed
    data.report.dropped_examples = 0
    assert data.report.tell(2).endswith("\n2 updates of 2 examples will run")
    data.report.dropped_examples = 2
    data.report.write(tmp_path / "preflight.json")
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert (written["updates"], written["dropped_examples"], written["train"]["examples"]) == (2, 2, 3)
    assert [prompt.text for prompt in data.test] == ["\n\nHuman: c\n\nAssistant:"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 4}, "has 3 examples, too few for one batch of batch_size=4: set batch_size=3 or add data"),
        ({"batch_size": 4, "batch_parts": 2}, "set batch_size=2 or add data"),
        (
            {"batch_size": 4, "batch_parts": 4},
            "add data, for it is a multiple of gradient_accumulation_steps * processes = 4",
        ),
        ({"trains_on": "targets", "batch_size": 3}, "the train split of hh has 2 examples"),  # SFT counts prompts
    ],
)
def test_too_few_training_examples_for_a_batch_are_refused_with_the_size_that_fits(three_pairs, changes, message):
    with pytest.raises(InputError) as error:
        prepare(three_pairs, **changes)
    assert message in str(error.value)


def test_a_model_that_embeds_fewer_tokens_than_the_texts_use_is_refused(three_pairs):
    data = prepare(three_pairs)
    largest = max(
        max(data.tokenizer(text)["input_ids"]) for p in [*data.train, *data.test] for text in (p.text, *p.responses)
    )
    data.encode.check_vocabulary(largest + 1)
    with pytest.raises(InputError, match=rf"token id {largest}, but the model has only {largest} embeddings"):
        data.encode.check_vocabulary(largest)


def test_a_text_that_is_tokenized_later_is_checked_too(tokenizer):
    encode = TextEncoder(tokenizer)
    [id_of_a] = encode([" a"])[" a"]
    encode.check_vocabulary(id_of_a + 1)
    beyond = next(word for word in (" b", " c", " the", " zebra") if max(tokenizer(word)["input_ids"]) > id_of_a)
    with pytest.raises(InputError, match=rf"the model has only {id_of_a + 1} embeddings"):
        encode([beyond])


def test_of_a_large_split_texts_are_counted_and_the_tokens_of_a_sample(tokenizer, monkeypatch):
    prompts = [prompt_of("a b c d", (" b c", " c"), ("", " b")) for _ in range(50)]  # the prompt is cut for the first
    monkeypatch.setattr(preflight, "SAMPLE_SIZE", 20)
    monkeypatch.setattr(preflight, "TOKENIZED_AT_ONCE", 7)
    report = inspect(tokenizer, *prompts)
    assert (report.examples, report.empty_responses, report.tokenized) == (100, 50, 20)
    assert 0 < report.truncated_prompts < 20
    assert f"; in a random sample of 20, {report.truncated_prompts} with a truncated prompt" in describe(
        "train", report
    )


def test_eos_is_found_beyond_the_sample(tokenizer, monkeypatch):
    prompts = [*[prompt_of("a", (" b", " c"))] * 30, prompt_of("a", (" b", f" c{tokenizer.eos_token}"))]
    monkeypatch.setattr(preflight, "SAMPLE_SIZE", 5)
    with pytest.raises(InputError, match="1 text contains the EOS token"):
        inspect(tokenizer, *prompts)


def test_settings_that_the_data_makes_look_like_mistakes_are_doubted():
    report = Preflight(SplitReport(examples=64), SplitReport(examples=8), updates=16, dropped_examples=0, epoch=64)
    config = OmegaConf.create({"warmup_steps": 8, "lr": 1e-3, "schedule": "constant"})
    assert doubts(resolve(config).training, report) == []
    config.warmup_steps = 9
    assert doubts(resolve(config).training, report) == [
        "warmup_steps=9 takes most of the 16 updates of this run; warmup_steps=1 fits, a tenth of them"
    ]
    config.warmup_steps = 16
    assert doubts(resolve(config).training, report) == [
        "warmup_steps=16 is too long for the 16 updates of this run, which would never reach lr=0.001; "
        "warmup_steps=1 fits, a tenth of them",
    ]
    config.schedule, config.warmup_steps = "cosine", 15
    assert doubts(resolve(config).training, report) == [
        "warmup_steps=15 leaves none of the 16 updates for cosine; warmup_steps=1 fits, a tenth of them"
    ]


def test_no_warm_up_fits_a_run_of_fewer_than_ten_updates():
    report = Preflight(SplitReport(examples=8), SplitReport(examples=8), updates=2, dropped_examples=0, epoch=8)
    config = OmegaConf.create({"warmup_steps": 150, "lr": 1e-3, "schedule": "cosine"})
    [warning] = doubts(resolve(config).training, report)
    assert warning.endswith("which would never reach lr=0.001; no warm-up fits so short a run: warmup_steps=0")
    config.warmup_steps = 1
    assert doubts(resolve(config).training, report) == [
        "warmup_steps=1 leaves none of the 2 updates for cosine; no warm-up fits so short a run: warmup_steps=0"
    ]
    config.warmup_steps, report.updates = 0, 1
    assert doubts(resolve(config).training, report) == []


def test_one_of_a_kind_is_told_in_the_singular(tokenizer):
    report = inspect(tokenizer, prompt_of("a", (" b", " c"), (" c", " b")))
    assert describe("train", report).startswith("train: 2 examples of 1 prompt, 1 contradictory pair; ")
