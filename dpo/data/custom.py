"""Custom data: pairs, targets, labelled responses and ranked lists of a user."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from dpo.data.columns import find_columns, recognize_columns
from dpo.data.records import FORMATS, is_system_unused, name_kind, read_record, recognize_format
from dpo.data.schema import ASSISTANT, PreferenceData, get_field
from dpo.data.sources import iterate_places
from dpo.data.templates import ChatTemplate
from dpo.data.tokenization import remove_final_eos
from dpo.data.verdicts import find_verdicts
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.numbers import count


def get_custom(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str | None] = MappingProxyType({}),
    *,
    name: str = "mine",
    data_format: str | None = None,
    trains_on: str = "pairs",
    with_margins: bool = False,
) -> PreferenceData:
    """Convert custom records to preference data.

    Records have these fields:

    - pairs: `{prompt, chosen, rejected}`; `{chosen, rejected}`, which begin with the prompt; or `{messages, rejected}`,
      where the last message is chosen
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

    `columns` maps fields to columns, and a field without a column to None. Other fields are recognized by name, or have
    the columns of `data_format`, a key of `FORMATS`. Raises InputError, which names the record and `origin`.
    """
    data: PreferenceData | None = None
    tally: Counter[str] = Counter()
    template = ChatTemplate(tokenizer)
    present = find_columns(rows)
    verdicts = None if data_format else find_verdicts(rows, present, columns)
    recognized = recognize_columns(
        verdicts.rename(present) if verdicts else present,
        columns,
        name=name,
        origin=origin,
        trains_on=trains_on,
        format_columns=FORMATS[data_format].columns if data_format else None,
        with_margins=with_margins,
    )
    used = recognized.used
    if trains_on == "prompts":  # a weight is for a record's responses, and an online run draws others
        used.pop("weight", None)
    if "responses" in used:  # one margin does not fit all pairs of a list
        used.pop("margin", None)
    for row, where in zip(rows, iterate_places(rows, origin), strict=True):
        if verdicts:
            pair = verdicts.read(row, where)
            if not pair:
                tally["ties"] += 1
                continue
            used = used | pair
        record = read_record(row, used, where, name=name)
        if data is None:
            data_format = data_format or recognize_format(row, used, record)
            is_apart = data_format == "hh" and not record.is_chat  # as the dataset hh, whatever its name
            data = PreferenceData(truncation_mode="keep_end", rendered=record.is_chat, apart=is_apart)
        elif data.rendered != record.is_chat:
            raise InputError(
                f"{where} holds {name_kind(record.is_chat)}, and earlier records hold {name_kind(not record.is_chat)}: "
                f"use one kind"
            )
        prompt, responses = record.join_prompt(), record.responses
        if record.is_chat:
            chat = template.render(prompt, responses, record.tools, where)
            prompt, responses = chat.prompt, chat.responses
            data.add_chat(chat)
        elif not data.apart:  # tokenization appends EOS
            responses = [remove_final_eos(response, tokenizer) for response in responses]
        tally["unused system turns"] += is_system_unused(row, used, record)
        tally["texts with tools"] += bool(record.tools) and not record.is_chat
        if not (record.prompt or record.input):
            raise InputError(
                f"{where}: the prompt is empty, so nothing predicts the first token of a response: give the record a "
                f"prompt, or remove it"
            )
        if "weight" in used:
            data.weights.setdefault(prompt, []).append(_read_number(row, used["weight"], where, above_zero=True))
        if "margin" in used:
            data.margins.setdefault(prompt, []).append(_read_number(row, used["margin"], where))
        scores = read_scores(row, used, len(responses), where) if record.is_list else None
        if scores is not None:
            if trains_on == "lists":
                _check_list(scores, used, where)
            tally["lists with ties"] += len(set(scores)) < len(scores)
            tally["lists without pairs"] += len(set(scores)) == 1
        tally["diverging dialogues"] += data_format == "hh" and any(ASSISTANT in response for response in responses)
        data.add_record(prompt, responses, label=record.label, scores=scores)
    data = data if data is not None else PreferenceData(truncation_mode="keep_end")
    format_note = f"format {data_format}" if data_format else ""
    note = "; ".join(filter(None, (format_note, recognized.describe(columns))))
    if note:
        data.notes.append(f"{origin}: {note}")
    if verdicts:
        data.notes.append(f"{origin}: {verdicts.describe(tally['ties'])}")
    data.notes += [*template.describe(origin), *_describe_tally(tally, origin)]
    if trains_on == "pairs" and 0 < tally["lists without pairs"] == len(rows):
        raise InputError(
            f"{origin}: the responses of each list have equal scores, which make no pair: give different scores, or "
            f"train with loss=sft"
        )
    return data


def _describe_tally(tally: Mapping[str, int], origin: str) -> Iterator[str]:
    """Describe unusual records of `origin`; `tally` has their numbers."""
    if n := tally["diverging dialogues"]:
        yield (
            f"{origin}: in {count(n, 'record')} the dialogues diverge before the last answer; the prompt ends where "
            f"they diverge"
        )
    if n := tally["unused system turns"]:
        yield f"{origin}: the system turn of {count(n, 'record')} is not used, as the chat has one of its own"
    if n := tally["texts with tools"]:
        yield (
            f"warning: {origin}: {count(n, 'text has', 'texts have')} tools, which only a chat template shows to the "
            f"model: `python -m scripts.convert IN OUT --to trl_conversational` makes messages of texts"
        )
    if n := tally["lists with ties"]:
        yield f"{origin}: {count(n, 'list')} with equal scores, which make no pair"


def _read_number(row: Mapping[str, Any], column: str, where: str, *, above_zero: bool = False) -> float:
    """Read a finite number, which may be text as in CSV."""
    value = row.get(column)
    if isinstance(value, (str, Decimal)):
        with suppress(ValueError):
            value = float(value)
    number = _as_float(get_field({column: value}, column, where, (int, float)))
    if not math.isfinite(number) or (above_zero and number <= 0):
        wanted = "a finite number above 0" if above_zero else "a finite number"
        raise InputError(f"{where}: {column} is {value!s:.80}, and must be {wanted}: correct it, or remove the record")
    return number


def _as_float(value: float) -> float:
    """Return a number as a float, infinity for a huge integer."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_scores(row: Mapping[str, Any], used: Mapping[str, str], n_responses: int, where: str) -> list[float]:
    """Read the scores of a ranked list's responses, higher for better ones.

    Without a column of scores, the responses are in order, best first.
    """
    if "scores" not in used:
        return [-float(i) for i in range(n_responses)]
    column = used["scores"]
    values = get_field(row, column, where, list)
    items = {f"{column}[{i}]": value for i, value in enumerate(values)}
    scores = [_as_float(get_field(items, item, where, (int, float))) for item in items]
    if len(scores) != n_responses or not all(map(math.isfinite, scores)):
        raise InputError(
            f"{where}: {column} is {values!r:.80}, and must have a finite number for each of the {n_responses} in "
            f"{used['responses']}: correct it, or remove the record"
        )
    return scores


def _check_list(scores: Sequence[float], used: Mapping[str, str], where: str) -> None:
    """Check that a loss of lists can train on a ranked list."""
    if len(set(scores)) < len(scores):
        raise InputError(
            f"{where}: {used['scores']} has equal numbers, and this loss needs an order without ties: remove all but "
            f"one of the equal responses, or train with a loss of pairs, such as loss=dpo, which leaves them unpaired"
        )
    if len(scores) > LONGEST_LIST:
        raise InputError(
            f"{where}: {used['responses']} has {len(scores)} responses, and this loss takes lists of up to "
            f"{LONGEST_LIST}: remove some responses, or train with a loss of pairs, such as loss=dpo"
        )
