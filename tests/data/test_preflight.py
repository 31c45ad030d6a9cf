"""A run's data before training starts: its description, warnings, refusals."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest
from support.runs import GOLDEN, train, write_rows
from tokenizers import processors

from dpo.data.asking import CHAT, HH, RAW
from dpo.data.counts import SplitReport
from dpo.data.preflight import DatasetOptions, TrainingData, find_chat_warnings, find_weight_warnings, prepare_data
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import find_bos_warnings, load_tokenizer
from dpo.errors import InputError
from dpo.settings.plan import make_plan
from preference_datasets import get_dataset, identify_dataset


def test_prompts_without_the_bos_that_the_tokenizer_adds_are_warned_about(tokenizer):
    assert find_bos_warnings(tokenizer, "Where?") == []
    like_gemma = copy.deepcopy(tokenizer)
    like_gemma.add_special_tokens({"bos_token": "<bos>"})
    assert find_bos_warnings(like_gemma, "Where?") == []  # it has one, and adds none
    like_gemma.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", like_gemma.bos_token_id)]
    )
    [warning] = find_bos_warnings(like_gemma, "Where?")
    assert warning.startswith("this tokenizer would begin every text with '<bos>', but training adds no special tokens")
    assert find_bos_warnings(like_gemma, "<bos>Where?") == []


def test_text_for_a_tokenizer_with_a_chat_template_is_warned_about_once(tokenizer, command, tmp_path):
    forms = {"mine": RAW, "hh": HH, "chats": CHAT}
    assert find_chat_warnings(tokenizer, forms) == []
    of_a_chat_model = copy.deepcopy(tokenizer)
    of_a_chat_model.chat_template = "{{ messages[0].content }}"
    [warning] = find_chat_warnings(of_a_chat_model, forms)
    assert warning.startswith("the tokenizer has a chat template, but mine and hh hold text, which is used as it is")
    assert (
        "give messages in place of text, [{role: user, content: ...}], or chat=always for texts of your own" in warning
    )
    assert find_chat_warnings(of_a_chat_model, {"chats": CHAT}) == []

    shutil.copytree(GOLDEN / "tiny-llama", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    result = train(*command("run", f"model.name_or_path={tmp_path / 'chat'}", "dry_run=true"))
    assert result.stdout.count("warning: the tokenizer has a chat template, but hh holds text") == 1, result.stderr


@pytest.mark.parametrize(
    ("counts", "weights", "advice"),
    [
        ((50, 50), (1.0, 1.0), None),
        ((40, 30), (1.0, 1.0), None),  # 4/3
        ((80, 20), (1.0, 3.5), None),
        ((30, 42), (1.87, 1.0), None),  # as advised for (1.0, 1.0), rounded
        ((20, 80), (1.0, 1.0), "the desirable responses weigh 0.25 times as much as the undesirable responses, and the "
                               "paper of KTO advises 1 to 4/3: try loss.desirable_weight from 4 to 5.33"),
        ((80, 20), (1.0, 1.0), "advises 1 to 4/3: try loss.desirable_weight from 0.25 to 0.333"),
        ((80, 0), (1.0, 1.0), "the train split has no undesirable response, and a loss of labels learns from both "
                              "kinds: add some"),
        ((80, 0), (1.0, 0.0), None),  # as was asked for
    ],
)  # fmt: skip
def test_weights_that_leave_labels_out_of_balance_are_warned_about(counts, weights, advice):
    report = SplitReport(desirable=counts[0], undesirable=counts[1])
    options = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
    warnings = find_weight_warnings(report, options)
    assert len(warnings) == (advice is not None)
    assert all(warning.endswith(advice) for warning in warnings)
    assert find_weight_warnings(SplitReport(), {"beta": 0.1}) == []  # another loss
    by_weight = SplitReport(desirable=50, undesirable=50, desirable_weights=counts[0], undesirable_weights=counts[1])
    if all(counts):
        found = find_weight_warnings(by_weight, options)
        assert found == warnings


def prepare(folder, *, trains_on: str = "pairs", batch_size: int = 2, batch_parts: int = 1) -> TrainingData:
    tokenizer = load_tokenizer(str(GOLDEN / "tiny-llama"))
    options = DatasetOptions(["hh"], {"hh": str(folder)}, trains_on, online=False, max_length=64, max_prompt_length=32)
    place, facts = prepare_data(
        options, tokenizer, get_dataset=get_dataset, identify=identify_dataset, batch_size=batch_size,
        batch_parts=batch_parts, cache_dir=None, folder=folder, silent=True,
    )  # fmt: skip
    plan = make_plan({"batch_size": batch_size, "n_epochs": 2}).data
    return TrainingData.open(place, facts, tokenizer, plan, online=False)


@pytest.fixture
def three_pairs(tmp_path):
    """Three training pairs of two prompts, and one test pair."""
    dialogue = "\n\nHuman: {}\n\nAssistant: {}"
    for split, letters in {"train": "aab", "test": "c"}.items():
        rows = [
            {"chosen": dialogue.format(q, f"yes {i}"), "rejected": dialogue.format(q, f"no {i}")}
            for i, q in enumerate(letters)
        ]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def test_the_coming_run_is_described_and_written_before_it_starts(three_pairs, tmp_path):
    data = prepare(three_pairs)

    printed = data.report.describe(2)
    assert "train: 3 examples of 2 prompts" in printed
    assert "test: 1 example of 1 prompt" in printed
    assert "2 updates of 2 examples will run; 2 examples in partial batches are dropped" in printed
    assert replace(data.report, dropped_examples=0).describe(2).endswith("\n2 updates of 2 examples will run")
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
            "add data; the batch size must be a multiple of gradient_accumulation_steps * processes = 4",
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
