"""Custom data: pairs, targets, labelled responses and ranked lists of a user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any

from dpo.data.asking import HH, find_format, share_header
from dpo.data.columns import Columns, recognize
from dpo.data.problems import BadRecords
from dpo.data.records import is_empty, make_chat, name_kind, read_record
from dpo.data.schema import ASSISTANT, PreferenceData, Record
from dpo.data.sources import iterate_places
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import remove_final_eos, unescape
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.numbers import count
from dpo.settings.choices import NUMBER_FIELDS
from dpo.system.pool import map_chunks

N_DECIDING = 100  # first records, which decide whether texts are rendered
ROWS_PER_WORKER = 10_000  # some seconds of work, more than it takes to start a worker
SHOWN = 60  # characters of a prompt's end, and of a response's beginning
# what is counted of unusual records, and the note on it
NOTES = {
    "diverging": "{origin}: in {records} the dialogues diverge before the last answer; the prompt ends where they do",
    "system turns": "{origin}: the system turn of {records} is not used, as the chat has one of its own",
    "tools": "warning: {origin}: texts of {records} have tools, which only a chat template shows to the model: "
    "chat=always renders texts",
    "equal scores": "{origin}: in {records} responses have equal scores, which make no pair",
}

PlacedRow = tuple[Mapping[str, Any], tuple[int, str]]  # with its number and place
# the records, or with its number the reason why one is bad; what the template and a count say of them
Chunk = tuple[list[Record | tuple[int, str]], ChatTemplate, Counter[str]]


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

    `chat`, one of `CHATS`, says whether the chat template renders texts too. `columns` maps fields to columns, and a
    field without a column to None; other fields are recognized by name. Raises InputError, which names the record and
    `origin`.
    """
    bad = bad or BadRecords()
    if not rows:
        bad.finish(name, is_empty=True)
    recognized = recognize(rows, columns, name=name, origin=origin, trains_on=trains_on, with_margins=with_margins)
    reader = _Reader(tokenizer, recognized, name, trains_on)
    reader.decide(zip(rows, iterate_places(rows, origin), strict=True), chat)
    template, tally = ChatTemplate(tokenizer), Counter[str]()
    rendered = reader.holds_chats or reader.renders_texts
    mode = "keep_turns" if rendered else "keep_end"
    data = PreferenceData(truncation_mode=mode, rendered=rendered, apart=reader.is_apart)
    placed_rows = zip(rows, iterate_places(rows, origin), strict=True)
    # a tokenizer in a model's own Python code may not be importable in another process
    rows_per_worker = ROWS_PER_WORKER if type(tokenizer).__module__.startswith("transformers.") else None
    for items, chunk_template, chunk_tally in map_chunks(
        reader.read, placed_rows, len(rows), "reading records", rows_per_worker
    ):
        for item in items:
            if isinstance(item, Record):
                data.add(item)
            else:
                bad.found.append(item)
        template.add(chunk_template)
        tally += chunk_tally
    bad_note = bad.finish(name, is_empty=not data)
    data.bad_records = bad.found
    data.notes.append(f"{origin}: {recognized.describe(tally['ties'])}")
    if recognized.media:
        data.notes.append(
            f"warning: {origin}: {', '.join(recognized.media)}: only text is trained, and the rest of a record is lost"
        )
    data.notes += [*reader.describe(data, origin, chat), *template.describe(origin)]
    for kind, note in NOTES.items():
        if tally[kind]:
            data.notes.append(note.format(origin=origin, records=count(tally[kind], "record")))
    data.notes += bad_note
    if trains_on == "pairs" and 0 < tally["one score"] == sum(len(entry.get("rows", ())) for entry in data.values()):
        raise InputError(
            f"{origin}: the responses of each list have equal scores, which make no pair: give different scores, or "
            f"train with loss=sft"
        )
    return data


