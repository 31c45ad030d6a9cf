"""Counts of a run's data, taken while it is written, and described."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from statistics import fmean

import numpy as np

from dpo.data.asking import RAW, find_format
from dpo.data.examples import read_examples
from dpo.data.table import Prompt, PromptTable
from dpo.data.tokenization import TextEncoder, append_eos, truncate
from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.numbers import count

SAMPLE_SIZE = 10_000  # examples of a split whose tokens are counted
TOKENIZED_AT_ONCE = 1000
SHOWN_AROUND = 150  # characters of a refused text before and after its EOS
TEXT_COUNTS = (  # field, and its words after a count: singular, plural
    ("empty_responses", "with an empty response", "with an empty response"),
    ("duplicated_pairs", "duplicated pair", "duplicated pairs"),
    ("contradictory_pairs", "contradictory pair", "contradictory pairs"),
)
TOKEN_COUNTS = (
    ("truncated_prompts", "with a truncated prompt", "with a truncated prompt"),
    ("truncated_responses", "with a truncated response", "with a truncated response"),
    ("identical_pairs", "identical pair", "identical pairs"),
)


@dataclass(frozen=True)
class SplitReport:
    """Counts over the examples of a split; lengths in tokens.

    SFT targets have no counts of pairs. Counts that need token ids are over all examples, or over a random sample of a
    large split.
    """

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int | None = None  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int | None = None  # pairs that reverse an earlier pair of their prompt
    joined_words: int = 0  # examples with a response not separated by a space from the prompt's last word
    joined_example: str = ""  # the text around that place, in the first of these
    tokenized: int = 0  # number of examples in the following counts
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    identical_pairs: int | None = None  # same tokens on both sides after truncation: no gradient under DPO
    longest: int = 0  # prompt and response of one example
    mean_prompt_tokens: float = 0.0
    mean_chosen_tokens: float = 0.0
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: see `asking.find_format`
    token_digest: str = ""  # SHA-256 of the vocabulary and of these examples' token ids before truncation

    def describe(self, split: str) -> str:
        """The size of the split, then the counts that are not 0."""
        text = f"{split}: {count(self.examples, 'example')} of {count(self.prompts, 'prompt')}"
        text += self._list_counts(TEXT_COUNTS)
        if self.tokenized < self.examples:
            text += f"; in a random sample of {self.tokenized:,}"
        text += self._list_counts(TOKEN_COUNTS)
        text += f"; {self.mean_chosen_tokens:.1f} tokens per chosen response"
        if self.mean_rejected_tokens is not None:
            text += f", {self.mean_rejected_tokens:.1f} per rejected"
        if self.mean_rejected_tokens is not None and self.chosen_longer is not None:
            gap = self.mean_chosen_tokens - self.mean_rejected_tokens
            text += f" (gap {gap:+.1f}; chosen longer in {self.chosen_longer:.0%} of pairs)"
        return text

    def _list_counts(self, fields: Iterable[tuple[str, str, str]]) -> str:
        return "".join(f", {count(n, *words)}" for name, *words in fields if (n := getattr(self, name)))


@dataclass(frozen=True)
class Preflight:
    """Counts of both splits, and of updates."""

    train: SplitReport
    test: SplitReport
    updates: int
    dropped_examples: int  # of last partial batches, over all epochs
    examples_per_epoch: int  # those of `train`; online, its prompts, as each gets one pair. `epoch` in the file

    def longest(self, max_length: int) -> int:
        """Tokens of the longest prompt with one response.

        It is `max_length` if not all were tokenized.
        """
        splits = (self.train, self.test)
        return max(s.longest for s in splits) if all(s.tokenized == s.examples for s in splits) else max_length

    def describe(self, batch_size: int) -> str:
        """Text to print before a run starts."""
        splits = ("train", self.train), ("test", self.test)
        lines = [report.describe(split) for split, report in splits]
        joined = [(split, report) for split, report in splits if report.joined_words]
        if joined:
            counted = (
                f"{report.joined_words:,} of {count(report.examples, 'example')} ({split})" for split, report in joined
            )
            _, first_report = joined[0]
            lines.append(
                f"warning: in {' and '.join(counted)} a response follows its prompt without a space, as in "
                f"{first_report.joined_example!r}; texts are used verbatim: begin responses with a space, or end "
                f"prompts with one"
            )
        updates = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        if self.dropped_examples:
            dropped = count(self.dropped_examples, "example in a partial batch is", "examples in partial batches are")
            updates += f"; {dropped} dropped"
        return "\n".join([*lines, updates])

    def write(self, path: Path) -> None:
        facts = asdict(self)
        facts["epoch"] = facts.pop("examples_per_epoch")
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> tuple[int, int]:
    """Compute (updates, dropped examples) of `iterate_examples`, without iterating."""
    per_epoch, remainder = divmod(examples, batch_size)
    if per_epoch == 0:
        return 0, examples
    if n_examples is not None:
        whole_epochs = max(0, ceil((n_examples - per_epoch * batch_size) / examples))  # before the one that is cut off
        if n_epochs is None or whole_epochs < n_epochs:
            # the batch that reaches n_examples is the last one; at least one always runs
            updates_in_last = max(1, ceil((n_examples - whole_epochs * examples) / batch_size))
            return whole_epochs * per_epoch + updates_in_last, whole_epochs * remainder
    return n_epochs * per_epoch, n_epochs * remainder


class SplitCounter:
    """Counts a split: all its texts, then the tokens of a sample."""

    def __init__(self, encode: TextEncoder) -> None:
        self.encode = encode
        self.counts: Counter[str] = Counter()  # fields of the report
        self.digest = hashlib.sha256()  # of prompts, responses and examples, in order
        self._formats: dict[str, str] = {}
        self._joined_example = ""
        self._seen: set[int] = set()  # a hash of every pair, also of other datasets, which may have the same prompts
        self._with_eos: dict[str, str] = {}  # texts with EOS, and their prompts

    def watch(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts, counted.

        Raises InputError at their end if a text contains EOS.
        """
        eos, eos_id = self.encode.tokenizer.eos_token, self.encode.tokenizer.eos_token_id
        for prompt in prompts:
            form = find_format(prompt.text, rendered=prompt.rendered)
            if self._formats.setdefault(prompt.dataset, form) != form:
                self._formats[prompt.dataset] = RAW
            self.digest.update(repr((prompt.text, prompt.responses, prompt.examples)).encode())
            self.counts["prompts"] += 1
            examples = [prompt.texts(index) for index in range(len(prompt.examples))]
            for texts in examples:
                self._count_texts(prompt, texts)
            if not prompt.rendered:  # in a rendered chat EOS ends turns
                used = dict.fromkeys(text for texts in examples for text in (prompt.text, *texts.values()))
                with_eos = (text for text in used if eos in text and eos_id in self.encode([text])[text])
                self._with_eos |= dict.fromkeys(with_eos, prompt.text)
            yield prompt
        if self._with_eos:
            text, prompt_text = next(iter(self._with_eos.items()))
            start = text.index(eos)
            around = text[max(0, start - SHOWN_AROUND) : start + len(eos) + SHOWN_AROUND]
            raise InputError(
                f"{count(len(self._with_eos), 'text contains', 'texts contain')} the EOS token {eos!r}, where the "
                f"model would take the text to end: remove it from the data. The first text has it in {around!r}; "
                f"its prompt ends in {prompt_text[-SHOWN_AROUND:]!r}"
            )

    def _count_texts(self, prompt: Prompt, texts: Mapping[str, str]) -> None:
        counts, responses = self.counts, list(texts.values())
        counts["examples"] += 1
        counts["empty_responses"] += not all(map(str.strip, responses))
        if tuple(texts) == TRAINS_ON["pairs"]:
            pair, reverse = (hash((prompt.text, *order)) for order in (responses, responses[::-1]))
            counts["duplicated_pairs"] += pair in self._seen
            counts["contradictory_pairs"] += reverse in self._seen and reverse != pair
            self._seen.add(pair)
        joined = [text for text in responses if _are_joined(prompt.text, text)]
        if joined and not prompt.rendered:  # a template may join what it likes
            counts["joined_words"] += 1
            self._joined_example = self._joined_example or prompt.text[-40:] + joined[0][:40]

    def count_tokens(self, prompts: PromptTable, *, max_length: int, max_prompt_length: int) -> SplitReport:
        """The report, with the tokens of at most `SAMPLE_SIZE` examples.

        The other texts are tokenized in the background during training.
        """
        tokenizer, counts = self.encode.tokenizer, self.counts
        # the vocabulary tells tokenizers with other ids apart, whatever their files
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest, lengths = hashlib.sha256(repr(vocabulary).encode()), []
        sampled = _sample_examples(prompts.counts)
        for start in range(0, len(sampled), TOKENIZED_AT_ONCE):
            sample = read_examples(prompts, sampled[start : start + TOKENIZED_AT_ONCE])
            ids = self.encode(text for example in sample for text in (example.prompt.text, *example.texts.values()))
            for prompt, _, texts in sample:
                digest.update(repr([ids[text] for text in (prompt.text, *texts.values())]).encode())
                whole = append_eos(prompt.text, list(texts.values()), ids, tokenizer, rendered=prompt.rendered)
                whole_prompt, whole_responses = whole
                prompt_ids, responses = truncate(*whole, prompt.truncation_mode, max_length, max_prompt_length)
                counts["truncated_prompts"] += len(prompt_ids) < len(whole_prompt)
                counts["truncated_responses"] += responses != whole_responses
                if tuple(texts) == TRAINS_ON["pairs"]:
                    counts["identical_pairs"] += responses[0] == responses[1]
                lengths.append((len(prompt_ids), dict(zip(texts, map(len, responses), strict=True))))
        chosen, rejected = ([n[role] for _, n in lengths if role in n] for role in TRAINS_ON["pairs"])
        pairs = [n for _, n in lengths if tuple(n) == TRAINS_ON["pairs"]]
        return SplitReport(
            **counts,
            joined_example=self._joined_example,
            tokenized=len(lengths),
            longest=max((n_prompt + max(n.values()) for n_prompt, n in lengths), default=0),
            mean_prompt_tokens=fmean(n_prompt for n_prompt, _ in lengths) if lengths else 0.0,
            mean_chosen_tokens=fmean(chosen) if chosen else 0.0,
            mean_rejected_tokens=fmean(rejected) if rejected else None,
            chosen_longer=fmean(n["chosen"] > n["rejected"] for n in pairs) if pairs else None,
            prompt_formats=self._formats,
            token_digest=digest.hexdigest(),
        )


def _are_joined(prompt: str, response: str) -> bool:
    """Return whether words run together; scripts without spaces do not count."""
    neighbours = prompt[-1:], response[:1]
    return all(c and not c.isspace() and unicodedata.east_asian_width(c) not in "WF" for c in neighbours)


def _sample_examples(counts: np.ndarray) -> list[tuple[int, int]]:
    """Ids of all examples, or of a random sample, in no order.

    An id is (index of the prompt, index of the example in its prompt); `counts` has the number of examples per prompt.
    """
    ends = np.cumsum(counts)
    drawn: Sequence[int] = range(int(counts.sum()))
    if len(drawn) > SAMPLE_SIZE:
        drawn = random.Random(0).sample(drawn, SAMPLE_SIZE)
    examples = np.array(drawn, dtype=np.int64)
    prompts = np.searchsorted(ends, examples, side="right")  # the prompt of each example
    first_examples = (ends - counts)[prompts]
    return list(zip(prompts.tolist(), (examples - first_examples).tolist(), strict=True))
