"""Columns of custom data: recognized, or refused with the fix."""

from __future__ import annotations

import json
import re
import shutil

import datasets
import pytest
from support.formats import assistant, user
from support.runs import GOLDEN, train, write_rows

from dpo.data.columns import OTHER, find_columns, recognize_columns
from dpo.data.custom import get_custom
from dpo.data.tokenizer import load_tokenizer
from dpo.data.verdicts import find_verdicts
from dpo.errors import InputError
from dpo.settings.choices import FORMATS


def recognize(present: str, trains_on: str = "pairs", **given: str) -> dict[str, str]:
    columns = dict.fromkeys(present.split(), OTHER)
    return recognize_columns(columns, given, name="mine", origin="rows.csv", trains_on=trains_on).used


DIALOGUE = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes?", "rejected": "\n\nHuman: Hi\n\nAssistant: No."}
CHATS = {key: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": key}] for key in DIALOGUE}
TEXTS = {"chosen": "The capital is A.", "rejected": "The capital is B."}
ANSWERS = {key: {"from": "gpt", "value": key} for key in TEXTS}
LABELS = {"id": "a-7", "score": 0.5, "day": "2024-05-01 10:00", "source": "forum", "tags": ["a b"], "margin": None}
NOTE = {"note": "A is the largest."}
LEFT_OUT = "not used: id, score, day, source, tags, margin"
SHARED = "chosen=chosen, rejected=rejected; the prompt is what chosen and rejected begin with"
TALK = {"conversations": [{"from": "human", "value": "Hi"}]}


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ("prompt chosen rejected", "prompt chosen rejected"),
        ("id chosen rejected score", "chosen rejected"),  # the prompt is what they share
        ("question preferred dispreferred", "question preferred dispreferred"),
        ("Instruction Chosen-Response REJECTED_RESPONSE", "Instruction Chosen-Response REJECTED_RESPONSE"),
        ("question prompt best chosen rejected", "prompt chosen rejected"),  # our own names go first
        ("prompt chosen rejected messages completion", "prompt chosen rejected"),  # pairs before targets
        ("instruction chosen rejected", "instruction chosen rejected"),
    ],
)
def test_a_pair_is_recognized(present, found):
    for trains_on in ("pairs", "targets"):
        columns = recognize(present, trains_on)
        assert list(columns.values()) == found.split()
        assert list(columns) == ["prompt", "chosen", "rejected"][-len(columns) :]


@pytest.mark.parametrize(
    ("present", "columns"),
    [
        ("prompt completion", {"prompt": "prompt", "completion": "completion"}),
        ("prompt response label", {"prompt": "prompt", "completion": "response"}),
        ("question answer", {"prompt": "question", "completion": "answer"}),
        ("messages", {"messages": "messages"}),
        ("prompt prompt_id messages", {"messages": "messages"}),
        ("Input Instruction Output", {"prompt": "Instruction", "completion": "Output", "input": "Input"}),  # Alpaca
        ("instruction input messages", {"messages": "messages"}),
    ],
)
def test_a_target_is_recognized_under_sft_alone(present, columns):
    assert recognize(present, trains_on="targets") == columns
    with pytest.raises(InputError, match="training on pairs needs the columns prompt, chosen, rejected; rows"):
        recognize(present)


@pytest.mark.parametrize(
    ("present", "columns"),
    [
        ("prompt completion label", {"prompt": "prompt", "completion": "completion", "label": "label"}),
        ("Question Answer thumbs_up", {"prompt": "Question", "completion": "Answer", "label": "thumbs_up"}),
        (
            "instruction input output kto_tag",
            {"prompt": "instruction", "completion": "output", "label": "kto_tag", "input": "input"},
        ),
        ("messages desirable", {"messages": "messages", "label": "desirable"}),
        ("prompt completion label chosen rejected", {"prompt": "prompt", "completion": "completion", "label": "label"}),
        ("prompt chosen rejected", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),  # for `unpair`
    ],
)
def test_a_labelled_response_is_recognized(present, columns):
    assert recognize(present, trains_on="labels") == columns


