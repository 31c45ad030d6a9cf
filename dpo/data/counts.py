"""Counts of a run's data, taken while its table is written."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from dpo.data.asking import RAW, find_format
from dpo.data.examples import ExampleId, count_cut, cut_tokens, read_examples, tokenize
from dpo.data.problems import BAD, SHOWN, write_problems
from dpo.data.table import Prompt, PromptTable
from dpo.data.tokenization import TextEncoder, find_control, unescape
from dpo.data.truncation import truncate_example
from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.numbers import count
from dpo.system.run_directory import PROBLEMS

SAMPLE_SIZE = 4_000  # examples whose tokens are counted, of a split with more than COUNTED_WHOLE
COUNTED_WHOLE = 10_000
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory of their token ids
SHOWN_ROWS = 3  # numbers of records that the terminal shows
SHOWN_AROUND = 150  # characters that a message shows before and after the EOS in a text
# what is printed of a count: the field of SplitReport, and what follows the number, in singular and plural
TEXT_COUNTS = (
    ("empty_responses", "with an empty response", "with an empty response"),
    ("duplicated_pairs", "duplicated pair", "duplicated pairs"),
    ("contradictory_pairs", "contradictory pair", "contradictory pairs"),
    ("contradictory_labels", "response with both labels", "responses with both labels"),
    ("control_tokens", "control token, which stays one", "control tokens, which stay such"),
    ("too_long", "too long and left out", "too long and left out"),
)
TOKEN_COUNTS = (
    ("truncated_prompts", "with a truncated prompt", "with a truncated prompt"),
    ("truncated_responses", "with a truncated response", "with a truncated response"),
    ("identical_pairs", "identical pair", "identical pairs"),
    ("crossed_limits", "with a token across prompt and response", "with a token across prompt and response"),
)
# counts that are warned of from WARNED_FROM of the examples on: the field, what happens, and what changes it
WARNED_FROM = 0.01
WARNINGS = (
    ("truncated_prompts", "the prompt is cut", "raise max_length and max_prompt_length, or choose truncation"),
    ("truncated_responses", "a response is cut and loses its end", "raise max_length, or give truncation=drop"),
    ("identical_pairs", "both responses are the same after cutting, which teaches nothing", "raise max_length"),
    (
        "too_long",
        "the example is longer than max_length and is left out",
        "raise max_length, or choose truncation=auto",
    ),
    (
        "joined_words",
        "a response follows its prompt without a space, as in {joined_example!r}",
        "texts are used verbatim, so begin responses with a space, or end prompts with one",
    ),
)


@dataclass(frozen=True)
class SplitReport:
    """Counts over the examples of a split; lengths in tokens.

    The fields after `tokenized` are over all examples of a small split, and over a random sample of a large one.
    """

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int = 0  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int = 0  # pairs that reverse an earlier pair of their prompt
    contradictory_labels: int = 0  # responses that have the other label in an earlier example of their prompt
    joined_words: int = 0  # examples whose prompt and response have no space between them
    joined_example: str = ""  # the end of the prompt and the beginning of the response of the first such example
    too_long: int = 0  # examples that truncation=drop has left out
    control_tokens: int = 0  # strings of special tokens in texts that are used as they are
    prompts_like_train: int | None = None  # of the test split: prompts with nearly all words of a training prompt
    answers_in_train: int | None = None  # of the test split: examples with an answer of five or more words of train
    like_train: list[dict[str, str]] = field(default_factory=list)  # the first of both
    has_numbers: bool = False  # whether the records have weights or margins
    effective_examples: float | None = (
        None  # examples of equal weight whose mean has the same variance; None: no weights
    )
    desirable: int | None = None  # labelled examples by their label; None for other kinds
    undesirable: int | None = None
    desirable_weights: float | None = None  # sum of the weights of desirable examples; None without weights
    undesirable_weights: float | None = None
    tokenized: int = 0  # examples that the following fields are over
    crossed_limits: int = 0  # examples of a user with a token across prompt and response, which are tokenized apart
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    identical_pairs: int = 0  # same tokens on both sides after truncation: no gradient under DPO
    longest: int = 0  # most tokens of a prompt with one response
    mean_chosen_tokens: float = 0.0
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: see `asking.find_format`
    # numbers of the records that a count is of, by dataset; in the file that `write` makes, the first ones
    rows: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    bad_records: list[tuple[str, int, str]] = field(default_factory=list)  # left out: dataset, number, reason
    token_digest: str = ""  # SHA-256 of the vocabulary and of the examples' token ids before truncation

    def describe(self, split: str) -> str:
        """Describe the split: its size, the counts above 0, and mean lengths."""
        if not self.examples:  # an online run answers the prompts
            return f"{split}: {count(self.prompts, 'prompt')} without responses{self._list_counts(TOKEN_COUNTS)}"
        chosen, rejected = "chosen", "rejected"
        text = f"{split}: {count(self.examples, 'example')} of {count(self.prompts, 'prompt')}"
        if self.desirable is not None:
            chosen, rejected = "desirable", "undesirable"
            text += f", {self.desirable:,} desirable and {self.undesirable:,} undesirable"
        text += self._list_counts(TEXT_COUNTS)
        if self.tokenized < self.examples:
            text += f"; in a random sample of {self.tokenized:,}"
        text += f"{self._list_counts(TOKEN_COUNTS)}; {self.mean_chosen_tokens:.1f} tokens per {chosen} response"
        if self.mean_rejected_tokens is not None:
            text += f", {self.mean_rejected_tokens:.1f} per {rejected} response"
        if self.chosen_longer is not None:
            text += f"; chosen is longer in {self.chosen_longer:.0%}"
        return text

    def _list_counts(self, fields: Iterable[tuple[str, str, str]]) -> str:
        """List the counts above 0, each with its first records."""
        text = ""
        for name, singular, plural in fields:
            if n := getattr(self, name):
                text += f", {count(n, singular, plural)}"
                places = [
                    f"{'record' if len(rows) == 1 else 'records'} {', '.join(map(str, rows[:SHOWN_ROWS]))}"
                    f"{', ...' if len(rows) > SHOWN_ROWS else ''} of {dataset}"
                    for dataset, rows in self.rows.get(name, {}).items()
                ]
                text += f" ({'; '.join(places)})" if places else ""
        return text

    def find_warnings(self, split: str) -> Iterator[str]:
        """Yield a warning for each thing that happens to many examples."""
        totals = dict.fromkeys(("truncated_prompts", "truncated_responses", "identical_pairs"), self.tokenized)
        totals |= {"too_long": self.examples + self.too_long, "joined_words": self.examples}
        for name, what, fix in WARNINGS:
            if (n := getattr(self, name)) and n >= WARNED_FROM * totals[name]:
                what = what.format(joined_example=self.joined_example)
                yield f"warning: in {n:,} of {count(totals[name], 'example')} ({split}) {what}: {fix}"

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
        return [
            f"{' and '.join(leaks)}, so held-out results are too good: {held_out!r} is held out, and {training!r} "
            f"trained on. Put what belongs together into one split: give a test file of its own"
        ]


@dataclass(frozen=True)
class Preflight:
    """Counts of both splits, and of updates."""

    train: SplitReport
    test: SplitReport
    updates: int
    dropped_examples: int  # in the partial batches at the ends of all epochs
    examples_per_epoch: int  # in an online run every prompt is one example; `epoch` in the file that `write` makes

    def longest(self, max_length: int) -> int:
        """Most tokens of a prompt with one response, or `max_length` if only a sample was tokenized."""
        splits = (self.train, self.test)
        if any(split.tokenized < split.examples for split in splits):
            return max_length
        return max(split.longest for split in splits)

    def describe(self, batch_size: int) -> str:
        """Describe both splits and the updates, for the terminal."""
        reports = {"train": self.train, "test": self.test}
        lines = [report.describe(split) for split, report in reports.items()]
        lines += chain.from_iterable(report.find_warnings(split) for split, report in reports.items())
        updates = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        if self.dropped_examples:
            dropped = count(self.dropped_examples, "example in a partial batch is", "examples in partial batches are")
            updates += f"; {dropped} dropped"
        return "\n".join([*lines, updates])

    def write(self, path: Path) -> None:
        """Write the counts, and beside them the records with problems."""
        facts, problems = asdict(self), []
        for split in ("train", "test"):
            report = facts[split]
            problems += [[split, dataset, number, BAD, reason] for dataset, number, reason in report["bad_records"]]
            for name, by_dataset in report["rows"].items():
                kind = name.replace("_", " ").removesuffix("s")
                problems += [[split, dataset, row, kind, ""] for dataset, rows in by_dataset.items() for row in rows]
                report["rows"][name] = {dataset: rows[:SHOWN] for dataset, rows in by_dataset.items()}
            report["bad_records"] = report["bad_records"][:SHOWN]
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
    """Counts a split: all its texts, then the tokens of a small split or of a sample.

    With `trains_on="prompts"` prompts without examples count too, as an online run answers them.
    """

    def __init__(self, encode: TextEncoder, *, trains_on: str = "pairs") -> None:
        self.encode, self.trains_on = encode, trains_on
        self.counts: Counter[str] = Counter()  # by field of SplitReport
        if trains_on == "labels":
            self.counts.update(desirable=0, undesirable=0)
        self.bad_records: list[tuple[str, int, str]] = []
        self.digest = hashlib.sha256()  # of all that the examples are made of, in order
        self._weights = array("d")
        self._weights_by_label = {"desirable_weights": 0.0, "undesirable_weights": 0.0}
        self._has_margins = False
        self._formats: dict[str, str] = {}  # of prompts, by dataset
        self._rows: dict[str, dict[str, list[int]]] = {}
        self._joined_example = ""
        # hashes of pairs or labelled responses, of all datasets, which may have prompts in common
        self._seen: set[int] = set()
        self._late_starts: dict[str, Prompt] = {}  # unscored beginnings of responses, each with a prompt

    def watch(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Count the texts of prompts, and yield the prompts unchanged.

        Raises InputError for a text that contains EOS.
        """
        for prompt in prompts:
            self._count_prompt(prompt)
            examples = [prompt.texts(index) for index in range(len(prompt.examples))]
            for index, texts in enumerate(examples):
                self._count_texts(prompt, index, texts)
            if examples or self.trains_on == "prompts":
                self._refuse_eos(prompt, chain.from_iterable(texts.values() for texts in examples))
            yield prompt

    def count_example(self, name: str, is_so: bool, prompt: Prompt, index: int) -> None:
        """Count an example, and note which record it is of."""
        self.counts[name] += is_so
        if is_so and prompt.rows:
            self._rows.setdefault(name, {}).setdefault(prompt.dataset, []).append(prompt.rows[index])

    def _count_prompt(self, prompt: Prompt) -> None:
        self.counts["prompts"] += 1
        content = (prompt.text, prompt.responses, prompt.examples, prompt.cuts, prompt.weights, prompt.margins)
        self.digest.update(repr((content, prompt.truncation_mode, prompt.apart)).encode())
        prompt_format = find_format(prompt.text, rendered=prompt.rendered)
        if self._formats.setdefault(prompt.dataset, prompt_format) != prompt_format:
            self._formats[prompt.dataset] = RAW  # the prompts of the dataset have several formats
        if not (prompt.rendered or prompt.apart):
            control = find_control(self.encode.tokenizer)
            self.counts["control_tokens"] += sum(len(control.findall(t)) for t in (prompt.text, *prompt.responses))
        for response, cuts in zip(prompt.responses, prompt.cuts or (), strict=False):
            if cuts and cuts[0] == 0:
                self._late_starts.setdefault(response[: cuts[1]], prompt)
        self._weights.extend(prompt.weights or ())
        self._has_margins |= prompt.margins is not None

    def _count_texts(self, prompt: Prompt, index: int, texts: Mapping[str, str]) -> None:
        """Count an example; `texts` has its responses by role."""
        responses = list(texts.values())
        self.counts["examples"] += 1
        self.count_example("empty_responses", not all(map(str.strip, responses)), prompt, index)
        if tuple(texts) == TRAINS_ON["pairs"]:
            pair, reverse = (hash((prompt.text, *order)) for order in (responses, responses[::-1]))
            self.count_example("duplicated_pairs", pair in self._seen, prompt, index)
            self.count_example("contradictory_pairs", reverse in self._seen and reverse != pair, prompt, index)
            self._seen.add(pair)
        elif self.trains_on == "labels":
            [(role, response)] = texts.items()
            label, other_role = ("desirable", "rejected") if role == "chosen" else ("undesirable", "chosen")
            self.counts[label] += 1
            is_contrary = hash((prompt.text, other_role, response)) in self._seen
            self.count_example("contradictory_labels", is_contrary, prompt, index)
            self._seen.add(hash((prompt.text, role, response)))
            if prompt.weights is not None:
                self._weights_by_label[f"{label}_weights"] += prompt.weights[index]
        joined = [text for text in responses if _are_joined(prompt.text, text)]
        if joined and not prompt.rendered:  # a chat template may put no space there
            self.counts["joined_words"] += 1
            self._joined_example = self._joined_example or prompt.text[-40:] + joined[0][:40]

    def _refuse_eos(self, prompt: Prompt, responses: Iterable[str]) -> None:
        """Refuse a text with EOS, unless a chat template has put it there.

        A prompt that is not tokenized apart may have EOS, as it may be a chat that somebody has rendered.
        """
        eos, eos_id = self.encode.tokenizer.eos_token, self.encode.tokenizer.eos_token_id
        for text in () if prompt.rendered else (*([prompt.text] if prompt.apart else ()), *responses):
            # only a text with EOS in its characters is tokenized, as tokenizing all texts would take long
            if eos in text and eos_id in self.encode([text])[text]:
                start = text.index(eos)
                around = text[max(0, start - SHOWN_AROUND) : start + len(eos) + SHOWN_AROUND]
                raise InputError(
                    f"dataset {prompt.dataset}: a text contains the EOS token {eos!r}, which the model would take for "
                    f"the end of the text: remove it from {around!r}; the prompt ends in "
                    f"{prompt.text[-SHOWN_AROUND:]!r}"
                )

    def count_tokens(self, prompts: PromptTable, *, max_length: int, max_prompt_length: int) -> SplitReport:
        """Count tokens, and return the report of the split.

        Raises InputError for a response that truncation could leave without a scored token.
        """
        self._refuse_late_starts(max_length - max_prompt_length)
        tokenizer = self.encode.tokenizer
        # the digest has the vocabulary, as tokenizers may give different tokens one id
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        longest, longer = 0, []
        lengths: dict[str, list[int]] = {role: [] for role in TRAINS_ON["pairs"]}  # scored tokens of responses
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.trains_on == "prompts" else prompts.counts
        sample_ids = _sample_examples(counts)
        for start in range(0, len(sample_ids), TOKENIZED_AT_ONCE):
            examples = read_examples(prompts, sample_ids[start : start + TOKENIZED_AT_ONCE])
            for example, tokens in zip(examples, tokenize(examples, self.encode), strict=True):
                digest.update(repr([tokens.prompt, *(list(chain(*pieces)) for pieces in tokens.responses)]).encode())
                self.counts["crossed_limits"] += tokens.crosses
                prompt_ids, responses, prompt_is_cut, responses_are_cut = truncate_example(
                    example.prompt,
                    example.pieces,
                    tokens,
                    self.encode,
                    max_length=max_length,
                    max_prompt_length=max_prompt_length,
                )
                found = {"truncated_prompts": prompt_is_cut, "truncated_responses": responses_are_cut}
                if tuple(example.texts) == TRAINS_ON["pairs"]:
                    found["identical_pairs"] = responses[0] == responses[1]
                for name, is_so in found.items():
                    self.count_example(name, is_so, example.prompt, example.example_index)
                longest = max(longest, len(prompt_ids) + max(map(len, responses), default=0))
                cuts = cut_tokens(example.pieces, tokens, responses) or [()] * len(responses)
                n_scored = [len(response) - n for response, n in zip(responses, map(count_cut, cuts), strict=True)]
                by_role = dict(zip(example.texts, n_scored, strict=True))
                for role in lengths.keys() & by_role.keys():
                    lengths[role].append(by_role[role])
                if lengths.keys() <= by_role.keys():
                    longer.append(by_role["chosen"] > by_role["rejected"])
        chosen, rejected = lengths.values()
        return SplitReport(
            **self.counts,
            **self._sum_weights(),
            has_numbers=bool(self._weights) or self._has_margins,
            joined_example=self._joined_example,
            tokenized=len(sample_ids),
            longest=longest,
            mean_chosen_tokens=fmean(chosen) if chosen else 0.0,
            mean_rejected_tokens=fmean(rejected) if rejected else None,
            chosen_longer=fmean(longer) if longer else None,
            prompt_formats=self._formats,
            rows=self._rows,
            bad_records=self.bad_records,
            token_digest=digest.hexdigest(),
        )

    def _refuse_late_starts(self, fewest_tokens: int) -> None:
        """Refuse responses that truncation could leave without a scored token.

        Such a response would end a run in its middle. Truncation leaves at least a response's first `fewest_tokens`.
        """
        ids = self.encode(self._late_starts)
        for text, prompt in self._late_starts.items():
            if (n_tokens := len(ids[text])) >= fewest_tokens:
                raise InputError(
                    f"dataset {prompt.dataset}: a response begins with {count(n_tokens, 'token')} that are not the "
                    f"assistant's, and truncation may leave only {fewest_tokens} (max_length - max_prompt_length): "
                    f"raise max_length, or remove the record whose prompt ends in "
                    f"{unescape(prompt.text[-SHOWN_AROUND:])!r}"
                )

    def _sum_weights(self) -> dict[str, float]:
        weights = np.array(self._weights)
        if not len(weights):
            return {}
        relative_weights = weights / weights.max()  # at most 1, so their squares do not overflow
        sums = {"effective_examples": float(relative_weights.sum() ** 2 / (relative_weights**2).sum())}
        return sums | (self._weights_by_label if self.trains_on == "labels" else {})


def _are_joined(prompt: str, response: str) -> bool:
    """Return whether a response follows its prompt without a space.

    Wide characters, such as Chinese, do not count: their scripts have no spaces.
    """
    neighbours = prompt[-1:], response[:1]
    return all(c and not c.isspace() and unicodedata.east_asian_width(c) not in "WF" for c in neighbours)


def _sample_examples(counts: np.ndarray) -> list[ExampleId]:
    """Ids of all examples, or of a random sample; `counts` has the number of examples per prompt."""
    numbers = np.arange(counts.sum())  # examples counted through all prompts
    if len(numbers) > COUNTED_WHOLE:
        numbers = np.sort(random.Random(0).sample(range(len(numbers)), SAMPLE_SIZE))
    first_numbers = np.cumsum(counts) - counts
    prompt_indices = np.searchsorted(first_numbers + counts, numbers, side="right")
    return list(zip(prompt_indices.tolist(), (numbers - first_numbers[prompt_indices]).tolist(), strict=True))
