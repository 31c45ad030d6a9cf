"""Chat templates: tools, responses of several turns, and what a template changes."""

import json
from datetime import datetime

import pytest
from support.formats import (
    ASK,
    CALL,
    RESULT,
    SKY,
    TOOLS,
    WITH_TOOLS,
    assistant,
    call,
    encode,
    show_scored,
    system,
    user,
)
from support.pytests import refused
from support.runs import TINY
from support.templates import THINKING_WITH_TOOLS, TRIMMED_WITH_TOOLS
from transformers import AutoTokenizer

from dpo.data.custom import DataOptions, get_custom
from dpo.data.examples import make_labels
from dpo.data.prompt_forms import make_chat
from dpo.data.report import SplitCounter
from dpo.data.schema import Prompt, read_messages
from dpo.data.table import number_prompts
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import bind_template, identify_tokenizer
from dpo.settings.keys import ChatPlan

LOOKED_UP = {"prompt": ASK, "chosen": [CALL, RESULT, *SKY], "rejected": [assistant("Green.")], "tools": TOOLS}
EOS = "<|endoftext|>"


def asked(messages, tokenizer, tools=()) -> str:
    """A prompt as `scripts.sample` asks it."""
    return (
        ChatTemplate(tokenizer).render(Prompt("", [], [], messages=read_messages(messages), tools=list(tools)), {}).text
    )


@pytest.mark.parametrize(
    ("chosen", "template", "text", "seen"),
    [
        (
            LOOKED_UP["chosen"],
            WITH_TOOLS,
            f"[look]{EOS}\n<tool>A clear day{EOS}\n<assistant>Blue.",
            f"[look]{EOS}|Blue.{EOS}",
        ),
        (
            [assistant("Hm?"), user("The sky"), *SKY],
            WITH_TOOLS.replace("eos_token", "';'"),
            "Hm?;\n<user>The sky;\n<assistant>Blue.;\n",
            f"Hm?;\n|Blue.;\n{EOS}",
        ),
        # a response may begin with what is not scored
        ([RESULT, *SKY], WITH_TOOLS, None, f"|Blue.{EOS}"),
    ],
)  # fmt: skip
def test_the_turns_of_the_assistant_are_scored_and_results_and_headers_are_not(chosen, template, text, seen, chat):
    tokenizer = chat(template)
    row = {**LOOKED_UP, "chosen": chosen}
    if chosen[0] is RESULT:  # without a prompt, it is the messages that both begin with
        row = {"chosen": [*ASK, CALL, *chosen], "rejected": [*ASK, CALL, {**RESULT, "content": "No."}, *SKY]}
    data = get_custom([row], "mine", tokenizer)
    [entry] = data.values()
    assert text is None or entry.responses[0] == text
    [example] = encode(data, tokenizer)
    assert show_scored(example, tokenizer) == seen
    assert example.n_scored[0] == sum(label != -100 for label in make_labels(*example.responses_with_cuts[0]))


def test_cuts_are_truncated_with_their_response(chat):
    tokenizer = chat(WITH_TOOLS)
    [whole] = encode(get_custom([LOOKED_UP], "mine", tokenizer), tokenizer)
    start, end = whole.cuts[0]
    limits = {"max_prompt_length": 1, "max_length": 1 + start + 2}
    [cut] = encode(get_custom([LOOKED_UP], "mine", tokenizer), tokenizer, **limits)
    assert cut.cuts[0] == (start, min(start + 2, end))


def test_a_prompt_ends_between_tokens(chat):
    """Both responses begin with a special token of the same first letters."""
    tokenizer = chat(
        WITH_TOOLS.replace("[{{ call.function.name }}]", "<tool_call>{{ call.function.name }}").replace(
            "<assistant>{% endif %}", "<assistant><think>{% endif %}"
        )
    )
    tokenizer.add_tokens(["<think>", "<tool_call>"])
    row = {**LOOKED_UP, "chosen": [CALL, RESULT, *SKY], "rejected": [assistant("<think>Green.")]}
    [prompt], [entry] = zip(*get_custom([row], "mine", tokenizer).items(), strict=True)
    assert prompt.endswith("<assistant>")
    assert [response[:11] for response in entry.responses] == ["<tool_call>", "<think>Gree"]


