"""Counts the texts and tokens of a split, and writes the sentences that a run prints about them."""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from dpo.data.examples import Example, ExampleId, TextExample, encode_examples, read_examples
from dpo.data.near_duplicates import make_digests
from dpo.data.prompt_forms import CHAT, HH, RAW, is_dialogue
from dpo.data.schema import WARNING_SHARE, Prompt, naming_place
from dpo.data.table import PromptTable
from dpo.data.tokenization import TextEncoder, compile_special_tokens, refuse_eos
from dpo.errors import WarningLine
from dpo.losses import TRAINS_ON
from dpo.numbers import count
from dpo.redaction import redact

SAMPLE_SIZE = 1_000  # examples whose tokens are counted, of a split with more than COUNTED_WHOLE
COUNTED_WHOLE = 10_000  # most examples of a split whose tokens are all counted
N_DUPLICATES_SHOWN = 3  # texts that train and test have in common
SHOWN = 100  # last characters of each
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory that their token ids take
CONTRARY = {"chosen": "rejected", "rejected": "chosen"}
PRINTED = (  # counts for the terminal
    "desirable",
    "undesirable",
    "empty_responses",
    "duplicated_pairs",
    "contradictory_pairs",
    "contradictory_labels",
    "identical_pairs",
    "control_tokens",
    "too_long",
    "truncated_prompts",
    "truncated_responses",
    "pairs_cut_alike",
    "tokens_across_limits",
)
COUNTED_IN_ALL = ("empty_responses", "identical_pairs")  # counts over all examples; others are over tokenized ones
WARNINGS = {  # for each count, what it means and how to change it
    "empty_responses": "a response is empty: remove the record, unless you mean it",
    "truncated_prompts": "the prompt is cut: raise max_length and max_prompt_length, or set truncation",
    "truncated_responses": "a response is cut and loses its end: raise max_length, or set truncation=drop",
    "identical_pairs": "both responses are the same, as written or as rendered, which teaches nothing: remove the "
    "pair, or use another template",
    "pairs_cut_alike": "both responses are the same after cutting, which teaches nothing: raise max_length",
    "too_long": "the example is longer than max_length and is left out: raise max_length, or set truncation=auto",
}


@dataclass
class SplitReport:
    """Counts over a split, lengths in tokens. Of a large split, `tokenized` to `chosen_longer` are over a sample."""

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int = 0  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int = 0  # pairs that reverse an earlier pair of their prompt
    contradictory_labels: int = 0  # responses that have the other label in an earlier example of their prompt
    too_long: int = 0  # examples that truncation=drop has left out
    identical_pairs: int = 0  # same texts on both sides: no gradient under DPO
    control_tokens: int = 0  # strings of special tokens in texts that are used as they are
    prompts_like_train: int = 0  # prompts of the test split that training has too
    answers_in_train: int = 0  # examples of the test split with an answer that training has too
    like_train: list[str] = field(default_factory=list)  # the first texts that these two counts are of
    effective_examples: float | None = None  # effective sample size, (sum w)^2 / sum w^2; None without weights
    desirable: int = 0  # labelled examples by their label
    undesirable: int = 0
    tokenized: int = 0  # number of examples in the sample, or of all
    tokens_across_limits: int = 0  # examples with parts that a token would span, so they are tokenized apart
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    pairs_cut_alike: int = 0  # same tokens on both sides, of different texts
    longest: int = 0  # most tokens of a prompt with one response
    mean_chosen_tokens: float | None = None
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: one of `PROMPT_FORMS`
    problems: list[tuple[str, int, str, str]] = field(default_factory=list)  # dataset, record, problem and reason
    digest: str = ""  # identifies the split's prompts, in their order
    token_digest: str = ""  # identifies the vocabulary and the examples' token ids

    def count(self, name: str, prompt: Prompt, index: int) -> None:
        """Count the prompt's example `index` in the field `name`, and add the example's row to `problems`."""
        setattr(self, name, getattr(self, name) + 1)
        if prompt.rows:  # the field "truncated_prompts" gives the problem "truncated prompt"
            self.problems.append((prompt.dataset, prompt.rows[index], name.replace("_", " ").removesuffix("s"), ""))

    def describe(self, split: str) -> Iterator[str]:
        """Yield a line of counts, then a warning for each count that is at least WARNING_SHARE of its total."""
        prompts = count(self.prompts, "prompt")
        parts = [f"{split}: {prompts} without responses"]
        if self.examples:
            parts = [f"{split}: {count(self.examples, 'example')} of {prompts}"]
        for name in PRINTED:
            if n := getattr(self, name):
                parts.append(f"{name.replace('_', ' ')}: {n:,}")
        if self.tokenized < self.examples:
            parts.append(f"tokens are counted in a random sample of {self.tokenized:,}")
        if self.chosen_longer is not None:
            parts.append(f"chosen is longer in {self.chosen_longer:.0%}")
        yield "; ".join(parts)
        for name, warning in WARNINGS.items():
            n = getattr(self, name)
            total = self.examples if name in COUNTED_IN_ALL else self.tokenized
            if name == "too_long":  # `examples` does not include these
                total = self.examples + n
            if n and n >= WARNING_SHARE * total:
                yield WarningLine(f"in {n:,} of {count(total, 'example')} ({split}) {warning}")

    def find_leaks(self) -> Iterator[str]:
        """Yield a warning if at least WARNING_SHARE of the held-out prompts or examples are in training too."""
        leaks = []
        for n, total, what in (
            (self.prompts_like_train, self.prompts, "prompts equal a training prompt"),
            (self.answers_in_train, self.examples, "examples have an answer of the training split"),
        ):
            if n and n >= WARNING_SHARE * total:
                leaks.append(f"{n:,} of {total:,} held-out {what}")
        if leaks:
            yield (
                f"{' and '.join(leaks)}, so held-out results look too good: move duplicates into one split, such as "
                f"{self.like_train[0]!r}"
            )


