"""Custom data: pairs, targets, labelled responses and ranked lists of a user; a function for each form of records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import chain, cycle, islice
from types import MappingProxyType
from typing import Any

from dpo.data.asking import HH, find_format, share_header, split_turns
from dpo.data.columns import Columns, recognize
from dpo.data.problems import BadRecords
from dpo.data.schema import (
    ASSISTANT,
    Messages,
    PreferenceData,
    Record,
    common_start,
    get_field,
    read_messages,
    read_tools,
)
from dpo.data.sources import iterate_places
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import remove_final_eos, unescape
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.numbers import count
from dpo.settings.choices import NUMBER_FIELDS, SYSTEM, TOOLS
from dpo.system.pool import map_chunks

N_DECIDING = 100  # first records, which decide whether texts are rendered
ROWS_PER_WORKER = 10_000  # some seconds of work, more than it takes to start a worker
SHOWN = 60  # characters of a prompt's end, and of a response's beginning
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:.*\}\s*\]\s*$""", re.DOTALL)
# labels in lower case, as text
DESIRABLE = (
    "true", "1", "1.0", "+1", "yes", "good", "positive", "chosen", "desirable", "up", "thumbs up", "thumbs_up", "👍",
)  # fmt: skip
UNDESIRABLE = (
    "false", "0", "0.0", "-1", "no", "bad", "negative", "rejected", "undesirable", "down", "thumbs down", "thumbs_down",
    "👎",
)  # fmt: skip
PlacedRow = tuple[Mapping[str, Any], tuple[int, str]]  # with its number and place


# --- forms of records ----------------------------------------------------------------------------------------------


