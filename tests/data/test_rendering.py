"""What of the messages is in the rendered text, which control tokens are refused, and where turns end."""

import json
import re

import pytest
from support.formats import ASK, CALL, SKY, TOOLS, WITH_TOOLS, assistant, call, encode, show_scored, system, tool, user
from support.pytests import refused
from support.templates import (
    BEGIN,
    BY_ROLE,
    CALLS,
    CLOSE,
    FIRST_SYSTEM,
    PLAIN,
    SYSTEM_IN_QUESTION,
    THINKING,
    WITHOUT_THOUGHTS,
    make,
)

from dpo.data.custom import get_custom
from dpo.data.schema import Prompt
from dpo.data.templates import ChatTemplate
from dpo.redaction import shorten

EOS = "<|endoftext|>"
DEVELOPER, CUSTOMER = {"role": "developer", "content": "Be kind."}, {"role": "customer", "content": "Which?"}
GOOD = {"prompt": ASK, "chosen": SKY, "rejected": [assistant("Green.")]}


def read(chosen, tokenizer, prompt=ASK, **more):
    return get_custom([{**GOOD, "prompt": prompt, "chosen": chosen, **more}], "mine", tokenizer)


def warnings_of(data) -> list[str]:
    begin = re.compile("warning: mine: .*?the chat template ")
    return sorted(begin.sub("", note) for note in data.notes if begin.match(note))


@pytest.mark.parametrize(
    ("template", "prompt", "chosen", "said"),
    [
        (
            BY_ROLE,
            [*ASK, assistant("Hm."), tool("42 degrees")],
            [assistant("It has 42 degrees")],
            "content tool of prompts; '42 degrees'",
        ),
        (
            BY_ROLE,
            ASK,
            [assistant("Hm."), tool("A"), *SKY],
            "content tool of responses; 'A'",
        ),
        # two equal texts need two places
        (
            FIRST_SYSTEM,
            [system("Be kind."), *ASK, assistant("Yes?"), system("Be kind."), user("Well?")],
            SKY,
            "content system of prompts; 'Be kind.'",
        ),
        # and a text that is a part of another is not found in it
        (
            BY_ROLE,
            [tool("42"), user("Why 42?")],
            SKY,
            "content tool of prompts; '42'",
        ),
        # a text is found neither before what it follows, nor inside a word
        (
            "It is 26 Jul 2024. " + BY_ROLE,
            [*ASK, assistant("When?"), tool("26 Jul 2024")],
            SKY,
            "content tool of prompts; '26 Jul 2024'",
        ),
        (
            BY_ROLE,
            [*ASK, assistant("Hm."), tool("a")],
            SKY,
            "content tool of prompts; 'a'",
        ),
        (
            make(BEGIN + " {{ m.content | trim }}" + CLOSE),
            ASK,
            [assistant(" return 1")],
            "changes the white space of the content of messages of role assistant in responses; ' return 1'",
        ),
        (
            WITHOUT_THOUGHTS,
            ASK,
            [assistant("<think>\nSo 1.\n</think>\n\nIt is 1.")],
            "thought assistant of responses; 'So 1.\\n'",
        ),
        # words that are written in another way are no reason to refuse the record
        (
            make(BEGIN + "{{ m.content | e }}" + CLOSE),
            [user("x<y")],
            SKY,
            "content user of prompts; 'x<y'",
        ),
        # a template may cut a text at a word in it
        (
            make(BEGIN + "{{ m.content.split('[/THINK]')[-1] }}" + CLOSE),
            ASK,
            [assistant("[THINK]So 1.[/THINK]It is 1.")],
            "content assistant of responses; '[THINK]So 1.[/THINK]It is 1.'",
        ),
        (
            PLAIN,
            ASK,
            [{**SKY[0], "reasoning": "Hm."}],
            "thought assistant of responses; 'Hm.'",
        ),
        (
            PLAIN + "{# tools, tool_calls #}",
            ASK,
            [{**CALL, "content": "I look."}],
            "call assistant of responses; 'look'",
        ),
        (
            WITH_TOOLS,  # which writes the name alone
            ASK,
            [call({"at": "the sky", "far": 12.5})],
            "call assistant of responses; 'the sky'",
        ),
        (
            PLAIN,
            ASK,
            SKY,
            f"leaves out tools; {shorten(str(TOOLS))}",
        ),
        (
            PLAIN.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}"),
            ASK,
            SKY,
            "ends the prompt with a text that responses do not begin with, so it is left out; '<think>'",
        ),
    ],
)  # fmt: skip
def test_what_the_rendered_text_lacks_is_said_by_role_and_part(template, prompt, chosen, said, chat):
    tools = TOOLS if "tools;" in said else None
    expected = re.sub(r"^(\w+) (\w+) of (.*);", r"leaves out the \1 of messages of role \2 in \3;", said)
    expected = expected.replace(";", "; in records: 1 of 1, as in", 1)
    assert warnings_of(read(chosen, chat(template), prompt, tools=tools)) == [expected]


