"""Custom data: pairs, SFT targets and labelled responses from a user's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from dpo.data.columns import find_columns, recognize_columns
from dpo.data.records import FORMATS, common_start, name_kind, read_record, recognize_format
from dpo.data.schema import Messages, PreferenceData
from dpo.data.sources import iterate_places
from dpo.errors import InputError


def get_custom(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "mine",
    data_format: str | None = None,
    trains_on: str = "pairs",
) -> PreferenceData:
    """Convert custom records to preference data.

    Pairs come from `{prompt, chosen, rejected}`, from `{chosen, rejected}` with a common beginning, the prompt, or from
    `{messages, rejected}`, where the last message is chosen. SFT targets also come from `{prompt, completion}`, and
    from `{messages}`, where the last message is the target; labelled responses from either of these with `label`.
    Prompts to answer come from `{prompt}`. Any of these may have a system turn in `system`.

    All fields are texts, or all are chat messages, which the tokenizer's chat template renders. A message is
    `{role, content}` or ShareGPT's `{from, value}`; one message may stand for a list. If chosen and rejected are
    messages, the prompt may also be a text: the content of a message that both begin with, as in UltraFeedback. If the
    prompt is messages, the responses may also be texts: the assistant's next message. `columns` maps fields to columns;
    other fields are recognized by name, or have the columns of `data_format`, a key of `FORMATS`. Raises InputError,
    which names the record and `origin`.
    """
    data: PreferenceData | None = None
    format_columns = FORMATS[data_format].columns if data_format else None
    options = {"name": name, "origin": origin, "trains_on": trains_on, "format_columns": format_columns}
    recognized = recognize_columns(find_columns(rows), columns, **options)
    used = recognized.used
    for row, where in zip(rows, iterate_places(rows, origin), strict=True):
        record = read_record(row, used, where, name=name)
        if data is None:
            data = PreferenceData(truncation_mode="keep_start", rendered=record.is_chat)
            data_format = data_format or recognize_format(row, used, record)
        elif data.rendered != record.is_chat:
            raise InputError(
                f"{where} holds {name_kind(record.is_chat)}, and earlier records hold {name_kind(not record.is_chat)}: "
                f"use one kind"
            )
        prompt, responses = record.join_prompt(), record.responses
        if record.is_chat:
            messages = prompt
            prompt, responses = _render(messages, responses, tokenizer, where)
            data.messages[prompt] = [{key: message[key] for key in ("role", "content")} for message in messages]
        if not (record.prompt or record.input):
            raise InputError(
                f"{where}: the prompt is empty, so nothing predicts the first token of a response: give the record a "
                f"prompt, or remove it"
            )
        if record.label is not None:
            data.add_labelled(prompt, *responses, is_desirable=record.label)
        elif len(responses) == 2:
            data.add_pair(prompt, *responses)
        elif responses:
            data.add_target(prompt, *responses)
        else:
            data.add_prompt(prompt)
    data = data if data is not None else PreferenceData(truncation_mode="keep_start")
    note = recognized.describe(columns)
    if data_format:
        note = f"format {data_format}" + (f"; {note}" if note else "")
    if note:
        data.notes.append(f"{origin}: {note}")
    return data


def _render(prompt: Messages, responses: Sequence[Messages], tokenizer: Any, where: str) -> tuple[str, list[str]]:
    """Render a prompt and its responses as texts, with the chat template."""
    for message in (*prompt, *(message for response in responses for message in response)):
        if tokenizer.eos_token and tokenizer.eos_token in message["content"]:
            raise InputError(
                f"{where}: a message contains the EOS token {tokenizer.eos_token!r}: remove it from {message!r}"
            )
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{where} holds chat messages, but the tokenizer has no chat template: name one that has, as "
            f"model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
        )
    try:
        closed_prompt = tokenizer.apply_chat_template(prompt, tokenize=False)
        open_prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        dialogues = [tokenizer.apply_chat_template(prompt + r, tokenize=False) for r in responses]
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise any of these on unusual content
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error
    # the generation prompt may have what a finished turn lacks, such as a thinking tag: keep what all begin with
    prompt_text = common_start(open_prompt, *dialogues)
    if not prompt_text.startswith(closed_prompt):
        raise InputError(
            f"{where}: the chat template renders the prompt differently once a response follows it, so the two cannot "
            f"be told apart: name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL, or "
            f"use text instead"
        )
    response_texts = [dialogue[len(prompt_text) :] for dialogue in dialogues]
    return prompt_text, [_remove_final_eos(text, tokenizer.eos_token) for text in response_texts]


def _remove_final_eos(text: str, eos: str | None) -> str:
    """Remove the EOS that ends a turn, because tokenization appends one."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
