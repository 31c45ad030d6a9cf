"""Renders chats with a chat template, and finds which parts of the text are scored and what the template left out.

The assistant's messages are scored, each with the end of its turn.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dpo.data.prompt_forms import is_prefilled
from dpo.data.schema import THOUGHTS, WARNING_SHARE, Messages, Prompt, check_unicode, common_prefix, is_scored
from dpo.data.tokenization import compile_special_tokens, list_end_strings, match_any, remove_final_eos
from dpo.errors import InputError, WarningLine, one_sentence
from dpo.redaction import redact, shorten

MARK = "[goes on here]"  # appended to the beginning of an answer, to find in the rendered text where the answer goes on
SHOWN = 60  # characters that an error shows on either side of a control token
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
# Templates may render the thoughts of a turn differently once other turns follow.
FIX_TURNS = f"{FIX}, remove the thoughts of earlier turns if there are any"
END_OF_THOUGHT = "</think>"
ASK_NOTHING = ("system", "developer", "assistant", "tool")  # roles that do not ask the question of a prompt
# a position that is not inside a word of ASCII letters; other scripts may have no spaces between words
NOT_IN_WORD = re.compile(r"(?<!\w)|(?!\w)", re.ASCII)
TAKEN = "\0"  # overwrites a piece that was found in the rendered text, so that no other is found there
LEAVES_OUT, TRIMS = "leaves out", "changes the white space of"  # as in "the chat template leaves out the content"
EARLIER = "the chat template leaves out thoughts of earlier turns, as it does where the model is served"
CLOSED = (
    "the chat template ends the prompt, where the model is served, with a text that the responses do not begin with, "
    "so it is left out"
)
REWRITTEN = (
    "the chat template renders earlier turns of the response differently once others follow, so only the last answer "
    "is scored: write one record for each answer to train on all"
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
            functions = [call["function"] for message in written for call in message.get("tool_calls", ())]
            if not functions:
                raise
            for function in functions:
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
        raise TemplateRejects(f"it leaves out the beginning of the answer, {begun['content'][:80]!r}")
    return text


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts, keys and numbers in nested dicts and lists, numbers as text."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from iterate_texts(item)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):  # a template may write True or true
        yield str(value)


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
        n_earlier = notes[what].n_records if what in notes else 0
        notes[what] = notes.get(what, note)._replace(n_records=n_earlier + note.n_records)


def describe_notes(notes: Notes, origin: str, n_records: int) -> Iterator[str]:
    """Yield a line for each note on the `n_records` of a split; a warning is a WarningLine."""
    for what, (example, warned_from, n) in notes.items():
        as_in = f", as in {shorten(example)}" if example else ""
        note = f"{origin}: {what}; in records: {n:,} of {n_records:,}{as_in}"
        yield WarningLine(note) if n >= warned_from * n_records else note


# --- texts of messages in the rendered text --------------------------------------------------------------------------


@dataclass
class Piece:
    """A text of a message or a tool, which should be in the rendered text."""

    index: int  # the message's; -1 for a tool
    kind: str  # content, thought, call or tool
    text: str
    may_move: bool = False  # True for a system turn or a tool, which a template may write anywhere
    change: str = LEAVES_OUT  # what the template does to it: once it is found, TRIMS, or "" for nothing
    start: int = 0  # in the rendered text
    end: int = 0  # exclusive; 0 until it is found

    @property
    def order(self) -> tuple[int, bool]:
        """Where it stands among other pieces: messages in their order, and the thoughts of a message first."""
        return self.index, self.kind != "thought"


def list_pieces(messages: Messages, tools: Any = ()) -> list[Piece]:
    """List the texts of messages in their order, then the names of the tools' functions; blank ones are left out."""
    pieces = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        thoughts = {message.get(key) or "" for key in THOUGHTS}  # a set, as several keys may have the same thoughts
        if message["role"] == "assistant" and END_OF_THOUGHT in content:  # a template may leave these thoughts out
            thought, _, content = content.rpartition(END_OF_THOUGHT)
            content = content.lstrip("\n")
            thoughts.add(thought.removeprefix("<think>").strip("\n"))
        for thought in sorted(thoughts):
            pieces.append(Piece(index, "thought", thought))
        pieces.append(Piece(index, "content", content, may_move=message["role"] in ("system", "developer")))
        for call in message.get("tool_calls") or ():
            for text in iterate_texts([call["function"]["name"], call["function"]["arguments"]]):
                pieces.append(Piece(index, "call", text))
    for tool in tools or ():
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            pieces.append(Piece(-1, "tool", name, may_move=True))
    return [piece for piece in pieces if piece.text.strip()]


