"""Recognition of the columns of custom data.

A field is what a loss needs, such as `chosen`; a column is what the records have, such as `preferred`. The config may
give a field's column. Other columns are recognized by their names, unless several fit the same field. In a pair such as
`response_a` and `response_b`, a third column may name the better response.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from dpo.data.schema import ASSISTANT, Record, is_message
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.numbers import count
from dpo.settings.choices import (
    CHAT_FIELDS,
    FIELDS,
    FORMS,
    LABEL_FIELDS,
    OPTIONAL_FIELDS,
    PAIR_FIELDS,
    PROMPT_FIELDS,
    PROMPT_PARTS,
    SCORED_FIELDS,
    SYSTEM,
    TARGET_FIELDS,
    TOOLS,
    WHOLE_PAIR_FIELDS,
)

# words for the two responses of a pair, and what may stand before or after them, as in `good_answer`
BETTER = (
    "chosen", "preferred", "accepted", "selected", "better", "best", "good", "winner", "winning", "win", "positive",
)  # fmt: skip
WORSE = (
    "rejected", "dispreferred", "unpreferred", "nonpreferred", "worse", "worst", "bad", "loser", "losing", "lose",
    "negative",
)  # fmt: skip
NOUNS = ("response", "answer", "completion", "output", "reply", "text", "message", "messages", "conversation")
# names under which other data has our fields, in lower case and without spaces, hyphens and underscores
OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "userprompt", "usermessage", "userquestion", "userinput"),
    "chosen": (*BETTER, *(name for word in BETTER for noun in NOUNS for name in (word + noun, noun + word))),
    "rejected": (*WORSE, *(name for word in WORSE for noun in NOUNS for name in (word + noun, noun + word))),
    "completion": ("response", "output", "answer", "target", "reply"),
    "messages": ("conversation", "conversations"),
    "label": ("labels", "desirable", "isdesirable", "thumbs", "thumbsup", "feedback", "ktotag"),
    SYSTEM: ("systemprompt",),
}
# names of two responses and of the column that says which is better, and its values, all as `normalize` returns them
WHO = "(?:model|assistant|option|system)?"
NOUN = f"(?:{'|'.join(NOUNS)})"
RESPONSE = re.compile(f"{WHO}([ab012]?){NOUN}([ab012]?)")
VERDICT = re.compile(f"(?:{'|'.join((*BETTER, 'preference', 'choice', 'verdict', 'label'))}){NOUN}?{WHO}(?:id|index)?")
SIDE = re.compile(f"{WHO}([ab012]?){NOUN}?([ab012]?)")
TIES = ("tie", "both", "neither", "equal", "draw", "same", "none", "nopreference")  # a value may go on: "both bad"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of what is not text
# marks in a text for items of such columns, as in <image>, <|image_pad|>, <start_of_image>, <image_soft_token>, [IMG]
PLACEHOLDER = re.compile(r"<\|?[a-z_]*(?:image|video|audio|vision|img)[a-z_]*(?:_?\d+)?\|?>|\[IMG\]", re.IGNORECASE)
UNQUOTED = re.compile(r"[A-Za-z_][\w .-]*", re.ASCII)  # names that Hydra accepts without quotes
DIALOGUE, PROSE, OTHER = "dialogue", "prose", "other"  # kinds of columns; see `_find_kind`
N_INSPECTED = 100  # records that decide the kind of a column
HOLD_TURNS = {"instruction", "conversations"}  # beside these, any `system` is a turn; elsewhere it may name a model
# the fields that are asked for if data has none of what a loss trains on
ASKED = {"prompts": PROMPT_FIELDS, "targets": TARGET_FIELDS, "labels": LABEL_FIELDS, "lists": SCORED_FIELDS}


class ColumnsError(InputError):
    """The columns of a split cannot be recognized."""


class Verdict(NamedTuple):
    """Two columns of responses, and the column that says which is better."""

    column: str
    responses: tuple[str, str]
    numbers: dict[str, int]  # what a value may call each response: a letter or a digit


class Columns(NamedTuple):
    """The column of each field, and the columns that are left out."""

    used: dict[str, str]
    unused: list[str]
    verdict: Verdict | None = None

    @property
    def media(self) -> list[str]:
        """Columns of what is not text."""
        return [column for column in self.unused if column.lower() in MEDIA]

    def describe(self, n_ties: int = 0) -> str:
        """Say which columns are used, and which are not."""
        parts = ["columns " + ", ".join(f"{field}={column}" for field, column in self.used.items())]
        if "chosen" in self.used and "prompt" not in self.used:
            parts.append("the prompt is what chosen and rejected begin with")
        if self.verdict:
            ties = f", and {count(n_ties, 'tie is', 'ties are')} left out" if n_ties else ""
            both = " and ".join(self.verdict.responses)
            parts.append(f"of {both}, the chosen response is the one that {self.verdict.column} names{ties}")
        if self.unused:
            parts.append(f"not used: {', '.join(self.unused)}")
        return "; ".join(parts)

    def find_fields(self, row: Mapping[str, Any], where: str) -> dict[str, str]:
        """Find the column of each field in one row; none if two responses are equally good.

        Raises InputError if it is not known which is better.
        """
        if not self.verdict:
            return self.used
        value = row.get(self.verdict.column)
        first, second = self.verdict.responses
        if (number := self.verdict.numbers.get(_read_side(value))) is not None:
            better, worse = (second, first) if number else (first, second)
            return {**self.used, "chosen": better, "rejected": worse}
        if normalize(str(value)).startswith(TIES) and value is not None:
            return {}
        raise InputError(
            f"{where}: {self.verdict.column} is {value!r:.80}, which does not say whether {first} or {second} is "
            f"better: write the name of the better column, or tie, or remove the record"
        )

    def find_medium(self, row: Mapping[str, Any], record: Record, tokens: Iterable[str]) -> str | None:
        """Find what stands for an image, video or audio in the texts of a record.

        That is one of the tokenizer's `tokens`, or beside an item of a column any placeholder.
        """
        has_items = any(row.get(column) for column in self.media)
        if not (has_items or tokens):
            return None
        texts = repr((record.before, record.prompt, record.responses))
        match = PLACEHOLDER.search(texts) if has_items else None
        return match[0] if match else next((token for token in tokens if token in texts), None)


def recognize(
    rows: Sequence[Mapping[str, Any]],
    configured: Mapping[str, str | None],
    *,
    name: str,
    origin: str,
    trains_on: str,
    with_margins: bool = False,
) -> Columns:
    """Recognize the columns of rows that hold what a loss trains on.

    `configured` maps fields to the columns that the config gives for dataset `name`, None for a field without a column.
    Pairs need no column for the prompt if chosen and rejected begin with the prompt: if these are dialogues, if no
    other column could be the prompt, or if the config gives chosen and rejected alone. Raises ColumnsError, with the
    fix, if a field has no column or several.
    """
    present = find_columns(rows)
    _check_configured(present, configured, name, origin)
    if verdict := _find_verdict(rows, present, configured):
        first, second = verdict.responses
        kinds = {"chosen": present[first], "rejected": present[second]}
        present = {column: kind for column, kind in present.items() if column not in (verdict.column, first, second)}
        present |= kinds
    candidates = _collect_candidates(present, configured)
    pair = {field: candidates[field] for field in WHOLE_PAIR_FIELDS}
    are_whole = all(field in configured or present[found[0]] == DIALOGUE for field, found in pair.items() if found)
    if all(pair.values()) and not (candidates["prompt"] or are_whole):
        candidates["prompt"] = candidates["messages"]  # a chat that the messages of chosen and rejected continue
    form = _find_form(trains_on, candidates, configured)
    if form is None:
        raise ColumnsError(_explain_missing(present, candidates, name, origin, trains_on))
    for field in form:
        if len(candidates[field]) > 1:
            columns = " or ".join(candidates[field])
            fix = _write_override(name, form, candidates)
            raise ColumnsError(f"{origin}: the column of {field} may be {columns}: choose one, as in {fix}")
    # online runs draw other responses than a record's weight is for, and one margin does not fit all pairs of a list
    optional = {
        "weight": trains_on != "prompts",
        "margin": with_margins and "responses" not in form,
        **dict.fromkeys(PROMPT_PARTS, "prompt" in form),
        TOOLS: True,
    }
    fields = (*form, *(field for field, is_read in optional.items() if is_read))
    used = {field: candidates[field][0] for field in fields if candidates[field]}
    system = candidates[SYSTEM][0] if len(candidates[SYSTEM]) == 1 else None  # of several, none is a turn for sure
    if system and (configured.get(SYSTEM) or present[system] != OTHER or HOLD_TURNS & {*used.values()}):
        used[SYSTEM] = system
    unused = [column for column in present if column not in used.values()]
    words = [column for column in unused if present[column] != OTHER]
    if form == WHOLE_PAIR_FIELDS and words and not are_whole:
        with_prompt = {**candidates, "prompt": words if len(words) == 1 else []}
        raise ColumnsError(
            f"{origin} has chosen and rejected, but it is not known which column is their prompt: it may be "
            f"{' or '.join(words)}. Give {_write_override(name, PAIR_FIELDS, with_prompt)}, or, if the prompt is what "
            f"chosen and rejected begin with, {_write_override(name, WHOLE_PAIR_FIELDS, candidates)}"
        )
    return Columns(used, unused, verdict)


def find_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find the columns of all records, and the kind of each."""
    names = getattr(rows, "column_names", None)  # a datasets.Dataset, which takes long to read through, knows them
    if names is None:
        names = dict.fromkeys(key for row in rows for key in row)
    first_rows = list(islice(rows, N_INSPECTED))
    return {name: _find_kind([row[name] for row in first_rows if row.get(name) is not None]) for name in names}


