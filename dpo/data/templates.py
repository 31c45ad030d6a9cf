"""Chats rendered by a chat template; what of them is scored.

A response may have several messages. Those of the assistant are scored, each with the end of its turn. Results of
tools, questions and the headers of turns are not.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

import jinja2

from dpo.data.asking import apply_template
from dpo.data.records import common_start
from dpo.data.schema import THOUGHTS, Chat, Messages, check_unicode, read_message, read_tools
from dpo.errors import InputError
from dpo.numbers import count

N_CHECKED = 100  # first conversations whose tokens and tools are checked
SHOWN = 60  # characters of a text that the template leaves out
SCORED, NOT_SCORED = "scored turns", "turns that are not scored"
MARGIN = 64  # characters after a text that may be part of its last token
NOTHING = "nothing"
MARK = "\ue000"  # a character for private use, which no text has
OTHER = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"


class ChatTemplate:
    """A tokenizer's chat template, and what it does to conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._dropped: dict[str, str] = {}  # the first text that is left out, by the turns that it is of
        self._checked: list[tuple[str, str]] = []  # prompts with generation prompt, and whole conversations

    def render(self, prompt: Messages, responses: Sequence[Messages], tools: Any, where: str) -> Chat:
        """Render a prompt and its responses.

        `tools` is a list of schemas, or JSON of one. Raises InputError if a message contains EOS, or if the template
        rejects the messages or changes turns so that they cannot be told apart.
        """
        eos = self.tokenizer.eos_token
        prompt = [read_message(message, where) for message in prompt]
        answers = [[read_message(message, where) for message in response] for response in responses]
        given_tools = read_tools({"tools": tools}, "tools", where)
        messages = [*prompt, *chain(*answers)]
        for what, value in (*(("a message", message) for message in messages), ("a tool", given_tools)):
            for text in _iterate_texts(value):
                if eos and eos in text:
                    raise InputError(f"{where}: {what} contains the EOS token {eos!r}: remove it from {value!r}")
                check_unicode(text, what, where)
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{where} holds chat messages, but the tokenizer has no chat template: name one that has, as "
                f"model.tokenizer_name_or_path=INSTRUCT_MODEL, or use text instead"
            )
        conversation = _Conversation(self.tokenizer, given_tools, where)
        dialogues = [conversation.render(prompt + answer) for answer in answers]
        # the generation prompt may have what a finished turn lacks, such as a thinking tag: keep what all begin with
        open_prompt, prompt_text = conversation.find_start(prompt, dialogues)
        self._check(conversation, prompt, answers, open_prompt, dialogues)
        cuts = [
            list(conversation.find_cuts(prompt, answer, dialogue, len(prompt_text)))
            for answer, dialogue in zip(answers, dialogues, strict=True)
        ]
        texts = [_remove_final_eos(dialogue[len(prompt_text) :], eos) for dialogue in dialogues]
        for answer, dialogue, text, own_cuts in zip(answers, dialogues, texts, cuts, strict=True):
            if conversation.ends_as_call(prompt + answer, dialogue):  # EOS, which follows, is not part of it
                own_cuts.append(len(text))
        return Chat(prompt_text, texts, cuts, prompt, conversation.tools)

    def _check(
        self,
        conversation: _Conversation,
        prompt: Messages,
        answers: Sequence[Messages],
        open_prompt: str,
        dialogues: Sequence[str],
    ) -> None:
        """Record what the template leaves out of a conversation or changes."""
        for answer, text in zip(answers or [[]], dialogues or [open_prompt], strict=True):
            self._counts["conversations"] += 1
            scored = [message for message in answer if message["role"] == "assistant"]
            others = [*prompt, *(message for message in answer if message["role"] != "assistant")]
            for turns, messages in ((NOT_SCORED, others), (SCORED, scored)):
                if dropped := _find_dropped(messages, text):
                    self._counts[turns] += 1
                    self._dropped.setdefault(turns, dropped[:SHOWN])
        if len(self._checked) < N_CHECKED:
            self._checked += [(open_prompt, dialogue) for dialogue in dialogues]
        if conversation.tools and self._counts["with tools"] < N_CHECKED:
            self._counts["with tools"] += 1
            without = _Conversation(self.tokenizer, [], conversation.where)
            self._counts["tools ignored"] += without.render(prompt, is_open=True) == open_prompt

    def describe(self, origin: str) -> list[str]:
        """Describe what the template does to the conversations of `origin`."""
        counts, notes = self._counts, []
        for turns, text in self._dropped.items():
            notes.append(
                f"{'warning: ' if turns == SCORED else ''}{origin}: the chat template leaves out or changes text of "
                f"{turns} in {counts[turns]:,} of {count(counts['conversations'], 'conversation')}, such as {text!r}"
            )
        if counts["tools ignored"]:
            notes.append(
                f"warning: {origin}: the chat template ignores tools: in {counts['tools ignored']:,} of "
                f"{count(counts['with tools'], 'prompt')} with tools the model does not see them"
            )
        if self._checked:
            left_out, joined = self._count_differing_tokens()
            n_prefixes = len(self._checked) - len(left_out) - len(joined)
            notes.append(
                f"{origin}: the prompt, as rendered for generation, is a prefix of prompt and response, in tokens, in "
                f"{n_prefixes:,} of {count(len(self._checked), 'conversation')} checked"
            )
            if left_out:
                notes[-1] += f"; in {len(left_out):,}, up to {count(max(left_out), 'token')} at its end are left out"
            if joined:
                notes[-1] += f"; in {len(joined):,}, its end would be joined with the response, and is tokenized apart"
        return notes

    def _count_differing_tokens(self) -> tuple[list[int], list[int]]:
        """Count the tokens of prompts' ends that their conversations lack.

        Returns the numbers, if any are lacking, where the text is lacking too, and where tokens alone are.
        """
        texts = list(dict.fromkeys(text for texts in self._checked for text in texts))
        ids = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
        left_out, joined = [], []
        for prompt, dialogue in self._checked:
            pairs = enumerate(zip(ids[prompt], ids[dialogue], strict=False))
            n_shared = next((i for i, (a, b) in pairs if a != b), min(len(ids[prompt]), len(ids[dialogue])))
            if n_differing := len(ids[prompt]) - n_shared:
                (joined if dialogue.startswith(prompt) else left_out).append(n_differing)
        return left_out, joined


