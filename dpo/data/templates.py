"""Chats rendered by a chat template, and which parts are scored.

These are the assistant's messages, each with the end of its turn. Strings of control tokens are ordinary text in them.
"""

from __future__ import annotations

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
from dpo.data.tokenization import remove_final_eos
from dpo.errors import InputError

PARTS = ("tool_calls", *THOUGHTS)  # of a message, which a template may not read
SHOWN = 60  # characters of a text in a note
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
# what a template does to conversations, and the note on it; {example} is the first text that it is of
NOTES = {
    "unread": "warning: {origin}: the chat template does not read {example}, so the model does not see it, in records: "
    "{n}",
    "rewritten": "warning: {origin}: the chat template renders earlier turns of the response differently once others "
    "follow, in conversations: {n}, so only the last answer is scored: give one record for each answer to train on all",
    "escaped": "{origin}: strings of control tokens in messages are ordinary text, {n} in all, as in {example}",
}


def describe(changes: Sequence[tuple[str, str]], origin: str) -> Iterator[str]:
    for name, note in NOTES.items():
        if examples := [example for kind, example in changes if kind == name]:
            yield note.format(origin=origin, n=f"{len(examples):,}", example=repr(examples[0]))


class ChatTemplate:
    """A tokenizer's template; `changes` has what it does to conversations, each with a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.changes: list[tuple[str, str]] = []

    def render(self, record: Record) -> Record:
        """Render a record, whose responses continue the prompt's last turn if it is the assistant's.

        Raises InputError if the template rejects the messages, or renders the prompt differently before a response.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                "chat messages need a chat template, and the tokenizer has none: name a tokenizer with one, as "
                "model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
            )
        before, *answers = (self._escape(messages, "a message") for messages in (record.prompt, *record.responses))
        tools = self._escape(record.tools, "a tool") or None
        continued = is_prefilled(before) and all(answer[0]["role"] == "assistant" for answer in answers)
        chats = [before + answer for answer in answers]
        if continued:
            *context, begun = before
            chats = [
                [*context, {**begun, **first, "content": begun["content"] + first["content"]}, *others]
                for first, *others in answers
            ]
        try:
            dialogues = [apply_template(self.tokenizer, chat, tools=tools) for chat in chats]
            prompt = self._render_prompt(before, tools, dialogues, continued=continued)
            if prompt is None:
                raise InputError(
                    f"the chat template renders the prompt differently once a response follows, so it is not "
                    f"known where the response starts: {FIX}, or use text instead"
                )
            first, start = len(before) - continued, len(prompt)
            cuts = [
                self._find_cuts(chat, first, tools, dialogue, start)
                for chat, dialogue in zip(chats, dialogues, strict=True)
            ]
        except TemplateRejects as error:
            what = "messages or tools" if tools else "messages"
            raise InputError(f"the tokenizer's chat template rejects these {what}: {error}") from error
        given = {key for chat in (before, *answers) for message in chat for key in PARTS if message.get(key)}
        unread = [key for key in (*given, *["tools"] * bool(tools)) if key not in str(self.tokenizer.chat_template)]
        self.changes += (("unread", key) for key in unread[:1])
        texts = [remove_final_eos(dialogue[start:], self.tokenizer) for dialogue in dialogues]
        return record._replace(prompt=prompt, responses=texts, cuts=cuts, messages=record.prompt)

    def _escape(self, value: Any, what: str) -> Any:
        check_texts(value, what)
        escaped = escape_texts(value, self.tokenizer)
        if escaped != value:
            pairs = zip(iterate_texts(value), iterate_texts(escaped), strict=True)
            self.changes += (("escaped", text[:SHOWN]) for text, text_escaped in pairs if text != text_escaped)
        return escaped

    def _render_prompt(
        self, prompt: Messages, tools: Any, dialogues: Sequence[str], *, continued: bool = False
    ) -> str | None:
        """Render a prompt as far as all dialogues begin with it; None if they do not.

        The generation prompt may have what a finished turn lacks, such as a thinking tag.
        """
        open_text = render_open(self.tokenizer, prompt, tools=tools, continued=continued)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text
        closed_text = open_text if continued else apply_template(self.tokenizer, prompt, tools=tools)
        if not shared.startswith(closed_text):
            return None
        if not self.tokenizer.is_fast:  # other tokenizers give no positions of tokens
            return shared
        # the common text may end inside a token: <think> and <tool_call> begin with <t
        encoded = self.tokenizer([open_text, *dialogues], add_special_tokens=False, return_offsets_mapping=True)
        same = takewhile(lambda tokens: len({*tokens}) == 1, zip(*encoded["input_ids"], strict=False))
        end = max((end for _, (_, end) in zip(same, encoded["offset_mapping"][0], strict=False)), default=0)
        return open_text[: max(len(closed_text), end)]

    def _find_cuts(self, chat: Messages, first: int, tools: Any, dialogue: str, start: int) -> list[int]:
        """Find alternately where text that is not scored begins and ends, in the response.

        The response is the messages from `first` on, and the dialogue from `start` on. If the template renders its
        turns differently before others, the last answer alone is scored.
        """
        cuts = []
        scored_end = start  # where the last scored turn ends
        last = len(chat) - 1
        for i in range(first, len(chat)):
            if chat[i]["role"] != "assistant":
                continue
            begin = start if i == first else self._find_begin(chat[:i], tools, dialogue)
            turn = dialogue if i == last else apply_template(self.tokenizer, chat[: i + 1], tools=tools)
            if begin is None or begin < scored_end or not dialogue.startswith(turn):
                break
            if begin > scored_end:
                cuts += (scored_end - start, begin - start)
            # a turn ends with EOS, as the last turn does, and not with the space that the template adds
            ends_in_eos = turn.rstrip().endswith(self.tokenizer.eos_token)
            scored_end = len(turn.rstrip() if ends_in_eos else turn)
        else:
            return cuts
        begin = self._find_begin(chat[:-1], tools, dialogue)
        if begin is None or begin < start:
            raise InputError(
                f"the chat template leaves out or moves the last answer, so it is not known which text is "
                f"scored: {FIX}, give responses of one message, or remove {chat[-1]!r:.100}"
            )
        self.changes.append(("rewritten", ""))
        return [0, begin - start]

    def _find_begin(self, messages: Messages, tools: Any, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins, if the dialogue has it."""
        try:
            before = self._render_prompt(messages, tools, [dialogue])
        except TemplateRejects:
            return None
        return None if before in (None, dialogue) else len(before)
