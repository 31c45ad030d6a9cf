"""The user's own data: what is trained on, and what is refused."""

from __future__ import annotations

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
from dpo.data.sources import load_rows
from dpo.data.table import iterate_prompts
from dpo.errors import InputError
from dpo.settings.places import Source
from dpo.system import pool
from preference_datasets import get_batch_iterator

# "<user>Hi" and "<assistant>Hello" joined, with or without EOS after each turn
TURN = "<{{ message.role }}>{{ message.content }}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDS_TURNS_WITH_EOS = "{% for message in messages %}" + TURN + "{{ eos_token }}\n{% endfor %}" + OPEN
ENDS_TURNS_WITH_SEMICOLON = "{% for message in messages %}" + TURN + ";{% endfor %}" + OPEN


HELLO = {"prompt": [user("Hi")], "chosen": [assistant("Hello")], "rejected": [assistant("Go away")]}


# without pairs, for SFT

QA = [{"question": "Q:", "answer": " yes"}, {"question": "P:", "answer": " no"}, {"question": "Q:", "answer": " sure"}]


def test_sft_learns_every_response_of_a_prompt_that_has_no_pairs(tokenizer):
    data = get_custom(QA, "mine", tokenizer, trains_on="targets")
    assert data.notes == ["mine: columns prompt=question, completion=answer"]
    assert data == {
        "Q:": {"responses": [" yes", " sure"], "pairs": [], "sft_target": " sure", "rows": [1, 3]},
        "P:": {"responses": [" no"], "pairs": [], "sft_target": " no", "rows": [2]},
    }
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="targets")
    texts = [example.texts for prompt in prompts for example in list_examples(prompt)]
    assert texts == [{"chosen": " yes"}, {"chosen": " sure"}, {"chosen": " no"}]


def test_prompts_to_answer_need_no_responses(tokenizer, chat):
    rows = [{"question": "Q:", "source": "a book"}, {"question": "P:", "source": "a film"}, {"question": "Q:"}]
    data = get_custom(rows, "mine", tokenizer, trains_on="prompts")
    assert data.notes == ["mine: columns prompt=question; not used: source"]
    assert [(prompt, entry["responses"], entry["pairs"]) for prompt, entry in data.items()] == [
        ("Q:", [], []),
        ("P:", [], []),
    ]
    prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="prompts")
    assert [(prompt.text, prompt.examples) for prompt in prompts] == [("Q:", []), ("P:", [])]

    messages = get_custom([{"prompt": [user("Hi")]}], "mine", chat(ENDS_TURNS_WITH_SEMICOLON), trains_on="prompts")
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


def test_unpaired_pairs_are_a_desirable_and_an_undesirable_response_each(tokenizer):
    rows = [{"prompt": "Q:", "chosen": " yes", "rejected": " no"}, {"prompt": "Q:", "chosen": " a", "rejected": " no"}]

    def list_texts(**options: bool) -> list[dict[str, str]]:
        data = get_custom(rows, "mine", tokenizer, trains_on="labels")
        prompts = iterate_prompts(lambda *_, **__: data, ["mine"], "train", trains_on="labels", **options)
        return [example.texts for prompt in prompts for example in list_examples(prompt)]

    assert list_texts(unpair=True) == [{"chosen": " yes"}, {"rejected": " no"}, {"chosen": " a"}, {"rejected": " no"}]
    with pytest.raises(InputError, match="dataset mine has pairs, and this loss trains on single responses with label"):
        list_texts()


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
    assert notes[-1] == "mine: in 1 record responses have equal scores, which make no pair"
    all_equal = {**RANKED, "scores": [0] * 4}
    with pytest.raises(InputError, match="mine: the responses of each list have equal scores, which make no pair"):
        get_custom([all_equal], "mine", tokenizer)
    assert len(take([all_equal, {**RANKED, "prompt": "R:"}], tokenizer, "pairs")) == 5


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


# chat messages


