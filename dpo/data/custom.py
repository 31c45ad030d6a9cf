"""Custom data: pairs, targets, labelled responses and ranked lists of a user."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

from dpo.data.asking import is_dialogue, is_prefilled, share_header, split_turns
from dpo.data.columns import Columns, recognize
from dpo.data.schema import (
    ASSISTANT,
    READ,
    RENDERED,
    BadRecordsError,
    Messages,
    PreferenceData,
    Record,
    Row,
    TableRow,
    common_start,
    get_field,
    list_bad,
    read_messages,
    read_tools,
)
from dpo.data.templates import Changes, ChatTemplate, add_changes, describe
from dpo.data.tokenization import refuse_eos, remove_final_eos
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.redaction import redact, shorten
from dpo.settings.places import NUMBER_FIELDS, SYSTEM, TOOLS
from dpo.system.pool import map_chunks

N_DECIDING = 100  # first records, which decide whether texts are rendered
ROWS_PER_WORKER = 10_000  # some seconds of work, more than it takes to start a worker
SHOWN = 60  # characters of a prompt's end
REPEATED, ECHOED, UNREAD = "messages of the prompt", "text of the prompt", "key"  # remarkable parts of records
SYSTEMS = (SYSTEM, "developer")  # roles
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:.*\}\s*\]\s*$""", re.DOTALL)
# labels in lower case, as text
DESIRABLE = ("true", "1", "1.0", "yes", "good", "positive", "chosen", "desirable", "up", "👍")
UNDESIRABLE = ("false", "0", "0.0", "-1", "no", "bad", "negative", "rejected", "undesirable", "down", "👎")


def get_custom(
    rows: Sequence[Row],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str | None] = {},
    *,
    name: str = "mine",
    trains_on: str = "pairs",
    with_margins: bool = False,
    chat: str = "auto",
    bad_records: str = "refuse",
) -> PreferenceData:
    """Convert custom records (`docs/formats.md`) to preference data.

    `columns` maps fields to columns, and a field without a column to None; other fields are recognized by name. Raises
    InputError for columns, and BadRecordsError unless bad records can be skipped.
    """
    recognized = recognize(rows, columns, name=name, origin=origin, trains_on=trains_on, with_margins=with_margins)
    reader = _Reader(rows, recognized, tokenizer, origin=origin, trains_on=trains_on, chat=chat)
    mode = "keep_turns" if reader.is_rendered else "keep_end"
    data = PreferenceData(truncation_mode=mode, rendered=reader.is_rendered, apart=reader.is_apart)
    # a tokenizer in a model's own Python code may not be importable in another process
    rows_per_worker = ROWS_PER_WORKER if type(tokenizer).__module__.startswith("transformers.") else None
    numbered = enumerate(rows, start=1)
    changes, noticed, bad, n_records = {}, [], data.bad_records, 0
    for chunk in map_chunks(reader.read, numbered, len(rows), "reading records", rows_per_worker):
        for record in chunk.records:
            entry = data.add(record.prompt, record.responses, record.pairs, record.target)
            entry.setdefault("records", []).append(record)
        n_records += len(chunk.records)
        bad += chunk.bad
        noticed += chunk.noticed
        add_changes(changes, chunk.changes)
    if bad and (bad_records == "refuse" or not data):
        raise BadRecordsError(name, bad)
    data.notes.append(f"{origin}: {recognized.describe(len(rows) - n_records - len(bad))}")
    if trains_on == "targets" and "rejected" in recognized.used:
        kept, left = (recognized.used[field] for field in ("chosen", "rejected"))
        data.notes.append(f"{origin}: loss=sft learns {kept} and does not use {left}; loss=dpo trains on such pairs")
    if data and reader.has_template and not reader.holds_chats:
        prompt, entry = next(iter(data.items()))
        seen = f"{redact(prompt)[-SHOWN:]!r} + {shorten(''.join(entry['responses'][:1]))}"
        renders = "the chat template renders texts"
        did = renders if reader.is_rendered else "texts are used as they are, without the chat template"
        data.notes.append(f"{origin}: {did} (chat={chat}); the first example is ...{seen}")
    data.notes += [*describe(changes, origin, n_records), *_describe(noticed, origin, n_records)]
    if bad:
        data.notes.append(f"warning: left out: {list_bad(name, bad)}")
    return data


class Chunk(NamedTuple):
    """Records that were read."""

    records: list[Record]
    bad: list[tuple[int, str]]  # numbers and reasons of bad ones
    changes: Changes  # by the chat template
    noticed: list[tuple[str, str]]


