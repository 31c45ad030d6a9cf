"""Recognition of the columns of custom data.

A field is what a loss needs, such as `chosen`; a column is what the records have, such as `preferred`. The config may
give a field's column. Other columns are recognized by their names, unless several fit the same field. Only
`find_columns` reads records: all else is decided by the names of columns and what kind of text the columns hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from dpo.data.records import FORMATS, MEDIA, NUMBERS
from dpo.data.schema import ASSISTANT, is_message
from dpo.errors import InputError
from dpo.losses import LOSSES
from dpo.settings.choices import (
    CHAT_FIELDS,
    CHAT_PAIR_FIELDS,
    FIELDS,
    FORMS,
    LABEL_FIELDS,
    NUMBER_FIELDS,
    OPTIONAL_FIELDS,
    PAIR_FIELDS,
    PROMPT_PARTS,
    SCORED_FIELDS,
    SYSTEM,
    TARGET_FIELDS,
    TOOLS,
    join_with_or,
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
    "chosen": BETTER,
    "rejected": WORSE,
    "completion": ("response", "output", "answer", "target", "reply"),
    "messages": ("conversation", "conversations"),
    "label": ("labels", "desirable", "isdesirable", "thumbs", "thumbsup", "feedback", "ktotag"),
    SYSTEM: ("systemprompt",),
}
UNQUOTED = re.compile(r"[A-Za-z_][\w .-]*", re.ASCII)  # names that Hydra accepts without quotes
DIALOGUE, PROSE, OTHER = "dialogue", "prose", "other"  # kinds of columns; see `_find_kind`
N_INSPECTED = 100  # records that decide the kind of a column
RESPONSES = ("chosen", "rejected")
# columns that are reported if they are unused, whatever they hold
NEVER_SILENT = ("system", "system_prompt", *MEDIA)


class ColumnsError(InputError):
    """The columns of a split cannot be recognized."""


class RecognizedColumns(NamedTuple):
    """Columns that are used, and unused columns that somebody may miss."""

    used: dict[str, str]  # field to column
    unused: list[str]  # of prose or dialogues, or in NEVER_SILENT: nobody misses ids, numbers and labels

    def describe(self, configured: Mapping[str, str | None]) -> str:
        """A note on the columns; empty if nothing is noteworthy."""
        has_guessed = any(column not in (field, configured.get(field)) for field, column in self.used.items())
        has_weights = "weight" in self.used  # weights change what is trained
        responses_hold_prompt = "chosen" in self.used and "prompt" not in self.used
        needs_note = has_guessed or has_weights or responses_hold_prompt or self.unused
        if not needs_note:
            return ""
        parts = ["columns " + ", ".join(f"{field}={column}" for field, column in self.used.items())]
        if responses_hold_prompt:
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
    format_columns: Mapping[str, str] | None = None,
    with_margins: bool = False,
) -> RecognizedColumns:
    """Recognize the columns that hold what a loss trains on.

    `present` maps the columns to their kinds. `configured` maps fields to the columns that the config gives for dataset
    `name`, None for a field without a column. If the config gives a format, only the `format_columns` of that format
    and columns of numbers are used. Pairs need no column for the prompt if chosen and rejected begin with the prompt:
    if these are dialogues, if no other column could be the prompt, or if the config gives chosen and rejected alone.
    Raises ColumnsError, with the fix, if a field has no column or several.
    """
    _check_configured(present, configured, name, origin)
    candidates = _collect_candidates(present, configured, format_columns)
    complete_forms = _find_complete_forms(candidates, configured, format_columns or {})
    form = next((form for form in FORMS[trains_on] if form in complete_forms), None)
    if form is None and format_columns is not None:
        raise ColumnsError(
            f"dataset_sources.{name}.format reads the columns {', '.join(dict.fromkeys(format_columns.values()))}; "
            f"{origin} has {', '.join(present)}, which lack what training on {trains_on} needs: give another format, "
            f"or none"
        )
    if form is None:
        kinds = [kind for kind, forms in FORMS.items() if not set(complete_forms).isdisjoint(forms)]
        raise ColumnsError(_explain_missing(present, candidates, kinds, name=name, origin=origin, trains_on=trains_on))

    if format_columns is not None:
        may_hold_prompt = not candidates["prompt"]
    else:
        may_hold_prompt = form == PAIR_FIELDS and all(
            field in configured or present[candidates[field][0]] == DIALOGUE for field in RESPONSES
        )
    if not may_hold_prompt and not candidates["prompt"]:
        candidates["prompt"] = candidates["messages"]  # a chat that the messages of chosen and rejected continue
    for field in form:
        if len(candidates[field]) > 1:
            columns = " or ".join(candidates[field])
            fix = _write_override(name, form, candidates)
            raise ColumnsError(f"{origin}: the column of {field} may be {columns}: choose one, as in {fix}")
    numbers = NUMBER_FIELDS if with_margins else ("weight",)
    parts = PROMPT_PARTS if "prompt" in form else ()
    used = {field: candidates[field][0] for field in (*form, *numbers, *parts, TOOLS) if candidates[field]}
    is_system_given = bool(configured.get(SYSTEM)) or format_columns is not None
    if candidates[SYSTEM] and (is_system_given or _has_turns(candidates[SYSTEM], present, used)):
        used[SYSTEM] = candidates[SYSTEM][0]
    remaining = [column for column in present if column not in used.values()]
    unused = [column for column in remaining if present[column] != OTHER]
    lacks_prompt = form == PAIR_FIELDS and "prompt" not in used and not may_hold_prompt
    if lacks_prompt and unused:
        raise ColumnsError(_explain_unknown_prompt(unused, candidates, name=name, origin=origin))
    reported = [column for column in remaining if column in unused or column.lower() in NEVER_SILENT]
    return RecognizedColumns(used, reported)


def _collect_candidates(
    present: Mapping[str, str], configured: Mapping[str, str | None], format_columns: Mapping[str, str] | None
) -> dict[str, list[str]]:
    """Collect the columns that may be each field."""
    candidates: dict[str, list[str]] = {field: [] for field in (*FIELDS, *PROMPT_PARTS)}
    if format_columns is not None:
        candidates |= {field: [column] for field, column in format_columns.items() if column in present}
        numbers = [*NUMBER_FIELDS, "scores"] if "scores" in format_columns else NUMBER_FIELDS
        return candidates | {field: find_candidates(field, present, configured) for field in numbers}
    candidates |= {field: find_candidates(field, present, configured) for field in FIELDS}
    if "prompt" not in configured:
        candidates |= _separate_parts(candidates["prompt"], present)
    elif SYSTEM not in configured:
        candidates[SYSTEM] = []  # a config that names the prompt would name the system turn too
    return candidates


def _find_complete_forms(
    candidates: Mapping[str, Sequence[str]], configured: Mapping[str, str | None], format_fields: Collection[str]
) -> list[tuple[str, ...]]:
    """Find the forms for which there are columns."""
    complete_forms = []
    for form in dict.fromkeys(chain.from_iterable(FORMS.values())):
        has_configured = configured.keys() <= {*form, *OPTIONAL_FIELDS}
        needed = {*_list_required(form), *(field for field in form if field in format_fields)}
        if has_configured and all(candidates[field] for field in needed):
            complete_forms.append(form)
    return complete_forms


def _check_configured(present: Iterable[str], configured: Mapping[str, str | None], name: str, origin: str) -> None:
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
    names = {field, *OTHER_NAMES.get(field, ())}
    if field in RESPONSES:
        names |= {name for word in names for noun in NOUNS for name in (word + noun, noun + word)}
    named = [column for column in free if normalize(column) in names]
    # `positive` may be a number beside `chosen_response`
    return [column for column in named if field in RESPONSES and present[column] != OTHER] or named


def normalize(name: str) -> str:
    """Reduce a column's name, or a value, to small letters and digits."""
    return re.sub(r"[\W_]+", "", name.lower())


