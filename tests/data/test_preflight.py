"""A run's data before training starts: its description, warnings, refusals."""

import shutil
from pathlib import Path

import pytest
from support.pytests import refused
from support.records import plan_of_data
from support.runs import TINY, read_json, write_rows
from tokenizers import processors

from dpo.data.preflight import TrainingData, check_fits, find_warnings, prepare_data
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError


def test_prompts_without_the_bos_that_the_tokenizer_adds_are_warned_about(three_pairs, chat):
    like_gemma = chat(None)
    like_gemma.add_special_tokens({"bos_token": "<bos>"})
    plan, data = plan_of_data(three_pairs, {"hh": str(three_pairs)}), prepare(three_pairs, like_gemma)
    assert [*find_warnings(plan, data)] == []  # it has one, and adds none
    like_gemma.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", like_gemma.bos_token_id)]
    )
    [warning] = find_warnings(plan, data)
    assert warning.startswith("this tokenizer would begin every text with '<bos>', but training adds no special tokens")


def test_text_for_a_tokenizer_with_a_chat_template_is_warned_about_once(run, tmp_path, printed):
    shutil.copytree(TINY, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    run("run", f"model.name_or_path={tmp_path / 'chat'}", "dry_run=true")
    said = printed()
    assert said.count("warning: the text of hh is used without the tokenizer's chat template") == 1


@pytest.fixture
def three_pairs(tmp_path) -> Path:
    """Three training pairs of two prompts, and one test pair."""
    dialogue = "\n\nHuman: {}\n\nAssistant: {}"
    for split, letters in {"train": "aab", "test": "c"}.items():
        rows = [
            {"chosen": dialogue.format(q, f"yes {i}"), "rejected": dialogue.format(q, f"no {i}")}
            for i, q in enumerate(letters)
        ]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def prepare(folder: Path, tokenizer, **values) -> TrainingData:
    plan = plan_of_data(folder, {"hh": str(folder)}, **{"batch_size": 2, **values})
    table = prepare_data(plan, tokenizer, scratch=folder)
    data = TrainingData.open(table, tokenizer, plan)
    check_fits(plan, data)
    return data


def test_the_coming_run_is_described_and_written_before_it_starts(three_pairs, tokenizer, tmp_path):
    data = prepare(three_pairs, tokenizer)
    said = [*data.reports["train"].describe("train"), *data.reports["test"].describe("test")]
    starts = ("train: prompts 2, examples 3, tokenized 3", "test: prompts 1, examples 1, tokenized 1")
    assert [line.startswith(start) for line, start in zip(said, starts, strict=True)] == [True] * 2
    data.write_counts(tmp_path / "preflight.json")
    written = read_json(tmp_path / "preflight.json")
    assert (written["updates"], written["train"]["examples"]) == (2, 3)
    assert [prompt.text for prompt in data.test] == ["\n\nHuman: c\n\nAssistant:"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 4}, "has 3 examples, too few for one batch of batch_size=4: set batch_size=3 or add data"),
        ({"loss": "sft", "batch_size": 3}, "the train split of hh has 2 examples"),  # SFT counts prompts
        ({"loss.offset_by_margin": True}, "needs the margin of each pair, and dataset hh has none: add a column"),
        ({"loss": "kto"}, "dataset hh has pairs, and this loss trains on single responses with labels: set unpair=t"),
        (
            {"truncation": "drop", "max_length": 8, "max_prompt_length": 4},
            "nothing to train on: 3 are too long",
        ),
        ({"loss": "kto", "unpair": True}, "the test split of hh has 1 prompt, and loss=kto combines each prompt with"),
    ],
)
def test_data_that_the_run_cannot_train_on_is_refused_before_it_starts(three_pairs, tokenizer, values, message):
    with pytest.raises(InputError) as error:
        prepare(three_pairs, tokenizer, **values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ends", "limits"), [(" c", {}), (" d", {"max_length": 16, "max_prompt_length": 12})], ids=["written", "cut"]
)
def test_pairs_that_are_all_without_a_difference_are_refused(three_pairs, tokenizer, ends, limits):
    begin = "\n\nHuman: a\n\nAssistant: b b b b b b"
    same = {"chosen": f"{begin} c", "rejected": f"{begin}{ends}"}
    write_rows(three_pairs / "train.jsonl", [same, same])
    with refused("in all pairs of the train split of hh both responses are the same"):
        prepare(three_pairs, tokenizer, **limits)
    prepare(three_pairs, tokenizer, **limits, loss="sft", batch_size=1, gradient_accumulation_steps=1)
    write_rows(three_pairs / "train.jsonl", [same, {**same, "rejected": f"{begin[:-12]} e"}])
    prepare(three_pairs, tokenizer, **limits)


def test_a_token_that_the_model_does_not_embed_is_refused_among_earlier_and_later_texts(tokenizer):
    encode = TextEncoder(tokenizer)
    [id_of_a] = encode([" a"])[" a"]
    encode.check_vocabulary(id_of_a + 1)
    assert encode([" a"]) == {" a": [id_of_a]}
    with refused(rf"token id {id_of_a}, but the model has only {id_of_a} embeddings"):
        encode.check_vocabulary(id_of_a)
    later = TextEncoder(tokenizer, largest_id=id_of_a - 1)
    later.check_vocabulary(id_of_a)
    with refused(rf"token id {id_of_a}, but"):
        later.encode_conversations([("a", [[" a"]])])
