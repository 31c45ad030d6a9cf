"""The user's own data: what is trained on, and what is refused."""

import math
import re
from decimal import Decimal

import pytest
from support.formats import SKY, assistant, call, system, user
from support.pytests import refused
from support.runs import read_metrics

from dpo.data import custom
from dpo.data.custom import get_custom
from dpo.data.examples import list_examples
from dpo.data.schema import ASSISTANT
from dpo.data.table import number_prompts
from dpo.errors import InputError
from dpo.system import pool

# "<user>Hi" and "<assistant>Hello" joined, with or without EOS after each turn
TURN = "<{{ message.role }}>{{ message.content }}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDS_TURNS_WITH_EOS = "{% for message in messages %}" + TURN + "{{ eos_token }}\n{% endfor %}" + OPEN
ENDS_TURNS_WITH_SEMICOLON = "{% for message in messages %}" + TURN + ";{% endfor %}" + OPEN


HELLO = {"prompt": [user("Hi")], "chosen": [assistant("Hello")], "rejected": [assistant("Go away")]}


PAIR = {"prompt": "Q:", "chosen": " a", "rejected": " b"}
LABEL = {"prompt": "Q:", "completion": " a", "label": True}
RANKED = {"prompt": "Q:", "responses": [" ok", " bad", " good", " so"], "scores": [3, -1, 8.5, 3]}


def take(rows: list[dict], tokenizer, trains_on: str, **options) -> list[dict[str, str]]:
    """The examples made of records, as texts by role."""
    data = get_custom(rows, "mine", tokenizer, trains_on=trains_on, **options)
    prompts = number_prompts([("mine", data)], keep_all=trains_on == "prompts")
    return [prompt.texts(index) for prompt in prompts for _, index in list_examples(prompt)]


def test_sft_learns_every_response_of_a_prompt_that_has_no_pairs(tokenizer):
    rows = [{"question": q, "answer": a} for q, a in (("Q:", " yes"), ("P:", " no"), ("Q:", " sure"))]
    assert take(rows, tokenizer, "targets") == [{"chosen": " yes"}, {"chosen": " sure"}, {"chosen": " no"}]


def test_prompts_to_answer_need_no_responses(tokenizer):
    data = get_custom([{"prompt": q} for q in ("Q:", "P:", "Q:")], "mine", tokenizer, trains_on="prompts")
    assert [(text, prompt.examples) for text, prompt in data.items()] == [("Q:", []), ("P:", [])]
    assert take([PAIR], tokenizer, "prompts") == [{"chosen": " a", "rejected": " b"}]


@pytest.mark.parametrize(("good", "bad"), [(True, False), (1.0, 0.0), (1, -1.0), (" Good", "bad"), ("👍", "👎")])
def test_a_labelled_response_is_chosen_or_rejected(tokenizer, good, bad):
    labelled = (("Q:", " yes", good), ("P:", " no", bad), ("Q:", " hm", bad))
    rows = [{"prompt": prompt, "completion": text, "label": label} for prompt, text, label in labelled]
    assert take(rows, tokenizer, "labels") == [{"chosen": " yes"}, {"rejected": " hm"}, {"rejected": " no"}]


def test_a_rejected_response_may_be_empty(tokenizer):
    assert take([{**PAIR, "rejected": ""}], tokenizer, "pairs") == [{"chosen": " a", "rejected": ""}]
    assert take([{**LABEL, "completion": "", "label": False}], tokenizer, "labels") == [{"rejected": ""}]


