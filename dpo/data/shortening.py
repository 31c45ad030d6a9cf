"""Prompts that are too long, before a table is written.

The key `truncation` says what becomes of them. Chats lose their oldest turns: they are rendered again from the system
turn and the newest turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from dpo.data.asking import TemplateRejects, escape_texts, is_prefilled, render_open
from dpo.data.examples import TextExample, list_examples, tokenize
from dpo.data.schema import Messages
from dpo.data.table import ROWS_PER_BATCH, Prompt
from dpo.data.tokenization import TextEncoder, find_control

CountExample = Callable[[str, bool, Prompt, int], None]  # `SplitCounter.count_example`
PREFIX_TOKENS = 16  # a tokenizer may give so many tokens to a text beside one for each byte


class Limits(NamedTuple):
    """How long examples may be, and what is done to longer ones."""

    truncation: str
    max_length: int
    max_prompt_length: int
    new_tokens: int = 0  # that an online run draws


def fit_prompts(
    prompts: Iterable[Prompt], encode: TextEncoder, limits: Limits, count_example: CountExample
) -> Iterator[Prompt]:
    """Yield prompts, each with what its truncation needs.

    Examples that are left out because they are too long are counted.
    """
    remaining = iter(prompts)
    while batch := list(islice(remaining, ROWS_PER_BATCH)):
        if limits.truncation == "drop":
            yield from _drop(batch, encode, limits, count_example)
        elif limits.truncation == "auto":
            yield from _shorten(batch, encode, limits.max_prompt_length)
        else:
            yield from (prompt._replace(truncation_mode=limits.truncation) for prompt in batch)


def _may_exceed(texts: Iterable[str], limit: int, tokenizer: Any) -> bool:
    """Return whether texts may exceed `limit` tokens of a byte or more.

    A control token is one, and may give the text behind it another.
    """
    if not getattr(tokenizer, "split_special_tokens", False):
        texts = [find_control(tokenizer).sub("  ", text) for text in texts]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + PREFIX_TOKENS > limit


def _drop(
    prompts: Sequence[Prompt], encode: TextEncoder, limits: Limits, count_example: CountExample
) -> Iterator[Prompt]:
    """Leave out examples that exceed `max_length`, and prompts that lose all examples."""
    examples = [
        example
        for prompt in prompts
        for example in list_examples(prompt) or [TextExample(prompt, 0, {}, [])]
        if limits.new_tokens or _may_exceed((prompt.text, *example.texts.values()), limits.max_length, encode.tokenizer)
    ]
    too_long = {
        (example.prompt.index_in_split, example.example_index)
        for example, tokens in zip(examples, tokenize(examples, encode), strict=True)
        if len(tokens.prompt) + max([limits.new_tokens, *(sum(map(len, ids)) + 1 for ids in tokens.responses)])
        > limits.max_length
    }
    for prompt in prompts:
        n_examples = max(1, len(prompt.examples))
        kept = [i for i in range(n_examples) if (prompt.index_in_split, i) not in too_long]
        for i in range(n_examples):
            count_example("too_long", i not in kept, prompt, i)
        if len(kept) == n_examples:
            yield prompt
        elif kept:
            by_example = {name: getattr(prompt, name) for name in ("examples", "weights", "margins", "rows")}
            yield prompt._replace(**{name: all_ and [all_[i] for i in kept] for name, all_ in by_example.items()})


def _shorten(prompts: Sequence[Prompt], encode: TextEncoder, limit: int) -> Iterator[Prompt]:
    """Give each chat that exceeds `limit` tokens a shorter text."""
    chats = [p.text for p in prompts if p.messages and not p.apart and _may_exceed([p.text], limit, encode.tokenizer)]
    lengths = dict(zip(chats, _count_tokens(chats, encode), strict=True))
    for prompt in prompts:
        is_long = lengths.get(prompt.text, 0) > limit
        yield prompt._replace(shortened=shorten_chat(prompt, encode, limit)) if is_long else prompt


def shorten_chat(prompt: Prompt, encode: TextEncoder, limit: int) -> str | None:
    """Render the system turn and the newest turns that fit.

    The first of them is the user's. If even the last one does not fit, its content loses its beginning. None if that
    does not help, or if the template rejects it.
    """
    messages, tools = (escape_texts(value, encode.tokenizer) for value in (prompt.messages, prompt.tools))
    system = messages[:1] if messages[0]["role"] in ("system", "developer") else []
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    try:
        render = _find_renderer(prompt, messages, tools, encode.tokenizer)
        if render is None or not starts:
            return None

        def keep(start: int, n_cut: int = 0) -> str:
            first = messages[start]
            return render([*system, {**first, "content": first["content"][n_cut:]}, *messages[start + 1 :]])

        def fits(text: str) -> bool:
            return _count_tokens([text], encode)[0] <= limit

        index = bisect_left(starts, True, key=lambda start: fits(keep(start)))
        if index < len(starts):
            return keep(starts[index])
        size = len(messages[starts[-1]]["content"])
        n_cut = bisect_left(range(size), True, key=lambda n: fits(keep(starts[-1], n)))
        return keep(starts[-1], n_cut) if n_cut < size else None
    except TemplateRejects:
        return None


def _find_renderer(prompt: Prompt, messages: Messages, tools: Any, tokenizer: Any) -> Callable[[Messages], str] | None:
    """Find the function that rendered the prompt's text of these messages."""
    for continued in {False, is_prefilled(messages)}:
        text = render_open(tokenizer, messages, tools=tools or None, continued=continued)
        if text.startswith(prompt.text):
            # a finished turn may lack the end of the generation prompt, and so does the prompt
            n_lacking = len(text) - len(prompt.text)

            def render(chat: Messages, continued: bool = continued, n_lacking: int = n_lacking) -> str:
                open_text = render_open(tokenizer, chat, tools=tools or None, continued=continued)
                return open_text[: len(open_text) - n_lacking]

            return render
    return None


def _count_tokens(texts: Sequence[str], encode: TextEncoder) -> list[int]:
    return [len(tokens.prompt) for tokens in encode.encode_whole([(text, [], []) for text in texts])]
