"""Prompts and answers that both splits have, but for case, punctuation and white space.

Training prompts are read once past digests of the held-out texts: time is linear, memory that of the digests.
"""

import re
import unicodedata
from typing import Any

from dpo.data.schema import Prompt
from dpo.data.table import PromptTable
from dpo.data.tokenization import find_control
from dpo.redaction import redact

FEWEST_WORDS = 5  # a shorter answer, such as "Yes.", is the same by chance
NAMED, SHOWN = 3, 100  # examples, and characters of each
# a character of Chinese or Japanese is a word
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
ASCII = {code: " " for code in range(128) if not chr(code).isalnum()}


def find_words(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    if text.isascii():  # the same, in a tenth of the time
        return text.translate(ASCII).lower().split()
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def find_near_duplicates(train: PromptTable, test: PromptTable, tokenizer: Any) -> dict:
    control = find_control(tokenizer)

    def show(text: str) -> str:
        return redact(" ".join(control.sub(" ", text).split()))[-SHOWN:]

    def hash_words(text: str, fewest: int = 1) -> int | None:
        words = find_words(control.sub(" ", text))
        return hash(" ".join(words)) if len(words) >= fewest else None

    def hash_texts(prompt: Prompt) -> tuple[int | None, list[int | None]]:
        return hash_words(prompt.written), [hash_words(text, FEWEST_WORDS) for text in prompt.responses]

    held_out = list(map(hash_texts, test))
    wanted = {key for prompt, answers in held_out for key in (prompt, *answers)} - {None}
    prompts: dict[int | None, str] = {}  # training's text for a digest
    answers: dict[int | None, str] = {}
    for prompt in train:
        prompt_key, keys = hash_texts(prompt)
        if prompt_key in wanted:
            prompts.setdefault(prompt_key, prompt.written)
        for key, text in zip(keys, prompt.responses, strict=True):
            if key in wanted:
                answers.setdefault(key, text)

    named, n_prompts, n_answers = [], 0, 0
    for prompt, (prompt_key, keys) in zip(test, held_out, strict=True):
        if prompt_key in prompts:
            n_prompts += 1
            named.append((prompt.written, prompts[prompt_key]))
        same = [example for example in prompt.examples if any(keys[i] in answers for i in example.values())]
        n_answers += len(same)
        if same:
            [text, *_] = (answers[keys[i]] for i in same[0].values() if keys[i] in answers)
            named.append((text, text))
    like_train = [{"held_out": show(text), "training": show(other)} for text, other in named[:NAMED]]
    return {"prompts_like_train": n_prompts, "answers_in_train": n_answers, "like_train": like_train}
