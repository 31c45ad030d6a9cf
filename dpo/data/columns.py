"""Which column of custom data, such as `preferred`, is which field of a loss, such as `chosen`."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from dpo.data.schema import ASSISTANT, Row, TableRow, is_message
from dpo.errors import InputError
from dpo.numbers import count
from dpo.redaction import shorten
from dpo.settings.places import FIELDS, FORMS, OPTIONAL_FIELDS, SYSTEM, TOOLS, WHOLE_PAIR_FIELDS

# words for the two responses of a pair, and what may stand before or after them, as in `good_answer`
BETTER = (
    "chosen", "preferred", "accepted", "selected", "better", "best", "good", "winner", "winning", "win", "positive",
)  # fmt: skip
WORSE = (
    "rejected", "dispreferred", "unpreferred", "nonpreferred", "worse", "worst", "bad", "loser", "losing", "lose",
    "negative",
)  # fmt: skip
NOUNS = ("response", "answer", "completion", "output", "reply", "text", "message", "messages", "conversation")
# names under which other data has our fields, as `normalize` returns them
OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "userprompt", "usermessage", "userquestion", "userinput"),
    "chosen": (*BETTER, *(name for word in BETTER for noun in NOUNS for name in (word + noun, noun + word))),
    "rejected": (*WORSE, *(name for word in WORSE for noun in NOUNS for name in (word + noun, noun + word))),
    "completion": ("response", "output", "answer", "target", "reply"),
    "messages": ("conversation", "conversations"),
    "label": ("labels", "desirable", "isdesirable", "thumbs", "thumbsup", "feedback", "ktotag"),
    SYSTEM: ("systemprompt",),
}
# names of two responses (with a noun before or after the letter or digit), of the column that says which is better, and
# its values, all as `normalize` returns them
RESPONSE = re.compile(f"(.*?({'|'.join(NOUNS)})?)([ab012])(?(2)|({'|'.join(NOUNS)}))")
VERDICT = re.compile(
    f"({'|'.join((*BETTER, 'preference', 'choice', 'verdict', 'label'))})(response|answer)?(id|index)?"
)
SIDE = re.compile(f"(?:model|assistant|option|{'|'.join(NOUNS)})?([ab012])(?:{'|'.join(NOUNS)})?")
TIES = ("tie", "both", "neither", "equal", "draw", "same", "none", "nopreference")  # a value may go on: "both bad"
N_INSPECTED = 100  # records whose values are looked at
WORD = re.compile(r"[\w./:-]*", re.ASCII)  # such as the name of a model


class Columns(NamedTuple):
    used: dict[str, str]  # the column of each field
    unused: list[str]
    verdict: str | None  # the column that says which of two responses is better
    sides: Mapping[str, str]  # the columns of these responses, by letter or digit

    def describe(self, n_ties: int) -> str:
        parts = ["columns " + ", ".join(f"{field}={column}" for field, column in self.used.items())]
        if "chosen" in self.used and "prompt" not in self.used:
            parts.append("the prompt is what chosen and rejected begin with")
        if self.verdict:
            ties = f", and {count(n_ties, 'tie is', 'ties are')} left out" if n_ties else ""
            parts.append(f"of these two responses, {self.verdict} names the chosen one{ties}")
        if self.unused:
            parts.append(f"not used: {', '.join(self.unused)}")
        return "; ".join(parts)

    def find_fields(self, row: Mapping) -> dict[str, str]:
        """The column of each field in a row, none for a tie; raises InputError if the better response is not known."""
        if not self.verdict:
            return self.used
        value = row.get(self.verdict)
        side = _find_side(value)
        if side in self.sides:
            [worse] = [column for name, column in self.sides.items() if name != side]
            return {**self.used, "chosen": self.sides[side], "rejected": worse}
        if value is not None and normalize(str(value)).startswith(TIES):
            return {}
        raise InputError(
            f"{self.verdict} is {shorten(value)}, which does not say whether {' or '.join(self.sides.values())} "
            f"is better: write the name of the better column, or tie"
        )


def recognize(
    rows: Sequence[Row],
    configured: Mapping[str, str | None],
    *,
    name: str,
    origin: str,
    trains_on: str,
    with_margins: bool = False,
) -> Columns:
    """Recognize the columns of a loss's fields; raises InputError, with the fix, if a field has no column or several.

    `configured` maps fields to columns, and a field without a column to None. Pairs need no column for the prompt if
    chosen and rejected are dialogues, if there are no other columns, or if the config gives these two alone.
    """
    present = list(dict.fromkeys(column for row in rows if isinstance(row, Mapping) for column in row))
    if not present and isinstance(rows[0], InputError):  # no row can be parsed
        raise rows[0]
    first_rows = list(islice((row for row in rows if isinstance(row, Mapping)), N_INSPECTED))
    key = f"dataset_sources.{name}.columns"
    given = [*filter(None, configured.values())]
    if len({*given}) < len(given) or not {*given} <= {*present}:
        raise InputError(
            f"{key} gives {', '.join(given)}, which must be different columns of {origin}; it has {', '.join(present)}"
        )
    candidates = _collect_candidates(present, configured)
    verdict, sides = None, {}
    said = {_find_side(row.get(column)) for column in candidates["rejected"] for row in first_rows}
    # texts that are named rejected go before a verdict, but `loser` may name a response too
    if said != {""} and configured.keys() <= {"prompt", *OPTIONAL_FIELDS}:
        verdict, sides = _find_verdict(first_rows, present, origin)
        candidates |= {field: [column] for field, column in zip(WHOLE_PAIR_FIELDS, sides.values(), strict=False)}
    whole = [column for field in WHOLE_PAIR_FIELDS if field not in configured for column in candidates[field][:1]]
    are_whole = all(
        _begins_with_prompt(row[column]) for row in first_rows for column in whole if row.get(column) is not None
    )
    if not (candidates["chosen"] and candidates["rejected"]):  # one alone may be a verdict, and is no response
        candidates |= {field: [] for field in WHOLE_PAIR_FIELDS if field not in configured}
    elif not are_whole:
        # without a prompt, a chat that the messages of chosen and rejected continue
        candidates["prompt"] = candidates["prompt"] or candidates["messages"]
    forms = FORMS[trains_on]
    fitting = [form for form in forms if configured.keys() <= {*form, *OPTIONAL_FIELDS}]
    nearest = max(fitting or forms, key=lambda form: sum(bool(candidates[field]) for field in form))
    form = next((form for form in fitting if all(candidates[field] for field in form)), nearest)
    # that a response is the better one in every record is no fix if a verdict says which is
    to_name = [field for field in form if not verdict or field not in WHOLE_PAIR_FIELDS]
    are_sentences = any(len(column.split()) > 3 or column.endswith((".", "?", "!")) for column in present)
    if isinstance(rows[0], TableRow) and are_sentences and not any(candidates.values()):
        raise InputError(
            f"the first line of {origin} names columns, and {shorten(present[0])} looks like data: write a line "
            f"such as prompt,chosen,rejected above it"
        )
    if not fitting or any(len(candidates[field]) != 1 for field in form):
        raise InputError(
            f"training on {trains_on} needs the columns {' or '.join('(' + ', '.join(each) + ')' for each in forms)}, "
            f"and it is not clear which of {', '.join(present)} in {origin} are these: name them, as in "
            f"{_write_override(key, to_name, candidates)} (docs/formats.md)"
        )
    # of several columns, none is a system turn for sure; a single word may name a model
    has_words = len(candidates[SYSTEM]) == 1 and any(
        not WORD.fullmatch(str(row.get(candidates[SYSTEM][0], ""))) for row in first_rows
    )
    # online runs draw other responses than a record's weight is for, and one margin does not fit all pairs of a list
    optional = {
        "weight": trains_on != "prompts",
        "margin": with_margins and "responses" not in form,
        "input": "prompt" in form,
        TOOLS: True,
        SYSTEM: SYSTEM in configured or has_words,
    }
    fields = (*form, *(field for field, is_read in optional.items() if is_read))
    used = {field: candidates[field][0] for field in fields if candidates[field]}
    unused = [column for column in present if column not in (verdict, *sides.values(), *used.values())]
    texts = [column for column in unused if any(isinstance(row.get(column), (str, list, dict)) for row in first_rows)]
    if form == WHOLE_PAIR_FIELDS and texts and not are_whole:
        with_prompt = _write_override(key, ("prompt", *to_name), {**candidates, "prompt": texts})
        raise InputError(
            f"{origin}: the prompt of chosen and rejected may be {' or '.join(texts)}, or what both begin with: give "
            f"{with_prompt}{'' if verdict else ', or ' + _write_override(key, form, candidates)}"
        )
    return Columns(used, unused, verdict, sides)


def _begins_with_prompt(value: Any) -> bool:
    """Whether a value is a dialogue, or messages that do not begin with an answer."""
    if isinstance(value, str):
        return ASSISTANT in value
    first = value[0] if isinstance(value, list) and value else None
    return is_message(first) and first.get("role", first.get("from")) not in ("assistant", "gpt")


def _collect_candidates(present: Sequence[str], configured: Mapping[str, str | None]) -> dict[str, list[str]]:
    """The columns of each field: that of the config, that of the field's name, or all with one of its OTHER_NAMES."""
    free = [column for column in present if column not in configured.values()]
    candidates = {"input": []}
    for field in FIELDS:
        names = (field, *OTHER_NAMES.get(field, ()))
        candidates[field] = [field] if field in free else [column for column in free if normalize(column) in names]
        if field in configured:
            candidates[field] = [] if configured[field] is None else [configured[field]]
    by_name = {column.lower(): column for column in candidates["prompt"]}
    if by_name.keys() == {"instruction", "input"}:  # of Alpaca's data
        candidates |= {"prompt": [by_name["instruction"]], "input": [by_name["input"]]}
    return candidates


