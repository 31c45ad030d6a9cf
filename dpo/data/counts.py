"""Counts of a run's data, taken while its table is written."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from dpo.data.asking import RAW, find_format
from dpo.data.examples import ExampleId, encode_examples, read_examples
from dpo.data.table import Prompt, PromptTable
from dpo.data.tokenization import TextEncoder, find_control, refuse_eos
from dpo.losses import TRAINS_ON
from dpo.numbers import count

SAMPLE_SIZE = 4_000  # examples whose tokens are counted, of a split with more than COUNTED_WHOLE
COUNTED_WHOLE = 10_000
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory of their token ids
WARNED_FROM = 0.01  # share of the examples
CONTRARY = {"chosen": "rejected", "rejected": "chosen"}
# counts that the terminal shows, the last ones of the examples that are tokenized
TOKEN_COUNTS = ("truncated_prompts", "truncated_responses", "identical_pairs", "tokens_across_limits")
COUNTS = (
    *("desirable", "undesirable", "empty_responses", "duplicated_pairs", "contradictory_pairs"),
    *("contradictory_labels", "control_tokens", "too_long", *TOKEN_COUNTS),
)
WARNINGS = {  # of these counts: what happens, and what changes it
    "truncated_prompts": "the prompt is cut: raise max_length and max_prompt_length, or choose truncation",
    "truncated_responses": "a response is cut and loses its end: raise max_length, or give truncation=drop",
    "identical_pairs": "both responses are the same after cutting, which teaches nothing: raise max_length",
    "too_long": "the example is longer than max_length and is left out: raise max_length, or give truncation=auto",
}


@dataclass
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
    too_long: int = 0  # examples that truncation=drop has left out
    control_tokens: int = 0  # strings of special tokens in texts that are used as they are
    prompts_like_train: int | None = None  # of the test split: prompts with nearly all words of a training prompt
    answers_in_train: int | None = None  # of the test split: examples with an answer of five or more words of train
    like_train: list[dict[str, str]] = field(default_factory=list)  # the first of both
    effective_examples: float | None = None  # so many of equal weight have means as exact; None: no weights
    desirable: int = 0  # labelled examples by their label
    undesirable: int = 0
    tokenized: int = 0  # examples that the following fields are over
    tokens_across_limits: int = 0  # examples of a user with a token across prompt and response, which are cut first
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    identical_pairs: int = 0  # same tokens on both sides after truncation: no gradient under DPO
    longest: int = 0  # most tokens of a prompt with one response
    mean_chosen_tokens: float | None = None
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: see `asking.find_format`
    problems: list[tuple[str, int, str, str]] = field(default_factory=list)  # dataset, record, problem and reason
    digest: str = ""  # of all that the examples are made of, in order
    token_digest: str = ""  # of the vocabulary and of the examples' token ids

    def count(self, name: str, prompt: Prompt, index: int) -> None:
        """Count an example, and note which record it is of."""
        setattr(self, name, getattr(self, name) + 1)
        if prompt.rows:
            self.problems.append((prompt.dataset, prompt.rows[index], name.replace("_", " ").removesuffix("s"), ""))

    def describe(self, split: str) -> Iterator[str]:
        """Yield the split's size and the counts above 0 in a line, then a warning for each that many examples have."""
        prompts = count(self.prompts, "prompt")
        what = f"{count(self.examples, 'example')} of {prompts}" if self.examples else f"{prompts} without responses"
        parts = [f"{split}: {what}"]
        parts += [f"{name.replace('_', ' ')}: {n:,}" for name in COUNTS if (n := getattr(self, name))]
        if self.tokenized < self.examples:
            parts.append(f"what is of tokens is of a random sample of {self.tokenized:,}")
        if self.chosen_longer is not None:
            parts.append(f"chosen is longer in {self.chosen_longer:.0%}")
        yield "; ".join(parts)
        for name, warning in WARNINGS.items():
            n, total = getattr(self, name), self.tokenized if name in TOKEN_COUNTS else self.examples
            total += n if name == "too_long" else 0
            if n and n >= WARNED_FROM * total:
                yield f"warning: in {n:,} of {count(total, 'example')} ({split}) {warning}"

    def find_leaks(self) -> Iterator[str]:
        """Yield a warning of prompts and answers that are in both splits."""
        found = (
            (self.prompts_like_train, self.prompts, "prompts have nearly all words of a training prompt"),
            (self.answers_in_train, self.examples, "examples have an answer of the training split"),
        )
        leaks = [f"{n:,} of {total:,} held-out {what}" for n, total, what in found if n and n >= WARNED_FROM * total]
        if leaks:
            held_out, training = self.like_train[0].values()
            yield (
                f"{' and '.join(leaks)}, so held-out results are too good: {held_out!r} is held out, and {training!r} "
                f"trained on. Put what belongs together into one split: give a test file of its own"
            )


