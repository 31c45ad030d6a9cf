"""Custom data: pairs, targets, labelled responses and ranked lists of a user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from dpo.data.columns import find_columns, recognize_columns
from dpo.data.schema import ASSISTANT, LABEL_TYPES, Messages, PreferenceData, get_field, is_sharegpt
from dpo.errors import InputError
from dpo.losses import LONGEST_LIST
from dpo.numbers import count
from dpo.settings.choices import NUMBER_FIELDS

# the role of each speaker in ShareGPT's messages
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# labels in lower case, as text
DESIRABLE = ("true", "1", "1.0", "+1", "yes", "good", "desirable", "up", "thumbs up", "thumbs_up", "👍")
UNDESIRABLE = ("false", "0", "0.0", "-1", "no", "bad", "undesirable", "down", "thumbs down", "thumbs_down", "👎")


def get_custom(
    rows: Sequence[Mapping[str, Any]],
    origin: str,
    tokenizer: Any,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "mine",
    trains_on: str = "pairs",
    with_margins: bool = False,
) -> PreferenceData:
    """Convert custom records to preference data.

    Pairs come from `{prompt, chosen, rejected}`, or from `{chosen, rejected}` with a common beginning, the prompt.
    SFT targets also come from `{prompt, completion}`, and from `{messages}`, where the last message is the target;
    labelled responses from either of these with `label`. Ranked lists come from `{prompt, responses, scores}`, or from
    `{prompt, responses}` in order, best first; pairs and targets are made of them too. Prompts to answer come from
    `{prompt}`. Any record may have a `weight` and, `with_margins`, a `margin`.

    All fields are texts, or all are chat messages, which the tokenizer's chat template renders. A message is
    `{role, content}` or ShareGPT's `{from, value}`; one message may stand for a list. If chosen and rejected are
    messages, the prompt may also be a text: the content of a message that both begin with, as in UltraFeedback.
    `columns` maps fields to columns; other fields are recognized by name. Raises InputError, which names the record
    and `origin`.
    """
    data: PreferenceData | None = None
    n_tied_lists = 0
    options: dict[str, Any] = {"name": name, "origin": origin, "trains_on": trains_on, "with_margins": with_margins}
    recognized = recognize_columns(find_columns(rows), columns, **options)
    used = recognized.used
    if trains_on == "prompts":  # answers that a policy draws are of no record
        used.pop("weight", None)
    if "responses" in used:  # the pairs of a list have different margins
        used.pop("margin", None)
    for number, row in enumerate(rows, start=1):
        where = f"record {number} of {origin}"
        prompt, responses = _read_fields(row, used, where)
        is_chat = isinstance((*responses, prompt)[0], list)  # there may be no responses
        if data is None:
            data = PreferenceData(truncation_mode="keep_start", rendered=is_chat)
        elif data.rendered != is_chat:
            raise InputError(
                f"{where} holds {_name_kind(is_chat)}, and earlier records hold {_name_kind(not is_chat)}: use one kind"
            )
        if is_chat:
            messages, answers = _split_messages(prompt, responses, tokenizer, where)
            if "messages" in used and (last_role := answers[0][-1]["role"]) != "assistant":
                raise InputError(f"{where}: the last message is from {last_role}, and must be from assistant")
            prompt, responses = _render(messages, answers, tokenizer, where)
            data.messages[prompt] = [{key: message[key] for key in ("role", "content")} for message in messages]
        elif "messages" in used:
            raise InputError(f"{where}: {used['messages']} must be a list of chat messages, and is text")
        elif prompt is None:
            prompt, responses = _find_shared_prompt(responses, used, where, name=name)
        if not prompt:
            raise InputError(
                f"{where}: the prompt is empty, so nothing predicts the first token of a response: give the record a "
                f"prompt, or remove it"
            )
        if "weight" in used:
            data.weights.setdefault(prompt, []).append(_read_number(row, used["weight"], where, above_zero=True))
        if "margin" in used:
            data.margins.setdefault(prompt, []).append(_read_number(row, used["margin"], where))
        if "responses" in used:
            scores = _read_scores(row, used, len(responses), where, trains_on=trains_on)
            n_tied_lists += len(set(scores)) < len(scores)
            data.add_list(prompt, responses, scores)
        elif "label" in used:
            data.add_labelled(prompt, *responses, is_desirable=_read_label(row, used["label"], where))
        elif len(responses) == 2:
            data.add_pair(prompt, *responses)
        elif responses:
            data.add_target(prompt, *responses)
        else:
            data.add_prompt(prompt)
    data = data if data is not None else PreferenceData(truncation_mode="keep_start")
    if note := recognized.describe(columns):
        data.notes.append(f"{origin}: {note}")
    if n_tied_lists:
        data.notes.append(f"{origin}: {count(n_tied_lists, 'list')} with equal scores, which make no pair")
    return data


def _read_label(row: Mapping[str, Any], column: str, where: str) -> bool:
    """Read whether a response is desirable."""
    value = get_field(row, column, where, LABEL_TYPES)
    label = str(value).strip().lower()
    if label not in DESIRABLE + UNDESIRABLE:
        raise InputError(
            f"{where}: {column} is {value!r:.80}, which does not say whether the response is good: write true or "
            f"false (1 or 0, good or bad, up or down), or remove the record"
        )
    return label in DESIRABLE


def _read_number(row: Mapping[str, Any], column: str, where: str, *, above_zero: bool = False) -> float:
    """Read a number that is finite, and positive or not negative."""
    value = get_field(row, column, where, (int, float))
    if not (0 < value < math.inf or (value == 0 and not above_zero)):
        wanted = "a finite number above 0" if above_zero else "a finite number, 0 or more"
        raise InputError(f"{where}: {column} is {value}, and must be {wanted}: correct it, or remove the record")
    return float(value)


def _read_scores(
    row: Mapping[str, Any], used: Mapping[str, str], n_responses: int, where: str, *, trains_on: str
) -> list[float]:
    """Read the scores of a ranked list's responses, higher for better ones.

    Without a column for them, the responses are in order, best first. Raises InputError for a list that a loss of lists
    cannot train on.
    """
    scores = [-float(i) for i in range(n_responses)]
    if "scores" in used:
        values = get_field(row, used["scores"], where, list)
        scores = [get_field({used["scores"]: value}, used["scores"], where, (int, float)) for value in values]
        if len(scores) != n_responses or not all(map(math.isfinite, scores)):
            raise InputError(
                f"{where}: {used['scores']} is {values!r:.80}, and must have a finite number for each of the "
                f"{n_responses} in {used['responses']}: correct it, or remove the record"
            )
    if trains_on == "lists" and len(set(scores)) < n_responses:
        raise InputError(
            f"{where}: {used['scores']} has equal numbers, and this loss needs an order without ties: remove all but "
            f"one of these responses, or train with a loss of pairs, such as loss=dpo, which does not pair them"
        )
    if trains_on == "lists" and n_responses > LONGEST_LIST:
        raise InputError(
            f"{where}: {used['responses']} has {n_responses} responses, and this loss takes lists of up to "
            f"{LONGEST_LIST}: remove some, or train with a loss of pairs, such as loss=dpo"
        )
    return scores


def _find_shared_prompt(
    responses: Sequence[str], used: Mapping[str, str], where: str, *, name: str
) -> tuple[str, list[str]]:
    """Split chosen and rejected texts into their prompt and the responses."""
    prompt, *split_responses = split_shared_prompt(*responses)
    if not prompt:
        raise InputError(
            f"{where}: {used['chosen']} and {used['rejected']} begin with no word in common, which would be the "
            f"prompt: give a column with the prompt, as dataset_sources.{name}.columns.prompt=COLUMN"
        )
    return prompt, split_responses


def _name_kind(is_chat: bool) -> str:
    return "chat messages" if is_chat else "text"


def _read_fields(row: Mapping[str, Any], used: Mapping[str, str], where: str) -> tuple[Any, list[Any]]:
    """Read a record's prompt, or None without one, and its responses.

    Raises InputError unless all responses are texts or all are chat messages, and the prompt goes with them. `used`
    maps fields to columns.
    """
    fields = {
        field: _as_messages(get_field(row, column, where, (str, list, dict)), where)
        for field, column in used.items()
        if field not in ("input", "label", "responses", "scores", *NUMBER_FIELDS)
    }
    prompt = fields.get("prompt")
    responses = [value for field, value in fields.items() if field != "prompt"]
    if "responses" in used:
        column = used["responses"]
        values = get_field(row, column, where, list)
        if len(values) < 2:
            raise InputError(
                f"{where}: {column} has {count(len(values), 'response')}, and must have 2 or more: add some, or remove "
                f"the record"
            )
        responses = [_as_messages(get_field({column: v}, column, where, (str, list, dict)), where) for v in values]
    if "input" in used and row.get(used["input"]) not in (None, ""):  # goes below the instruction, as in Alpaca
        prompt = "\n\n".join(get_field(row, used[field], where) for field in ("prompt", "input"))
    is_chat = isinstance((*responses, prompt)[0], list)
    is_mixed = any(isinstance(response, list) != is_chat for response in responses)
    if is_mixed or (isinstance(prompt, list) and not is_chat):
        values = [*fields.items(), *(("responses", response) for response in responses if "responses" in used)]
        kinds = dict.fromkeys(f"{used[field]} holds {_name_kind(isinstance(value, list))}" for field, value in values)
        raise InputError(f"{where}: {', '.join(kinds)}; they must all be text or all be chat messages")
    return prompt, responses


def _as_messages(value: Any, where: str) -> str | list[Any]:
    """Return a text unchanged, and messages as `{role, content}`."""
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list) else [value]
    if not any(map(is_sharegpt, messages)):
        return messages  # `_split_messages` checks their role and content
    speakers = [get_field(message, "from", where) for message in messages]
    if unknown := next((speaker for speaker in speakers if speaker not in SHAREGPT_ROLES), None):
        raise InputError(f"{where}: a message is from {unknown!r}, and must be from one of {', '.join(SHAREGPT_ROLES)}")
    return [
        {"role": SHAREGPT_ROLES[speaker], "content": get_field(message, "value", where)}
        for speaker, message in zip(speakers, messages, strict=True)
    ]


def split_shared_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts with a common beginning into (prompt, chosen, rejected).

    If they share an `\\n\\nAssistant:`, the prompt ends with the last one, as in HH. Otherwise the prompt is the common
    beginning up to its last whitespace, so that no word is split and each response starts with a space.
    """
    shared = _common_start(chosen, rejected)
    marker_start = shared.rfind(ASSISTANT)
    if marker_start >= 0:
        prompt_length = marker_start + len(ASSISTANT)
    else:
        prompt_length = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return shared[:prompt_length], chosen[prompt_length:], rejected[prompt_length:]