def test_kto_trains_on_thumbs_up_and_down(run, printed, run_dir, tmp_path):
    file = tmp_path / "thumbs.csv"
    votes = "".join(f"What is {i % 30}?, It is {i}.,{'down' if i % 4 else 'up'}\n" for i in range(60))
    file.write_text(f"question,answer,thumbs\n{votes}")
    settings = ("loss=kto", f"datasets={file}", "batch_size=4", "n_examples=16")

    run("run", *settings)

    said = printed()
    assert f"{file}: columns prompt=question, completion=answer, label=thumbs\n" in said
    assert re.search(r"train: prompts 20, examples 40, desirable \d+, undesirable \d+,", said)
    assert all(math.isfinite(line["kto/kl/train"]) for line in read_metrics(run_dir, "train"))
    # one prompt has none that its response could be combined with
    file.write_text("question,answer,thumbs\n" + "".join(f"What is {i % 3}?, It is.,up\n" for i in range(60)))
    with refused(r"split of thumbs has 1 prompt, and loss=kto combines .* set holdout=2"):
        run("other", *settings)


def test_pairs_of_a_ranked_list_are_all_of_different_scores_or_the_best_with_the_worst(tokenizer):
    pairs = [tuple(texts.values()) for texts in take([RANKED], tokenizer, "pairs")]
    assert pairs == [(" good", " ok"), (" good", " so"), (" good", " bad"), (" ok", " bad"), (" so", " bad")]
    assert take([RANKED], tokenizer, "pairs", list_pairs="best_worst") == [{"chosen": " good", "rejected": " bad"}]
    assert take([RANKED], tokenizer, "targets") == [{"chosen": " good"}]
    all_equal = {**RANKED, "scores": [0] * 4}
    assert len(take([all_equal, {**RANKED, "prompt": "R:"}], tokenizer, "pairs")) == 5


WEIGHTED = [
    {**PAIR, "weight": 2, "margin": 0.5},
    {**PAIR, "prompt": "R:", "weight": 1, "margin": 0},
    {**PAIR, "rejected": " c", "weight": 0.5, "margin": 3},
]
WEIGHTED_LISTS = [{**RANKED, "weight": 2}, {"prompt": "Q:", "responses": [" a", " b"], "scores": [0, 1], "weight": 3}]


@pytest.mark.parametrize(
    ("rows", "trains_on", "options", "expected"),  # the weights and margins of each prompt
    [
        (WEIGHTED, "pairs", {}, [([2, 0.5], None), ([1], None)]),
        (WEIGHTED, "pairs", {"with_margins": True}, [([2, 0.5], [0.5, 3]), ([1], [0])]),
        (WEIGHTED, "labels", {"unpair": True}, [([2, 2, 0.5, 0.5], None), ([1, 1], None)]),
        (WEIGHTED, "targets", {}, [([0.5], None), ([1], None)]),  # the target is the last one
        (WEIGHTED, "prompts", {}, [(None, None)] * 2),
        (WEIGHTED_LISTS, "pairs", {}, [([2] * 5 + [3], None)]),
        ([{**PAIR, "w": 2}], "pairs", {"columns": {"weight": "w"}}, [([2], None)]),
        ([{**PAIR, "weight": "2", "margin": Decimal(-1)}], "pairs", {"with_margins": True}, [([2], [-1])]),
    ],
)
def test_each_example_has_the_weight_and_margin_of_its_record(rows, trains_on, options, expected, tokenizer):
    data = get_custom(rows, "mine", tokenizer, trains_on=trains_on, **options)
    assert [(prompt.weights, prompt.margins) for prompt in number_prompts([("mine", data)])] == expected


QUESTION = "\n\nHuman: a\n\nAssistant:"
DIALOGUE = f"{QUESTION} b\n\nHuman: c\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # the shared beginning ends in the middle of "there" / "then"; the prompt ends at the word before
        ("Is it there", "Is it then", ("Is it", " there", " then")),
        # one text is the beginning of the other
        ("Go on", "Go on now", ("Go", " on", " on now")),
        # a dialogue is cut at its last shared marker, though " I " is shared beyond it
        (f"{DIALOGUE} I do", f"{DIALOGUE} I don't", (DIALOGUE, " I do", " I don't")),
        # dialogues that part at the first answer are cut there, whatever follows
        (f"{DIALOGUE} d", f"{QUESTION} e", (QUESTION, " b\n\nHuman: c\n\nAssistant: d", " e")),
    ],
)
def test_texts_without_a_prompt_share_their_beginning(tokenizer, chosen, rejected, expected):
    [(prompt, entry)] = get_custom([{"chosen": chosen, "rejected": rejected}], "rows", tokenizer).items()
    assert (prompt, *entry.responses) == expected


