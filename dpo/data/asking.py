"""A prompt that somebody asks outside of training, in the form that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from dpo.data.custom import ASSISTANT
from dpo.data.schema import get_field
from dpo.data.sources import HUB_IDS
from dpo.errors import InputError

HUMAN = "\n\nHuman:"
IN_HH_FORM = frozenset((*HUB_IDS, "demo"))  # datasets whose prompts are dialogues of HUMAN and ASSISTANT
FORMS = ("auto", "chat", "hh", "raw")
Asked = str | list[Mapping[str, str]]


def choose_form(form: str, datasets: Sequence[str], tokenizer: Any) -> str:
    """`auto` resolved: `hh` for a model trained on the built-in datasets, then `chat` if the tokenizer has a template,
    else `raw`. Raises InputError for `chat` without a template."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if form == "chat" and not has_template:
        raise InputError("the tokenizer has no chat template: give --format hh or --format raw")
    if form != "auto":
        return form
    if datasets and set(datasets) <= IN_HH_FORM:
        return "hh"
    return "chat" if has_template else "raw"


def render(asked: Asked, form: str, tokenizer: Any, where: str) -> str:
    """The text that the model is fed for a prompt, which is a string or chat messages `{role, content}`.

    A string is what the human says, except in `raw`, where it is fed as it is, and in `hh` if it is a dialogue already.
    Raises InputError, which names `where` the prompt is from.
    """
    if isinstance(asked, str):
        if not asked.strip():
            raise InputError(f"{where}: the prompt is empty")
        if form == "raw" or (form == "hh" and asked.startswith(HUMAN)):
            return asked
        asked = [{"role": "user", "content": asked}]
    messages = [{key: get_field(message, key, where) for key in ("role", "content")} for message in asked]
    if not messages:
        raise InputError(f"{where}: the prompt has no messages")
    if form == "raw":
        raise InputError(f"{where}: the prompt holds chat messages: give --format chat or --format hh")
    return _as_dialogue(messages, where) if form == "hh" else _as_chat(messages, tokenizer, where)


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
