"""Columns of custom data: recognized, or refused with the fix."""

import re
import shutil

import pytest
from support.formats import assistant, user
from support.pytests import refused
from support.runs import TINY, change_json, write_rows

from dpo.data.columns import Columns, recognize
from dpo.data.custom import get_custom
from dpo.data.tokenizer import load_tokenizer
from dpo.settings.places import FORMS

TEXTS = {"chosen": "The capital is A.", "rejected": "The capital is B."}
CHATS = {key: [user("Hi"), assistant(key)] for key in TEXTS}
DIALOGUE = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes?", "rejected": "\n\nHuman: Hi\n\nAssistant: No."}
ANSWERS = {key: {"from": "gpt", "value": key} for key in TEXTS}
TALK = {"conversations": [{"from": "human", "value": "Hi"}]}
NOTE = {"note": "A is the largest."}
PAIR = {"prompt": "Hi?", **TEXTS}
PLAIN = "prompt=prompt, chosen=chosen, rejected=rejected"
LABELS = {"id": "a-7", "score": 0.5, "day": "2024-05-01 10:00", "source": "forum", "tags": ["a b"], "margin": None}
LEFT_OUT = "not used: id, score, day, source, tags, margin"
SHARED = "chosen=chosen, rejected=rejected; the prompt is what chosen and rejected begin with"


def find(row: dict | str, trains_on: str = "pairs", **given: str) -> Columns:
    """The columns of one row, or of names of columns that hold a number each."""
    row = dict.fromkeys(row.split(), 7) if isinstance(row, str) else row
    return recognize([row], given, name="mine", origin="rows.csv", trains_on=trains_on)


@pytest.mark.parametrize(
    ("trains_on", "present", "given", "found"),
    [
        ("pairs", "id chosen rejected score", {}, "- chosen rejected"),  # the prompt is what they share
        ("pairs", "Instruction Chosen-Response REJECTED_RESPONSE", {}, "Instruction Chosen-Response REJECTED_RESPONSE"),
        ("pairs", "question prompt best chosen rejected", {}, "prompt chosen rejected"),  # our own names go first
        ("pairs", "prompt question chosen rejected", {"prompt": "question"}, "question chosen rejected"),
        *(
            ("pairs", f"Question {better} {worse} id", {}, f"Question {better} {worse}")
            for better, worse in (
                ("positive", "negative"), ("preferred-answer", "non-preferred-answer"),
                ("answer_chosen", "answer_rejected"),
            )
        ),
        ("targets", "prompt chosen rejected messages completion", {}, "prompt chosen rejected"),  # pairs before targets
        ("targets", "prompt chosen rejected text", {"completion": "text"}, "prompt - - text"),
        # a column that was given is nothing else
        ("targets", "prompt answer", {"prompt": "answer", "completion": "prompt"}, "answer - - prompt"),
        ("targets", "Input Instruction Output", {}, "Instruction - - Output - - Input"),  # Alpaca's
        ("targets", "input instruction output", {"prompt": "instruction"}, "instruction - - output"),
        ("labels", "prompt chosen rejected", {}, "prompt chosen rejected"),  # for `unpair`
    ],
)  # fmt: skip
def test_columns_are_recognized_by_their_names_unless_the_config_gives_them(trains_on, present, given, found):
    fields = ("prompt", "chosen", "rejected", "completion", "messages", "label", "input")
    expected = {field: column for field, column in zip(fields, found.split(), strict=False) if column != "-"}
    assert find(present, trains_on, **given).used == expected