def test_what_responses_repeat_of_their_prompt_is_counted_or_warned_about(chat):
    tokenizer = chat(ENDS_TURNS_WITH_SEMICOLON)
    whole = {**HELLO, "rejected": [*HELLO["prompt"], *HELLO["rejected"]]}
    notes = get_custom([whole, HELLO, whole], "mine", tokenizer).notes
    assert notes[1] == "mine: messages of the prompt that responses repeat are taken off; in records: 2 of 3"
    bare = {**PAIR, "prompt": DIALOGUE}
    whole = {**bare, "chosen": f"{DIALOGUE} I do"}
    prefilled = {
        "prompt": [user("Q:"), assistant("So: ")],
        "chosen": [assistant("So: a")],
        "rejected": [assistant("b")],
    }
    for rows, is_said in (
        ([prefilled], True),
        ([whole, bare], True),
        ([whole, bare, bare], False),
        ([{**PAIR, "rejected": "Q: b"}], True),
        ([{**PAIR, "prompt": [user("Q:")], "chosen": "Q: a"}], True),
    ):
        said = get_custom(rows, "mine", tokenizer, chat="never").notes[-1]
        assert "mine: responses begin with the text of their prompt: remove it; in records: 1 of" in said
        assert said.startswith("warning: ") == is_said


def test_keys_of_messages_that_nothing_reads_are_named(chat):
    noted = {"id": 3, "refusal": None, "name": "Al", "weight": 1, "tool_call_id": "7"}
    row = {**HELLO, "prompt": [{**user("Hi"), **noted}], "rejected": [{**assistant("No"), "thought": "Hm."}]}
    reads = ENDS_TURNS_WITH_SEMICOLON.replace("message.content", "(message['name'] or '') + message.content")
    for template, unread in ((ENDS_TURNS_WITH_SEMICOLON, ["id", "name", "thought"]), (reads, ["id", "thought"])):
        notes = {note for note in get_custom([row], "mine", chat(template)).notes if note.startswith("mine: not used")}
        assert notes == {f"mine: not used: {key} of messages; in records: 1 of 1" for key in unread}


