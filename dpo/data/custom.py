"""Custom data: rows of pairs, targets, labelled responses and ranked lists become prompts with their responses."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

from dpo.data.columns import Columns, recognize
from dpo.data.prompt_forms import is_dialogue, is_prefilled, share_header, split_turns
from dpo.data.schema import (
    ASSISTANT,
    READ_KEYS,
    RENDERED_KEYS,
    Messages,
    Prompt,
    Row,
    Split,
    TableRow,
    common_prefix,
    get_field,
    list_bad,
    read_messages,
    read_tools,
)
from dpo.data.templates import ChatTemplate, Note, Notes, add_notes, describe_notes
from dpo.data.tokenization import refuse_eos, remove_final_eos
from dpo.errors import InputError, WarningLine
from dpo.losses import LONGEST_LIST, TRAINS_ON
from dpo.redaction import redact, shorten
from dpo.settings.places import NUMBER_FIELDS, SYSTEM, TOOLS
from dpo.settings.plan import Plan
from dpo.system.pool import map_chunks
from dpo.system.run_directory import PROBLEMS

N_DECIDING = 100  # first rows, which decide whether texts are rendered
ROWS_PER_WORKER = 10_000  # some seconds of work, more than it takes to start a worker
PROMPT_END = 60  # last characters of a prompt, which a note shows
SYSTEM_ROLES = (SYSTEM, "developer")
# a list of messages that was written as text, in JSON or as Python prints it
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:.*\}\s*\]\s*$""", re.DOTALL)
DESIRED, UNDESIRED = 1.0, 0.0  # scores of the two responses of a pair, and of a response with a good or bad label
# labels in lower case, as text
DESIRABLE = ("true", "1", "1.0", "yes", "good", "positive", "chosen", "desirable", "up", "👍")
UNDESIRABLE = ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "negative", "rejected", "undesirable", "down", "👎")


class DataOptions(NamedTuple):
    """All that the prompts of a run depend on, besides their sources and the tokenizer; `trains_on` is one of

    - "pairs": the pairs, and those that `list_pairs` makes of lists; two responses with equal scores make none
    - "prompts": the same, but a prompt whose lists make no pair is kept
    - "lists": the lists, and each pair as a list of two
    - "labels": the labelled responses, and with `unpair` both responses of each pair
    - "targets": the best response of a prompt's last pair or list, or all of its completions
    """

    trains_on: str = "pairs"
    with_margins: bool = False  # whether the loss reads the margins of pairs
    new_tokens: int = 0  # tokens for which an online run needs room after a prompt, within `max_length`
    list_pairs: str = "all"  # this and the following are keys of the config
    unpair: bool = False
    chat: str = "auto"
    bad_records: str = "refuse"
    holdout: float | None = None
    truncation: str = "auto"
    max_length: int = sys.maxsize
    max_prompt_length: int = sys.maxsize

    @classmethod
    def of(cls, plan: Plan) -> "DataOptions":
        values = {
            **plan.data._asdict(),
            **plan.chat._asdict(),
            "trains_on": "prompts" if plan.online else plan.loss.trains_on,
            "with_margins": plan.loss.needs_margins,
            "new_tokens": plan.online.max_new_tokens if plan.online else 0,
        }
        return cls(**{field: values[field] for field in cls._fields})

    def check_pairs(self, name: str) -> None:
        """Raise InputError if a dataset of pairs does not fit a loss of labels."""
        if self.trains_on == "labels" and not self.unpair:
            raise InputError(
                f"dataset {name} has pairs, and this loss trains on single responses with labels: set unpair=true"
            )


