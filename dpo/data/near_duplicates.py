"""Digests of prompts and answers that are equal for texts which differ in case, punctuation and white space only."""

import re
import unicodedata
from typing import Any

from dpo.data.schema import Prompt
from dpo.data.tokenization import compile_control

FEWEST_WORDS = 5  # a shorter answer, such as "Yes.", is the same by chance
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff]")  # characters of Chinese or Japanese, which have no space between words


class _Marks(dict[int, str]):
    """What `str.translate` writes for a character, by its code."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)[0]
        mark = character
        if category in "PZC":  # punctuation, spaces and control characters
            mark = " "
        elif category == "S" or CJK.match(character):  # a symbol, such as + or an emoji, is a word by itself
            mark = f" {character} "
        self[code] = mark
        return mark


MARKS = _Marks()


def make_digests(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Digest the words of a prompt and of each of its responses; 0 stands for a text that is too short to compare."""
    control = compile_control(tokenizer)
    digests = []
    for fewest, text in [(1, prompt.written), *((FEWEST_WORDS, response) for response in prompt.responses)]:
        plain = unicodedata.normalize("NFKC", control.sub(" ", text)).casefold()
        words = plain.translate(MARKS).split()
        # a prompt and an answer of the same words are different
        digests.append(hash((fewest, *words)) if len(words) >= fewest else 0)
    return digests
