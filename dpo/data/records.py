"""Records of custom data in one form, and their formats.

A record has a prompt and its responses, all texts or all chat messages. `read_record` reads it from a row, whatever
its format. `write_record` writes it as a row of a format: to recognize the format of data, its first record is written
in each of `FORMATS`, until the result equals the row that was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, cycle
from typing import Any, NamedTuple

from dpo.data.asking import HH, find_format, render_dialogue, split_turns
from dpo.data.schema import (
    ASSISTANT,
    LABEL_TYPES,
    Messages,
    drop_nulls,
    get_field,
    is_message,
    is_sharegpt,
    read_arguments,
    read_message,
    read_tools,
)
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.choices import NUMBER_FIELDS, PROMPT_PARTS, SYSTEM, TOOLS

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
SHAREGPT_SPEAKERS = {
    "user": "human",
    "assistant": "gpt",
    "function_call": "function_call",
    "tool": "observation",
    "system": "system",
}
# roles of messages whose content is JSON of a call, or of a list of calls, in LLaMA-Factory's and ms-swift's data
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of what is not text
# marks in a text for items of such columns, as in <image>, <|image_pad|>, <start_of_image>, <image_soft_token>, [IMG]
PLACEHOLDER = re.compile(r"<\|?[a-z_]*(?:image|video|audio|vision|img)[a-z_]*(?:_?\d+)?\|?>|\[IMG\]", re.IGNORECASE)
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

RESPONSE_FIELDS = ("messages", "chosen", "rejected", "completion")  # each is one response; messages hold a prompt too
NUMBERS = ("scores", *NUMBER_FIELDS)  # fields that `get_custom` reads itself


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
    prompt = _read_value(row, used["prompt"], where) if "prompt" in used else None
    if "responses" in used:
        values = _read_list(row, used["responses"], where)
    else:
        values = {used[field]: _read_value(row, used[field], where) for field in RESPONSE_FIELDS if field in used}
    system = _read_optional(row, used, SYSTEM, where)
    input_text = _read_optional(row, used, "input", where)
    if input_text:
        get_field(row, used["prompt"], where)  # raises for a prompt of messages, to which no input belongs
    history = _read_history(row, used["history"], where) if "history" in used else ()
    chat = values[used["messages"]] if "messages" in used and "prompt" not in used else prompt
    answers = {column: value for column, value in values.items() if value is not chat}
    if isinstance(chat, list) and all(isinstance(answer, str) for answer in answers.values()):
        # texts that answer a chat are the assistant's next message
        values |= {column: [{"role": "assistant", "content": answer}] for column, answer in answers.items()}
    responses: Sequence[Any] = list(values.values())
    is_chat = any(isinstance(value, list) for value in (prompt, *responses))
    if is_chat and any(isinstance(response, str) for response in responses):
        columns = [used["responses"]] * len(values) if "responses" in used else [*values]
        shown = [(used["prompt"], prompt)] if "prompt" in used else []
        shown += zip(columns, responses, strict=True)
        kinds = dict.fromkeys(f"{column} holds {name_kind(isinstance(value, list))}" for column, value in shown)
        raise InputError(f"{where}: {', '.join(kinds)}; they must all be text or all be chat messages")
    if is_chat:
        prompt, responses = _split_messages(prompt, responses, where)
        last_roles = (response[-1]["role"] for response in responses)
        wrong_roles = [role for role in last_roles if role != "assistant"]
        if wrong_roles:
            raise InputError(
                f"{where}: the last message is from {wrong_roles[0]}, and must be from assistant: remove the message, "
                f"or the record"
            )
        system = "" if prompt[0]["role"] == SYSTEM else system
    elif "messages" in used:
        raise InputError(f"{where}: {used['messages']} must be a list of chat messages, and is text")
    elif prompt is None:
        prompt, *responses = split_shared_prompt(*responses)
        if not prompt:
            raise InputError(
                f"{where}: {used['chosen']} and {used['rejected']} begin with no word in common, which would be the "
                f"prompt: give a column with the prompt, as 'dataset_sources.{name}.columns={{prompt: COLUMN}}'"
            )
    label = _read_label(row, used["label"], where, name) if "label" in used else None
    tools = row.get(used[TOOLS]) if TOOLS in used else None
    if tools and is_chat:  # tools beside texts are not used, so they are not checked
        fix = f"leave the column out with 'dataset_sources.{name}.columns={{tools: null}}'"
        tools = tools if read_tools(row, used[TOOLS], where, fix) else None
    _check_media(row, used, [prompt, *responses, system, input_text, *history], where)
    return Record(prompt, responses, system, input_text, label, "responses" in used, history, tools or None)


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


def _read_list(row: Mapping[str, Any], column: str, where: str) -> dict[str, str | list[Any]]:
    """Read two or more responses, under names such as `responses[0]`."""
    values = get_field(row, column, where, list)
    if len(values) < 2:
        raise InputError(
            f"{where}: {column} has {count(len(values), 'response')}, and must have 2 or more: add some, or remove the "
            f"record"
        )
    items = {f"{column}[{i}]": value for i, value in enumerate(values)}
    return {item: _read_value(items, item, where) for item in items}


def _read_label(row: Mapping[str, Any], column: str, where: str, name: str) -> bool:
    """Read whether a response is desirable."""
    value = get_field(row, column, where, LABEL_TYPES)
    label = str(value).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        has_tag = column != "kto_tag" and "kto_tag" in row  # LLaMA-Factory's column, beside an unrelated `label`
        other_fix = f", or give 'dataset_sources.{name}.columns={{label: kto_tag}}'" if has_tag else ""
        raise InputError(
            f"{where}: {column} is {value!r:.80}, which does not say whether the response is good: write true or "
            f"false (1 or 0, good or bad, up or down), or remove the record{other_fix}"
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
    return next((first[:i] for i, character in enumerate(first) if character != last[i]), first)


def _split_messages(
    prompt: str | Messages | None, responses: Sequence[Messages], where: str
) -> tuple[Messages, list[Messages]]:
    """Split a record's messages into its prompt and its responses.

    A text `prompt` is the user's message if all responses begin with the assistant's. If not, all responses begin with
    the prompt's messages, one of which has the text. Without `prompt`, the first response may be a whole chat.
    """
    are_answers = [bool(messages) and messages[0]["role"] == "assistant" for messages in responses]
    if isinstance(prompt, str) and prompt and all(are_answers):
        prompt = [{"role": "user", "content": prompt}]
    elif prompt is None and not are_answers[0] and all(are_answers[1:]):
        # a chat that ends with its response; in ms-swift's data the other responses answer the same prompt
        prompt, responses = responses[0][:-1], [responses[0][-1:], *responses[1:]]
    if not isinstance(prompt, list):
        shared = _share_messages(responses)
        if prompt is not None and all(message.get("content") != prompt for message in shared):
            raise InputError(
                f"{where}: the prompt is not the content of any message with which the responses begin: add such "
                f"a message, or give no column for the prompt"
            )
        prompt, responses = shared, [dialogue[len(shared) :] for dialogue in responses]
    if not (prompt and all(responses)):
        raise InputError(
            f"{where}: a prompt and its responses need at least one message each: add messages, or remove the record"
        )
    return prompt, list(responses)


def _share_messages(dialogues: Sequence[Messages]) -> Messages:
    """The messages with which all dialogues begin.

    A dialogue's last message is never one of them. Messages are compared as chat templates get them, without nulls.
    """
    shared = []
    for messages in zip(*(dialogue[:-1] for dialogue in dialogues), strict=False):
        first, *others = (read_message(message, "") for message in messages)  # checked before, so without a place
        if any(message != first for message in others):
            break
        shared.append(messages[0])
    return shared


# --- formats -------------------------------------------------------------------------------------------------------

# values of a format
ANY = "texts or chat messages"
TEXTS = "texts that follow one another as they are"
DIALOGUES = "dialogues of Human and Assistant, as in HH's data"
TURNS = "a text for each turn of a chat: a system turn, a question, an answer"
MESSAGES = "chat messages {role, content}"
SHAREGPT = "chat messages {from, value}"
SWIFT = "chat messages {role, content}; the content of a tool_call is JSON"
# responses of a format
ALONE = "a text or a list of messages"
MESSAGE = "one message"
CONTENT = "the content of one message"
WHOLE = "the prompt and the response"


class Format(NamedTuple):
    """The form in which rows hold records.

    Without a column for the prompt, WHOLE responses begin with it, or `messages` do, which end with the chosen or the
    only response. Beside WHOLE responses, a column for the prompt has the text of the last question.
    """

    columns: Mapping[str, str]  # maps fields to columns; rows may lack some
    values: str
    responses: str = ALONE


PAIR = {"chosen": "chosen", "rejected": "rejected"}
SINGLE = {"completion": "completion", "label": "label"}
TRL = {"prompt": "prompt", **PAIR, **SINGLE, TOOLS: "tools"}
CHAT = {"messages": "messages", TOOLS: "tools"}
SYSTEM_TURN = {SYSTEM: "system"}
ALPACA = {
    "prompt": "instruction",
    "input": "input",
    "history": "history",
    **PAIR,
    "completion": "output",
    "label": "kto_tag",
    TOOLS: "tools",
}
CONVERSATIONS = {"prompt": "conversations", **PAIR, **CHAT, "messages": "conversations", "label": "kto_tag"}
ARGILLA = {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response", **SINGLE}
SWIFT_CHAT = {**SYSTEM_TURN, **CHAT, "label": "label"}
FORMATS = {  # in the order of choices.DATA_FORMATS
    "hh": Format(PAIR, DIALOGUES, WHOLE),
    "trl_standard": Format(TRL, TEXTS),
    "trl_conversational": Format(TRL, MESSAGES),
    "trl_implicit": Format({**PAIR, **CHAT}, ANY, WHOLE),
    "ultrafeedback": Format({**SYSTEM_TURN, "prompt": "prompt", **PAIR, **CHAT}, MESSAGES, WHOLE),
    "openrlhf": Format(TRL, ANY),
    "alpaca": Format({**SYSTEM_TURN, **ALPACA}, TURNS),
    "sharegpt": Format({**SYSTEM_TURN, **CONVERSATIONS}, SHAREGPT, MESSAGE),
    "axolotl_chat_template": Format({"prompt": "messages", **PAIR, **CHAT}, MESSAGES, MESSAGE),
    "axolotl_prompt_pairs": Format({**SYSTEM_TURN, **TRL}, TURNS),
    "axolotl_intel": Format({**SYSTEM_TURN, "prompt": "question", **PAIR, **SINGLE}, TURNS),
    "axolotl_argilla": Format({**SYSTEM_TURN, **ARGILLA}, TURNS),
    "axolotl_icr": Format({**SYSTEM_TURN, "prompt": "input", **PAIR}, TURNS),
    "ms_swift": Format({**SWIFT_CHAT, "rejected": "rejected_response"}, SWIFT, CONTENT),
    "ms_swift_messages": Format({**SWIFT_CHAT, "rejected": "rejected_messages"}, SWIFT, WHOLE),
    "ranked": Format({"prompt": "prompt", "responses": "responses", "scores": "scores", TOOLS: "tools"}, ANY),
}


class CannotHoldError(Exception):
    """A format cannot hold a record, because of `chat messages`, for example."""


def recognize_format(row: Mapping[str, Any], used: Mapping[str, str], record: Record) -> str | None:
    """Find the format of a row that was read as `record`.

    None if no format fits, or if the record has no responses.
    """
    if not record.responses:
        return None
    columns = {field: column for field, column in used.items() if field not in NUMBERS}
    compared = [column for field, column in columns.items() if field not in ("label", TOOLS)]  # these are rewritten
    values = {column: row[column] for column in compared if row.get(column)}
    messages = chain.from_iterable(map(_as_messages, values.values()))
    has_call_roles = any(message.get("role") in CALLERS for message in messages)
    for name, candidate in FORMATS.items():
        roles_fit = not has_call_roles or candidate.values == SWIFT  # no other format has these roles
        if not (roles_fit and columns.items() <= candidate.columns.items()):
            continue
        try:
            written, _ = write_record(record, candidate)
        except CannotHoldError:
            continue
        if all(_is_same(value, written.get(column), record) for column, value in values.items()):
            return name
    return None


def _is_same(original: Any, written: Any, record: Record) -> bool:
    """Return whether two values of a column are read alike."""
    if record.is_chat and written == record.responses:  # a ranked list
        original = [[{"role": "assistant", "content": item}] if isinstance(item, str) else item for item in original]
        return list(map(_normalize, original)) == list(map(_normalize, written))
    return _normalize(original) == _normalize(written)


def _normalize(value: Any) -> Any:
    """Read messages, noting if they are ShareGPT's; keep other values."""
    messages = _as_messages(value)
    if not messages:
        return value
    read = [read_message(message, "") for message in _read_value({"": messages}, "", "")]
    return any(map(is_sharegpt, messages)), read