def find_pieces(messages: Messages, rendered: str, tools: Any = ()) -> list[Piece]:
    """Look for the texts of messages and tools in the rendered text; return all, found or not, in their order.

    No two overlap. Longer ones are looked for first, so that a short one is not found inside a longer one. Unless a
    piece may move, it must be after those of a smaller `order`, and before those of a larger one.
    """
    pieces = list_pieces(messages, tools)
    anchors = []  # found pieces that may not move, and so limit where others may be
    # A call is looked for last, as a template may list its function among the tools, before all messages.
    for piece in sorted(pieces, key=lambda piece: (piece.kind == "call", -len(piece.text))):
        low = 0
        high = len(rendered)
        for anchor in anchors:
            if piece.may_move:
                break
            if anchor.order < piece.order:
                low = max(low, anchor.end)
            elif anchor.order > piece.order:
                high = min(high, anchor.start)
        for spelled, change in _spell(piece.text):
            begin = _find_words(spelled, rendered, low, high)
            if begin >= 0:
                piece.change = change
                piece.start = begin
                piece.end = begin + len(spelled)
                rendered = rendered[:begin] + TAKEN * len(spelled) + rendered[piece.end :]
                if not piece.may_move:
                    anchors.append(piece)
                break
    return pieces


def _find_words(text: str, rendered: str, start: int, limit: int) -> int:
    """Return where a text begins between `start` and `limit`; -1 if it is not there.

    A match may not begin or end inside a word, as "a" does in "assistant".
    """
    while (start := rendered.find(text, start, limit)) >= 0:
        if NOT_IN_WORD.match(rendered, start) and NOT_IN_WORD.match(rendered, start + len(text)):
            break
        start += 1
    return start


def _spell(text: str) -> Iterator[tuple[str, str]]:
    """Yield the spellings in which templates write a text, each with the `Piece.change` that it means."""
    stripped = text.strip()
    yield text, ""
    yield stripped, TRIMS
    for is_ascii in (False, True):
        escaped = json.dumps(stripped, ensure_ascii=is_ascii)[1:-1]
        yield escaped, ""
        yield json.dumps(escaped, ensure_ascii=is_ascii)[1:-1], ""  # a call's arguments may be JSON inside JSON


def _note_changes(pieces: Sequence[Piece], messages: Messages, place: str, notes: Notes) -> None:
    """Add to `notes` which pieces the template leaves out or trims; `place` is "prompts" or "responses"."""
    for piece in pieces:
        if not piece.change:
            continue
        # templates also leave out the thoughts before the user's last turn where a model is served: no warning
        is_earlier = place == "prompts" or any(message["role"] == "user" for message in messages[piece.index :])
        if piece.kind == "thought" and piece.change == LEAVES_OUT and is_earlier:
            notes.setdefault(EARLIER, Note(piece.text, warned_from=math.inf))
            continue
        changed = "tools"
        if piece.kind != "tool":
            changed = f"the {piece.kind} of messages of role {messages[piece.index]['role']} in {place}"
        notes.setdefault(f"the chat template {piece.change} {changed}", Note(piece.text))


def _refuse_lost(
    pieces: Sequence[Piece], messages: Messages, role: str, what: str, renders_same: Callable[[Messages], bool]
) -> None:
    """Raise InputError if the template leaves out all that a role says, which the error calls `what`.

    It does if no text of the role is found, and if the rendered text stays the same once the role's messages are empty,
    which `renders_same` finds out.
    """
    own = [piece for piece in pieces if piece.kind != "tool" and messages[piece.index]["role"] == role]
    if any(piece.change != LEAVES_OUT for piece in own):
        return
    emptied = list(messages)  # blank messages stay as they are
    for piece in own:
        emptied[piece.index] = {"role": role, "content": ""}
    try:
        is_lost = renders_same(emptied)
    except TemplateRejects:  # a template that rejects empty texts reads them
        return
    if is_lost:
        first = own[0].text if own else ""
        raise InputError(
            f"the chat template leaves out all {what}, such as {shorten(first)} of role {role!r}: use roles that it "
            f"renders, {FIX}, or remove the record"
        )


# --- prompts and responses -------------------------------------------------------------------------------------------


