"""Rows of custom data, read as records.

`read_record` reads a row by the fields that it has. Each form of records has a function of its own.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import chain, cycle
from typing import Any

from dpo.data.asking import HH, find_format, split_turns
from dpo.data.schema import (
    ASSISTANT,
    LABEL_TYPES,
    Messages,
    Record,
    get_field,
    is_sharegpt,
    read_message,
    read_tools,
)
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.choices import SYSTEM, TOOLS, WHOLE_PAIR_FIELDS

# the role of each speaker in ShareGPT's messages; messages from CALLERS become calls of the assistant
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "system": "system",
}
# roles of messages whose content is JSON of a call, or of a list of calls, in LLaMA-Factory's and ms-swift's data
CALLERS = ("function_call", "tool_call")
RESULTS = ("tool_response", "function")  # roles of a tool's results in ms-swift's and OpenAI's earlier data
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:.*\}\s*\]\s*$""", re.DOTALL)
# labels in lower case, as text
DESIRABLE = (
    "true", "1", "1.0", "+1", "yes", "good", "positive", "chosen", "desirable", "up", "thumbs up", "thumbs_up", "👍",
)  # fmt: skip
UNDESIRABLE = (
    "false", "0", "0.0", "-1", "no", "bad", "negative", "rejected", "undesirable", "down", "thumbs down", "thumbs_down",
    "👎",
)  # fmt: skip
ANSWER_FIELDS = ("chosen", "rejected", "completion")  # each is one response to the prompt


def read_record(row: Mapping[str, Any], used: Mapping[str, str], where: str, *, name: str) -> Record:
    """Read the record in a row; `used` maps fields to columns.

    Raises InputError, which says `where` the row is, if a field is wrong, or if prompt and responses do not go
    together. `name` is the dataset's, for the message.
    """
    if "messages" in used:
        prompt, responses = _read_conversation(row, used["messages"], where)
    elif "responses" in used:
        answers = _read_list(row, used["responses"], where)
        prompt, responses = _join_answers(row, used["prompt"], answers, where)
    elif "prompt" in used:
        answers = [(used[field], _read_value(row, used[field], where)) for field in ANSWER_FIELDS if field in used]
        prompt, responses = _join_answers(row, used["prompt"], answers, where)
    else:
        prompt, responses = _read_whole_pair(row, used, where, name)
    before, tools = _read_turns_before(row, used, where), ()
    if "input" in used and row.get(used["input"]) not in (None, ""):
        texts = (get_field(row, used[field], where) for field in ("prompt", "input"))
        prompt = "\n\n".join(filter(None, texts))
    if isinstance(prompt, list):
        _check_chat(prompt, responses, where)
        if prompt[0]["role"] != SYSTEM:  # else the turn before it is left over
            prompt, before = before + prompt, []
        if TOOLS in used:  # those beside texts are not used, so they are not checked
            fix = f"leave the column out with 'dataset_sources.{name}.columns={{tools: null}}'"
            tools = read_tools(row, used[TOOLS], where, fix)
    elif TOOLS in used:
        tools = row.get(used[TOOLS]) or ()
    return Record(
        prompt,
        responses,
        label=_read_label(row, used["label"], where) if "label" in used else None,
        scores=_read_scores(row, used, len(responses), where) if "responses" in used else None,
        weight=_read_number(row, used["weight"], where, above_zero=True) if "weight" in used else None,
        margin=_read_number(row, used["margin"], where) if "margin" in used else None,
        before=before,
        tools=tools,
    )


# --- forms of records ----------------------------------------------------------------------------------------------


def _read_conversation(row: Mapping[str, Any], column: str, where: str) -> tuple[Messages, list[Any]]:
    """Read a chat that ends with its response."""
    messages = _read_value(row, column, where)
    if isinstance(messages, str):
        raise InputError(f"{where}: {column} must be a list of chat messages, and is text")
    return messages[:-1], [messages[-1:]]


def _join_answers(
    row: Mapping[str, Any], column: str, answers: Sequence[tuple[str, Any]], where: str
) -> tuple[Any, list[Any]]:
    """Read the prompt that goes with responses, each of which comes with its column.

    Texts that answer a chat are the assistant's next message. A text before messages is the user's message, or, if the
    messages do not begin with the assistant's, the content of one with which all responses begin, as in UltraFeedback.
    """
    prompt = _read_value(row, column, where)
    values = [value for _, value in answers]
    if all(isinstance(value, str) for value in values):
        is_chat = isinstance(prompt, list)
        return prompt, [[{"role": "assistant", "content": text}] for text in values] if is_chat else values
    _check_alike([(column, prompt), *answers], values, where)
    if isinstance(prompt, list):
        return prompt, values
    if prompt and all(messages and messages[0]["role"] == "assistant" for messages in values):
        return [{"role": "user", "content": prompt}], values
    shared, rests = _split_shared_messages(values)
    if all(message["content"] != prompt for message in shared):
        raise InputError(
            f"{where}: the prompt is not the content of any message with which the responses begin: add such a "
            f"message, or give no column for the prompt"
        )
    return shared, rests


