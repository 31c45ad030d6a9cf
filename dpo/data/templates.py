"""Chats rendered by a chat template, and which parts are scored.

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

from dpo.data.asking import TEMPLATE_ERRORS, apply_template
from dpo.data.records import common_start
from dpo.data.schema import THOUGHTS, Chat, Messages, check_unicode, read_message, read_tools
from dpo.errors import InputError
from dpo.numbers import count

N_CHECKED = 100  # first conversations whose tokens and tools are checked
SHOWN = 60  # characters of a text that the template leaves out
SCORED, NOT_SCORED = "scored turns", "turns that are not scored"
MARGIN = 64  # characters after a text that may be part of its last token
NOTHING = "nothing"  # empty content
MARK = "\ue000"  # a character for private use, which no text has
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"


class ChatTemplate:
    """A tokenizer's chat template, and what it does to conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._dropped: dict[str, str] = {}  # for SCORED and NOT_SCORED, the first text left out
        self._checked: list[tuple[str, str]] = []  # prompts with generation prompt, and whole conversations

    def render(self, prompt: Messages, responses: Sequence[Messages], tools: Any, where: str) -> Chat:
        """Render a prompt and its responses.

        `tools` is a list of schemas, or such a list as JSON. Raises InputError if a message contains EOS, or if the
        template rejects the messages or changes turns so that their limits are lost.
        """
        eos = self.tokenizer.eos_token
        prompt = [read_message(message, where) for message in prompt]
        answers = [[read_message(message, where) for message in response] for response in responses]
        given_tools = read_tools({"tools": tools}, "tools", where)
        values = [("a message", message) for message in (*prompt, *chain(*answers))] + [("a tool", given_tools)]
        for what, value in values:
            for text in _iterate_texts(value):
                if eos and eos in text:
                    raise InputError(f"{where}: {what} contains the EOS token {eos!r}: remove it from {value!r}")
                check_unicode(text, what, where)
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{where} holds chat messages, but the tokenizer has no chat template: name a tokenizer with one, as "
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
        for answer, dialogue, text, answer_cuts in zip(answers, dialogues, texts, cuts, strict=True):
            if conversation.ends_as_call(prompt + answer, dialogue):
                answer_cuts.append(len(text))  # so the EOS that tokenization appends is not scored
        return Chat(prompt_text, texts, cuts, prompt, conversation.tools)

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
                    self._dropped.setdefault(turns, dropped[:SHOWN])
        if len(self._checked) < N_CHECKED:
            self._checked += [(open_prompt, dialogue) for dialogue in dialogues]
        if conversation.tools and self._counts["with tools"] < N_CHECKED:
            self._counts["with tools"] += 1
            without_tools = _Conversation(self.tokenizer, [], conversation.where)
            self._counts["tools ignored"] += without_tools.render(prompt, is_open=True) == open_prompt

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
                f"{origin}: in tokens, the prompt as rendered for generation is a prefix of prompt and response in "
                f"{n_prefixes:,} of {count(len(self._checked), 'conversation')} checked"
            )
            if left_out:
                n_most = count(max(left_out), "token")
                notes[-1] += f"; in {len(left_out):,}, up to {n_most} at the prompt's end are left out"
            if joined:
                notes[-1] += f"; in {len(joined):,}, the prompt's end would join the response, and is tokenized apart"
        return notes

    def _count_differing_tokens(self) -> tuple[list[int], list[int]]:
        """Count, for each prompt, the last tokens that its conversation lacks.

        Returns two lists of counts above 0: of prompts whose text the conversation lacks too, and of the others.
        """
        texts = list(dict.fromkeys(text for texts in self._checked for text in texts))
        ids = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
        left_out, joined = [], []
        for prompt, dialogue in self._checked:
            if n_lacking := len(ids[prompt]) - _count_shared(ids[prompt], ids[dialogue]):
                counts = joined if dialogue.startswith(prompt) else left_out
                counts.append(n_lacking)
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
        except TEMPLATE_ERRORS as error:
            what = "messages or tools" if self.tools else "messages"
            raise InputError(f"{self.where}: the tokenizer's chat template rejects these {what}: {error}") from error

    def find_start(self, prompt: Messages, dialogues: Sequence[str]) -> tuple[str, str]:
        """Find where the responses to a prompt start.

        Returns the text of the prompt with the generation prompt, and the part of this text with which all dialogues
        begin. Raises InputError if the dialogues do not begin with the prompt.
        """
        open_text = self.render(prompt, is_open=True)
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text, open_text
        closed_text = self.render(prompt)
        if not shared.startswith(closed_text):
            lost = next(filter(None, (_find_dropped(prompt, text) for text in dialogues)), "")
            change = f", without {lost[:SHOWN]!r}" if lost else ""
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

    def find_cuts(self, prompt: Messages, answer: Messages, dialogue: str, start: int) -> Iterator[int]:
        """Yield alternately where text that is not scored begins and ends.

        Positions count from the beginning of the response, which is `start` in the dialogue.
        """
        messages = prompt + answer
        scored_end = start  # where the last scored turn ends
        for i in range(len(prompt), len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            begin = start if i == len(prompt) else self._find_boundary(messages, i, dialogue, is_open=True)
            if begin < scored_end:
                raise self._explain_lost_turn(messages[i])
            if begin > scored_end:
                yield from (scored_end - start, begin - start)
            if i < len(messages) - 1:
                end = self._find_boundary(messages, i + 1, dialogue)
                # a turn ends with EOS, as the last turn does, and not with the space that the template adds
                turn = dialogue[begin:end].rstrip()
                scored_end = begin + len(turn) if turn.endswith(self.tokenizer.eos_token) else end

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

    def _find_boundary(self, messages: Messages, n_before: int, dialogue: str, *, is_open: bool = False) -> int:
        """Find where the first `n_before` messages of a dialogue end.

        `is_open` includes the generation prompt, as far as the dialogue has it. The template may render these messages
        differently once others follow, such as without thinking. If so, the parts of the last of these messages
        (content, thinking, calls) are found in the text of these messages alone and in the dialogue, and what follows
        them in both is compared. Raises InputError if the template leaves out or moves that message.
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
        # if a part's end is further from the last one in the dialogue than in the text, something else is between them
        if not parts or any(dialogue_end - dialogue_ends[part] > end - text_ends[part] for part in parts):
            raise self._explain_lost_turn(last)
        tail = text[end:]
        # the dialogue is cut a bit after the tail, as tokenizing all of it for every turn takes long
        shared_length = self._find_token_end(tail, [dialogue[dialogue_end : dialogue_end + len(tail) + MARGIN]])
        if is_open:  # the dialogue may lack some of the generation prompt, but nothing before that
            closed_text = self.render(messages[:n_before])
            if shared_length < self._find_token_end(tail, [closed_text[end:]]):
                raise self._explain_lost_turn(last)
        return dialogue_end + shared_length

    def _find_ends(self, messages: Messages, index: int, text: str, *, is_open: bool = False) -> dict[str, int]:
        """Find where the parts of one message end in the rendered text.

        A part ends where the text changes when something is appended to the part. A part left out has no end.
        """
        ends = {}
        for part, longer in _iterate_longer(messages[index]):
            if part == NOTHING and ends:
                break
            changed = self.render([*messages[:index], longer, *messages[index + 1 :]], is_open=is_open)
            if changed != text:
                ends[part] = len(text) - len(common_start(text[::-1], changed[::-1]))
        return ends

    def _explain_lost_turn(self, message: dict[str, Any]) -> InputError:
        """Make the error for a turn that is missing or moved."""
        return InputError(
            f"{self.where}: the chat template leaves out or moves a turn of the response, so it is not known which "
            f"text is scored: {FIX}, give responses of one message, or remove {message!r:.100}"
        )


def _count_shared(*token_ids: Sequence[int]) -> int:
    """Count the tokens with which all lists of ids begin."""
    return sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, zip(*token_ids, strict=False)))


def _iterate_longer(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (part, copy of the message with this part longer).

    Empty content is the part NOTHING, and comes last.
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
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
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


def _remove_final_eos(text: str, eos: str | None) -> str:
    """Remove the EOS that ends a turn, because tokenization appends one."""
    stripped = text.rstrip()
    return stripped.removesuffix(eos) if eos and stripped.endswith(eos) else text
