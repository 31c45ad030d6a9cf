"""Pairs whose better response another column names.

As in `response_a`, `response_b` and `winner`. Columns of texts that are named chosen and rejected go first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dpo.data.columns import BETTER, NOUNS, find_candidates, normalize
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.choices import OPTIONAL_FIELDS

MODEL = "(?:model|assistant|option|system)?"
NOUN = f"(?:{'|'.join(NOUNS)})"
RESPONSE = re.compile(f"{MODEL}([ab012]?){NOUN}([ab012]?)")  # the name of a column, as `normalize` returns it
VALUE = re.compile(f"{MODEL}([ab012]?){NOUN}?([ab012]?)")
COLUMN = re.compile(f"(?:{'|'.join((*BETTER, 'preference', 'choice', 'verdict', 'label'))}){NOUN}?{MODEL}(?:id|index)?")
TIES = ("tie", "both", "neither", "equal", "draw", "same", "none", "nopreference")  # a value may go on: "both bad"


class Verdicts(NamedTuple):
    """Two columns of responses, and the column that says which is better."""

    column: str
    responses: tuple[str, str]
    numbers: dict[str, int]  # what a value may call each response: a letter or a digit

    def rename(self, present: Mapping[str, str]) -> dict[str, str]:
        """Return the kinds of columns as if the better response were `chosen`."""
        first, second = self.responses
        rest = {name: kind for name, kind in present.items() if name not in (self.column, first, second)}
        return {**rest, "chosen": present[first], "rejected": present[second]}

    def read(self, row: Mapping[str, Any], where: str) -> dict[str, str]:
        """Read which column of a row is chosen, and which rejected.

        Empty if the responses are equally good. Raises InputError if the value says neither.
        """
        value = row.get(self.column)
        first, second = self.responses
        if (number := self.numbers.get(_read_side(value))) is not None:
            return dict(zip(("chosen", "rejected"), (second, first) if number else (first, second), strict=True))
        if normalize(str(value)).startswith(TIES) and value is not None:
            return {}
        raise InputError(
            f"{where}: {self.column} is {value!r:.80}, which does not say whether {first} or {second} is better: write "
            f"the name of the better column, or tie, or remove the record"
        )

    def describe(self, n_ties: int) -> str:
        """Say what is chosen, and how many records are left out."""
        ties = f"; {count(n_ties, 'tie is', 'ties are')} left out" if n_ties else ""
        return f"of {' and '.join(self.responses)}, the chosen response is the one that {self.column} names{ties}"


def find_verdicts(
    rows: Sequence[Mapping[str, Any]], present: Mapping[str, str], configured: Mapping[str, str | None]
) -> Verdicts | None:
    """Find two columns of responses, and one that names the better one."""
    by_kind: dict[str, dict[str, str]] = {}
    for column in present:
        name = normalize(column)
        if (match := RESPONSE.fullmatch(name)) and bool(match[1]) != bool(match[2]):
            side = match[1] or match[2]
            start = match.start(1 if match[1] else 2)
            by_kind.setdefault(name[:start] + name[start + 1 :], {})[side] = column
    pairs = [sides for sides in by_kind.values() if "".join(sorted(sides)) in ("ab", "01", "12")]
    given = {field for field, column in configured.items() if field != column}
    if not pairs or not given <= {"prompt", *OPTIONAL_FIELDS}:
        return None
    worse = find_candidates("rejected", present, {})
    named = [column for column in present if column in worse or COLUMN.fullmatch(normalize(column))]
    said = {column: {*map(_read_side, _iterate_values(rows, column))} - {""} for column in named}
    columns = [column for column in named if said[column] and column not in worse]
    if not columns or not all(said[column] for column in worse):  # there are pairs already
        return None
    column = min(columns, key=lambda name: normalize(name).startswith("label"))
    names = sorted(pairs[0])
    digits = {text for value in _iterate_values(rows, column) if re.fullmatch(r"-?[\d.]+", text := _to_text(value))}
    # digits say nothing if they may count from 0 as well as from 1, or if others are on a scale, as -1, 0 and 1
    options = [("0", "1"), ("1", "2")] if names == ["a", "b"] else [(names[0], names[1])]
    fitting = [option for option in options if digits <= {*option} or (len(options) == 1 and digits >= {*option})]
    numbers = dict(zip(fitting[0], (0, 1), strict=True)) if len(fitting) == 1 else {}
    return Verdicts(column, (pairs[0][names[0]], pairs[0][names[1]]), {"a": 0, "b": 1} | numbers)


def _iterate_values(rows: Sequence[Mapping[str, Any]], column: str) -> Iterable[Any]:
    has_columns = hasattr(rows, "column_names")  # a datasets.Dataset, whose rows take long to read
    return rows[column] if has_columns else (row.get(column) for row in rows)  # type: ignore[call-overload]


def _read_side(value: Any) -> str:
    """Read a response's letter or digit from a value, if any."""
    text = _to_text(value)
    match = None if text.startswith("-") else VALUE.fullmatch(normalize(text))
    return "".join(match.groups()) if match else ""


def _to_text(value: Any) -> str:
    return str(value).strip().removesuffix(".0")  # a number of a table may be a float
