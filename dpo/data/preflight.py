"""The preflight: counts a run's data before it starts, and refuses data that it cannot train on."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from dpo.data.asking import CHAT, RAW, find_format
from dpo.data.examples import TextExample, list_examples, prime
from dpo.data.prompts import Prompt, PromptFile, StoredPrompts, iterate_prompts, store_prompts
from dpo.data.schema import PreferenceData
from dpo.data.tokenization import TextEncoder, truncate
from dpo.data.tokenizer import doubts_about_bos, load_tokenizer
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.plan import Plan, TrainingPlan
from dpo.system.host import release_freed_memory
from dpo.system.sharing import once_per_machine


@dataclass
class SplitReport:
    """Counts over the examples of a split: pairs, or SFT targets; lengths in tokens.

    SFT targets have no counts of pairs. Counts that need token ids are over all examples, or over a random sample of a
    large split.
    """

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int | None = 0  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int | None = 0  # pairs that reverse an earlier pair of their prompt
    joined_words: int = 0  # examples with a response not separated by a space from the prompt's last word
    joined_example: str = ""  # the text around that place, in the first of these
    tokenized: int = 0  # number of examples in the following counts
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    identical_pairs: int | None = 0  # chosen and rejected are the same tokens after truncation: no gradient under DPO
    longest: int = 0  # prompt and response of one example
    mean_prompt_tokens: float = 0.0
    mean_chosen_tokens: float = 0.0
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: see `asking.find_format`
    token_digest: str = ""  # SHA-256 of the vocabulary and of these examples' token ids before truncation


@dataclass
class Preflight:
    """Counts of both splits, and of updates."""

    train: SplitReport
    test: SplitReport
    updates: int
    dropped_examples: int  # of last partial batches, over all epochs

    def longest(self, max_length: int) -> int:
        """Tokens of the longest prompt with one response, or `max_length` if not all were tokenized."""
        splits = (self.train, self.test)
        return max(s.longest for s in splits) if all(s.tokenized == s.examples for s in splits) else max_length

    def tell(self, batch_size: int) -> str:
        """Text to print before a run starts."""
        splits = {"train": self.train, "test": self.test}
        lines = [describe(split, report) for split, report in splits.items()]
        lines += warn(splits)
        plan = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        if self.dropped_examples:
            dropped = count(self.dropped_examples, "example in a partial batch is", "examples in partial batches are")
            plan += f"; {dropped} dropped"
        lines.append(plan)
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> tuple[int, int]:
    """Compute (updates, dropped examples) of `iterate_examples`, without iterating."""
    per_epoch, remainder = divmod(examples, batch_size)
    if per_epoch == 0:
        return 0, examples
    if n_examples is not None:
        whole = max(0, -(-(n_examples - per_epoch * batch_size) // examples))  # full epochs before the last one
        if n_epochs is None or whole < n_epochs:
            # the batch that reaches n_examples is the last; at least one always runs
            last = max(1, -(-(n_examples - whole * examples) // batch_size))
            return whole * per_epoch + last, whole * remainder
    return n_epochs * per_epoch, n_epochs * remainder


def inspect_split(
    prompts: Sequence[Prompt],
    encode: TextEncoder,
    *,
    sft_mode: bool,
    max_length: int,
    max_prompt_length: int,
    sample_size: int = 10_000,
) -> SplitReport:
    """Count every example of a split, and the tokens of at most `sample_size` of them.

    The other texts are tokenized in the background during training. Raises InputError with the first text with EOS.
    """
    report = SplitReport(prompts=len(prompts))
    ends = array("q")  # number of examples up to each prompt
    guilty: dict[str, str] = {}
    seen: set[int] = set()
    for prompt in prompts:
        examples = prompt.examples(sft_mode)
        form = find_format(prompt.text, rendered=prompt.rendered)
        if report.prompt_formats.setdefault(prompt.dataset, form) != form:
            report.prompt_formats[prompt.dataset] = RAW
        _count_texts(report, prompt.text, examples, seen)
        _count_joined(report, prompt, examples)
        guilty |= _find_eos(prompt, examples, encode)
        report.examples += len(examples)
        ends.append(report.examples)
    _refuse_eos(guilty, encode)
    drawn: Sequence[int] = range(report.examples)
    if report.examples > sample_size:
        drawn = random.Random(0).sample(drawn, sample_size)
    sample = [_find_example(prompts, ends, number, sft_mode) for number in drawn]
    prime(sample, encode)
    report.token_digest = _token_digest(sample, encode)
    report.tokenized = len(sample)
    lengths = [_count_tokens(report, example, encode, max_length, max_prompt_length) for example in sample]
    if lengths:
        report.mean_prompt_tokens = mean(counts[0] for counts in lengths)
        report.mean_chosen_tokens = mean(counts[1] for counts in lengths)
    if sft_mode:
        report.duplicated_pairs = report.contradictory_pairs = report.identical_pairs = None
    elif lengths:
        report.mean_rejected_tokens = mean(rejected for *_, rejected in lengths)
        report.chosen_longer = mean(chosen > rejected for _, chosen, rejected in lengths)
    return report


def _count_texts(report: SplitReport, prompt_text: str, examples: Sequence[dict[str, str]], seen: set[int]) -> None:
    """Add the counts of a prompt's examples that need no token ids.

    `seen` has a hash of every earlier pair, also of other datasets, which may have the same prompt."""
    for texts in examples:
        report.empty_responses += not all(text.strip() for text in texts.values())
        if len(texts) == 2:
            pair, reverse = (hash((prompt_text, *order)) for order in (texts.values(), reversed(texts.values())))
            report.duplicated_pairs += pair in seen  # pyright: ignore[reportOperatorIssue]  # None only at the end
            reversed_earlier = reverse in seen and reverse != pair
            report.contradictory_pairs += reversed_earlier  # pyright: ignore[reportOperatorIssue]  # None only at the end
            seen.add(pair)


def _count_joined(report: SplitReport, prompt: Prompt, examples: Sequence[dict[str, str]]) -> None:
    """Count the examples in which the prompt's last word and a response's first run together.

    Prompts rendered by a chat template, and scripts without spaces, do not count."""
    if prompt.rendered or not _is_of_word(prompt.text[-1:]):
        return
    for texts in examples:
        joined = [text for text in texts.values() if _is_of_word(text[:1])]
        report.joined_words += bool(joined)
        if joined and not report.joined_example:
            report.joined_example = prompt.text[-40:] + joined[0][:40]


def _is_of_word(character: str) -> bool:
    """Whether a prompt ending with this character, or a response beginning with it, needs a space there."""
    return bool(character) and not character.isspace() and unicodedata.east_asian_width(character) not in "WF"


def _find_eos(prompt: Prompt, examples: Sequence[dict[str, str]], encode: TextEncoder) -> dict[str, str]:
    """{text with EOS: its prompt} for a prompt's examples; empty for a rendered chat, where EOS ends turns."""
    if prompt.rendered:
        return {}
    eos, eos_id = encode.tokenizer.eos_token, encode.tokenizer.eos_token_id
    distinct = dict.fromkeys(text for texts in examples for text in (prompt.text, *texts.values()))
    return {text: prompt.text for text in distinct if eos in text and eos_id in encode(text)}