def _as_messages(value: Any) -> list[Any]:
    """Return a value's messages; none if it is something else."""
    messages = value if isinstance(value, list) else [value]
    return messages if all(map(is_message, messages)) else []


def write_record(record: Record, target: Format) -> tuple[dict[str, Any], list[str]]:
    """Write a record as a row of a format.

    Returns the row, and what changed. Raises CannotHoldError.
    """
    columns = target.columns
    lost_keys = _find_lost_keys(record, target)
    record, changes = _change_values(record, target)
    separate = {field: getattr(record, field) for field in (SYSTEM, *PROMPT_PARTS) if field in columns}
    rest = record._replace(**dict.fromkeys(separate, ""))
    prompt, responses = rest.join_prompt(), rest.responses
    is_pair = len(responses) == 2 and not record.is_list
    if record.is_list and "responses" not in columns:
        raise CannotHoldError("ranked lists")
    if record.label is not None and "label" not in columns:
        raise CannotHoldError("labels")
    if target.responses == WHOLE and is_pair and not _is_shared(prompt, responses):
        raise CannotHoldError("prompts that are not the common beginning")

    row = {columns[field]: value for field, value in separate.items() if value}
    if not record.is_chat:
        changes += [f"the {field} is now in the prompt" for field in (SYSTEM, *PROMPT_PARTS) if getattr(rest, field)]
    if record.tools and TOOLS in columns:
        needs_json = target.values in (SHAREGPT, TURNS, SWIFT) and not isinstance(record.tools, str)
        row[columns[TOOLS]] = json.dumps(record.tools, ensure_ascii=False) if needs_json else record.tools
    elif record.tools:
        changes.append("the tools are left out")
    row |= _write_responses(prompt, responses, target, is_pair=is_pair)
    if record.label is not None:
        row[columns["label"]] = record.label
    if target.values in (SHAREGPT, SWIFT):
        row = {column: _write_messages(value, target.values) for column, value in row.items()}
        calls = [call for message in chain(prompt, *responses) for call in message.get("tool_calls") or ()]
        keys_of_calls = {key for call in calls if "function" in call for key in call}
        changes += [f"the {key} of calls is left out" for key in sorted(keys_of_calls - {"type", "function"})]
    return row, changes + [f"the key {key} of messages is left out" for key in sorted(lost_keys)]