TARGET = {"messages": [user("Hi"), assistant("Hello")]}
ALPACA = {"instruction": "Sum up.", "input": "Text", "chosen": " A", "rejected": " B"}
WHOLE = {"chosen": "Q: yes", "rejected": "Q: no"}
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
SHORT = [system("Be short."), user("Hi")]
REFUSES = "{{ raise_exception('roles must alternate') }}"
REFUSED = {
    "pairs": [
        (PAIR, {"prompt": ""}, "the prompt is empty"),
        (PAIR, {"prompt": '[{"role": "user", "content": "Hi"}]'}, "text that holds chat messages"),
        (PAIR, {"chosen": 3}, "chosen is 3, and must be text"),
        (PAIR, {"tools": "[{"}, "tools is '[{', and must be a list"),
        (PAIR, {"chosen": "\ud800"}, "field 'chosen' has an unpaired UTF-16"),
        (PAIR, {"rejected": None}, "rejected is null, and must be text"),
        (WHOLE, {"chosen": "yes"}, "chosen and rejected begin with nothing in common"),
        (WHOLE, {"rejected": HELLO["rejected"]}, "must all be text or all be chat messages"),
        (ALPACA, {"input": 0}, "input is 0, and must be text"),
        (PAIR, {"weight": math.inf}, "weight is inf, and must be"),
        (PAIR, {"weight": "two"}, "weight is 'two', and must be"),
        (PAIR, {"margin": True}, "margin is True, and must be"),
        (PAIR, {"margin": 10**400}, "margin is 1000000"),
        (HELLO, {"prompt": [assistant("So")], "chosen": []}, "must end with a message of the assistant"),
        (HELLO, {"chosen": [user("So"), assistant("A")]}, "begin with an answer and others do not"),
        (HELLO, {"chosen": [assistant(" ")]}, "response to learn is empty"),
        (HELLO, {"chosen": [assistant("Hello"), user("?"), assistant("")]}, "response to learn is empty"),
        (HELLO, {"chosen": [{"role": "assistant", "content": None}]}, "content is missing, and must be text"),
        (HELLO, {"chosen": [{**assistant(""), "content": None, "refusal": "No"}]}, "and only role, refusal: write its"),
        (HELLO, {"chosen": [{"role": "assistant", "function_call": "auto"}]}, "'auto' stands where an object with"),
        (HELLO, {"chosen": [system("Hm."), *HELLO["prompt"], assistant("A")], "prompt": SHORT}, "before the prompt's"),
        (HELLO, {"chosen": ["Hello"]}, "'Hello' stands where an object with the field 'role'"),
        (HELLO, {"prompt": [IMAGE]}, "has a part of type 'image_url', and must be text"),
        (HELLO, {"chosen": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "name is missing"),
        (HELLO, {"chosen": [call("[1]")]}, "arguments of look are [1], and must be an object or JSON"),
    ],
    "labels": [
        (LABEL, {"label": 2}, "label is 2, which does not say"),
        (LABEL, {"completion": " "}, "learn is empty: fill in completion"),
    ],
    "targets": [
        (TARGET, {"messages": [{"from": "bing", "value": "Hi"}, *SKY]}, "is from 'bing', and must be from"),
        (TARGET, {"messages": [assistant("La")]}, "the prompt is empty"),
        (TARGET, {"messages": "Hi"}, "messages is 'Hi', and must be a list"),
    ],
    "lists": [
        (RANKED, {}, "there are 4 with 3: remove some"),
        (RANKED, {"scores": [1, 2, 3, math.inf]}, "scores[3] is inf, and must be"),
        (RANKED, {"scores": [1, 2]}, "has 4 responses and 2 scores"),
        (RANKED, {"responses": [" a", 3], "scores": [1, 2]}, "responses[1] is 3, and must be text"),
        (RANKED, {"responses": [" ", " b"], "scores": [2, 1]}, "learn is empty: fill in responses"),
    ],
}


@pytest.mark.parametrize("trains_on", REFUSED)
def test_a_record_that_cannot_be_trained_on_is_refused_with_what_is_wrong(chat, trains_on):
    for base, change, message in REFUSED[trains_on]:
        tokenizer = chat(ENDS_TURNS_WITH_SEMICOLON)
        with pytest.raises(InputError) as error:
            get_custom([{**base, **change}], "mine", tokenizer, trains_on=trains_on, with_margins=True)
        assert message in str(error.value), change
        assert str(error.value).startswith("dataset 'mine': 1 record that cannot be used\n  - record 1 of mine")


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([HELLO], None, "record 1 of mine: chat messages need a chat template.*: name a tokenizer"),
        ([HELLO], REFUSES, "record 1 of mine: .* template rejects these messages: roles must alternate"),
        ([HELLO, PAIR], ENDS_TURNS_WITH_EOS, "record 2 of mine: it has text and the first records have chat messages"),
        # a prompt that other records have is not taken from what the responses share
        ([PAIR, WHOLE], None, "record 2 of mine: prompt is missing"),
        ([{"messages": SKY}], ENDS_TURNS_WITH_EOS, "the prompt is empty: fill in messages"),
    ],
)
def test_records_of_other_kinds_and_templates_that_fail_are_named(chat, rows, template, message):
    with refused(message):
        get_custom(rows, "mine", chat(template), trains_on="targets" if "messages" in rows[0] else "pairs")