def _common_start(*texts: str) -> str:
    """The longest text with which all texts begin."""
    first, last = min(texts), max(texts)  # the texts between them, in lexicographic order, begin as both do
    return next((first[:i] for i, character in enumerate(first) if character != last[i]), first)


def _split_messages(
    prompt: str | Messages | None, responses: Sequence[Messages], tokenizer: Any, where: str
) -> tuple[Messages, list[Messages]]:
    """Split a record's messages into the prompt's and each response's.

    If the prompt is not messages, it is those with which all responses begin. If it is a text, one of them must have
    it as its content.
    """
    for messages in (prompt if isinstance(prompt, list) else [], *responses):
        for message in messages:
            get_field(message, "role", where)
            if tokenizer.eos_token and tokenizer.eos_token in get_field(message, "content", where):
                raise InputError(
                    f"{where}: a message contains the EOS token {tokenizer.eos_token!r}: remove it from {message!r}"
                )
    if isinstance(prompt, list):
        prompt_messages, answers = prompt, list(responses)
    else:
        prompt_messages = _shared_messages(responses)
        if prompt is not None and all(message["content"] != prompt for message in prompt_messages):
            raise InputError(
                f"{where}: the prompt is not the content of any message with which the responses begin: make it one, "
                f"or give no column for the prompt"
            )
        answers = [dialogue[len(prompt_messages) :] for dialogue in responses]
    if not (prompt_messages and all(answers)):
        raise InputError(f"{where}: a prompt and its responses need at least one message each")
    return prompt_messages, answers