class _Reader:
    """Reads rows, in any process, as the first ones decide."""

    def __init__(
        self, rows: Iterable[Row], columns: Columns, tokenizer: Any, *, origin: str, trains_on: str, chat: str
    ):
        self.columns, self.tokenizer, self.origin, self.trains_on = columns, tokenizer, origin, trains_on
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.is_rendered = self.holds_chats = False  # the first records are read as they are
        records = []
        for row in islice(rows, N_DECIDING):
            with suppress(InputError):  # a bad record is refused when its turn comes
                records += filter(None, [self._read(row)])
        self.holds_chats = bool(records) and isinstance(records[0].prompt, list)
        texts = [record.prompt for record in records if isinstance(record.prompt, str)]
        are_questions = self.has_template and "prompt" in columns.used and not share_header(texts)
        # all records are chats or become chats, and the template renders them
        self.is_rendered = self.holds_chats or chat == "always" or (chat == "auto" and are_questions)
        used = {field: column for field, column in columns.used.items() if field not in NUMBER_FIELDS}
        # pairs in the format of HH are tokenized as the reference code does
        is_hh = used == {"chosen": "chosen", "rejected": "rejected"} and not self.is_rendered
        self.is_apart = is_hh and bool(records) and is_dialogue(records[0].prompt)

    def read(self, chunk: Sequence[tuple[int, Row]]) -> Chunk:
        records, bad, template, noticed = [], [], ChatTemplate(self.tokenizer), []
        for number, row in chunk:
            try:
                record = self._read(row)
                if record is None:  # a tie
                    continue
                self._check(record)
                if self.is_rendered:
                    noticed += ((UNREAD, key) for key in self._find_unread(record))
                    record = template.render(record)
                else:
                    refuse_eos([*record.responses, *[record.prompt] * self.is_apart], self.tokenizer)
                noticed += record.noticed
                records.append(record._replace(row=number, noticed=()))
            except InputError as error:
                name = f"row {row.number}" if isinstance(row, TableRow) else f"record {number}"
                place = "" if error is row else f"{name} of {self.origin}: "  # a row's own error names it
                bad.append((number, redact(f"{place}{error}")))
        return Chunk(records, bad, template.changes, noticed)

    def _read(self, row: Row) -> Record | None:
        if isinstance(row, InputError):
            raise row
        used = self.columns.find_fields(row)
        as_chat = self.is_rendered and not self.holds_chats
        return read_record(row, used, self.tokenizer, as_chat=as_chat) if used else None

    def _find_unread(self, record: Record) -> set[str]:
        """Find the keys of a chat's messages that neither we nor the chat template read."""
        keys = set().union(*record.prompt, *chain.from_iterable(record.responses)) - READ
        template = str(self.tokenizer.chat_template)
        return {key for key in keys if not re.search(rf"""[.'"]{re.escape(key)}\b""", template)}

    def _check(self, record: Record) -> None:
        if isinstance(record.prompt, list) != self.is_rendered:
            raise InputError("it holds text and others hold chat messages, or the reverse: use one kind")
        media, texts = getattr(self.tokenizer, "media_tokens", ()), (record.prompt, record.responses)
        if medium := next((token for token in media if token in repr(texts)), None):
            raise InputError(
                f"a text has {medium}, which stands for an image, video or audio, and only text is trained: "
                f"remove the record"
            )
        n, n_scores = len(record.scores), len(set(record.scores))
        if self.trains_on == "lists" and (n > LONGEST_LIST or n_scores < n):
            raise InputError(
                f"this loss takes up to {LONGEST_LIST} responses with different scores, and there are {n} "
                f"with {n_scores}: remove some or set loss=dpo"
            )


def _describe(noticed: Sequence[tuple[str, str]], origin: str, n_records: int) -> Iterator[str]:
    if n_repeated := noticed.count((REPEATED, "")):
        yield f"{origin}: messages of the prompt that responses repeat are taken off, in records: {n_repeated:,}"
    echoes = [example for kind, example in noticed if kind == ECHOED]
    if echoes and 2 * len(echoes) >= n_records:
        yield (
            f"warning: {origin}: responses begin with the text of their prompt, in records: {len(echoes):,}, as in "
            f"{shorten(echoes[0])}: remove it"
        )
    if unread := sorted({key for kind, key in noticed if kind == UNREAD}):
        yield f"{origin}: not used: {', '.join(unread)} of messages"


def _is_empty(response: str | Messages) -> bool:
    if isinstance(response, str):
        return not response.strip()
    return not any(str(response[-1].get(key) or "").strip() for key in RENDERED)


# --- forms of records ----------------------------------------------------------------------------------------------