def _find_kind(values: Sequence[Any]) -> str:
    """Find the kind of a column from its values.

    It is `DIALOGUE` if every value begins with its prompt, as in HH's data, and `PROSE` if any has words or messages.
    """
    if values and all(map(_begins_with_prompt, values)):
        return DIALOGUE
    return PROSE if any(map(_is_prose, values)) else OTHER


def _begins_with_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return ASSISTANT in value
    first = value[0] if isinstance(value, list) and value else None
    return is_message(first) and first.get("role", first.get("from")) not in ("assistant", "gpt")


def _is_prose(value: Any) -> bool:
    """Return whether a value is messages, turns or several words."""
    if isinstance(value, str):
        has_words = len(value.split()) > 1 or not value.isascii()  # Chinese, for one, has no spaces between words
        return has_words and any(map(str.isalpha, value))
    if not isinstance(value, list):
        return is_message(value)
    # turns are lists of two texts, as in Alpaca's `history`
    return any(is_message(item) or (isinstance(item, list) and any(map(_is_prose, item))) for item in value)


def _check_configured(present: Collection[str], configured: Mapping[str, str | None], name: str, origin: str) -> None:
    """Check the config's columns: that they exist, and make up a form."""
    key = f"dataset_sources.{name}.columns"
    if not any(configured.keys() <= {*form, *OPTIONAL_FIELDS} for form in chain.from_iterable(FORMS.values())):
        raise InputError(
            f"{key} has the fields {', '.join(configured)}: give fields of pairs ({', '.join(PAIR_FIELDS)}), of "
            f"targets ({', '.join(TARGET_FIELDS)}), of labels ({', '.join(LABEL_FIELDS)}) or of ranked lists "
            f"({', '.join(SCORED_FIELDS)}), or {CHAT_FIELDS[0]} alone or with label; any may have weight and margin"
        )
    for field, column in configured.items():
        if column is None:
            continue
        fields = [other for other, other_column in configured.items() if other_column == column]
        if len(fields) > 1:
            raise InputError(
                f"{key} gives the column {column} for {' and '.join(fields)}: give each a column of its own"
            )
        if column not in present:
            raise ColumnsError(f"{key}.{field}={column}: {origin} has no such column; there are {', '.join(present)}")


