"""Prompts asked outside of training, in the form used in training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

from dpo.data.schema import ASSISTANT, Messages, get_field
from dpo.data.sources import HUB_IDS
from dpo.data.table import Prompt
from dpo.errors import InputError

HUMAN = "\n\nHuman:"
IN_HH_FORM = frozenset((*HUB_IDS, "demo"))  # datasets whose prompts are dialogues in HH's form
CHAT, HH, RAW = "chat", "hh", "raw"
AUTO = "auto"
FORMS = (AUTO, CHAT, HH, RAW)
MEANINGS = {
    CHAT: "the tokenizer's chat template",
    HH: r"\n\nHuman: ...\n\nAssistant:",
    RAW: "plain text, as it is",
}
Asked = str | list[Mapping[str, str]]
TURN = re.compile(f"({HUMAN}|{ASSISTANT})")


def find_format(prompt: str, *, rendered: bool) -> str:
    """The form of a prompt in training: `chat`, `hh` or `raw`.

    `chat` if `rendered` by a chat template, `hh` for a dialogue.
    """
    if rendered:
        return CHAT
    return HH if prompt.startswith(HUMAN) and prompt.endswith(ASSISTANT) else RAW


def common_format(formats: Mapping[str, str | None], datasets: Iterable[str]) -> str | None:
    """The form shared by a run's datasets; None if they differ.

    None too if one is unknown. `formats` has the forms of the user's own data, as the preflight recorded them.
    """
    distinct = {HH if name in IN_HH_FORM else formats.get(name) for name in datasets}
    return distinct.pop() if len(distinct) == 1 else None


def choose_form(form: str, trained_on: str | None, tokenizer: Any) -> str:
    """Resolve `auto` to a form.

    If known, it is the one that the model was trained on; else `chat` if the tokenizer has a template; else `raw`.
    Raises InputError for `chat` without a template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if form == CHAT and not has_template:
        raise InputError("the tokenizer has no chat template: give --format hh or --format raw")
    if form != AUTO:
        return form
    if trained_on in (HH, RAW):
        return trained_on
    return CHAT if has_template else RAW


def render(asked: Asked, form: str, tokenizer: Any, where: str) -> str:
    """Render a prompt as the text that the model is fed.

    The prompt is a string or chat messages `{role, content}`. A string is the human's turn, except in `raw`, and in
    `hh` if it is a dialogue already: then it is fed as it is. Raises InputError that names `where` the prompt is from.
    """
    if isinstance(asked, str):
        if not asked.strip():
            raise InputError(f"{where}: the prompt is empty")
        if form == RAW or (form == HH and asked.startswith(HUMAN)):
            return asked
        asked = [{"role": "user", "content": asked}]
    messages = [{key: get_field(message, key, where) for key in ("role", "content")} for message in asked]
    if not messages:
        raise InputError(f"{where}: the prompt has no messages")
    if form == RAW:
        raise InputError(f"{where}: the prompt holds chat messages: give --format chat or --format hh")
    return _as_dialogue(messages, where) if form == HH else _as_chat(messages, tokenizer, where)


def _as_dialogue(messages: list[dict[str, str]], where: str) -> str:
    speakers = {"user": HUMAN, "assistant": ASSISTANT}
    if unknown := sorted({message["role"] for message in messages} - speakers.keys()):
        raise InputError(f"{where}: a dialogue of Human and Assistant has no role {', '.join(unknown)}")
    turns = (f"{speakers[message['role']]} {message['content'].strip()}" for message in messages)
    return "".join(turns) + ASSISTANT


def _as_chat(messages: list[dict[str, str]], tokenizer: Any, where: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise any of these on odd content
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error


def as_messages(prompt: Prompt, answer: str) -> Messages:
    """A prompt and its answer as messages.

    The prompt becomes the messages it was rendered from, a dialogue's turns, or one user turn.
    """
    form = find_format(prompt.text, rendered=prompt.rendered)
    if form == HH:
        return _turns(prompt.text, answer)
    asked = prompt.messages if form == CHAT and prompt.messages else [{"role": "user", "content": prompt.text}]
    return [*asked, {"role": "assistant", "content": answer.strip()}]


def _turns(dialogue: str, answer: str) -> Messages:
    """Turns of an open dialogue, and the answer.

    Successive turns of one speaker are joined, as templates demand that speakers alternate.
    """
    _, *parts, _ = TURN.split(dialogue)
    messages: Messages = []
    speakers, texts = parts[::2], [*parts[1::2], answer]  # the last speaker is the assistant, whose turn is open
    for speaker, text in zip(speakers, texts, strict=True):
        role = "user" if speaker == HUMAN else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text.strip()}"
        else:
            messages.append({"role": role, "content": text.strip()})
    return messages