@pytest.mark.parametrize(
    ("template", "prompt", "chosen"),
    [
        *(
            (make(BEGIN + "{{ m.content }}" + template + CLOSE), ASK, [call({"at": 'the "sky"\n', "é": [1.5, None]})])
            for template in CALLS
        ),
        (make(BEGIN + "{{ m.content | tojson }}" + CLOSE), [user('Say "é"\n')], SKY),
        (make(BEGIN + "{{ m.content | tojson(ensure_ascii=true) }}" + CLOSE), [user('Say "é"\n')], SKY),
        (SYSTEM_IN_QUESTION, [system("Be kind."), user("Hi"), user("Well?")], SKY),
        (PLAIN, [system("a"), user("\n"), user("Well?")], [assistant(" a\n")]),
        # thoughts of earlier turns are no part of what is served either
        (
            THINKING,
            [*ASK, {**SKY[0], "reasoning_content": "Early"}, user("Well?")],
            [{**SKY[0], "reasoning_content": "Late"}],
        ),
        # and are not found in the words of a later turn
        (
            THINKING,
            [*ASK, {**assistant("It is four."), "reasoning_content": "yes"}, user("yes")],
            [{**SKY[0], "reasoning_content": "Late"}],
        ),
        (THINKING, [*ASK, assistant("<think>Early</think>\n\nA"), user("Well?")], [assistant("<think>B</think>\n\nC")]),
    ],
)
def test_what_is_rendered_in_a_spelling_or_place_of_its_own_is_not_left_out(template, prompt, chosen, chat):
    data = read(chosen, chat(template), prompt)
    assert warnings_of(data) == []
    earlier = [note for note in data.notes if "leaves out thoughts of earlier turns" in note]
    assert len(earlier) == (template is THINKING)


def test_a_call_is_not_found_in_the_list_of_tools_before_a_shorter_question(chat):
    assert warnings_of(read(SKY, chat(WITH_TOOLS), [user("Up?"), call({}), tool("Yes")], tools=TOOLS)) == []


def test_below_one_percent_what_is_left_out_is_counted_without_a_warning(chat):
    odd = {**GOOD, "prompt": [DEVELOPER, *ASK]}
    for n, begin in ((99, "warning: "), (100, "")):
        notes = get_custom([odd, *[GOOD] * n], "mine", chat(BY_ROLE)).notes
        [note] = [note for note in notes if "leaves out the content of messages of role developer" in note]
        assert note.startswith(f"{begin}mine: ")
        assert f"in records: 1 of {n + 1}, as in" in note