def read_record(row: Mapping, used: Mapping[str, str], tokenizer: Any, *, as_chat: bool) -> Record:
    """Read a row; `used` maps fields to columns, and with `as_chat` texts become messages."""
    responses: list
    scores = []
    noticed = []
    if "messages" in used:  # a chat that ends with its response
        messages = read_messages(get_field(row, used["messages"], list))
        prompt, responses = messages[:-1], [messages[-1:]]
    elif "responses" in used:
        answers = _index_items(row, used["responses"])
        scores = [-float(i) for i in range(len(answers))]  # without a column of scores, the best comes first
        if "scores" in used:
            given = _index_items(row, used["scores"])
            scores = [_read_number(given, item) for item in given]
        if len(answers) < 2 or len(scores) != len(answers):
            raise InputError(
                f"it has {len(answers)} responses and {len(scores)} scores, and needs 2 responses or more with a "
                f"score each: correct it"
            )
        prompt, responses = _read_answers(row, used, answers, [*answers], noticed)
    else:  # a pair, a target, a labelled response or a prompt
        columns = [used[field] for field in ("chosen", "rejected", "completion") if field in used]
        prompt, responses = _read_answers(row, used, row, columns, noticed)
    if not prompt:
        raise InputError(f"the prompt is empty: give {used.get('prompt', 'it')} a value")
    if isinstance(prompt, str):  # tokenization appends EOS
        responses = [remove_final_eos(text, tokenizer) for text in responses]
        if as_chat:
            prompt = split_turns(prompt, "")[:-1] if is_dialogue(prompt) else [{"role": "user", "content": prompt}]
            # a response loses the one space that separates it from its prompt
            responses = [_as_answer(text[1:] if re.match(r" \S", text) else text) for text in responses]
    if isinstance(prompt, list) and not all(each and each[-1]["role"] == "assistant" for each in responses):
        raise InputError("a response must end with a message of the assistant: correct it")
    if SYSTEM in used and row.get(used[SYSTEM]) not in (None, ""):
        system = get_field(row, used[SYSTEM])
        if isinstance(prompt, str):
            prompt = f"{system}\n\n{prompt}"
        elif prompt[0]["role"] != SYSTEM:  # the chat's own system turn goes before the column's
            prompt = [{"role": SYSTEM, "content": system}, *prompt]
    record = Record(
        prompt,
        responses,
        pairs=[(0, 1)] if "rejected" in used else [],
        scores=scores,
        label=_read_label(row, used["label"]) if "label" in used else None,
        weight=_read_number(row, used["weight"], above_zero=True) if "weight" in used else None,
        margin=_read_number(row, used["margin"]) if "margin" in used else None,
        tools=read_tools(row, used[TOOLS]) if TOOLS in used and isinstance(prompt, list) else [],
        noticed=noticed,
    )
    if record.target is not None and _is_empty(record.target):
        raise InputError(
            f"the response to learn is empty: give {next(used[field] for field in used if field != 'prompt')} a value"
        )
    return record


def _read_answers(
    row: Mapping,
    used: Mapping[str, str],
    answers: Mapping,
    columns: Sequence[str],
    noticed: list[tuple[str, str]],
) -> tuple[str | Messages, list]:
    """Read responses, and the prompt: a column, or what the responses begin with, as in HH's data.

    Texts that answer a chat are the assistant's next message. A text before messages is the user's message, or the
    content of a message with which all responses begin, as in UltraFeedback. What is remarkable is added to `noticed`.
    """
    values = [_read_value(answers, column) for column in columns]
    are_texts = all(isinstance(value, str) for value in values)
    if not are_texts and any(isinstance(value, str) for value in values):
        raise InputError(f"{' and '.join(columns)} must all be text or all be chat messages")
    if "prompt" not in used:
        prompt, *responses = split_shared_prompt(*values) if are_texts else _split_shared_messages(values)
        if not prompt:
            raise InputError(
                f"{' and '.join(columns)} begin with nothing in common, which would be the prompt: name a "
                f"column with the prompt, as docs/formats.md says"
            )
        return prompt, responses
    prompt = _read_value(row, used["prompt"])
    if "input" in used and row.get(used["input"]) not in (None, ""):
        texts = (get_field(row, used[field]) for field in ("prompt", "input"))
        prompt = "\n\n".join(filter(None, texts))
    if are_texts:
        chat = prompt if isinstance(prompt, list) else [{"content": prompt}]
        asked = _bare(chat[-1]["content"]) if prompt else ""
        echoes = [text for text in map(str, values) if asked and _bare(text).startswith(asked)]
        noticed += [(ECHOED, text[:1000]) for text in echoes[:1]]  # shortened later
        return prompt, list(map(_as_answer, values)) if chat is prompt else values
    if isinstance(prompt, str):
        if not any(messages and messages[0]["role"] == "assistant" for messages in values):
            shared, *rests = _split_shared_messages(values)
            if all(message["content"] != prompt for message in shared):
                raise InputError(
                    "the prompt is not the content of any message with which the responses begin: add such a "
                    "message, or give no column for the prompt"
                )
            return shared, rests
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if not prompt:
        return prompt, values
    return _continue(prompt, values, noticed)


