"""Prompts with their responses, the splits that they make up, and the checks of a row's fields."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dpo.errors import InputError
from dpo.numbers import count
from dpo.redaction import shorten
from dpo.system.plain_files import replacing

SPLITS = ("train", "test")
BAD = "bad record"
WARNING_SHARE = 0.01  # a problem in this share of the examples or records is worth a warning
FEWEST_HELD_OUT = 20  # prompts; a smaller test split would say little
LISTED = 20  # bad records that a message names
ASSISTANT = "\n\nAssistant:"  # begins an answer in a dialogue in HH's format
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's thinking; a template reads one of them
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair, which JSON can write and UTF-8 cannot
Messages = list[dict]  # a chat's, with role and content
Row = Mapping | InputError  # an error stands for a row that cannot be parsed
TruncationMode = Literal["keep_start", "keep_end", "keep_turns"]  # how a prompt that is too long is cut
TYPE_NAMES = {str: "text", list: "a list", dict: "a message", int: "a number", float: "a number"}
CALLER = "function_call"  # the speaker of a message that is JSON of a call, or of a list of calls
ROLES = ("system", "developer", "user", "assistant", "tool", CALLER)
ROLE_NAMES = {"human": "user", "gpt": "assistant", "function": "tool"} | {role: role for role in ROLES}  # lower case
SPEAKERS = ROLE_NAMES | {"observation": "tool"}  # ShareGPT's
RENDERED_KEYS = ("content", "tool_calls", *THOUGHTS)  # a message's parts that a chat template may write
# keys of a message that we read or pass on to be rendered; another key has an effect only if the template reads it
READ_KEYS = {"role", "tool_call_id", "weight", "train", *RENDERED_KEYS}


class TableRow(dict):
    """A row of a CSV file, with the number that a spreadsheet shows."""

    number = 0


class Prompt(NamedTuple):
    """A prompt, its responses, and the examples that they make: what rows become, and a line of the table."""

    text: str  # "" until a chat template renders the messages
    responses: list  # texts; messages until they are rendered
    examples: list[dict[str, int]]  # each maps a role to an index into `responses`
    truncation_mode: TruncationMode = "keep_end"
    rendered: bool = False  # by a chat template, so special tokens in the text are intended
    index_in_split: int = 0
    dataset: str = ""
    messages: Messages | None = None  # from which the text is rendered
    weights: list[float] | None = None  # one for each example; None: 1
    margins: list[float] | None = None  # one for each example
    rows: list[int] | None = None  # for each example, the number of its row in the source, from 1
    tools: list | None = None  # that the messages may call
    # for each response, alternately where a part that is not scored begins and ends; None: all text is scored
    cuts: list[list[int]] | None = None
    apart: bool = True  # prompt and response are tokenized apart, as in the reference code; otherwise as one text

    @property
    def written(self) -> str:
        """The prompt as the user wrote it: its text, or the contents of its messages."""
        if self.messages is None:
            return self.text
        return "\n\n".join(message.get("content") or "" for message in self.messages)

    def roles(self, example_index: int) -> dict[str, int]:
        """Map an example's roles to indices into `responses`; {} if the prompt has no examples."""
        return self.examples[example_index] if self.examples else {}

    def texts(self, example_index: int) -> dict[str, str]:
        """Map an example's roles to its responses."""
        return {role: self.responses[i] for role, i in self.roles(example_index).items()}

    @property
    def pieces(self) -> list[list[str]]:
        """Each response in pieces, alternately scored and not scored; the first is scored, and may be empty."""
        all_cuts = self.cuts or [[]] * len(self.responses)
        all_pieces = []
        for response, cuts in zip(self.responses, all_cuts, strict=True):
            limits = pairwise((0, *cuts, len(response)))
            all_pieces.append([response[start:end] for start, end in limits])
        return all_pieces


