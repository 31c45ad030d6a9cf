"""The user's own pairs: texts or chat messages."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

import pytest
import yaml
from support.formats import assistant, user
from support.runs import read_metrics, train, write_rows

from dpo.analysis.ledger_file import read_ledger
from dpo.data import custom
from dpo.data.custom import get_custom
from dpo.data.examples import list_examples
from dpo.data.records import split_shared_prompt
from dpo.data.sources import load_rows
from dpo.data.table import iterate_prompts
from dpo.errors import InputError
from dpo.settings.places import Source
from preference_datasets import get_batch_iterator

# "<user>Hi" and "<assistant>Hello" joined, with or without EOS after each turn
TURN = "<{{ message.role }}>{{ message.content }}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDS_TURNS_WITH_EOS = "{% for message in messages %}" + TURN + "{{ eos_token }}\n{% endfor %}" + OPEN
ENDS_TURNS_WITH_SEMICOLON = "{% for message in messages %}" + TURN + ";{% endfor %}" + OPEN


HELLO = {"prompt": [user("Hi")], "chosen": [assistant("Hello")], "rejected": [assistant("Go away")]}


# texts


def test_texts_with_a_prompt_are_taken_as_they_are(tokenizer):
    rows = [
        {"prompt": "Q:", "chosen": " yes", "rejected": " no", "source": "other columns are ignored"},
        {"prompt": "Q:", "chosen": " sure", "rejected": " never"},
    ]
    data = get_custom(rows, "mine", tokenizer)
    assert data == {
        "Q:": {"responses": [" yes", " no", " sure", " never"], "pairs": [(0, 1), (2, 3)], "sft_target": " sure"}
    }
    assert (data.truncation_mode, data.rendered) == ("keep_end", False)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # the shared beginning ends in the middle of "there" / "then"; the prompt ends at the word before
        ("Is it there", "Is it then", ("Is it", " there", " then")),
        # one text is the beginning of the other
        ("Go on", "Go on now", ("Go", " on", " on now")),
        # a dialogue is cut at its last shared marker, though " I " is shared beyond it
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I do",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I don't",
            ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " I do", " I don't"),
        ),
        # dialogues that part at the first answer are cut there, whatever follows
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: e",
            ("\n\nHuman: a\n\nAssistant:", " b\n\nHuman: c\n\nAssistant: d", " e"),
        ),
    ],
)
def test_texts_without_a_prompt_share_their_beginning(chosen, rejected, expected, tokenizer):
    assert split_shared_prompt(chosen, rejected) == expected
    (data,) = get_custom([{"chosen": chosen, "rejected": rejected}], "mine", tokenizer).items()
    assert (data[0], *data[1]["responses"]) == expected


def test_texts_that_share_nothing_need_a_prompt(tokenizer):
    with pytest.raises(InputError, match=r"chosen and rejected begin with no word in common, .*columns=\{prompt: COL"):
        get_custom([{"chosen": "yes", "rejected": "no"}], "mine", tokenizer)


RENAMED = {"prompt": "question", "chosen": "best", "rejected": "worst"}


def test_columns_may_have_other_names(tokenizer, chat):
    rows = [{"question": "Q:", "best": " yes", "worst": " no", "prompt": "another column"}]
    assert get_custom(rows, "mine", tokenizer, RENAMED) == {
        "Q:": {"responses": [" yes", " no"], "pairs": [(0, 1)], "sft_target": " yes"}
    }
    messages = {RENAMED[key]: value for key, value in HELLO.items()}
    template = chat(ENDS_TURNS_WITH_EOS)
    assert get_custom([messages], "mine", template, RENAMED) == get_custom([HELLO], "mine", template)
    with pytest.raises(InputError, match=r"columns\.prompt=question: mine has no such column; there are best, worst"):
        get_custom([{"best": "a b", "worst": "a c"}], "mine", tokenizer, RENAMED)
    shared = get_custom([{"best": "a b", "worst": "a c"}], "mine", tokenizer, {"chosen": "best", "rejected": "worst"})
    assert list(shared) == ["a"]
    with pytest.raises(InputError, match=r"mine\.columns has the fields promt: give fields of pairs"):
        get_custom(rows, "mine", tokenizer, {"promt": "question"})
    sources = {"hh": {"path": "x", "columns": RENAMED}}
    with pytest.raises(InputError, match=r"dataset_sources\.hh\.columns=.*: the built-in dataset hh has fixed columns"):
        next(get_batch_iterator(["hh"], tokenizer, n_epochs=1, dataset_sources=sources))


def test_columns_are_given_on_the_command_line_beside_or_with_the_place(command, tmp_path):
    rows = [{"question": f"What is {i}?", "best": f" It is {i}.", "worst": "No."} for i in range(40)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    columns = "{prompt: question, chosen: best, rejected: worst}"
    own = ("datasets=[mine]", "n_examples=4", f"dataset_sources.mine={file}", f"dataset_sources.mine.columns={columns}")
    result = train(*command("run", *own))
    assert result.returncode == 0, result.stderr
    # the worst ones begin without a space
    for n, split in ((36, "train"), (4, "test")):
        joined = (
            f"warning: in {n} of {n} examples ({split}) a response follows its prompt without a space, as in 'What is "
        )
        assert joined in result.stdout
    report = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert report["test"]["joined_words"] == 4
    assert report["train"]["joined_example"].endswith("?No.")


# without pairs, for SFT

QA = [{"question": "Q:", "answer": " yes"}, {"question": "P:", "answer": " no"}, {"question": "Q:", "answer": " sure"}]


def test_sft_learns_every_response_of_a_prompt_that_has_no_pairs(tokenizer):
    data = get_custom(QA, "mine", tokenizer, trains_on="targets")
    assert data.notes == ["mine: columns prompt=question, completion=answer"]
    assert data == {
        "Q:": {"responses": [" yes", " sure"], "pairs": [], "sft_target": " sure"},
        "P:": {"responses": [" no"], "pairs": [], "sft_target": " no"},
    }
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="targets")
    texts = [example.texts for prompt in prompts for example in list_examples(prompt)]
    assert texts == [{"chosen": " yes"}, {"chosen": " sure"}, {"chosen": " no"}]


def test_prompts_to_answer_need_no_responses(tokenizer, chat):
    rows = [{"question": "Q:", "source": "a book"}, {"question": "P:", "source": "a film"}, {"question": "Q:"}]
    data = get_custom(rows, "mine", tokenizer, trains_on="prompts")
    assert data.notes == ["mine: columns prompt=question; not used: source"]
    nothing = {"responses": [], "pairs": [], "sft_target": ""}
    assert data == {"Q:": nothing, "P:": nothing}
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="prompts")
    assert [(prompt.text, prompt.examples) for prompt in prompts] == [("Q:", []), ("P:", [])]

    messages = get_custom([{"prompt": [user("Hi")]}], "mine", chat(ENDS_TURNS_WITH_SEMICOLON), trains_on="prompts")
    assert messages == {"<user>Hi;<assistant>": nothing}
    assert messages.messages == {"<user>Hi;<assistant>": [user("Hi")]}
    pairs = get_custom([HELLO], "mine", chat(ENDS_TURNS_WITH_SEMICOLON), trains_on="prompts")
    assert [examples for _, _, examples, _ in pairs.take("prompts")] == [[{"chosen": 0, "rejected": 1}]]


@pytest.mark.parametrize(
    ("good", "bad"),
    [(True, False), (1, 0), (1.0, 0.0), (1, -1), ("True", "false"), ("1", "0"), (" Good", "bad"), ("👍", "👎"),
     ("thumbs_up", "thumbs_down"), ("up", "down"), ("yes", "no"), ("desirable", "undesirable"),
     ("positive", "negative"), ("chosen", "rejected")],
)  # fmt: skip
def test_a_labelled_response_is_chosen_or_rejected(tokenizer, good, bad):
    rows = [
        {"prompt": "Q:", "completion": " yes", "label": good},
        {"prompt": "P:", "completion": " no", "label": bad},
        {"prompt": "Q:", "completion": " hm", "label": bad},
    ]
    data = get_custom(rows, "mine", tokenizer, trains_on="labels")
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="labels")
    texts = [example.texts for prompt in prompts for example in list_examples(prompt)]
    assert texts == [{"chosen": " yes"}, {"rejected": " hm"}, {"rejected": " no"}]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"label": "maybe"}, "record 1 of mine: label is 'maybe', which does not say whether the response is good: wr"),
        ({"label": 2}, "record 1 of mine: label is 2, which does not say whether the response is good: write true or "),
        ({"label": None}, "record 1 of mine: label is null: give it a value, or remove the record"),
        ({"label": [True]}, "record 1 of mine: label must be true or false, and is [True]: correct it, "),
        ({}, "record 1 of mine: label is missing, and must be true or false; the record has prompt, completion: add l"),
    ],
)
def test_a_label_that_is_neither_good_nor_bad_is_refused(tokenizer, label, message):
    row = {"prompt": "Q:", "completion": " yes"}
    with pytest.raises(InputError, match=re.escape(message)):
        get_custom([{**row, **label}, {**row, "label": True}], "mine", tokenizer, trains_on="labels")


def test_unpaired_pairs_are_a_desirable_and_an_undesirable_response_each(tokenizer):
    rows = [{"prompt": "Q:", "chosen": " yes", "rejected": " no"}, {"prompt": "Q:", "chosen": " a", "rejected": " no"}]

    def list_texts(**options: bool) -> list[dict[str, str]]:
        data = get_custom(rows, "mine", tokenizer, trains_on="labels")
        prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="labels", **options)
        return [example.texts for prompt in prompts for example in list_examples(prompt)]

    assert list_texts(unpair=True) == [{"chosen": " yes"}, {"rejected": " no"}, {"chosen": " a"}, {"rejected": " no"}]
    with pytest.raises(InputError, match="dataset mine has pairs, and this loss trains on single responses with label"):
        list_texts()


def test_an_empty_input_is_left_out_and_one_that_is_no_text_is_refused(tokenizer):
    row = {"instruction": "Sum up.", "input": "Text", "chosen": " A", "rejected": " B"}
    for empty in ({**row, "input": ""}, {**row, "input": None}):
        assert list(get_custom([row, empty], "mine", tokenizer)) == ["Sum up.\n\nText", "Sum up."]
    with pytest.raises(InputError, match="record 1 of mine: input must be text, and is 0"):
        get_custom([{**row, "input": 0}], "mine", tokenizer)
    # unless the config says what the prompt is
    assert list(get_custom([row], "mine", tokenizer, {"prompt": "instruction"})) == ["Sum up."]
    with pytest.raises(InputError, match="record 1 of mine: instruction must be text, and is "):
        get_custom(
            [{**row, "instruction": [user("a")], "chosen": [assistant("A")], "rejected": [assistant("B")]}],
            "mine",
            tokenizer,
        )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"from": "tool", "value": "Hi"}], "record 1 of mine: a message is from 'tool', and must be from one of"),
        ([{"from": "human", "value": "Hi"}, assistant("La")], "record 1 of mine: from is missing, and must be text"),
        (
            [user("Hi"), assistant("Hm?"), user("Sing")],
            "record 1 of mine: the last message is from user, and must be from a",
        ),
        ([assistant("La")], "record 1 of mine: a prompt and its responses need at least one message each"),
        ([user("Hi"), {"role": "assistant", "content": None}], "record 1 of mine: content is null"),
        ("Hi", "record 1 of mine: messages must be a list of chat messages, and is text"),
    ],
)
def test_a_chat_without_a_last_answer_is_named(chat, messages, message):
    with pytest.raises(InputError, match=message):
        get_custom([{"messages": messages}], "mine", chat(ENDS_TURNS_WITH_SEMICOLON), trains_on="targets")


def test_kto_trains_on_thumbs_up_and_down(run, capsys, tmp_path):
    file = tmp_path / "thumbs.csv"
    votes = "".join(f"What is {i % 30}?, It is {i}.,{'down' if i % 4 else 'up'}\n" for i in range(60))
    file.write_text(f"question,answer,thumbs\n{votes}", encoding="utf-8")
    settings = ("loss=kto", f"datasets={file}", "batch_size=4", "n_examples=16", "ledger=true")

    run("run", *settings)

    said = capsys.readouterr().out
    assert f"{file}: columns prompt=question, completion=answer, label=thumbs\n" in said
    assert re.search(r"train: 54 examples of 27 prompts, \d+ desirable and \d+ undesirable; ", said)
    assert "KTO advises 1 to 4/3: try loss.desirable_weight from " in said
    lines = read_metrics(tmp_path / "run", "train")
    assert all(math.isfinite(line["kto/kl/train"]) for line in lines)
    assert any("rewards_train/chosen" in line for line in lines)
    for row in read_ledger(tmp_path / "run").to_pylist():
        assert (row["policy_chosen"] is None) == (row["chosen_tokens"] is None) != (row["policy_rejected"] is None)
        assert row["margin"] is None
    # one prompt has none that its response could be combined with
    file.write_text("question,answer,thumbs\n" + "".join(f"What is {i % 3}?, It is.,up\n" for i in range(60)))
    with pytest.raises(
        InputError, match=r"split of thumbs has 1 prompt, and loss=kto combines .* is the test split, so the file needs"
    ):
        run("other", *settings)


# ranked lists

RANKED = {"prompt": "Q:", "responses": [" ok", " bad", " good", " so"], "scores": [3, -1, 8.5, 3]}


def take(rows: list[dict], tokenizer, trains_on: str, **options: str) -> list[dict[str, str]]:
    """The examples made of records, as texts by role."""
    data = get_custom(rows, "mine", tokenizer, trains_on=trains_on)
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on=trains_on, **options)
    return [texts for prompt in prompts for _, _, texts, _ in list_examples(prompt)]


def test_pairs_of_a_ranked_list_are_all_of_different_scores_or_the_best_with_the_worst(tokenizer):
    pairs = [tuple(texts.values()) for texts in take([RANKED], tokenizer, "pairs")]
    assert pairs == [(" good", " ok"), (" good", " so"), (" good", " bad"), (" ok", " bad"), (" so", " bad")]
    assert take([RANKED], tokenizer, "pairs", list_pairs="best_worst") == [{"chosen": " good", "rejected": " bad"}]
    assert take([RANKED], tokenizer, "targets") == [{"chosen": " good"}]
    notes = get_custom([RANKED], "mine", tokenizer).notes
    assert notes[-1] == "mine: 1 list with equal scores, which make no pair"
    all_equal = {**RANKED, "scores": [0] * 4}
    with pytest.raises(InputError, match="mine: the responses of each list have equal scores, which make no pair"):
        get_custom([all_equal], "mine", tokenizer)
    assert len(take([all_equal, {**RANKED, "prompt": "R:"}], tokenizer, "pairs")) == 5


def test_scores_of_a_given_format_may_have_another_spelling(tokenizer):
    row = {"prompt": "Q:", "responses": [" a", " b"], "Scores": [1, 2]}
    for data_format in (None, "ranked"):
        data = get_custom([row], "mine", tokenizer, data_format=data_format)
        assert data["Q:"]["sft_target"] == " b"


def test_dialogues_that_diverge_early_are_counted(tokenizer):
    start = "\n\nHuman: a\n\nAssistant:"
    row = {"chosen": f"{start} b\n\nHuman: c\n\nAssistant: d", "rejected": f"{start} e"}
    notes = get_custom([row], "mine", tokenizer, data_format="hh").notes
    assert notes[-1] == (
        "mine: in 1 record the dialogues diverge before the last answer; the prompt ends where they diverge"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {},
            "record 1 of mine: scores has equal numbers, and this loss needs an order without ties: remove all but one",
        ),
        ({"scores": [1, 2]}, "record 1 of mine: scores is [1, 2], and must have a finite number for each of the 4 in "),
        ({"scores": [1, 2, 3, math.inf]}, "record 1 of mine: scores is [1, 2, 3, inf], and must have a finite number"),
        (
            {"scores": [1, 2, 3, "4"]},
            "record 1 of mine: scores[3] must be a number, and is '4': correct it, or remove",
        ),
        ({"scores": [1, 2, 3, 10**400]}, "record 1 of mine: scores is [1, 2, 3, 1000"),
        ({"scores": [1, 2, None, 4]}, "record 1 of mine: scores[2] is null"),
        ({"scores": "4"}, "record 1 of mine: scores must be a list, and is '4'"),
        (
            {"responses": [" a"]},
            "record 1 of mine: responses has 1 response, and must have 2 or more: add some, or rem",
        ),
        ({"responses": " a"}, "record 1 of mine: responses must be a list, and is ' a'"),
        ({"responses": [" a", 3]}, "record 1 of mine: responses[1] must be text or a list of messages, and is 3"),
        (
            {"responses": [" a", [assistant("b")]], "scores": [1, 2]},
            "record 1 of mine: prompt holds text, responses holds text, responses holds chat messages; they must",
        ),
        (
            {"responses": list("abcdefghijklmnopq"), "scores": list(range(17))},
            "record 1 of mine: responses has 17 responses, and this loss takes lists of up to 16: remove some",
        ),
    ],
)
def test_a_ranked_list_that_cannot_be_trained_on_is_refused(tokenizer, change, message):
    with pytest.raises(InputError) as error:
        get_custom([{**RANKED, **change}], "mine", tokenizer, trains_on="lists")
    assert str(error.value).startswith(message)


# weights and margins


def read_numbers(rows: list[dict], tokenizer, trains_on: str, **options: Any) -> list[tuple[Any, Any]]:
    """The weights and margins of the prompts."""
    names = {name: options.pop(name) for name in ("columns", "with_margins") if name in options}
    data = get_custom(rows, "mine", tokenizer, trains_on=trains_on, **names)
    options |= {"with_margins": True} if "with_margins" in names else {}
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on=trains_on, **options)
    return [(prompt.weights, prompt.margins) for prompt in prompts]


def test_each_example_has_the_weight_and_margin_of_its_record(tokenizer):
    pairs = [
        {"prompt": "Q:", "chosen": " a", "rejected": " b", "weight": 2, "margin": 0.5},
        {"prompt": "R:", "chosen": " a", "rejected": " b", "weight": 1, "margin": 0},
        {"prompt": "Q:", "chosen": " a", "rejected": " c", "weight": 0.5, "margin": 3},
    ]
    assert read_numbers(pairs, tokenizer, "pairs") == [([2, 0.5], None), ([1], None)]
    assert read_numbers(pairs, tokenizer, "pairs", with_margins=True) == [([2, 0.5], [0.5, 3]), ([1], [0])]
    assert read_numbers(pairs, tokenizer, "labels", unpair=True) == [([2, 2, 0.5, 0.5], None), ([1, 1], None)]
    assert read_numbers(pairs, tokenizer, "targets") == [([0.5], None), ([1], None)]  # the target is the last one
    assert read_numbers(pairs, tokenizer, "prompts") == [(None, None)] * 2
    lists = [{**RANKED, "weight": 2}, {"prompt": "Q:", "responses": [" a", " b"], "scores": [0, 1], "weight": 3}]
    assert read_numbers(lists, tokenizer, "pairs") == [([2] * 5 + [3], None)]
    assert read_numbers(lists[1:], tokenizer, "lists") == [([3], None)]
    renamed = [{"w" if name == "weight" else name: value for name, value in pair.items()} for pair in pairs]
    assert read_numbers(renamed, tokenizer, "pairs") == [(None, None)] * 2
    assert read_numbers(renamed, tokenizer, "pairs", columns={"weight": "w"})[0] == ([2, 0.5], None)
    texts = [{**pair, "weight": str(pair["weight"]), "margin": Decimal(-1)} for pair in pairs]
    assert read_numbers(texts, tokenizer, "pairs", with_margins=True) == [([2, 0.5], [-1, -1]), ([1], [-1])]
    data = get_custom(pairs, "mine", tokenizer)
    used = "columns prompt=prompt, chosen=chosen, rejected=rejected, weight=weight"
    assert data.notes == [f"mine: format trl_standard; {used}; not used: margin"]
    parts = [data.select_split(split).weights for split in ("train", "test")]
    assert sorted(parts, key=str) == [{"Q:": [2, 0.5]}, {"R:": [1]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": 0},
            "record 1 of mine: weight is 0, and must be a finite number above 0: correct it, or remove the ",
        ),
        ({"weight": math.inf}, "record 1 of mine: weight is inf, and must be a finite number above 0: correct it"),
        (
            {"weight": "two"},
            "record 1 of mine: weight must be a number, and is 'two': correct it, or remove the record",
        ),
        ({"weight": 10**400}, "record 1 of mine: weight is 1000000"),
        ({"margin": -math.inf}, "record 1 of mine: margin is -inf, and must be a finite number: correct it, or remove"),
        ({"margin": None}, "record 1 of mine: margin is null: give it a value, or remove the record"),
    ],
)
def test_a_weight_or_margin_that_means_nothing_is_refused(tokenizer, change, message):
    row = {"prompt": "Q:", "chosen": " a", "rejected": " b", "weight": 1, "margin": 1, **change}
    with pytest.raises(InputError) as error:
        get_custom([row], "mine", tokenizer, with_margins=True)
    assert str(error.value).startswith(message)


def test_margins_that_a_loss_needs_and_the_data_lacks_are_asked_for(tokenizer):
    row = {"prompt": "Q:", "chosen": " a", "rejected": " b"}
    for rows, trains_on in (([row], "pairs"), ([{**RANKED, "margin": 1}], "pairs")):
        with pytest.raises(InputError, match=r"needs the margin of each pair, and dataset mine has none: give pairs"):
            read_numbers(rows, tokenizer, trains_on, with_margins=True)


def test_sft_trains_on_a_table_of_questions_and_answers(command, tmp_path):
    file = tmp_path / "my.rows.csv"
    answers = "".join(f'"What is, say, {i % 30}?\n"," It is {i}."\n' for i in range(60))
    file.write_text(f"\ufeffquestion,answer\n{answers}", encoding="utf-8")

    result = train(*command("run", "loss=sft", f"datasets={file}"))

    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"{file}: columns prompt=question, completion=answer\n") == 1
    assert result.stdout.count(": columns ") == 1  # of both splits
    assert "train: 54 examples of 27 prompts" in result.stdout  # the held-out tenth is of prompts
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["datasets"], config["dataset_sources"]["my_rows"]) == (["my_rows"], str(file))
    # a loss of pairs is told what is missing, and how columns are given beside a path
    refused = train(*command("pairs", f"datasets=[{file}]"))
    assert refused.returncode == 2
    assert f"training on pairs needs the columns prompt, chosen, rejected; {file} has " in refused.stderr
    assert "'dataset_sources.my_rows.columns={prompt: question, chosen: COLUMN, rejected: COLUMN}'" in refused.stderr


# null


@pytest.mark.parametrize("null", [None, float("nan")])
@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected"])
def test_a_null_is_null_and_neither_missing_nor_replaced(tokenizer, key, null):
    row = {"prompt": "Q:", "chosen": "Q: yes", "rejected": "Q: no"}
    with pytest.raises(InputError, match=rf"record 3 of mine: {key} is (null|NaN, which is how pandas writes null):"):
        get_custom([row, row, {**row, key: null}], "mine", tokenizer)


def test_a_prompt_that_other_records_have_is_not_taken_from_what_the_responses_share(tokenizer):
    row = {"prompt": "Q:", "chosen": "Q: yes", "rejected": "Q: no"}
    without = {key: row[key] for key in ("chosen", "rejected")}
    with pytest.raises(InputError, match="record 2 of mine: prompt is missing, and must be text or a list of"):
        get_custom([row, without], "mine", tokenizer)
    assert list(get_custom([without], "mine", tokenizer)) == ["Q:"]


def test_an_empty_cell_of_a_table_is_an_empty_text_except_for_a_prompt(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("prompt,chosen,rejected\na:, yes,\n")
    assert get_custom(load_rows(Source(str(file)), "train"), "rows", None)["a:"]["responses"] == [" yes", ""]
    file.write_text("prompt,chosen,rejected\n,a,b\n")
    with pytest.raises(InputError, match=r"record 1 of .*rows\.csv \(line 2\): the prompt is empty"):
        get_custom(load_rows(Source(str(file)), "train"), "rows", None)


# chat messages


WHOLE = [user("Hi"), assistant("Hello")]
OPENS_WITH_THINK = ENDS_TURNS_WITH_SEMICOLON.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")


@pytest.mark.parametrize(
    ("row", "template", "prompt", "responses"),
    [
        # tokenization appends the last EOS of a turn
        (HELLO, ENDS_TURNS_WITH_EOS, "<user>Hi<|endoftext|>\n<assistant>", ["Hello", "Go away"]),
        # another ending of turns stays
        (HELLO, ENDS_TURNS_WITH_SEMICOLON, "<user>Hi;<assistant>", ["Hello;", "Go away;"]),
        # conversations that share everything leave a response each
        ({"chosen": WHOLE, "rejected": WHOLE}, ENDS_TURNS_WITH_SEMICOLON, "<user>Hi;<assistant>", ["Hello;"] * 2),
        # a tag that only an open turn shows is not part of the prompt
        (HELLO, OPENS_WITH_THINK, "<user>Hi;<assistant>", ["Hello;", "Go away;"]),
    ],
)
def test_messages_are_rendered_as_a_prompt_and_its_responses(row, template, prompt, responses, chat):
    data = get_custom([row], "mine", chat(template))
    assert data == {prompt: {"responses": responses, "pairs": [(0, 1)], "sft_target": responses[0]}}
    assert (data.truncation_mode, data.rendered) == ("keep_turns", True)


def test_the_messages_of_a_prompt_are_kept_beside_its_text(chat):
    named = [{**user("Hi"), "name": "Eve", "weight": None}]
    rows = [{**HELLO, "prompt": named}, {**HELLO, "prompt": [user("A")]}]
    data = get_custom(rows, "mine", chat(ENDS_TURNS_WITH_SEMICOLON))

    assert [*data.messages] == [*data]
    assert [*data.messages.values()] == [[{**user("Hi"), "name": "Eve"}], [user("A")]]
    for split in ("train", "test"):
        held = data.select_split(split)
        assert [*held.messages] == [*held]


def test_batches_of_messages_end_with_one_eos_and_keep_those_between_turns(chat, tmp_path):
    write_rows(tmp_path / "train.jsonl", [HELLO])
    tokenizer = chat(ENDS_TURNS_WITH_EOS)
    (batch,) = get_batch_iterator(["mine"], tokenizer, n_epochs=1, silent=True, dataset_sources={"mine": str(tmp_path)})
    ids, labels = batch["chosen_input_ids"][0], batch["chosen_labels"][0]
    assert tokenizer.decode(ids) == "<user>Hi<|endoftext|>\n<assistant>Hello<|endoftext|>"
    assert tokenizer.decode(labels[labels != -100]) == "Hello<|endoftext|>"


REFUSES = "{{ raise_exception('roles must alternate') }}"
COUNTS = "{{ messages | length }} messages: " + ENDS_TURNS_WITH_SEMICOLON


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (
            [HELLO],
            None,
            "record 1 of mine holds chat messages, but the tokenizer has no chat template: name a tokenizer with one, ",
        ),
        (
            [HELLO],
            REFUSES,
            "record 1 of mine: the tokenizer's chat template rejects these messages: roles must alternate",
        ),
        ([HELLO], COUNTS, "record 1 of mine: the chat template renders the prompt differently"),
        (
            [HELLO, {"prompt": "a", "chosen": " b", "rejected": " c"}],
            ENDS_TURNS_WITH_EOS,
            "record 2 of mine holds text, and earlier records hold chat messages: use one kind",
        ),
        (
            [{"prompt": "a", "chosen": " b", "rejected": " c"}, HELLO],
            ENDS_TURNS_WITH_EOS,
            "record 2 of mine holds chat messages, and earlier records hold text: use one kind",
        ),
        (
            [{**HELLO, "rejected": "Go away"}],
            ENDS_TURNS_WITH_EOS,
            "prompt holds chat messages, chosen holds chat messages, rejected holds text; they must all be text or all "
            "be chat messages",
        ),
        (
            [{"chosen": "Hi", "rejected": HELLO["rejected"]}],
            ENDS_TURNS_WITH_EOS,
            "record 1 of mine: chosen holds text, rejected holds chat messages; they must all be text",
        ),
        ([{**HELLO, "chosen": []}], ENDS_TURNS_WITH_EOS, "need at least one message each"),
        ([{**HELLO, "chosen": [{"role": "assistant"}]}], ENDS_TURNS_WITH_EOS, "content is missing, and must be text"),
        ([{**HELLO, "chosen": ["Hello"]}], ENDS_TURNS_WITH_EOS, "'Hello' stands where an object with the field 'role'"),
        ([{**HELLO, "chosen": [7]}], ENDS_TURNS_WITH_EOS, "7 stands where an object with the field 'role'"),
    ],
)
def test_messages_that_cannot_be_rendered_are_named(chat, rows, template, message):
    with pytest.raises(InputError) as error:
        get_custom(rows, "mine", chat(template))
    assert message in str(error.value)


def test_many_records_are_read_in_processes_with_the_same_result(chat, monkeypatch):
    template = chat(ENDS_TURNS_WITH_EOS)
    rows = [{**HELLO, "prompt": [user(f"Hi {i}")], "tools": [{"name": f"look{i}"}]} for i in range(11)]
    rows[7] = {**HELLO, "chosen": [assistant("Hello<|endoftext|>")]}
    bad = [*rows, {**HELLO, "chosen": []}]
    outcomes = []
    for n_workers in (1, 2):
        monkeypatch.setattr(custom, "ROWS_PER_WORKER", 12 // n_workers - 1)
        monkeypatch.setattr(custom, "ROWS_PER_CHUNK", 4)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=n_workers: range(n))
        data = get_custom(rows, "mine", template)
        with pytest.raises(InputError) as refusal:
            get_custom(bad, "mine", template)
        outcomes.append((dict(data), data.notes, data.messages, data.tools, data.rows, str(refusal.value)))
    assert outcomes[0] == outcomes[1]
    assert any("ignores tools: in 11 of 11 prompts" in note or "in 10 of 10" in note for note in outcomes[0][1])
