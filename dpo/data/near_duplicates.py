"""Prompts and answers that both splits have.

Training prompts are read past an index of the held-out prompts' rarest words: time is linear, memory that of the
held-out texts.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import log
from typing import Any

from dpo.data.table import PromptTable
from dpo.data.tokenization import find_control

FEWEST_WORDS = 5  # a shorter answer, such as "Yes.", is the same by chance
FEWEST_COMPARED = 3  # words of a prompt without those that most prompts have
SHARED = 0.75  # of the words of two prompts
MOST_COMPARED = 300  # last words of a prompt
KEYS = 6  # rarest words of a held-out prompt
FEWEST_HITS = 2  # of these words in a training prompt that is compared
MOST_OF_KEY = 20  # held-out prompts that are looked up by one word
SAMPLED = 10_000  # training prompts in which words are counted
NAMED, SHOWN = 3, 100  # examples, and characters of each

# a character of Chinese or Japanese is a word
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
ASCII = {code: " " for code in range(128) if not WORD.match(chr(code))}


def find_words(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    if text.isascii():  # the same, in a tenth of the time
        return text.translate(ASCII).lower().split()
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def find_near_duplicates(train: PromptTable, test: PromptTable, tokenizer: Any) -> dict[str, Any]:
    control = find_control(tokenizer)
    sample = train[:: 1 + len(train) // SAMPLED]
    n_having = Counter(word for prompt in sample for word in {*find_words(prompt.written)[-MOST_COMPARED:]})
    # what most prompts have, as a system prompt's words, says nothing
    common = {word for word, n in n_having.items() if n > max(len(sample) / 2, 5)}

    def weigh_by_rarity(words: Iterable[str]) -> float:
        return sum(log((len(sample) + 1) / (n_having[word] + 0.5)) for word in words)

    def show(text: str) -> str:
        return " ".join(control.sub(" ", text).split())

    def make_keys(responses: Iterable[str]) -> list[int | None]:
        """Hash each answer's words; None for few words."""
        words = [find_words(control.sub(" ", response)) for response in responses]
        return [hash(" ".join(each)) if len(each) >= FEWEST_WORDS else None for each in words]

    def find_own(words: Sequence[str]) -> frozenset[str]:
        """Find the words that few prompts have; none if too few."""
        own = frozenset(words[-MOST_COMPARED:]) - common
        return own if len(own) >= FEWEST_COMPARED else frozenset()

    by_words = defaultdict(list)  # numbers of held-out prompts
    by_rare = defaultdict(list)  # the same, by their rarest words
    word_sets, answer_keys = [], []
    for number, prompt in enumerate(test):
        words = [*map(sys.intern, find_words(prompt.written))]  # each word is in memory once
        if words:
            by_words[hash(" ".join(words))].append(number)
        word_sets.append(find_own(words))
        for word in sorted(word_sets[-1], key=lambda word: (n_having[word], word))[:KEYS]:
            if len(by_rare[word]) < MOST_OF_KEY:
                by_rare[word].append(number)
        answer_keys.append(make_keys(prompt.responses))
    wanted = {key for of_prompt in answer_keys for key in of_prompt} - {None}
    prompts, answers = {}, {}  # what training has: its text by the number of the prompt, by the hash of the answer
    for prompt in train:
        words = find_words(prompt.written)
        found = by_words.pop(hash(" ".join(words)), [])
        own = find_own(words)
        hits = Counter(number for word in own & by_rare.keys() for number in by_rare[word])
        for number, n in hits.items():
            other = word_sets[number]
            if n >= FEWEST_HITS and number not in prompts and 2 * len(own & other) >= max(len(own), len(other)):
                shared = own & other
                # where each has words of its own, as "France" and "Spain", rare words count for more
                weigh = len if shared in (own, other) else weigh_by_rarity
                if weigh(shared) >= SHARED * weigh(own | other):
                    found.append(number)
        for number in found:
            prompts.setdefault(number, prompt.written[-2 * SHOWN :])  # with control tokens
        for key, response in zip(make_keys(prompt.responses), prompt.responses, strict=True):
            if key in wanted:
                answers.setdefault(key, response[:SHOWN])
    named, n_answers = [], 0
    for number, (prompt, keys) in enumerate(zip(test, answer_keys, strict=True)):
        same = [example for example in prompt.examples if any(keys[i] in answers for i in example.values())]
        n_answers += len(same)
        if number in prompts:
            named.append({"held_out": show(prompt.written)[-SHOWN:], "training": show(prompts[number])[-SHOWN:]})
        if same:
            key = next(keys[i] for i in same[0].values() if keys[i] in answers)
            named.append(dict.fromkeys(("held_out", "training"), show(answers[key])))
    return {"prompts_like_train": len(prompts), "answers_in_train": n_answers, "like_train": named[:NAMED]}
