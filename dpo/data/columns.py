"""Recognizes which column of custom data, such as `preferred`, is which field of a form, such as `chosen`."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpo.data.schema import ASSISTANT, Row, TableRow, is_message
from dpo.errors import InputError
from dpo.numbers import count
from dpo.redaction import shorten
from dpo.settings.places import FIELDS, FORMS, OPTIONAL_FIELDS, SYSTEM, TOOLS, WHOLE_PAIR_FIELDS

N_INSPECTED = 100  # rows whose values are looked at
# Other names of our fields, as `normalize` returns them. Those of a pair may be joined to a noun, as in `good_answer`.
SYNONYMS = {
    "prompt": "question instruction query input userprompt usermessage userquestion userinput",
    "chosen": "preferred accepted selected better best good winner winning win positive",
    "rejected": "dispreferred unpreferred nonpreferred worse worst bad loser losing lose negative",
    "completion": "response output answer target reply",
    "messages": "conversation conversations",
    "label": "labels desirable isdesirable thumbs thumbsup feedback ktotag",
    SYSTEM: "systemprompt",
    TOOLS: "functions",
}
NOUNS = ("response", "answer", "completion", "output", "reply", "text", "messages", "message", "conversation")
# Names of a column that says which of two others is better.
VERDICTS = f"{SYNONYMS['chosen']} chosen preference choice verdict label".split()
SIDES = ("ab", "12", "01")  # the letters or digits in the names of these two columns
PLAIN = re.compile(r"[a-z_]\w*", re.ASCII | re.IGNORECASE)  # a text that Hydra's overrides may have without quotes
WORD = re.compile(r"[\w./:-]*", re.ASCII)  # a single word, such as the name of a model
TIES = ("tie", "both", "neither", "equal", "draw", "same", "none", "nopreference")  # prefixes, as in "both bad"


class Columns(NamedTuple):
    used: dict[str, str]  # the column of each field; with a verdict, chosen and rejected are in any order
    unused: list[str]  # the other columns
    verdict: str = ""  # the column that says which of two responses is better
    sides: Mapping[str, str] = {}  # the columns of these two responses, by the letter or digit in their names

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
        """Find the column of each field in a row, with the better response as chosen; {} for a tie.

        Raises InputError if the verdict does not say which response is better.
        """
        if not self.verdict:
            return self.used
        value = row.get(self.verdict)
        better = _find_side(value)
        if better in self.sides:
            [worse] = self.sides.keys() - {better}
            return {**self.used, "chosen": self.sides[better], "rejected": self.sides[worse]}
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
    chosen and rejected are dialogues, if there are no other columns, or if the config gives these two alone. Error
    messages call the dataset `name`, and the place of its rows `origin`.
    """
    objects = [row for row in rows if isinstance(row, Mapping)]
    if not objects and isinstance(rows[0], InputError):  # no row can be parsed
        raise rows[0]
    first_rows = objects[:N_INSPECTED]
    present = list(dict.fromkeys(column for row in objects for column in row))
    key = f"dataset_sources.{name}.columns"
    mapped = [column for column in configured.values() if column]
    if len(set(mapped)) < len(mapped) or not set(mapped) <= set(present):
        raise InputError(
            f"{key} gives {', '.join(mapped)}, which must be different columns of {origin}; it has {', '.join(present)}"
        )
    candidates = _find_candidates(present, configured)
    verdict, sides = "", {}
    # A column of rejected texts makes a verdict needless, as does a config that names columns of responses. But a
    # column such as `loser` may itself be a verdict: at least half of its values are then "a", "b" or the like.
    rejected_sides = [_find_side(row.get(column)) for column in candidates["rejected"] for row in first_rows]
    if 2 * rejected_sides.count("") <= len(rejected_sides) and configured.keys() <= {"prompt", *OPTIONAL_FIELDS}:
        verdict, sides = _find_verdict(present)
    # in any order, as `Columns.find_fields` finds for each row which of the two is chosen
    for field, column in zip(WHOLE_PAIR_FIELDS, sides.values(), strict=False):
        candidates[field] = [column]
    have_prompt = _begin_with_prompt(first_rows, candidates, configured)
    # One alone may be a verdict. No form uses it, and the advice in errors should not name it as a response.
    if not (candidates["chosen"] and candidates["rejected"]):
        candidates |= {field: [] for field in WHOLE_PAIR_FIELDS if field not in configured}
    elif not have_prompt:
        # the prompt may be a chat in a column of messages, which those of chosen and rejected continue
        candidates["prompt"] = candidates["prompt"] or candidates["messages"]
    form, is_clear = _choose_form(FORMS[trains_on], candidates, configured)
    # advice in errors does not map chosen and rejected to columns if the verdict of each row does
    to_name = [field for field in form if not sides or field not in WHOLE_PAIR_FIELDS]
    if not is_clear:
        looks_like_data = any(len(column.split()) > 3 or column.endswith((".", "?", "!")) for column in present)
        if isinstance(rows[0], TableRow) and not any(candidates.values()) and looks_like_data:
            raise InputError(
                f"the first line of {origin} names columns, and {shorten(present[0])} looks like data: write a line "
                f"such as prompt,chosen,rejected above it"
            )
        forms = " or ".join(f"({', '.join(each)})" for each in FORMS[trains_on])
        raise InputError(
            f"training on {trains_on} needs the columns {forms}, and it is not clear which of {', '.join(present)} in "
            f"{origin} are these: name them, as in {_write_override(key, to_name, candidates)} (docs/formats.md)"
        )
    if "rejected" not in form or not sides:
        verdict, sides = "", {}
    named = {_find_side(row.get(verdict)) for row in objects if verdict} - {""}
    # 0 and 1 beside response_1 and response_2 may be the first and the second, or a tie and the first
    if named - sides.keys() and sides.keys() - named:
        raise InputError(
            f"{origin}: {verdict} has the values {', '.join(sorted(named))}, which do not say whether "
            f"{' or '.join(sides.values())} is better: write the name of the better column, or tie"
        )
    fields = [*form, TOOLS]
    if "prompt" in form:
        fields.append("input")
    if trains_on != "prompts":  # a weight is for a record's own responses, and online runs draw others
        fields.append("weight")
    if with_margins and "responses" not in form:  # one margin does not fit all pairs of a list
        fields.append("margin")
    # A column `system` with single words only does not hold system turns, but names, such as a model's.
    systems = [str(row.get(column, "")) for column in candidates[SYSTEM] for row in objects]
    has_words = len(candidates[SYSTEM]) == 1 and not all(map(WORD.fullmatch, systems))
    if SYSTEM in configured or has_words:
        fields.append(SYSTEM)
    used = {field: candidates[field][0] for field in fields if candidates[field]}
    unused = [column for column in present if column not in (verdict, *sides.values(), *used.values())]
    unused_texts = [
        column for column in unused if any(isinstance(row.get(column), (str, list, dict)) for row in first_rows)
    ]
    if form == WHOLE_PAIR_FIELDS and unused_texts and not have_prompt:
        with_prompt = _write_override(key, ("prompt", *to_name), {**candidates, "prompt": unused_texts})
        without = "" if verdict else f", or {_write_override(key, form, candidates)}"
        raise InputError(
            f"{origin}: the prompt of chosen and rejected may be {' or '.join(unused_texts)}, or what both begin "
            f"with: set {with_prompt}{without}"
        )
    return Columns(used, unused, verdict, sides)