def test_the_messages_of_a_prompt_are_kept_beside_its_text(chat):
    named = [{**user("Hi"), "name": "Eve", "weight": None}]
    rows = [{**HELLO, "prompt": named}, {**HELLO, "prompt": [user("A")]}]
    data = get_custom(rows, "mine", chat(ENDS_TURNS_WITH_SEMICOLON))

    assert (data.truncation_mode, data.rendered) == ("keep_turns", True)
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


# refusals

PAIR = {"prompt": "Q:", "chosen": " a", "rejected": " b"}
LABEL = {"prompt": "Q:", "completion": " a", "label": True}
TARGET = {"messages": [user("Hi"), assistant("Hello")]}
ALPACA = {"instruction": "Sum up.", "input": "Text", "chosen": " A", "rejected": " B"}
WHOLE = {"chosen": "Q: yes", "rejected": "Q: no"}
REFUSES = "{{ raise_exception('roles must alternate') }}"
COUNTS = "{{ messages | length }} messages: " + ENDS_TURNS_WITH_SEMICOLON


@pytest.mark.parametrize("trains_on", ["pairs", "labels", "targets", "lists"])
def test_a_record_that_cannot_be_trained_on_is_refused_with_what_is_wrong(chat, trains_on):
    for base, change, message in REFUSED[trains_on]:
        tokenizer = chat(ENDS_TURNS_WITH_SEMICOLON)
        with pytest.raises(InputError) as error:
            get_custom([{**base, **change}], "mine", tokenizer, trains_on=trains_on, with_margins=True)
        assert message in str(error.value), change
        assert str(error.value).startswith("record 1 of mine")


