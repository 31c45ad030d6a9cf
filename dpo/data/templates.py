"""Chats rendered by a chat template, which parts are scored, and what of the messages the rendered text lacks.

The assistant's messages are scored, each with the end of its turn.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from dpo.data.asking import TemplateRejects, apply_template, is_prefilled, iterate_texts, render_open
from dpo.data.schema import THOUGHTS, WARNED_FROM, Messages, Prompt, check_unicode, common_start, is_scored
from dpo.data.tokenization import find_control, list_ends, remove_final_eos
from dpo.errors import InputError, WarningLine
from dpo.redaction import redact, shorten

SHOWN = 60  # characters beside a control token in a message
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
END_OF_THOUGHT = "</think>"
ASK_NOTHING = ("system", "developer", "assistant", "tool")  # roles
NO_WORD = re.compile(r"(?<!\w)|(?!\w)", re.ASCII)  # a place that is not inside a word
TAKEN = "\0"  # replaces the characters of a rendered text in which a text of a message was found
LEAVES_OUT, TRIMS = "leaves out", "changes the white space of"
EARLIER = "the chat template leaves out thoughts of earlier turns, as it does where the model is served"
REWRITTEN = (
    "the chat template renders earlier turns of the response differently once others follow, so only the last answer "
    "is scored: give one record for each answer to train on all"
)


class Note(NamedTuple):
    """What was noticed in records: an example, from which share of the records on it is a warning, and in how many."""

    example: str
    warned_from: float = WARNED_FROM
    n_records: int = 1


Notes = dict[str, Note]  # by what was noticed


def add_notes(notes: Notes, more: Notes) -> None:
    for what, note in more.items():
        n_earlier = notes[what].n_records if what in notes else 0
        notes[what] = notes.get(what, note)._replace(n_records=n_earlier + note.n_records)


def describe_notes(notes: Notes, origin: str, n_records: int) -> Iterator[str]:
    for what, (example, warned_from, n) in notes.items():
        as_in = f", as in {shorten(example)}" if example else ""
        note = f"{origin}: {what}; in records: {n:,} of {n_records:,}{as_in}"
        yield WarningLine(note) if n >= warned_from * n_records else note


class Piece(NamedTuple):
    """A text of a message or a tool, which should be in the rendered text."""

    index: int  # the message's; -1 for a tool
    kind: str  # content, thought, call or tool
    text: str
    may_move: bool = False  # a template may write it elsewhere than it stands: a system turn, or a tool
    change: str = LEAVES_OUT  # what the template does to it: TRIMS, or nothing, once it is found
    start: int = 0  # in the rendered text
    end: int = 0


def list_pieces(messages: Messages, tools: Any = ()) -> list[Piece]:
    """Texts of messages in their order, and the names of functions."""
    pieces = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        thoughts = {message.get(key) or "" for key in THOUGHTS}
        if message["role"] == "assistant" and END_OF_THOUGHT in content:  # a template may cut these thoughts
            thought, _, content = content.rpartition(END_OF_THOUGHT)
            content = content.lstrip("\n")
            thoughts.add(thought.removeprefix("<think>").strip("\n"))
        pieces += (Piece(index, "thought", thought) for thought in sorted(thoughts))
        pieces.append(Piece(index, "content", content, may_move=message["role"] in ("system", "developer")))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            pieces += (Piece(index, "call", text) for text in (function["name"], *iterate_texts(function["arguments"])))
    functions = [tool.get("function") for tool in tools or ()]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    pieces += (Piece(-1, "tool", name, may_move=True) for name in names if isinstance(name, str))
    return [piece for piece in pieces if piece.text.strip()]


def find_pieces(pieces: Sequence[Piece], rendered: str) -> list[Piece]:
    """Look for each text in a place of its own, the longest first, between the texts of the messages around its own.

    Within a message it is behind the text before it, or else anywhere, as templates write calls in other orders.
    """
    found = list(pieces)
    for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number].text)):
        piece = pieces[number]
        low = last = 0
        high = len(rendered)
        for i, other in enumerate(found):
            if not other.end or piece.may_move or other.may_move:
                continue
            if i < number:
                last = max(last, other.end)
            if other.index < piece.index:
                low = max(low, other.end)
            elif other.index > piece.index:
                high = min(high, other.start)
        for spelled, change in _spell(piece.text):
            start = max(_find_words(spelled, rendered, begin, high) for begin in {last, low})
            if start >= 0:
                end = start + len(spelled)
                rendered = rendered[:start] + TAKEN * len(spelled) + rendered[end:]
                found[number] = piece._replace(change=change, start=start, end=end)
                break
    return found


def _find_words(text: str, rendered: str, start: int, limit: int) -> int:
    """Where a text is from `start` on, but not inside a word, as "a" is in "assistant"; -1 if nowhere."""
    while (start := rendered.find(text, start, limit)) >= 0:
        if NO_WORD.match(rendered, start) and NO_WORD.match(rendered, start + len(text)):
            break
        start += 1
    return start


def _spell(text: str) -> Iterator[tuple[str, str]]:
    """Yield the spellings in which templates write a text, each with what it changes."""
    stripped = text.strip()
    yield text, ""
    yield stripped, TRIMS
    for is_ascii in (False, True):
        once = json.dumps(stripped, ensure_ascii=is_ascii)[1:-1]
        yield once, ""
        yield json.dumps(once, ensure_ascii=is_ascii)[1:-1], ""  # calls may have arguments that are JSON in JSON


class ChatTemplate:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._ends = re.compile("|".join(map(re.escape, list_ends(tokenizer))) or "(?!)")

    def render(self, prompt: Prompt, said: Notes) -> Prompt:
        """Render a prompt's messages, whose last turn the responses continue if it is the assistant's.

        What the template changes is added to `said`.

        Raises InputError if messages have control tokens, or if the template rejects them, renders the prompt
        differently before a response, or leaves out all that the user or an answer says.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"chat messages need a chat template, and the tokenizer has none: {FIX}, or use text instead"
            )
        before, answers, tools = prompt.messages or [], prompt.responses, prompt.tools
        continued = is_prefilled(before) and all(answer[0]["role"] == "assistant" for answer in answers)
        chats = [before + answer for answer in answers]
        if continued:
            *context, begun = before
            chats = [
                [*context, {**begun, **first, "content": begun["content"] + first["content"]}, *others]
                for first, *others in answers
            ]
        n_before = len(before) - continued
        control = self._find_control(prompt, [chat[n_before:] for chat in chats])
        close = partial(apply_template, self.tokenizer, tools=tools)
        begin = partial(render_open, self.tokenizer, tools=tools, continued=continued)
        try:
            dialogues = [close(chat) for chat in chats]
            open_text = begin(before)
            text = self._cut_prompt(open_text, before, tools, dialogues, continued=continued)
            if control:
                raise InputError(control)
            if text is None:
                raise InputError(
                    f"the chat template renders the prompt differently once a response follows, so it is not "
                    f"known where the response starts: {FIX}, or use text instead"
                )
            if len(text) < len(open_text):
                what = (
                    "the chat template ends the prompt, where the model is served, with a text that the responses do "
                    "not begin with, so it is left out"
                )
                said[what] = Note(open_text[len(text) :])
            found = find_pieces(list_pieces(before, tools), text)
            _note_changes(found, before, "prompts", said)
            roles = [message["role"] for message in before]
            others = [role for role in roles if role not in ASK_NOTHING]
            asking = next(role for role in ("user", *others, *roles) if role in roles)
            lost = _find_lost(asking, before, found, begin, open_text)
            if lost is not None:
                raise InputError(
                    f"the chat template leaves out all that is asked, such as {shorten(lost)} of role {asking!r}: use "
                    f"roles that it renders, such as user, or {FIX}"
                )
            texts = []
            cuts = []
            for chat, answer, dialogue in zip(chats, answers, dialogues, strict=True):
                found = find_pieces(list_pieces(answer), dialogue[len(text) :])
                _note_changes(found, answer, "responses", said)
                lost = _find_lost("assistant", answer, found, close, dialogue, chat[: -len(answer)])
                if lost is not None:
                    raise InputError(
                        f"the chat template leaves out all of an answer, such as {shorten(lost)}: {FIX}, or remove the "
                        f"record"
                    )
                spans = self._find_scored(chat, answer, tools, dialogue, len(text), found, said)
                response, response_cuts = _cut_response(dialogue, len(text), spans)
                texts.append(remove_final_eos(response, self.tokenizer))
                cuts.append(response_cuts)
        except TemplateRejects as error:
            what = "messages or tools" if tools else "messages"
            reason = f"the tokenizer's chat template rejects these {what}: {error}"
            raise InputError(f"{control}; {reason}" if control else reason) from error
        return prompt._replace(text=text, responses=texts, cuts=cuts, rendered=True, truncation_mode="keep_turns")

    def _find_control(self, prompt: Prompt, answers: Sequence[Messages]) -> str:
        """Say where a control token is in the messages or tools, if there is one."""
        names = ["the prompt", *(f"response {i}" for i in range(1, len(answers) + 1))]
        if prompt.examples == [{"chosen": 0, "rejected": 1}]:
            names = ["the prompt", "chosen", "rejected"]
        for place, messages in zip(names, (prompt.messages or [], *answers), strict=True):
            for message in messages:
                for key, value in message.items():
                    if said := self._find_control_in(value):
                        return f"{key} of a message of role {message['role']!r} in {place} has {said}"
        said = self._find_control_in(prompt.tools)
        return f"a tool has {said}" if said else ""

    def _find_control_in(self, value: Any) -> str:
        text = "\n".join(iterate_texts(value))
        check_unicode(text, "a message or tool")
        token = find_control(self.tokenizer).search(text)
        if token is None:
            return ""
        around = redact(text[: token.start()])[-SHOWN:] + token[0] + redact(text[token.end() :])[:SHOWN]
        return f"the control token {token[0]!r}, which only the chat template may write: remove it from {around!r}"

    def _cut_prompt(
        self, open_text: str, prompt: Messages, tools: Any, dialogues: Sequence[str], *, continued: bool = False
    ) -> str | None:
        """Cut a rendered prompt where a dialogue begins otherwise; None if that is before its generation prompt.

        The generation prompt may have what a finished turn lacks, such as a thinking tag.
        """
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

    def _find_scored(
        self,
        chat: Messages,
        answer: Messages,
        tools: Any,
        dialogue: str,
        start: int,
        found: Sequence[Piece],
        said: Notes,
    ) -> list[tuple[int, int]]:
        """Find where the dialogue's scored turns begin and end; they belong to the answer, which begins at `start`.

        A turn ends with the first end token behind what it says, or, without one, where the template ends it. If the
        template renders turns differently before others, the last one alone is scored.
        """
        first = len(chat) - len(answer)
        last = len(chat) - 1
        turns = []  # numbers of messages, where they begin, and where the template ends them
        for i in range(first, len(chat)):
            if chat[i]["role"] != "assistant":
                continue
            begin = start if i == first else self._find_begin(chat[:i], tools, dialogue)
            turn = dialogue if i == last else apply_template(self.tokenizer, chat[: i + 1], tools=tools)
            turn = remove_final_eos(turn, self.tokenizer)  # some templates write it behind the last turn alone
            if begin is None or (turns and begin < turns[-1][2]) or not dialogue.startswith(turn):
                begin = self._find_begin(chat[:-1], tools, dialogue)
                if begin is None or begin < start:
                    raise InputError(
                        f"the chat template leaves out or moves the last answer, so it is not known which text is "
                        f"scored: {FIX}, give responses of one message, or remove {shorten(chat[-1])}"
                    )
                said[REWRITTEN] = Note(str(chat[-1]["content"]), warned_from=0)
                turns = [(last, begin, len(dialogue))]
                break
            turns.append((i, begin, len(turn)))
        spans = []
        for (i, begin, end), (_, limit, _) in pairwise([*turns, (last, len(dialogue), 0)]):
            if is_scored(answer[i - first]):
                said_until = max((piece.end for piece in found if piece.index == i - first), default=0)
                token = self._ends.search(dialogue, max(begin, start + said_until), limit)
                spans.append((begin, token.end() if token else end))
        if not spans:
            raise InputError("nothing of a response is scored, by weight=0 or train=false: correct it")
        return spans

    def _find_begin(self, messages: Messages, tools: Any, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins, if the dialogue has it."""
        try:
            open_text = render_open(self.tokenizer, messages, tools=tools, continued=False)
            before = self._cut_prompt(open_text, messages, tools, [dialogue])
        except TemplateRejects:
            return None
        return None if before in (None, dialogue) else len(before)


def _note_changes(found: Sequence[Piece], messages: Messages, place: str, said: Notes) -> None:
    """Add to `said` what the template leaves out of these messages, or trims; `place` is "prompts" or "responses"."""
    for piece in found:
        if not piece.change:
            continue
        # templates drop the thoughts before the user's last turn when the model is served, too: no warning
        is_earlier = place == "prompts" or any(message["role"] == "user" for message in messages[piece.index :])
        if piece.kind == "thought" and piece.change == LEAVES_OUT and is_earlier:
            said.setdefault(EARLIER, Note(piece.text, warned_from=math.inf))
            continue
        changed = "tools"
        if piece.kind != "tool":
            changed = f"the {piece.kind} of messages of role {messages[piece.index]['role']} in {place}"
        said.setdefault(f"the chat template {piece.change} {changed}", Note(piece.text))


def _find_lost(
    role: str, messages: Messages, found: Sequence[Piece], render: Callable, rendered: str, before: Sequence = ()
) -> str | None:
    """A text of a role without which, and without all else that it says, the rendered text is the same; or None."""
    own = [piece for piece in found if messages[piece.index]["role"] == role and piece.index >= 0]
    if any(piece.change != LEAVES_OUT for piece in own):
        return None
    emptied = list(messages)  # blank messages stay as they are
    for piece in own:
        emptied[piece.index] = {"role": role, "content": ""}
    try:
        is_same = render([*before, *emptied]) == rendered
    except TemplateRejects:
        return None
    return "".join(piece.text for piece in own[:1]) if is_same else None


def _cut_response(dialogue: str, start: int, spans: Sequence[tuple[int, int]]) -> tuple[str, list[int]]:
    """Cut the response off after its last scored turn, and list its unscored parts as [start, end, start, end, ...].

    The spans are the scored turns, as positions in the dialogue; the unscored parts are positions in the response.
    """
    cuts = []
    scored_end = start
    for begin, end in spans:
        if begin > scored_end:
            cuts += (scored_end - start, begin - start)
        scored_end = end
    return dialogue[start:scored_end], cuts