def _choose_form(
    forms: Sequence[tuple[str, ...]], candidates: Mapping[str, list[str]], configured: Mapping[str, str | None]
) -> tuple[tuple[str, ...], bool]:
    """Choose the first form with a column for each field, or else the one with columns for the most fields.

    Among forms with columns for equally many fields, one that is not of pairs or lists is preferred. Forms that lack a
    field of the config are left out, unless all lack one. Also returns whether each field has exactly one candidate.
    """
    fitting = [form for form in forms if configured.keys() <= {*form, *OPTIONAL_FIELDS}]
    for form in fitting:
        if all(candidates[field] for field in form):
            return form, all(len(candidates[field]) == 1 for field in form)
    n_fields = {form: sum(bool(candidates[field]) for field in form) for form in fitting or forms}
    return max(n_fields, key=lambda form: (n_fields[form], form not in FORMS["pairs"])), False


def _find_candidates(present: Sequence[str], configured: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Find each field's columns: the config's, or else the one with the field's name, or else all with a synonym."""
    free = [column for column in present if column not in configured.values()]
    candidates = {"input": []}  # the second part of a prompt, which only Alpaca's form has
    for field in FIELDS:
        names = {field, *SYNONYMS.get(field, "").split()}
        if field in configured:  # [] if the config says that it has none
            candidates[field] = [column for column in [configured[field]] if column is not None]
        elif field in free:
            candidates[field] = [field]
        elif field in WHOLE_PAIR_FIELDS:
            candidates[field] = [column for column in free if _remove_noun(normalize(column)) in names]
        else:
            candidates[field] = [column for column in free if normalize(column) in names]
    by_name = {column.lower(): column for column in candidates["prompt"]}
    if by_name.keys() == {"instruction", "input"}:  # as in Alpaca's data
        candidates |= {"prompt": [by_name["instruction"]], "input": [by_name["input"]]}
    return candidates


def _remove_noun(name: str) -> str:
    for noun in NOUNS:
        name = name.removeprefix(noun).removesuffix(noun)
    return name


def _begin_with_prompt(
    rows: Sequence[Mapping], candidates: Mapping[str, list[str]], configured: Mapping[str, str | None]
) -> bool:
    """Whether the values of chosen and rejected include their prompt, so that no column for it is needed.

    They do if they are dialogues in HH's format, or messages that do not begin with an answer. A column that the
    config gives is assumed to include it.
    """
    for field in WHOLE_PAIR_FIELDS:
        for column in candidates[field][:1]:
            for value in [row.get(column) for row in rows if field not in configured]:
                first = value[0] if isinstance(value, list) and value else None
                is_prompt = is_message(first) and first.get("role", first.get("from")) not in ("assistant", "gpt")
                if value is not None and not is_prompt and ASSISTANT not in str(value):
                    return False
    return True


def _find_verdict(present: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Find a column that may name the better of two responses, "" if there is none, and the columns of the responses.

    Returns, for instance, `("winner", {"a": "response_a", "b": "response_b"})`, or `("winner", {})` without such
    columns.
    """
    by_name = {}
    for column in present:  # such as `winner`, or `better_response_id`
        by_name[_remove_noun(normalize(column).removesuffix("id").removesuffix("index"))] = column
    verdict = next((by_name[word] for word in VERDICTS if word in by_name), "")
    if not verdict:
        return "", {}
    longest_first = sorted(present, key=len, reverse=True)  # `answer_1` replaces `answer_1_text`
    for noun in NOUNS:
        sides = {_find_side(column): column for column in longest_first if noun in normalize(column)}
        sides.pop("", None)
        if "".join(sorted(sides)) in SIDES:
            return verdict, sides
    return verdict, {}


def _find_side(value: Any) -> str:
    """Find the letter or digit of the response that a value or column names, as "a" in `Response A`; "" if none."""
    text = str(value).removesuffix(".0")  # a number of a table may be a float
    side = normalize(text)
    for word in ("model", "assistant", "option"):
        side = side.removeprefix(word)
    side = _remove_noun(side)
    # `normalize` has taken off the sign of a number below 0, which names no side
    return side if side in ("a", "b", "0", "1", "2") and not text.startswith("-") else ""


def normalize(name: str) -> str:
    """Reduce a name or a value to lowercase letters and digits."""
    return re.sub(r"[\W_]+", "", name.lower())


def _write_override(key: str, form: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
    """Write the override, quoted for a shell, that maps fields to their first candidates, or else to COLUMN."""
    entries = []
    for field in form:
        column = next(iter(candidates[field]), "COLUMN")
        if not PLAIN.fullmatch(column) or column.lower() in ("null", "true", "false"):
            column = json.dumps(column, ensure_ascii=False)
        entries.append(f"{field}: {column}")
    return shlex.quote(f"{key}={{{', '.join(entries)}}}")