REFUSED: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {
    "pairs": [
        (PAIR, {"prompt": ""}, "the prompt is empty, so nothing predicts the first token of a response"),
        (PAIR, {"chosen": 3}, "chosen must be text or a list of messages, and is 3"),
        *((PAIR, {key: None}, f"{key} is null: give it a value, or remove") for key in PAIR),
        *((PAIR, {key: math.nan}, f"{key} is NaN, which is how pandas writes null") for key in PAIR),
        (WHOLE, {"chosen": "yes"}, "chosen and rejected begin with no word in common, which would be the prompt: give"),
        (WHOLE, {"rejected": HELLO["rejected"]}, "chosen holds text, rejected holds chat messages; they must all be"),
        (ALPACA, {"input": 0}, "input must be text, and is 0"),
        (ALPACA, {"instruction": [user("a")]}, "instruction must be text, and is "),
        (PAIR, {"weight": math.inf}, "weight is inf, and must be a finite number above 0: correct it"),
        (PAIR, {"weight": "two"}, "weight must be a number, and is 'two': correct it, or remove the record"),
        (PAIR, {"weight": 10**400}, "weight is 1000000"),
        (PAIR, {"margin": -math.inf}, "margin is -inf, and must be a finite number: correct it, or remove"),
        (HELLO, {"rejected": "Go away"}, "prompt holds chat messages, chosen holds chat messages, rejected holds text"),
        (HELLO, {"chosen": []}, "need at least one message each"),
        (HELLO, {"chosen": [{"role": "assistant"}]}, "content is missing, and must be text"),
        (HELLO, {"chosen": ["Hello"]}, "'Hello' stands where an object with the field 'role'"),
        (HELLO, {"chosen": [{"role": "assistant", "content": None}]}, "content is null"),
    ],
    "labels": [
        (LABEL, {"label": 2}, "label is 2, which does not say whether the response is good: write true or "),
        (LABEL, {"label": [True]}, "label must be true or false, and is [True]: correct it, "),
    ],
    "targets": [
        (TARGET, {"messages": [{"from": "tool", "value": "Hi"}]}, "a message is from 'tool', and must be from one of"),
        (TARGET, {"messages": [{"from": "human", "value": "Hi"}, assistant("La")]}, "from is missing, and must be tex"),
        (TARGET, {"messages": [*TARGET["messages"], user("?")]}, "the last message is from user, and must be from a"),
        (TARGET, {"messages": [assistant("La")]}, "a prompt and its responses need at least one message each"),
        (TARGET, {"messages": "Hi"}, "messages must be a list of chat messages, and is text"),
    ],
    "lists": [
        (RANKED, {}, "scores has equal numbers, and this loss needs an order without ties: remove all but one"),
        (RANKED, {"scores": [1, 2, 3, math.inf]}, "scores is [1, 2, 3, inf], and must have a finite number for each"),
        (RANKED, {"scores": [1, 2, 3, "4"]}, "scores[3] must be a number, and is '4': correct it, or remove"),
        (RANKED, {"scores": [1, 2, 3, 10**400]}, "scores is [1, 2, 3, 1000"),
        (RANKED, {"scores": "4"}, "scores must be a list, and is '4'"),
        (RANKED, {"responses": [" a"]}, "responses has 1 response, and must have 2 or more: add some, or rem"),
        (RANKED, {"responses": [" a", 3]}, "responses[1] must be text or a list of messages, and is 3"),
        (
            RANKED,
            {"responses": [" a", [assistant("b")]], "scores": [1, 2]},
            "prompt holds text, responses holds text, responses holds chat messages; they must",
        ),
        (
            RANKED,
            {"responses": list("abcdefghijklmnopq"), "scores": list(range(17))},
            "responses has 17 responses, and this loss takes lists of up to 16: remove some",
        ),
    ],
}


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([HELLO], None, "record 1 of mine holds chat messages, but the tokenizer has no chat template: name a tokeni"),
        ([HELLO], REFUSES, "record 1 of mine: the tokenizer's chat template rejects these messages: roles must alter"),
        ([HELLO], COUNTS, "record 1 of mine: the chat template renders the prompt differently"),
        ([HELLO, PAIR], ENDS_TURNS_WITH_EOS, "record 2 of mine holds text, and earlier records hold chat messages: u"),
        ([PAIR, HELLO], ENDS_TURNS_WITH_EOS, "record 2 of mine holds chat messages, and earlier records hold text: u"),
        # a prompt that other records have is not taken from what the responses share
        ([PAIR, WHOLE], None, "record 2 of mine: prompt is missing, and must be text or a list of"),
    ],
)
def test_records_of_other_kinds_and_templates_that_fail_are_named(chat, rows, template, message):
    with pytest.raises(InputError, match=message):
        get_custom(rows, "mine", chat(template))


def test_an_empty_cell_of_a_table_is_an_empty_text(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\na:, yes,\n")
    rows = load_rows(Source(str(tmp_path / "rows.csv")), "train")
    assert get_custom(rows, "rows", None)["a:"]["responses"] == [" yes", ""]


def test_many_records_are_read_in_processes_with_the_same_result(chat, monkeypatch):
    template = chat(ENDS_TURNS_WITH_EOS)
    rows = [{**HELLO, "prompt": [user(f"Hi {i}")], "tools": [{"name": f"look{i}"}]} for i in range(11)]
    rows[7] = {**HELLO, "chosen": [assistant("Hello<|endoftext|>")]}
    bad = [*rows, {**HELLO, "chosen": []}]
    outcomes = []
    for n_workers in (1, 2):
        monkeypatch.setattr(custom, "ROWS_PER_WORKER", 12 // n_workers - 1)
        monkeypatch.setattr(pool, "ITEMS_PER_CHUNK", 4)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=n_workers: range(n))
        data = get_custom(rows, "mine", template)
        with pytest.raises(InputError) as refusal:
            get_custom(bad, "mine", template)
        outcomes.append((dict(data), data.notes, data.messages, data.tools, data.rows, str(refusal.value)))
    assert outcomes[0] == outcomes[1]
    assert any("ignores tools: in 11 of 11 prompts" in note or "in 10 of 10" in note for note in outcomes[0][1])
