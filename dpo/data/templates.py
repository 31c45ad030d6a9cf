"""Chats rendered by a chat template, and which parts are scored.

A response may have several messages. Those of the assistant are scored, each with the end of its turn. Results of
tools, questions and the headers of turns are not. In messages, the strings of control tokens are ordinary text.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from dpo.data.asking import (
    MARK,
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

N_CHECKED = 100  # first conversations whose tools are checked
SHOWN = 60  # characters of a text that the template leaves out
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
# what is counted of conversations, and the note on it; {example} is the first text that it is of
NOTES = {
    "turns not scored": "{origin}: the chat template leaves out or changes text of turns that are not scored in {n} of "
    "{conversations}, such as {example}",
    "turns scored": "warning: {origin}: the chat template leaves out or changes text of scored turns in {n} of "
    "{conversations}, such as {example}",
    "rewritten": "warning: {origin}: in {n} of {conversations} the chat template renders earlier turns of the response "
    "differently once others follow, so only the last answer is scored: give one record for each answer to train on "
    "all",
    "escaped": "{origin}: strings of control tokens in messages are ordinary text, {n} in all, as in {example}",
    "tools ignored": "warning: {origin}: the chat template ignores tools: in {n} of {with_tools} with tools the model "
    "does not see them",
    "open ends": "{origin}: the generation prompt ends in {example}, which the conversation lacks in {n} of "
    "{conversations}: it is not fed there",
}


class ChatTemplate:
    """A tokenizer's chat template, and what it does to conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}  # the first text of a count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokenizer": None}  # each process has its own

    def add(self, later: ChatTemplate) -> None:
        """Add what another one has recorded of later conversations."""
        self._counts += later._counts
        self._examples = later._examples | self._examples

    def describe(self, origin: str) -> list[str]:
        """Describe what the template does to the conversations of `origin`."""
        totals = {
            "conversations": count(self._counts["conversations"], "conversation"),
            "with_tools": count(self._counts["with tools"], "prompt"),
        }
        return [
            note.format(origin=origin, n=f"{n:,}", example=repr(self._examples.get(name, "")), **totals)
            for name, note in NOTES.items()
            if (n := self._counts[name])
        ]

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
        tools = self._escape(record.tools, "a tool", where)
        try:
            return self._render(record, before, answers, tools, where)
        except TemplateRejects as error:
            what = "messages or tools" if tools else "messages"
            raise InputError(f"{where}: the tokenizer's chat template rejects these {what}: {error}") from error

    def _render(self, record: Record, before: Messages, answers: Sequence[Messages], tools: Any, where: str) -> Record:
        conversation = _Conversation(self.tokenizer, tools)
        continued = is_prefilled(before) and all(answer[0]["role"] == "assistant" for answer in answers)
        chats = [_continue(before, answer) if continued else before + answer for answer in answers]
        dialogues = [conversation.render(chat) for chat in chats]
        # the generation prompt may have what a finished turn lacks, such as a thinking tag: keep what all begin with
        open_prompt, start = conversation.find_start(before, dialogues, continued=continued)
        if start is None:
            lost = next(filter(None, (_find_dropped(before, text) for text in dialogues)), "")
            change = f", without {unescape(lost)[:SHOWN]!r}" if lost else ""
            raise InputError(
                f"{where}: the chat template renders the prompt differently once a response follows{change}, so it is "
                f"not known where the response starts: {FIX}, or use text instead"
            )
        for answer, text in zip(answers or [[]], dialogues or [open_prompt], strict=True):
            self._check(before, answer, text)
        if tools and self._counts["with tools"] < N_CHECKED:
            self._counts["with tools"] += 1
            self._counts["tools ignored"] += render_open(self.tokenizer, before) == open_prompt
        if start < len(open_prompt):
            self._note("open ends", open_prompt[start:][-SHOWN:], len(dialogues))
        texts = [remove_final_eos(dialogue[start:], self.tokenizer) for dialogue in dialogues]
        cuts = []
        for chat, dialogue, text in zip(chats, dialogues, texts, strict=True):
            turns = range(len(before) - continued, len(chat))
            found = conversation.find_cuts(chat, turns, dialogue, start)
            if found is None:
                self._note("rewritten")
                begin = conversation.find_last_answer(chat, dialogue, start)
                if begin is None:
                    raise InputError(
                        f"{where}: the chat template leaves out or moves the last answer, so it is not known which "
                        f"text is scored: {FIX}, give responses of one message, or remove {chat[-1]!r:.100}"
                    )
                found = [0, begin - start]
            if conversation.ends_as_call(chat, dialogue):
                found.append(len(text))  # so the EOS that tokenization appends is not scored
            cuts.append(found)
        return record._replace(prompt=open_prompt[:start], responses=texts, cuts=cuts, messages=record.prompt)

    def _note(self, name: str, example: str = "", n: int = 1) -> None:
        self._counts[name] += n
        self._examples.setdefault(name, example)

    def _escape(self, value: Any, what: str, where: str) -> Any:
        """Make strings of control tokens in messages or tools ordinary text."""
        check_texts(value, what, where)
        escaped = escape_texts(value, self.tokenizer)
        if escaped != value:
            for text, text_escaped in zip(iterate_texts(value), iterate_texts(escaped), strict=True):
                if text != text_escaped:
                    self._note("escaped", text[:SHOWN])
        return escaped

    def _check(self, prompt: Messages, answer: Messages, dialogue: str) -> None:
        """Record what the template leaves out or changes; without an answer, the prompt is the conversation."""
        self._counts["conversations"] += 1
        scored = [message for message in answer if message["role"] == "assistant"]
        not_scored = [*prompt, *(message for message in answer if message["role"] != "assistant")]
        for turns, messages in (("turns not scored", not_scored), ("turns scored", scored)):
            if dropped := _find_dropped(messages, dialogue):
                self._note(turns, unescape(dropped)[:SHOWN])