@pytest.mark.parametrize("trains_on", ["pairs", "targets"])
@pytest.mark.parametrize(
    ("row", "given", "told"),
    [
        ({"prompt": "Hi?", **TEXTS}, {}, "prompt=prompt, chosen=chosen, rejected=rejected"),
        # the prompt is in chosen and rejected if they are dialogues, or if nothing else could be one
        ({**DIALOGUE, **LABELS}, {}, f"{SHARED}; {LEFT_OUT}"),
        ({**CHATS, **NOTE}, {}, f"{SHARED}; not used: note"),
        ({**TEXTS, **LABELS}, {}, f"{SHARED}; {LEFT_OUT}"),
        # or if the config says so
        ({**TEXTS, **NOTE}, {"chosen": "chosen", "rejected": "rejected"}, f"{SHARED}; not used: note"),
        # a chat is what its last messages answer
        ({**ANSWERS, **TALK, **NOTE}, {}, "prompt=conversations, chosen=chosen, rejected=rejected; not used: note"),
        (
            {"history": [["Hi you.", "Yes?"]], "question": "Hi?", **TEXTS},
            {},
            "prompt=question, chosen=chosen, rejected=rejected; not used: history",
        ),
        (
            {"system": "Be kind.", "question": "Hi?", **TEXTS},
            {},
            "prompt=question, chosen=chosen, rejected=rejected, system=system",
        ),
        # a system turn of one word belongs to formats that have a column for it, and may be a model's name in others
        (
            {**ANSWERS, **TALK, "system": "/no_think"},
            {},
            "prompt=conversations, chosen=chosen, rejected=rejected, system=system",
        ),
        (  # of two columns, none is a system turn for sure
            {"prompt": "Hi?", **TEXTS, "System": "Be kind.", "system_prompt": "Be short."},
            {},
            "prompt=prompt, chosen=chosen, rejected=rejected; not used: System, system_prompt",
        ),
        (
            {"prompt": "Hi?", **TEXTS, "system": "gpt-4", "images": ["a.png"]},
            {},
            "prompt=prompt, chosen=chosen, rejected=rejected; not used: system, images",
        ),
    ],
)
def test_one_line_names_the_columns_that_are_used_and_those_that_are_not(row, given, told, trains_on):
    columns = find_columns([row])
    recognized = recognize_columns(columns, given, name="mine", origin="rows.csv", trains_on=trains_on)
    assert recognized.describe() == f"columns {told}"


