"""Forms of prompts: a chat, a dialogue in HH's format, or plain text. Prompts are converted between them."""

import re
from collections import Counter
from collections.abc import Sequence

from dpo.data.schema import ASSISTANT, Messages, Prompt
from dpo.errors import InputError

HUMAN = "\n\nHuman:"
CHAT, HH, RAW = "chat", "hh", "raw"
PROMPT_FORMS = {CHAT: "the tokenizer's chat template", HH: r"\n\nHuman: ...\n\nAssistant:", RAW: "plain text, as it is"}
# what precedes a message of each role in a dialogue in HH's format
SPEAKER_OF = {"user": HUMAN, "assistant": ASSISTANT, "system": "", "developer": ""}
SPEAKER = re.compile(f"({HUMAN}|{ASSISTANT})")
TURN = r"[A-Z]\w{0,15} ?:"  # a speaker's name, as in `USER: Hi ASSISTANT:`
HEADER = re.compile(  # the header of an answer, at the end of a prompt
    # a last line after others: ### Response, Answer (short):, Output =>
    r"\n\s*(#{2,} ?\w.{0,40}|\W{0,3}\w[\w;./-]*(?: \w+| \(\w+\)){0,2} ?(?:[:：]|=>|->)\W{0,2})$"
    r"|(<[^<>\s][^<>\n]*>\w*|\[/INST\])$"  # a control token, perhaps with a role, as in <start_of_turn>model
    rf"|\s({TURN})$"  # a speaker, if an earlier turn has one too
)
FIRST_TURN = re.compile(rf"(?:^|\s){TURN} ")


def share_header(prompts: Sequence[str]) -> bool:
    """Whether more than half of the texts end in the same header of an answer.

    A few may seem to end in one by chance, such as a question that ends in a colon.
    """
    headers = Counter()
    for prompt in prompts:
        match = HEADER.search(prompt.rstrip())
        if match and not (match[3] and not FIRST_TURN.search(prompt, 0, match.start())):
            headers[match[match.lastindex or 0]] += 1  # one group matched: the header
    return 2 * max(headers.values(), default=0) > len(prompts)


def is_dialogue(prompt: str) -> bool:
    """Whether a prompt is a dialogue in HH's format."""
    return prompt.startswith(HUMAN) and prompt.endswith(ASSISTANT)


def is_prefilled(prompt: Messages) -> bool:
    """Whether a prompt ends in the beginning of an answer, which responses continue."""
    return prompt[-1]["role"] == "assistant" and not prompt[-1].get("tool_calls")


def make_chat(prompt: Prompt, answer: str) -> Messages:
    """Return prompt and answer as a chat; the prompt may be a chat, a dialogue in HH's format, or a user's text."""
    if is_dialogue(prompt.text) and not prompt.rendered:
        return split_turns(prompt.text, answer)
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    if is_prefilled(messages):
        *messages, prefill = messages
        return [*messages, {**prefill, "content": prefill["content"] + answer.rstrip()}]
    return [*messages, {"role": "assistant", "content": answer.strip()}]


def split_turns(dialogue: str, answer: str) -> Messages:
    """Split a dialogue in HH's format, and its answer, into messages.

    Turns of one speaker in a row become one message.
    """
    # split gives an empty text, a speaker, a text, a speaker, a text, ..., the speaker of the answer, an empty text
    _, *parts, _ = SPEAKER.split(dialogue)
    messages = []
    for speaker, text in zip(parts[::2], [*parts[1::2], answer], strict=True):
        role = "user" if speaker == HUMAN else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text.strip()}"
        else:
            messages.append({"role": role, "content": text.strip()})
    return messages


def write_dialogue(messages: Messages) -> str:
    """Write messages in HH's format, up to the place where the answer begins or, in a prefilled prompt, continues.

    A system turn is written without a speaker. Raises InputError for calls, and for roles that the format lacks.
    """
    written = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if message.get("tool_calls") or role not in SPEAKER_OF:
            raise InputError(
                f"a dialogue of Human and Assistant has no turn of role {role!r} and no calls: choose the form chat"
            )
        written.append(f"{SPEAKER_OF[role]} {content}".lstrip(" "))
    if not is_prefilled(messages):
        written.append(ASSISTANT)
    return "".join(written)