class SplitCounter:
    """Counts all texts of a split, then the tokens of a small split or of a sample.

    The test split's counter gets the `digests` of the counter that has counted the train split, as `training`.
    """

    def __init__(
        self, encode: TextEncoder, *, trains_on: str = "pairs", training: Set[int] | None = None, **limits: int
    ):
        self.encode = encode
        self.trains_on = trains_on
        self.digests: set[int] = set()
        self._training = training
        self.limits = limits
        self.report = SplitReport()
        self._weights = array("d")
        self._seen: set[int] = set()  # hashes of examples of all datasets, which may have prompts in common
        self._unscored_starts: set[ExampleId] = set()  # examples that truncation might leave without a scored token

    def count_texts(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts as they are, and count each; raises InputError for a text that contains EOS."""
        for prompt in prompts:
            self._check_texts(prompt)
            self.report.prompts += 1
            self._note_format(prompt)
            self._compare_with_training(prompt)
            self._weights.extend(prompt.weights or ())
            for index, example in enumerate(prompt.examples):
                self._count_example(prompt, index)
                # a response begins with a part that is not scored
                if prompt.cuts and any(prompt.cuts[i][:1] == [0] for i in example.values()):
                    self._unscored_starts.add((prompt.index_in_split, index))
            yield prompt

    def _check_texts(self, prompt: Prompt) -> None:
        """Count control tokens in texts that no template has rendered; raises InputError for EOS in them."""
        tokenizer = self.encode.tokenizer
        if prompt.rendered:
            return
        if not prompt.apart:
            for text in (prompt.text, *prompt.responses):
                self.report.control_tokens += len(compile_special_tokens(tokenizer).findall(text))
        if prompt.examples or self.trains_on == "prompts":
            used = {prompt.responses[i] for example in prompt.examples for i in example.values()}
            if prompt.apart:  # else the prompt may be a chat that the user has rendered, which may have EOS
                used.add(prompt.text)
            with naming_place(f"dataset {prompt.dataset}, prompt {prompt.text[-80:]!r}"):
                refuse_eos(used, tokenizer)

    def _note_format(self, prompt: Prompt) -> None:
        prompt_format = RAW
        if prompt.rendered:
            prompt_format = CHAT
        elif is_dialogue(prompt.text):
            prompt_format = HH
        formats = self.report.prompt_formats
        if formats.setdefault(prompt.dataset, prompt_format) != prompt_format:
            formats[prompt.dataset] = RAW  # the prompts of the dataset have several formats

    def _compare_with_training(self, prompt: Prompt) -> None:
        """Count what a test prompt has in common with the train split; of a training prompt, keep the digests."""
        digests = make_digests(prompt, self.encode.tokenizer)
        if self._training is None:
            self.digests.update(filter(None, digests))  # 0 stands for a text that is not compared
            return
        report = self.report
        prompt_in_train, *responses_in_train = (digest in self._training for digest in digests)
        shared = []
        if prompt_in_train:
            report.prompts_like_train += 1
            shared.append(prompt.written)
        for example in prompt.examples:
            answers = [prompt.responses[i] for i in example.values() if responses_in_train[i]]
            report.answers_in_train += bool(answers)
            shared += answers[:1]
        for text in shared[: N_DUPLICATES_SHOWN - len(report.like_train)]:
            shown = " ".join(compile_special_tokens(self.encode.tokenizer).sub(" ", text).split())
            report.like_train.append(redact(shown)[-SHOWN:])

    def _count_example(self, prompt: Prompt, index: int) -> None:
        report = self.report
        texts = prompt.texts(index)
        report.examples += 1
        if self.trains_on == "labels":
            report.desirable += "chosen" in texts
            report.undesirable += "rejected" in texts
        if not all(text.strip() for text in texts.values()):
            report.count("empty_responses", prompt, index)
        if not texts.keys() <= CONTRARY.keys():  # a ranked list
            return
        # the contrary example has chosen and rejected exchanged, or the other label
        own = hash((prompt.text, *sorted(texts.items())))
        contrary = hash((prompt.text, *sorted((CONTRARY[role], text) for role, text in texts.items())))
        is_pair = len(texts) == 2
        if is_pair and texts["chosen"] == texts["rejected"]:
            report.count("identical_pairs", prompt, index)
        if is_pair and own in self._seen:
            report.count("duplicated_pairs", prompt, index)
        if contrary in self._seen and contrary != own:
            report.count("contradictory_pairs" if is_pair else "contradictory_labels", prompt, index)
        self._seen.add(own)

    def count_tokens(self, prompts: PromptTable) -> None:
        """Count tokens; raises InputError for a response that truncation leaves without a scored token."""
        report = self.report
        tokenizer = self.encode.tokenizer
        # the digest has the vocabulary, as another tokenizer may have the same ids for other tokens
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        scored: list[dict[str, int]] = []  # tokens of each example's responses, by role
        sample = self._draw_sample(prompts)
        for start in range(0, len(sample), TOKENIZED_AT_ONCE):
            texts = read_examples(prompts, sample[start : start + TOKENIZED_AT_ONCE])
            for text_example, example in zip(texts, encode_examples(texts, self.encode, **self.limits), strict=True):
                digest.update(repr((example.prompt, example.responses)).encode())
                self._count_example_tokens(text_example, example)
                scored.append(dict(zip(example.roles, example.n_scored, strict=True)))
        report.tokenized = len(sample)
        report.token_digest = digest.hexdigest()
        report.mean_chosen_tokens = mean(lengths["chosen"] for lengths in scored if "chosen" in lengths)
        report.mean_rejected_tokens = mean(lengths["rejected"] for lengths in scored if "rejected" in lengths)
        pairs = (lengths for lengths in scored if lengths.keys() >= CONTRARY.keys())
        report.chosen_longer = mean(lengths["chosen"] > lengths["rejected"] for lengths in pairs)
        if self._weights:
            weights = np.array(self._weights) / max(self._weights)  # at most 1, so their squares do not overflow
            report.effective_examples = float(weights.sum() ** 2 / (weights**2).sum())

    def _draw_sample(self, prompts: PromptTable) -> list[ExampleId]:
        """Choose the examples whose tokens are counted: all of a small split, else a random sample.

        `_unscored_starts` are always among them. The sample is the same in all processes and runs.
        """
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.trains_on == "prompts" else prompts.counts
        numbers = range(int(counts.sum()))
        if len(numbers) > COUNTED_WHOLE:
            numbers = set(random.Random(0).sample(numbers, SAMPLE_SIZE))
        ids = ((prompt, index) for prompt, n in enumerate(counts.tolist()) for index in range(n))
        return sorted(self._unscored_starts.union(example for number, example in enumerate(ids) if number in numbers))

    def _count_example_tokens(self, text_example: TextExample, example: Example) -> None:
        report = self.report
        prompt, index = text_example
        report.tokens_across_limits += example.crosses
        if example.prompt_is_truncated:
            report.count("truncated_prompts", prompt, index)
        if example.response_is_truncated:
            report.count("truncated_responses", prompt, index)
        # a pair of different texts with the same tokens; pairs of the same text are counted already
        is_alike = example.roles == TRAINS_ON["pairs"] and example.responses[0] == example.responses[1]
        if is_alike and len(set(prompt.texts(index).values())) == 2:
            report.count("pairs_cut_alike" if example.response_is_truncated else "identical_pairs", prompt, index)
        longest = max((len(response) for response in example.responses), default=0)
        report.longest = max(report.longest, len(example.prompt) + longest)


def mean(values: Iterable[float]) -> float | None:
    """Average values; None if there are none."""
    listed = list(values)
    return fmean(listed) if listed else None