class Split(dict[str, Prompt]):
    """The prompts of a dataset's split by their text, and what was noticed when they were read."""

    def __init__(self):
        super().__init__()
        self.notes: list[str] = []  # to be printed
        self.bad_records: list[tuple[int, str]] = []  # numbers and reasons of records that are left out

    def add(self, prompt: Prompt, *, replaces: bool = False) -> None:
        """Add a row's prompt. If one has the same text already, append responses to it, or replace it if `replaces`."""
        earlier = self.get(prompt.text)
        if earlier is None or replaces:
            self[prompt.text] = prompt
            return
        n = len(earlier.responses)
        earlier.examples.extend({role: n + i for role, i in example.items()} for example in prompt.examples)
        for name in ("responses", "weights", "margins", "rows", "cuts"):
            if (values := getattr(prompt, name)) is not None:
                getattr(earlier, name).extend(values)
        # other messages may have the same rendered text: the last ones stay
        self[prompt.text] = earlier._replace(messages=prompt.messages, tools=prompt.tools)


def hold_out(prompts: Any, size: float | None = None) -> Any:
    """Take random prompts, at least one, out of the mapping `prompts`, and return them as a test split of its type.

    A `size` below 1 is a share, any other a number of prompts. None means a tenth of the prompts, but at least
    `FEWEST_HELD_OUT`, and at most a third.
    """
    texts = list(prompts)
    if size is None:
        n_held_out = min(max(len(texts) // 10, FEWEST_HELD_OUT), len(texts) // 3)
    else:
        # 0.29 * 100 is a little below 29
        n_held_out = int(size * len(texts) + 1e-9 if size < 1 else size)
    random.Random(42).shuffle(texts)
    selected = set(texts[: max(1, n_held_out)])
    held_out = type(prompts)()
    held_out.update((text, prompts.pop(text)) for text in list(prompts) if text in selected)
    return held_out


# --- bad records ---------------------------------------------------------------------------------------------------


def list_bad(name: str, found: list[tuple[int, str]]) -> str:
    """Write a message that names the first bad records; `found` has the number of each, and the reason."""
    lines = [f"dataset {name!r}: {count(len(found), 'record')} that cannot be used"]
    lines += [reason for _, reason in found[:LISTED]]
    return "\n  - ".join(lines) + ("\n  - ..." if len(found) > LISTED else "")


def write_lines(path: Path, values: Iterable[Mapping]) -> None:
    """Write one line of JSON for each value; without any, remove the file, which an earlier run may have left."""
    if lines := [json.dumps(value, ensure_ascii=False) + "\n" for value in values]:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    else:
        path.unlink(missing_ok=True)


# --- fields and messages -------------------------------------------------------------------------------------------


@contextmanager
def naming_place(where: str) -> Iterator:
    """Begin the message of an InputError that is raised inside with `where`, the place of what is read."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def get_field(row: Row, key: str, *types: type) -> Any:
    """Return `row[key]`, which must be of one of the types; without types, a text.

    Raises InputError for any other value. If `row` is itself an error, which stands for a row, raises that.
    """
    types = types or (str,)
    if isinstance(row, InputError):
        raise row
    if not isinstance(row, Mapping):
        raise InputError(f"{shorten(row)} stands where an object with the field {key!r} is expected")
    value = row.get(key)
    # Python counts a bool as an int; pandas writes null as NaN, which differs from itself
    if not isinstance(value, types) or isinstance(value, bool) or value != value:
        shown = shorten(value)
        if value is None:
            shown = "null" if key in row else "missing"
        wanted = " or ".join(dict.fromkeys(TYPE_NAMES[each] for each in types))
        raise InputError(f"{key} is {shown}, and must be {wanted}: correct it")
    if isinstance(value, str):
        check_unicode(value, f"field {key!r}")
    return value


def check_unicode(text: str, what: str) -> None:
    if surrogate := SURROGATE.search(text):
        raise InputError(f"{what} has an unpaired UTF-16 surrogate at character {surrogate.start() + 1}")


def is_message(value: Any) -> bool:
    """Whether a value is a chat message, ours or ShareGPT's."""
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= value.keys())


def read_messages(value: Any) -> Messages:
    """Read a list of messages, or one, or OpenAI's object that has the list."""
    if isinstance(value, Mapping) and "messages" in value:
        value = value["messages"]
    messages = value if isinstance(value, list) else [value]
    return [_read_message(message) for message in messages]


def _read_message(message: Any) -> dict:
    """Convert a chat message, ours, OpenAI's or ShareGPT's, to what chat templates expect."""
    converted = _drop_nulls(message)
    if is_message(message) and "role" not in message:
        speaker, converted["content"] = get_field(converted, "from"), converted.pop("value", None)
        converted["role"] = SPEAKERS.get(converted.pop("from").lower())
        if converted["role"] is None:
            raise InputError(f"a message is from {speaker!r}, and must be from one of {', '.join(SPEAKERS)}")
    role, content = get_field(converted, "role"), converted.get("content")
    converted["role"] = role = ROLE_NAMES.get(role.lower(), role)  # other roles are the template's own
    if isinstance(content, list):  # OpenAI's content may be a list of parts
        if unknown := {get_field(part, "type") for part in content} - {"text"}:
            raise InputError(f"content has a part of type {unknown.pop()!r}, and must be text")
        converted["content"] = "".join(get_field(part, "text") for part in content)
    if role == CALLER:
        calls = _parse_json(get_field(converted, "content"))
        converted |= {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    calls = converted.pop("tool_calls", None)
    if not calls and "function_call" in converted:
        calls = [_parse_json(converted.pop("function_call"))]
    if calls:
        if not isinstance(calls, list):
            raise InputError(f"tool_calls is {shorten(calls)}, and must be a list")
        converted = {"content": "", **converted, "tool_calls": [_read_call(call) for call in calls]}
    for key in ("weight", "train"):
        if converted["role"] == "assistant" and converted.get(key) not in (None, 0, 1):
            raise InputError(f"{key} is {shorten(converted[key])}, and must be 0 or 1 (false or true): correct it")
    if "content" not in converted and len(converted) > 1:
        raise InputError(f"a message has no content, and only {', '.join(converted)}: write its text as content")
    # raise InputError for a value that is not text
    for key in ("content", *(key for key in THOUGHTS if key in converted)):
        get_field(converted, key)
    return converted


def is_scored(message: Mapping) -> bool:
    """Whether a message of the assistant is trained on: not if its `weight` (OpenAI's) or `train` is 0 or false."""
    return 0 not in (message.get("weight"), message.get("train"))


def _read_call(call: Any) -> dict:
    """Convert a call to OpenAI's nested form. Arguments may be an object, JSON of one (as OpenAI's are) or missing."""
    # a call that is not nested is the function itself
    outer = _drop_nulls(call) if isinstance(call, Mapping) and "function" in call else {"function": call}
    function = _drop_nulls(outer.get("function"))
    name = get_field(function, "name")
    arguments = _parse_json(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise InputError(f"the arguments of {name} are {shorten(arguments)}, and must be an object or JSON of one")
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def read_tools(row: Mapping, column: str) -> list[dict]:
    """Read a list of tools' schemas, or JSON of such a list; [] if the row has none.

    The schema of a function alone is wrapped in an object of type function, as OpenAI's are.
    """
    tools = _parse_json(row.get(column)) or []
    if not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(
            f"{column} is {shorten(tools)}, and must be a list of function schemas (objects), or JSON of such a "
            f"list; columns={{tools: null}} leaves a column out"
        )
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ]


def _parse_json(value: Any) -> Any:
    """Parse a text that is JSON; return anything else as it is."""
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _drop_nulls(value: Any) -> Any:
    """Copy a message or call without null fields, which mean the same as missing ones; another value stays as it is."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def common_prefix(*texts: str) -> str:
    """Return the longest text with which all texts begin."""
    first, last = min(texts), max(texts)  # the texts between them, in lexicographic order, begin as both do
    # A binary search, as os.path.commonprefix compares one character at a time in Python.
    n = bisect_left(range(1, len(first) + 1), True, key=lambda n: not last.startswith(first[:n]))
    return first[:n]
