"""Digests of prompts and answers that are equal for texts which differ in case, punctuation and white space only."""

import re
import unicodedata
from typing import Any

from dpo.data.schema import Prompt
from dpo.data.tokenization import compile_special_tokens

FEWEST_WORDS = 5  # two shorter answers, such as "Yes.", may be equal by chance
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff]")  # characters of Chinese or Japanese, which have no space between words


class _Replacements(dict[int, str]):
    """A table for `str.translate`: the replacement of each character, by its code, found at its first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)[0]
        replacement = character
        if category in "PZC":  # punctuation, spaces and control characters
            replacement = " "
        elif category == "S" or CJK.match(character):  # a symbol, such as + or an emoji, is a word by itself
            replacement = f" {character} "
        self[code] = replacement
        return replacement


REPLACEMENTS = _Replacements()


def make_digests(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Digest the words of a prompt and of each of its responses; 0 stands for a text that is too short to compare.

    Digests can only be compared within a process, as Python hashes texts differently in each.
    """
    control = compile_special_tokens(tokenizer)
    digests = []
    for fewest, text in [(1, prompt.written), *((FEWEST_WORDS, response) for response in prompt.responses)]:
        plain = unicodedata.normalize("NFKC", control.sub(" ", text)).casefold()
        words = plain.translate(REPLACEMENTS).split()
        # with `fewest`, a prompt and an answer of the same words have different digests
        digests.append(hash((fewest, *words)) if len(words) >= fewest else 0)
    return digests