class _Conversation:
    """A record's conversation, from `where`, with the tools that it may call."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]], where: str) -> None:
        self.tokenizer, self.tools, self.where = tokenizer, tools, where

    def render(self, messages: Messages, *, is_open: bool = False) -> str:
        """Render messages; `is_open` adds the generation prompt."""
        options: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        try:
            return apply_template(self.tokenizer, messages, add_generation_prompt=is_open, **options)
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:  # of templates
            what = "messages or tools" if self.tools else "messages"
            raise InputError(f"{self.where}: the tokenizer's chat template rejects these {what}: {error}") from error

    def find_start(self, prompt: Messages, dialogues: Sequence[str]) -> tuple[str, str]:
        """Find where the responses to a prompt start.

        Returns the text of the prompt with the generation prompt, and what it has in common with the dialogues. Raises
        InputError if the dialogues do not begin with the prompt.
        """
        open_text = self.render(prompt, is_open=True)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text, open_text
        closed_text = self.render(prompt)
        if not shared.startswith(closed_text):
            lost = next((lost for text in dialogues if (lost := _find_dropped(prompt, text))), "")
            raise InputError(
                f"{self.where}: the chat template renders the prompt differently once a response follows"
                f"{f', without {lost[:SHOWN]!r}' if lost else ''}, so it cannot be told where the response starts: "
                f"{OTHER}, or use text instead"
            )
        return open_text, shared[: max(len(closed_text), self._find_token_end(open_text, dialogues))]

    def _find_token_end(self, text: str, others: Sequence[str]) -> int:
        """Find where the tokens end that all texts begin with.

        What they have in common may end in the middle of a token, such as <think> where <tool_call> follows.
        """
        if not self.tokenizer.is_fast:  # others do not tell where their tokens are
            return len(common_start(text, *others))
        encoded = self.tokenizer([text, *others], add_special_tokens=False, return_offsets_mapping=True)
        in_order = zip(*encoded["input_ids"], strict=False)
        n_shared = next((i for i, ids in enumerate(in_order) if len({*ids}) > 1), min(map(len, encoded["input_ids"])))
        return encoded["offset_mapping"][0][n_shared - 1][1] if n_shared else 0

    def find_cuts(self, prompt: Messages, answer: Messages, dialogue: str, start: int) -> Iterator[int]:
        """Yield where text that is not scored begins and ends, in turn.

        Positions are those in the response, which begins at `start` of the dialogue.
        """
        messages, end = prompt + answer, start
        for i in range(len(prompt), len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            begin = start if i == len(prompt) else self._find_boundary(messages, i, dialogue, is_open=True)
            if begin < end:
                raise self._cannot_tell(messages[i])
            if begin > end:
                yield from (end - start, begin - start)
            if i < len(messages) - 1:
                end = self._find_boundary(messages, i + 1, dialogue)
                # a turn ends with EOS, as the last one does, and not with the space that the template puts after it
                turn = dialogue[begin:end].rstrip()
                end = begin + len(turn) if turn.endswith(self.tokenizer.eos_token) else end

    def ends_as_call(self, messages: Messages, dialogue: str) -> bool:
        """Return whether a dialogue ends with a token that ends calls.

        In templates such as gpt-oss's it stands in place of EOS.
        """
        if not messages[-1].get("tool_calls"):
            return False
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        last = max((token for token in special if dialogue.rstrip().endswith(token)), key=len, default="")
        if last in ("", self.tokenizer.eos_token):
            return False
        answer = self.render([*messages[:-1], {"role": "assistant", "content": "."}])
        return not answer.rstrip().endswith(last)

    def _find_boundary(self, messages: Messages, n_before: int, dialogue: str, *, is_open: bool = False) -> int:
        """Find where the first messages of a dialogue end.

        `is_open` includes the generation prompt, as far as the dialogue has it. The template may render these messages
        differently once others follow, such as without thinking. Then the end of the last one's content is found in
        both texts, and what follows it is compared. Raises InputError if the template leaves out or moves the last one.
        """
        text = self.render(messages[:n_before], is_open=is_open)
        if dialogue.startswith(text):
            return len(text)
        last = messages[n_before - 1]
        text_ends = self._find_ends(messages[:n_before], n_before - 1, text, is_open=is_open)
        dialogue_ends = self._find_ends(messages, n_before - 1, dialogue)
        parts = text_ends.keys() & dialogue_ends.keys()
        end = max((text_ends[part] for part in parts), default=0)
        dialogue_end = max((dialogue_ends[part] for part in parts), default=0)
        # further apart than in a turn of their own: something else is between them
        if not parts or any(dialogue_end - dialogue_ends[part] > end - text_ends[part] for part in parts):
            raise self._cannot_tell(last)
        tail = text[end:]
        # of the dialogue a bit more than the tail, as tokenizing the rest for every turn takes long
        n_shared = self._find_token_end(tail, [dialogue[dialogue_end : dialogue_end + len(tail) + MARGIN]])
        if is_open:  # the dialogue may lack some of the generation prompt, but nothing of what is before it
            closed_text = self.render(messages[:n_before])
            if n_shared < self._find_token_end(tail, [closed_text[end:]]):
                raise self._cannot_tell(last)
        return dialogue_end + n_shared

    def _find_ends(self, messages: Messages, index: int, text: str, *, is_open: bool = False) -> dict[str, int]:
        """Find where a message's parts end in the text of all.

        It is where the text changes when something is appended to a part. A part that is not there has no end.
        """
        ends = {}
        for part, longer in _iterate_longer(messages[index]):
            if part == NOTHING and ends:
                break
            changed = self.render([*messages[:index], longer, *messages[index + 1 :]], is_open=is_open)
            if changed != text:
                ends[part] = len(text) - len(common_start(text[::-1], changed[::-1]))
        return ends

    def _cannot_tell(self, message: dict[str, Any]) -> InputError:
        """The error that a turn is not where it was expected."""
        return InputError(
            f"{self.where}: the chat template leaves out or moves a turn of the response, so it cannot be told which "
            f"text is scored: {OTHER}, give responses of one message, or remove {message!r:.100}"
        )


def _iterate_longer(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a message's parts, each with a copy that has more.

    Content that is empty is NOTHING, and comes last.
    """
    for part in ("content", *THOUGHTS):
        if message.get(part):
            yield part, {**message, part: message[part] + MARK}
    calls = message.get("tool_calls", [])
    for i, call in enumerate(calls):
        arguments = {**call["function"]["arguments"], MARK: 0}
        longer = {**call, "function": {**call["function"], "arguments": arguments}}
        yield f"call {i}", {**message, "tool_calls": [*calls[:i], longer, *calls[i + 1 :]]}
    if not message["content"]:
        yield NOTHING, {**message, "content": MARK}


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts, keys and numbers in a value."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_texts(item)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):  # templates may write True or true
        yield str(value)


def _list_parts(messages: Messages) -> Iterator[str]:
    """Yield the texts of messages that the model should see."""
    for message in messages:
        yield from (message[key] for key in ("content", *THOUGHTS) if message.get(key))
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield from _iterate_texts(call["function"]["arguments"])


def _find_dropped(messages: Messages, rendered: str) -> str:
    """Find words of messages that a rendered text lacks.

    They are the beginning of the first text that is not there whole; empty if all are.
    """

    def is_there(text: str) -> bool:  # as it is, or as a template writes JSON
        return text in rendered or json.dumps(text, ensure_ascii=False)[1:-1] in rendered

    text = next((text for part in _list_parts(messages) if not is_there(text := part.strip())), "")
    length = bisect_left(range(len(text)), True, key=lambda start: is_there(text[start:]))
    return text[:length] + "".join(takewhile(lambda character: not character.isspace(), text[length:]))


def _remove_final_eos(text: str, eos: str | None) -> str:
    """Remove the EOS that ends a turn, because tokenization appends one."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
