"""A prompt and its answer as chat messages."""

import pytest
from support.formats import user

from dpo.data.prompt_forms import make_chat
from dpo.data.schema import Prompt


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        (Prompt(" Once upon\n", [], []), [("user", " Once upon\n")]),
        (
            Prompt("\n\nHuman: Hi \n\nAssistant: Hello!\n\nHuman: And?\n\nAssistant:", [], []),
            [("user", "Hi"), ("assistant", "Hello!"), ("user", "And?")],
        ),
        (  # one speaker twice: templates demand that they alternate
            Prompt("\n\nHuman: Hi\n\nHuman: Hey\n\nAssistant:", [], []),
            [("user", "Hi\n\nHey")],
        ),
        (  # a chat template has rendered it; an HH form in it is the user's
            Prompt("<user>Hi<assistant>", [], [], rendered=True, messages=[user("Hi")]),
            [("user", "Hi")],
        ),
    ],
)
def test_a_prompt_and_an_answer_are_messages_again(prompt, turns):
    said = [(message["role"], message["content"]) for message in make_chat(prompt, " So it is.\n")]
    assert said == [*turns, ("assistant", "So it is.")]
