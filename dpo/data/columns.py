"""Recognition of own data's columns, by the config or by name.

A name counts where exactly one column fits. Sees the names of columns and the kind of text that they hold, never a
record. Reports used and unused columns, and refuses those that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from dpo.data.schema import ASSISTANT, is_message
from dpo.errors import InputError
from dpo.settings.choices import COLUMNS, FORMS, PAIRS, TARGETS

# further names that a column may have
OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input"),
    "chosen": ("preferred", "accepted", "chosen_response", "response_chosen", "better", "best"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected", "worse", "worst"),
    "completion": ("response", "output", "answer", "target"),
    "messages": ("conversation", "conversations"),
}
PLAIN = re.compile(r"[A-Za-z_][\w .-]*", re.ASCII)  # names that Hydra accepts without quotes
DIALOGUE, PROSE, OTHER = "dialogue", "prose", ""  # kinds of content; see `_kind`
LOOKED_AT = 100  # records that decide the kind
RESPONSES = PAIRS[1:]  # the columns that pairs need: these may begin with the prompt


class ColumnsError(InputError):
    """The columns of a split cannot be recognized."""


class Columns(NamedTuple):
    """Recognized columns, and unused ones that could be a prompt."""

    used: dict[str, str]  # our names to those of the records
    unused: list[str]  # those with prose or messages; ids, numbers and labels need no message

    def describe(self, given: Mapping[str, str]) -> str:
        """A note on guessed and unused columns, if there are any.

        Those with our names, or `given`, are not guessed.
        """
        shared = "chosen" in self.used and "prompt" not in self.used
        guessed = self.used.items() - given.items() - {(ours, ours) for ours in self.used}
        if not (shared or guessed or self.unused):
            return ""
        used = ", ".join(f"{ours}={theirs}" for ours, theirs in self.used.items())
        return (
            f"columns {used}"
            + "; the prompt is what chosen and rejected begin with" * shared
            + f"; not used: {', '.join(self.unused)}" * bool(self.unused)
        )


def find_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names of the fields that any record has, and their kinds."""
    names = getattr(rows, "column_names", None)  # of a datasets.Dataset, which would take long to read twice
    if names is None:
        names = dict.fromkeys(key for row in rows for key in row)
    first_rows = list(islice(rows, LOOKED_AT))
    return {name: _kind([row[name] for row in first_rows if row.get(name) is not None]) for name in names}


def _kind(values: Sequence[Any]) -> str:
    """The kind of a column's values.

    `DIALOGUE` if each begins with its prompt, as HH's do; `PROSE` if any has words or messages.
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
    """Return whether a value is messages, or words with letters."""
    if isinstance(value, str):
        return any(map(str.isalpha, value)) and (len(value.split()) > 1 or not value.isascii())
    return is_message(value) or (isinstance(value, list) and any(map(is_message, value)))


def recognize_columns(
    present: Mapping[str, str], given: Mapping[str, str], *, name: str, origin: str, trains_on: str
) -> Columns:
    """Recognize the columns of what a loss trains on.

    `given` has the columns that the config names for dataset `name`. A pair's prompt may be missing if chosen and
    rejected hold it: if they are dialogues, if nothing else could be a prompt, or if the config names these two alone.
    `input` goes below a prompt that is an instruction. Raises ColumnsError, with the fix, if none or several columns
    fit.
    """
    _check_given(present, given, name, origin)
    # by our name, the columns that may be meant
    fitting = {ours: [given[ours]] if ours in given else _find(ours, present, given) for ours in COLUMNS}
    fitting["prompt"], input_column = _separate_input(fitting["prompt"])
    forms = [form for form in dict.fromkeys(chain.from_iterable(FORMS.values())) if given.keys() <= set(form)]
    required = {form: RESPONSES if form == PAIRS else form for form in forms}
    complete = [form for form in forms if all(fitting[ours] for ours in required[form])]
    form = next((form for form in complete if form in FORMS[trains_on]), None)
    if form is None:
        raise ColumnsError(_explain_missing(present, fitting, complete, name=name, origin=origin, trains_on=trains_on))
    hold_prompt = form == PAIRS and all(  # chosen and rejected
        ours in given or present[fitting[ours][0]] == DIALOGUE for ours in RESPONSES
    )
    if not (hold_prompt or fitting["prompt"]):
        fitting["prompt"] = fitting["messages"]  # a chat before the messages chosen and rejected
    for ours in form:
        if len(fitting[ours]) > 1:
            which = " or ".join(fitting[ours])
            raise ColumnsError(f"{origin}: {ours} may be {which}: choose one, as in {_override(name, form, fitting)}")
    used = {ours: fitting[ours][0] for ours in form if fitting[ours]} | (input_column if "prompt" in form else {})
    unused = [column for column, kind in present.items() if kind and column not in used.values()]
    if form == PAIRS and unused and not (hold_prompt or "prompt" in used):
        suggested = {**fitting, "prompt": unused if len(unused) == 1 else []}
        raise ColumnsError(
            f"{origin} has chosen and rejected, and which column is their prompt is not known: it may be "
            f"{' or '.join(unused)}. Give {_override(name, PAIRS, suggested)}, or, if the prompt is what chosen and "
            f"rejected begin with, {_override(name, RESPONSES, fitting)}"
        )
    return Columns(used, unused)


def _separate_input(columns: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separate Alpaca's `input` from its prompt, the `instruction`."""
    by_name = {column.strip().lower(): column for column in columns}
    if len(columns) == 2 and by_name.keys() == {"instruction", "input"}:
        return [by_name["instruction"]], {"input": by_name["input"]}
    return columns, {}


