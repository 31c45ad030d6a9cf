"""Counts the texts and tokens of a split, and writes the sentences that a run prints about them."""

import hashlib
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

import numpy as np

from dpo.data.custom import DataOptions
from dpo.data.examples import Example, TextExample, encode_examples
from dpo.data.prompt_forms import CHAT, HH, RAW, is_dialogue
from dpo.data.schema import WARNING_SHARE, Prompt, naming_place
from dpo.data.table import PromptTable
from dpo.data.tokenization import TextEncoder, refuse_eos
from dpo.errors import WarningLine
from dpo.numbers import compact, count

SAMPLE_SIZE = 1_000  # examples whose tokens are counted, of a split with more than COUNTED_WHOLE
COUNTED_WHOLE = 10_000  # most examples of a split whose tokens are all counted
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory that their token ids take
SHORTEST_ANSWER = 20  # characters that count; two shorter answers, such as "Yes.", may be equal by chance
NOT_COUNTED = re.compile(r"[\s!-#%-*,-/:;?@\[-\]_{}¡§«¶·»¿‐-‧‹›、-。〈-】।؟،]+")  # white space and punctuation
JOINED = re.compile(r"[\w.?!:;,)]\w", re.ASCII)  # two characters; scripts without spaces are not ASCII
WARNINGS = {  # for each count, what it means and how to change it
    "empty_responses": "a response is empty: remove the record, unless you mean it",
    "joined_texts": "no space is between prompt and response: begin the response with one",
    "contradictory_examples": "another example of the prompt says the opposite: remove one of them",
    "truncated_prompts": "the prompt is cut: raise max_length and max_prompt_length, or set truncation",
    "truncated_responses": "a response is cut and loses its end: raise max_length, or set truncation=drop",
    "identical_pairs": "both responses are the same, as written or rendered: remove the pair, or use another template",
    "pairs_cut_alike": "both responses are the same after cutting: raise max_length",
    "too_long": "the example is too long and left out: raise max_length, or set truncation=auto",
}
COUNTED_IN_SAMPLE = ("truncated_prompts", "truncated_responses", "pairs_cut_alike")  # others are over all examples


@dataclass
class SplitReport:
    """Counts over a split, lengths in tokens. Of a large split, `tokenized` to `chosen_longer` are over a sample."""

    prompts: int = 0
    examples: int = 0
    desirable: int = 0  # labelled examples by their label
    undesirable: int = 0
    effective_examples: float | None = None  # effective sample size, (sum w)^2 / sum w^2; None without weights
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    joined_texts: int = 0  # examples with no space between the last word of the prompt and a response
    duplicated_pairs: int = 0  # pairs that repeat an earlier pair of their prompt
    contradictory_examples: int = 0  # pairs that reverse an earlier one, responses that had the other label before
    identical_pairs: int = 0  # same texts on both sides: no gradient under DPO
    too_long: int = 0  # examples that truncation=drop has left out
    prompts_like_train: int = 0  # prompts of the test split that training has too
    answers_in_train: int = 0  # examples of the test split with an answer that training has too
    tokenized: int = 0  # number of examples in the sample, or of all
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    pairs_cut_alike: int = 0  # same tokens on both sides, of different texts
    longest: int = 0  # most tokens of a prompt with one response
    mean_chosen_tokens: float | None = None
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: one of `PROMPT_FORMS`
    digest: str = ""  # identifies the split's prompts, in their order
    token_digest: str = ""  # identifies the vocabulary and the examples' token ids

    def describe(self, split: str) -> Iterator[str]:
        """Yield a line of all numbers but 0, then a warning for each count of at least WARNING_SHARE of its total."""
        numbers = [f"{name} {compact(n)}" for name, n in vars(self).items() if isinstance(n, (int, float)) and n]
        yield f"{split}: {', '.join(numbers)}".replace("_", " ")
        for name, warning in WARNINGS.items():
            n = getattr(self, name)
            total = self.tokenized if name in COUNTED_IN_SAMPLE else self.examples + self.too_long
            if n and n >= WARNING_SHARE * total:
                yield WarningLine(f"in {n:,} of {count(total, 'example')} ({split}) {warning}")