def get_custom(
    rows: Sequence[Row],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str | None] = {},
    *,
    name: str = "mine",
    **options: Any,
) -> Split:
    """Read custom rows (`docs/formats.md`); the options are those of `DataOptions`.

    `columns` maps fields to columns, and a field without a column to None; other fields are recognized by name. Error
    messages call the dataset `name`, and the place of its rows `origin`. Raises InputError if the columns do not fit,
    and for bad records, unless they may be skipped and others remain.
    """
    data_options = DataOptions(**options)
    recognized = recognize(
        rows,
        columns,
        name=name,
        origin=origin,
        trains_on=data_options.trains_on,
        with_margins=data_options.with_margins,
    )
    used = recognized.used
    has_pairs = "rejected" in used
    if has_pairs:
        data_options.check_pairs(name)
    reader = make_reader(rows, Reader(recognized, tokenizer, origin, data_options))
    # None: in this process, as a tokenizer in a model's own Python code may not be importable in another one
    rows_per_worker = ROWS_PER_WORKER if type(tokenizer).__module__.startswith("transformers.") else None
    split = Split()
    notes: Notes = {}
    n_read = 0
    chunks = map_chunks(reader.read, enumerate(rows, start=1), len(rows), "reading records", rows_per_worker)
    for prompts, bad_records, new_notes in chunks:
        for prompt in prompts:
            # a prompt's last pair or list gives its target, as in HH; every completion is a target
            split.add(prompt, replaces=data_options.trains_on == "targets" and (has_pairs or "responses" in used))
        n_read += len(prompts)
        split.bad_records += bad_records
        add_notes(notes, new_notes)
    bad = split.bad_records
    if bad and (data_options.bad_records == "refuse" or not split):
        raise InputError(f"{list_bad(name, bad)}\nbad_records=skip leaves them out, and lists them all in {PROBLEMS}")
    sentences = [recognized.describe(n_ties=len(rows) - n_read - len(bad))]
    if data_options.trains_on == "targets" and has_pairs:
        sentences.append(
            f"loss=sft learns {used['chosen']} and does not use {used['rejected']}; loss=dpo trains on such pairs"
        )
    if split and reader.has_texts and getattr(tokenizer, "chat_template", None):
        first_prompt = next(iter(split.values()))
        treatment = "texts are used as they are, without the chat template"
        if reader.is_rendered:
            treatment = "the chat template renders texts"
        prompt_end, response = redact(first_prompt.text)[-PROMPT_END:], shorten("".join(first_prompt.responses[:1]))
        sentences.append(f"{treatment} (chat={data_options.chat}); the first example is ...{prompt_end!r} + {response}")
    split.notes += (f"{origin}: {sentence}" for sentence in sentences)
    split.notes += describe_notes(notes, origin, n_read)
    if bad:
        split.notes.append(WarningLine(f"left out: {list_bad(name, bad)}"))
    return split


def make_reader(rows: Sequence[Row], undecided: "Reader") -> "Reader":
    """Decide by the first rows whether all prompts are texts or chats, and whether a template renders them.

    `undecided` reads these rows. Returns a copy of it with the decisions.
    """
    first_prompts = []
    for row in islice(rows, N_DECIDING):
        with suppress(InputError):  # a bad row, which `Reader.read` reports later
            prompt = undecided.read_row(row, {})
            if prompt is not None:
                first_prompts.append(prompt)
    has_texts = not first_prompts or first_prompts[0].messages is None
    chat = undecided.options.chat
    is_rendered = chat == "always" or not has_texts
    # with chat=auto, texts in a column of prompts are rendered unless they end in a header such as "### Response:"
    if chat == "auto" and "prompt" in undecided.columns.used and getattr(undecided.tokenizer, "chat_template", None):
        are_questions = not share_header([prompt.text for prompt in first_prompts if prompt.messages is None])
        is_rendered = is_rendered or are_questions
    used = {field: column for field, column in undecided.columns.used.items() if field not in NUMBER_FIELDS}
    # pairs in HH's format, without other columns, are tokenized as the reference code does
    is_hh = used == {"chosen": "chosen", "rejected": "rejected"} and not is_rendered
    is_apart = is_hh and bool(first_prompts) and is_dialogue(first_prompts[0].text)
    return replace(undecided, has_texts=has_texts, is_rendered=is_rendered, is_apart=is_apart)