def _refuse_eos(guilty: Mapping[str, str], encode: TextEncoder) -> None:
    """Refuse texts with EOS: raises InputError if there are any."""
    if guilty:
        text, prompt_text = next(iter(guilty.items()))
        raise InputError(
            f"{len(guilty)} text{'s contain' if len(guilty) > 1 else ' contains'} the EOS token "
            f"{encode.tokenizer.eos_token!r}, which would end it early; clean the data. The first: {text[:300]!r}, "
            f"for the prompt {prompt_text[-200:]!r}"
        )


def _token_digest(examples: Sequence[TextExample], encode: TextEncoder) -> str:
    """Digest that differs between tokenizers that give different token ids, whatever their files or versions."""
    tokenizer = encode.tokenizer
    digest = hashlib.sha256(repr((tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))).encode())
    for prompt, _, texts in examples:
        digest.update(repr([encode(text) for text in (prompt.text, *texts.values())]).encode())
    return digest.hexdigest()


def _find_example(prompts: Sequence[Prompt], ends: Sequence[int], number: int, sft_mode: bool) -> TextExample:
    """Example `number` of a split, where the examples of prompt i end before `ends[i]`."""
    place = bisect_right(ends, number)
    return list(list_examples(prompts[place], sft_mode=sft_mode))[number - (ends[place - 1] if place else 0)]


def _count_tokens(
    report: SplitReport, example: TextExample, encode: TextEncoder, max_length: int, max_prompt: int
) -> tuple[int, ...]:
    """Add an example's token counts to the report. Returns the truncated lengths of its prompt and responses."""
    prompt, _, texts = example
    eos = encode.tokenizer.eos_token_id
    prompt_ids, full = encode(prompt.text), [encode(text) for text in texts.values()]
    cut_prompt, cut = truncate(
        prompt_ids, [[*ids, eos] for ids in full], prompt.truncation_mode, max_length, max_prompt
    )
    report.truncated_prompts += len(cut_prompt) < len(prompt_ids)
    report.truncated_responses += any(len(c) <= len(f) for c, f in zip(cut, full, strict=True))
    identical = len(cut) == 2 and cut[0] == cut[1]
    report.identical_pairs += identical  # pyright: ignore[reportOperatorIssue]  # None only at the end
    report.longest = max(report.longest, len(cut_prompt) + max(map(len, cut)))
    return (len(cut_prompt), *map(len, cut))


