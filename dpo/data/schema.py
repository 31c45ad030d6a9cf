"""Records, the data that they make up, and the checks of their fields."""

from __future__ import annotations

import json
import random
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.numbers import count
from dpo.redaction import shorten
from dpo.system.plain_files import replacing

BAD = "bad record"
WARNED_FROM = 0.01  # share of the examples or records
FEWEST_HELD_OUT = 20  # prompts of a test split, which then says something
SHOWN = 20  # bad records, or records of a kind, that a message names
ASSISTANT = "\n\nAssistant:"  # begins an answer in a dialogue in HH's format
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's thinking; a template reads one of them
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair, which JSON can write and UTF-8 cannot
Messages = list[dict]  # of a chat, with role and content
Row = Mapping | InputError  # of a source; the error says why a row cannot be parsed
TruncationMode = Literal["keep_start", "keep_end", "keep_turns"]  # of a prompt that is too long
TYPE_NAMES = {str: "text", list: "a list", dict: "a message", int: "a number", float: "a number"}
CALLER = "function_call"  # the speaker of a message that is JSON of a call, or of a list of calls
ROLES = ("system", "developer", "user", "assistant", "tool", CALLER)
NAMES_OF_ROLES = {"human": "user", "gpt": "assistant", "function": "tool"} | {
    role: role for role in ROLES
}  # in small letters
SPEAKERS = NAMES_OF_ROLES | {"observation": "tool"}  # ShareGPT's
RENDERED = ("content", "tool_calls", *THOUGHTS)  # parts of a message that a chat template may write
READ = {"role", "tool_call_id", "weight", "train", *RENDERED}  # other keys of a message only a template may read


class TableRow(dict):
    """A row of a CSV file, with the number that a spreadsheet shows."""

    number = 0


class Record(NamedTuple):
    """A prompt and its responses, from their row to their examples."""

    prompt: Any  # a text, or Messages until a chat template renders them
    responses: Sequence  # of the same kind
    pairs: Sequence[tuple[int, int]] = ()  # (better, worse), indices into responses
    label: bool | None = None  # whether the one response is desirable
    scores: Sequence[float] = ()  # of a ranked list, higher for better responses
    weight: float | None = None
    margin: float | None = None
    tools: Sequence[dict] = ()  # that a chat may call
    messages: Messages | None = None  # from which a chat template rendered the prompt
    cuts: Sequence[list[int]] = ()  # of each rendered response: see `Prompt.cuts`
    row: int | None = None  # its number in its source, from 1
    noticed: Sequence[tuple[str, str]] = ()  # what a note is to say of it, until it is rendered

    @property
    def best(self) -> int:
        return self.scores.index(max(self.scores)) if self.scores else 0

    @property
    def target(self) -> Any:
        """The response that SFT learns, if there is one."""
        return self.responses[self.best] if self.responses and self.label is not False else None

    def list_examples(self, trains_on: str, list_pairs: str) -> list[dict[str, int]]:
        """Each maps roles to responses: see `table.iterate_prompts`."""
        scores, pairs = self.scores, self.pairs
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        if trains_on == "targets":
            return [{"chosen": i} for i in range(len(self.responses))]
        if trains_on == "lists" and ranked:
            *before, last = ranked
            return [dict(zip(TRAINS_ON["lists"], before, strict=False)) | {"rejected": last}]
        if trains_on == "labels":
            labelled = [] if self.label is None else [{"chosen" if self.label else "rejected": 0}]
            return labelled + [each for better, worse in pairs for each in ({"chosen": better}, {"rejected": worse})]
        if ranked and list_pairs == "best_worst":
            ranked = [self.best, scores.index(min(scores))]
        of_list = [(better, worse) for better, worse in combinations(ranked, 2) if scores[better] > scores[worse]]
        return [{"chosen": better, "rejected": worse} for better, worse in (*pairs, *of_list)]


class Entry(TypedDict):
    responses: list[str]
    pairs: list[tuple[int, int]]  # (better, worse), indices into responses
    sft_target: str
    records: NotRequired[list[Record]]  # of custom data