@dataclass(frozen=True)
class Reader:
    """Reads rows; it is sent to the processes that read chunks of them."""

    columns: Columns
    tokenizer: Any
    origin: str
    options: DataOptions
    has_texts: bool = False  # prompts are texts, which become chats if a template renders them
    is_rendered: bool = False  # a chat template renders all prompts
    is_apart: bool = False  # prompt and response are tokenized apart, as the reference code does

    def read(self, chunk: Sequence[tuple[int, Row]]) -> tuple[list[Prompt], list[tuple[int, str]], Notes]:
        """Read rows with their numbers, and render their prompts if `is_rendered`; a bad row raises no error.

        Returns the prompts, the numbers and reasons of bad rows, and the notes on the others.
        """
        prompts, bad, notes = [], [], {}
        template = ChatTemplate(self.tokenizer)
        for number, row in chunk:
            try:
                row_notes: Notes = {}
                prompt = self.read_row(row, row_notes)
                if prompt is None:  # a tie
                    continue
                self._check(prompt)
                if self.is_rendered:
                    self._note_unused_keys(prompt, row_notes)
                    prompt = template.render(prompt, row_notes)
                refuse_eos(prompt, self.tokenizer)
                add_notes(notes, row_notes)
                prompts.append(prompt._replace(rows=[number] * len(prompt.examples)))
            except InputError as error:
                name = f"row {row.number}" if isinstance(row, TableRow) else f"record {number}"
                # an error that stands for a row names the place in its own message
                place = "" if error is row else f"{name} of {self.origin}: "
                bad.append((number, redact(f"{place}{error}")))
        return prompts, bad, notes

    def read_row(self, row: Row, notes: Notes) -> Prompt | None:
        """Read a row as a prompt with its responses and examples; None for a tie.

        Texts become messages if a template renders them. Adds what it notices to `notes`. Raises InputError for a row
        that cannot be used.
        """
        if isinstance(row, InputError):
            raise row
        used = self.columns.find_fields(row)
        if not used:
            return None
        prompt, responses, scores = _read_scored_responses(row, used, notes)
        if not prompt:
            raise InputError(f"the prompt is empty: fill in {next(iter(used.values()))}")
        if isinstance(prompt, str):
            # tokenization appends EOS, so an EOS at the end of the text would be a second one
            responses = [remove_final_eos(text, self.tokenizer) for text in responses]
            if self.is_rendered and self.has_texts:
                turns = [{"role": "user", "content": prompt}]
                # a response loses the one space that separates it from its prompt
                answers = [_as_answer(text[1:] if re.match(r" \S", text) else text) for text in responses]
                if is_dialogue(prompt):
                    turns = split_turns(prompt, "")
                    if not turns[-1]["content"]:  # else the assistant has two turns in a row, and the second is open
                        turns.pop()
                    for i, text in enumerate(responses):
                        before, _, last = f"{ASSISTANT}{text}".rpartition(ASSISTANT)
                        if before:  # the response has several turns
                            answers[i] = split_turns(before + ASSISTANT, last)
                prompt, responses = turns, answers
        if isinstance(prompt, list):
            if not all(each and each[-1]["role"] == "assistant" for each in responses):
                raise InputError("a response must end with a message of the assistant: correct it")
            # otherwise the prompt could not end with the head of an answer
            if len({each[0]["role"] == "assistant" for each in responses}) > 1:
                raise InputError("some responses begin with an answer and others do not: correct it")
        if SYSTEM in used and row.get(used[SYSTEM]) not in (None, ""):
            system = get_field(row, used[SYSTEM])
            if isinstance(prompt, str):
                prompt = f"{system}\n\n{prompt}"
            elif prompt[0]["role"] != SYSTEM:  # a chat's own system turn replaces the column's
                prompt = [{"role": SYSTEM, "content": system}, *prompt]
        best = scores.index(max(scores)) if scores else 0
        # there may be no response, and one with a bad label may be empty
        if scores not in ([], [UNDESIRED]) and _is_empty(responses[best]):
            # the first field after the prompt has the response to learn, in every form
            column = next(used[field] for field in used if field != "prompt")
            raise InputError(f"the response to learn is empty: fill in {column}")
        if self.options.trains_on == "lists" and (len(scores) > LONGEST_LIST or len(set(scores)) < len(scores)):
            raise InputError(
                f"this loss takes up to {LONGEST_LIST} responses with different scores, and there are {len(scores)} "
                f"with {len(set(scores))}: remove some or set loss=dpo"
            )
        if self.options.trains_on == "targets":
            responses = responses[best : best + 1]
        examples = self._list_examples(scores)
        numbers = {}
        for field in NUMBER_FIELDS:
            if field in used:
                number = _read_number(row, used[field], above_zero=field == "weight")
                numbers[f"{field}s"] = [number] * len(examples)
        if isinstance(prompt, str):
            return Prompt(prompt, responses, examples, apart=self.is_apart, **numbers)
        tools = read_tools(row, used[TOOLS]) if TOOLS in used else []
        question = row.get(used.get("prompt"))
        if isinstance(question, Mapping) and TOOLS in question:  # OpenAI's object, which has the messages too
            tools = read_tools(question, TOOLS)
        return Prompt("", responses, examples, messages=prompt, tools=tools or None, apart=False, **numbers)

    def _list_examples(self, scores: Sequence[float]) -> list[dict[str, int]]:
        """List a row's examples, which map roles to indices of its responses."""
        if self.options.trains_on == "targets":
            return [{"chosen": 0}]
        if self.options.trains_on == "labels":
            return [{"rejected" if score == UNDESIRED else "chosen": i} for i, score in enumerate(scores)]
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        if self.options.trains_on == "lists":
            # the best is chosen, the worst is rejected, and the roles of a list have names for those between
            *others, last = ranked
            return [dict(zip(TRAINS_ON["lists"], others, strict=False)) | {"rejected": last}]
        if scores and self.options.list_pairs == "best_worst":
            ranked = [scores.index(max(scores)), scores.index(min(scores))]  # the first ones, if scores are equal
        pairs = combinations(ranked, 2)
        return [{"chosen": better, "rejected": worse} for better, worse in pairs if scores[better] > scores[worse]]

    def _note_unused_keys(self, prompt: Prompt, notes: Notes) -> None:
        """Add to `notes` each key of messages that neither we nor the chat template read."""
        template = str(self.tokenizer.chat_template)
        for message in chain(prompt.messages or (), *prompt.responses):
            for key in sorted(message.keys() - READ_KEYS):
                # a template reads a key as message.key, message["key"] or message.get("key")
                if not re.search(rf"""[.'"]{re.escape(key)}\b""", template):
                    notes[f"not used: {key} of messages"] = Note("", warned_from=math.inf)

    def _check(self, prompt: Prompt) -> None:
        """Raise InputError for a text among chats or the reverse, and for a token that stands for an image or sound."""
        if (prompt.messages is not None) != self.is_rendered:
            raise InputError(
                "it has text and the first records have chat messages, or the reverse: use one kind in all records"
            )
        written = repr((prompt.text, prompt.messages, prompt.responses))
        for token in getattr(self.tokenizer, "media_tokens", ()):
            if token in written:
                raise InputError(
                    f"a text has {token}, which stands for an image, video or audio, and only text is trained: "
                    f"remove the record"
                )


