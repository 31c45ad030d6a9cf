"""Chats rendered by a chat template, and which parts are scored.

A response may have several messages. Those of the assistant are scored, each with the end of its turn. Results of
tools, questions and the headers of turns are not. In messages, the strings of control tokens are ordinary text.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from dpo.data.records import common_start
from dpo.data.schema import THOUGHTS, Messages, Record
from dpo.data.tokenization import remove_final_eos, unescape
from dpo.errors import InputError
from dpo.numbers import count

N_CHECKED = 100  # first conversations whose tools are checked
SHOWN = 60  # characters of a text that the template leaves out
SCORED, NOT_SCORED = "scored turns", "turns that are not scored"
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"


class ChatTemplate:
    """A tokenizer's chat template, and what it does to conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._dropped: dict[str, str] = {}  # for SCORED and NOT_SCORED, the first text left out
        self._open_end = ""  # the first end of a generation prompt that its conversation lacks
        self._escaped = ""  # the first text with a control token's string

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
        conversation = _Conversation(self.tokenizer, self._escape(record.tools, "a tool", where), where)
        continued = is_prefilled(before) and all(answer[0]["role"] == "assistant" for answer in answers)
        chats = [_continue(before, answer) if continued else before + answer for answer in answers]
        dialogues = [conversation.render(chat) for chat in chats]
        # the generation prompt may have what a finished turn lacks, such as a thinking tag: keep what all begin with
        open_prompt, prompt_text = conversation.find_start(before, dialogues, continued=continued)
        self._check(conversation, before, answers, open_prompt, dialogues)
        start = len(prompt_text)
        if start < len(open_prompt):
            self._counts["open ends"] += len(dialogues)
            self._open_end = self._open_end or open_prompt[start:]
        texts = [remove_final_eos(dialogue[start:], self.tokenizer) for dialogue in dialogues]
        cuts = []
        for chat, dialogue, text in zip(chats, dialogues, texts, strict=True):
            turns = range(len(before) - continued, len(chat))
            found = conversation.find_cuts(chat, turns, dialogue, start)
            if found is None:
                self._counts["rewritten"] += 1
                found = conversation.cut_all_but_last(chat, dialogue, start)
            if conversation.ends_as_call(chat, dialogue):
                found.append(len(text))  # so the EOS that tokenization appends is not scored
            cuts.append(found)
        return record._replace(prompt=prompt_text, responses=texts, cuts=cuts, messages=record.prompt)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokenizer": None}  # each process has its own

    def add(self, later: ChatTemplate) -> None:
        """Add what another one has recorded of later conversations."""
        self._counts += later._counts
        self._dropped = later._dropped | self._dropped
        self._open_end = self._open_end or later._open_end
        self._escaped = self._escaped or later._escaped

    def _escape(self, value: Any, what: str, where: str) -> Any:
        """Make strings of control tokens in messages or tools ordinary text."""
        check_texts(value, what, where)
        escaped = escape_texts(value, self.tokenizer)
        if escaped != value:
            texts = zip(iterate_texts(value), iterate_texts(escaped), strict=True)
            changed = [text for text, text_escaped in texts if text != text_escaped]
            self._counts["with control tokens"] += len(changed)
            self._escaped = self._escaped or changed[0]
        return escaped

    def _check(
        self,
        conversation: _Conversation,
        prompt: Messages,
        answers: Sequence[Messages],
        open_prompt: str,
        dialogues: Sequence[str],
    ) -> None:
        """Record what the template leaves out or changes."""
        # without answers, the prompt is the conversation
        for answer, text in zip(answers or [[]], dialogues or [open_prompt], strict=True):
            self._counts["conversations"] += 1
            scored = [message for message in answer if message["role"] == "assistant"]
            not_scored = [*prompt, *(message for message in answer if message["role"] != "assistant")]
            for turns, messages in ((NOT_SCORED, not_scored), (SCORED, scored)):
                if dropped := _find_dropped(messages, text):
                    self._counts[turns] += 1
                    self._dropped.setdefault(turns, unescape(dropped)[:SHOWN])
        if conversation.tools and self._counts["with tools"] < N_CHECKED:
            self._counts["with tools"] += 1
            without_tools = _Conversation(self.tokenizer, [], conversation.where)
            self._counts["tools ignored"] += without_tools.render_open(prompt) == open_prompt

    def describe(self, origin: str) -> list[str]:
        """Describe what the template does to the conversations of `origin`."""
        counts, notes = self._counts, []
        n_conversations = count(counts["conversations"], "conversation")
        for turns, text in self._dropped.items():
            notes.append(
                f"{'warning: ' if turns == SCORED else ''}{origin}: the chat template leaves out or changes text of "
                f"{turns} in {counts[turns]:,} of {n_conversations}, such as {text!r}"
            )
        if counts["rewritten"]:
            notes.append(
                f"warning: {origin}: in {counts['rewritten']:,} of {n_conversations} the chat template renders earlier "
                f"turns of the response differently once others follow, so only the last answer is scored: give one "
                f"record for each answer to train on all"
            )
        if counts["with control tokens"]:
            notes.append(
                f"{origin}: strings of control tokens in "
                f"{count(counts['with control tokens'], 'text of a message', 'texts of messages')} are ordinary text, "
                f"as in {self._escaped[:SHOWN]!r}"
            )
        if counts["tools ignored"]:
            notes.append(
                f"warning: {origin}: the chat template ignores tools: in {counts['tools ignored']:,} of "
                f"{count(counts['with tools'], 'prompt')} with tools the model does not see them"
            )
        if counts["open ends"]:
            notes.append(
                f"{origin}: the generation prompt ends in {self._open_end[-SHOWN:]!r}, which the conversation lacks in "
                f"{counts['open ends']:,} of {n_conversations}: it is not fed there"
            )
        return notes