HI_HELLO = ("<user>Hi;<assistant>", ["Hello;", "Go away;"])


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        # OpenAI's files of preferences
        (
            {"input": {"messages": [user("Hi")], "tools": []},
             "preferred_output": HELLO["chosen"], "non_preferred_output": HELLO["rejected"]},
            {},
            HI_HELLO,
        ),
        # UltraFeedback's, whose prompt may differ from its message in white space
        ({key: "Hi \n" if key == "prompt" else [user("Hi"), *HELLO[key]] for key in HELLO}, {}, HI_HELLO),
        # a question that the prompt has is asked again, after the beginning of another answer
        (
            {"prompt": [user("Go on."), assistant("Yes.")],
             **{key: [user("Go on."), assistant(key)] for key in ("chosen", "rejected")}},
            {},
            ("<user>Go on.;<assistant>Yes.;<user>Go on.;<assistant>", ["chosen;", "rejected;"]),
        ),
        # the question is asked twice, and only after the second does the answer go on as it begins
        (
            {"prompt": [user("Hi"), assistant("pre")],
             **{key: [user("Hi"), assistant("No."), user("Hi"), assistant(f"pre {key}")]
                for key in ("chosen", "rejected")}},
            {},
            ("<user>Hi;<assistant>No.;<user>Hi;<assistant>pre", [" chosen;", " rejected;"]),
        ),
        # the assistant speaks twice at the end
        (
            {"messages": [user("Hi"), assistant("Well."), assistant("Hello")]},
            {"trains_on": "targets"},
            ("<user>Hi;<assistant>", ["Well.;<assistant>Hello;"]),
        ),
        # dialogues in HH's format: the assistant speaks twice, or the responses have several turns
        (
            {"chosen": f"{QUESTION} b{ASSISTANT} c", "rejected": f"{QUESTION} b{ASSISTANT} d"},
            {"chat": "always"},
            ("<user>a;<assistant>b\n\n", ["c;", "d;"]),
        ),
        (
            {"chosen": f"{DIALOGUE} d", "rejected": f"{QUESTION} e"},
            {"chat": "always"},
            ("<user>a;<assistant>", ["b;<user>c;<assistant>d;", "e;"]),
        ),
    ],
)  # fmt: skip
def test_turns_of_other_peoples_records_are_rendered_as_turns(row, options, expected, chat):
    [prompt] = get_custom([row], "mine", chat(ENDS_TURNS_WITH_SEMICOLON), **options).values()
    assert (prompt.text, prompt.responses) == expected


def test_the_functions_of_a_record_are_tools_for_the_template(chat):
    template = "{{ tools[0].function.name }}" + ENDS_TURNS_WITH_SEMICOLON
    [prompt] = get_custom([{**HELLO, "functions": [{"name": "look"}]}], "mine", chat(template)).values()
    assert prompt.text == "look<user>Hi;<assistant>"


@pytest.mark.slow
def test_many_records_are_read_in_processes_with_the_same_result(chat, monkeypatch):
    template = chat(ENDS_TURNS_WITH_EOS)
    rows = [{**HELLO, "prompt": [user(f"Hi {i}")], "tools": [{"name": f"look{i}"}]} for i in range(11)]
    rows[7] = {**HELLO, "chosen": [assistant("Hello you")]}
    bad = [*rows, {**HELLO, "chosen": []}]
    outcomes = []
    for n_workers in (1, 2):
        monkeypatch.setattr(custom, "ROWS_PER_WORKER", 12 // n_workers - 1)
        monkeypatch.setattr(pool, "ITEMS_PER_CHUNK", 4)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=n_workers: range(n))
        data = get_custom(rows, "mine", template)
        with pytest.raises(InputError) as refusal:
            get_custom(bad, "mine", template)
        outcomes.append((dict(data), data.notes, str(refusal.value)))
    assert outcomes[0] == outcomes[1]
    assert any("the chat template leaves out tools; in records: 10 of 11" in note for note in outcomes[0][1])