@pytest.mark.parametrize(
    ("row", "given", "told"),
    [
        # the prompt is in chosen and rejected if they are dialogues, if nothing else could be one, or if told so
        ({**DIALOGUE, **LABELS}, {}, f"{SHARED}; {LEFT_OUT}"),
        ({**CHATS, **NOTE}, {}, f"{SHARED}; not used: note"),
        ({**TEXTS, "score": 0.5}, {}, f"{SHARED}; not used: score"),
        ({**TEXTS, **NOTE}, {"chosen": "chosen", "rejected": "rejected"}, f"{SHARED}; not used: note"),
        # a chat is what its last messages answer
        ({**ANSWERS, **TALK, **NOTE}, {}, "prompt=conversations, chosen=chosen, rejected=rejected; not used: note"),
        # a system turn has words; one word may be a model's name; of two columns, none is a system turn for sure
        ({"system": "Be kind.", **PAIR}, {}, f"{PLAIN}, system=system"),
        ({**PAIR, "system": "gpt-4", "images": ["a.png"]}, {}, f"{PLAIN}; not used: system, images"),
        ({**PAIR, "System": "Be kind.", "system_prompt": "Go."}, {}, f"{PLAIN}; not used: System, system_prompt"),
    ],
)
def test_one_line_names_the_columns_that_are_used_and_those_that_are_not(row, given, told):
    assert find(row, **given).describe(0) == f"columns {told}"


KEY = "dataset_sources.mine.columns"
LISTED = " or ".join(f"({', '.join(form)})" for form in FORMS["pairs"])
UNCLEAR = "{prompt: question, chosen: COLUMN, rejected: COLUMN}"
NAMED = {"answer_a": "It is.", "answer_b": "It was.", "winner": "model_a"}


@pytest.mark.parametrize(
    ("row", "trains_on", "given", "message"),
    [
        (
            "question answer",
            "pairs",
            {},
            f"needs the columns {LISTED}, and it is not clear which of question, answer in rows.csv "
            f"are these: name them, as in '{KEY}={UNCLEAR}'",
        ),
        # a column that may say which response is better is no response, nor is each first response the better one
        ("question text_x text_y winner", "pairs", {}, UNCLEAR),
        ("question one two loser", "pairs", {}, UNCLEAR),
        ("question my_answer_a my_answer_b winner", "pairs", {}, UNCLEAR),
        ("question query answer_a answer_b winner", "pairs", {}, f"as in '{KEY}={{prompt: question}}' (docs"),
        ({**NAMED, "topic": "B or not"}, "pairs", {}, f"begin with: set '{KEY}={{prompt: topic}}'"),
        (
            "query accepted preferred rejected",
            "pairs",
            {},
            f"as in '{KEY}={{prompt: query, chosen: accepted, rejected: rejected}}'",
        ),
        ("a 话题", "targets", {"completion": "话题"}, 'columns={prompt: COLUMN, completion: "话题"}'),
        ("user assistant", "targets", {}, "{prompt: COLUMN, completion: COLUMN}"),
        ("messages thumb", "labels", {}, "columns={messages: messages, label: COLUMN}"),
        ("prompt chosen", "pairs", {"chosen": "chosen", "rejected": "chosen"}, "must be different columns"),
        ("prompt chosen rejected", "pairs", {"chosen": "best"}, "columns gives best, which must be"),
        ("prompt messages", "targets", {"prompt": "prompt", "messages": "messages"}, "needs the columns (prompt, "),
        (
            {"context": "Where is A?", **TEXTS, "score": 0.5},
            "pairs",
            {},
            f"{{prompt: context, chosen: chosen, rejected: rejected}}', or '{KEY}={{chosen: chosen",
        ),
        ({"turns": TALK["conversations"], **NOTE, **ANSWERS}, "pairs", {}, "may be turns or note, or"),
    ],
)
def test_columns_that_a_loss_lacks_or_that_are_not_clear_are_refused_with_the_override(row, trains_on, given, message):
    with refused(re.escape(message)):
        find(row, trains_on, **given)


