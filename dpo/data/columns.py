"""Recognition of the columns of custom data.

A field is what a loss needs, such as `chosen`; a column is what the records have, such as `preferred`. The config may
give a field's column. Other columns are recognized by their names, unless several fit the same field. Only
`find_columns` reads records: all else is decided by the names of columns and what kind of text the columns hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from dpo.data.records import NUMBERS
from dpo.data.schema import ASSISTANT, is_message
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.choices import (
    CHAT_FIELDS,
    FIELDS,
    FORMATS,
    FORMS,
    LABEL_FIELDS,
    NUMBER_FIELDS,
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
UNQUOTED = re.compile(r"[A-Za-z_][\w .-]*", re.ASCII)  # names that Hydra accepts without quotes
DIALOGUE, PROSE, OTHER = "dialogue", "prose", "other"  # kinds of columns; see `_find_kind`
N_INSPECTED = 100  # records that decide the kind of a column
HOLD_TURNS = {"instruction", "conversations"}  # beside these, any `system` is a turn; elsewhere it may name a model
# the fields that are asked for if data has none of what a loss trains on
ASKED = {"prompts": PROMPT_FIELDS, "targets": TARGET_FIELDS, "labels": LABEL_FIELDS, "lists": SCORED_FIELDS}


class ColumnsError(InputError):
    """The columns of a split cannot be recognized."""


class RecognizedColumns(NamedTuple):
    """The column of each field, and the columns that are left out."""

    used: dict[str, str]
    unused: list[str]

    def describe(self) -> str:
        """Say which columns are used, and which are not."""
        parts = ["columns " + ", ".join(f"{field}={column}" for field, column in self.used.items())]
        if "chosen" in self.used and "prompt" not in self.used:
            parts.append("the prompt is what chosen and rejected begin with")
        if self.unused:
            parts.append(f"not used: {', '.join(self.unused)}")
        return "; ".join(parts)


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
        has_letters = any(map(str.isalpha, value))
        has_words = len(value.split()) > 1 or not value.isascii()  # Chinese, for one, has no spaces between words
        return has_letters and has_words
    if not isinstance(value, list):
        return is_message(value)
    # turns are lists of two texts, as in Alpaca's `history`
    return any(is_message(item) or (isinstance(item, list) and any(map(_is_prose, item))) for item in value)


def recognize_columns(
    present: Mapping[str, str],
    configured: Mapping[str, str | None],
    *,
    name: str,
    origin: str,
    trains_on: str,
    data_format: str | None = None,
    with_margins: bool = False,
) -> RecognizedColumns:
    """Recognize the columns that hold what a loss trains on.

    `present` maps the columns to their kinds. `configured` maps fields to the columns that the config gives for dataset
    `name`, None for a field without a column. If the config gives a format, only its columns and those of numbers are
    used. Pairs need no column for the prompt if chosen and rejected begin with the prompt: if these are dialogues, if
    no other column could be the prompt, or if the config gives chosen and rejected alone. Raises ColumnsError, with the
    fix, if a field has no column or several.
    """
    _check_configured(present, configured, name, origin)
    formatted = FORMATS[data_format] if data_format else {}
    candidates = _collect_candidates(present, configured, formatted)
    pair = {field: candidates[field] for field in WHOLE_PAIR_FIELDS}
    are_whole = all(field in configured or present[found[0]] == DIALOGUE for field, found in pair.items() if found)
    if all(pair.values()) and not (candidates["prompt"] or are_whole or formatted):
        candidates["prompt"] = candidates["messages"]  # a chat that the messages of chosen and rejected continue
    form = _find_form(trains_on, candidates, configured)
    if formatted and (form is None or (form == WHOLE_PAIR_FIELDS and "prompt" in formatted)):
        raise ColumnsError(
            f"dataset_sources.{name}.format reads the columns {', '.join(dict.fromkeys(formatted.values()))}; "
            f"{origin} has {', '.join(present)}, which lack what training on {trains_on} needs: give another format, "
            f"or none"
        )
    if form is None:
        raise ColumnsError(_explain_missing(present, candidates, name, origin, trains_on))
    for field in form:
        if len(candidates[field]) > 1:
            columns = " or ".join(candidates[field])
            fix = _write_override(name, form, candidates)
            raise ColumnsError(f"{origin}: the column of {field} may be {columns}: choose one, as in {fix}")
    numbers = NUMBER_FIELDS if with_margins else ("weight",)
    parts = PROMPT_PARTS if "prompt" in form else ()
    used = {field: candidates[field][0] for field in (*form, *numbers, *parts, TOOLS) if candidates[field]}
    system = candidates[SYSTEM][0] if len(candidates[SYSTEM]) == 1 else None  # of several, none is a turn for sure
    if system and (formatted or configured.get(SYSTEM) or present[system] != OTHER or HOLD_TURNS & {*used.values()}):
        used[SYSTEM] = system
    unused = [column for column in present if column not in used.values()]
    words = [column for column in unused if present[column] != OTHER]
    if form == WHOLE_PAIR_FIELDS and words and not (are_whole or formatted):
        with_prompt = {**candidates, "prompt": words if len(words) == 1 else []}
        raise ColumnsError(
            f"{origin} has chosen and rejected, but it is not known which column is their prompt: it may be "
            f"{' or '.join(words)}. Give {_write_override(name, PAIR_FIELDS, with_prompt)}, or, if the prompt is what "
            f"chosen and rejected begin with, {_write_override(name, WHOLE_PAIR_FIELDS, candidates)}"
        )
    return RecognizedColumns(used, unused)


def _collect_candidates(
    present: Mapping[str, str], configured: Mapping[str, str | None], formatted: Mapping[str, str]
) -> dict[str, list[str]]:
    """Collect the columns that may be each field."""
    candidates: dict[str, list[str]] = {field: [] for field in (*FIELDS, *PROMPT_PARTS)}
    if formatted:
        candidates |= {field: [column] for field, column in formatted.items() if column in present}
        numbers = NUMBERS if "scores" in formatted else NUMBER_FIELDS
        return candidates | {field: find_candidates(field, present, configured) for field in numbers}
    candidates |= {field: find_candidates(field, present, configured) for field in FIELDS}
    if "prompt" not in configured:
        candidates |= _separate_parts(candidates["prompt"], present)
    elif SYSTEM not in configured:
        candidates[SYSTEM] = []  # a config that names the prompt would name the system turn too
    return candidates


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


def find_candidates(field: str, present: Mapping[str, str], configured: Mapping[str, str | None]) -> list[str]:
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


def _separate_parts(candidates: Sequence[str], present: Collection[str]) -> dict[str, list[str]]:
    """Separate `input` and `history` from a prompt in `instruction`, as in Alpaca's data."""
    by_name = {column.strip().lower(): [column] for column in candidates}
    if len(by_name) < len(candidates) or sorted(by_name) not in (["instruction"], ["input", "instruction"]):
        return {}  # other data, or two columns such as `input` and `Input`
    history = [column for column in ("history",) if column in present]
    return {"prompt": by_name["instruction"], "input": by_name.get("input", []), "history": history}


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
    fixes = [f"name them with {_write_override(name, fields, candidates)}"]
    # labels first, as SFT would learn the undesirable completions too
    there = (kind for kind in ("labels", "targets", "pairs") if kind != trains_on and _find_form(kind, candidates, {}))
    if kind := next(there, None):
        loss = next(loss for loss in LOSSES if LOSSES[loss].trains_on == kind)
        fixes.append(f"train on the {kind} that are there with loss={loss}")
    return (
        f"training on {trains_on} needs the columns {', '.join(fields)}; {origin} has {', '.join(present)}: "
        f"{', or '.join(fixes)}, or write them in a format: {', '.join(FORMATS)} (docs/formats.md)"
    )


def _write_override(name: str, form: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
    """Write the override that gives each field its first candidate."""
    columns = (f"{field}: {_quote(candidates[field][0]) if candidates[field] else 'COLUMN'}" for field in form)
    return f"'dataset_sources.{name}.columns={{{', '.join(columns)}}}'"


def _quote(column: str) -> str:
    return column if UNQUOTED.fullmatch(column) else f'"{column}"'