def _shared_messages(dialogues: Sequence[Messages]) -> Messages:
    """The messages with which all dialogues begin, without the last of any."""
    shared = []
    for messages in zip(*(dialogue[:-1] for dialogue in dialogues), strict=False):
        if any(message != messages[0] for message in messages):
            break
        shared.append(messages[0])
    return shared


def _render(prompt: Messages, responses: Sequence[Messages], tokenizer: Any, where: str) -> tuple[str, list[str]]:
    """Render a prompt and its responses as texts, with the chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{where} holds chat messages, but the tokenizer has no chat template: name one that has, as "
            f"model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
        )
    try:
        closed_prompt = tokenizer.apply_chat_template(prompt, tokenize=False)
        open_prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        dialogues = [tokenizer.apply_chat_template(prompt + r, tokenize=False) for r in responses]
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise any of these on unusual content
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error
    # the generation prompt may have what a finished turn lacks, such as a thinking tag: keep what all begin with
    prompt_text = _common_start(open_prompt, *dialogues)
    if not prompt_text.startswith(closed_prompt):
        raise InputError(
            f"{where}: the chat template renders the prompt differently once a response follows it, so the two cannot "
            f"be told apart: name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL, or "
            f"use text instead"
        )
    response_texts = [dialogue[len(prompt_text) :] for dialogue in dialogues]
    return prompt_text, [_remove_final_eos(text, tokenizer.eos_token) for text in response_texts]


def _remove_final_eos(text: str, eos: str | None) -> str:
    """Remove the EOS that ends a turn, because tokenization appends one."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