def _is_empty(response: str | Messages) -> bool:
    """Whether a text is blank, or the last message has neither content nor calls nor thoughts."""
    if isinstance(response, str):
        return not response.strip()
    return not any(str(response[-1].get(key) or "").strip() for key in RENDERED_KEYS)


# --- prompts and responses -------------------------------------------------------------------------------------------


def _read_scored_responses(
    row: Mapping, used: Mapping[str, str], notes: Notes
) -> tuple[str | Messages, list, list[float]]:
    """Read the prompt, the responses, and a score for each response.

    The score of a rejected response, or of one with a bad label, is UNDESIRED; that of another response of a pair,
    completion or chat is DESIRED. Lists have scores of their own.
    """
    if "responses" in used:
        responses = _index_items(row, used["responses"])
        scores = [-float(i) for i in range(len(responses))]  # without a column of scores, the best comes first
        if "scores" in used:
            items = _index_items(row, used["scores"])
            scores = [_read_number(items, name) for name in items]
        if len(responses) < 2 or len(scores) != len(responses):
            raise InputError(
                f"it has {len(responses)} responses and {len(scores)} scores, and needs 2 responses or more with a "
                f"score each: correct it"
            )
        return *_read_responses(row, used, responses, list(responses), notes), scores
    if "messages" in used:  # a chat that ends with its response
        messages = read_messages(get_field(row, used["messages"], list))
        start = len(messages)  # of the response: all messages of the assistant at the end
        while start and messages[start - 1]["role"] == "assistant":
            start -= 1
        prompt, responses = messages[:start], [messages[start:]]
    else:
        columns = [used[field] for field in ("chosen", "rejected", "completion") if field in used]
        prompt, responses = _read_responses(row, used, row, columns, notes)
    scores = [DESIRED, UNDESIRED][: len(responses)]  # for a pair, one response or none
    if "label" in used and not _read_label(row, used["label"]):
        scores = [UNDESIRED]
    return prompt, responses, scores


