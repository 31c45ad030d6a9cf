"""Custom data: pairs, targets, labelled responses and ranked lists of a user."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import tqdm

from dpo.data.asking import share_header
from dpo.data.columns import RecognizedColumns, find_columns, recognize_columns
from dpo.data.problems import BadRecords
from dpo.data.records import (
    MEDIA,
    Record,
    is_empty,
    is_system_unused,
    make_chat,
    name_kind,
    read_record,
    recognize_format,
)
from dpo.data.schema import ASSISTANT, Chat, PreferenceData, get_field
from dpo.data.sources import iterate_places
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import remove_final_eos, unescape
from dpo.data.verdicts import Verdicts, find_verdicts
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.numbers import count
from dpo.system.pool import map_in_processes

N_DECIDING = 100  # first records, which decide whether texts are rendered
ROWS_PER_CHUNK = 1000
ROWS_PER_WORKER = 10_000  # some seconds of work, more than it takes to start a worker
SHOWN = 60  # characters of a prompt's end, and of a response's beginning


def get_custom(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str | None] = MappingProxyType({}),
    *,
    name: str = "mine",
    data_format: str | None = None,
    trains_on: str = "pairs",
    with_margins: bool = False,
    chat: str = "auto",
    bad: BadRecords | None = None,
) -> PreferenceData:
    """Convert custom records to preference data.

    Records have these fields:

    - pairs: `{prompt, chosen, rejected}`, or `{chosen, rejected}`, which begin with the prompt
    - ranked lists: `{prompt, responses, scores}`, or `{prompt, responses}` in order, best first; they give pairs too
    - SFT targets: `{prompt, completion}`, or `{messages}` with the target as last message; pairs and lists give targets
    - labelled responses: the fields of SFT targets, and `label`
    - prompts to answer: `{prompt}`

    Any record may have a system turn in `system`, a `weight` and, `with_margins`, a `margin`. A chat may have `tools`,
    which the template gets.

    All fields are texts, or all are chat messages, which the tokenizer's chat template renders. A message is
    `{role, content}` or ShareGPT's `{from, value}`; one message may stand for a list. If chosen and rejected are
    messages, the prompt may also be a text: the content of a message that both begin with, as in UltraFeedback. If the
    prompt is messages, the responses may also be texts: the assistant's next message.

    `chat`, one of `CHATS`, says whether the chat template renders texts too: see `_Reader.of`.

    `columns` maps fields to columns, and a field without a column to None. Other fields are recognized by name, or have
    the columns of `data_format`, a key of `FORMATS`. Raises InputError, which names the record and `origin`.
    """
    bad = bad or BadRecords()
    if not rows:
        bad.finish(name, is_empty=True)
    recognized, verdicts = recognize(
        rows, origin, columns, name=name, data_format=data_format, trains_on=trains_on, with_margins=with_margins
    )
    used = recognized.used
    if trains_on == "prompts":  # a weight is for a record's responses, and an online run draws others
        used.pop("weight", None)
    if "responses" in used:  # one margin does not fit all pairs of a list
        used.pop("margin", None)
    reader = _Reader.of(rows, origin, tokenizer, used, verdicts, name, data_format, trains_on, chat)
    template, tally = ChatTemplate(tokenizer), Counter[str]()
    mode = "keep_turns" if reader.renders else "keep_end"
    data = PreferenceData(truncation_mode=mode, rendered=reader.renders, apart=reader.is_apart)
    placed_rows = zip(rows, iterate_places(rows, origin), strict=True)
    for items, chunk_template, chunk_tally in read_chunks(reader, placed_rows, len(rows)):
        for number, item in items:
            if isinstance(item, str):
                bad.found.append((number, item))
                continue
            data.rows.setdefault(item.prompt, []).append(number)
            if item.chat is not None:
                data.add_chat(item.chat)
            if item.weight is not None:
                data.weights.setdefault(item.prompt, []).append(item.weight)
            if item.margin is not None:
                data.margins.setdefault(item.prompt, []).append(item.margin)
            data.add_record(item.prompt, item.responses, label=item.label, scores=item.scores)
        template.add(chunk_template)
        tally += chunk_tally
    bad_note = bad.finish(name, is_empty=not data)
    data.bad_records = bad.found
    format_note = f"format {reader.data_format}; " if reader.data_format else ""
    data.notes.append(f"{origin}: {format_note}{recognized.describe()}")
    if media := [column for column in recognized.unused if column.lower() in MEDIA]:
        data.notes.append(
            f"warning: {origin}: {', '.join(media)}: only text is trained, and the rest of a record is lost"
        )
    if verdicts:
        data.notes.append(f"{origin}: {verdicts.describe(tally['ties'])}")
    data.notes += [*reader.describe(data, origin, chat), *template.describe(origin), *_describe_tally(tally, origin)]
    data.notes += bad_note
    if trains_on == "pairs" and 0 < tally["lists without pairs"] == sum(map(len, data.rows.values())):
        raise InputError(
            f"{origin}: the responses of each list have equal scores, which make no pair: give different scores, or "
            f"train with loss=sft"
        )
    return data


def recognize(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    columns: Mapping[str, str | None],
    *,
    name: str,
    data_format: str | None,
    trains_on: str,
    with_margins: bool,
) -> tuple[RecognizedColumns, Verdicts | None]:
    """Recognize the columns of rows; the arguments are those of `get_custom`."""
    present = find_columns(rows)
    verdicts = None if data_format else find_verdicts(rows, present, columns)
    recognized = recognize_columns(
        verdicts.rename(present) if verdicts else present,
        columns,
        name=name,
        origin=origin,
        trains_on=trains_on,
        data_format=data_format,
        with_margins=with_margins,
    )
    return recognized, verdicts


class _Item(NamedTuple):
    """A record as the data has it."""

    prompt: str
    responses: Sequence[str]
    chat: Chat | None
    label: bool | None
    scores: list[float] | None
    weight: float | None
    margin: float | None


PlacedRow = tuple[Mapping[str, Any], tuple[int, str]]  # with its number and place
# the records by number, where a text is the reason why a record is bad; what the template and a count say of them
Chunk = tuple[list[tuple[int, _Item | str]], ChatTemplate, Counter[str]]


class _Reader(NamedTuple):
    """Reads rows one by one, in any process."""

    tokenizer: Any
    used: Mapping[str, str]  # field to column
    verdicts: Verdicts | None  # if a column says which of two responses is better
    name: str
    data_format: str | None
    trains_on: str
    holds_chats: bool  # whether the first record does: all others must be alike
    renders_texts: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        origin: str,
        tokenizer: Any,
        used: Mapping[str, str],
        verdicts: Verdicts | None,
        name: str,
        data_format: str | None,
        trains_on: str,
        chat: str,
    ) -> _Reader:
        """Make a reader that suits the first records.

        With `chat="auto"`, a template that exists renders texts, unless most prompts of the first records share the
        header of an answer, or chosen and rejected hold the prompt. Raises InputError for `always` without a template.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat == "always" and not has_template:
            raise InputError(
                "chat=always needs a chat template, which the tokenizer lacks: give chat_template=FILE, a tokenizer "
                "with one as model.tokenizer_name_or_path=INSTRUCT_MODEL, or chat=never"
            )
        records: list[Record] = []
        for row, (_, where) in islice(zip(rows, iterate_places(rows, origin), strict=True), N_DECIDING):
            with suppress(InputError):  # a bad record is refused when its turn comes
                fields = {**used, **verdicts.read(row, where)} if verdicts else used
                records.append(read_record(row, fields, where, name=name))
                data_format = data_format or recognize_format(row, fields, records[-1])
        holds_chats = bool(records) and records[0].is_chat
        renders = chat == "always"
        if chat == "auto" and has_template and data_format != "hh" and "prompt" in used:
            renders = not share_header([each.join_prompt() for each in records if not each.is_chat], tokenizer)
        return cls(tokenizer, used, verdicts, name, data_format, trains_on, holds_chats, renders and not holds_chats)

    @property
    def media_tokens(self) -> list[str]:
        return getattr(self.tokenizer, "media_tokens", [])

    @property
    def renders(self) -> bool:
        return self.holds_chats or self.renders_texts

    @property
    def is_apart(self) -> bool:
        """Return whether texts are tokenized as those of hh."""
        return self.data_format == "hh" and not self.renders

    def read(self, chunk: Sequence[PlacedRow]) -> Chunk:
        """Read rows, each with its place; count what is unusual."""
        template, tally = ChatTemplate(self.tokenizer), Counter[str]()
        items: list[tuple[int, _Item | str]] = []
        for row, (number, where) in chunk:
            try:
                item = self._read_row(row, where, template, tally)
            except InputError as error:
                item = str(error)
            if item is not None:
                items.append((number, item))
        return items, template, tally

    def _read_row(
        self, row: Mapping[str, Any], where: str, template: ChatTemplate, tally: Counter[str]
    ) -> _Item | None:
        """Read a row; None for a tie of two responses."""
        used, chat = self.used, None
        if self.verdicts:
            pair = self.verdicts.read(row, where)
            if not pair:
                tally["ties"] += 1
                return None
            used = {**used, **pair}
        record = read_record(row, used, where, name=self.name)
        if record.is_chat != self.holds_chats:
            raise InputError(
                f"{where} holds {name_kind(record.is_chat)}, and earlier records hold {name_kind(self.holds_chats)}: "
                f"use one kind"
            )
        if medium := next((token for token in self.media_tokens if token in repr(record)), None):
            raise InputError(
                f"{where}: a text has {medium}, which stands for an image, video or audio, and only text is trained: "
                f"remove the record"
            )
        if not (record.prompt or record.input):
            raise InputError(
                f"{where}: the prompt is empty, so nothing predicts the first token of a response: give the record a "
                f"prompt, or remove it"
            )
        tally["unused system turns"] += is_system_unused(row, used, record)
        scores = read_scores(row, used, len(record.responses), where) if record.is_list else None
        best = scores.index(max(scores)) if scores else 0
        if record.responses and record.label is not False and is_empty(record.responses[best]):
            field = next(field for field in ("responses", "chosen", "completion", "messages") if field in used)
            raise InputError(f"{where}: {used[field]} is empty: give it a value, or remove the record")
        if not record.is_chat and not self.is_apart:  # tokenization appends EOS
            record = record._replace(responses=[remove_final_eos(text, self.tokenizer) for text in record.responses])
        if self.renders_texts:
            record = make_chat(record)
        tally["texts with tools"] += bool(record.tools) and not record.is_chat
        prompt, responses = record.join_prompt(), record.responses
        if record.is_chat:
            chat = template.render(prompt, responses, record.tools, where)
            prompt, responses = chat.prompt, chat.responses
        elif eos := self._find_eos(prompt if self.is_apart else "", *responses):
            raise InputError(
                f"{where}: a text contains the EOS token {self.tokenizer.eos_token!r}, which the model would take for "
                f"the end of the text: remove it from {eos!r}, or remove the record"
            )
        if scores is not None:
            if self.trains_on == "lists":
                _check_list(scores, used, where)
            tally["lists with ties"] += len(set(scores)) < len(scores)
            tally["lists without pairs"] += len(set(scores)) == 1
        tally["diverging dialogues"] += self.data_format == "hh" and any(ASSISTANT in text for text in responses)
        weight = _read_number(row, used["weight"], where, above_zero=True) if "weight" in used else None
        margin = _read_number(row, used["margin"], where) if "margin" in used else None
        return _Item(prompt, responses, chat, record.label, scores, weight, margin)

    def _find_eos(self, *texts: str) -> str:
        """Find EOS in texts, and return what is around it."""
        eos = getattr(self.tokenizer, "eos_token", None)
        for text in texts:
            start = text.find(eos) if eos else -1
            if start >= 0 and self.tokenizer.eos_token_id in self.tokenizer(text)["input_ids"]:
                return text[max(0, start - SHOWN) : start + SHOWN]
        return ""

    def describe(self, data: PreferenceData, origin: str, chat: str) -> Iterator[str]:
        """Say what became of texts, and show the first."""
        if self.holds_chats or not data or not getattr(self.tokenizer, "chat_template", None):
            return
        prompt, entry = next(iter(data.items()))
        seen = f"{unescape(prompt)[-SHOWN:]!r} + {unescape(''.join(entry['responses'][:1]))[:SHOWN]!r}"
        if self.renders_texts:
            did, other = "the chat template renders the texts", "never uses them as they are"
        else:
            did, other = "texts are used as they are, without the chat template", "always renders them"
        yield f"{origin}: {did} (chat={chat}; chat={other}); the first example is ...{seen}"