def test_a_response_that_truncation_leaves_unscored_is_refused_before_a_sample_is_drawn(chat):
    results = {"chosen": RESULT, "rejected": {**RESULT, "content": "No."}}
    rows = [{side: [user(f"{i}?"), CALL, result, *SKY] for side, result in results.items()} for i in range(20)]
    tokenizer = chat(WITH_TOOLS)
    data = get_custom(rows, "mine", tokenizer)
    counter = SplitCounter(TextEncoder(tokenizer), DataOptions(max_length=10, max_prompt_length=8))
    with refused("is cut off before the assistant's first word: raise max_length"):
        list(counter.count_texts(number_prompts([("mine", data)])))


def test_tools_reach_the_template_and_make_another_prompt(chat):
    others = [{"type": "function", "function": {"name": "hear"}}]
    # calls as OpenAI writes them, and as Parquet files hold messages
    calls = [{**call('{"at": "sky"}'), "content": None}, {**RESULT, "tool_calls": None}, *SKY]
    rows = [{**LOOKED_UP, "tools": others}, {**LOOKED_UP, "tools": None}, {**LOOKED_UP, "chosen": calls}]
    data = get_custom([LOOKED_UP, *rows], "mine", chat(WITH_TOOLS))
    question = f"<user>Which colour?{EOS}\n<assistant>"
    assert [*data] == [f"(look)\n{question}", f"(hear)\n{question}", question]
    assert [prompt.tools for prompt in data.values()] == [TOOLS, others, None]
    responses = data[f"(look)\n{question}"].responses
    assert responses[:2] == responses[2:]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"at": "sky", "far": None, "in": [{"y": None}]}, '{"at": "sky", "far": null, "in": [{"y": null}]}'),
        ('{"at": "caf\\u00e9", "far": null}', '{"at": "caf\u00e9", "far": null}'),
        ("", "{}"),
    ],
)
@pytest.mark.parametrize("shown", ["call.function.arguments + ''", "call.function.arguments | tojson"])
def test_a_template_gets_arguments_as_text_or_an_object_with_their_nulls(arguments, written, shown, chat):
    tokenizer = chat(WITH_TOOLS.replace("[{{ call.function.name }}]", "[{{ call.function.name + " + shown + " }}]"))
    row = {"prompt": ASK, "chosen": [call(arguments)], "rejected": SKY}
    [entry] = get_custom([row], "mine", tokenizer).values()
    assert entry.responses[0] == f"[look{written}]"
    assert asked([*ASK, call(arguments)], tokenizer).endswith(f"[look{written}]{EOS}\n<assistant>")


END_OF_LAST = "{{ '!' if loop.last and m.role == 'assistant' else ';' }}"


@pytest.mark.parametrize(
    ("template", "seen"),
    [
        # the end of a turn, the header of a result, and its text are others once turns follow
        (WITH_TOOLS.replace("{{ eos_token }}", END_OF_LAST), f"|Blue.!\n{EOS}"),
        # as Gemma 4's, which writes words beside a call below its result
        (
            WITH_TOOLS.replace("<{{ m.role }}>", "{% if m.tool_calls and loop.last %}So.{% endif %}<{{ m.role }}>"),
            f"|Blue.{EOS}",
        ),
        (THINKING_WITH_TOOLS, f"|<think></think>Blue.{EOS}"),
    ],
)
def test_the_last_answer_alone_is_scored_if_earlier_turns_change_and_one_warning_says_so(template, seen, chat):
    tokenizer = chat(template)
    row = {**LOOKED_UP, "rejected": [assistant("Green.")]}
    data = get_custom([row, {**row, "prompt": [user("Which?")]}], "mine", tokenizer)
    warnings = [note for note in data.notes if "only the last answer is scored" in note]
    assert ["differently once others follow, so only" in warning for warning in warnings] == [True]
    assert warnings[0].endswith("; in records: 2 of 2, as in 'Blue.'")
    assert show_scored(encode(data, tokenizer)[0], tokenizer) == seen