def encode_in_batches(
    examples: Iterable[TextExample], encode: TextEncoder, **limits: int
) -> Iterator[tuple[TextExample, Example]]:
    """Tokenize examples, and yield each with its texts; few of them are in memory at once."""
    remaining = iter(examples)
    while batch := list(islice(remaining, TOKENIZED_AT_ONCE)):
        yield from zip(batch, encode_examples(batch, encode, **limits), strict=True)


class SplitCounter:
    """Counts all texts of a split, then the tokens of a small split or of a sample.

    The test split's counter gets the `digests` of the counter that has counted the train split, as `training`.
    """

    def __init__(self, encode: TextEncoder, options: DataOptions, training: Set[int] | None = None):
        self.encode = encode
        self.options = options
        self.limits = {"max_length": options.max_length, "max_prompt_length": options.max_prompt_length}
        self.report = SplitReport()
        self.problems: list[dict] = []  # what is wrong with which record
        self.digests: set[int] = set()  # these stand for prompts and answers
        self._training = training
        self._weights: list[float] = []
        self._seen: set[int] = set()  # hashes of examples of all datasets, which may have prompts in common

    def count(self, name: str, prompt: Prompt, index: int) -> None:
        """Count the prompt's example `index` in a field of the report, and add the example's row to `problems`."""
        setattr(self.report, name, getattr(self.report, name) + 1)
        if prompt.rows:  # the field "truncated_prompts" gives the problem "truncated prompt"
            self.add_problem(prompt.dataset, prompt.rows[index], re.sub(r"s\b", "", name.replace("_", " ")))

    def add_problem(self, dataset: str, record: int, problem: str, reason: str = "") -> None:
        self.problems.append({"dataset": dataset, "record": record, "problem": problem, "reason": reason})

    def count_texts(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts as they are, and count each.

        Raises InputError for a text that contains EOS, and for a response that is left without a scored token.
        """
        report = self.report
        for prompt in prompts:
            with naming_place(f"dataset {prompt.dataset}"):
                refuse_eos(prompt, self.encode.tokenizer)
            report.prompts += 1
            prompt_format = RAW
            if prompt.rendered:
                prompt_format = CHAT
            elif is_dialogue(prompt.text):
                prompt_format = HH
            if report.prompt_formats.setdefault(prompt.dataset, prompt_format) != prompt_format:
                report.prompt_formats[prompt.dataset] = RAW  # the prompts of the dataset have several formats
            self._compare_with_training(prompt)
            self._weights += prompt.weights or ()
            for index in range(len(prompt.examples)):
                self._count_example(prompt, index)
            yield prompt

    def _compare_with_training(self, prompt: Prompt) -> None:
        """Count what a test prompt has in common with the train split; of a training prompt, keep the digests."""
        in_prompt = digest_alike(prompt.written, 1)
        in_responses = [digest_alike(response, SHORTEST_ANSWER) for response in prompt.responses]
        if self._training is None:
            self.digests.update((in_prompt, *in_responses))
            self.digests.discard(0)
            return
        if in_prompt in self._training:
            self.count("prompts_like_train", prompt, 0)
        for index, example in enumerate(prompt.examples):
            if any(in_responses[i] in self._training for i in example.values()):
                self.count("answers_in_train", prompt, index)

    def _count_example(self, prompt: Prompt, index: int) -> None:
        report = self.report
        texts = prompt.texts(index)
        report.examples += 1
        if self.options.trains_on == "labels":
            report.desirable += "chosen" in texts
            report.undesirable += "rejected" in texts
        if not all(text.strip() for text in texts.values()):
            self.count("empty_responses", prompt, index)
        if not prompt.rendered and any(JOINED.match(prompt.text[-1:] + text[:1]) for text in texts.values()):
            self.count("joined_texts", prompt, index)
        # if a response begins with a part that is not scored, truncation might leave no scored token
        if prompt.cuts and any(prompt.cuts[i][:1] == [0] for i in prompt.roles(index).values()):
            encode_examples([(prompt, index)], self.encode, **self.limits)  # only for the error that it raises
        if len(texts) > 2:  # a ranked list
            return
        chosen, rejected = texts.get("chosen"), texts.get("rejected")
        own = hash((prompt.text, chosen, rejected))
        if chosen == rejected:
            self.count("identical_pairs", prompt, index)
        elif hash((prompt.text, rejected, chosen)) in self._seen:
            self.count("contradictory_examples", prompt, index)
        if len(texts) == 2 and own in self._seen:
            self.count("duplicated_pairs", prompt, index)
        self._seen.add(own)

    def count_tokens(self, prompts: PromptTable) -> None:
        """Count tokens of all examples or of a sample."""
        report = self.report
        tokenizer = self.encode.tokenizer
        # the digest has the vocabulary, as another tokenizer may have the same ids for other tokens
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        scored: list[dict[str, int]] = []  # tokens of each example's responses, by role
        for (prompt, index), example in encode_in_batches(self._draw_sample(prompts), self.encode, **self.limits):
            digest.update(repr((example.prompt, example.responses)).encode())
            scored.append(dict(zip(example.roles, example.n_scored, strict=True)))
            report.longest = max(report.longest, len(example.prompt) + max(map(len, example.responses), default=0))
            if example.prompt_is_truncated:
                self.count("truncated_prompts", prompt, index)
            if example.response_is_truncated:
                self.count("truncated_responses", prompt, index)
            # different texts with the same tokens; pairs of the same text are counted already
            if len(set(example.responses)) == 1 < len(set(prompt.texts(index).values())):
                self.count("pairs_cut_alike" if example.response_is_truncated else "identical_pairs", prompt, index)
        report.tokenized = len(scored)
        report.token_digest = digest.hexdigest()
        report.mean_chosen_tokens = mean(lengths["chosen"] for lengths in scored if "chosen" in lengths)
        report.mean_rejected_tokens = mean(lengths["rejected"] for lengths in scored if "rejected" in lengths)
        report.chosen_longer = mean(lengths["chosen"] > lengths["rejected"] for lengths in scored if len(lengths) > 1)
        if self._weights:
            weights = np.array(self._weights) / max(self._weights)  # at most 1, so their squares do not overflow
            report.effective_examples = float(weights.sum() ** 2 / (weights**2).sum())

    def _draw_sample(self, prompts: PromptTable) -> Iterator[TextExample]:
        """Yield the examples whose tokens are counted: all of a small split, else a sample, the same in all runs."""
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.options.trains_on == "prompts" else prompts.counts
        numbers = range(int(counts.sum()))
        if len(numbers) > COUNTED_WHOLE:
            numbers = set(random.Random(0).sample(numbers, SAMPLE_SIZE))
        ids = ((prompt, index) for prompt, n in enumerate(counts.tolist()) for index in range(n))
        for number, (prompt, index) in enumerate(ids):
            if number in numbers:
                yield prompts[prompt], index


def digest_alike(text: str, shortest: int) -> int:
    """Digest a text, without regard to case, punctuation and white space; 0 for fewer than `shortest` characters.

    Digests can only be compared within a process, as Python hashes texts differently in each.
    """
    plain = NOT_COUNTED.sub("", unicodedata.normalize("NFKC", text).casefold())
    # with `shortest`, a prompt and an answer of the same text have different digests
    return hash((shortest, plain)) if len(plain) >= shortest else 0


def mean(values: Iterable[float]) -> float | None:
    """Average values; None if there are none."""
    listed = list(values)
    return fmean(listed) if listed else None
