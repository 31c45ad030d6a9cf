"""Near-duplicates: prompts and answers that both splits have.

The held-out prompts are indexed by their rarest words, and the training prompts read past them once, so that time is
linear and memory that of the held-out texts.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import log
from typing import Any

from dpo.data.table import PromptTable
from dpo.data.tokenization import find_control, unescape

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


class WordWeights(dict[str, float]):
    """How much each word says about a prompt: more if few prompts have it, nothing if most have."""

    def __init__(self, prompts: Iterable[list[str]]) -> None:
        counts: Counter[str] = Counter()
        n_prompts = 0
        for n_prompts, words in enumerate(prompts, start=1):  # noqa: B007
            counts.update({*words[-MOST_COMPARED:]})
        for word, n in counts.items():  # a system prompt and the words of a task are in most prompts
            self[word] = 0 if n > max(n_prompts / 2, 5) else log((n_prompts + 1) / (n + 0.5))
        self._unseen = log((n_prompts + 1) / 0.5)

    def __missing__(self, word: str) -> float:
        return self._unseen

    def find_own(self, words: Sequence[str]) -> frozenset[str]:
        """Find the words that few prompts have; none if too few."""
        own = frozenset(word for word in {*words[-MOST_COMPARED:]} if self[word])
        return own if len(own) >= FEWEST_COMPARED else frozenset()

    def are_alike(self, one: AbstractSet[str], other: AbstractSet[str]) -> bool:
        """Return whether two prompts share nearly all words.

        Where each has words of its own, as "France" and "Spain", rare words count for more.
        """
        if 2 * len(one & other) < max(len(one), len(other)):  # most pairs that are compared
            return False
        shared, all_words = one & other, one | other
        if one <= other or other <= one:
            return len(shared) >= SHARED * len(all_words)
        return sum(map(self.__getitem__, shared)) >= SHARED * sum(map(self.__getitem__, all_words))


def find_near_duplicates(train: PromptTable, test: PromptTable, tokenizer: Any) -> dict[str, Any]:
    """Count and name held-out prompts and answers that training has too."""
    control = find_control(tokenizer)

    def make_keys(responses: Iterable[str]) -> list[int | None]:
        """Hash each answer's words; None for few words."""
        words = [find_words(control.sub(" ", unescape(response))) for response in responses]
        return [hash(" ".join(each)) if len(each) >= FEWEST_WORDS else None for each in words]

    weights = WordWeights(find_words(prompt.written) for prompt in train[:: 1 + len(train) // SAMPLED])
    by_words: dict[int, list[int]] = defaultdict(list)  # numbers of held-out prompts
    by_rare: dict[str, list[int]] = defaultdict(list)  # the same, by their rarest words
    word_sets, answer_keys = [], []
    for number, prompt in enumerate(test):
        words = [*map(sys.intern, find_words(prompt.written))]  # each word is in memory once
        if words:
            by_words[hash(" ".join(words))].append(number)
        word_sets.append(weights.find_own(words))
        for word in sorted(word_sets[-1], key=lambda word: (-weights[word], word))[:KEYS]:
            if len(by_rare[word]) < MOST_OF_KEY:
                by_rare[word].append(number)
        answer_keys.append(make_keys(prompt.responses))
    wanted = {key for of_prompt in answer_keys for key in of_prompt} - {None}
    prompts, answers = {}, {}  # what training has: its text by the number of the prompt, by the hash of the answer
    for prompt in train:
        text, responses = prompt.written, prompt.responses
        words = find_words(text)
        found = by_words.pop(hash(" ".join(words)), [])
        own = weights.find_own(words)
        hits = Counter(number for word in own & by_rare.keys() for number in by_rare[word])
        candidates = (number for number, n in hits.items() if n >= FEWEST_HITS and number not in prompts)
        found += [number for number in candidates if weights.are_alike(own, word_sets[number])]
        prompts |= dict.fromkeys(found, text[-2 * SHOWN :])  # with control tokens
        for key, response in zip(make_keys(responses), responses, strict=True):
            if key in wanted:
                answers.setdefault(key, response[:SHOWN])
    named, n_answers = [], 0
    for number, of_prompt in enumerate(answer_keys):
        prompt = test[number]
        examples = [[of_prompt[i] for i in example.values()] for example in prompt.examples]
        n_answers += sum(not answers.keys().isdisjoint(example) for example in examples)
        if number in prompts:
            ends = {"held_out": prompt.written, "training": prompts[number]}
            named.append({which: _show(control.sub(" ", text)[-SHOWN:]) for which, text in ends.items()})
        same = next((answers[key] for example in examples for key in example if key in answers), None)
        if same is not None:
            named.append(dict.fromkeys(("held_out", "training"), _show(control.sub("", unescape(same)))))
    return {"prompts_like_train": len(prompts), "answers_in_train": n_answers, "like_train": named[:NAMED]}


def _show(text: str) -> str:
    return " ".join(unescape(text).split())