@pytest.mark.parametrize(
    "placeholder", ["<image>", "<|image_pad|>", "<start_of_image>", "<video>", "<|audio_1|>", "[IMG]"]
)
@pytest.mark.parametrize("column", ["prompt", "chosen"])
def test_a_placeholder_for_an_image_is_refused_and_an_image_without_one_is_a_warning(placeholder, column, tokenizer):
    row = {"prompt": "Who?", "chosen": "I.", "rejected": "You.", "images": ["a.png"]}

    def load(row: dict) -> list[str]:
        return get_custom([row], "rows.json", tokenizer).notes

    marked = row | {column: f"{placeholder} {row[column]}"}
    with pytest.raises(InputError, match=re.escape(f"a text has {placeholder}, a placeholder for an item of images")):
        load(marked)
    load(marked | {"images": []})  # a text about such words
    assert any("warning: " in note and ": images: only text is trained" in note for note in load(row))


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("field", ["prompt", "chosen"])
def test_a_token_that_stands_for_an_image_is_refused_in_any_text(where, field, tokenizer, tmp_path):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pic>"]})
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(GOLDEN / "tiny-llama" / "config.json", tmp_path)
    entry = {"config.json": {"image_token_id": tokenizer.convert_tokens_to_ids("<pic>")}}
    entry = entry.get(where, {"image_token": "<pic>", "extra_special_tokens": {"image_token": "<pic>"}})
    (tmp_path / where).write_text(json.dumps(json.loads((tmp_path / where).read_text()) | entry))
    row = {"prompt": "Who?", "chosen": "I.", "rejected": "You."}
    get_custom([row | {field: "<image>"}], "rows.json", load_tokenizer(str(tmp_path)))  # a word to this model
    for text in ("<pic> Who?", [user("<pic> Who?")]):
        marked = {field: [assistant("<pic>")] if isinstance(text, list) and field == "chosen" else text}
        other = {"prompt": [user("Who?")], "chosen": [assistant("I.")], "rejected": [assistant("You.")]}
        with pytest.raises(InputError, match="a text has <pic>, which stands for an image, video or audio, and only"):
            get_custom([(other if isinstance(text, list) else row) | marked], "rows", load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"context": "Where is A?", **TEXTS, **LABELS},
            "rows.csv has chosen and rejected, but it is not known which column is their prompt: it may be context. "
            "Give 'dataset_sources.mine.columns={prompt: context, chosen: chosen, rejected: rejected}', or, if the "
            "prompt is what chosen and rejected begin with, "
            "'dataset_sources.mine.columns={chosen: chosen, rejected: rejected}'",
        ),
        ({"dialog": TALK["conversations"], **TEXTS}, "it may be dialog. Give"),
        ({"frage": "法国的首都是哪里？", **TEXTS}, "it may be frage. Give"),
        (
            {"turns": TALK["conversations"], **NOTE, **ANSWERS},
            "may be turns or note. Give",
        ),
    ],
)
def test_words_that_could_be_the_prompt_are_never_dropped_for_what_the_responses_share(row, message):
    with pytest.raises(InputError) as error:
        recognize_columns(find_columns([row]), {}, name="mine", origin="rows.csv", trains_on="pairs")
    assert message in str(error.value)


def test_columns_in_the_config_go_first_and_the_rest_is_recognized():
    assert recognize("prompt question chosen rejected", prompt="question")["prompt"] == "question"
    assert recognize("input instruction output", "targets", prompt="instruction") == {
        "prompt": "instruction",
        "completion": "output",
    }
    assert recognize("prompt chosen rejected text", "targets", completion="text") == {
        "prompt": "prompt",
        "completion": "text",
    }
    # a column that was given is nothing else
    assert recognize("prompt answer", "targets", prompt="answer", completion="prompt")["completion"] == "prompt"


@pytest.mark.parametrize(
    ("present", "trains_on", "given", "needed", "override", "hint"),
    [
        ("prompt chosen score", "pairs", {}, "prompt, chosen, rejected", "chosen: chosen, rejected: COLUMN", ""),
        ("question answer", "pairs", {}, "prompt, chosen, rejected", "prompt: question, chosen: COLUMN", "targets sft"),
        ("input instruction", "pairs", {}, "prompt, chosen, rejected", "prompt: instruction, chosen: COLUMN", ""),
        ("prompt completion label", "pairs", {}, "prompt, chosen, rejected", "prompt: prompt, chosen", "labels kto"),
        # as in ms-swift's data
        ("messages rejected_response", "pairs", {}, "prompt, chosen, rejected", "rejected_response}", "targets sft"),
        ("a b(c)", "targets", {"completion": "b(c)"}, "prompt, completion", 'prompt: COLUMN, completion: "b(c)"}', ""),
        ("messages thumb", "labels", {}, "messages, label", "messages: messages, label: COLUMN}", "targets sft"),
        ("prompt responses", "targets", {"completion": "prompt"}, "prompt, completion", "completion: prompt}", ""),
    ],
)
def test_what_a_loss_lacks_is_named_with_the_override_to_type(present, trains_on, given, needed, override, hint):
    with pytest.raises(InputError) as error:
        recognize(present, trains_on, **given)
    message = str(error.value)
    named = f"training on {trains_on} needs the columns {needed}; rows.csv has {', '.join(present.split())}: name them "
    assert message.startswith(f"{named}with 'dataset_sources.mine.columns={{")
    assert override in message
    kind, _, loss = hint.partition(" ")
    assert (f"or train on the {kind} that are there with loss={loss}, " in message) == bool(hint)
    assert message.endswith(f", or write them in a format: {', '.join(FORMATS)} (docs/formats.md)")


