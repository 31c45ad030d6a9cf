"""Custom data: records of text or messages to pairs and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from dpo.data.columns import find_columns, recognize_columns
from dpo.data.schema import ASSISTANT, Messages, PreferenceData, get_field, is_sharegpt
from dpo.errors import InputError

SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def get_own(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "mine",
    trains_on: str = "pairs",
) -> PreferenceData:
    """Convert own records to preference data.

    Records are `{prompt, chosen, rejected}`, or `{chosen, rejected}` with a common beginning; under SFT also
    `{prompt, completion}`, and `{messages}`, the last of which is the target.

    Fields are strings or chat messages, and all records must be of one kind. Messages are `{role, content}` or
    ShareGPT's `{from, value}`, one or a list, and are rendered with the tokenizer's chat template. If chosen and
    rejected are messages and the prompt is a string, it must be the content of a message that both share
    (UltraFeedback). `columns` maps our field names to those of the records; other fields are recognized by name.
    Raises InputError that names the record and `origin`.
    """
    data: PreferenceData | None = None
    recognized = recognize_columns(find_columns(rows), columns, name=name, origin=origin, trains_on=trains_on)
    used = recognized.used
    for number, row in enumerate(rows, start=1):
        where = f"record {number} of {origin}"
        prompt, responses = _read_fields(row, used, where)
        chat = isinstance(responses[0], list)
        if data is None:
            data = PreferenceData(truncation_mode="keep_start", rendered=chat)
        elif data.rendered != chat:
            raise InputError(f"{where}: earlier records hold {'text' if chat else 'chat messages'}; use one kind")
        if chat:
            messages, answers = _split_messages(prompt, responses, tokenizer, where)
            if "messages" in used and answers[0][-1]["role"] != "assistant":
                raise InputError(f"{where}: the last message is of {answers[0][-1]['role']}, and must be of assistant")
            prompt, *responses = _render(messages, answers, tokenizer, where)
            data.messages[prompt] = [{key: message[key] for key in ("role", "content")} for message in messages]
        elif "messages" in used:
            raise InputError(f"{where}: {used['messages']} must be a list of chat messages and is text")
        elif prompt is None:
            prompt, *responses = split_shared_prompt(*responses)
            if not prompt:
                raise InputError(
                    f"{where}: {used['chosen']} and {used['rejected']} begin with no word in common, which would be "
                    f"the prompt: give a column with the prompt, as dataset_sources.{name}.columns.prompt=COLUMN"
                )
        if not prompt:
            raise InputError(f"{where}: the prompt is empty, so the first response token has no context")
        if len(responses) == 2:
            data.add_pair(prompt, *responses)
        else:
            data.add_target(prompt, *responses)
    data = data if data is not None else PreferenceData(truncation_mode="keep_start")
    if note := recognized.describe(columns):
        data.notes.append(f"{origin}: {note}")
    return data


def _read_fields(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> tuple[Any, list[Any]]:
    """The prompt, or None, and the responses; all text or all chats."""
    fields = {
        ours: _as_messages(get_field(row, theirs, where, (str, list, dict)), where)
        for ours, theirs in used.items()
        if ours != "input"
    }
    prompt, responses = fields.get("prompt"), [field for ours, field in fields.items() if ours != "prompt"]
    if "input" in used and row.get(used["input"]) not in (None, ""):  # below an instruction, as in Alpaca
        prompt = "\n\n".join(get_field(row, used[ours], where) for ours in ("prompt", "input"))
    chat = isinstance(responses[0], list)
    if any(isinstance(response, list) != chat for response in responses) or (isinstance(prompt, list) and not chat):
        kinds = (f"{used[ours]} is {'text' if isinstance(f, str) else 'a chat'}" for ours, f in fields.items())
        raise InputError(f"{where}: {', '.join(kinds)}; they must all be text or all be chat messages")
    return prompt, responses


def _as_messages(field: Any, where: str) -> str | list[Any]:
    """A text as it is, or messages of either form as ours."""
    if isinstance(field, str):
        return field
    field = field if isinstance(field, list) else [field]
    if not any(map(is_sharegpt, field)):
        return field
    speakers = [get_field(message, "from", where) for message in field]
    if unknown := next((speaker for speaker in speakers if speaker not in SPEAKERS), None):
        raise InputError(f"{where}: a message is from {unknown!r}, and must be from one of {', '.join(SPEAKERS)}")
    return [
        {"role": SPEAKERS[speaker], "content": get_field(message, "value", where)}
        for speaker, message in zip(speakers, field, strict=True)
    ]


def split_shared_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts with a common beginning into (prompt, chosen, rejected).

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
    prompt: str | Messages | None, responses: Sequence[Messages], tokenizer: Any, where: str
) -> tuple[Messages, list[Messages]]:
    for messages in (prompt if isinstance(prompt, list) else [], *responses):
        for message in messages:
            get_field(message, "role", where)
            if tokenizer.eos_token and tokenizer.eos_token in get_field(message, "content", where):
                raise InputError(f"{where}: a message contains the EOS token {tokenizer.eos_token!r}: {message!r}")
    if not isinstance(prompt, list):
        text, prompt = prompt, _shared_messages(responses)
        if text is not None and all(message["content"] != text for message in prompt):
            raise InputError(f"{where}: the prompt is not the content of any message before the response")
        responses = [whole[len(prompt) :] for whole in responses]
    if not (prompt and all(responses)):
        raise InputError(f"{where}: a prompt and its responses need at least one message each")
    return prompt, list(responses)


def _shared_messages(dialogues: Sequence[Messages]) -> Messages:
    """Messages with which all dialogues begin, except the last of each."""
    shared = []
    for messages in zip(*(dialogue[:-1] for dialogue in dialogues), strict=False):
        if any(message != messages[0] for message in messages):
            break
        shared.append(messages[0])
    return shared


def _render(prompt: Messages, responses: Sequence[Messages], tokenizer: Any, where: str) -> list[str]:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{where} holds chat messages, but the tokenizer has no chat template: name one that has, as "
            f"model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
        )
    try:
        bare = tokenizer.apply_chat_template(prompt, tokenize=False)
        opened = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        dialogues = [tokenizer.apply_chat_template(prompt + r, tokenize=False) for r in responses]
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise any of these on odd content
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error
    # some generation prompts contain more than a finished turn (such as a thinking tag): keep the common part
    shared = _common_start(opened, *dialogues)
    if not shared.startswith(bare):
        raise InputError(f"{where}: the chat template renders the prompt differently once a response follows it")
    return [shared, *(_without_final_eos(d[len(shared) :], tokenizer.eos_token) for d in dialogues)]


def _without_final_eos(text: str, eos: str | None) -> str:
    """Drop the EOS that ends a turn: tokenization appends one."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
