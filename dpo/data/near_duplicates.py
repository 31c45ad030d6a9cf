"""Prompts and answers that both splits have, but for case, punctuation and white space.

Held-out texts are kept as digests, with which training's texts are compared one by one. So the time is linear, and
memory holds little more than the digests.
"""

import re
import unicodedata
from typing import Any

from dpo.data.schema import Prompt
from dpo.data.table import PromptTable
from dpo.data.tokenization import compile_control
from dpo.redaction import redact

FEWEST_WORDS = {"prompt": 1, "answer": 5}  # a shorter answer, such as "Yes.", is the same by chance
NAMED, SHOWN = 3, 100  # examples, and characters of each
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff]")  # characters of Chinese or Japanese


class _Marks(dict[int, str]):
    """What a character becomes, by its code: nothing else of a text is compared than its words and symbols."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        mark = character
        if category == "Cf":  # such as a space of no width
            mark = ""
        elif category[0] in "PZC":  # punctuation, spaces and control characters
            mark = " "
        elif category[0] == "S" or CJK.match(character):  # a symbol, as + and an emoji are, is a word by itself
            mark = f" {character} "
        self[code] = mark
        return mark


MARKS = _Marks()


def find_words(text: str) -> list[str]:
    """List a text's words and symbols in lower case, without punctuation."""
    return unicodedata.normalize("NFKC", text).casefold().translate(MARKS).split()


def find_near_duplicates(train: PromptTable, test: PromptTable, tokenizer: Any) -> dict:
    """Count the test split's prompts that training has too, and its examples with an answer that training has too.

    Returns these fields of `SplitReport`: the counts, and the first texts.
    """
    control = compile_control(tokenizer)

    def make_digest(text: str, kind: str) -> int | None:
        """Digest the words of a prompt or answer; None for a text that is too short to compare."""
        words = find_words(control.sub(" ", text))
        return hash((kind, *words)) if len(words) >= FEWEST_WORDS[kind] else None

    def make_digests(prompt: Prompt) -> list[int | None]:
        answers = [make_digest(text, "answer") for text in prompt.responses]
        return [make_digest(prompt.written, "prompt"), *answers]

    wanted = {digest for prompt in test for digest in make_digests(prompt)}
    wanted.discard(None)
    found: dict[int | None, str] = {}  # training's text for a digest
    for prompt in train:
        for digest, text in zip(make_digests(prompt), (prompt.written, *prompt.responses), strict=True):
            if digest in wanted:
                found.setdefault(digest, text)

    n_prompts = 0
    n_answers = 0
    shared = []  # the test split's text, and training's
    for prompt in test:
        asked, *answers = make_digests(prompt)
        if asked in found:
            n_prompts += 1
            shared.append((prompt.written, found[asked]))
        for example in prompt.examples:
            same = [i for i in example.values() if answers[i] in found]
            if same:
                n_answers += 1
                shared.append((prompt.responses[same[0]], found[answers[same[0]]]))

    def show(text: str) -> str:
        return redact(" ".join(control.sub(" ", text).split()))[-SHOWN:]

    like_train = [{"held_out": show(text), "training": show(other)} for text, other in shared[:NAMED]]
    return {"prompts_like_train": n_prompts, "answers_in_train": n_answers, "like_train": like_train}