@pytest.mark.parametrize(
    "template",
    [
        WITH_TOOLS.replace("<{{ m.role }}>", "<{{ m.role }}>{{ '!' if loop.last else '?' }}"),
        # the last answer is left out
        WITH_TOOLS.replace("for m in messages", "for m in messages if m.content != 'Blue.'"),
    ],
)
def test_a_prompt_that_is_no_prefix_is_refused(template, chat):
    row = {**LOOKED_UP, "prompt": [system("Be kind."), *ASK]}
    row["chosen"] = [{**CALL, "content": "So."}, RESULT, *SKY]
    with refused("renders the prompt differently once a response follows: name a tokenizer"):
        get_custom([row], "mine", chat(template))


@pytest.mark.parametrize("template", [WITH_TOOLS, TRIMMED_WITH_TOOLS, THINKING_WITH_TOOLS])
@pytest.mark.parametrize("begun", ['{"value": ', "a", "\n"])
def test_a_prefilled_answer_is_continued(template, begun, chat):
    """In training, where it is asked for an answer, and in what a reward model gets."""
    tokenizer, prompt = chat(template), [*ASK, assistant(begun)]
    header = f"<user>Which colour?{EOS}\n<assistant>"
    more, said = [user("So?"), *SKY], f"2}}{EOS}\n<user>So?{EOS}\n<assistant>Blue."
    if template is THINKING_WITH_TOOLS:  # in which turns before others would begin otherwise
        header, more, said = f"{header}<think></think>", [], "2}"
    row = {"prompt": prompt, "chosen": [assistant("1}")], "rejected": [assistant("2}"), *more]}
    [(text, entry)] = get_custom([row], "mine", tokenizer).items()
    assert (text, entry.responses) == (
        header + (begun.lstrip() if template is TRIMMED_WITH_TOOLS else begun),
        ["1}", said],
    )
    assert asked(prompt, tokenizer) == text
    stored = Prompt(text, [], [], rendered=True, messages=prompt)
    assert make_chat(stored, "1}") == [*ASK, assistant(f"{begun}1}}")]


DATED = (
    "\n{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }} "
)
ODD = {"none": [None, True], "text": "a'b\"\n%}é😀", "number": -1.5}


WRITES_ODD = DATED + WITH_TOOLS + "{% if enable_thinking is false %}<think></think>{{ odd | tojson }}{% endif %}"
WRITTEN_ODD = f"<think></think>{json.dumps(ODD, ensure_ascii=False)}"
DAY = "2025-02-09"


@pytest.fixture
def bind(chat, tmp_path):
    """A tokenizer with a template from a file, and with the day of a run unless it is exported."""

    def bind(template: str, arguments: dict, **date: str):
        (tmp_path / "template.jinja").write_text(template)
        tokenizer = chat(None)
        bind_template(tokenizer, ChatPlan("auto", str(tmp_path / "template.jinja"), arguments, DAY), **date)
        return tokenizer

    return bind


@pytest.mark.parametrize(
    ("arguments", "begin", "end"),
    [
        ({"date_string": "today"}, "\ntoday <user>", ""),
        ({"enable_thinking": False, "odd": ODD}, "\n09 Feb 2025 <user>", WRITTEN_ODD),
    ],
)
def test_arguments_and_date_are_bound_to_the_template_in_training_and_asking(arguments, begin, end, bind):
    tokenizer = bind(WRITES_ODD, arguments, date=DAY)
    assert asked(ASK, tokenizer) == f"{begin}Which colour?{EOS}\n<assistant>{end}"
    assert identify_tokenizer(tokenizer) is not None


def test_an_exported_template_keeps_arguments_which_a_caller_may_change_and_not_the_date(bind):
    exported = bind(WRITES_ODD, {"enable_thinking": False, "odd": ODD})
    assert exported.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True).endswith(WRITTEN_ODD)
    text = exported.apply_chat_template(ASK, tokenize=False, date_string="now", enable_thinking=True)
    assert text == f"\nnow <user>Which colour?{EOS}\n"
    assert DAY[:4] not in exported.chat_template
    assert identify_tokenizer(exported) is None  # it writes the day on which it is used


