"""Examples that are too long: what is cut, by the key `truncation`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from dpo.data.asking import TemplateRejects, escape_texts, is_prefilled, render_open
from dpo.data.schema import Messages, TruncationMode
from dpo.data.table import Prompt
from dpo.data.tokenization import TextEncoder, Tokens, append_eos


class Truncated(NamedTuple):
    """Token ids after truncation; uncut responses end with EOS."""

    prompt: list[int]
    responses: list[list[int]]
    prompt_is_cut: bool
    responses_are_cut: bool


def truncate_example(
    prompt: Prompt,
    pieces: Sequence[Sequence[str]],
    tokens: Tokens,
    encode: TextEncoder,
    *,
    max_length: int,
    max_prompt_length: int,
    new_tokens: int | None = None,
) -> Truncated:
    """Append EOS to an example's responses, and truncate them together with the prompt.

    `pieces` are the texts of the responses, and `tokens` the ids of all texts. With `new_tokens`, an answer of so many
    tokens takes the place of the responses. Raises InputError for a text that contains EOS.
    """
    whole, responses = append_eos(
        prompt.text, pieces, tokens, encode.tokenizer, rendered=prompt.rendered, apart=prompt.apart
    )
    if new_tokens is not None:
        responses = [[0] * new_tokens]  # only its length matters
    prompt_ids, limits = whole, (max_length, max_prompt_length)
    exceeds = len(whole) + max(map(len, responses), default=0) > max_length
    if exceeds and prompt.truncation_mode == "keep_turns" and len(whole) > max_prompt_length:
        prompt_ids = shorten_chat(prompt, encode, max_prompt_length) or whole
    prompt_ids, cut = truncate(prompt_ids, responses, prompt.truncation_mode, *limits, as_reference=prompt.apart)
    return Truncated(prompt_ids, cut, prompt_ids != whole, cut != responses)


def truncate(
    prompt: list[int],
    responses: Sequence[list[int]],
    mode: TruncationMode,
    max_length: int,
    max_prompt_length: int,
    *,
    as_reference: bool = True,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses.

    Responses have EOS, which counts. If the prompt with the longest response has more than `max_length` tokens, the
    prompt is cut to `max_prompt_length`; `mode` says whether its start or its end is kept. If that is not enough, every
    response is cut to the room that the prompt leaves. By the reference code's rule that is
    `max_length - max_prompt_length` tokens, even if a short prompt leaves room for more.
    """
    longest = max(map(len, responses), default=0)
    if len(prompt) + longest > max_length:
        prompt = prompt[:max_prompt_length] if mode == "keep_start" else prompt[-max_prompt_length:]
    if len(prompt) + longest > max_length:
        room = max_length - (max_prompt_length if as_reference else len(prompt))
        responses = [response[:room] for response in responses]
    return prompt, list(responses)


def shorten_chat(prompt: Prompt, encode: TextEncoder, limit: int) -> list[int] | None:
    """Render the system turn and the newest turns that fit into `limit` tokens.

    The first of them is the user's. If even the last one does not fit, its content loses its beginning. None if that
    does not help, or if the template rejects it.
    """
    messages, tools = (escape_texts(value, encode.tokenizer) for value in (prompt.messages, prompt.tools))
    system = messages[:1] if messages[0]["role"] in ("system", "developer") else []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return None

    def render(chat: Messages, continued: bool) -> str:
        return render_open(encode.tokenizer, chat, tools=tools or None, continued=continued)

    def keep(start: int, n_cut: int = 0) -> list[int]:
        first = {**messages[start], "content": messages[start]["content"][n_cut:]}
        text = render([*system, first, *messages[start + 1 :]], continued)
        return encode.encode_whole([(text[: len(text) - n_lacking], [], [])])[0].prompt

    try:
        whole = {continued: render(messages, continued) for continued in {False, is_prefilled(messages)}}
        # the one that the prompt was rendered by; the prompt lacks the end of it that finished turns lack
        continued = next(continued for continued, text in whole.items() if text.startswith(prompt.text))
        n_lacking = len(whole[continued]) - len(prompt.text)
        index = bisect_left(users, True, key=lambda start: len(keep(start)) <= limit)
        if index < len(users):
            return keep(users[index])
        size = len(messages[users[-1]]["content"])
        n_cut = bisect_left(range(size), True, key=lambda n: len(keep(users[-1], n)) <= limit)
        return keep(users[-1], n_cut) if n_cut < size else None
    except (TemplateRejects, StopIteration):
        return None