def _write_responses(prompt: Any, responses: Sequence[Any], target: Format, *, is_pair: bool) -> dict[str, Any]:
    """Write the columns of the prompt and the responses."""
    columns = target.columns
    fields = ("chosen", "rejected") if is_pair else ("completion",)
    if "responses" in columns and len(responses) > 1:
        return {columns["prompt"]: prompt, columns["responses"]: list(responses)}
    if fields[0] in columns:
        row = {}
        if "prompt" in columns:
            row[columns["prompt"]] = _find_question(prompt) if target.responses == WHOLE else prompt
        for field, response in zip(fields, responses, strict=True):
            row[columns[field]] = _shape_response(prompt, response, target)
        return row
    if "messages" in columns and isinstance(prompt, list):
        if len(responses[0]) > 1 and not (is_pair and target.responses == WHOLE):
            raise CannotHoldError("responses of several messages")
        row = {columns["messages"]: prompt + responses[0]}
        if is_pair:
            row[columns["rejected"]] = _shape_response(prompt, responses[1], target)
        return row
    raise CannotHoldError("single responses")


def _find_lost_keys(record: Record, target: Format) -> set[str]:
    """Find the keys that messages lose where a format writes texts."""
    as_texts: list[Any] = []
    if record.is_chat and target.values in (TURNS, DIALOGUES):
        as_texts = [*record.prompt, *chain(*record.responses)]
    elif record.is_chat and target.responses == CONTENT:
        as_texts = [*chain(*record.responses[1:])]
    return {key for message in as_texts for key in drop_nulls(message)} - {"role", "content", "tool_calls"}


