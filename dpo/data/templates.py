"""Renders chats with a chat template, and finds what of them is scored, and what the template has left out.

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
from dpo.data.tokenization import compile_control, list_ends, remove_final_eos
from dpo.errors import InputError, WarningLine
from dpo.redaction import redact, shorten

SHOWN = 60  # characters beside a control token in a message
FIX = "name a tokenizer with another template, as model.tokenizer_name_or_path=OTHER_MODEL"
END_OF_THOUGHT = "</think>"
ASK_NOTHING = ("system", "developer", "assistant", "tool")  # roles whose messages are not what is asked
NO_WORD = re.compile(r"(?<!\w)|(?!\w)", re.ASCII)  # a place that is not inside a word of ASCII letters
TAKEN = "\0"  # replaces the characters of a rendered text in which a text of a message was found
LEAVES_OUT, TRIMS = "leaves out", "changes the white space of"  # in a note, between the template and a text
EARLIER = "the chat template leaves out thoughts of earlier turns, as it does where the model is served"
REWRITTEN = (
    "the chat template renders earlier turns of the response differently once others follow, so only the last answer "
    "is scored: write one record for each answer to train on all"
)


class Note(NamedTuple):
    """Something that was noticed in records."""

    example: str  # a text in which it was noticed; "" shows none
    warned_from: float = WARNED_FROM  # the share of records from which on it is a warning; math.inf: never
    n_records: int = 1


Notes = dict[str, Note]  # by what was noticed


def add_notes(notes: Notes, more: Notes) -> None:
    """Add up the numbers of records; the first example stays."""
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
    change: str = LEAVES_OUT  # until it is found: then TRIMS, or "" if it is as in the message
    start: int = 0  # in the rendered text
    end: int = 0  # exclusive; 0 until it is found


def list_pieces(messages: Messages, tools: Any = ()) -> list[Piece]:
    """List the texts of messages in their order, then the names of the tools' functions; blank ones are left out."""
    pieces = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        # a message may have the same thoughts under several keys
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
    """Look for pieces in the rendered text; return all, those that are found with their place.

    No two overlap. The longest are looked for first, so that a short one does not take a place inside them. A piece is
    between those of the messages before and after its own. Within its message it is behind the pieces before it, or
    else anywhere, as templates write calls in other orders.
    """
    found = list(pieces)
    for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number].text)):
        piece = pieces[number]
        low = 0  # where what was found of earlier messages ends
        last = 0  # where what was found of all earlier pieces ends, also of this message; never before `low`
        high = len(rendered)  # where what was found of later messages begins
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
            start = _find_words(spelled, rendered, last, high)
            if start < 0:
                start = _find_words(spelled, rendered, low, high)
            if start >= 0:
                end = start + len(spelled)
                rendered = rendered[:start] + TAKEN * len(spelled) + rendered[end:]
                found[number] = piece._replace(change=change, start=start, end=end)
                break
    return found


def _find_words(text: str, rendered: str, start: int, limit: int) -> int:
    """Find a text between `start` and `limit`; -1 if it is not there.

    It may not begin or end inside a word, as "a" does in "assistant".
    """
    while (start := rendered.find(text, start, limit)) >= 0:
        if NO_WORD.match(rendered, start) and NO_WORD.match(rendered, start + len(text)):
            break
        start += 1
    return start