def _bare(text: str) -> str:
    return text.strip().removeprefix("Human:").lstrip()


def _continue(
    prompt: Messages, responses: Sequence[Messages], noticed: list[tuple[str, str]]
) -> tuple[Messages, list[Messages]]:
    """Take off what responses repeat of the prompt; what all of them say before an answer belongs to the prompt."""
    before = []
    turns = list(prompt)
    rests = []
    while len(turns) > 1 and turns[0]["role"] in SYSTEMS:
        before.append(turns.pop(0))
    for response in responses:
        earlier, rest = _take_off(turns, response)
        before = before or earlier
        if earlier and _say(earlier) != _say(before):
            raise InputError(
                f"before the prompt's messages a response has {shorten(earlier)}: write it into the prompt"
            )
        rests.append(rest)
    if rests != responses:
        noticed.append((REPEATED, ""))
    shared, *rests = _split_shared_messages(rests, until="assistant")
    return [*before, *turns, *shared], rests


def _take_off(turns: Messages, response: Messages) -> tuple[Messages, Messages]:
    """Split a response at the prompt's turns, or the last of them, into what is before and what is after these."""
    begun = turns[-1]["content"] if is_prefilled(turns) else ""
    asked = _say(turns)
    said = _say(response)
    if begun:
        asked.pop()
    n = len(asked)
    for end in (*range(n, len(said) + 1), *range(n - 1, 0, -1)):  # all turns, wherever, or the last ones at the start
        start = max(0, end - n)
        if start == end or said[start:end] != asked[start - end :] or (start and said[0][0] == "assistant"):
            continue
        rest = response[end:]
        if not begun:
            return response[:start], rest
        if rest and rest[0]["content"].startswith(begun):
            rest[0] = {**rest[0], "content": rest[0]["content"].removeprefix(begun)}
            if not rest[0]["content"]:
                rest.pop(0)
            return response[:start], rest
    return [], response


def _say(messages: Messages) -> list[tuple[str, str, list]]:
    """What messages say, without what programs note in them, such as an id."""
    said = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said.append((message["role"], message["content"].strip(), calls))
    return said


def _as_answer(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def split_shared_prompt(chosen: str, rejected: str) -> list[str]:
    """Split two texts into prompt, chosen and rejected.

    The prompt ends with the last shared `\\n\\nAssistant:`, as in HH, or before the last shared whitespace, so that no
    word is split.
    """
    shared = common_start(chosen, rejected)
    end = shared.rfind(ASSISTANT) + len(ASSISTANT)
    if ASSISTANT not in shared:
        end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return [shared[:end], chosen[end:], rejected[end:]]


def _split_shared_messages(dialogues: Sequence[Messages], until: str = "") -> list[Messages]:
    """Split dialogues into shared first messages, before one of a role, and the rest of each, which is never empty."""
    first = dialogues[0]
    n = 0
    while all(n < len(dialogue) - 1 and dialogue[n] == first[n] for dialogue in dialogues):
        if first[n]["role"] == until:
            break
        n += 1
    return [first[:n], *(dialogue[n:] for dialogue in dialogues)]


# --- fields --------------------------------------------------------------------------------------------------------


def _read_value(row: Mapping, column: str) -> str | Messages:
    """Read a text, a list of messages, or one message."""
    value = get_field(row, column, str, list, dict)
    if not isinstance(value, str):
        return read_messages(value)
    if MESSAGES_AS_TEXT.match(value):
        raise InputError(f"{column} is a text that holds chat messages: write them as a list, in .jsonl or .parquet")
    return value


def _index_items(row: Mapping, column: str) -> dict:
    """Name the items of a list."""
    return {f"{column}[{i}]": item for i, item in enumerate(get_field(row, column, list))}


def _read_label(row: Mapping, column: str) -> bool:
    label = str(row.get(column)).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        raise InputError(
            f"{column} is {shorten(row.get(column))}, which does not say whether the response is good: write "
            f"true or false (1 or 0, good or bad, up or down)"
        )
    return label in DESIRABLE


def _read_number(row: Mapping, column: str, *, above_zero: bool = False) -> float:
    """Read a finite number, which may be text as in CSV."""
    value, number = row.get(column), math.nan
    with suppress(ValueError):
        number = float(str(value))  # of the text, as Python takes True for 1
    if not math.isfinite(number) or (above_zero and number <= 0):
        wanted = "a finite number above 0" if above_zero else "a finite number"
        raise InputError(f"{column} is {shorten(value)}, and must be {wanted}: correct it")
    return number
