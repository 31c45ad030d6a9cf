"""Which column of own data is what: by its name, where exactly one fits, and by what the config says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpo.errors import InputError
from dpo.settings.choices import COLUMNS

# names that a column may have beside ours
OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input"),
    "chosen": ("preferred", "accepted", "chosen_response", "response_chosen", "better", "best"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected", "worse", "worst"),
    "completion": ("response", "output", "answer", "target"),
    "messages": ("conversation", "conversations"),
}
PAIRS, TARGETS, CHATS = ("prompt", "chosen", "rejected"), ("prompt", "completion"), ("messages",)
PLAIN = re.compile(r"[A-Za-z_][\w .-]*", re.ASCII)  # what Hydra takes without quotes


def find_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all fields that any record has."""
    known = getattr(rows, "column_names", None)  # of a datasets.Dataset, which would take long to read twice
    return list(known if known is not None else dict.fromkeys(key for row in rows for key in row))


def recognize_columns(
    present: Sequence[str], given: Mapping[str, str], *, name: str, origin: str, sft_mode: bool
) -> dict[str, str]:
    """Our names to those of the records: of a pair, or under SFT also of a prompt with its completion, or of messages.

    `given` is what the config says of dataset `name`. A pair's prompt may be left out; `input` is what comes below a
    prompt that is an instruction. Raises InputError, with what to give, if none or several columns fit.
    """
    _check_given(present, given, name, origin)
    fitting = {ours: [given[ours]] if ours in given else _find(ours, present, given) for ours in COLUMNS}
    forms = [form for form in (PAIRS, TARGETS, CHATS) if given.keys() <= set(form)]
    complete = [form for form in forms if all(fitting[ours] for ours in form if (form, ours) != (PAIRS, "prompt"))]
    beside = {}
    by_name = sorted((column.strip().lower(), column) for column in fitting["prompt"])
    if [name for name, _ in by_name] == ["input", "instruction"]:  # as in Alpaca
        (_, extra), (_, instruction) = by_name
        beside, fitting["prompt"] = {"input": extra}, [instruction]
    listed = f"the columns are {', '.join(present)}"
    if not sft_mode and PAIRS not in complete:
        missing = " and ".join(ours for ours in ("chosen", "rejected") if not fitting[ours])
        otherwise = ", or train on what is there with loss=sft" if complete else ""
        raise InputError(
            f"{origin} has no {missing or 'pairs'}, which a loss of pairs needs; {listed}: "
            f"give {_override(name, PAIRS, fitting)}{otherwise}"
        )
    if not complete:
        raise InputError(
            f"{origin} has neither prompt and completion nor messages, one of which SFT needs; {listed}: "
            f"give {_override(name, TARGETS, fitting)}, or columns={{messages: COLUMN}}"
        )
    form = complete[0]
    for ours in form:
        if len(fitting[ours]) > 1:
            which = " or ".join(fitting[ours])
            raise InputError(f"{origin}: {ours} may be {which}: choose one, as in {_override(name, form, fitting)}")
    return {ours: fitting[ours][0] for ours in form if fitting[ours]} | (beside if "prompt" in form else {})


def _check_given(present: Sequence[str], given: Mapping[str, str], name: str, origin: str) -> None:
    if unknown := given.keys() - set(COLUMNS):
        raise InputError(f"columns has unknown names {', '.join(sorted(unknown))}; the names are {', '.join(COLUMNS)}")
    if not any(given.keys() <= set(form) for form in (PAIRS, TARGETS, CHATS)):
        raise InputError(
            f"dataset_sources.{name}.columns names {', '.join(given)}: give those of pairs ({', '.join(PAIRS)}), "
            f"of targets ({', '.join(TARGETS)}), or messages alone"
        )
    for ours, theirs in given.items():
        if theirs not in present:
            raise InputError(
                f"dataset_sources.{name}.columns.{ours}={theirs}: {origin} has no such column; there are "
                f"{', '.join(present)}"
            )


def _find(ours: str, present: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """The columns that may be one of ours: the one of its name, else all that have another of its names."""
    free = [column for column in present if column not in given.values()]
    if ours in free:
        return [ours]
    names = (ours, *OTHER_NAMES[ours])
    return [column for column in free if re.sub(r"[\s-]+", "_", column.strip().lower()) in names]


def _override(name: str, form: Sequence[str], fitting: Mapping[str, Sequence[str]]) -> str:
    """What to type, with the columns that are known."""
    columns = (f"{ours}: {_quote(fitting[ours][0]) if fitting[ours] else 'COLUMN'}" for ours in form)
    return f"'dataset_sources.{name}.columns={{{', '.join(columns)}}}'"


def _quote(column: str) -> str:
    return column if PLAIN.fullmatch(column) else f'"{column}"'
