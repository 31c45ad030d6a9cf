"""Counts of a run's data, taken while its table is written."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NoReturn

import numpy as np

from dpo.data.asking import RAW, find_format
from dpo.data.examples import ExampleId, count_cut, cut_tokens, read_examples, tokenize, truncate_example
from dpo.data.problems import BAD, SHOWN, write_problems
from dpo.data.schema import ASSISTANT
from dpo.data.table import Prompt, PromptTable
from dpo.data.tokenization import TextEncoder, find_control, unescape
from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.numbers import count
from dpo.system.run_directory import PROBLEMS

SAMPLE_SIZE = 4_000  # examples of a split whose tokens are counted
LEAST_WORDS = 6  # shorter first turns, speaker included, are not looked for in the other split
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory of their token ids
SHOWN_ROWS = 3  # numbers of records that the terminal shows
SHOWN_AROUND = 150  # characters that a message shows before and after the EOS in a text
# counts that are printed: the field of SplitReport, and what follows the number, in singular and plural
TEXT_COUNTS = (
    ("empty_responses", "with an empty response", "with an empty response"),
    ("duplicated_pairs", "duplicated pair", "duplicated pairs"),
    ("contradictory_pairs", "contradictory pair", "contradictory pairs"),
    ("prompts_in_train", "prompt that is in train too", "prompts that are in train too"),
    ("first_turns_in_train", "prompt that opens like one of train", "prompts that open like one of train"),
    ("contradictory_labels", "response with both labels", "responses with both labels"),
    ("control_tokens", "control token, which stays one", "control tokens, which stay such"),
    ("too_long", "too long and left out", "too long and left out"),
)
# counts that are warned of from WARNED_FROM of the examples on: the field, what happens, and the keys that change it
WARNED_FROM = 0.01
LENGTH_WARNINGS = (
    ("truncated_prompts", "the prompt is cut", "raise max_length and max_prompt_length, or choose truncation"),
    ("truncated_responses", "a response is cut and loses its end", "raise max_length, or give truncation=drop"),
    ("identical_pairs", "both responses are the same after cutting, which teaches nothing", "raise max_length"),
    (
        "too_long",
        "the example is longer than max_length and is left out",
        "raise max_length, or choose truncation=auto",
    ),
)
TOKEN_COUNTS = (
    ("truncated_prompts", "with a truncated prompt", "with a truncated prompt"),
    ("truncated_responses", "with a truncated response", "with a truncated response"),
    ("identical_pairs", "identical pair", "identical pairs"),
    ("crossed_limits", "with a token across prompt and response", "with a token across prompt and response"),
)


@dataclass(frozen=True)
class SplitReport:
    """Counts over the examples of a split; lengths in tokens.

    Fields for one kind of examples (pairs, labelled examples, ranked lists) are None for other kinds. The fields after
    `tokenized` are over all examples of a small split, and over a random sample of a large split.
    """

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int | None = None  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int | None = None  # pairs that reverse an earlier pair of their prompt
    prompts_in_train: int | None = None  # of the test split: prompts that the training split has too
    first_turns_in_train: int | None = None  # of the test split: prompts whose first turn opens a training prompt
    prompts_like_train: int | None = None  # of the test split: prompts with nearly all words of a training prompt
    answers_in_train: int | None = None  # of the test split: examples with an answer of five or more words of train
    like_train: list[dict[str, str]] = field(default_factory=list)  # the first of both
    desirable: int | None = None  # labelled examples by their label
    undesirable: int | None = None
    fewest_responses: int | None = None  # of a ranked list
    most_responses: int | None = None
    mean_responses: float | None = None
    smallest_weight: float | None = None  # None without weights; so are the next four fields
    largest_weight: float | None = None
    effective_examples: float | None = None  # examples of equal weight whose mean has the same variance
    desirable_weights: float | None = None  # sum of the weights of desirable examples
    undesirable_weights: float | None = None
    smallest_margin: float | None = None  # None without margins
    largest_margin: float | None = None
    contradictory_labels: int | None = None  # responses that have the other label in an earlier example of their prompt
    joined_words: int = 0  # examples whose prompt and response have no space between them
    joined_example: str = ""  # the end of the prompt and the beginning of the response of the first such example
    too_long: int = 0  # examples that truncation=drop has left out
    control_tokens: int = 0  # strings of special tokens in texts that are used as they are
    tokenized: int = 0  # examples that the following fields are over
    crossed_limits: int = 0  # examples of a user with a token across prompt and response, which are tokenized apart
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    identical_pairs: int | None = None  # same tokens on both sides after truncation: no gradient under DPO
    longest: int = 0  # most tokens of a prompt with one response
    mean_prompt_tokens: float = 0.0
    mean_chosen_tokens: float = 0.0
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: see `asking.find_format`
    truncation_digest: str = ""  # of how each prompt is truncated
    # numbers of the records that a count is of, by dataset; in the file that `write` makes, the first ones
    rows: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    bad_records: list[tuple[str, int, str]] = field(default_factory=list)  # left out: dataset, number, reason
    token_digest: str = ""  # SHA-256 of the vocabulary and of the examples' token ids before truncation

    def describe(self, split: str) -> str:
        """Describe the split: its size, the counts above 0, and mean lengths."""
        if not self.examples:  # an online run answers the prompts
            truncated = self._list_counts(TOKEN_COUNTS[:1])
            size = f"{split}: {count(self.prompts, 'prompt')} without responses"
            return f"{size}{truncated}; {self.mean_prompt_tokens:.1f} tokens per prompt"
        text = f"{split}: {count(self.examples, 'example')} of {count(self.prompts, 'prompt')}"
        chosen, rejected, compared = "chosen", "rejected", "pairs"
        if self.desirable is not None:
            chosen, rejected = "desirable", "undesirable"
            text += f", {self.desirable:,} desirable and {self.undesirable:,} undesirable"
        if self.mean_responses is not None:
            compared = "lists"
            text += (
                f", of {self.fewest_responses} to {self.most_responses} responses, {self.mean_responses:.1f} on average"
            )
        if self.largest_weight is not None:
            text += f", weights from {self.smallest_weight:g} to {self.largest_weight:g}"
        if self.largest_margin is not None:
            text += f", margins from {self.smallest_margin:g} to {self.largest_margin:g}"
        text += self._list_counts(TEXT_COUNTS)
        if self.tokenized < self.examples:
            text += f"; in a random sample of {self.tokenized:,}"
        text += self._list_counts(TOKEN_COUNTS)
        text += f"; {self.mean_chosen_tokens:.1f} tokens per {chosen} response"
        if self.mean_rejected_tokens is not None:
            text += f", {self.mean_rejected_tokens:.1f} per {rejected} response"
        if self.mean_rejected_tokens is not None and self.chosen_longer is not None:
            gap = self.mean_chosen_tokens - self.mean_rejected_tokens
            text += f" (gap {gap:+.1f}; chosen longer in {self.chosen_longer:.0%} of {compared})"
        return text

    def warn_about_lengths(self, split: str) -> Iterator[str]:
        """Yield a warning for each thing that happens to many examples."""
        for name, what, fix in LENGTH_WARNINGS:
            of = self.examples + self.too_long if name == "too_long" else self.tokenized
            if (n := getattr(self, name) or 0) and n >= WARNED_FROM * of:
                yield f"warning: in {n:,} of {count(of, 'example')} ({split}) {what}: {fix}"

    def find_leaks(self) -> list[str]:
        """Warn of prompts and answers that are in both splits."""
        found = {
            "prompts have nearly all words of a training prompt": (self.prompts_like_train, self.prompts),
            "examples have an answer of the training split": (self.answers_in_train, self.examples),
        }
        leaks = [
            f"{n:,} of {total:,} held-out {what}"
            for what, (n, total) in found.items()
            if n and n >= WARNED_FROM * total
        ]
        if not leaks:
            return []
        held_out, training = self.like_train[0].values()
        example = f"{held_out!r} is held out, and {training!r} trained on"
        return [
            f"{' and '.join(leaks)}, so held-out results are too good: {example}. Put what belongs together into one "
            f"split: give a test file of its own"
        ]

    def _list_counts(self, fields: Iterable[tuple[str, str, str]]) -> str:
        return "".join(
            f", {count(n, singular, plural)}{self._list_rows(name)}"
            for name, singular, plural in fields
            if (n := getattr(self, name))
        )

    def _list_rows(self, name: str) -> str:
        """List the first records of a count, if it names any."""
        parts = [
            f"{'record' if len(rows) == 1 else 'records'} {', '.join(map(str, rows[:SHOWN_ROWS]))}"
            f"{', ...' if len(rows) > SHOWN_ROWS else ''} of {dataset}"
            for dataset, rows in self.rows.get(name, {}).items()
        ]
        return f" ({'; '.join(parts)})" if parts else ""


@dataclass(frozen=True)
class Preflight:
    """Counts of both splits, and of updates."""

    train: SplitReport
    test: SplitReport
    updates: int
    dropped_examples: int  # in the partial batches at the ends of all epochs
    examples_per_epoch: int  # in an online run every prompt is one example; `epoch` in the file that `write` makes

    def longest(self, max_length: int) -> int:
        """Number of tokens of the longest prompt with one response.

        It is `max_length`, the upper bound, if only a sample of the examples was tokenized.
        """
        splits = (self.train, self.test)
        if any(split.tokenized < split.examples for split in splits):
            return max_length
        return max(split.longest for split in splits)

    def describe(self, batch_size: int) -> str:
        """Describe both splits and the updates, for the terminal."""
        reports = {"train": self.train, "test": self.test}
        lines = [report.describe(split) for split, report in reports.items()]
        joined = {split: report for split, report in reports.items() if report.joined_words}
        if joined:
            counts = " and ".join(
                f"{report.joined_words:,} of {count(report.examples, 'example')} ({split})"
                for split, report in joined.items()
            )
            first_report = next(iter(joined.values()))
            lines.append(
                f"warning: in {counts} a response follows its prompt without a space, as in "
                f"{first_report.joined_example!r}; texts are used verbatim: begin responses with a space, or end "
                f"prompts with one"
            )
        lines += chain.from_iterable(report.warn_about_lengths(split) for split, report in reports.items())
        updates = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        if self.dropped_examples:
            dropped = count(self.dropped_examples, "example in a partial batch is", "examples in partial batches are")
            updates += f"; {dropped} dropped"
        return "\n".join([*lines, updates])

    def write(self, path: Path) -> None:
        """Write the counts, and beside them the records with problems."""
        facts, problems = asdict(self), []
        for split in ("train", "test"):
            for dataset, number, reason in facts[split]["bad_records"]:
                problems.append([split, dataset, number, BAD, reason])
            for name, by_dataset in facts[split]["rows"].items():
                kind = name.replace("_", " ").removesuffix("s")
                problems += [[split, dataset, row, kind, ""] for dataset, rows in by_dataset.items() for row in rows]
                facts[split]["rows"][name] = {dataset: rows[:SHOWN] for dataset, rows in by_dataset.items()}
            facts[split]["bad_records"] = facts[split]["bad_records"][:SHOWN]
        keys = ("split", "dataset", "record", "problem", "reason")
        write_problems(path.with_name(PROBLEMS), (dict(zip(keys, each, strict=True)) for each in problems))
        facts["epoch"] = facts.pop("examples_per_epoch")
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> tuple[int, int]:
    """Count the updates and dropped examples of `iterate_examples`, without iterating.

    `examples` is the number of examples in an epoch. `n_epochs` or `n_examples` is given.
    """
    updates_per_epoch, dropped_per_epoch = divmod(examples, batch_size)
    if updates_per_epoch == 0:
        return 0, examples
    updates = None if n_examples is None else -(-n_examples // batch_size)
    if updates is None or (n_epochs is not None and updates > n_epochs * updates_per_epoch):
        return n_epochs * updates_per_epoch, n_epochs * dropped_per_epoch
    # the epoch that n_examples cuts off drops nothing
    return updates, (updates - 1) // updates_per_epoch * dropped_per_epoch


class SplitCounter:
    """Counts a split: all its texts, then the tokens of a sample.

    With `trains_on="prompts"` prompts without examples count too, as an online run answers them.
    """

    def __init__(self, encode: TextEncoder, *, trains_on: str = "pairs") -> None:
        self.encode, self.trains_on = encode, trains_on
        self.counts: Counter[str] = Counter()  # by field of SplitReport
        if trains_on == "labels":
            self.counts.update(desirable=0, undesirable=0)
        self._numbers = {"weight": array("d"), "margin": array("d")}
        self._weights_by_label = {"desirable": 0.0, "undesirable": 0.0}
        self._n_responses: Counter[int] = Counter()  # of ranked lists
        self.digest = hashlib.sha256()  # of prompts, responses and examples, in order
        self._truncation = hashlib.sha256()
        self._formats: dict[str, str] = {}  # of prompts, by dataset
        self._rows: dict[str, dict[str, list[int]]] = {}
        self.bad_records: list[tuple[str, int, str]] = []
        self._joined_example = ""
        # hashes of pairs or labelled responses, of all datasets, which may have prompts in common
        self._seen: set[int] = set()
        self._texts_with_eos: dict[str, str] = {}  # each with its prompt
        self._late_starts: dict[str, Prompt] = {}  # unscored beginnings of responses, each with a prompt
        # of all prompts and their first turns: a prompt takes 16 bytes
        self._prompt_hashes, self._first_turn_hashes = array("q"), array("q")

    def watch(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Count the texts of prompts, and yield the prompts unchanged.

        Raises InputError after the last prompt if a text contains EOS.
        """
        for prompt in prompts:
            self._record_prompt(prompt)
            examples = [prompt.texts(index) for index in range(len(prompt.examples))]
            for index, texts in enumerate(examples):
                self._count_texts(prompt, index, texts)
                if prompt.weights is not None and self.trains_on == "labels":
                    self._weights_by_label["desirable" if "chosen" in texts else "undesirable"] += prompt.weights[index]
            is_used = examples or self.trains_on == "prompts"
            if is_used and not prompt.rendered:  # in a rendered chat EOS ends turns
                self._find_eos(prompt, examples)
            yield prompt
        if self._texts_with_eos:
            self._refuse_eos()

    def _record_prompt(self, prompt: Prompt) -> None:
        """Record what is counted of a prompt apart from its examples."""
        self.counts["prompts"] += 1
        self._prompt_hashes.append(hash(prompt.text))
        self._first_turn_hashes.append(hash(_find_first_turn(prompt.text)))
        prompt_format = find_format(prompt.text, rendered=prompt.rendered)
        if self._formats.setdefault(prompt.dataset, prompt_format) != prompt_format:
            self._formats[prompt.dataset] = RAW  # the prompts of the dataset have several formats
        self.digest.update(repr((prompt.text, prompt.responses, prompt.examples)).encode())
        if not (prompt.rendered or prompt.apart):
            control = find_control(self.encode.tokenizer)
            self.counts["control_tokens"] += sum(len(control.findall(t)) for t in (prompt.text, *prompt.responses))
        self._truncation.update(repr((prompt.truncation_mode, prompt.apart, prompt.shortened)).encode())
        if prompt.cuts is not None:
            self.digest.update(repr(prompt.cuts).encode())
            for response, cuts in zip(prompt.responses, prompt.cuts, strict=True):
                if cuts and cuts[0] == 0:
                    self._late_starts.setdefault(response[: cuts[1]], prompt)
        for name, values in (("weight", prompt.weights), ("margin", prompt.margins)):
            if values is not None:
                self.digest.update(repr((name, values)).encode())
                self._numbers[name].extend(values)

    def count_in_train(self, train: SplitCounter) -> None:
        """Count the prompts, and first turns, that the training split has too."""
        self.counts["prompts_in_train"] = int(np.isin(self._prompt_hashes, train._prompt_hashes).sum())
        self.counts["first_turns_in_train"] = int(np.isin(self._first_turn_hashes, train._first_turn_hashes).sum())

    def _find_eos(self, prompt: Prompt, examples: Iterable[Mapping[str, str]]) -> None:
        """Collect each text with EOS among a prompt and its responses.

        A prompt that is not tokenized apart may have EOS, as it may be a chat that somebody has rendered.
        """
        eos, eos_id = self.encode.tokenizer.eos_token, self.encode.tokenizer.eos_token_id
        responses = [response for texts in examples for response in texts.values()]
        for text in dict.fromkeys([prompt.text, *responses] if prompt.apart else responses):
            # only a text with EOS in its characters is tokenized, as tokenizing all texts would take long
            if eos in text and eos_id in self.encode([text])[text]:
                self._texts_with_eos.setdefault(text, prompt.text)

    def _refuse_eos(self) -> NoReturn:
        eos = self.encode.tokenizer.eos_token
        text, prompt = next(iter(self._texts_with_eos.items()))
        start = text.index(eos)
        around = text[max(0, start - SHOWN_AROUND) : start + len(eos) + SHOWN_AROUND]
        raise InputError(
            f"{count(len(self._texts_with_eos), 'text contains', 'texts contain')} the EOS token {eos!r}, which "
            f"the model would take for the end of the text: remove it from the data. The first text has it in "
            f"{around!r}; its prompt ends in {prompt[-SHOWN_AROUND:]!r}"
        )

    def count_example(self, name: str, is_so: bool, prompt: Prompt, index: int) -> None:
        """Count an example, and note which record it is of."""
        self.counts[name] += is_so
        if is_so and prompt.rows:
            self._rows.setdefault(name, {}).setdefault(prompt.dataset, []).append(prompt.rows[index])

    def _count_texts(self, prompt: Prompt, index: int, texts: Mapping[str, str]) -> None:
        """Count an example; `texts` has its responses by role."""
        counts, responses = self.counts, list(texts.values())
        counts["examples"] += 1
        self.count_example("empty_responses", not all(map(str.strip, responses)), prompt, index)
        if tuple(texts) == TRAINS_ON["pairs"]:
            pair = hash((prompt.text, *responses))
            reversed_pair = hash((prompt.text, *reversed(responses)))
            self.count_example("duplicated_pairs", pair in self._seen, prompt, index)
            is_reversed = reversed_pair in self._seen and reversed_pair != pair
            self.count_example("contradictory_pairs", is_reversed, prompt, index)
            self._seen.add(pair)
        elif self.trains_on == "labels":
            [(role, response)] = texts.items()
            other_role = "rejected" if role == "chosen" else "chosen"
            counts["desirable" if role == "chosen" else "undesirable"] += 1
            is_contrary = hash((prompt.text, other_role, response)) in self._seen
            self.count_example("contradictory_labels", is_contrary, prompt, index)
            self._seen.add(hash((prompt.text, role, response)))
        if self.trains_on == "lists":
            self._n_responses[len(texts)] += 1
        joined = [text for text in responses if _are_joined(prompt.text, text)]
        adds_spaces = prompt.apart and self._adds_spaces
        if joined and not prompt.rendered and not adds_spaces:  # a chat template may put no space there
            counts["joined_words"] += 1
            self._joined_example = self._joined_example or prompt.text[-40:] + joined[0][:40]

    @cached_property
    def _adds_spaces(self) -> bool:
        """True if the tokenizer begins texts with a space, as Llama 2's."""
        tokens = self.encode.tokenizer.convert_ids_to_tokens(self.encode(["a"])["a"])
        return "".join(tokens).startswith(("\u2581", "\u0120"))  # how SentencePiece and byte-level BPE write a space

    def count_tokens(self, prompts: PromptTable, *, max_length: int, max_prompt_length: int) -> SplitReport:
        """Count tokens, and return the report of the split.

        At most `SAMPLE_SIZE` examples are tokenized here; training tokenizes its examples in the background. Raises
        InputError for a response that truncation could leave without a scored token.
        """
        self._refuse_late_starts(max_length - max_prompt_length)
        tokenizer = self.encode.tokenizer
        # the digest has the vocabulary, as tokenizers may give different tokens one id
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        prompt_lengths: list[int] = []
        longest = 0
        response_lengths: list[dict[str, int]] = []  # scored tokens of each example, by role
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.trains_on == "prompts" else prompts.counts
        sample_ids = _sample_examples(counts)
        for start in range(0, len(sample_ids), TOKENIZED_AT_ONCE):
            examples = read_examples(prompts, sample_ids[start : start + TOKENIZED_AT_ONCE])
            for example, tokens in zip(examples, tokenize(examples, self.encode), strict=True):
                digest.update(repr([tokens.prompt, *(list(chain(*pieces)) for pieces in tokens.responses)]).encode())
                self.counts["crossed_limits"] += tokens.crosses
                prompt_ids, responses, prompt_is_cut, responses_are_cut = truncate_example(
                    example, tokens, tokenizer, max_length=max_length, max_prompt_length=max_prompt_length
                )
                self.count_example("truncated_prompts", prompt_is_cut, example.prompt, example.example_index)
                self.count_example("truncated_responses", responses_are_cut, example.prompt, example.example_index)
                if tuple(example.texts) == TRAINS_ON["pairs"]:
                    is_identical = responses[0] == responses[1]
                    self.count_example("identical_pairs", is_identical, example.prompt, example.example_index)
                prompt_lengths.append(len(prompt_ids))
                longest = max(longest, len(prompt_ids) + max(map(len, responses), default=0))
                cuts = cut_tokens(example.pieces, tokens, responses) or [()] * len(responses)
                n_scored = [len(response) - n for response, n in zip(responses, map(count_cut, cuts), strict=True)]
                response_lengths.append(dict(zip(example.texts, n_scored, strict=True)))
        chosen, rejected = (
            [by_role[role] for by_role in response_lengths if role in by_role] for role in TRAINS_ON["pairs"]
        )
        compared = [by_role for by_role in response_lengths if {"chosen", "rejected"} <= by_role.keys()]
        return SplitReport(
            **self.counts,
            fewest_responses=min(self._n_responses, default=None),
            most_responses=max(self._n_responses, default=None),
            mean_responses=fmean(self._n_responses.elements()) if self._n_responses else None,
            **{f"smallest_{name}": min(values, default=None) for name, values in self._numbers.items()},
            **{f"largest_{name}": max(values, default=None) for name, values in self._numbers.items()},
            **self._sum_weights(),
            joined_example=self._joined_example,
            tokenized=len(prompt_lengths),
            longest=longest,
            mean_prompt_tokens=fmean(prompt_lengths) if prompt_lengths else 0.0,
            mean_chosen_tokens=fmean(chosen) if chosen else 0.0,
            mean_rejected_tokens=fmean(rejected) if rejected else None,
            chosen_longer=fmean(by_role["chosen"] > by_role["rejected"] for by_role in compared) if compared else None,
            prompt_formats=self._formats,
            rows=self._rows,
            bad_records=self.bad_records,
            token_digest=digest.hexdigest(),
            truncation_digest=self._truncation.hexdigest(),
        )

    def _refuse_late_starts(self, fewest_tokens: int) -> None:
        """Refuse responses that truncation could leave without a scored token.

        Such a response would end a run in its middle. Truncation leaves at least a response's first `fewest_tokens`.
        """
        ids = self.encode(self._late_starts)
        for text, prompt in self._late_starts.items():
            if len(ids[text]) >= fewest_tokens:
                raise InputError(
                    f"dataset {prompt.dataset}: a response begins with {count(len(ids[text]), 'token')} that "
                    f"{'is' if len(ids[text]) == 1 else 'are'} not the assistant's, and truncation may leave only "
                    f"{fewest_tokens} (max_length - max_prompt_length): raise max_length, or remove the record whose "
                    f"prompt ends in {unescape(prompt.text[-SHOWN_AROUND:])!r}"
                )

    def _sum_weights(self) -> dict[str, float]:
        weights = np.array(self._numbers["weight"])
        if not len(weights):
            return {}
        relative_weights = weights / weights.max()  # at most 1, so their squares do not overflow
        sums = {"effective_examples": float(relative_weights.sum() ** 2 / (relative_weights**2).sum())}
        if self.trains_on == "labels":
            sums |= {f"{label}_weights": total for label, total in self._weights_by_label.items()}
        return sums


