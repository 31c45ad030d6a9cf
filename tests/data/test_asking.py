"""Prompts in the form that a model was trained on."""

from __future__ import annotations

import copy

import pytest

from dpo.data.asking import as_messages, choose_format, render
from dpo.data.demo import get_demo
from dpo.data.table import Prompt
from dpo.errors import InputError

TALK = [
    {"role": "user", "content": "Good morning."},
    {"role": "assistant", "content": "Good morning."},
    {"role": "user", "content": "Is the ladder still here?"},
]


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    return tokenizer


@pytest.mark.parametrize(
    ("trained_on", "template", "form"),
    [("hh", True, "hh"), ("raw", True, "raw"), ("chat", True, "chat"), ("chat", False, "raw"),
     (None, True, "chat"), (None, False, "raw")],
)  # fmt: skip
def test_auto_follows_the_training_data_then_the_tokenizer(trained_on, template, form, tokenizer, chatty):
    assert choose_format("auto", trained_on, chatty if template else tokenizer) == form
    assert choose_format("hh", trained_on, chatty) == "hh"


def test_a_dialogue_is_as_in_the_data(tokenizer):
    asked = render(TALK, "hh", tokenizer, "here")
    assert asked == (
        "\n\nHuman: Good morning.\n\nAssistant: Good morning.\n\nHuman: Is the ladder still here?\n\nAssistant:"
    )
    last = render("Is the ladder still here?", "hh", tokenizer, "here")
    assert last == "\n\nHuman: Is the ladder still here?\n\nAssistant:"
    assert render(asked, "hh", tokenizer, "here") == asked  # it is one already
    assert all(render(prompt, "hh", tokenizer, "here") == prompt for prompt in list(get_demo("test"))[:9])


def test_a_chat_goes_through_the_template_and_raw_is_as_it_is(chatty):
    assert render("Hello", "chat", chatty, "here") == "[user]Hello[assistant]"
    assert render(TALK, "chat", chatty, "here").endswith(
        "[assistant]Good morning.[user]Is the ladder still here?[assistant]"
    )
    assert render(" Once upon\n", "raw", chatty, "here") == " Once upon\n"


@pytest.mark.parametrize(
    ("asked", "form", "said"),
    [(" ", "raw", "is empty"), ([], "chat", "no messages"), (TALK, "raw", "holds chat messages"),
     ([{"role": "user"}], "chat", "content is missing, and must be text"),
     (["hello"], "chat", "'hello' stands where an object with the field 'role'")],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(asked, form, said, chatty):
    with pytest.raises(InputError, match=f"^line 7: .*{said}"):
        render(asked, form, chatty, "line 7")


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        (Prompt(" Once upon\n", [], [], "keep_start", False), [("user", " Once upon\n")]),
        (
            Prompt("\n\nHuman: Hi \n\nAssistant: Hello!\n\nHuman: And?\n\nAssistant:", [], [], "keep_end", False),
            [("user", "Hi"), ("assistant", "Hello!"), ("user", "And?")],
        ),
        (  # one speaker twice: templates demand that they alternate
            Prompt("\n\nHuman: Hi\n\nHuman: Hey\n\nAssistant:", [], [], "keep_end", False),
            [("user", "Hi\n\nHey")],
        ),
        (  # a chat template has rendered it; an HH form in it is the user's
            Prompt("<user>Hi<assistant>", [], [], "keep_start", True, messages=[{"role": "user", "content": "Hi"}]),
            [("user", "Hi")],
        ),
    ],
)
def test_a_prompt_and_an_answer_are_messages_again(prompt, turns):
    said = [(message["role"], message["content"]) for message in as_messages(prompt, " So it is.\n")]
    assert said == [*turns, ("assistant", "So it is.")]
