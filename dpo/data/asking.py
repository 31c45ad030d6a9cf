"""A user's prompts, in the format that the model was trained on."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpo.data.schema import ASSISTANT, Messages, check_unicode, read_message, read_tools
from dpo.data.sources import HUB_IDS
from dpo.data.table import Prompt
from dpo.data.tokenization import ESCAPE, escape_control
from dpo.errors import InputError, one_sentence

HUMAN = "\n\nHuman:"
DATASETS_IN_HH_FORMAT = frozenset((*HUB_IDS, "demo"))
AUTO, CHAT, HH, RAW = "auto", "chat", "hh", "raw"
FORMATS = (AUTO, CHAT, HH, RAW)
MEANINGS = {
    CHAT: "the tokenizer's chat template",
    HH: r"\n\nHuman: ...\n\nAssistant:",
    RAW: "plain text, as it is",
}
UserPrompt = str | list[Mapping[str, str]]  # a text, or chat messages {role, content}
MARK = "\ufdd1"  # a noncharacter, which no text has: marks a place in a text that is rendered
HEADER = re.compile(  # the last line of a prompt, below others: ### Response, <assistant>, Answer (short):, Output =>
    r"#{2,} ?\w.{0,40}|<\w[\w-]*>|\W{0,3}\w[\w;./-]*( \w+| \(\w+\)){0,2} ?([:：]|=>|->)\W{0,2}"
)
CONTROL = re.compile(r"(<\|[^|<>\n]+\|>|\[/INST\])\w*$")
TURN = r"[A-Z]\w{0,15} ?:"  # a speaker on a line of several turns, as in `USER: Hi ASSISTANT:`
SPEAKER = re.compile(f"({HUMAN}|{ASSISTANT})")


class TemplateRejects(Exception):
    """A chat template cannot render messages; the message says why."""


def find_header(prompt: str, tokenizer: Any) -> str:
    """Find the header of an answer in which a text ends; "" if there is none.

    That is a control token, perhaps with a role behind it; a last line like `Assistant:`, `### Response:` or
    `**Answer:**` below others; or a speaker in a line that begins with another one.
    """
    text = prompt.rstrip()
    _, newline, line = text.rpartition("\n")
    if newline and HEADER.fullmatch(line.strip()):
        return line.strip()
    if match := CONTROL.search(line):
        return match[0]
    if (match := re.search(rf"\s({TURN})$", text)) and re.search(rf"(^|\s){TURN} ", text[: match.start()]):
        return match[1]
    for token in tokenizer.added_tokens_decoder.values():
        name = token.content.strip()
        # the role's name may follow, as in <start_of_turn>model
        if name.startswith(("<", "[")) and (match := re.search(rf"{re.escape(name)}\w*$", line)):
            return match[0]
    return ""


def share_header(prompts: Sequence[str], tokenizer: Any) -> bool:
    """Return whether most texts end in the same header of an answer.

    A single one may end in a colon by chance.
    """
    headers = Counter(find_header(prompt, tokenizer) for prompt in prompts)
    del headers[""]
    return 2 * max(headers.values(), default=0) > len(prompts)


def find_format(prompt: str, *, rendered: bool) -> str:
    """Find the format of a training prompt: `chat`, `hh` or `raw`.

    It is `chat` if a chat template `rendered` the prompt, and `hh` for a dialogue of Human and Assistant.
    """
    if rendered:
        return CHAT
    return HH if prompt.startswith(HUMAN) and prompt.endswith(ASSISTANT) else RAW


def choose_format(requested: str, trained_on: str | None, tokenizer: Any) -> str:
    """Resolve the format `auto`: `trained_on` if that is known and possible, else `chat` with a template, else `raw`.

    Returns any other format as it is. Raises InputError for `chat` without a template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if requested == CHAT and not has_template:
        raise InputError("the tokenizer has no chat template: give --format hh or --format raw")
    if requested != AUTO:
        return requested
    if trained_on in (HH, RAW):  # these need no template
        return trained_on
    return CHAT if has_template else RAW