def _read_whole_pair(
    row: Mapping[str, Any], used: Mapping[str, str], where: str, name: str
) -> tuple[str | Messages, list[Any]]:
    """Read a pair of which both begin with the prompt, as in HH's data."""
    columns = [used[field] for field in WHOLE_PAIR_FIELDS]
    values = [_read_value(row, column, where) for column in columns]
    if all(isinstance(value, str) for value in values):
        prompt, *responses = split_shared_prompt(*values)
    else:
        _check_alike(zip(columns, values, strict=True), values, where)
        prompt, responses = _split_shared_messages(values)
    if not prompt:
        raise InputError(
            f"{where}: {' and '.join(columns)} begin with no {'word' if prompt == '' else 'message'} in common, which "
            f"would be the prompt: give a column with the prompt, as "
            f"'dataset_sources.{name}.columns={{prompt: COLUMN}}'"
        )
    return prompt, responses


def _check_alike(shown: Iterable[tuple[str, Any]], values: Sequence[Any], where: str) -> None:
    """Raise InputError if some responses are texts and others messages."""
    if any(isinstance(value, str) for value in values):
        kinds = dict.fromkeys(f"{column} holds {name_kind(isinstance(value, list))}" for column, value in shown)
        raise InputError(f"{where}: {', '.join(kinds)}; they must all be text or all be chat messages")


def _check_chat(prompt: Messages, responses: Sequence[Messages], where: str) -> None:
    """Check that a chat has a prompt and answers of the assistant."""
    if not (prompt and all(responses)):
        raise InputError(
            f"{where}: a prompt and its responses need at least one message each: add messages, or remove the record"
        )
    roles = [response[-1]["role"] for response in responses]
    if wrong := [role for role in roles if role != "assistant"]:
        raise InputError(
            f"{where}: the last message is from {wrong[0]}, and must be from assistant: remove the message, or the "
            f"record"
        )


def split_shared_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts with a common beginning into (prompt, chosen, rejected).

    If they share an `\\n\\nAssistant:`, the prompt ends with the last shared one, as in HH. Otherwise the prompt is the
    common beginning up to its last whitespace, so that no word is split and each response starts with a space.
    """
    shared = common_start(chosen, rejected)
    marker_start = shared.rfind(ASSISTANT)
    if marker_start >= 0:
        prompt_length = marker_start + len(ASSISTANT)
    else:
        prompt_length = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return shared[:prompt_length], chosen[prompt_length:], rejected[prompt_length:]


def common_start(*texts: str) -> str:
    """The longest text with which all texts begin."""
    first, last = min(texts), max(texts)  # the texts between them, in lexicographic order, begin as both do
    n = bisect_left(range(1, len(first) + 1), True, key=lambda n: not last.startswith(first[:n]))
    return first[:n]


def _split_shared_messages(dialogues: Sequence[Messages]) -> tuple[Messages, list[Messages]]:
    """Split dialogues into shared first messages, and the rest of each, which is never empty."""
    n = 0
    while all(n < len(dialogue) - 1 and dialogue[n] == dialogues[0][n] for dialogue in dialogues):
        n += 1
    return dialogues[0][:n], [dialogue[n:] for dialogue in dialogues]


def make_chat(record: Record, where: str) -> Record:
    """Make messages of the texts of a record.

    A response loses the one space that separates it from its prompt.
    """
    if find_format(record.prompt, rendered=False) == HH:
        turns = split_turns(record.prompt, "")[:-1]
    else:
        turns = [{"role": "user", "content": record.prompt}]
    answers = [text[1:] if re.match(r" \S", text) else text for text in record.responses]
    return record._replace(
        prompt=[*record.before, *turns],
        responses=[[{"role": "assistant", "content": answer}] for answer in answers],
        before=(),
        tools=read_tools({TOOLS: record.tools}, TOOLS, where),
    )


def is_empty(response: Any) -> bool:
    """Return whether a text or messages say nothing."""
    if isinstance(response, str):
        return not response.strip()
    return not any(
        str(value).strip() for message in response for key, value in message.items() if key != "role" and value
    )


def name_kind(is_chat: bool) -> str:
    return "chat messages" if is_chat else "text"


# --- fields --------------------------------------------------------------------------------------------------------


def _read_value(row: Mapping[str, Any], column: str, where: str) -> str | Messages:
    """Read a text, or messages in our form, whatever their format."""
    value = get_field(row, column, where, (str, list, dict))
    if isinstance(value, str):
        if MESSAGES_AS_TEXT.match(value):
            raise InputError(
                f"{where}: {column} is a text that holds chat messages: write them as a list, in .jsonl or .parquet"
            )
        return value
    originals = value if isinstance(value, list) else [value]
    rename = _rename_sharegpt if any(map(is_sharegpt, originals)) else _rename_role
    messages: Messages = []
    for original in originals:
        message = rename(original, where)
        is_call = message["role"] in CALLERS
        if is_call:
            message = _read_call(message, where)
        if isinstance(message.get("content"), list):
            message = {**message, "content": _join_parts(message["content"], where)}
        message = read_message(message, where)
        if is_call and messages and messages[-1]["role"] == "assistant":  # the call continues that turn
            turn = messages[-1]
            messages[-1] = {**message, **turn, "tool_calls": turn.get("tool_calls", []) + message["tool_calls"]}
        else:
            messages.append(message)
    return messages


def _rename_sharegpt(message: Any, where: str) -> dict[str, Any]:
    """Return ShareGPT's message with our keys and role."""
    speaker = get_field(message, "from", where)
    if speaker not in SHAREGPT_ROLES:
        raise InputError(
            f"{where}: a message is from {speaker!r}, and must be from one of {', '.join(SHAREGPT_ROLES)}: rename the "
            f"speaker, or remove the record"
        )
    other_keys = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**other_keys, "role": SHAREGPT_ROLES[speaker], "content": get_field(message, "value", where)}