@pytest.mark.parametrize(
    ("template", "changes", "said"),
    [
        (BY_ROLE, {"prompt": [CUSTOMER]}, "'customer' says in [{'role': 'customer', 'content': 'Which?'}]"),
        (BY_ROLE, {"prompt": [system("Be kind."), CUSTOMER]}, "'customer' says"),
        (BY_ROLE.replace("user", "customer"), {"prompt": [*ASK, CUSTOMER]}, "'user' says"),
        (BY_ROLE, {"chosen": [CALL]}, "'assistant' says"),
        (THINKING, {"chosen": [CALL]}, "'assistant' says"),
        (PLAIN, {"rejected": [assistant("")]}, "'assistant' says"),
        (PLAIN, {"rejected": [assistant(" \n")]}, "'assistant' says"),
        (PLAIN, {"prompt": [user(" ")]}, "'user' says"),
    ],
)
def test_a_question_or_an_answer_of_which_nothing_is_left_is_a_bad_record(template, changes, said, chat):
    with refused(f"renders nothing that role {re.escape(said)}"):
        get_custom([GOOD | changes], "mine", chat(template))


@pytest.mark.parametrize(
    ("written", "role"),
    [("human", "user"), ("gpt", "assistant"), ("User", "user"), ("Assistant", "assistant"), ("developer", "developer")],
)
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_speakers_are_known_by_either_key(written, role, keys, chat):
    message = dict(zip(keys, (written, "Hi"), strict=True))
    [prompt] = read(SKY, chat(PLAIN), [message, *ASK])
    assert prompt.startswith(f"<{role}>Hi{EOS}\n<user>")
    [prompt] = read(SKY, chat(PLAIN), [CUSTOMER, *ASK])  # a role of the template
    assert prompt.startswith(f"<customer>Which?{EOS}")