def _separate_parts(candidates: list[str], present: Iterable[str]) -> dict[str, list[str]]:
    """Separate `input` and `history` from a prompt in `instruction`.

    In Alpaca's data the prompt is an instruction with an input below it, after a history of turns. Returns the
    candidates for the prompt and its other parts; empty for other data.
    """
    by_name = {column.strip().lower(): column for column in candidates}
    is_alpaca = "instruction" in by_name and by_name.keys() <= {"instruction", "input"}
    has_namesakes = len(by_name) < len(candidates)  # such as `input` and `Input`
    if has_namesakes or not is_alpaca:
        return {}
    names = {"prompt": "instruction", "input": "input"}
    parts = {field: [by_name[name]] for field, name in names.items() if name in by_name}
    return {**parts, "history": ["history"] if "history" in present else []}


def _has_turns(candidates: Sequence[str], present: Mapping[str, str], used: Mapping[str, str]) -> bool:
    """Return whether the system turn has one candidate, which fits.

    A column fits if it holds words, or if the `used` columns are of a format that has this system column. Any other
    column `system` may hold names of models.
    """
    if len(candidates) != 1:
        return False
    columns = {field: column for field, column in used.items() if field not in NUMBERS}
    format_columns = next((each.columns for each in FORMATS.values() if columns.items() <= each.columns.items()), {})
    return present[candidates[0]] != OTHER or format_columns.get(SYSTEM) == candidates[0]