def _shape_response(prompt: Any, response: Any, target: Format) -> Any:
    if target.responses == WHOLE:
        return prompt + response
    if target.responses == ALONE:
        return response
    if len(response) > 1:
        raise CannotHoldError("responses of several messages")
    if target.responses == MESSAGE:
        return response[0]
    if response[0].get("tool_calls"):
        raise CannotHoldError("tool calls")
    return response[0]["content"]


def _is_shared(prompt: Any, responses: Sequence[Any]) -> bool:
    """Return whether the prompt can be read back from whole responses."""
    wholes = [prompt + response for response in responses]
    return prompt == (_share_messages(wholes) if isinstance(prompt, list) else split_shared_prompt(*wholes)[0])


def _find_question(prompt: Messages) -> str:
    """The text of the user's last message."""
    questions = [message["content"] for message in prompt if message["role"] == "user"]
    if not questions:
        raise CannotHoldError("prompts without a user")
    return questions[-1]


def _write_messages(value: Any, values: str) -> Any:
    """Write messages in the form `values`, SHAREGPT or SWIFT.

    In both forms a call is a message of its own. A value without messages is returned unchanged.
    """
    if isinstance(value, dict):
        [message] = _write_messages([value], values)
        return message
    if not isinstance(value, list):
        return value
    written: list[dict[str, Any]] = []
    for message, previous in zip(value, [{}, *value], strict=False):
        if message.get("tool_calls"):
            if previous.get("role") == "assistant":  # both would be read as one turn
                raise CannotHoldError("tool calls after another turn of the assistant")
            written += _write_calls(message, values)
        elif values == SWIFT and message["role"] == "tool":
            written.append({**message, "role": "tool_response"})
        else:
            written.append(message)
    return [_as_sharegpt(message) for message in written] if values == SHAREGPT else written