def describe(split: str, report: SplitReport) -> str:
    """Paragraph to print: the size of the split, then the counts that are not 0."""
    of_texts = [
        (report.empty_responses, "with an empty response", "with an empty response"),
        (report.duplicated_pairs, "duplicated pair", "duplicated pairs"),
        (report.contradictory_pairs, "contradictory pair", "contradictory pairs"),
    ]
    of_tokens = [
        (report.truncated_prompts, "with a truncated prompt", "with a truncated prompt"),
        (report.truncated_responses, "with a truncated response", "with a truncated response"),
        (report.identical_pairs, "identical pair", "identical pairs"),
    ]
    text = f"{split}: {count(report.examples, 'example')} of {count(report.prompts, 'prompt')}"
    text += "".join(f", {count(n, *what)}" for n, *what in of_texts if n)
    if report.tokenized < report.examples:
        text += f"; in a random sample of {report.tokenized:,}"
    text += "".join(f", {count(n, *what)}" for n, *what in of_tokens if n)
    text += f"; {report.mean_chosen_tokens:.1f} tokens per chosen response"
    if report.mean_rejected_tokens is not None:
        gap = report.mean_chosen_tokens - report.mean_rejected_tokens
        text += f", {report.mean_rejected_tokens:.1f} per rejected (gap {gap:+.1f}; chosen longer in "
        text += f"{report.chosen_longer:.0%} of pairs)"
    return text


def warn(splits: Mapping[str, SplitReport]) -> list[str]:
    """Warnings about probable mistakes, each for all splits and with an example."""
    joined = {split: report for split, report in splits.items() if report.joined_words}
    if not joined:
        return []
    counted = (f"{r.joined_words:,} of {count(r.examples, 'example')} ({split})" for split, r in joined.items())
    example = next(iter(joined.values())).joined_example
    return [
        f"warning: in {' and '.join(counted)} a response follows its prompt without a space, as in {example!r}; texts "
        f"are used verbatim: begin responses with a space, or end prompts with one"
    ]


@dataclass
class TrainingData:
    """Data of a trainer: the prompts of both splits, their token ids, and the preflight."""

    tokenizer: Any
    encode: TextEncoder
    train: StoredPrompts
    test: StoredPrompts
    report: Preflight

    def give(self) -> str:
        """Text from which `take` gets the data in another process of this machine, while this one runs."""
        largest = self.encode.largest
        return json.dumps([self.train.where, self.test.where, largest, asdict(self.report)])

    @classmethod
    def take(cls, given: str, tokenizer: Any) -> TrainingData:
        """Get the data of another process, without a copy of its texts."""
        train, test, largest, report = json.loads(given)
        splits = {split: SplitReport(**report.pop(split)) for split in ("train", "test")}
        return cls(
            tokenizer,
            TextEncoder(tokenizer, largest=largest),
            StoredPrompts(PromptFile(*train)),
            StoredPrompts(PromptFile(*test)),
            Preflight(**splits, **report),
        )

    @cached_property
    def digest(self) -> str:
        """Digest of the training prompts, responses, pairs and SFT targets, in order."""
        digest = hashlib.sha256()
        for prompt in self.train:
            digest.update(repr((prompt.text, prompt.responses, prompt.pairs, prompt.sft_target)).encode())
        return digest.hexdigest()[:32]