def _read_responses(
    row: Mapping, used: Mapping[str, str], items: Mapping, names: Sequence[str], notes: Notes
) -> tuple[str | Messages, list]:
    """Read the prompt and the responses of a row.

    The responses are `items[name]` for each of `names`; `items` is the row itself, or the items of its list. The prompt
    is a column of `row`, or else what all responses begin with, as in HH's data.

    If the prompt is a chat and the responses are texts, each becomes a message of the assistant. If the prompt is a
    text and the responses are chats, one of which begins with an answer, the text is the user's message. If none does,
    the prompt is the messages with which all responses begin, as in UltraFeedback, and the text must be one of them.
    Adds what it notices to `notes`.
    """
    values = [_read_value(items, name) for name in names]
    are_texts = all(isinstance(value, str) for value in values)
    if not are_texts and any(isinstance(value, str) for value in values):
        raise InputError(f"{' and '.join(names)} must all be text or all be chat messages")
    if "prompt" not in used:
        prompt, *responses = split_shared_prompt(*values) if are_texts else _split_shared_messages(values)
        if not prompt:
            raise InputError(
                f"{' and '.join(names)} begin with nothing in common, which would be the prompt: name a "
                f"column with the prompt, as docs/formats.md says"
            )
        return prompt, responses
    prompt = _read_value(row, used["prompt"])
    # Alpaca's instruction may have an input, which follows it
    if "input" in used and row.get(used["input"]) not in (None, ""):
        texts = (get_field(row, used[field]) for field in ("prompt", "input"))
        prompt = "\n\n".join(filter(None, texts))
    if are_texts:
        chat = prompt if isinstance(prompt, list) else [{"content": prompt}]  # is `prompt` itself if that is a chat
        question = _bare(chat[-1]["content"]) if prompt else ""
        for text in values:
            if question and _bare(str(text)).startswith(question):
                _note_repeated_prompt(str(text), notes)
        return prompt, list(map(_as_answer, values)) if chat is prompt else values
    # from here on the responses are messages
    if isinstance(prompt, str):
        if not any(messages and messages[0]["role"] == "assistant" for messages in values):
            shared, *remaining = _split_shared_messages(values)
            if all(message["content"].strip() != prompt.strip() for message in shared):
                raise InputError(
                    "the responses begin with messages, none of which is the prompt: add it as their first message, or "
                    "remove the column of the prompt"
                )
            return shared, remaining
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if not prompt:
        return prompt, values
    return _remove_prompt(prompt, values, notes)


def _bare(text: str) -> str:
    """Strip white space and HH's `Human:` from a text, for comparison."""
    return text.strip().removeprefix("Human:").lstrip()


def _note_repeated_prompt(text: str, notes: Notes) -> None:
    notes["responses begin with the text of their prompt: remove it"] = Note(text[:1000], warned_from=0.5)


def _remove_prompt(prompt: Messages, responses: Sequence[Messages], notes: Notes) -> tuple[Messages, list[Messages]]:
    """Remove messages of the prompt that responses repeat; return the whole prompt, and the rest of each response.

    Messages that a response has before the repeated ones, such as a system turn, become the beginning of the prompt.
    Messages that all responses share before the first one of the assistant become its end.
    """
    before = []
    turns = list(prompt)
    remaining = []
    while len(turns) > 1 and turns[0]["role"] in SYSTEM_ROLES:
        before.append(turns.pop(0))
    prefill = turns[-1]["content"].strip() if is_prefilled(turns) else ""
    for response in responses:
        earlier, rest = _split_around(turns, response)
        if prefill and response and rest is response and response[0]["content"].startswith(prefill):
            _note_repeated_prompt(response[0]["content"], notes)
        before = before or earlier
        if earlier and _list_comparable(earlier) != _list_comparable(before):
            raise InputError(
                f"before the prompt's messages a response has {shorten(earlier)}: write it into the prompt"
            )
        remaining.append(rest)
    if remaining != responses:
        notes["messages of the prompt that responses repeat are taken off"] = Note("", warned_from=math.inf)
    shared, *remaining = _split_shared_messages(remaining, until="assistant")
    return [*before, *turns, *shared], remaining