def _spell(text: str) -> Iterator[tuple[str, str]]:
    """Yield the spellings in which templates write a text, each with the `change` of a piece that has it."""
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
        self._ends = re.compile("|".join(map(re.escape, list_ends(tokenizer))) or "(?!)")  # (?!) matches nowhere

    def render(self, prompt: Prompt, notes: Notes) -> Prompt:
        """Render the messages of a prompt and its responses to texts, and find what is scored.

        If the prompt ends with a turn of the assistant, the responses continue it. What the template changes is added
        to `notes`.

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
        n_before = len(before) - continued  # a continued message is the first of an answer
        control = self._find_control(prompt, [chat[n_before:] for chat in chats])
        render_whole = partial(apply_template, self.tokenizer, tools=tools)
        render_prompt = partial(render_open, self.tokenizer, tools=tools, continued=continued)
        try:
            dialogues = [render_whole(chat) for chat in chats]
            open_text = render_prompt(before)
            text = self._cut_prompt(open_text, before, tools, dialogues, continued=continued)
            if control:  # said only now, as the template may reject the messages as well
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
                notes[what] = Note(open_text[len(text) :])
            found = find_pieces(list_pieces(before, tools), text)
            _note_changes(found, before, "prompts", notes)
            roles = [message["role"] for message in before]
            others = [role for role in roles if role not in ASK_NOTHING]
            # the user asks, or, without user turns, a role that only this template may know, or else whoever is first
            asking = next(role for role in ("user", *others, *roles) if role in roles)
            lost = _find_lost(asking, before, found, render_prompt, open_text)
            if lost is not None:
                raise InputError(
                    f"the chat template leaves out all that is asked, such as {shorten(lost)} of role {asking!r}: use "
                    f"roles that it renders, such as user, or {FIX}"
                )
            texts = []
            cuts = []
            for chat, answer, dialogue in zip(chats, answers, dialogues, strict=True):
                found = find_pieces(list_pieces(answer), dialogue[len(text) :])
                _note_changes(found, answer, "responses", notes)
                lost = _find_lost("assistant", answer, found, render_whole, dialogue, chat[: -len(answer)])
                if lost is not None:
                    raise InputError(
                        f"the chat template leaves out all of an answer, such as {shorten(lost)}: {FIX}, or remove the "
                        f"record"
                    )
                spans = self._find_scored(chat, answer, tools, dialogue, len(text), found, notes)
                response, response_cuts = _cut_response(dialogue, len(text), spans)
                texts.append(remove_final_eos(response, self.tokenizer))
                cuts.append(response_cuts)
        except TemplateRejects as error:
            what = "messages or tools" if tools else "messages"
            reason = f"the tokenizer's chat template rejects these {what}: {error}"
            raise InputError(f"{control}; {reason}" if control else reason) from error
        return prompt._replace(text=text, responses=texts, cuts=cuts, rendered=True, truncation_mode="keep_turns")

    def _find_control(self, prompt: Prompt, answers: Sequence[Messages]) -> str:
        """Say where a control token is in the messages or tools; "" if there is none."""
        names = ["the prompt", *(f"response {i}" for i in range(1, len(answers) + 1))]
        if prompt.examples == [{"chosen": 0, "rejected": 1}]:
            names = ["the prompt", "chosen", "rejected"]
        for place, messages in zip(names, (prompt.messages or [], *answers), strict=True):
            for message in messages:
                for key, value in message.items():
                    if problem := self._find_control_in(value):
                        return f"{key} of a message of role {message['role']!r} in {place} has {problem}"
        problem = self._find_control_in(prompt.tools)
        return f"a tool has {problem}" if problem else ""

    def _find_control_in(self, value: Any) -> str:
        """Say which control token is in a nested value; "" if there is none."""
        text = "\n".join(iterate_texts(value))
        check_unicode(text, "a message or tool")
        token = compile_control(self.tokenizer).search(text)
        if token is None:
            return ""
        around = redact(text[: token.start()])[-SHOWN:] + token[0] + redact(text[token.end() :])[:SHOWN]
        return f"the control token {token[0]!r}, which only the chat template may write: remove it from {around!r}"

    def _cut_prompt(
        self, open_text: str, prompt: Messages, tools: Any, dialogues: Sequence[str], *, continued: bool = False
    ) -> str | None:
        """Cut a rendered prompt, `open_text`, where any of the dialogues goes on differently.

        It may only be cut in its generation prompt, which may have what a finished turn lacks, such as a thinking tag.
        Returns None if a dialogue differs before that.
        """
        shared = common_start(open_text, *dialogues)
        if shared == open_text:
            return open_text
        closed_text = open_text if continued else apply_template(self.tokenizer, prompt, tools=tools)
        if not shared.startswith(closed_text):
            return None
        if not self.tokenizer.is_fast:  # other tokenizers give no positions of tokens
            return shared
        # The common text may end inside a token: <think> and <tool_call> begin with <t. So cut behind the last token
        # that all have in common.
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
        notes: Notes,
    ) -> list[tuple[int, int]]:
        """Find the scored turns of an answer, as (begin, end) positions in its dialogue, where it begins at `start`.

        A turn ends with the first end token behind what it says, or, without one, where the template ends it. If the
        template renders turns differently before others, only the last one is scored. `found` has the answer's pieces,
        as positions in the answer's text.
        """
        first = len(chat) - len(answer)
        last = len(chat) - 1
        turns = []  # the assistant's: number of the message, where it begins, and where the template ends it
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
                        f"scored: {FIX}, use responses of one message, or remove {shorten(chat[-1])}"
                    )
                notes[REWRITTEN] = Note(str(chat[-1]["content"]), warned_from=0)
                turns = [(last, begin, len(dialogue))]
                break
            turns.append((i, begin, len(turn)))
        spans = []
        # the end token is looked for up to the next turn, or to the end of the dialogue
        for (i, begin, end), (_, limit, _) in pairwise([*turns, (last, len(dialogue), 0)]):
            if is_scored(answer[i - first]):
                said_until = max((piece.end for piece in found if piece.index == i - first), default=0)
                token = self._ends.search(dialogue, max(begin, start + said_until), limit)
                spans.append((begin, token.end() if token else end))
        if not spans:
            raise InputError("nothing of a response is scored, by weight=0 or train=false: correct it")
        return spans

    def _find_begin(self, messages: Messages, tools: Any, dialogue: str) -> int | None:
        """Find where the assistant's turn after these messages begins; None if the dialogue does not have it."""
        try:
            open_text = render_open(self.tokenizer, messages, tools=tools, continued=False)
            before = self._cut_prompt(open_text, messages, tools, [dialogue])
        except TemplateRejects:
            return None
        return None if before in (None, dialogue) else len(before)


def _note_changes(found: Sequence[Piece], messages: Messages, place: str, notes: Notes) -> None:
    """Add to `notes` what the template leaves out of these messages, or trims; `place` is "prompts" or "responses"."""
    for piece in found:
        if not piece.change:
            continue
        # templates drop the thoughts before the user's last turn when the model is served, too: no warning
        is_earlier = place == "prompts" or any(message["role"] == "user" for message in messages[piece.index :])
        if piece.kind == "thought" and piece.change == LEAVES_OUT and is_earlier:
            notes.setdefault(EARLIER, Note(piece.text, warned_from=math.inf))
            continue
        changed = "tools"
        if piece.kind != "tool":
            changed = f"the {piece.kind} of messages of role {messages[piece.index]['role']} in {place}"
        notes.setdefault(f"the chat template {piece.change} {changed}", Note(piece.text))


def _find_lost(
    role: str, messages: Messages, found: Sequence[Piece], render: Callable, rendered: str, before: Sequence = ()
) -> str | None:
    """Return the first text of a role if the template leaves out all that the role says, else None.

    It does if no text is found, and the rendered text is the same once the role's messages are empty. `render` renders
    `before` and `messages`. The text is "" if the role says nothing.
    """
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