def _find_first_turn(prompt: str) -> str:
    """Find the first turn of a dialogue in HH's format.

    Returns the whole prompt if it is no dialogue, or if its first turn is as short as a greeting that many share.
    """
    first_turn, marker, _ = prompt.partition(ASSISTANT)
    return first_turn + marker if len(first_turn.split()) >= LEAST_WORDS else prompt


def _are_joined(prompt: str, response: str) -> bool:
    """Return whether a response follows its prompt without a space.

    Wide characters, such as Chinese, do not count: their scripts have no spaces.
    """
    neighbours = prompt[-1:], response[:1]
    return all(c and not c.isspace() and unicodedata.east_asian_width(c) not in "WF" for c in neighbours)


def _sample_examples(counts: np.ndarray) -> list[ExampleId]:
    """Ids of all examples, or of a random sample.

    `counts` has the number of examples per prompt. The ids of a sample are in random order.
    """
    numbers: Sequence[int] = range(int(counts.sum()))  # examples counted through all prompts
    if len(numbers) > SAMPLE_SIZE:
        numbers = random.Random(0).sample(numbers, SAMPLE_SIZE)
    example_numbers = np.array(numbers, dtype=np.int64)
    end_numbers = np.cumsum(counts)  # for each prompt, the number after its last example
    prompt_indices = np.searchsorted(end_numbers, example_numbers, side="right")
    first_numbers = (end_numbers - counts)[prompt_indices]
    return list(zip(prompt_indices.tolist(), (example_numbers - first_numbers).tolist(), strict=True))