@pytest.mark.parametrize(
    ("columns", "verdict", "values", "chosen"),
    [  # chosen: of each row; x and y are the columns, - a tie
        ("response_a response_b", "winner", ["a", "B", "tie", "Both bad", "response_a", "Assistant A"], "xy--xx"),
        ("answer_1 answer_2", "preferred", [1, "2", 1.0, "2.0", "answer 1", "neither"], "xyxyx-"),
        ("response_0 response_1", "better_response_id", [0, 1, "1", "tie"], "xyy-"),
        ("model_a_response model_b_response", "winner", ["model_a", "model_b", "model_b_response", "tie"], "xyy-"),
        # ! a record that is refused
        ("answer_1 answer_2 answer_1_text", "winner", [1, 2], "xy"),
        ("response_1 response_2", "winner", [1, 0, 2], "x!y"),
        ("Output_A Output_B", "Preferred Output", ["a", None, "gpt-4", "llama", "-1", "c"], "x!!!!!"),
    ],
)
def test_a_column_may_say_which_response_is_better(columns, verdict, values, chosen, tokenizer):
    x, y, *others = columns.split()
    rows = [{"question": f"Q{i}?", x: f" x{i}", y: f" y{i}", verdict: value} for i, value in enumerate(values)]
    rows = [dict.fromkeys(others, "It is.") | row for row in rows]
    found = recognize(rows, {}, name="mine", origin="rows.csv", trains_on="pairs")
    for row, said in zip(rows, chosen, strict=True):
        if said == "!":
            with refused(f"{verdict} is .*write the name of the better column"):
                found.find_fields(row)
    if "!" not in chosen:
        data = get_custom(rows, "mine", tokenizer)
        targets = [prompt.responses[prompt.examples[0]["chosen"]] for prompt in data.values()]
        assert targets == [f" {said}{i}" for i, said in enumerate(chosen) if said != "-"]
        assert (f"{chosen.count('-')} tie" in data.notes[0]) == ("-" in chosen)


def test_verdicts_that_may_count_the_columns_otherwise_are_refused():
    rows = [{"question": "Is it?", "response_1": "a", "response_2": "b", "winner": n} for n in (0, 1)]
    with refused("winner has the values 0, 1, which do not say whether response_1 or response_2 is better: write"):
        recognize(rows, {}, name="mine", origin="rows.csv", trains_on="pairs")


def test_a_first_system_turn_may_come_after_many_rows_without():
    rows = [{**PAIR, "system": ""}] * 100 + [{**PAIR, "system": "Be very kind."}]
    columns = recognize(rows, {}, name="mine", origin="rows.csv", trains_on="pairs")
    assert columns.used["system"] == "system"


def test_two_columns_may_name_the_better_and_the_worse_response():
    row = {"question": "Is it?", **NAMED, "loser": "model_b"}
    assert find(row).find_fields(row) == {"prompt": "question", "chosen": "answer_a", "rejected": "answer_b"}
    rows = [{**row, "loser": text} for text in ("B", *LABELS)]  # "B" is a text here
    assert not recognize(rows, {}, name="mine", origin="rows.csv", trains_on="pairs").sides


@pytest.mark.parametrize(("where", "field"), [("tokenizer_config.json", "prompt"), ("config.json", "chosen")])
def test_a_token_that_stands_for_an_image_is_refused_in_any_text(where, field, tokenizer, tmp_path):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pic>"]})
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(TINY / "config.json", tmp_path)
    entry = {"config.json": {"image_token_id": tokenizer.convert_tokens_to_ids("<pic>")}}
    entry = entry.get(where, {"image_token": "<pic>", "extra_special_tokens": {"image_token": "<pic>"}})
    change_json(tmp_path / where, **entry)
    chat = {"prompt": [user("Hi?")], **{key: [assistant(text)] for key, text in TEXTS.items()}}
    get_custom([PAIR | {field: "<image>"}], "rows.json", load_tokenizer(str(tmp_path)))  # a word to this model
    for marked in (PAIR | {field: "<pic>"}, chat | {field: [(user if field == "prompt" else assistant)("<pic>")]}):
        with refused("a text has <pic>, which stands for an image"):
            get_custom([marked], "rows", load_tokenizer(str(tmp_path)))


def test_columns_are_checked_before_a_model_is_fetched(run, tmp_path):
    for kinds, message in (
        (["prompt text"] * 150, f"training on pairs needs the columns {LISTED}"),
        ([*["prompt chosen"] * 150, "prompt chosen rejected"], "no/such"),  # a column may come late
    ):
        rows = [{key: f"It is {key} {i}." for key in kind.split()} for i, kind in enumerate(kinds)]
        file = write_rows(tmp_path / "mine.jsonl", rows)
        with refused(re.escape(message)):
            run("run", "model.name_or_path=no/such", f"datasets=[{file}]", "dry_run=true")