def read_chunks(reader: _Reader, placed_rows: Iterable[PlacedRow], n_rows: int) -> Iterator[Chunk]:
    """Read rows in chunks, in order; many on all cores."""
    remaining = iter(placed_rows)
    chunks = iter(lambda: list(islice(remaining, ROWS_PER_CHUNK)), [])
    workers = min(len(os.sched_getaffinity(0)), n_rows // ROWS_PER_WORKER)
    # a tokenizer in a model's own Python code may not be importable in another process
    is_known = type(reader.tokenizer).__module__.startswith("transformers.")
    results = map_in_processes(reader.read, chunks, workers) if workers > 1 and is_known else map(reader.read, chunks)
    with tqdm.tqdm(total=n_rows, desc="reading records", unit="record", disable=None) as bar:
        for chunk in results:
            yield chunk
            bar.update(min(ROWS_PER_CHUNK, n_rows - bar.n))


def _describe_tally(tally: Mapping[str, int], origin: str) -> Iterator[str]:
    """Describe unusual records of `origin`; `tally` has their numbers."""
    if n := tally["diverging dialogues"]:
        yield (
            f"{origin}: in {count(n, 'record')} the dialogues diverge before the last answer; the prompt ends where "
            f"they diverge"
        )
    if n := tally["unused system turns"]:
        yield f"{origin}: the system turn of {count(n, 'record')} is not used, as the chat has one of its own"
    if n := tally["texts with tools"]:
        yield (
            f"warning: {origin}: {count(n, 'text has', 'texts have')} tools, which only a chat template shows to the "
            f"model: chat=always renders texts"
        )
    if n := tally["lists with ties"]:
        yield f"{origin}: {count(n, 'list')} with equal scores, which make no pair"


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


def read_scores(row: Mapping[str, Any], used: Mapping[str, str], n_responses: int, where: str) -> list[float]:
    """Read the scores of a ranked list's responses, higher for better ones.

    Without a column of scores, the responses are in order, best first.
    """
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


def _check_list(scores: Sequence[float], used: Mapping[str, str], where: str) -> None:
    """Check that a loss of lists can train on a ranked list."""
    if len(set(scores)) < len(scores):
        raise InputError(
            f"{where}: {used['scores']} has equal numbers, and this loss needs an order without ties: remove all but "
            f"one of the equal responses, or train with a loss of pairs, such as loss=dpo, which leaves them unpaired"
        )
    if len(scores) > LONGEST_LIST:
        raise InputError(
            f"{where}: {used['responses']} has {len(scores)} responses, and this loss takes lists of up to "
            f"{LONGEST_LIST}: remove some responses, or train with a loss of pairs, such as loss=dpo"
        )