class _Conversation:
    """A record's conversations, with the tools that they may call."""

    def __init__(self, tokenizer: Any, tools: Any) -> None:
        self.tokenizer, self.tools = tokenizer, tools or None

    def render(self, messages: Messages) -> str:
        return apply_template(self.tokenizer, messages, tools=self.tools)

    def find_start(
        self, prompt: Messages, dialogues: Sequence[str], *, continued: bool = False
    ) -> tuple[str, int | None]:
        """Render a prompt as it is asked, and find where in this text the responses start.

        None if the dialogues do not begin with the prompt.
        """
        open_text = render_open(self.tokenizer, prompt, tools=self.tools, continued=continued)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text, len(open_text)
        closed_text = open_text if continued else self.render(prompt)
        if not shared.startswith(closed_text):
            return open_text, None
        return open_text, max(len(closed_text), self._find_token_end(open_text, dialogues))

    def _find_token_end(self, text: str, others: Sequence[str]) -> int:
        """Find the end of the tokens with which all texts begin.

        The common text may end inside a token: <think> and <tool_call> begin with <t.
        """
        if not self.tokenizer.is_fast:  # other tokenizers give no positions of tokens
            return len(common_start(text, *others))
        encoded = self.tokenizer([text, *others], add_special_tokens=False, return_offsets_mapping=True)
        shared = takewhile(lambda tokens: len({*tokens}) == 1, zip(*encoded["input_ids"], strict=False))
        return max((end for _, (_, end) in zip(shared, encoded["offset_mapping"][0], strict=False)), default=0)

    def find_cuts(self, messages: Messages, turns: range, dialogue: str, start: int) -> list[int] | None:
        """Find alternately where text that is not scored begins and ends.

        `turns` are the indices of the response's messages. Positions count from the beginning of the response, which is
        `start` in the dialogue. None if the template renders the turns before others differently.
        """
        cuts: list[int] = []
        scored_end = start  # where the last scored turn ends
        for i in turns:
            if messages[i]["role"] != "assistant":
                continue
            begin = start if i == turns[0] else self._find_begin(messages[:i], dialogue)
            if begin is None or begin < scored_end:
                return None
            if begin > scored_end:
                cuts += (scored_end - start, begin - start)
            if i < turns[-1]:
                turn = self.render(messages[: i + 1])
                if not dialogue.startswith(turn):
                    return None
                # a turn ends with EOS, as the last turn does, and not with the space that the template adds
                ends_in_eos = turn.rstrip().endswith(self.tokenizer.eos_token)
                scored_end = len(turn.rstrip() if ends_in_eos else turn)
        return cuts

    def find_last_answer(self, messages: Messages, dialogue: str, start: int) -> int | None:
        """Find where the last message begins, or at least its content.

        None if the template leaves it out or moves it.
        """
        begin = self._find_begin(messages[:-1], dialogue)
        if begin is not None and begin >= start:
            return begin
        marked = self.render([*messages[:-1], {**messages[-1], "content": MARK + messages[-1]["content"]}])
        _, mark, rest = marked.partition(MARK)
        begin = len(dialogue) - len(rest.lstrip())
        return begin if mark and dialogue.endswith(rest.lstrip()) and begin >= start else None

    def _find_begin(self, messages: Messages, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins.

        None if the dialogue has them otherwise, or nothing after them.
        """
        try:
            _, begin = self.find_start(messages, [dialogue])
        except TemplateRejects:
            return None
        return begin if begin is not None and begin < len(dialogue) else None

    def ends_as_call(self, messages: Messages, dialogue: str) -> bool:
        """Return whether a dialogue ends with a token that ends calls.

        In templates such as gpt-oss's that token stands in place of EOS.
        """
        if not messages[-1].get("tool_calls"):
            return False
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        last = max((token for token in special if dialogue.rstrip().endswith(token)), key=len, default="")
        if last in ("", self.tokenizer.eos_token):
            return False
        answer = self.render([*messages[:-1], {"role": "assistant", "content": "."}])
        return not answer.rstrip().endswith(last)


def _continue(prompt: Messages, answer: Messages) -> Messages:
    """Join a prompt's last turn with the answer that continues it."""
    [*before, begun], [first, *others] = prompt, answer
    return [*before, {**begun, **first, "content": begun["content"] + first["content"]}, *others]


def _list_parts(messages: Messages) -> Iterator[str]:
    """Yield the texts of messages that the model should see."""
    for message in messages:
        yield from (message[key] for key in ("content", *THOUGHTS) if message.get(key))
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield from iterate_texts(call["function"]["arguments"])


def _find_dropped(messages: Messages, rendered: str) -> str:
    """Find words of messages that a rendered text lacks.

    Returns what the first incomplete text lacks: its beginning, up to the longest end of the text that is there, and
    then to the end of a word. Empty if all texts are there.
    """

    def is_there(text: str) -> bool:  # as it is, or as a template writes JSON
        return text in rendered or json.dumps(text, ensure_ascii=False)[1:-1] in rendered

    texts = (text.strip() for text in _list_parts(messages))
    text = next((text for text in texts if not is_there(text)), "")
    # bisection, as with an end of the text every shorter end is there too
    n_lacking = bisect_left(range(len(text)), True, key=lambda start: is_there(text[start:]))
    rest_of_word = takewhile(lambda character: not character.isspace(), text[n_lacking:])
    return text[:n_lacking] + "".join(rest_of_word)