def _find_verdict(rows: Sequence[Mapping], present: Sequence[str], origin: str) -> tuple[str | None, dict[str, str]]:
    """Find a column that names the better of two responses, and their columns by letter or digit."""
    by_name = {}
    for column in sorted(present, key=normalize):
        if match := RESPONSE.fullmatch(normalize(column)):
            by_name.setdefault(match.group(1, 4), {})[match[3]] = column
    pairs = [sides for sides in by_name.values() if "".join(sides) in ("ab", "01", "12")]
    named = [column for column in present if VERDICT.fullmatch(normalize(column))]
    if not pairs or not named:
        return None, {}
    verdict, sides = min(named, key=lambda name: normalize(name).startswith("label")), pairs[0]
    found = {_find_side(row.get(verdict)) for row in rows}
    if sides.keys() & found and (others := found & {*"012"} - sides.keys()):
        raise InputError(
            f"{origin}: {verdict} has the number {min(others)}, so it is not known which of "
            f"{' and '.join(sides.values())} each number stands for: write the name of the better column"
        )
    return verdict, sides


def _find_side(value: Any) -> str:
    """The letter or digit of the response that a value names, or ""."""
    text = str(value).removesuffix(".0")  # a number of a table may be a float
    match = SIDE.fullmatch(normalize(text))
    return match[1] if match and not text.startswith("-") else ""


def normalize(name: str) -> str:
    """Reduce a name or a value to small letters and digits."""
    return re.sub(r"[\W_]+", "", name.lower())


def _write_override(key: str, form: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
    """Write the override that gives each field its first candidate."""
    given = []
    for field in form:
        column = next(iter(candidates[field]), "COLUMN")
        given.append(f"{field}: {column if column.isidentifier() else json.dumps(column)}")
    return f"'{key}={{{', '.join(given)}}}'"