def _rename_role(message: Any, where: str) -> dict[str, Any]:
    """Return a message; a tool's result gets our role `tool`."""
    is_result = get_field(message, "role", where) in RESULTS
    return {**message, "role": "tool"} if is_result else message


def _join_parts(parts: list[Any], where: str) -> str:
    """Join the texts of content that is a list of parts."""
    kinds = [get_field(part, "type", where) for part in parts]
    if other := next((kind for kind in kinds if kind != "text"), None):
        raise InputError(f"{where}: content has a part of type {other!r}, and must be text: remove the record")
    return "".join(get_field(part, "text", where) for part in parts)


def _read_call(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert a message of JSON calls to the assistant's with `tool_calls`."""
    text, calls = get_field(message, "content", where), None
    with suppress(ValueError):
        calls = json.loads(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(
            f'{where}: the call of a tool must be JSON like {{"name": ..., "arguments": ...}}, and is {text!r:.80}: '
            f"correct it, or remove the record"
        )
    functions = [{"type": "function", "function": call} for call in calls]
    return {**message, "role": "assistant", "content": "", "tool_calls": functions}


def _read_turns_before(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> Messages:
    """Read the system turn and the history before a prompt; rows may lack either."""
    turns = []
    if SYSTEM in used and row.get(used[SYSTEM]) not in (None, ""):
        turns.append({"role": SYSTEM, "content": get_field(row, used[SYSTEM], where)})
    history = row.get(used["history"]) or [] if "history" in used else []
    is_history = isinstance(history, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in history
    )
    if not is_history:
        raise InputError(
            f"{where}: {used['history']} must be a list of [instruction, response], and is {history!r:.80}: correct "
            f"it, or remove the record"
        )
    roles = cycle(("user", "assistant"))
    return turns + [{"role": role, "content": text} for role, text in zip(roles, chain(*history), strict=False)]


def _read_list(row: Mapping[str, Any], column: str, where: str) -> list[tuple[str, str | Messages]]:
    """Read two or more responses, each with its column."""
    values = get_field(row, column, where, list)
    if len(values) < 2:
        raise InputError(
            f"{where}: {column} has {count(len(values), 'response')}, and must have 2 or more: add some, or remove the "
            f"record"
        )
    items = {f"{column}[{i}]": value for i, value in enumerate(values)}
    return [(column, _read_value(items, item, where)) for item in items]


def _read_scores(row: Mapping[str, Any], used: Mapping[str, str], n_responses: int, where: str) -> list[float]:
    """Read the scores of a ranked list; without a column of scores, its best response comes first."""
    if "scores" not in used:
        return [-float(i) for i in range(n_responses)]
    column = used["scores"]
    values = get_field(row, column, where, list)
    items = {f"{column}[{i}]": value for i, value in enumerate(values)}
    scores = [_as_float(get_field(items, item, where, (int, float))) for item in items]
    if len(scores) != n_responses or not all(map(math.isfinite, scores)):
        raise InputError(
            f"{where}: {column} is {values!r:.80}, and must have a finite number for each of the {n_responses} in "
            f"{used['responses']}: correct it, or remove the record"
        )
    return scores


def _read_label(row: Mapping[str, Any], column: str, where: str) -> bool:
    """Read whether a response is desirable."""
    value = get_field(row, column, where, LABEL_TYPES)
    label = str(value).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        raise InputError(
            f"{where}: {column} is {value!r:.80}, which does not say whether the response is good: write true or "
            f"false (1 or 0, good or bad, up or down), or remove the record"
        )
    return label in DESIRABLE


def _read_number(row: Mapping[str, Any], column: str, where: str, *, above_zero: bool = False) -> float:
    """Read a finite number, which may be text as in CSV."""
    value = row.get(column)
    if isinstance(value, (str, Decimal)):
        with suppress(ValueError):
            value = float(value)
    number = _as_float(get_field({column: value}, column, where, (int, float)))
    if not math.isfinite(number) or (above_zero and number <= 0):
        wanted = "a finite number above 0" if above_zero else "a finite number"
        raise InputError(f"{where}: {column} is {value!s:.80}, and must be {wanted}: correct it, or remove the record")
    return number


def _as_float(value: float) -> float:
    """Return a number as a float, infinity for a huge integer."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
