"""The common form of all datasets, and checks of fields."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from dpo.errors import InputError
from dpo.losses import TRAINS_ON

ASSISTANT = "\n\nAssistant:"  # begins an answer in a dialogue in HH's format
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's thinking; a template reads one of them
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a UTF-16 pair, which JSON can write and UTF-8 cannot
MISSING = object()
Messages = list[dict[str, Any]]  # of a chat, with role and content
TruncationMode = Literal["keep_start", "keep_end", "keep_turns"]  # of a prompt that is too long
LABEL_TYPES = (bool, int, float, str)
TYPE_NAMES: dict[Any, str] = {
    str: "text",
    list: "a list",
    dict: "an object",
    (str, list): "text or a list of messages",
    (str, list, dict): "text or a list of messages",
    int: "a whole number",
    (int, float): "a number",
    LABEL_TYPES: "true or false",
}


class Record(NamedTuple):
    """A record, from its row until it is gathered with the others of its prompt."""

    prompt: Any  # a text, or Messages until a chat template renders them
    responses: Sequence[Any]  # of the same kind: chosen and rejected, a target, a ranked list, or none
    label: bool | None = None  # whether the one response is desirable
    scores: Sequence[float] | None = None  # of a ranked list, higher for better responses
    weight: float | None = None
    margin: float | None = None
    before: Sequence[dict[str, Any]] = ()  # the system turn and the history, before a prompt that is a text
    tools: Sequence[dict[str, Any]] = ()  # that a chat may call
    messages: Messages | None = None  # from which the prompt was rendered
    cuts: Sequence[list[int]] = ()  # of each rendered response: see `split_at_cuts`
    row: int | None = None  # its number in its source, from 1

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list)


class Entry(TypedDict):
    """The records of one prompt, joined."""

    responses: list[str]
    pairs: list[tuple[int, int]]  # (better, worse), indices into responses
    sft_target: str
    labels: NotRequired[list[bool]]  # of labelled data: whether each response is desirable
    # each ranked list is a list of tiers, best first; a tier has the indices of equal responses
    lists: NotRequired[list[list[list[int]]]]
    # one value for each record, if the data has them
    weights: NotRequired[list[float]]
    margins: NotRequired[list[float]]
    rows: NotRequired[list[int]]
    messages: NotRequired[Messages]
    tools: NotRequired[Sequence[dict[str, Any]]]
    cuts: NotRequired[dict[str, list[int]]]  # by response, if parts of it are not scored


class PreferenceData(dict[str, Entry]):
    """`{prompt: {responses, pairs, sft_target}}`, and how to tokenize its texts.

    It also has `notes` about the data, to be printed.
    """

    def __init__(self, *, truncation_mode: TruncationMode, rendered: bool = False, apart: bool = True) -> None:
        super().__init__()
        self.truncation_mode = truncation_mode
        self.apart = apart  # as the reference code tokenizes prompt and response; otherwise as one text
        self.rendered = rendered  # by a chat template: EOS in a prompt is the end of a turn
        self.notes: list[str] = []
        self.bad_records: list[tuple[int, str]] = []  # numbers and reasons of records that are left out
        self.held_out: PreferenceData | None = None  # the test split, beside a train split of the same records

    def add_pair(self, prompt: str, first: str, second: str, *, better: int = 0) -> None:
        """Add a pair, whose `better` response becomes the prompt's SFT target."""
        entry = self.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
        n_before = len(entry["responses"])
        entry["responses"] += [first, second]
        entry["pairs"].append((n_before + better, n_before + 1 - better))
        entry["sft_target"] = (first, second)[better]

    def add(self, record: Record) -> None:
        """Add a record of texts; the best response of a pair or list becomes the prompt's SFT target."""
        prompt, responses = record.prompt, record.responses
        entry: Any = self.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
        if len(responses) == 2 and record.scores is None:
            self.add_pair(prompt, *responses)
        else:
            indices = range(len(entry["responses"]), len(entry["responses"]) + len(responses))
            entry["responses"] += responses
            if record.label is not None:
                entry.setdefault("labels", []).append(record.label)
            elif record.scores is not None:
                tiers: dict[float, list[int]] = {score: [] for score in sorted(record.scores, reverse=True)}
                for index, score in zip(indices, record.scores, strict=True):
                    tiers[score].append(index)
                entry.setdefault("lists", []).append(list(tiers.values()))
                entry["sft_target"] = responses[record.scores.index(max(record.scores))]
            elif responses:
                [entry["sft_target"]] = responses
        for field, value in (("weights", record.weight), ("margins", record.margin), ("rows", record.row)):
            if value is not None:
                entry.setdefault(field, []).append(value)
        if record.messages is not None:
            entry["messages"] = record.messages
        if record.tools and record.messages is not None:
            entry["tools"] = record.tools
        if cuts := {text: limits for text, limits in zip(responses, record.cuts, strict=False) if limits}:
            entry["cuts"] = entry.get("cuts", {}) | cuts

    def take(
        self, trains_on: str, *, list_pairs: str = "all"
    ) -> Iterator[tuple[str, list[str], list[dict[str, int]], dict[str, Any]]]:
        """Remove the prompts one by one, and yield each with its examples.

        Yields (prompt, responses, examples, others). An example maps its roles to indices into the responses. `others`
        has further fields of `Prompt`; numbers, of which an entry has one for each record, are those of the examples.
        `trains_on` says which examples are made:

        - "pairs": the pairs, and those that `list_pairs` makes of lists
        - "prompts": the same, but a prompt whose lists make no pair is kept
        - "lists": the lists, and each pair as a list of two
        - "labels": the labelled responses, and both responses of each pair
        - "targets": the prompt's target if there are pairs or lists, otherwise each of its responses
        """
        for prompt in list(self):  # removed, as a second copy of all texts might not fit into memory
            entry: Any = self.pop(prompt)
            responses, lists, labels = entry["responses"], entry.get("lists", []), entry.get("labels", [])
            # examples with the index of their record: a prompt's records are of one kind
            made = [(pair, record) for record, pair in enumerate(name_pairs(entry["pairs"]))]
            if trains_on == "lists":
                made += [(name_ranks(ranked), record) for record, ranked in enumerate(lists)]
            elif trains_on == "labels":
                made = [({role: i}, record) for pair, record in made for role, i in pair.items()]
                made = [({"chosen" if label else "rejected": i}, i) for i, label in enumerate(labels)] + made
            elif trains_on != "targets":
                for record, ranked in enumerate(lists):
                    made += [(pair, record) for pair in name_pairs(pair_up(ranked, list_pairs))]
            elif made or lists:  # the target comes from the last record
                responses, made = [entry["sft_target"]], [({"chosen": 0}, len(made) + len(lists) - 1)]
            else:
                made = [({"chosen": i}, i) for i in range(len(responses))]
            if not made and (trains_on == "labels" or (lists and trains_on != "prompts")):
                continue
            others: dict[str, Any] = {name: entry[name] for name in ("messages", "tools") if name in entry}
            for name in {"weights", "margins", "rows"} & entry.keys():
                others[name] = [entry[name][record] for _, record in made]
            if "cuts" in entry:
                others["cuts"] = [entry["cuts"].get(response, []) for response in responses]
            yield prompt, responses, [example for example, _ in made], others

    def select_split(self, split: str) -> PreferenceData:
        """Select the train or test split of data that has no splits.

        A random tenth of the prompts, at least one, is the test split.
        """
        prompts = list(self)
        random.Random(42).shuffle(prompts)
        n_test = max(1, len(prompts) // 10)
        selected = set(prompts[:n_test] if split == "test" else prompts[n_test:])
        part = PreferenceData(truncation_mode=self.truncation_mode, rendered=self.rendered, apart=self.apart)
        part.update((prompt, entry) for prompt, entry in self.items() if prompt in selected)
        part.notes = self.notes
        part.bad_records = self.bad_records if split == "train" else []  # they are of no split
        return part


def name_pairs(pairs: Iterable[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"chosen": better, "rejected": worse} for better, worse in pairs]


def pair_up(ranked: Sequence[Sequence[int]], list_pairs: str) -> Iterator[tuple[int, int]]:
    """Yield the pairs (better, worse) of a ranked list.

    With `list_pairs="best_worst"`, only the best with the worst. Equal responses are no pair.
    """
    tiers = [ranked[0][:1], ranked[-1][:1]] if list_pairs == "best_worst" else ranked
    for better_tier, worse_tier in combinations(tiers, 2):
        if better_tier != worse_tier:  # the best is the worst where all are equal
            yield from product(better_tier, worse_tier)


def name_ranks(ranked: Sequence[Sequence[int]]) -> dict[str, int]:
    """Give each response of a list without ties its role."""
    *before, last = (index for [index] in ranked)
    return dict(zip(TRAINS_ON["lists"], before, strict=False)) | {"rejected": last}


def is_message(value: Any) -> bool:
    """Return whether a value is a chat message, ours or ShareGPT's."""
    return isinstance(value, Mapping) and ("role" in value or is_sharegpt(value))


def is_sharegpt(message: Any) -> bool:
    """Return whether a chat message is `{from, value}`, as in ShareGPT's data."""
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys() and "role" not in message


def read_message(message: Any, where: str) -> dict[str, Any]:
    """Check a chat message, and return it as chat templates expect.

    A message that calls tools may have no content. The arguments of a call may be JSON, as OpenAI's are, or missing.
    Null fields and an empty list of calls are left out.
    """
    get_field(message, "role", where)
    given = drop_nulls(message)
    for key in THOUGHTS:
        if key in given:
            get_field(given, key, where)
    if "function_call" in given:  # OpenAI's earlier form of one call
        given["tool_calls"] = [{"function": given.pop("function_call")}]
    if given.get("tool_calls") == []:
        del given["tool_calls"]
    if "tool_calls" not in given:
        get_field(message, "content", where)
        return given
    calls = []
    for call in get_field(given, "tool_calls", where, list):
        function = call["function"] if isinstance(call, Mapping) and "function" in call else call
        get_field(function, "name", where)
        function = {**function, "arguments": read_arguments(function, where)}
        calls.append({"type": "function", **call, "function": function})
    content = get_field(given, "content", where) if "content" in given else ""
    return given | {"content": content, "tool_calls": calls}


def read_arguments(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Read a call's arguments: an object, JSON of one, or nothing."""
    given = arguments = function.get("arguments") or {}
    with suppress(ValueError):
        arguments = json.loads(given) if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise InputError(
            f"{where}: the arguments of {function['name']} must be an object or JSON of one, and are {given!r:.80}: "
            f"correct them, or remove the record"
        )
    return arguments


def drop_nulls(value: Any) -> Any:
    """Remove the null fields of objects.

    Arrow gives each object of a column the fields of all others.
    """
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def read_tools(
    row: Mapping[str, Any], column: str, where: str, fix: str = "remove it from the record"
) -> list[dict[str, Any]]:
    """Read the tools of a chat, which rows may lack.

    They are a list of schemas, or such a list as JSON. Schemas of functions alone, as in LLaMA-Factory's data, become
    tools. `fix` is the advice for any other value.
    """
    value = row.get(column)
    tools = drop_nulls(value)
    with suppress(ValueError):
        tools = json.loads(value) if isinstance(value, str) and value else tools
    if not tools:
        return []
    if not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(
            f"{where}: {column} must be a list of function schemas (objects), or JSON of such a list, and is "
            f"{value!r:.80}: correct it, or {fix}"
        )
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ]


def get_field(row: Mapping[str, Any], key: str, where: str, types: type | tuple[type, ...] = str) -> Any:
    """Return `row[key]`, checked.

    Raises InputError, which names the record (`where`), if the value is missing, null, of another type or not Unicode.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: {row!r:.80} stands where an object with the field {key!r} is expected")
    value = row.get(key, MISSING)
    if value is MISSING:
        raise InputError(
            f"{where}: {key} is missing, and must be {TYPE_NAMES[types]}; the record has "
            f"{', '.join(map(str, row)) or 'no fields'}: add {key}, or remove the record"
        )
    if value is None or value != value:  # NaN differs from itself
        null = "null" if value is None else "NaN, which is how pandas writes null"
        raise InputError(f"{where}: {key} is {null}: give it a value, or remove the record")
    # Python counts a bool as an int
    if not isinstance(value, types) or (isinstance(value, bool) and types is not LABEL_TYPES):
        raise InputError(
            f"{where}: {key} must be {TYPE_NAMES[types]}, and is {value!r:.80}: correct it, or remove the record"
        )
    if isinstance(value, str):
        check_unicode(value, f"field {key!r}", where)
    return value


def check_unicode(text: str, what: str, where: str) -> None:
    """Refuse a text that UTF-8 cannot hold; the message names it `what`."""
    if surrogate := SURROGATE.search(text):
        context = text[max(0, surrogate.start() - 40) : surrogate.end() + 40]
        raise InputError(
            f"{where}: {what} has an unpaired UTF-16 surrogate (invalid text): {context!r}: replace it, or remove the "
            f"record"
        )