class SplitCounter:
    """Counts a split: all its texts, then the tokens of a small split or of a sample.

    With `trains_on="prompts"` prompts without examples count too, as an online run answers them.
    """

    def __init__(
        self, encode: TextEncoder, *, max_length: int, max_prompt_length: int, trains_on: str = "pairs"
    ) -> None:
        self.encode, self.trains_on = encode, trains_on
        self.limits = {"max_length": max_length, "max_prompt_length": max_prompt_length}
        self.report = SplitReport()
        self._weights = array("d")
        self._seen: set[int] = set()  # hashes of examples of all datasets, which may have prompts in common
        self._late: set[ExampleId] = set()  # examples that truncation might leave without a scored token

    def watch(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Count the texts of prompts, and yield the prompts unchanged.

        Raises InputError for a text that contains EOS.
        """
        report, tokenizer = self.report, self.encode.tokenizer
        for prompt in prompts:
            if not prompt.rendered and (prompt.examples or self.trains_on == "prompts"):
                # a prompt that is one text with its response may be a chat that the user has rendered
                used = {prompt.responses[i] for example in prompt.examples for i in example.values()}
                where = f"dataset {prompt.dataset}, prompt {prompt.text[-80:]!r}"
                refuse_eos([*used, *[prompt.text] * prompt.apart], tokenizer, where)
            if not (prompt.rendered or prompt.apart):
                texts = (prompt.text, *prompt.responses)
                report.control_tokens += sum(len(find_control(tokenizer).findall(text)) for text in texts)
            report.prompts += 1
            prompt_format = find_format(prompt.text, rendered=prompt.rendered)
            if report.prompt_formats.setdefault(prompt.dataset, prompt_format) != prompt_format:
                report.prompt_formats[prompt.dataset] = RAW  # the prompts of the dataset have several formats
            self._weights.extend(prompt.weights or ())
            for index, example in enumerate(prompt.examples):
                self._count_example(prompt, index)
                if prompt.cuts and any(prompt.cuts[i][:1] == [0] for i in example.values()):
                    self._late.add((prompt.index_in_split, index))
            yield prompt

    def _count_example(self, prompt: Prompt, index: int) -> None:
        report, texts = self.report, prompt.texts(index)
        report.examples += 1
        if self.trains_on == "labels":
            report.desirable += "chosen" in texts
            report.undesirable += "rejected" in texts
        if not all(map(str.strip, texts.values())):
            report.count("empty_responses", prompt, index)
        if texts.keys() <= CONTRARY.keys():  # no ranked list
            contrary_texts = {CONTRARY[role]: text for role, text in texts.items()}
            own, contrary = (hash((prompt.text, *sorted(each.items()))) for each in (texts, contrary_texts))
            if own in self._seen and len(texts) == 2:
                report.count("duplicated_pairs", prompt, index)
            if contrary in self._seen and contrary != own:
                report.count("contradictory_pairs" if len(texts) == 2 else "contradictory_labels", prompt, index)
            self._seen.add(own)

    def count_tokens(self, prompts: PromptTable) -> SplitReport:
        """Count tokens, and return the report of the split.

        Raises InputError for a response that truncation leaves without a scored token.
        """
        report, tokenizer = self.report, self.encode.tokenizer
        # the digest has the vocabulary, as tokenizers may give different tokens one id
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        lengths: dict[str, list[int]] = {"chosen": [], "rejected": []}  # scored tokens of responses
        longer = []
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.trains_on == "prompts" else prompts.counts
        numbers = np.arange(counts.sum())  # examples counted through all prompts
        if len(numbers) > COUNTED_WHOLE:
            numbers = np.sort(random.Random(0).sample(range(len(numbers)), SAMPLE_SIZE))
        firsts = np.cumsum(counts) - counts
        indices = np.searchsorted(firsts + counts, numbers, side="right")
        sampled = zip(indices.tolist(), (numbers - firsts[indices]).tolist(), strict=True)
        sample_ids = sorted({*sampled, *self._late})
        for start in range(0, len(sample_ids), TOKENIZED_AT_ONCE):
            texts = read_examples(prompts, sample_ids[start : start + TOKENIZED_AT_ONCE])
            encoded = encode_examples(texts, self.encode, **self.limits)
            for (prompt, index), example in zip(texts, encoded, strict=True):
                digest.update(repr((example.prompt, example.responses)).encode())
                report.tokens_across_limits += example.crosses
                if example.prompt_is_cut:
                    report.count("truncated_prompts", prompt, index)
                if example.response_is_cut:
                    report.count("truncated_responses", prompt, index)
                if example.roles == TRAINS_ON["pairs"] and example.responses[0] == example.responses[1]:
                    report.count("identical_pairs", prompt, index)
                longest = len(example.prompt) + max(map(len, example.responses), default=0)
                report.longest = max(report.longest, longest)
                n_scored = dict(zip(example.roles, example.n_scored, strict=True))
                for role in lengths.keys() & n_scored.keys():
                    lengths[role].append(n_scored[role])
                if lengths.keys() <= n_scored.keys():
                    longer.append(n_scored["chosen"] > n_scored["rejected"])
        report.tokenized, report.token_digest = len(sample_ids), digest.hexdigest()
        report.mean_chosen_tokens, report.mean_rejected_tokens, report.chosen_longer = (
            fmean(values) if values else None for values in (*lengths.values(), longer)
        )
        if self._weights:
            weights = np.array(self._weights) / max(self._weights)  # at most 1, so their squares do not overflow
            report.effective_examples = float(weights.sum() ** 2 / (weights**2).sum())
        return report