@pytest.mark.parametrize(
    ("present", "trains_on", "given", "message"),
    [
        (
            "prompt chosen",
            "pairs",
            {"chosen": "chosen", "rejected": "chosen"},
            "dataset_sources.mine.columns gives the column chosen for chosen and rejected: give each a column of "
            "its own",
        ),
        (
            "question instruction input output",
            "targets",
            {},
            "rows.csv: the column of prompt may be question or instruction or input: choose one, as in "
            "'dataset_sources.mine.columns={prompt: question, completion: output}'",
        ),
        (
            "query accepted preferred rejected",
            "pairs",
            {},
            "rows.csv: the column of chosen may be accepted or preferred: choose one, as in "
            "'dataset_sources.mine.columns={prompt: query, chosen: accepted, rejected: rejected}'",
        ),
        (
            "prompt chosen rejected",
            "pairs",
            {"chosen": "best"},
            "dataset_sources.mine.columns.chosen=best: rows.csv has no such column; there are prompt, chosen, rejected",
        ),
        (
            "prompt messages",
            "targets",
            {"prompt": "prompt", "messages": "messages"},
            "dataset_sources.mine.columns has the fields prompt, messages: give fields of pairs (prompt, chosen, "
            "rejected), of targets (prompt, completion), of labels (prompt, completion, label) or of ranked lists "
            "(prompt, responses, scores), or messages alone or with label; any may have weight and margin",
        ),
    ],
)
def test_columns_that_several_fields_could_have_are_refused_with_the_override_to_type(
    present, trains_on, given, message
):
    with pytest.raises(InputError) as error:
        recognize(present, trains_on, **given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("good_answer", "bad_answer"), ("Winner", "Loser"), ("win", "lose"), ("positive", "negative"),
        ("preferred answer", "non-preferred answer"), ("Good Response", "Bad Response"), ("answer_chosen",
        "answer_rejected"), ("bestCompletion", "worstCompletion"), ("GOOD-REPLY", "BAD-REPLY"),
    ],
)  # fmt: skip
def test_pairs_have_many_names(better, worse):
    columns = dict.fromkeys(("Question", better, worse, "id"), OTHER)
    found = recognize_columns(columns, {}, name="mine", origin="rows.csv", trains_on="pairs").used
    assert found == {"prompt": "Question", "chosen": better, "rejected": worse}


def test_a_number_is_no_response_beside_a_text_of_another_name():
    row = {"question": "Is it?", "chosen_response": "It is.", "positive": 0.5, "rejected_response": "It was."}
    found = recognize_columns(find_columns([row]), {}, name="mine", origin="rows.csv", trains_on="pairs").used
    assert (found["chosen"], found["rejected"]) == ("chosen_response", "rejected_response")