def render(prompt: UserPrompt, prompt_format: str, tokenizer: Any, where: str, tools: Any = None) -> str:
    """Render a user's prompt as the text that the model gets.

    A text becomes the human's turn, or stays as it is in the format `raw`, and in `hh` if the text is a dialogue.
    `tools` is a list of schemas, or such a list as JSON. Raises InputError, which says `where` the prompt is from.
    """
    schemas = read_tools({"tools": tools}, "tools", where)
    if schemas and prompt_format != CHAT:
        raise InputError(
            f"{where}: only a chat template shows tools to the model: give --format chat, or remove the tools"
        )
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError(f"{where}: the prompt is empty")
        is_dialogue = prompt_format == HH and prompt.startswith(HUMAN)
        if prompt_format == RAW or is_dialogue:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    messages = [read_message(message, where) for message in prompt]
    if not messages:
        raise InputError(f"{where}: the prompt has no messages")
    if prompt_format == RAW:
        raise InputError(f"{where}: the prompt holds chat messages: give --format chat or --format hh")
    if prompt_format == HH:  # up to where the next answer begins
        speakers = {"user": HUMAN, "assistant": ASSISTANT}
        if unknown := sorted({message["role"] for message in messages} - speakers.keys()):
            raise InputError(f"{where}: a dialogue of Human and Assistant has no role {', '.join(unknown)}")
        return "".join(f"{speakers[m['role']]} {m['content'].strip()}" for m in messages) + ASSISTANT
    check_texts(messages, "a message", where)
    messages, schemas = escape_texts(messages, tokenizer), escape_texts(schemas, tokenizer)
    try:
        return render_open(tokenizer, messages, tools=schemas or None, continued=is_prefilled(messages))
    except TemplateRejects as error:
        raise InputError(f"{where}: the tokenizer's chat template rejects these messages: {error}") from error


def apply_template(tokenizer: Any, messages: Messages, **options: Any) -> str:
    """Render messages, with the arguments of calls as the template wants them; raises TemplateRejects.

    Most templates want an object. Others, such as DeepSeek-V3's, append JSON to text; an object raises TypeError.
    """
    try:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TypeError:
            written = copy.deepcopy(messages)
            calls = [call["function"] for message in written for call in message.get("tool_calls", ())]
            if not calls:
                raise
            for function in calls:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            return tokenizer.apply_chat_template(written, tokenize=False, **options)
    except Exception as error:  # a template is a program, which may raise anything
        raise TemplateRejects(one_sentence(error)) from error


def is_prefilled(prompt: Messages) -> bool:
    """Return whether a prompt ends in the beginning of an answer."""
    return prompt[-1]["role"] == "assistant" and not prompt[-1].get("tool_calls")


def render_open(tokenizer: Any, messages: Messages, *, tools: Any = None, continued: bool = False) -> str:
    """Render messages up to where the assistant's answer goes on.

    That is after the generation prompt, or, `continued`, after the content of the last message.
    """
    if not continued:
        return apply_template(tokenizer, messages, tools=tools, add_generation_prompt=True)
    marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + MARK}]
    text, mark, _ = apply_template(tokenizer, marked, tools=tools).partition(MARK)
    if not mark:
        raise TemplateRejects(f"it leaves out the beginning of the answer, {messages[-1]['content'][:80]!r}")
    return text


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts, keys and numbers in a value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from iterate_texts(item)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):  # templates may write True or true
        yield str(value)


def escape_texts(value: Any, tokenizer: Any) -> Any:
    """Copy messages or tools, with control tokens made ordinary text."""
    if isinstance(value, dict):  # a role, or a key that names something, stays
        return {
            key if key.isidentifier() else escape_control(key, tokenizer): (
                item if key in ("role", "type") else escape_texts(item, tokenizer)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [escape_texts(item, tokenizer) for item in value]
    return escape_control(value, tokenizer) if isinstance(value, str) else value


def check_texts(value: Any, what: str, where: str) -> None:
    """Refuse messages or tools with texts that no tokenizer should see."""
    text = "\n".join(iterate_texts(value))
    check_unicode(text, what, where)
    if ESCAPE in text or MARK in text:
        raise InputError(
            f"{where}: {what} has U+FDD0 or U+FDD1, which are no characters and have a use here: remove them"
        )


def as_messages(prompt: Prompt, answer: str) -> Messages:
    """Convert a prompt and an answer to chat messages.

    The prompt becomes the messages from which it was rendered, the turns of a dialogue, or one user turn.
    """
    prompt_format = find_format(prompt.text, rendered=prompt.rendered)
    if prompt_format == HH:
        return split_turns(prompt.text, answer)
    if prompt_format == CHAT and prompt.messages:
        prompt_messages = prompt.messages
    else:
        prompt_messages = [{"role": "user", "content": prompt.text}]
    if is_prefilled(prompt_messages):
        *prompt_messages, begun = prompt_messages
        return [*prompt_messages, {**begun, "content": begun["content"] + answer.rstrip()}]
    return [*prompt_messages, {"role": "assistant", "content": answer.strip()}]


def split_turns(dialogue: str, answer: str) -> Messages:
    """Split a dialogue in HH's format, and its answer, into messages.

    Successive turns of one speaker are joined, because chat templates want speakers to alternate.
    """
    # the split gives "", a speaker, a text, a speaker, a text, ..., "Assistant:", "": the last turn is the answer's
    _, *speakers_and_texts, _ = SPEAKER.split(dialogue)
    speakers = speakers_and_texts[::2]
    texts = [*speakers_and_texts[1::2], answer]
    messages: Messages = []
    for speaker, text in zip(speakers, texts, strict=True):
        role = "user" if speaker == HUMAN else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text.strip()}"
        else:
            messages.append({"role": role, "content": text.strip()})
    return messages