def _explain_missing(
    present: Collection[str],
    fitting: Mapping[str, Sequence[str]],
    complete: Sequence[Sequence[str]],
    *,
    name: str,
    origin: str,
    trains_on: str,
) -> str:
    listed = f"the columns are {', '.join(present)}"
    if trains_on == "pairs":
        missing = " and ".join(ours for ours in ("chosen", "rejected") if not fitting[ours])
        otherwise = ", or train on what is there with loss=sft" if complete else ""
        labelled = any(column.strip().lower() == "label" for column in present)  # as in KTO's data
        if complete and labelled:  # SFT would learn the bad ones too
            otherwise = ", made from a good and a bad completion of each prompt by their label"
        return (
            f"{origin} has no {missing or 'pairs'}, which a loss of pairs needs; {listed}: "
            f"give {_override(name, PAIRS, fitting)}{otherwise}"
        )
    needs = f"{origin} has neither prompt and completion nor messages, one of which SFT needs; "
    if len(present) < len(TARGETS):
        return f"{needs}the only column is {', '.join(present)}: give each record a prompt and a completion"
    return f"{needs}{listed}: give {_override(name, TARGETS, fitting)}, or columns={{messages: COLUMN}}"


def _check_given(present: Iterable[str], given: Mapping[str, str], name: str, origin: str) -> None:
    if not any(given.keys() <= set(form) for form in chain.from_iterable(FORMS.values())):
        raise InputError(
            f"dataset_sources.{name}.columns names {', '.join(given)}: give those of pairs ({', '.join(PAIRS)}), "
            f"of targets ({', '.join(TARGETS)}), or messages alone"
        )
    for ours, theirs in given.items():
        if len(sharing := [other for other, column in given.items() if column == theirs]) > 1:
            raise InputError(
                f"dataset_sources.{name}.columns gives {theirs} for {' and '.join(sharing)}: give each its own"
            )
        if theirs not in present:
            raise ColumnsError(
                f"dataset_sources.{name}.columns.{ours}={theirs}: {origin} has no such column; there are "
                f"{', '.join(present)}"
            )


def _find(ours: str, present: Iterable[str], given: Mapping[str, str]) -> list[str]:
    """Columns with one of our names, else with its other names."""
    free = [column for column in present if column not in given.values()]
    if ours in free:
        return [ours]
    names = (ours, *OTHER_NAMES.get(ours, ()))
    return [column for column in free if re.sub(r"[\s-]+", "_", column.strip().lower()) in names]


def _override(name: str, form: Sequence[str], fitting: Mapping[str, Sequence[str]]) -> str:
    columns = (f"{ours}: {_quote(fitting[ours][0]) if fitting[ours] else 'COLUMN'}" for ours in form)
    return f"'dataset_sources.{name}.columns={{{', '.join(columns)}}}'"


def _quote(column: str) -> str:
    return column if PLAIN.fullmatch(column) else f'"{column}"'