def prepare_data(
    names: Sequence[str],
    tokenizer: Any,
    *,
    get_dataset: Callable[..., PreferenceData],
    sft_mode: bool,
    online: bool = False,
    batch_size: int,
    batch_parts: int = 1,
    max_length: int,
    max_prompt_length: int,
    n_epochs: int | None,
    n_examples: int | None,
    dataset_sources: Any,
    cache_dir: str | None,
    folder: str | Path,
    silent: bool,
) -> TrainingData:
    """Load and count both splits, and print the counts unless `silent`. Large texts are stored in `folder`.

    `online`: training examples are prompts. Raises InputError for data that is unusable or too little; the batch size
    that it suggests is a multiple of `batch_parts`.
    """
    encode = TextEncoder(tokenizer)
    prompts, reports = {}, {}
    for split in ("train", "test"):
        options = {"cache_dir": cache_dir, "dataset_sources": dataset_sources, "tokenizer": tokenizer}
        options |= {"sft_mode": sft_mode, "silent": silent}
        found = iterate_prompts(get_dataset, names, split, with_messages=online, **options)
        prompts[split] = store_prompts(found, folder)
        reports[split] = inspect_split(
            prompts[split], encode, sft_mode=sft_mode, max_length=max_length, max_prompt_length=max_prompt_length
        )
        if online and split == "train":
            reports[split].examples = reports[split].prompts
        if not reports[split].examples:
            raise InputError(f"the {split} split of {', '.join(names)} has no examples")
    if (n := reports["train"].examples) < batch_size:
        fix = f"set batch_size={n - n % batch_parts} or add data"
        if n < batch_parts:
            fix = f"add data, for it is a multiple of gradient_accumulation_steps * processes = {batch_parts}"
        raise InputError(
            f"the train split of {', '.join(names)} has {count(n, 'example')}, too few for one batch of "
            f"batch_size={batch_size}: {fix}"
        )
    release_freed_memory()  # of the texts as Python strings
    updates, dropped = count_updates(
        reports["train"].examples, batch_size=batch_size, n_epochs=n_epochs, n_examples=n_examples
    )
    preflight = Preflight(**reports, updates=updates, dropped_examples=dropped)
    if not silent:
        print(preflight.tell(batch_size), flush=True)
    return TrainingData(tokenizer, encode, prompts["train"], prompts["test"], preflight)


def load_data(plan: Plan, get_dataset: Callable[..., PreferenceData], *, silent: bool = False) -> TrainingData:
    """Load the data of a run: tokenizer, prompts of both splits and the preflight.

    `get_dataset` loads a dataset by name. Every process of a run must call this: one per machine loads and counts, and
    the others share its data.
    """
    if not silent:
        print(f"reading the data of {', '.join(plan.data.datasets)}", flush=True)
    cache_dir, trusts = plan.run.cache_dir, plan.model.trust_remote_code
    tokenizer = load_tokenizer(plan.model.tokenizer, cache_dir=cache_dir, trust_remote_code=trusts)
    prepare = partial(
        prepare_data,
        plan.data.datasets,
        tokenizer,
        get_dataset=get_dataset,
        sft_mode=not plan.loss.pairwise,
        online=plan.online is not None,
        batch_size=plan.data.batch_size,
        batch_parts=plan.data.gradient_accumulation_steps * plan.dims.data_size,
        max_length=plan.data.max_length,
        max_prompt_length=plan.data.max_prompt_length,
        n_epochs=plan.data.n_epochs,
        n_examples=plan.data.n_examples,
        dataset_sources=plan.data.dataset_sources,
        cache_dir=cache_dir,
        folder=plan.run.local_dir,
        silent=silent,
    )
    data = once_per_machine(
        prepare,
        give=TrainingData.give,
        take=partial(TrainingData.take, tokenizer=tokenizer),
        silence_secs=plan.run.collective_timeout_secs,
    )
    if not silent:
        forms = data.report.train.prompt_formats
        about_tokenizer = *doubts_about_chat(tokenizer, forms), *doubts_about_bos(tokenizer, data.train[0].text)
        for line in (*doubts(plan.training, data.report), *about_tokenizer):
            print(f"warning: {line}", flush=True)
    return data


def doubts(training: TrainingPlan, report: Preflight) -> list[str]:
    """Warnings about settings that look wrong for this amount of data."""
    warmup, updates = training.warmup_steps, report.updates
    run, tenth = count(updates, "update"), updates // 10
    fits = f"warmup_steps={tenth} fits, a tenth of them" if tenth else "no warm-up fits so short a run: warmup_steps=0"
    if warmup == 0:
        return []
    if warmup >= updates:
        fault = f"is too long for the {run} of this run, which would never reach lr={training.lr}"
    elif training.schedule != "constant" and warmup >= updates - 1:
        fault = f"leaves none of the {run} for {training.schedule}"
    elif warmup > updates / 2:
        fault = f"takes most of the {run} of this run"
    else:
        return []
    return [f"warmup_steps={warmup} {fault}; {fits}"]


def doubts_about_chat(tokenizer: Any, forms: Mapping[str, str]) -> list[str]:
    """A warning if the tokenizer has a chat template and a dataset is text; `forms` has each dataset's form."""
    names = [name for name, form in forms.items() if form != CHAT]
    if not names or not getattr(tokenizer, "chat_template", None):
        return []
    hold = f"{' and '.join(names)} hold{'s' * (len(names) == 1)}"
    return [
        f"the tokenizer has a chat template, and {hold} text, which is used as it is: a chat model would learn in "
        f"another form than it is asked in. Give messages, [{{role: user, content: ...}}], in place of text; a base "
        f"model may learn from text"
    ]
