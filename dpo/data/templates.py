"""Renders chats with a chat template, and finds which parts of the text are scored and what the template left out.

The assistant's messages are scored, each with the end of its turn.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

from dpo.data.prompt_forms import is_prefilled
from dpo.data.schema import THOUGHTS, WARNING_SHARE, Messages, Prompt, check_unicode, common_prefix, is_scored
from dpo.data.tokenization import compile_special_tokens, list_end_strings, match_any, quote_around, remove_final_eos
from dpo.errors import InputError, WarningLine, one_sentence
from dpo.redaction import shorten

MARK = "[goes on here]"  # appended to the beginning of an answer, to find in the rendered text where the answer goes on
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
ASK_NOTHING = ("system", "developer", "assistant", "tool")  # roles that do not ask the question of a prompt
# Templates may split a content at these tags, and leave out the thoughts between them.
THOUGHT_TAG = re.compile(r"(</?(?:think|thought|reasoning)>\n*)")
EARLIER = "the chat template leaves out thoughts of earlier turns, as it does where the model is served"
CLOSED = (
    "where the model is served, the chat template ends the prompt with a text that responses do not begin with, so it "
    "is left out"
)
REWRITTEN = (
    "the chat template renders earlier turns of the response differently once others follow, so only the last answer "
    "is scored: write one record for each answer"
)

Apply = Callable[..., str]  # `apply_template`, with tokenizer and tools bound


# --- a template applied to messages --------------------------------------------------------------------------------


class TemplateRejects(Exception):
    """A chat template cannot render messages."""


def apply_template(tokenizer: Any, messages: Messages, **options: Any) -> str:
    """Render messages to text. Raises TemplateRejects, whatever error the template raises."""
    try:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TypeError:
            # A template may join a call's arguments to text, as DeepSeek-V3's does, so they must be JSON, not a dict.
            written = copy.deepcopy(messages)
            for message in written:
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            return tokenizer.apply_chat_template(written, tokenize=False, **options)
    except Exception as error:  # a template is a program, which may raise anything
        raise TemplateRejects(one_sentence(error)) from error


def render_until_answer(apply: Apply, messages: Messages, *, continued: bool) -> str:
    """Render the messages before an answer, up to the end of the generation prompt.

    If `continued`, the last message is the beginning of the answer, and the text ends with its content. Raises
    TemplateRejects.
    """
    if not continued:
        return apply(messages, add_generation_prompt=True)
    *context, begun = messages
    # What follows the mark, such as an end of turn, is dropped.
    text, mark, _ = apply([*context, {**begun, "content": begun["content"] + MARK}]).rpartition(MARK)
    if not mark:
        raise TemplateRejects(f"it leaves out the beginning of the answer, {shorten(begun['content'])}")
    return text


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts and keys in nested dicts and lists."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from iterate_texts(item)
    elif isinstance(value, str):
        yield value


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Copy messages or tools, with `change` applied to each text that is not a key."""
    if isinstance(value, dict):
        return {key: change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [change_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


# --- what is noticed -----------------------------------------------------------------------------------------------


class Note(NamedTuple):
    """In how many records something was noticed, and whether that deserves a warning."""

    example: str  # a text in which it was noticed, to be shown; "" shows none
    warned_from: float = WARNING_SHARE  # the smallest share of the records that makes it a warning; math.inf: never
    n_records: int = 1


Notes = dict[str, Note]  # by the sentence that says what was noticed


def add_notes(notes: Notes, new_notes: Notes) -> None:
    """Add `new_notes` to `notes`. For a note in both, the numbers of records add up, and the first example stays."""
    for what, note in new_notes.items():
        if what in notes:
            note = notes[what]._replace(n_records=notes[what].n_records + note.n_records)
        notes[what] = note


def describe_notes(notes: Notes, origin: str, n_records: int) -> Iterator[str]:
    """Yield a line for each note on the `n_records` of a split; a warning is a WarningLine."""
    for what, (example, warned_from, n) in notes.items():
        as_in = f", as in {shorten(example)}" if example else ""
        note = f"{origin}: {what}; in records: {n:,} of {n_records:,}{as_in}"
        yield WarningLine(note) if n >= warned_from * n_records else note


# --- texts of messages in the rendered text --------------------------------------------------------------------------

# by a message's index and one of its texts: the kind (content, thought or call), and the mark that stands in its place
MarkedTexts = dict[tuple[int, str], tuple[str, str]]


def mark_texts(messages: Messages) -> tuple[Messages, MarkedTexts]:
    """Copy messages with a mark in place of each text that is not blank, inside the white space around it.

    A chat template treats a mark as it would treat the text, but a mark cannot be mistaken for other words.
    """
    texts: MarkedTexts = {}

    def mark(index: int, kind: str, text: str) -> str:
        words = text.strip()
        if not words:
            return text
        before, after = text.split(words)
        # The white space is repeated, so that a newline that a template itself writes does not stand for it. Several
        # keys of a message may have the same thoughts, of which a template reads one.
        return texts.setdefault((index, text), (kind, f"{before * 9}[~{len(texts)}~]{after * 9}"))[1]

    marked = []
    for index, message in enumerate(messages):
        parts = THOUGHT_TAG.split(message["content"])  # texts, with a tag between each two
        for i in range(0, len(parts), 2):
            parts[i] = mark(index, "content" if i == len(parts) - 1 else "thought", parts[i])
        copied = {**message, "content": "".join(parts)}
        for key in THOUGHTS:
            if key in message:
                copied[key] = mark(index, "thought", message[key])
        if "tool_calls" in message:
            mark_call = partial(mark, index, "call")
            copied["tool_calls"] = [
                {**call, "function": change_texts(call["function"], mark_call)} for call in message["tool_calls"]
            ]
        marked.append(copied)
    return marked, texts


def spell(text: str) -> Iterator[str]:
    """Yield the spellings in which templates write a text; a call's arguments may be JSON inside JSON."""
    yield text
    for is_ascii in (False, True):
        escaped = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
        yield escaped
        yield json.dumps(escaped, ensure_ascii=is_ascii)[1:-1]


# --- prompts and responses -------------------------------------------------------------------------------------------


class ChatTemplate:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._end = match_any(list_end_strings(tokenizer))
        end = self._end.pattern
        # the first of the end tokens with which a turn ends, and an end token that only begins the next turn
        self._closing_end = re.compile(rf"(?:{end})(?=(?:{end}|\s)*\Z)")
        self._next_end = re.compile(rf"\s*(?:{end})")
        self._rendered = {}  # texts, by the chat and tools that `_render_marked` got

    def render(self, prompt: Prompt, notes: Notes) -> Prompt:
        """Return a prompt with its messages and responses rendered to texts, and with the cuts of the responses.

        If the prompt ends with a turn of the assistant, the responses continue it. Adds to `notes` what the template
        changes.

        Raises InputError if messages have control tokens, or if the template rejects them, renders the prompt
        differently before a response, or leaves out all that the user or an answer says.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"chat messages need a chat template, which the tokenizer lacks: {FIX}, or use text instead"
            )
        self._refuse_control_tokens(prompt)
        messages = prompt.messages or []
        continued = is_prefilled(messages) and all(answer[0]["role"] == "assistant" for answer in prompt.responses)
        chats = [messages + answer for answer in prompt.responses]
        if continued:
            *context, begun = messages
            chats = [
                [*context, {**begun, **first, "content": begun["content"] + first["content"]}, *others]
                for first, *others in prompt.responses
            ]
        apply = partial(apply_template, self.tokenizer, tools=prompt.tools)
        texts = []
        cuts = []
        try:
            dialogues = [apply(chat) for chat in chats]
            text = self._cut_prompt(apply, messages, dialogues, notes, continued=continued)
            for chat, dialogue in zip(chats or [messages], dialogues or [text], strict=True):
                self._note_changes(prompt, chat, dialogue, notes)
            for chat, answer, dialogue in zip(chats, prompt.responses, dialogues, strict=True):
                response, response_cuts = self._cut_response(apply, chat, answer, dialogue, len(text), notes)
                texts.append(response)
                cuts.append(response_cuts)
        except TemplateRejects as error:
            raise InputError(f"the tokenizer's chat template rejects these messages: {error}") from error
        return prompt._replace(text=text, responses=texts, cuts=cuts, rendered=True, truncation_mode="keep_turns")

    def _refuse_control_tokens(self, prompt: Prompt) -> None:
        """Raise InputError for a control token in messages or tools, and for a text that is not valid Unicode."""
        values = [("a tool", prompt.tools)]
        for message in chain(prompt.messages or (), *prompt.responses):
            values += [(f"{key} of a message of role {message['role']!r}", value) for key, value in message.items()]
        for name, value in values:
            text = "\n".join(iterate_texts(value))
            check_unicode(text, name)
            if token := compile_special_tokens(self.tokenizer).search(text):
                raise InputError(
                    f"{name} has the control token {token[0]!r}, which only the chat template may write: remove it "
                    f"from {quote_around(text, token.start())}"
                )

    def _note_changes(self, prompt: Prompt, chat: Messages, dialogue: str, notes: Notes) -> None:
        """Add to `notes` what the template leaves out of a chat rendered as `dialogue`, and which contents it trims.

        Raises InputError if it leaves out all that is asked or answered.
        """
        asked = prompt.messages or []
        marked, texts = mark_texts(chat)
        rendered = self._render_marked(marked, prompt.tools)
        if prompt.tools and rendered == self._render_marked(marked, None):
            notes["the chat template leaves out tools"] = Note(str(prompt.tools))
        present = set()  # the places and roles of which a text is rendered
        for (index, text), (kind, mark) in texts.items():
            role = chat[index]["role"]
            place = "prompts" if index < len(asked) else "responses"
            change = "leaves out"
            has_mark = mark.strip() in rendered
            if has_mark:
                present.add((place, role))
            # a template may also leave out a text for what it says
            if has_mark and any(spelled in dialogue for spelled in spell(text.strip())):
                if kind != "content" or mark in rendered or json.dumps(mark)[1:-1] in rendered:
                    continue
                change = "changes the white space of"
            elif kind == "thought" and (
                place == "prompts" or any(message["role"] == "user" for message in chat[index:])
            ):
                # templates also leave out these thoughts where a model is served: no warning
                notes.setdefault(EARLIER, Note(text, warned_from=math.inf))
                continue
            notes.setdefault(f"the chat template {change} the {kind} of messages of role {role} in {place}", Note(text))
        # the user asks; without user turns, a role that only this template knows, or else the role of the first message
        asking = min((message["role"] for message in asked), key=lambda role: (role != "user", role in ASK_NOTHING))
        for place, role, said in (("prompts", asking, asked), ("responses", "assistant", chat[len(asked) :])):
            if said and (place, role) not in present:
                raise InputError(
                    f"the chat template renders nothing that role {role!r} says in {shorten(said)}: use roles that it "
                    f"renders, {FIX}, or remove the record"
                )

    def _render_marked(self, chat: Messages, tools: list | None) -> str:
        """Render a chat of marks; chats that differ only in their texts have the same, which is rendered once."""
        shape = repr((chat, tools))
        if shape not in self._rendered:
            try:
                self._rendered[shape] = apply_template(self.tokenizer, chat, tools=tools)
            except TemplateRejects:  # it reads the texts, so nothing is known: as if it wrote all marks
                self._rendered[shape] = shape
        return self._rendered[shape]

    def _cut_prompt(
        self, apply: Apply, messages: Messages, dialogues: Sequence[str], notes: Notes, *, continued: bool = False
    ) -> str:
        """Render the messages before an answer, and cut the text where any of the dialogues differs from it.

        Only the generation prompt may be cut, which may have a text that finished turns lack, such as a thinking tag.
        Raises InputError if a dialogue differs earlier, or has no answer.
        """
        open_text = render_until_answer(apply, messages, continued=continued)
        text = common_prefix(open_text, *dialogues)
        if text != open_text:
            closed_text = open_text if continued else apply(messages)
            if not text.startswith(closed_text) or text in dialogues:
                raise InputError(
                    f"the chat template renders the prompt differently once a response follows: {FIX}, remove the "
                    f"thoughts of earlier turns, or use text instead"
                )
            if self.tokenizer.is_fast:  # a slow tokenizer gives no offsets of tokens
                # The shared text may end inside a token: <think> and <tool_call> begin with <t. So cut before the
                # first token that differs.
                encoded = self.tokenizer([open_text, *dialogues], add_special_tokens=False, return_offsets_mapping=True)
                shared = takewhile(lambda ids: len(set(ids)) == 1, zip(*encoded["input_ids"], strict=False))
                token_ends = [end for _, (_, end) in zip(shared, encoded["offset_mapping"][0], strict=False)]
                text = open_text[: max([len(closed_text), *token_ends])]
            notes[CLOSED] = Note(open_text[len(text) :])
        return text

    def _cut_response(
        self, apply: Apply, chat: Messages, answer: Messages, dialogue: str, start: int, notes: Notes
    ) -> tuple[str, list[int]]:
        """Cut the response out of a rendered chat, `dialogue`, from `start` to the end of its last scored turn.

        Returns its text and its cuts, which are positions in this text. Raises InputError if it is not known where the
        last answer starts, or if nothing is scored.
        """
        first = len(chat) - len(answer)

        def find_turn(i: int) -> tuple[int, int]:
            """Return where a message of the assistant begins, and where its turn ends, with the first end token."""
            begin = start if i == first else len(self._cut_prompt(apply, chat[:i], [dialogue], notes))
            turn = dialogue
            if i < len(chat) - 1:  # some templates write EOS after the last turn alone
                turn = remove_final_eos(apply(chat[: i + 1]), self.tokenizer)
            # some templates end every chat with the head of an answer, which is before this turn too
            closed = turn.removesuffix(self._end.split(dialogue[:begin])[-1])
            if not dialogue.startswith(turn):  # an earlier turn is rendered differently
                raise TemplateRejects
            token = self._closing_end.search(closed, begin) or self._next_end.match(dialogue, len(turn))
            return begin, token.end() if token else len(turn)

        last = len(chat) - 1
        try:
            turns = {i: find_turn(i) for i in range(first, len(chat)) if chat[i]["role"] == "assistant"}
        except (InputError, TemplateRejects):
            turns = {last: find_turn(last)}
            notes[REWRITTEN] = Note(chat[last]["content"], warned_from=0)
        cuts = []
        scored = ""
        scored_end = start
        for i, (begin, end) in turns.items():
            if is_scored(answer[i - first]):
                if begin > scored_end:
                    cuts += (scored_end - start, begin - start)
                scored += dialogue[begin:end]
                scored_end = end
        # an answer without content may continue a begun one, to say that it ends there
        if not scored or (answer[-1]["content"].strip() and not self._end.sub("", scored).strip()):
            raise InputError(
                "nothing of a response is scored, by weight=0, train=false or the chat template: correct it"
            )
        return remove_final_eos(dialogue[start:scored_end], self.tokenizer), cuts