def _write_calls(message: dict[str, Any], values: str) -> list[dict[str, Any]]:
    """Split a message with calls into its text and its calls."""
    functions = [call.get("function", call) for call in message["tool_calls"]]
    calls: list[Any] = [{**function, "arguments": read_arguments(function, "")} for function in functions]
    text = [{"role": "assistant", "content": message["content"]}] if message.get("content") else []
    if values == SHAREGPT and text:
        raise CannotHoldError("text beside tool calls")
    if values == SHAREGPT and len(calls) > 1:
        calls = [calls]  # one message has the list of all calls
    role = "tool_call" if values == SWIFT else "function_call"
    first, *rest = [*text, *({"role": role, "content": json.dumps(call, ensure_ascii=False)} for call in calls)]
    other_keys = {key: item for key, item in message.items() if key not in ("role", "content", "tool_calls")}
    return [{**first, **other_keys}, *rest]


def _as_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role = message["role"]
    other_keys = {key: item for key, item in message.items() if key not in ("role", "content", "tool_calls")}
    if role not in SHAREGPT_SPEAKERS:
        raise CannotHoldError(f"messages of {role}")
    return {"from": SHAREGPT_SPEAKERS[role], "value": message["content"], **other_keys}


def _change_values(record: Record, target: Format) -> tuple[Record, list[str]]:
    """Change texts to messages or messages to texts, as a format needs.

    Returns the record, and what changed.
    """
    values = target.values
    if values in (MESSAGES, SHAREGPT, SWIFT) and not record.is_chat:
        return _as_chat(record), ["text is now chat messages"]
    if not record.is_chat:
        if values == DIALOGUES and (record.system or not _is_dialogue(record)):
            raise CannotHoldError("texts that are not dialogues of Human and Assistant")
        if values == TURNS and _is_dialogue(record):
            return _as_turns(_as_chat(record), target), ["dialogues are now the texts of their turns"]
        return record, []
    if values == TEXTS:
        raise CannotHoldError("chat messages")
    if values in (TURNS, DIALOGUES) and any(
        message.get("tool_calls") or message["role"] == "tool" for message in chain(record.prompt, *record.responses)
    ):
        raise CannotHoldError("tool calls")
    if values == TURNS:
        return _as_turns(record, target), ["chat messages are now text"]
    if values == DIALOGUES:
        return _as_dialogue(record), ["chat messages are now text"]
    return record, []