@pytest.mark.parametrize(
    ("columns", "verdict", "values", "chosen"),
    [  # chosen: of each row; x and y are the columns, - a tie
        (
            "response_a response_b",
            "winner",
            ["a", "B", "tie", "Both bad", "response_a", "model_b", "Assistant A"],
            "xy--xyx",
        ),
        ("answer_1 answer_2", "preferred", [1, "2", 1.0, "2.0", "answer 1", "neither"], "xyxyx-"),
        ("response_0 response_1", "better_response_id", [0, 1, "1", "tie"], "xyy-"),
        ("Response A,Response B", "Winner", ["A", "b"], "xy"),
        ("model_a_response model_b_response", "label", ["model_a", "model_b", "tie"], "xy-"),
        ("response_a response_b", "preference", [0, 1, 1, 0], "xyyx"),
        ("response_a response_b", "preference", [1, 2, 1], "xyx"),
        ("output_2 output_1", "choice", [2, 1, "a"], "xyy"),
        ("response_a response_b", "winner", ["a", None], "x!"),  # ! a record that is refused
        ("response_a response_b", "winner", ["c", "a", "-1"], "!x!"),
        ("response_a response_b", "winner", [1, 1, "a"], "!!x"),  # 1 may be the first or the second
        ("response_a response_b", "winner", [0, 1, 2], "!!!"),  # 0 may be a tie
        ("response_a response_b", "preference", [-1, 0, 1], "!!!"),  # a scale, on which 0 is a tie
        ("response_1 response_2", "winner", [0, 1], "!!"),
        ("response_1 response_2", "winner", [0, 1, 2], "!xy"),
    ],
)
def test_a_column_may_say_which_response_is_better(columns, verdict, values, chosen, tokenizer):
    x, y = columns.split("," if "," in columns else " ")
    rows = [{"question": f"Q{i}?", x: f" x{i}", y: f" y{i}", verdict: value} for i, value in enumerate(values)]
    for row, said in zip(rows, chosen, strict=True):
        # with all rows, as digits count from 0 or 1 by all of them
        verdicts = find_verdicts(rows, find_columns(rows), {})
        assert verdicts is not None
        if said == "!":
            with pytest.raises(InputError, match=f"{verdict} is .*write the name of the better column, or tie"):
                verdicts.read(row, "record 1 of mine")
        else:
            assert (
                verdicts.read(row, "")
                == {"x": {"chosen": x, "rejected": y}, "y": {"chosen": y, "rejected": x}, "-": {}}[said]
            )
    if "!" not in chosen:
        data = get_custom(rows, "mine", tokenizer)
        assert {prompt: entry["sft_target"] for prompt, entry in data.items()} == {
            f"Q{i}?": f" {said}{i}" for i, said in enumerate(chosen) if said != "-"
        }
        ties = chosen.count("-")
        assert (f"{ties} tie" in data.notes[-1]) == bool(ties)


def test_pairs_go_before_a_column_of_winners(tokenizer):
    row = {"prompt": "Q:", "response_a": " a", "response_b": " b", "winner": "a", "chosen": " c", "rejected": " d"}
    assert get_custom([row], "mine", tokenizer)["Q:"]["responses"] == [" c", " d"]
    arena = {f"conversation_{side}": [user("Hi"), assistant(side)] for side in "ab"} | {"winner": "model_b"}
    assert find_verdicts([arena], find_columns([arena]), {}).responses == ("conversation_a", "conversation_b")


@pytest.mark.parametrize(
    ("name", "keys", "late_keys", "message"),
    [
        ("pairs.csv", "prompt text", "prompt text", "training on pairs needs the columns prompt, chosen, rejected"),
        ("pairs.parquet", "prompt text", "prompt text", "training on pairs needs the columns prompt, chosen, rejected"),
        ("pairs.jsonl", "prompt chosen", "prompt chosen rejected", "no/such"),  # a column may come late
    ],
)
def test_columns_are_checked_before_a_model_is_fetched(name, keys, late_keys, message, tmp_path):
    path, kinds = tmp_path / name, [keys] * 150 + [late_keys]
    rows = [{key: f"It is {key} {i}." for key in kind.split()} for i, kind in enumerate(kinds)]
    write_rows(path, rows)
    if not name.endswith(".jsonl"):
        frame = datasets.Dataset.from_list(rows)
        (frame.to_csv if name.endswith(".csv") else frame.to_parquet)(path)
    for dry_run in (True, False):
        result = train(
            *("loss=dpo", "loss.beta=0.1", "model.name_or_path=no/such", "exp_name=test", f"datasets=[{path}]"),
            *(f"local_dirs=[{tmp_path}]", f"local_run_dir={tmp_path / 'run'}", f"dry_run={str(dry_run).lower()}"),
        )
        assert (result.returncode, result.stderr[:7]) == (2, "error: ")
        assert message in result.stderr
