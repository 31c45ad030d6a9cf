"""Chats rendered by a chat template, and which parts are scored.

A response may have several messages. Those of the assistant are scored, each with the end of its turn. Results of
tools, questions and the headers of turns are not. In messages, the strings of control tokens are ordinary text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from dpo.data.asking import (
    TemplateRejects,
    apply_template,
    check_texts,
    escape_texts,
    is_prefilled,
    iterate_texts,
    render_open,
)
from dpo.data.schema import THOUGHTS, Messages, Record, common_start
from dpo.data.tokenization import remove_final_eos, unescape
from dpo.errors import InputError
from dpo.numbers import count

SHOWN = 60  # characters of a text in a note
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
CONVERSATION = "conversation"
# what a template does to conversations, and the note on it; {example} is the first text that it is of
NOTES = {
    "changed": "warning: {origin}: the chat template leaves out or changes text in {n} of {conversations}, such as "
    "{example}",
    "rewritten": "warning: {origin}: in {n} of {conversations} the chat template renders earlier turns of the response "
    "differently once others follow, so only the last answer is scored: give one record for each answer to train on "
    "all",
    "escaped": "{origin}: strings of control tokens in messages are ordinary text, {n} in all, as in {example}",
}


def describe(changes: Sequence[tuple[str, str]], origin: str) -> Iterator[str]:
    """Describe what templates did to the conversations of `origin`: their `changes`."""
    counts = Counter(name for name, _ in changes)
    conversations = count(counts[CONVERSATION], "conversation")
    for name, note in NOTES.items():
        if n := counts[name]:
            example = next(example for kind, example in changes if kind == name)
            yield note.format(origin=origin, n=f"{n:,}", example=repr(example), conversations=conversations)


class ChatTemplate:
    """A tokenizer's chat template; `changes` has what it does to conversations, each with a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.changes: list[tuple[str, str]] = []

    def render(self, record: Record, where: str) -> Record:
        """Render the prompt and the responses of a record of messages.

        Responses continue the prompt's last turn if it is the assistant's. Raises InputError if the template rejects
        the messages, or if the rendered conversations do not begin with the rendered prompt.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{where} holds chat messages, but the tokenizer has no chat template: name a tokenizer with one, as "
                f"model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
            )
        before, *answers = (
            self._escape(messages, "a message", where) for messages in (record.prompt, *record.responses)
        )
        tools = self._escape(record.tools, "a tool", where) or None
        try:
            return self._render(record, before, answers, tools, where)
        except TemplateRejects as error:
            what = "messages or tools" if tools else "messages"
            raise InputError(f"{where}: the tokenizer's chat template rejects these {what}: {error}") from error

    def _escape(self, value: Any, what: str, where: str) -> Any:
        """Make strings of control tokens in messages or tools ordinary text."""
        check_texts(value, what, where)
        escaped = escape_texts(value, self.tokenizer)
        if escaped != value:
            for text, text_escaped in zip(iterate_texts(value), iterate_texts(escaped), strict=True):
                if text != text_escaped:
                    self.changes.append(("escaped", text[:SHOWN]))
        return escaped

    def _render(self, record: Record, before: Messages, answers: Sequence[Messages], tools: Any, where: str) -> Record:
        continued = is_prefilled(before) and all(answer[0]["role"] == "assistant" for answer in answers)
        chats = [_continue(before, answer) if continued else before + answer for answer in answers]
        dialogues = [apply_template(self.tokenizer, chat, tools=tools) for chat in chats]
        open_prompt, start = self._find_start(before, tools, dialogues, continued=continued)
        if start is None:
            raise InputError(
                f"{where}: the chat template renders the prompt differently once a response follows, so it is not "
                f"known where the response starts: {FIX}, or use text instead"
            )
        texts, cuts = [], []
        for chat, dialogue in zip(chats, dialogues, strict=True):
            texts.append(remove_final_eos(dialogue[start:], self.tokenizer))
            found = self._find_cuts(chat, len(before) - continued, tools, dialogue, start)
            if found is None:
                self.changes.append(("rewritten", ""))
                begin = self._find_begin(chat[:-1], tools, dialogue)
                if begin is None or begin < start:
                    raise InputError(
                        f"{where}: the chat template leaves out or moves the last answer, so it is not known which "
                        f"text is scored: {FIX}, give responses of one message, or remove {chat[-1]!r:.100}"
                    )
                found = [0, begin - start]
            cuts.append(found)
        functions = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        names = (str(function.get("name", "")) for function in functions)
        unseen_tool = next((name for name in names if name not in open_prompt), None)
        for chat, dialogue in zip(chats or [before], dialogues or [open_prompt], strict=True):
            self.changes.append((CONVERSATION, ""))
            if lost := unseen_tool or _find_lost(chat, dialogue):
                self.changes.append(("changed", unescape(lost)[:SHOWN]))
        return record._replace(prompt=open_prompt[:start], responses=texts, cuts=cuts, messages=record.prompt)

    def _find_start(
        self, prompt: Messages, tools: Any, dialogues: Sequence[str], *, continued: bool = False
    ) -> tuple[str, int | None]:
        """Render a prompt as it is asked, and find where in this text the responses start.

        None if the dialogues do not begin with the prompt. The generation prompt may have what a finished turn lacks,
        such as a thinking tag: what all begin with is kept.
        """
        open_text = render_open(self.tokenizer, prompt, tools=tools, continued=continued)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text, len(open_text)
        closed_text = open_text if continued else apply_template(self.tokenizer, prompt, tools=tools)
        if not shared.startswith(closed_text):
            return open_text, None
        if not self.tokenizer.is_fast:  # other tokenizers give no positions of tokens
            return open_text, len(shared)
        # the common text may end inside a token: <think> and <tool_call> begin with <t
        encoded = self.tokenizer([open_text, *dialogues], add_special_tokens=False, return_offsets_mapping=True)
        same = takewhile(lambda tokens: len({*tokens}) == 1, zip(*encoded["input_ids"], strict=False))
        end = max((end for _, (_, end) in zip(same, encoded["offset_mapping"][0], strict=False)), default=0)
        return open_text, max(len(closed_text), end)

    def _find_cuts(self, chat: Messages, first: int, tools: Any, dialogue: str, start: int) -> list[int] | None:
        """Find alternately where text that is not scored begins and ends, in the response.

        The response has the messages from `first` on, and is the dialogue from `start` on. None if the template renders
        its turns differently before others.
        """
        cuts: list[int] = []
        scored_end = start  # where the last scored turn ends
        for i, message in enumerate(chat):
            if i < first or message["role"] != "assistant":
                continue
            begin = start if i == first else self._find_begin(chat[:i], tools, dialogue)
            if begin is None or begin < scored_end:
                return None
            if begin > scored_end:
                cuts += (scored_end - start, begin - start)
            if i < len(chat) - 1:
                turn = apply_template(self.tokenizer, chat[: i + 1], tools=tools)
                if not dialogue.startswith(turn):
                    return None
                # a turn ends with EOS, as the last turn does, and not with the space that the template adds
                ends_in_eos = turn.rstrip().endswith(self.tokenizer.eos_token)
                scored_end = len(turn.rstrip() if ends_in_eos else turn)
        return cuts

    def _find_begin(self, messages: Messages, tools: Any, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins.

        None if the dialogue has them otherwise, or nothing after them.
        """
        try:
            _, begin = self._find_start(messages, tools, [dialogue])
        except TemplateRejects:
            return None
        return begin if begin is not None and begin < len(dialogue) else None


def _continue(prompt: Messages, answer: Messages) -> Messages:
    """Join a prompt's last turn with the answer that continues it."""
    [*before, begun], [first, *others] = prompt, answer
    return [*before, {**begun, **first, "content": begun["content"] + first["content"]}, *others]


def _find_lost(chat: Messages, rendered: str) -> str | None:
    """Find a text of messages that is not in the rendered text."""
    for text in _list_parts(chat):
        # as it is, or as a template writes JSON
        if text.strip() not in rendered and json.dumps(text.strip(), ensure_ascii=False)[1:-1] not in rendered:
            return text
    return None


def _list_parts(chat: Messages) -> Iterator[str]:
    """Yield the texts that the model should see."""
    for message in chat:
        yield from (message[key] for key in ("content", *THOUGHTS) if message.get(key))
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield from iterate_texts(call["function"]["arguments"])
