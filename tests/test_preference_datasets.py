"""The paper's datasets as prompts, responses and pairs, and the order in which their examples come."""

import random
import re

import datasets
import numpy as np
import pytest
from support.pytests import refused
from support.runs import write_rows

from dpo.data.examples import iterate_examples
from dpo.settings.places import BUILT_IN
from preference_datasets import extract_anthropic_prompt, get_batch_iterator, get_dataset, strip_html_tags


def load(name: str, rows: list, folder, split: str = "train") -> dict:
    write_rows(folder / f"{split}.jsonl", rows)
    return get_dataset(name, split, silent=True, dataset_sources={name: str(folder)})


# hh


def test_the_prompt_ends_at_the_last_assistant_marker():
    dialogue = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant: See you. Assistant: no\nAssistant: no"
    assert extract_anthropic_prompt(dialogue) == "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"


def test_hh_rows_of_one_prompt_are_several_pairs_and_the_last_chosen_is_the_target(tmp_path):
    hi, bye = "\n\nHuman: Hi\n\nAssistant:", "\n\nHuman: Bye\n\nAssistant:"
    rows = [
        {"chosen": hi + " good", "rejected": hi + " bad"},
        {"chosen": bye + " yes", "rejected": bye + " no"},
        {"chosen": hi + " better", "rejected": hi + " worse"},
    ]
    assert load("hh", rows, tmp_path) == {
        hi: {"responses": [" good", " bad", " better", " worse"], "pairs": [(0, 1), (2, 3)], "sft_target": " better"},
        bye: {"responses": [" yes", " no"], "pairs": [(0, 1)], "sft_target": " yes"},
    }


# shp


def shp_row(history: str, a: tuple, b: tuple, label: int) -> dict:
    return {
        "history": history,
        "human_ref_A": a[0],
        "score_A": a[1],
        "human_ref_B": b[0],
        "score_B": b[1],
        "labels": label,
    }


def test_shp_keeps_pairs_from_a_score_ratio_of_two_and_label_1_prefers_a(tmp_path):
    rows = [
        shp_row("q", ("x", 4), ("y", 2), 1),  # a ratio of exactly 2 stays
        shp_row("q", ("v", 199), ("w", 100), 1),  # 1.99 goes
        shp_row("q", ("z", 3), ("x", 9), 0),  # 0: B is preferred. Responses are not merged: x comes twice
        shp_row("only close calls", ("x", 5), ("y", 4), 1),
    ]
    assert load("shp", rows, tmp_path) == {
        "\n\nHuman: q\n\nAssistant:": {
            "responses": [" x", " y", " z", " x"],
            "pairs": [(0, 1), (3, 2)],
            "sft_target": " x",
        }
    }


def test_shp_target_has_the_highest_score_and_a_repeated_text_counts_with_its_first(tmp_path):
    # scores in order: x 4, y 2, z 5, w 1, y 90, w 9. First scores: x 4, y 2, z 5, w 1, so z wins, and y's 90 is ignored
    rows = [
        shp_row("q", ("x", 4), ("y", 2), 1),
        shp_row("q", ("z", 5), ("w", 1), 1),
        shp_row("q", ("y", 90), ("w", 9), 1),
    ]
    (entry,) = load("shp", rows, tmp_path).values()
    assert entry["sft_target"] == " z"


# se


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>a <b>bold</b> and <a href='x'>linked</a> word</p>", "a  and  word"),  # a p's own text only
        ("<p>run <code>ls</code> now</p>", "run  now"),
        ("<pre><code>x = 1\ny = 2</code></pre>", "<code>x = 1\ny = 2</code>"),
        ("<code>top <i>level</i></code>", "<code>top level</code>"),
        ("<p>kept</p><ul><li>dropped</li></ul><blockquote><p>dropped</p></blockquote>loose text", "kept"),
        ("<p>1 &lt; 2 &amp; 3</p>", "1 < 2 & 3"),
    ],
)
def test_html_becomes_text(html, text):
    assert strip_html_tags(html) == text


def se_row(question: str, *answers: tuple[str, int]) -> dict:
    return {
        "question": f"<p>{question}</p>",
        "answers": [{"text": f"<p>{text}</p>", "pm_score": score} for text, score in answers],
    }


def test_se_pairs_every_two_answers_and_a_tie_counts_as_later_over_earlier(tmp_path):
    data = load("se", [se_row("q", ("x", 3), ("y", 3), ("z", 5), ("w", 0))], tmp_path)
    assert data == {
        "\n\nHuman: q\n\nAssistant:": {
            "responses": [" x", " y", " z", " w"],
            # x=y: (1, 0); z>x: (2, 0); x>w: (0, 3); z>y: (2, 1); y>w: (1, 3); z>w: (2, 3)
            "pairs": [(1, 0), (2, 0), (0, 3), (2, 1), (1, 3), (2, 3)],
            "sft_target": " z",
        }
    }


def test_the_first_hundredth_of_se_after_the_datasets_librarys_shuffle_is_test(tmp_path, monkeypatch):
    rows = [se_row(str(i), ("x", 1), ("y", 0)) for i in range(250)]
    order = [
        f"\n\nHuman: {row['question'][3:-4]}\n\nAssistant:" for row in datasets.Dataset.from_list(rows).shuffle(seed=42)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(rows))

    # These are a directory (without a test file), one file, and the Hub's Dataset, which goes through `map`.
    for place in (str(tmp_path), str(tmp_path / "train.jsonl"), "somebody/stack-exchange"):
        test, train = (
            get_dataset("se", split, silent=True, dataset_sources={"se": place}) for split in ("test", "train")
        )
        assert list(test) == order[:2]  # int(250 * 0.01)
        assert list(train) == order[2:]