class _Reader:
    """Reads rows one by one, in any process."""

    def __init__(self, tokenizer: Any, columns: Columns, name: str, trains_on: str) -> None:
        self.tokenizer, self.columns, self.name, self.trains_on = tokenizer, columns, name, trains_on
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.holds_chats = self.renders_texts = False  # the first record is a chat; the template renders texts
        self.is_hh = self.is_apart = False  # pairs in the format of HH; they are tokenized as the reference code does

    def decide(self, placed_rows: Iterable[PlacedRow], chat: str) -> None:
        """Decide by the first records how all are read.

        With `chat="auto"`, a template that exists renders texts, unless most prompts share the header of an answer, or
        chosen and rejected hold the prompt. Raises InputError for `always` without a template.
        """
        if chat == "always" and not self.has_template:
            raise InputError(
                "chat=always needs a chat template, which the tokenizer lacks: give chat_template=FILE, a tokenizer "
                "with one as model.tokenizer_name_or_path=INSTRUCT_MODEL, or chat=never"
            )
        records: list[Record] = []
        for row, (_, where) in islice(placed_rows, N_DECIDING):
            with suppress(InputError):  # a bad record is refused when its turn comes
                if used := self.columns.find_fields(row, where):
                    records.append(read_record(row, used, where, name=self.name))
        self.holds_chats = bool(records) and records[0].is_chat
        if not records or self.holds_chats:
            return
        used = {field: column for field, column in self.columns.used.items() if field not in NUMBER_FIELDS}
        is_whole = used == {"chosen": "chosen", "rejected": "rejected"} and not self.columns.verdict
        self.is_hh = is_whole and find_format(records[0].prompt, rendered=False) == HH
        self.renders_texts = chat == "always"
        if chat == "auto" and self.has_template and "prompt" in used:
            texts = [_join_turns(record) for record in records if not record.is_chat]
            self.renders_texts = not share_header(texts, self.tokenizer)
        self.is_apart = self.is_hh and not self.renders_texts

    def read(self, chunk: Sequence[PlacedRow]) -> Chunk:
        """Read rows, each with its place; count what is unusual."""
        template, tally = ChatTemplate(self.tokenizer), Counter[str]()
        items: list[Record | tuple[int, str]] = []
        for row, (number, where) in chunk:
            try:
                if used := self.columns.find_fields(row, where):
                    record = read_record(row, used, where, name=self.name)
                    self._check(record, row, used, where)
                    items.append(self._finish(record, where, template, tally)._replace(row=number))
                else:
                    tally["ties"] += 1
            except InputError as error:
                items.append((number, str(error)))
        return items, template, tally

    def _check(self, record: Record, row: Mapping[str, Any], used: Mapping[str, str], where: str) -> None:
        """Refuse a record that nothing can be learnt from."""
        if record.is_chat != self.holds_chats:
            raise InputError(
                f"{where} holds {name_kind(record.is_chat)}, and earlier records hold {name_kind(self.holds_chats)}: "
                f"use one kind"
            )
        if medium := self.columns.find_medium(row, record, getattr(self.tokenizer, "media_tokens", ())):
            raise InputError(
                f"{where}: a text has {medium}, which stands for an image, video or audio, and only text is trained: "
                f"remove the record"
            )
        if not record.prompt:
            raise InputError(
                f"{where}: the prompt is empty, so nothing predicts the first token of a response: give the record a "
                f"prompt, or remove it"
            )
        best = record.scores.index(max(record.scores)) if record.scores else 0
        if record.responses and record.label is not False and is_empty(record.responses[best]):
            field = next(field for field in ("responses", "chosen", "completion", "messages") if field in used)
            raise InputError(f"{where}: {used[field]} is empty: give it a value, or remove the record")
        if record.scores and self.trains_on == "lists":
            if len(set(record.scores)) < len(record.scores):
                raise InputError(
                    f"{where}: {used['scores']} has equal numbers, and this loss needs an order without ties: remove "
                    f"all but one of the equal responses, or train with a loss of pairs, such as loss=dpo, which "
                    f"leaves them unpaired"
                )
            if len(record.scores) > LONGEST_LIST:
                raise InputError(
                    f"{where}: {used['responses']} has {len(record.scores)} responses, and this loss takes lists of up "
                    f"to {LONGEST_LIST}: remove some responses, or train with a loss of pairs, such as loss=dpo"
                )

    def _finish(self, record: Record, where: str, template: ChatTemplate, tally: Counter[str]) -> Record:
        """Make the texts of a record that the model gets; count what is unusual."""
        tally["system turns"] += record.is_chat and bool(record.before)
        if record.scores:
            tally["equal scores"] += len(set(record.scores)) < len(record.scores)
            tally["one score"] += len(set(record.scores)) == 1
        tally["diverging"] += self.is_hh and any(ASSISTANT in text for text in record.responses)
        if not record.is_chat and not self.is_apart:  # tokenization appends EOS
            record = record._replace(responses=[remove_final_eos(text, self.tokenizer) for text in record.responses])
        if self.renders_texts:
            record = make_chat(record, where)
        if record.is_chat:
            return template.render(record, where)
        tally["tools"] += bool(record.tools)
        record = record._replace(prompt=_join_turns(record))
        if eos := self._find_eos(record.prompt if self.is_apart else "", *record.responses):
            raise InputError(
                f"{where}: a text contains the EOS token {self.tokenizer.eos_token!r}, which the model would take for "
                f"the end of the text: remove it from {eos!r}, or remove the record"
            )
        return record

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
        if self.holds_chats or not data or not self.has_template:
            return
        prompt, entry = next(iter(data.items()))
        seen = f"{unescape(prompt)[-SHOWN:]!r} + {unescape(''.join(entry['responses'][:1]))[:SHOWN]!r}"
        if self.renders_texts:
            did, other = "the chat template renders the texts", "never uses them as they are"
        else:
            did, other = "texts are used as they are, without the chat template", "always renders them"
        yield f"{origin}: {did} (chat={chat}; chat={other}); the first example is ...{seen}"


def _join_turns(record: Record) -> str:
    """The prompt below its system turn and history, as one text."""
    return "\n\n".join(filter(None, (*(turn["content"] for turn in record.before), record.prompt)))