def read_record(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> Record:
    """Read the record in a row; `used` maps fields to columns.

    Raises InputError, which says `where` the row is, if a field is wrong, or if prompt and responses do not go
    together.
    """
    if "messages" in used:
        record = _read_conversation(row, used, where)
    elif "responses" in used:
        record = _read_list(row, used, where)
    else:  # a pair, a target, a labelled response or a prompt
        columns = [used[field] for field in ("chosen", "rejected", "completion") if field in used]
        prompt, responses = _read_answers(row, used, row, columns, where)
        record = Record(prompt, responses, [(0, 1)] if "rejected" in used else [])
    before = _read_turns_before(row, used, where)
    if "input" in used and row.get(used["input"]) not in (None, ""):
        texts = (get_field(row, used[field], where) for field in ("prompt", "input"))
        record = record._replace(prompt="\n\n".join(filter(None, texts)))
    tools = row.get(used[TOOLS]) or () if TOOLS in used else ()
    if record.is_chat:
        _check_chat(record.prompt, record.responses, where)
        if record.prompt[0]["role"] != SYSTEM:  # the chat's own system turn goes before the column's
            record = record._replace(prompt=before + record.prompt)
        before, tools = [], read_tools({TOOLS: tools}, TOOLS, where)
    return record._replace(
        label=_read_label(row, used["label"], where) if "label" in used else None,
        weight=_read_number(row, used["weight"], where, above_zero=True) if "weight" in used else None,
        margin=_read_number(row, used["margin"], where) if "margin" in used else None,
        before=before,
        tools=tools,
    )


def _read_conversation(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> Record:
    """Read a chat that ends with its response."""
    messages = _read_value(row, used["messages"], where)
    if isinstance(messages, str):
        raise InputError(f"{where}: {used['messages']} must be a list of chat messages, and is text")
    return Record(messages[:-1], [messages[-1:]])


def _read_list(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> Record:
    """Read a ranked list; without a column of scores, its best response comes first."""
    column = used["responses"]
    answers = {f"{column}[{i}]": value for i, value in enumerate(get_field(row, column, where, list))}
    scores = [-float(i) for i in range(len(answers))]
    if "scores" in used:
        given = {f"{used['scores']}[{i}]": value for i, value in enumerate(get_field(row, used["scores"], where, list))}
        scores = [_read_number(given, item, where) for item in given]
    if len(answers) < 2 or len(scores) != len(answers):
        raise InputError(
            f"{where}: {column} has {count(len(answers), 'response')} and {count(len(scores), 'score')}, and needs 2 "
            f"responses or more with a score each: correct it, or remove the record"
        )
    prompt, responses = _read_answers(row, used, answers, [*answers], where)
    return Record(prompt, responses, scores=scores)


def _read_answers(
    row: Mapping[str, Any], used: Mapping[str, str], answers: Mapping[str, Any], columns: Sequence[str], where: str
) -> tuple[str | Messages, list[Any]]:
    """Read responses, and the prompt that goes with them.

    Without a column for the prompt, the responses begin with it, as in HH's data. Texts that answer a chat are the
    assistant's next message. A text before messages is the user's message, or, if the messages do not begin with the
    assistant's, the content of one with which all responses begin, as in UltraFeedback.
    """
    values = [_read_value(answers, column, where) for column in columns]
    are_texts = all(isinstance(value, str) for value in values)
    if not are_texts and any(isinstance(value, str) for value in values):
        raise InputError(f"{where}: {' and '.join(columns)} must all be text or all be chat messages")
    if "prompt" not in used:
        prompt, *responses = split_shared_prompt(*values) if are_texts else _split_shared_messages(values)
        if not prompt:
            raise InputError(
                f"{where}: {' and '.join(columns)} begin with nothing in common, which would be the prompt: give a "
                f"column with the prompt, as 'dataset_sources.NAME.columns={{prompt: COLUMN}}'"
            )
        return prompt, responses
    prompt = _read_value(row, used["prompt"], where)
    if are_texts:
        is_chat = isinstance(prompt, list)
        return prompt, [[{"role": "assistant", "content": text}] for text in values] if is_chat else values
    if isinstance(prompt, list):
        return prompt, values
    if prompt and all(messages and messages[0]["role"] == "assistant" for messages in values):
        return [{"role": "user", "content": prompt}], values
    shared, *rests = _split_shared_messages(values)
    if all(message["content"] != prompt for message in shared):
        raise InputError(
            f"{where}: the prompt is not the content of any message with which the responses begin: add such a "
            f"message, or give no column for the prompt"
        )
    return shared, rests


def _check_chat(prompt: Messages, responses: Sequence[Messages], where: str) -> None:
    """Check that a chat has a prompt and answers of the assistant."""
    if not (prompt and all(responses)):
        raise InputError(
            f"{where}: a prompt and its responses need at least one message each: add messages, or remove the record"
        )
    for response in responses:
        if (role := response[-1]["role"]) != "assistant":
            raise InputError(
                f"{where}: the last message is from {role}, and must be from assistant: remove the message, or the "
                f"record"
            )


def split_shared_prompt(chosen: str, rejected: str) -> list[str]:
    """Split two texts with a common beginning into prompt, chosen and rejected.

    If they share an `\\n\\nAssistant:`, the prompt ends with the last shared one, as in HH. Otherwise the prompt is the
    common beginning up to its last whitespace, so that no word is split and each response starts with a space.
    """
    shared = common_start(chosen, rejected)
    end = shared.rfind(ASSISTANT) + len(ASSISTANT)
    if ASSISTANT not in shared:
        end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return [shared[:end], chosen[end:], rejected[end:]]


def _split_shared_messages(dialogues: Sequence[Messages]) -> list[Messages]:
    """Split dialogues into shared first messages and the rest of each, which is never empty."""
    n = 0
    while all(n < len(dialogue) - 1 and dialogue[n] == dialogues[0][n] for dialogue in dialogues):
        n += 1
    return [dialogues[0][:n], *(dialogue[n:] for dialogue in dialogues)]


# --- fields --------------------------------------------------------------------------------------------------------


def _read_value(row: Mapping[str, Any], column: str, where: str) -> str | Messages:
    """Read a text, or messages in our form, whatever their format."""
    value = get_field(row, column, where, (str, list, dict))
    if not isinstance(value, str):
        return read_messages(value, where)
    if MESSAGES_AS_TEXT.match(value):
        raise InputError(
            f"{where}: {column} is a text that holds chat messages: write them as a list, in .jsonl or .parquet"
        )
    return value


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


def _read_label(row: Mapping[str, Any], column: str, where: str) -> bool:
    """Read whether a response is desirable."""
    label = str(row.get(column)).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        raise InputError(
            f"{where}: {column} is {row.get(column)!r:.80}, which does not say whether the response is good: write "
            f"true or false (1 or 0, good or bad, up or down), or remove the record"
        )
    return label in DESIRABLE


def _read_number(row: Mapping[str, Any], column: str, where: str, *, above_zero: bool = False) -> float:
    """Read a finite number, which may be text as in CSV."""
    value, number = row.get(column), math.nan
    if isinstance(value, (int, float, str, Decimal)):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number) or (above_zero and number <= 0):
        wanted = "a finite number above 0" if above_zero else "a finite number"
        raise InputError(f"{where}: {column} is {value!s:.80}, and must be {wanted}: correct it, or remove the record")
    return number


# --- records together ----------------------------------------------------------------------------------------------


def get_custom(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str | None] = MappingProxyType({}),
    *,
    name: str = "mine",
    trains_on: str = "pairs",
    with_margins: bool = False,
    chat: str = "auto",
    bad: BadRecords | None = None,
) -> PreferenceData:
    """Convert custom records (`docs/formats.md`) to preference data.

    The tokenizer's chat template renders messages, and texts as `chat`, one of `CHATS`, says. `columns` maps fields to
    columns, and a field without a column to None; other fields are recognized by name. `trains_on` says what kind of
    examples the columns must provide, and `with_margins` whether a margin is read. Raises InputError, which names the
    record and `origin`.
    """
    bad = bad or BadRecords()
    if not rows:
        bad.finish(name, is_empty=True)
    recognized = recognize(rows, columns, name=name, origin=origin, trains_on=trains_on, with_margins=with_margins)
    reader = _Reader(tokenizer, recognized, trains_on)
    reader.decide(zip(rows, iterate_places(rows, origin), strict=True), chat)
    template, tally = ChatTemplate(tokenizer), Counter[str]()
    rendered = reader.holds_chats or reader.renders_texts
    mode = "keep_turns" if rendered else "keep_end"
    data = PreferenceData(truncation_mode=mode, rendered=rendered, apart=reader.is_apart)
    placed_rows = zip(rows, iterate_places(rows, origin), strict=True)
    # a tokenizer in a model's own Python code may not be importable in another process
    rows_per_worker = ROWS_PER_WORKER if type(tokenizer).__module__.startswith("transformers.") else None
    chunks = map_chunks(reader.read, placed_rows, len(rows), "reading records", rows_per_worker)
    for records, bad_records, chunk_template, chunk_tally in chunks:
        for record in records:
            data.add(record)
        bad.found += bad_records
        template.add(chunk_template)
        tally += chunk_tally
    bad_note = bad.finish(name, is_empty=not data)
    data.bad_records = bad.found
    data.notes.append(f"{origin}: {recognized.describe(tally['ties'])}")
    if reader.has_template and not reader.holds_chats:
        prompt, entry = next(iter(data.items()), ("", {"responses": []}))
        seen = f"{unescape(prompt)[-SHOWN:]!r} + {unescape(''.join(entry['responses'][:1]))[:SHOWN]!r}"
        did = "the chat template renders texts" if rendered else "texts are used as they are, without the chat template"
        data.notes.append(f"{origin}: {did} (chat={chat}); the first example is ...{seen}")
    if tally["tools"]:
        data.notes.append(
            f"warning: {origin}: texts of {count(tally['tools'], 'record')} have tools, which only a chat template "
            f"shows to the model: chat=always renders texts"
        )
    data.notes += [*template.describe(origin), *bad_note]
    return data


class _Reader:
    """Reads rows one by one, in any process."""

    def __init__(self, tokenizer: Any, columns: Columns, trains_on: str) -> None:
        self.tokenizer, self.columns, self.trains_on = tokenizer, columns, trains_on
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.holds_chats = self.renders_texts = False  # the first record is a chat; the template renders texts
        self.is_apart = False  # pairs in the format of HH, which are tokenized as the reference code does

    def decide(self, placed_rows: Iterable[PlacedRow], chat: str) -> None:
        """Decide by the first records how all are read.

        With `chat="auto"`, a template that exists renders texts, unless most prompts share the header of an answer, or
        chosen and rejected hold the prompt.
        """
        records: list[Record] = []
        for row, (_, where) in islice(placed_rows, N_DECIDING):
            with suppress(InputError):  # a bad record is refused when its turn comes
                if used := self.columns.find_fields(row, where):
                    records.append(read_record(row, used, where))
        self.holds_chats = bool(records) and records[0].is_chat
        if not records or self.holds_chats:
            return
        self.renders_texts = chat == "always"
        if chat == "auto" and self.has_template and "prompt" in self.columns.used:
            texts = [_join_turns(record) for record in records if not record.is_chat]
            self.renders_texts = not share_header(texts, self.tokenizer)
        used = {field: column for field, column in self.columns.used.items() if field not in NUMBER_FIELDS}
        is_whole = used == {"chosen": "chosen", "rejected": "rejected"} and not self.columns.verdict
        is_hh = is_whole and find_format(records[0].prompt, rendered=False) == HH
        self.is_apart = is_hh and not self.renders_texts

    def read(
        self, chunk: Sequence[PlacedRow]
    ) -> tuple[list[Record], list[tuple[int, str]], ChatTemplate, Counter[str]]:
        """Read rows: records, bad ones as number and reason, and what the template and a count say of them."""
        records, bad, template, tally = [], [], ChatTemplate(self.tokenizer), Counter[str]()
        for row, (number, where) in chunk:
            try:
                if used := self.columns.find_fields(row, where):
                    record = read_record(row, used, where)
                    self._check(record, where)
                    records.append(self._finish(record, where, template, tally)._replace(row=number))
                else:
                    tally["ties"] += 1
            except InputError as error:
                bad.append((number, str(error)))
        return records, bad, template, tally

    def _check(self, record: Record, where: str) -> None:
        """Refuse a record that nothing can be learnt from."""
        if record.is_chat != self.holds_chats:
            kind, other = ("chat messages", "text") if record.is_chat else ("text", "chat messages")
            raise InputError(f"{where} holds {kind}, and earlier records hold {other}: use one kind")
        if media := getattr(self.tokenizer, "media_tokens", ()):
            texts = repr((record.before, record.prompt, record.responses))
            if medium := next((token for token in media if token in texts), None):
                raise InputError(
                    f"{where}: a text has {medium}, which stands for an image, video or audio, and only text is "
                    f"trained: remove the record"
                )
        is_learnt = bool(record.responses) and record.label is not False
        if not record.prompt or (is_learnt and _is_empty(record.responses[record.best])):
            raise InputError(
                f"{where}: the {'response to learn' if record.prompt else 'prompt'} is empty: give it a value, or "
                f"remove the record"
            )
        if record.scores and self.trains_on == "lists":
            n, n_scores = len(record.scores), len(set(record.scores))
            if n > LONGEST_LIST or n_scores < n:
                raise InputError(
                    f"{where}: this loss takes up to {LONGEST_LIST} responses with different scores, and there are {n} "
                    f"with {n_scores}: remove some, or train with a loss of pairs, such as loss=dpo"
                )

    def _finish(self, record: Record, where: str, template: ChatTemplate, tally: Counter[str]) -> Record:
        """Make the texts of a record that the model gets; count what is unusual."""
        if not (record.is_chat or self.is_apart):  # tokenization appends EOS
            record = record._replace(responses=[remove_final_eos(text, self.tokenizer) for text in record.responses])
        if self.renders_texts:
            record = _make_chat(record, where)
        if record.is_chat:
            return template.render(record, where)
        tally["tools"] += bool(record.tools)
        prompt = _join_turns(record)
        eos = getattr(self.tokenizer, "eos_token", None)
        for text in (prompt if self.is_apart else "", *record.responses):
            start = text.find(eos) if eos else -1
            if start >= 0 and self.tokenizer.eos_token_id in self.tokenizer(text)["input_ids"]:
                raise InputError(
                    f"{where}: a text contains the EOS token {eos!r}, which the model would take for the end of the "
                    f"text: remove it from {text[max(0, start - SHOWN) : start + SHOWN]!r}, or remove the record"
                )
        return record._replace(prompt=prompt, tools=())


def _make_chat(record: Record, where: str) -> Record:
    """Make messages of texts; a response loses the one space that separates it from its prompt."""
    if find_format(record.prompt, rendered=False) == HH:
        turns = split_turns(record.prompt, "")[:-1]
    else:
        turns = [{"role": "user", "content": record.prompt}]
    answers = [text[1:] if re.match(r" \S", text) else text for text in record.responses]
    return record._replace(
        prompt=[*record.before, *turns],
        responses=[[{"role": "assistant", "content": answer}] for answer in answers],
        tools=read_tools({TOOLS: record.tools}, TOOLS, where),
    )


def _join_turns(record: Record) -> str:
    """The prompt below its system turn and history, as one text."""
    return "\n\n".join(filter(None, (*(turn["content"] for turn in record.before), record.prompt)))


def _is_empty(response: str | Messages) -> bool:
    """Return whether a text or messages say nothing."""
    if isinstance(response, str):
        return not response.strip()
    return not any(
        str(value).strip() for message in response for key, value in message.items() if key != "role" and value
    )