def _collect_candidates(present: Mapping[str, str], configured: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Collect the columns that may be each field."""
    candidates = {field: _find_candidates(field, present, configured) for field in FIELDS}
    candidates |= {part: [] for part in PROMPT_PARTS}
    by_name = {column.strip().lower(): [column] for column in candidates["prompt"]}
    if "prompt" in configured:
        if SYSTEM not in configured:
            candidates[SYSTEM] = []  # a config that names the prompt would name the system turn too
    # unless there are two columns such as `input` and `Input`
    elif len(by_name) == len(candidates["prompt"]) and sorted(by_name) in (["instruction"], ["input", "instruction"]):
        history = [column for column in ("history",) if column in present]
        candidates |= {"prompt": by_name["instruction"], "input": by_name.get("input", []), "history": history}
    return candidates


def _find_candidates(field: str, present: Mapping[str, str], configured: Mapping[str, str | None]) -> list[str]:
    """Find the columns that may be a field.

    A configured field has the column that the config gives, if any. Any other field has the column with the field's
    name, or else all columns with one of its OTHER_NAMES.
    """
    if field in configured:
        configured_column = configured[field]
        return [configured_column] if configured_column else []
    free = [column for column in present if column not in configured.values()]
    if field in free:
        return [field]
    named = [column for column in free if normalize(column) in (field, *OTHER_NAMES.get(field, ()))]
    # `positive` may be a number beside `chosen_response`
    return [column for column in named if field in WHOLE_PAIR_FIELDS and present[column] != OTHER] or named


def normalize(name: str) -> str:
    """Reduce a column's name, or a value, to small letters and digits."""
    return re.sub(r"[\W_]+", "", name.lower())


def _find_verdict(
    rows: Sequence[Mapping[str, Any]], present: Mapping[str, str], configured: Mapping[str, str | None]
) -> Verdict | None:
    """Find two columns of responses, and one that names the better one.

    There is none beside a column of rejected responses, or if the config names responses.
    """
    by_kind: dict[str, dict[str, str]] = {}
    for column in present:
        name = normalize(column)
        if (match := RESPONSE.fullmatch(name)) and bool(match[1]) != bool(match[2]):
            start = match.start(1 if match[1] else 2)
            by_kind.setdefault(name[:start] + name[start + 1 :], {})[name[start]] = column
    pairs = [sides for sides in by_kind.values() if "".join(sorted(sides)) in ("ab", "01", "12")]
    named = [column for column in present if VERDICT.fullmatch(normalize(column))]
    given = {field for field, column in configured.items() if field != column}
    is_pair = _find_candidates("rejected", present, {}) or not given <= {"prompt", *OPTIONAL_FIELDS}
    if is_pair or not pairs or not named:
        return None
    column = min(named, key=lambda name: normalize(name).startswith("label"))
    # a datasets.Dataset takes long to give rows
    values = rows[column] if hasattr(rows, "column_names") else [row.get(column) for row in rows]  # type: ignore[call-overload]
    digits = {text for text in map(_to_text, values) if re.fullmatch(r"-?[\d.]+", text)}
    names = sorted(pairs[0])
    # digits say nothing if they may count from 0 as well as from 1, or if others are on a scale, as -1, 0 and 1
    options = [("0", "1"), ("1", "2")] if names == ["a", "b"] else [(names[0], names[1])]
    fitting = [option for option in options if digits <= {*option} or (len(options) == 1 and digits >= {*option})]
    numbers = dict(zip(fitting[0], (0, 1), strict=True)) if len(fitting) == 1 else {}
    return Verdict(column, (pairs[0][names[0]], pairs[0][names[1]]), {"a": 0, "b": 1} | numbers)


def _read_side(value: Any) -> str:
    """Read a response's letter or digit from a value, if any."""
    text = _to_text(value)
    match = None if text.startswith("-") else SIDE.fullmatch(normalize(text))
    return "".join(match.groups()) if match else ""


def _to_text(value: Any) -> str:
    return str(value).strip().removesuffix(".0")  # a number of a table may be a float


def _find_form(
    trains_on: str, candidates: Mapping[str, Sequence[str]], configured: Mapping[str, str | None]
) -> tuple[str, ...] | None:
    """Find the first form whose fields all have columns."""
    for form in FORMS[trains_on]:
        if configured.keys() <= {*form, *OPTIONAL_FIELDS} and all(candidates[field] for field in form):
            return form
    return None


def _explain_missing(
    present: Collection[str], candidates: Mapping[str, Sequence[str]], name: str, origin: str, trains_on: str
) -> str:
    """Explain that the columns lack what a loss trains on."""
    forms = (ASKED.get(trains_on, PAIR_FIELDS), *FORMS[trains_on])
    fields = max(forms, key=lambda form: sum(bool(candidates[field]) for field in form))
    fixes = f"name them with {_write_override(name, fields, candidates)}"
    # labels first, as SFT would learn the undesirable completions too
    there = (kind for kind in ("labels", "targets", "pairs") if kind != trains_on and _find_form(kind, candidates, {}))
    if kind := next(there, None):
        loss = next(loss for loss in LOSSES if LOSSES[loss].trains_on == kind)
        fixes += f", or train on the {kind} that are there with loss={loss}"
    return (
        f"training on {trains_on} needs the columns {', '.join(fields)}; {origin} has {', '.join(present)}: {fixes} "
        f"(docs/formats.md)"
    )


def _write_override(name: str, form: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
    """Write the override that gives each field its first candidate."""
    columns = []
    for field in form:
        column = candidates[field][0] if candidates[field] else "COLUMN"
        columns.append(f"{field}: {column}" if UNQUOTED.fullmatch(column) else f'{field}: "{column}"')
    return f"'dataset_sources.{name}.columns={{{', '.join(columns)}}}'"