# --- control tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", [EOS, "<|start|>"])
@pytest.mark.parametrize("place", ["question", "content", "argument", "thought", "quoted", "tool", "text"])
def test_a_control_token_in_a_message_is_a_bad_record_that_names_it(place, control, chat):
    tokenizer = chat(WITH_TOOLS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", '<|"|>']})
    control = '<|"|>' if place == "quoted" else control
    said = f"So {control} it is"
    change, where = {
        "question": ({"prompt": [user(said)]}, "content of a message of role 'user'"),
        "content": ({"chosen": [assistant(said)]}, "content of a message of role 'assistant'"),
        "argument": ({"rejected": [call({said: 1})]}, "tool_calls of a message of role 'assistant'"),
        "thought": ({"chosen": [{**SKY[0], "thinking": said}]}, "thinking of a message of role 'assistant'"),
        "quoted": ({"prompt": [user(said)]}, "content of a message of role 'user'"),
        "tool": ({"tools": json.dumps([{"name": "look", "description": said}])}, "a tool"),
        "text": ({"prompt": said, "chosen": "Blue.", "rejected": "Green."}, "content of a message of role 'user'"),
    }[place]
    good = {**GOOD, "tools": None}
    rows = [good | change] if place == "text" else [good, good | change]
    message = f"record {len(rows)} of mine: {where} has the control token '{control}', which only .*: remove it from"
    with refused(message.replace("|", r"\|")):
        get_custom(rows, "mine", tokenizer)


def test_other_added_tokens_in_messages_are_ordinary(chat):
    tokenizer = chat(PLAIN)
    tokenizer.add_tokens(["<think>"])
    [entry] = read([assistant("<think>Blue.")], tokenizer).values()
    assert entry.responses[0] == "<think>Blue."


def test_a_templates_own_refusal_is_said(chat):
    refusing = make("{% if 'end' in m.content %}{{ raise_exception('no tags') }}{% endif %}")
    with refused("the tokenizer's chat template rejects these messages: no tags"):
        read([assistant("the end")], chat(refusing + PLAIN))


# --- ends of turns -------------------------------------------------------------------------------------------------


def score(chosen, tokenizer) -> str:
    [example] = encode(read(chosen, tokenizer), tokenizer)
    return show_scored(example, tokenizer)


AGAIN = [assistant("Hm?"), user("Sky?"), *SKY]
# as GLM-4's, whose turns end with the next role; as Phi-3's, which writes EOS behind the last turn alone
NEXT_ROLE, LAST_EOS = (
    make(BEGIN + "{{ m.content }}"),
    make(BEGIN + "{{ m.content }}<end>\n") + ("{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"),
)


@pytest.mark.parametrize(
    ("template", "ends", "chosen", "scored"),
    [
        (make(BEGIN + "{{ m.content }}<end>\n"), ["<end>"], SKY, "Blue.<end>"),
        (make(BEGIN + "{{ m.content }}<end>\n"), ["<end>"], AGAIN, "Hm?<end>|Blue.<end>"),
        (make(BEGIN + "{{ m.content }}<end>\n"), [], SKY, f"Blue.<end>\n{EOS}"),
        (make(BEGIN + "{{ m.content }}<end>" + CLOSE), ["<end>"], AGAIN, "Hm?<end>|Blue.<end>"),
        (make(BEGIN + "{{ m.content }}" + CLOSE + "<end>"), ["<end>"], AGAIN, f"Hm?{EOS}|Blue.{EOS}"),
        (LAST_EOS, ["<end>"], AGAIN, "Hm?<end>|Blue.<end>"),
        (LAST_EOS, [], AGAIN, f"Hm?<end>\n|Blue.<end>\n{EOS}"),
        # a thought is a turn of its own, and the answer a letter of the next one's head
        (
            make("{% if m.thinking %}" + BEGIN + "{{ m.thinking }}<end>{% endif %}" + BEGIN + "{{ m.content }}<end>"),
            ["<end>"],
            [{**assistant("a"), "thinking": "Hm."}],
            "Hm.<end><assistant>a<end>",
        ),
        (make(BEGIN + "<call>{{ m.content }}"), ["<call>"], SKY, f"<call>Blue.{EOS}"),
        (NEXT_ROLE, ["<user>"], AGAIN, f"Hm?<user>|Blue.{EOS}"),
        (PLAIN + "<assistant>", [], SKY, f"Blue.{EOS}"),  # the next turn's head, whether it is asked for or not
        # a call ends otherwise than an answer
        (
            make(BEGIN + "{{ m.content }}{% if m.tool_calls %}look<call>{% else %}<end>{% endif %}"),
            ["<end>", "<call>"],
            [{**CALL, "content": "I "}, tool("A"), CALL],
            "I look<call>|look<call>",
        ),
    ],
)
def test_a_turn_is_scored_up_to_the_first_end_token_behind_it(template, ends, chosen, scored, chat):
    tokenizer = chat(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<call>", "<user>"]})
    tokenizer.end_tokens = ends
    assert score(chosen, tokenizer) == scored


@pytest.mark.parametrize(
    ("marks", "scored"),
    [
        (({"weight": 0}, {}), f"|Blue.{EOS}"),
        (({"train": False}, {"train": True}), f"|Blue.{EOS}"),
        (({"weight": 1}, {"weight": 0}), f"Hm?{EOS}"),  # what follows is left out
        (({"weight": 1.0}, {"weight": None}), f"Hm?{EOS}|Blue.{EOS}"),
    ],
)
def test_a_message_of_weight_zero_is_not_scored(marks, scored, chat):
    first, question, last = AGAIN
    assert score([first | marks[0], question | {"weight": 0}, last | marks[1]], chat(PLAIN)) == scored


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ({"weight": 0}, "nothing of a response is scored"),
        ({"content": "Hm!"}, "nothing of a response is scored"),
        ({"weight": 0.5}, "weight is 0.5, and must be 0 or 1"),
        ({"train": "no"}, "train is 'no', and must be 0 or 1"),
    ],
)
def test_a_response_in_which_nothing_is_scored_is_refused(mark, said, chat):
    template = PLAIN.replace("m.content", "m.content.split('!')[-1]")
    with refused(f"record 1 of mine: {said}"):
        get_custom([{"messages": [*ASK, {**SKY[0], **mark}]}], "mine", chat(template), trains_on="targets")


def test_a_begun_answer_of_weight_zero_is_continued_by_one_that_is_scored(chat):
    begun = {**assistant("It is"), "weight": 0}
    record = ChatTemplate(chat(PLAIN)).render(Prompt("", [[assistant(" blue.")]], [], messages=[*ASK, begun]), {})
    assert (record.responses, record.cuts) == ([" blue."], [[]])