@pytest.mark.parametrize("form", ["%d %b %Y", "%R, %-d. %B", "100%%d", "%%%Y%%"])
def test_a_template_writes_the_date_as_strftime_does(form, bind):
    tokenizer = bind(f"{{% set now = strftime_now %}}{{{{ now('{form}') }}}}", {}, date=DAY)
    assert tokenizer.apply_chat_template(ASK, tokenize=False) == datetime.fromisoformat(DAY).strftime(form)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, {}, "chat_template=.* cannot be read: .*No such file"),
        (" \n", {}, "chat_template=.* is empty: write a template into it"),
        (
            "{{ date_string }}",
            {"date_strin": 1},
            "chat_template_args has date_strin, which the chat template does not re",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(text, arguments, message, chat, tmp_path):
    if text is not None:
        (tmp_path / "a").write_text(text)
    with refused(message):
        bind_template(chat(None), ChatPlan("auto", str(tmp_path / "a"), arguments, None))
    with refused("has enable_thinking, which the chat template does not read"):
        bind_template(chat(None), ChatPlan("auto", None, {"enable_thinking": True}, None))


@pytest.mark.parametrize("options", [{"split_special_tokens": True}, {"extra_special_tokens": {"x_token": "<x>"}}])
def test_the_digest_of_a_tokenizer_tells_what_else_gives_other_tokens(options):
    def load(**options: object):
        return AutoTokenizer.from_pretrained(TINY, **options)

    plain, same, other = load(), load(), load(**options)
    same("a")  # using it changes nothing
    digests = [identify_tokenizer(tokenizer) for tokenizer in (plain, same, other)]
    assert None not in digests
    assert [digests[0] == digest for digest in digests] == [True, True, False]


TEXT = {"prompt": "Which colour?", "chosen": " Blue.", "rejected": "  Green."}
SEEN = f"<user>Which colour?{EOS}\n<assistant>", ["Blue.", "  Green."]


def test_texts_get_the_chat_template_and_a_note_says_so(chat):
    data = get_custom([TEXT], "mine", chat(WITH_TOOLS))
    [(prompt, entry)] = data.items()
    assert (prompt, entry.responses, entry.rendered) == (*SEEN, True)
    [note] = [note for note in data.notes if "chat=" in note]
    assert note.startswith("mine: the chat template renders texts (chat=auto); ")
    assert repr(prompt[-60:]) in note


HEADERS = (
    "\nAssistant:",
    "\n### Response:\n",
    "\n**Answer:**",
    "\nRéponse :",
    " [/INST]",
    "<turn>model\n",
    " ASSISTANT:",
)


def list_prompts(end: str, n: int) -> list[str]:
    """80 prompts, of which n have this end."""
    return [f"Q: {i}?{end if i < n else ''}" for i in range(80)]


@pytest.mark.parametrize(
    ("prompts", "key", "is_rendered"),
    [
        *((list_prompts(header, 41), "auto", False) for header in HEADERS),
        (list_prompts(HEADERS[0], 41), "always", True),
        # a few may end so by chance
        (list_prompts(HEADERS[0], 39), "auto", True),
        (["Say: a", "Assistant:"], "auto", True),
        ([f"What is this?{end}" for end in ("\n#endif", "\n12:30:", " in French:", "\n...")], "auto", True),
    ],
)
def test_texts_stay_as_they_are_if_most_prompts_end_in_an_answers_header(prompts, key, is_rendered, chat):
    tokenizer = chat(WITH_TOOLS)
    tokenizer.add_tokens(["<turn>"])
    data = get_custom([{**TEXT, "prompt": prompt} for prompt in prompts], "mine", tokenizer, chat=key)
    assert {prompt.rendered for prompt in data.values()} == {is_rendered}
    assert ([*data] == prompts) == (not is_rendered)
    assert any("without the chat template (chat=auto)" in note for note in data.notes) == (not is_rendered)
