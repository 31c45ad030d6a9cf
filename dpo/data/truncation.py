"""Examples that are too long: what is cut, by the key `truncation`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from dpo.data.asking import TemplateRejects, escape_texts, is_prefilled, render_open
from dpo.data.table import Prompt
from dpo.data.tokenization import TextEncoder


def truncate_example(
    prompt: Prompt,
    prompt_ids: list[int],
    responses: Sequence[list[int]],
    encode: TextEncoder,
    *,
    max_length: int,
    max_prompt_length: int,
) -> tuple[list[int], list[list[int]]]:
    """Truncate the token ids of a prompt and its responses.

    Responses have EOS, which counts. If the prompt with the longest response has more than `max_length` tokens, the
    prompt is cut to `max_prompt_length`; its truncation mode says what is kept. If that is not enough, every response
    is cut to the room that the prompt leaves. By the reference code's rule, for texts that are tokenized apart, that is
    `max_length - max_prompt_length` tokens, even if a short prompt leaves room for more.
    """
    longest, mode = max(map(len, responses)), prompt.truncation_mode
    if len(prompt_ids) + longest > max_length:
        if mode == "keep_turns" and len(prompt_ids) > max_prompt_length:
            prompt_ids = shorten_chat(prompt, encode, max_prompt_length) or prompt_ids
        prompt_ids = prompt_ids[:max_prompt_length] if mode == "keep_start" else prompt_ids[-max_prompt_length:]
    if len(prompt_ids) + longest > max_length:
        room = max_length - (max_prompt_length if prompt.apart else len(prompt_ids))
        responses = [response[:room] for response in responses]
    return prompt_ids, list(responses)


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
    try:
        for continued in {False, is_prefilled(messages)}:
            whole = render_open(encode.tokenizer, messages, tools=tools or None, continued=continued)
            if whole.startswith(
                prompt.text
            ):  # so the prompt was rendered; it lacks what finished turns lack at its end
                break
        else:
            return None

        def keep(start: int, n_cut: int = 0) -> list[int]:
            first = {**messages[start], "content": messages[start]["content"][n_cut:]}
            chat = [*system, first, *messages[start + 1 :]]
            text = render_open(encode.tokenizer, chat, tools=tools or None, continued=continued)
            return encode.encode_whole([(text[: len(text) - len(whole) + len(prompt.text)], [])])[0].prompt

        index = bisect_left(users, True, key=lambda start: len(keep(start)) <= limit)
        if index < len(users):
            return keep(users[index])
        size = len(messages[users[-1]]["content"])
        n_cut = bisect_left(range(size), True, key=lambda n: len(keep(users[-1], n)) <= limit)
        return keep(users[-1], n_cut) if n_cut < size else None
    except TemplateRejects:
        return None
