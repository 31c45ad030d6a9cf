"""Custom preference data: records in the standard format (text or chat messages) to prompts and pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jinja2

from dpo.data.schema import Messages, PreferenceData, get_field
from dpo.errors import InputError
from dpo.settings.validation import COLUMNS

ASSISTANT = "\n\nAssistant:"


def get_own(
    rows: Iterable[Mapping[str, Any]], origin: str, tokenizer: Any, columns: Mapping[str, str] = MappingProxyType({})
) -> PreferenceData:
    """Records `{prompt, chosen, rejected}`, or `{chosen, rejected}` with a common beginning, as preference data.

    Fields are strings, or lists of chat messages `{role, content}` rendered with the tokenizer's chat template; all
    records must be of one kind. `columns` maps our field names to those of the records. With messages, a prompt that is
    a string must be the content of a message that chosen and rejected share (UltraFeedback).
    Raises InputError that names the record and `origin`.
    """
    data: PreferenceData | None = None
    if unknown := columns.keys() - set(COLUMNS):
        raise InputError(f"columns has unknown names {', '.join(sorted(unknown))}; the names are {', '.join(COLUMNS)}")
    for number, row in enumerate(rows, start=1):
        where = f"record {number} of {origin}"
        chosen, rejected = (get_field(row, columns.get(key, key), where, (str, list)) for key in ("chosen", "rejected"))
        key = columns.get("prompt", "prompt")
        has_prompt = "prompt" in columns or row.get(key) is not None
        prompt = get_field(row, key, where, (str, list)) if has_prompt else None
        chat = isinstance(chosen, list)
        if isinstance(rejected, list) != chat or (isinstance(prompt, list) and not chat):
            raise InputError(f"{where}: prompt, chosen and rejected must all be text or all be chat messages")
        if data is None:
            data = PreferenceData(truncation_mode="keep_start", rendered=chat)
        elif data.rendered != chat:
            raise InputError(f"{where}: earlier records hold {'text' if chat else 'chat messages'}; use one kind")
        texts = prompt, chosen, rejected
        if chat:
            messages, better, worse = _split_messages(prompt, chosen, rejected, tokenizer, where)
            texts = _render(messages, better, worse, tokenizer, where)
            data.messages[texts[0]] = [{key: message[key] for key in ("role", "content")} for message in messages]
        if texts[0] is None:
            texts = split_shared_prompt(chosen, rejected)
        if not texts[0]:
            raise InputError(f"{where}: the prompt is empty, so the first response token has no context")
        data.add_pair(*texts)
    return data if data is not None else PreferenceData(truncation_mode="keep_start")


def split_shared_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts with a common beginning.

    A dialogue with a shared `\\n\\nAssistant:` is split at the last one, as in HH. Otherwise the prompt is the common
    beginning up to the last whitespace, so that no word is split and each response starts with its space.
    """
    shared = _common_start(chosen, rejected)
    cut = shared.rfind(ASSISTANT)
    if cut >= 0:
        cut += len(ASSISTANT)
    else:
        cut = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return shared[:cut], chosen[cut:], rejected[cut:]


def _common_start(*texts: str) -> str:
    first, last = min(texts), max(texts)  # in lexicographic order: what these two share, all share
    return next((first[:i] for i, character in enumerate(first) if character != last[i]), first)


def _split_messages(
    prompt: str | Messages | None, chosen: Messages, rejected: Messages, tokenizer: Any, where: str
) -> tuple[Messages, Messages, Messages]:
    """The messages of the prompt, and of both responses to it."""
    for messages in (prompt, chosen, rejected):
        for message in messages if isinstance(messages, list) else ():
            get_field(message, "role", where)
            if tokenizer.eos_token and tokenizer.eos_token in get_field(message, "content", where):
                raise InputError(f"{where}: a message contains the EOS token {tokenizer.eos_token!r}: {message!r}")
    if not isinstance(prompt, list):
        text, whole, prompt = prompt, chosen, _shared_messages(chosen, rejected)
        if text is not None and all(message["content"] != text for message in prompt):
            raise InputError(f"{where}: the prompt is not the content of any message that chosen and rejected share")
        chosen, rejected = whole[len(prompt) :], rejected[len(prompt) :]
    if not (prompt and chosen and rejected):
        raise InputError(f"{where}: prompt, chosen and rejected need at least one message each")
    return prompt, chosen, rejected


def _shared_messages(chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both dialogues begin with; each keeps at least one of its own."""
    shared = []
    for a, b in zip(chosen[:-1], rejected[:-1], strict=False):
        if a != b:
            break
        shared.append(a)
    return shared


def _render(prompt: Messages, chosen: Messages, rejected: Messages, tokenizer: Any, where: str) -> tuple[str, str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{where} holds chat messages, but the tokenizer has no chat template: use text instead")
    try:
        bare = tokenizer.apply_chat_template(prompt, tokenize=False)
        opened = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        dialogues = [tokenizer.apply_chat_template(prompt + r, tokenize=False) for r in (chosen, rejected)]
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise any of these on odd content
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error
    # some generation prompts contain more than a finished turn does (a thinking tag, say): keep what they share
    shared = _common_start(opened, *dialogues)
    if not shared.startswith(bare):
        raise InputError(f"{where}: the chat template renders the prompt differently once a response follows it")
    chosen_text, rejected_text = (_without_final_eos(d[len(shared) :], tokenizer.eos_token) for d in dialogues)
    return shared, chosen_text, rejected_text


def _without_final_eos(text: str, eos: str | None) -> str:
    """Drop the EOS with which some templates end a turn: tokenization appends EOS to every response."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