# Every dataset.


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("hh", {"chosen": "nonsense", "rejected": ""}, r"(train): no '\n\nAssistant:' in 'nonsense'"),
        ("hh", {"chosen": "\n\nAssistant: a"}, "rejected is missing, and must be text: correct it"),
        ("shp", shp_row("q", ("x", "4"), ("y", 2), 1), "score_A is '4', and must be a number"),
        ("se", {"question": "q", "answers": [{"text": "a"}]}, "pm_score is missing, and must be a number"),
        ("shp", shp_row("q", ("x", 4), ("y", 0), 1), "score_B=0"),
        ("se", {"question": "q", "answers": []}, "answers is empty"),
    ],
)
def test_a_row_without_its_fields_is_named_with_the_field(tmp_path, name, row, message):
    with refused(f"record 1 of {tmp_path}.*{re.escape(message)}"):
        load(name, [row], tmp_path)


def test_an_unknown_name_is_an_error_that_lists_the_choices():
    with refused(f"'hhh' is not one of {', '.join(BUILT_IN)}: read it with get_batch_iterator"):
        get_dataset("hhh", "train")


# The order of examples.


def order_of(*sizes: int, **changes) -> list[list[tuple[int, int]]]:
    """The batches of examples; prompt number i has `sizes[i]` examples."""
    options = {"batch_size": 1, "shuffle": True, "n_epochs": 1, "n_examples": None, "seed": 0, **changes}
    return [*iterate_examples(sizes, **options)]


def test_each_epoch_shuffles_what_the_last_one_left_with_seeds_drawn_at_once():
    expected, left = [], [*range(8)]
    for seed in np.random.RandomState(3).randint(0, 2**32, size=1000)[:3]:  # the reference draws them as an array
        random.Random(int(seed)).shuffle(left)
        expected += [[(i, 0)] for i in left]
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert order_of(*[1] * 8, seed=3, n_epochs=3) == expected
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_all_examples_of_a_prompt_follow_each_other_in_their_order():
    order = [example for (example,) in order_of(3, 1, 2, seed=1)]
    for block in ([(0, 0), (0, 1), (0, 2)], [(2, 0), (2, 1)]):
        start = order.index(block[0])
        assert order[start : start + len(block)] == block


def test_a_partial_last_batch_is_dropped_and_not_carried_over():
    # 5 examples, batches of 2: the fifth never comes
    order = order_of(2, 2, 1, shuffle=False, batch_size=2, n_epochs=2)
    assert order == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]] * 2


@pytest.mark.parametrize(
    ("n_examples", "n_batches"),
    [
        (1, 1),  # one batch always runs
        (4, 2),
        (5, 3),  # the example that the first epoch drops does not count: 2, 4, 6
        (8, 4),
        (100, 6),  # three epochs end first
    ],
)
def test_batches_stop_once_n_examples_are_trained(n_examples, n_batches):
    assert len(order_of(2, 2, 1, shuffle=False, batch_size=2, n_epochs=3, n_examples=n_examples)) == n_batches


def test_n_examples_alone_goes_on_for_as_many_epochs_as_it_takes():
    assert order_of(1, 1, shuffle=False, n_epochs=None, n_examples=5) == [[(i, 0)] for i in (0, 1, 0, 1, 0)]


# From names to batches.


def test_in_a_mixture_hh_keeps_the_end_of_a_prompt_and_shp_its_start(tokenizer, tmp_path):
    marker = "\n\nHuman: a b c d e\n\nAssistant:"  # \n \n Human : ... \n \n Assistant :
    write_rows(tmp_path / "hh" / "train.jsonl", [{"chosen": marker + " b", "rejected": marker + " c"}])
    write_rows(tmp_path / "shp" / "train.jsonl", [shp_row("a b c d e", ("b", 4), ("c", 1), 1)])

    (batch,) = get_batch_iterator(
        ["hh", "shp"],
        tokenizer,
        batch_size=2,
        shuffle=False,
        max_length=6,
        max_prompt_length=3,
        n_epochs=1,
        silent=True,
        dataset_sources={name: str(tmp_path / name) for name in ("hh", "shp")},
    )

    assert batch["prompt"] == [marker, marker]  # the same text, cut in two ways
    assert tokenizer.batch_decode(batch["prompt_input_ids"]) == ["\nAssistant:", "\n\nHuman"]
    assert tokenizer.batch_decode(batch["chosen_input_ids"]) == [
        "\nAssistant: b<|endoftext|>",
        "\n\nHuman b<|endoftext|>",
    ]


def test_batches_that_would_never_end_or_never_come_are_errors(tokenizer, tmp_path):
    dialogue = "\n\nHuman: Hi\n\nAssistant:"
    write_rows(tmp_path / "train.jsonl", [{"chosen": dialogue + " a", "rejected": dialogue + " b"}] * 2)
    options = {"silent": True, "dataset_sources": {"hh": str(tmp_path)}}

    with refused("n_epochs or n_examples"):
        next(get_batch_iterator(["hh"], tokenizer, **options))
    with refused("train split has 1 examples, too few"):  # SFT counts prompts, and both rows have the same
        next(get_batch_iterator(["hh"], tokenizer, batch_size=2, n_examples=9, sft_mode=True, **options))
