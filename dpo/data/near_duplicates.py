"""Prompts and answers that both splits have, but for case, punctuation and white space.

Training prompts are read once past digests of the held-out texts: time is linear, memory that of the digests.
"""

import re
import unicodedata
from typing import Any

from dpo.data.table import Prompt, PromptTable
from dpo.data.tokenization import find_control

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
        return " ".join(control.sub(" ", text).split())

    def hash_prompt(prompt: Prompt) -> int | None:
        words = find_words(prompt.written)
        return hash(" ".join(words)) if words else None

    def hash_answer(text: str) -> int | None:
        """Hash an answer's words; None for few words."""
        words = find_words(control.sub(" ", text))
        return hash(" ".join(words)) if len(words) >= FEWEST_WORDS else None

    held_out = [(hash_prompt(prompt), [hash_answer(text) for text in prompt.responses]) for prompt in test]
    wanted_prompts = {key for key, _ in held_out} - {None}
    wanted_answers = {key for _, keys in held_out for key in keys} - {None}
    prompts: dict[int, str] = {}  # training's text for a digest
    answers: dict[int, str] = {}
    for prompt in train:
        key = hash_prompt(prompt)
        if key in wanted_prompts:
            prompts.setdefault(key, prompt.written)
        for text in prompt.responses:
            key = hash_answer(text)
            if key in wanted_answers:
                answers.setdefault(key, text[:SHOWN])

    named, n_prompts, n_answers = [], 0, 0
    for prompt, (prompt_key, keys) in zip(test, held_out, strict=True):
        if prompt_key in prompts:
            n_prompts += 1
            named.append({"held_out": show(prompt.written)[-SHOWN:], "training": show(prompts[prompt_key])[-SHOWN:]})
        same = [example for example in prompt.examples if any(keys[i] in answers for i in example.values())]
        n_answers += len(same)
        if same:
            key = next(keys[i] for i in same[0].values() if keys[i] in answers)
            named.append(dict.fromkeys(("held_out", "training"), show(answers[key])))
    return {"prompts_like_train": n_prompts, "answers_in_train": n_answers, "like_train": named[:NAMED]}