class PreferenceData(dict[str, Entry]):
    """`{prompt: {responses, pairs, sft_target}}`, and how to tokenize its texts."""

    def __init__(self, *, truncation_mode: TruncationMode, rendered: bool = False, apart: bool = True):
        super().__init__()
        self.truncation_mode = truncation_mode
        self.apart = apart  # as the reference code tokenizes prompt and response; otherwise as one text
        self.rendered = rendered  # by a chat template: EOS in a prompt is the end of a turn
        self.notes: list[str] = []  # about the data, to be printed
        self.bad_records: list[tuple[int, str]] = []  # numbers and reasons of records that are left out
        self.held_out: PreferenceData | None = None  # the test split, beside a train split of the same records

    def add(
        self, prompt: str, responses: Sequence[str], pairs: Sequence[tuple[int, int]], sft_target: str | None
    ) -> Entry:
        """Pairs are indices into these responses; a target replaces the prompt's earlier one."""
        entry = self.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
        first = len(entry["responses"])
        entry["responses"] += responses
        entry["pairs"] += [(first + better, first + worse) for better, worse in pairs]
        if sft_target is not None:
            entry["sft_target"] = sft_target
        return entry

    def hold_out(self, size: float | None = None) -> PreferenceData:
        """Take out random prompts, at least one, as a test split: a share below 1, or so many.

        None: a tenth, at least `FEWEST_HELD_OUT` and at most a third.
        """
        prompts = list(self)
        if size is None:
            n_held_out = min(max(len(prompts) // 10, FEWEST_HELD_OUT), len(prompts) // 3)
        else:
            n_held_out = int(size * len(prompts) + 1e-9 if size < 1 else size)
        random.Random(42).shuffle(prompts)
        selected = set(prompts[: max(1, n_held_out)])
        self.held_out = PreferenceData(truncation_mode=self.truncation_mode, rendered=self.rendered, apart=self.apart)
        self.held_out.update((prompt, self.pop(prompt)) for prompt in list(self) if prompt in selected)
        return self.held_out


# --- bad records ---------------------------------------------------------------------------------------------------


class BadRecordsError(InputError):
    def __init__(self, name: str, found: list[tuple[int, str]]):
        super().__init__(list_bad(name, found))
        self.name, self.found = name, found


def list_bad(name: str, found: list[tuple[int, str]]) -> str:
    lines = [f"dataset {name!r}: {count(len(found), 'record')} that cannot be used"]
    lines += [reason for _, reason in found[:SHOWN]]
    return "\n  - ".join(lines) + ("\n  - ..." if len(found) > SHOWN else "")


def explain_refusal(error: BadRecordsError, folder: Path | None, exp_name: str) -> InputError:
    """Name all bad records in a new file of `folder`, if given, and how to leave them out."""
    where = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"bad_records-{exp_name.replace('/', '_')[:100]}-"
        with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".jsonl", dir=folder, delete=False) as file:
            where = f"; {file.name} names all of them"
        write_lines(
            Path(file.name),
            ({"dataset": error.name, "problem": BAD, "record": n, "reason": reason} for n, reason in error.found),
        )
    return InputError(f"{error}\nbad_records=skip leaves such records out{where}")


def write_lines(path: Path, values: Iterable[Mapping]) -> None:
    """Write one line of JSON for each value; without any, remove the file, which an earlier run may have left."""
    if lines := [json.dumps(value, ensure_ascii=False) + "\n" for value in values]:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    else:
        path.unlink(missing_ok=True)


# --- fields and messages -------------------------------------------------------------------------------------------


@contextmanager
def naming(where: str) -> Iterator:
    """Context in which the message of an InputError begins with the place of what is read."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def get_field(row: Row, key: str, *types: type) -> Any:
    """Return `row[key]`, a text or a value of one of the types.

    Raises InputError for any other value, and the error that stands for a row.
    """
    types = types or (str,)
    if isinstance(row, InputError):
        raise row
    if not isinstance(row, Mapping):
        raise InputError(f"{shorten(row)} stands where an object with the field {key!r} is expected")
    value = row.get(key)
    # Python counts a bool as an int; NaN, as which pandas writes null, differs from itself
    if not isinstance(value, types) or isinstance(value, bool) or value != value:
        shown = "missing" if key not in row else "null" if value is None else f"{shorten(value)}"
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
    """Read a list of messages, or one."""
    return [_read_message(message) for message in (value if isinstance(value, list) else [value])]


def _read_message(message: Any) -> dict:
    """Read a chat message of any format as chat templates expect it."""
    given = _drop_nulls(message)
    if is_message(message) and "role" not in message:
        speaker, given["content"] = get_field(given, "from"), given.pop("value", None)
        given["role"] = SPEAKERS.get(given.pop("from").lower())
        if given["role"] is None:
            raise InputError(f"a message is from {speaker!r}, and must be from one of {', '.join(SPEAKERS)}")
    role, content = get_field(given, "role"), given.get("content")
    given["role"] = role = NAMES_OF_ROLES.get(role.lower(), role)  # others are the template's own
    if isinstance(content, list):  # of parts, as OpenAI's may be
        if other := {get_field(part, "type") for part in content} - {"text"}:
            raise InputError(f"content has a part of type {other.pop()!r}, and must be text")
        given["content"] = "".join(get_field(part, "text") for part in content)
    if role == CALLER:
        calls = _parse_json(get_field(given, "content"))
        given |= {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    calls = given.pop("tool_calls", None)
    if not calls and "function_call" in given:
        calls = [_parse_json(given.pop("function_call"))]
    if calls:
        if not isinstance(calls, list):
            raise InputError(f"tool_calls is {shorten(calls)}, and must be a list")
        given = {"content": "", **given, "tool_calls": [_read_call(call) for call in calls]}
    for key in ("weight", "train"):
        if given["role"] == "assistant" and given.get(key) not in (None, 0, 1):
            raise InputError(f"{key} is {shorten(given[key])}, and must be 0 or 1 (false or true): correct it")
    if "content" not in given and len(given) > 1:
        raise InputError(f"a message has no content, and only {', '.join(given)}: write its text as content")
    for key in ("content", *(key for key in THOUGHTS if key in given)):
        get_field(given, key)
    return given


def is_scored(message: Mapping) -> bool:
    """Whether a message of the assistant is trained on, as `weight` (OpenAI's) and `train` say."""
    return 0 not in (message.get("weight"), message.get("train"))


def _read_call(call: Any) -> dict:
    """Check a call, whose arguments may be an object, JSON of one (as OpenAI's are) or missing."""
    outer = _drop_nulls(call) if isinstance(call, Mapping) and "function" in call else {"function": call}
    function = _drop_nulls(outer.get("function"))
    name = get_field(function, "name")
    arguments = _parse_json(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise InputError(f"the arguments of {name} are {shorten(arguments)}, and must be an object or JSON of one")
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def read_tools(row: Mapping, column: str) -> list[dict]:
    """Read a list of schemas, of functions too, or JSON of such a list; rows may lack it."""
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
    """Copy a message or call without null fields, which say as much as missing ones."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def common_start(*texts: str) -> str:
    first, last = min(texts), max(texts)  # the texts between them, in lexicographic order, begin as both do
    n = bisect_left(range(1, len(first) + 1), True, key=lambda n: not last.startswith(first[:n]))
    return first[:n]