def _is_dialogue(record: Record) -> bool:
    return not (record.input or record.history) and find_format(record.prompt, rendered=False) == HH


def _as_chat(record: Record) -> Record:
    """Make chat messages of a record's texts.

    A dialogue in HH's format becomes its turns; another prompt becomes one turn of the user, after its history.
    """
    if _is_dialogue(record):
        chats = [split_turns(*_split_last(record.prompt + response)) for response in record.responses]
        prompt = _share_messages(chats)
        responses = [chat[len(prompt) :] for chat in chats]
    else:
        texts = [*chain(*record.history), record._replace(system="", history=()).join_prompt()]
        prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        responses = [[{"role": "assistant", "content": response.strip()}] for response in record.responses]
    return record._replace(prompt=prompt, responses=responses, input="", history=())


def _split_last(dialogue: str) -> tuple[str, str]:
    """Split a dialogue in HH's format before its last answer."""
    before, marker, answer = dialogue.rpartition(ASSISTANT)
    return before + marker, answer


def _as_turns(record: Record, target: Format) -> Record:
    """Make texts of a chat with one question.

    Turns before the question need a format with a column for the history.
    """
    system = [message for message in record.prompt[:1] if message["role"] == SYSTEM]
    *before, question = record.prompt[len(system) :] or [{"role": ""}]  # there may be only a system turn
    roles = [message["role"] for message in (*before, question)]
    turns_alternate = roles == ["user", "assistant"] * (len(before) // 2) + ["user"]
    if not turns_alternate or (before and "history" not in target.columns):
        raise CannotHoldError("several turns before the response")
    if any([message["role"] for message in response] != ["assistant"] for response in record.responses):
        raise CannotHoldError("responses of several messages")
    texts = [message["content"] for message in before]
    return record._replace(
        prompt=question["content"],
        responses=[response[0]["content"] for response in record.responses],
        system=system[0]["content"] if system else record.system,
        history=[list(turn) for turn in zip(texts[::2], texts[1::2], strict=True)],
    )


def _as_dialogue(record: Record) -> Record:
    """Make a dialogue in HH's format of a chat."""
    prompt_messages = record.join_prompt()
    if any(response[0]["role"] != "assistant" for response in record.responses):
        raise CannotHoldError("responses that do not begin with the assistant")
    try:
        prompt = render_dialogue(prompt_messages, "")
        # each ends where another answer of the assistant would begin
        dialogues = [render_dialogue(prompt_messages + response, "") for response in record.responses]
    except InputError as error:
        raise CannotHoldError("turns of other roles than user and assistant") from error
    responses = [dialogue.removesuffix(ASSISTANT)[len(prompt) :] for dialogue in dialogues]
    return record._replace(prompt=prompt, responses=responses)