def _split_around(turns: Messages, response: Messages) -> tuple[Messages, Messages]:
    """Find the prompt's turns, or the last of them, in a response; return the messages before and after them.

    Returns `([], response)` if they are not found. If the prompt ends in the beginning of an answer, the message after
    the turns must begin with it, and loses it.
    """
    prefill = turns[-1]["content"] if is_prefilled(turns) else ""
    sought = _list_comparable(turns)
    present = _list_comparable(response)
    if prefill:
        sought.pop()
    n = len(sought)
    # all n turns anywhere in the response, or else as many of the last ones as possible, at its start
    for end in (*range(n, len(present) + 1), *range(n - 1, 0, -1)):
        start = max(0, end - n)
        # a response that begins with an answer does not repeat the prompt, whatever follows; if start == end, n is 0
        if start == end or present[start:end] != sought[start - end :] or (start and present[0][0] == "assistant"):
            continue
        rest = response[end:]
        if not prefill:
            return response[:start], rest
        if rest and rest[0]["content"].startswith(prefill):
            rest[0] = {**rest[0], "content": rest[0]["content"].removeprefix(prefill)}
            if not rest[0]["content"]:
                rest.pop(0)
            return response[:start], rest
    return [], response


def _list_comparable(messages: Messages) -> list[tuple[str, str, list]]:
    """List role, content and calls of each message, without what programs add, such as the ids of calls."""
    comparable = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        comparable.append((message["role"], message["content"].strip(), calls))
    return comparable


def _as_answer(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def split_shared_prompt(chosen: str, rejected: str) -> list[str]:
    """Split two texts into prompt, chosen and rejected.

    The prompt ends with the last shared `\\n\\nAssistant:`, as in HH, or before the last shared whitespace, so that no
    word is split.
    """
    shared = common_prefix(chosen, rejected)
    end = shared.rfind(ASSISTANT) + len(ASSISTANT)
    if ASSISTANT not in shared:
        end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return [shared[:end], chosen[end:], rejected[end:]]


def _split_shared_messages(dialogues: Sequence[Messages], until: str = "") -> list[Messages]:
    """Return the first messages that all dialogues share, then the rest of each dialogue, which is never empty.

    The shared messages end before the first one of the role `until`.
    """
    first = dialogues[0]
    n_shared = 0
    while all(n_shared < len(dialogue) - 1 and dialogue[n_shared] == first[n_shared] for dialogue in dialogues):
        if first[n_shared]["role"] == until:
            break
        n_shared += 1
    return [first[:n_shared], *(dialogue[n_shared:] for dialogue in dialogues)]


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
    """Map names such as `responses[0]` to the items of a list, so that functions read and name items as columns."""
    return {f"{column}[{i}]": item for i, item in enumerate(get_field(row, column, list))}


def _read_label(row: Mapping, column: str) -> bool:
    """Whether a label says that the response is good; InputError if it does not say."""
    label = str(row.get(column)).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        raise InputError(
            f"{column} is {shorten(row.get(column))}, which does not say whether the response is good: write "
            f"true or false (1 or 0, good or bad, up or down)"
        )
    return label in DESIRABLE


def _read_number(row: Mapping, column: str, *, above_zero: bool = False) -> float:
    """Read a finite number, which may be text as in CSV."""
    value = row.get(column)
    number = math.nan
    with suppress(ValueError):
        number = float(str(value))  # through text, as float(True) would be 1
    if not math.isfinite(number) or (above_zero and number <= 0):
        wanted = "a finite number above 0" if above_zero else "a finite number"
        raise InputError(f"{column} is {shorten(value)}, and must be {wanted}: correct it")
    return number
