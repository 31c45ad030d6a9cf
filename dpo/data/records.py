"""Records of custom data in one form, and their formats.

A record has a prompt and its responses, all texts or all chat messages. `read_record` reads it by the fields that its
row has. `recognize_format` names the format of a row, by its columns and the kind of their values.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, cycle
from typing import Any, NamedTuple

from dpo.data.asking import HH, find_format, split_turns
from dpo.data.schema import (
    ASSISTANT,
    LABEL_TYPES,
    Messages,
    get_field,
    is_sharegpt,
    read_message,
    read_tools,
)
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.choices import FORMATS, NUMBER_FIELDS, SYSTEM, TOOLS, WHOLE_PAIR_FIELDS

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
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of what is not text
# marks in a text for items of such columns, as in <image>, <|image_pad|>, <start_of_image>, <image_soft_token>, [IMG]
PLACEHOLDER = re.compile(r"<\|?[a-z_]*(?:image|video|audio|vision|img)[a-z_]*(?:_?\d+)?\|?>|\[IMG\]", re.IGNORECASE)
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
RESPONSE_FIELDS = ("messages", *ANSWER_FIELDS)
NUMBERS = ("scores", *NUMBER_FIELDS)  # fields that `get_custom` reads itself
TEXT, MESSAGES, SHAREGPT = "text", "messages", "sharegpt"  # kinds of values


class Record(NamedTuple):
    """A prompt and its responses, all texts or all chat messages."""

    prompt: Any  # a text, or Messages
    responses: Sequence[Any]  # chosen and rejected, a target, or a ranked list; none for a prompt to answer
    system: str = ""  # a system turn that the row has in a column of its own
    input: str = ""  # what an instruction is about, as in Alpaca's data; only with texts
    label: bool | None = None  # whether the one response is desirable
    is_list: bool = False  # whether the responses are a ranked list, which may have only two
    history: Sequence[Sequence[str]] = ()  # [question, answer] before an instruction; only with texts
    tools: Any = None  # that a chat may call: a list of schemas, or such a list as JSON

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list)

    def join_prompt(self) -> Any:
        """The prompt with its system turn, history and input."""
        if isinstance(self.prompt, list):
            system = [{"role": SYSTEM, "content": self.system}] if self.system else []
            return system + self.prompt
        return "\n\n".join(filter(None, (self.system, *chain(*self.history), self.prompt, self.input)))


# --- reading -------------------------------------------------------------------------------------------------------


def read_record(row: Mapping[str, Any], used: Mapping[str, str], where: str, *, name: str) -> Record:
    """Read the record in a row.

    `used` maps fields to columns. Raises InputError, which says `where` the row is, if a field is wrong, or if prompt
    and responses do not go together. `name` is the dataset's, for the message.
    """
    if "messages" in used:
        prompt, responses = _read_conversation(row, used["messages"], where)
    elif "prompt" in used:
        prompt, responses = _read_prompt_with_answers(row, used, where)
    else:
        prompt, responses = _read_whole_pair(row, used, where, name)
    system = _read_optional(row, used, SYSTEM, where)
    input_text = _read_optional(row, used, "input", where)
    if input_text:
        get_field(row, used["prompt"], where)  # raises for a prompt of messages, to which no input belongs
    history = _read_history(row, used["history"], where) if "history" in used else ()
    label = _read_label(row, used["label"], where) if "label" in used else None
    tools = row.get(used[TOOLS]) if TOOLS in used else None
    if isinstance(prompt, list):
        _check_chat(prompt, responses, where)
        system = "" if prompt[0]["role"] == SYSTEM else system
        if tools:  # those beside texts are not used, so they are not checked
            fix = f"leave the column out with 'dataset_sources.{name}.columns={{tools: null}}'"
            tools = tools if read_tools(row, used[TOOLS], where, fix) else None
    _check_media(row, used, [prompt, *responses, system, input_text, *history], where)
    return Record(prompt, responses, system, input_text, label, "responses" in used, history, tools or None)


def _read_conversation(row: Mapping[str, Any], column: str, where: str) -> tuple[Messages, list[Any]]:
    """Read a chat that ends with its response."""
    messages = _read_value(row, column, where)
    if isinstance(messages, str):
        raise InputError(f"{where}: {column} must be a list of chat messages, and is text")
    return messages[:-1], [messages[-1:]]


def _read_prompt_with_answers(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> tuple[Any, list[Any]]:
    """Read a prompt with its responses, if it has any.

    Texts that answer a chat are the assistant's next message. A text before messages is the user's message, or, if the
    messages do not begin with the assistant's, the content of one with which all responses begin, as in UltraFeedback.
    """
    column = used["prompt"]
    prompt = _read_value(row, column, where)
    if "responses" in used:
        answers = _read_list(row, used["responses"], where)
    else:
        answers = [(used[field], _read_value(row, used[field], where)) for field in ANSWER_FIELDS if field in used]
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
    if all(message.get("content") != prompt for message in shared):
        raise InputError(
            f"{where}: the prompt is not the content of any message with which the responses begin: add such a "
            f"message, or give no column for the prompt"
        )
    return shared, rests


def _read_whole_pair(
    row: Mapping[str, Any], used: Mapping[str, str], where: str, name: str
) -> tuple[str | Messages, list[Any]]:
    """Read a pair of which both begin with the prompt."""
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


def _check_media(row: Mapping[str, Any], used: Mapping[str, str], parts: Sequence[Any], where: str) -> None:
    """Raise InputError for a placeholder of an image in a text."""
    columns = [column for column in row if column.lower() in MEDIA and column not in used.values() and row[column]]
    if columns and (placeholder := PLACEHOLDER.search(repr(parts))):
        raise InputError(
            f"{where}: a text has {placeholder[0]}, a placeholder for an item of {', '.join(columns)}, and only text "
            f"is trained: remove the record"
        )


def make_chat(record: Record) -> Record:
    """Make messages of the texts of a record.

    A response loses the one space that separates it from its prompt.
    """
    if find_format(record.prompt, rendered=False) == HH:
        turns = split_turns(record.prompt, "")[:-1]
    else:
        texts = [*chain(*record.history), "\n\n".join(filter(None, (record.prompt, record.input)))]
        turns = [
            {"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts, strict=False)
        ]
    system = [{"role": SYSTEM, "content": record.system}] if record.system else []
    answers = [text[1:] if re.match(r" \S", text) else text for text in record.responses]
    return record._replace(
        prompt=system + turns,
        responses=[[{"role": "assistant", "content": answer}] for answer in answers],
        system="",
        input="",
        history=(),
    )


def is_empty(response: Any) -> bool:
    """Return whether a text or messages say nothing."""
    if isinstance(response, str):
        return not response.strip()
    return not any(
        str(value).strip() for message in response for key, value in message.items() if key != "role" and value
    )


def is_system_unused(row: Mapping[str, Any], used: Mapping[str, str], record: Record) -> bool:
    """Return whether a chat has its own system turn beside the column."""
    return record.is_chat and SYSTEM in used and bool(row.get(used[SYSTEM])) and not record.system


def name_kind(is_chat: bool) -> str:
    return "chat messages" if is_chat else "text"


def _read_value(row: Mapping[str, Any], column: str, where: str) -> str | list[Any]:
    """Read a text, or messages.

    Messages become `{role, content}`, whatever their format. Calls become a part of the assistant's message.
    """
    value = get_field(row, column, where, (str, list, dict))
    if isinstance(value, str):
        if MESSAGES_AS_TEXT.match(value):
            raise InputError(
                f"{where}: {column} is a text that holds chat messages: write them as a list, in .jsonl or .parquet"
            )
        return value
    originals = value if isinstance(value, list) else [value]
    rename = _rename_sharegpt if any(map(is_sharegpt, originals)) else _rename_role
    messages: list[Any] = []
    for original in originals:
        message = rename(original, where)
        is_call = message["role"] in CALLERS
        if is_call:
            message = _read_call(message, where)
        if isinstance(message.get("content"), list):
            message = {**message, "content": _join_parts(message["content"], where)}
        continues_turn = is_call and messages and messages[-1]["role"] == "assistant"
        if continues_turn:
            turn = messages[-1]
            calls = get_field(turn, "tool_calls", where, list) if turn.get("tool_calls") else []
            messages[-1] = {**message, **turn, "tool_calls": [*calls, *message["tool_calls"]]}
        else:
            messages.append(message)
    for message in messages:
        read_message(message, where)
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
    text = get_field(message, "content", where)
    calls = None
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


def _read_optional(row: Mapping[str, Any], used: Mapping[str, str], field: str, where: str) -> str:
    """Read a text that rows may lack; empty if this row does."""
    if field not in used or row.get(used[field]) in (None, ""):
        return ""
    return get_field(row, used[field], where)


def _read_history(row: Mapping[str, Any], column: str, where: str) -> list[Any]:
    """Read the turns before an instruction, which rows may lack."""

    def is_turn(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)

    turns = row.get(column) or []
    if not (isinstance(turns, list) and all(map(is_turn, turns))):
        raise InputError(
            f"{where}: {column} must be a list of [instruction, response], and is {turns!r:.80}: correct it, or remove "
            f"the record"
        )
    return turns


def _read_list(row: Mapping[str, Any], column: str, where: str) -> list[tuple[str, str | list[Any]]]:
    """Read two or more responses, each with its column."""
    values = get_field(row, column, where, list)
    if len(values) < 2:
        raise InputError(
            f"{where}: {column} has {count(len(values), 'response')}, and must have 2 or more: add some, or remove the "
            f"record"
        )
    items = {f"{column}[{i}]": value for i, value in enumerate(values)}
    return [(column, _read_value(items, item, where)) for item in items]


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
    """Split dialogues into shared first messages, and the rest of each.

    A dialogue's last message is never shared. Messages are compared as chat templates get them, without nulls.
    """
    shared = []
    for messages in zip(*(dialogue[:-1] for dialogue in dialogues), strict=False):
        first, *others = (read_message(message, "") for message in messages)  # checked before, so without a place
        if any(message != first for message in others):
            break
        shared.append(messages[0])
    return shared, [dialogue[len(shared) :] for dialogue in dialogues]


def recognize_format(row: Mapping[str, Any], used: Mapping[str, str], record: Record) -> str | None:
    """Find the format of a row that was read as `record`.

    None if no format has its columns and kinds of values, or if it has no responses.
    """
    columns = {field: column for field, column in used.items() if field not in NUMBERS}
    parts = {field: row[column] for field, column in columns.items() if field in ("prompt", *RESPONSE_FIELDS)}
    kinds = {*map(_find_kind, parts.values())}
    chosen = parts.get("chosen")
    is_whole = isinstance(chosen, list) and chosen[0].get("role") != "assistant"
    has_prompt = not parts.keys() <= {*WHOLE_PAIR_FIELDS}
    fits = {
        "hh": not record.is_chat and find_format(record.prompt, rendered=False) == HH,
        "trl_standard": kinds == {TEXT} and has_prompt,
        "trl_conversational": kinds == {MESSAGES} and has_prompt,
        "trl_implicit": kinds in ({TEXT}, {MESSAGES}) and "prompt" not in parts,
        "ultrafeedback": kinds == {TEXT, MESSAGES} and is_whole,
        "alpaca": kinds == {TEXT} and has_prompt,
        "sharegpt": kinds == {SHAREGPT} and has_prompt,
        "ranked": True,
    }
    fitting = (name for name in FORMATS if fits[name] and columns.items() <= FORMATS[name].items())
    return next(fitting, None) if record.responses else None


def _find_kind(value: Any) -> str:
    """Find whether a value is text, messages or ShareGPT's messages."""
    if isinstance(value, str):
        return TEXT
    return SHAREGPT if any(map(is_sharegpt, value if isinstance(value, list) else [value])) else MESSAGES