def _list_required(form: tuple[str, ...]) -> tuple[str, ...]:
    """List the fields that a form cannot do without."""
    return RESPONSES if form == PAIR_FIELDS else form  # chosen and rejected may begin with the prompt


def _explain_missing(
    present: Collection[str],
    candidates: Mapping[str, Sequence[str]],
    kinds: Sequence[str],
    *,
    name: str,
    origin: str,
    trains_on: str,
) -> str:
    """Explain that the columns lack what a loss trains on.

    `kinds` are the kinds of examples (keys of FORMS) that can be made of the columns.
    """
    # pairs and targets can be made of ranked lists too, which is said if a column may hold lists
    mentions_lists = trains_on == "lists" or candidates["responses"]
    forms = [form for form in FORMS[trains_on] if form != CHAT_PAIR_FIELDS]
    expected = [form for form in forms if mentions_lists or "responses" not in form]
    required = [" and ".join(_list_required(form)) for form in expected]
    possible = [form for form in expected if len(_list_required(form)) <= len(present)]
    overrides = [_write_override(name, form, candidates) for form in possible]
    fixes = [f"name them with {' or '.join(overrides)}"] if overrides else []
    if "labels" in kinds:
        kinds = ["labels"]  # SFT would learn the undesirable completions too
    losses = [loss for loss in LOSSES if LOSSES[loss].trains_on in kinds]
    if losses:
        kinds_there = list(dict.fromkeys(LOSSES[loss].trains_on for loss in losses))
        named = [f"loss={loss}" for loss in losses[:3]]
        fixes.append(f"train on the {join_with_or(kinds_there)} that are there with {join_with_or(named)}")
    lacking = [[field for field in _list_required(form) if not candidates[field]] for form in expected]
    fewest = min(lacking, key=len)  # the fields of the form that lacks the fewest
    fixes.append(f"add a column {fewest[0]}" if len(fewest) == 1 and len(present) > 1 else "add them to the records")
    return (
        f"training on {trains_on} needs the columns {', or '.join(required)}; {origin} has {', '.join(present)}: "
        f"{', or '.join(fixes)}"
    )


def _explain_unknown_prompt(
    unused: Sequence[str], candidates: Mapping[str, Sequence[str]], *, name: str, origin: str
) -> str:
    """Explain that an `unused` column may be the prompt of pairs."""
    with_prompt = {**candidates, "prompt": unused if len(unused) == 1 else []}
    return (
        f"{origin} has chosen and rejected, but it is not known which column is their prompt: it may be "
        f"{' or '.join(unused)}. Give {_write_override(name, PAIR_FIELDS, with_prompt)}, or, if the prompt is what "
        f"chosen and rejected begin with, {_write_override(name, RESPONSES, candidates)}"
    )


def _write_override(name: str, form: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
    """Write the override that gives each field its first candidate."""
    columns = (f"{field}: {_quote(candidates[field][0]) if candidates[field] else 'COLUMN'}" for field in form)
    return f"'dataset_sources.{name}.columns={{{', '.join(columns)}}}'"


def _quote(column: str) -> str:
    return column if UNQUOTED.fullmatch(column) else f'"{column}"'