class _Conversation:
    """A record's conversation, from `where`, with the tools that it may call."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]], where: str) -> None:
        self.tokenizer, self.tools, self.where = tokenizer, tools, where

    def render(self, messages: Messages) -> str:
        return self._explain(apply_template, messages)

    def render_open(self, messages: Messages, *, continued: bool = False) -> str:
        """Render messages up to where the answer begins or goes on."""
        return self._explain(render_open, messages, continued=continued)

    def _explain(self, render: Callable[..., str], messages: Messages, **options: Any) -> str:
        """Render messages and tools; raise InputError if the template rejects them."""
        try:
            return render(self.tokenizer, messages, tools=self.tools or None, **options)
        except TemplateRejects as error:
            what = "messages or tools" if self.tools else "messages"
            raise InputError(f"{self.where}: the tokenizer's chat template rejects these {what}: {error}") from error

    def find_start(self, prompt: Messages, dialogues: Sequence[str], *, continued: bool = False) -> tuple[str, str]:
        """Find where the responses to a prompt start.

        Returns the text of the prompt as it is asked, and the part of this text with which all dialogues begin. Raises
        InputError if the dialogues do not begin with the prompt.
        """
        open_text = self.render_open(prompt, continued=continued)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text, open_text
        closed_text = open_text if continued else self.render(prompt)
        if not shared.startswith(closed_text):
            lost = next(filter(None, (_find_dropped(prompt, text) for text in dialogues)), "")
            change = f", without {unescape(lost)[:SHOWN]!r}" if lost else ""
            raise InputError(
                f"{self.where}: the chat template renders the prompt differently once a response follows{change}, so "
                f"it is not known where the response starts: {FIX}, or use text instead"
            )
        return open_text, shared[: max(len(closed_text), self._find_token_end(open_text, dialogues))]

    def _find_token_end(self, text: str, others: Sequence[str]) -> int:
        """Find the end of the tokens with which all texts begin.

        Returns a position in `text`. The common text may end inside a token: <think> and <tool_call> begin with <t.
        """
        if not self.tokenizer.is_fast:  # other tokenizers give no positions of tokens
            return len(common_start(text, *others))
        encoded = self.tokenizer([text, *others], add_special_tokens=False, return_offsets_mapping=True)
        n_shared = _count_shared(*encoded["input_ids"])
        return encoded["offset_mapping"][0][n_shared - 1][1] if n_shared else 0

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

    def cut_all_but_last(self, messages: Messages, dialogue: str, start: int) -> list[int]:
        """Cut what comes before the last message.

        Raises InputError if the template leaves that message out or moves it.
        """
        begin = self._find_begin(messages[:-1], dialogue)
        if begin is None or begin < start:  # then the turn's content alone is scored
            marked = self.render([*messages[:-1], {**messages[-1], "content": MARK + messages[-1]["content"]}])
            _, mark, rest = marked.partition(MARK)
            begin = len(dialogue) - len(rest.lstrip())
            if not mark or not dialogue.endswith(rest.lstrip()) or begin < start:
                raise InputError(
                    f"{self.where}: the chat template leaves out or moves the last answer, so it is not known which "
                    f"text is scored: {FIX}, give responses of one message, or remove {messages[-1]!r:.100}"
                )
        return [0, begin - start]

    def _find_begin(self, messages: Messages, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins.

        None if the dialogue has them otherwise, or nothing after them.
        """
        with suppress(InputError):
            begin = len(self.find_start(messages, [dialogue])[1])
            return begin if begin < len(dialogue) else None
        return None

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


def _count_shared(*token_ids: Sequence[int]) -> int:
    """Count the tokens with which all lists of ids begin."""
    return sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, zip(*token_ids, strict=False)))


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