class ChatTemplate:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._end_token = match_any(list_end_strings(tokenizer))

    def render(self, prompt: Prompt, notes: Notes) -> Prompt:
        """Return a prompt with its messages and responses rendered to texts, and with the cuts of the responses.

        If the prompt ends with a turn of the assistant, the responses continue it. Adds to `notes` what the template
        changes.

        Raises InputError if messages have control tokens, or if the template rejects them, renders the prompt
        differently before a response, or leaves out all that the user or an answer says.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"chat messages need a chat template, and the tokenizer has none: {FIX}, or use text instead"
            )
        messages = prompt.messages or []
        continued = is_prefilled(messages) and all(answer[0]["role"] == "assistant" for answer in prompt.responses)
        chats = [_join(messages, answer, continued) for answer in prompt.responses]
        # a slice of a chat is its answer, which includes the prompt's last message if it continues that
        control = self._find_control(prompt, [chat[len(messages) - continued :] for chat in chats])
        apply = partial(apply_template, self.tokenizer, tools=prompt.tools)
        texts = []
        cuts = []
        try:
            dialogues = [apply(chat) for chat in chats]
            render = partial(render_until_answer, apply, continued=continued)
            open_text = render(messages)
            if control:  # raised only now, so that a rejection by the template is reported with it
                raise InputError(control)
            text = self._cut_prompt(apply, messages, open_text, dialogues, continued=continued)
            if text is None:
                raise InputError(
                    f"the chat template renders the prompt differently once a response follows, so it is not known "
                    f"where the response starts: {FIX_TURNS}, or use text instead"
                )
            _check_prompt(render, messages, prompt.tools, open_text, text, notes)
            for chat, answer, dialogue in zip(chats, prompt.responses, dialogues, strict=True):
                response, response_cuts = self._cut_response(apply, chat, answer, dialogue, len(text), notes)
                texts.append(remove_final_eos(response, self.tokenizer))
                cuts.append(response_cuts)
        except TemplateRejects as error:
            what = "messages or tools" if prompt.tools else "messages"
            reason = f"the tokenizer's chat template rejects these {what}: {error}"
            raise InputError(f"{control}; {reason}" if control else reason) from error
        return prompt._replace(text=text, responses=texts, cuts=cuts, rendered=True, truncation_mode="keep_turns")

    def _find_control(self, prompt: Prompt, answers: Sequence[Messages]) -> str:
        """Return a sentence on the first control token in the messages or tools; "" if there is none.

        Raises InputError for a text that is not valid Unicode.
        """
        names = ["the prompt", *(f"response {i}" for i in range(1, len(answers) + 1))]
        if prompt.examples == [{"chosen": 0, "rejected": 1}]:
            names = ["the prompt", "chosen", "rejected"]
        values = []
        for name, messages in zip(names, (prompt.messages or [], *answers), strict=True):
            for message in messages:
                for key, value in message.items():
                    values.append((f"{key} of a message of role {message['role']!r} in {name}", value))
        for name, value in (*values, ("a tool", prompt.tools)):
            text = "\n".join(iterate_texts(value))
            check_unicode(text, name)
            if token := compile_special_tokens(self.tokenizer).search(text):
                around = redact(text[: token.start()])[-SHOWN:] + token[0] + redact(text[token.end() :])[:SHOWN]
                return (
                    f"{name} has the control token {token[0]!r}, which only the chat template may write: remove it "
                    f"from {around!r}"
                )
        return ""

    def _cut_prompt(
        self, apply: Apply, messages: Messages, open_text: str, dialogues: Sequence[str], *, continued: bool = False
    ) -> str | None:
        """Cut a rendered prompt, `open_text`, where any of the dialogues differs from it.

        Only its generation prompt may be cut, which may have a text that finished turns lack, such as a thinking tag.
        Returns None if a dialogue differs before the generation prompt.
        """
        shared = common_prefix(open_text, *dialogues)
        if shared == open_text:
            return open_text
        closed_text = open_text if continued else apply(messages)
        if not shared.startswith(closed_text):
            return None
        if not self.tokenizer.is_fast:  # a slow tokenizer gives no offsets of tokens
            return shared
        # The shared text may end inside a token: <think> and <tool_call> begin with <t. So cut before the first
        # token that differs.
        encoded = self.tokenizer([open_text, *dialogues], add_special_tokens=False, return_offsets_mapping=True)
        end = len(closed_text)
        columns = zip(*encoded["input_ids"], strict=False)
        for ids, (_, token_end) in zip(columns, encoded["offset_mapping"][0], strict=False):
            if len(set(ids)) > 1:
                break
            end = max(end, token_end)
        return open_text[:end]

    def _cut_response(
        self, apply: Apply, chat: Messages, answer: Messages, dialogue: str, start: int, notes: Notes
    ) -> tuple[str, list[int]]:
        """Cut the response out of a rendered chat, `dialogue`, from `start` to the end of its last scored turn.

        Returns its text and its cuts, which are positions in this text. A scored turn ends with the first end token
        after its message's texts or, without one, where the template ends it.

        Raises InputError if the template leaves out the answer or moves it, or if nothing of it is scored.
        """
        first = len(chat) - len(answer)
        pieces = find_pieces(answer, dialogue[start:])
        _note_changes(pieces, answer, "responses", notes)
        _refuse_lost(pieces, answer, "assistant", "of an answer", lambda new: apply(chat[:first] + new) == dialogue)
        turns = self._find_turns(apply, chat, first, dialogue, start)
        if turns is None:
            begin = self._find_begin(apply, chat[:-1], dialogue)
            if begin is None or begin < start:
                raise InputError(
                    f"the chat template leaves out or moves the last answer, so it is not known which text is scored: "
                    f"{FIX_TURNS}, use responses of one message, or remove {shorten(chat[-1])}"
                )
            notes[REWRITTEN] = Note(str(chat[-1]["content"]), warned_from=0)
            turns = [(len(chat) - 1, begin, len(dialogue))]
        cuts = []
        scored_end = start
        next_begins = [begin for _, begin, _ in turns[1:]]
        for (i, begin, end), limit in zip(turns, [*next_begins, len(dialogue)], strict=True):
            if not is_scored(answer[i - first]):
                continue
            if begin > scored_end:
                cuts += (scored_end - start, begin - start)
            texts_end = max([begin, *(start + piece.end for piece in pieces if piece.index == i - first)])
            token = self._end_token.search(dialogue, texts_end, limit)
            scored_end = token.end() if token else end
        if scored_end == start:
            raise InputError("nothing of a response is scored, by weight=0 or train=false: correct it")
        return dialogue[start:scored_end], cuts

    def _find_turns(
        self, apply: Apply, chat: Messages, first: int, dialogue: str, start: int
    ) -> list[tuple[int, int, int]] | None:
        """Find the assistant's turns from the message `first` on, which begins at `start` in the dialogue.

        Returns for each turn the index of its message, where it begins, and where the template ends it. Returns None
        if the template renders a turn differently once others follow.
        """
        turns = []
        end = start
        for i in range(first, len(chat)):
            if chat[i]["role"] != "assistant":
                continue
            begin = start if i == first else self._find_begin(apply, chat[:i], dialogue)
            turn = dialogue if i == len(chat) - 1 else apply(chat[: i + 1])
            turn = remove_final_eos(turn, self.tokenizer)  # some templates write EOS after the last turn alone
            if begin is None or begin < end or not dialogue.startswith(turn):
                return None
            end = len(turn)
            turns.append((i, begin, end))
        return turns

    def _find_begin(self, apply: Apply, messages: Messages, dialogue: str) -> int | None:
        """Return where the assistant's turn after these messages begins; None if the dialogue does not have it."""
        try:
            open_text = render_until_answer(apply, messages, continued=False)
            before = self._cut_prompt(apply, messages, open_text, [dialogue])
        except TemplateRejects:
            return None
        return None if before in (None, dialogue) else len(before)


def _join(prompt: Messages, answer: Messages, continued: bool) -> Messages:
    """Join a prompt and an answer to a chat; if `continued`, the answer's first message continues the prompt's last."""
    if not continued:
        return prompt + answer
    *context, begun = prompt
    first, *others = answer
    return [*context, {**begun, **first, "content": begun["content"] + first["content"]}, *others]


def _check_prompt(
    render: Apply, messages: Messages, tools: list | None, open_text: str, text: str, notes: Notes
) -> None:
    """Add to `notes` what the template changes in a prompt, which is rendered as `open_text` and cut to `text`.

    Raises InputError if the template leaves out all that is asked.
    """
    if len(text) < len(open_text):
        notes[CLOSED] = Note(open_text[len(text) :])
    pieces = find_pieces(messages, text, tools=tools)
    _note_changes(pieces, messages, "prompts", notes)
    roles = [message["role"] for message in messages]
    # the user asks; without user turns, a role that only this template knows, or else the role of the first message
    asking = min(roles, key=lambda role: (role != "user", role in ASK_NOTHING))
    _refuse_lost(pieces, messages, asking, "that is asked", lambda new: render(new) == open_text)
