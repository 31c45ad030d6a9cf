"""The preflight: counts a run's data before it starts, and refuses data that it cannot train on."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from typing import Any, NamedTuple

import numpy as np

from dpo.data.asking import CHAT, RAW, find_format
from dpo.data.examples import TextExample, list_examples, read_examples
from dpo.data.schema import PreferenceData
from dpo.data.table import SPLITS, Prompt, PromptTable, find_or_build, iterate_prompts, read_facts, write_prompts
from dpo.data.tokenization import TextEncoder, truncate
from dpo.data.tokenizer import doubts_about_bos, identify_tokenizer, load_tokenizer
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.plan import Plan, TrainingPlan
from dpo.system.host import release_freed_memory
from dpo.system.waiting import once_per_machine

GetDataset = Callable[..., PreferenceData]  # loads a dataset by name
Identify = Callable[..., Any]  # a JSON value that changes with a dataset's content, or None
SAMPLE_SIZE = 10_000  # examples of a split whose tokens are counted
TOKENIZED_AT_ONCE = 1000


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
    epoch: int  # examples of an epoch: those of `train`, or its prompts if pairs are drawn for them

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


class SplitCounter:
    """Counts over a split that need no token ids, taken while its prompts are written."""

    def __init__(self, encode: TextEncoder) -> None:
        self.encode = encode
        self.report = SplitReport()
        self.digest = hashlib.sha256()  # of prompts, responses and examples, in order
        self._seen: set[int] = set()  # a hash of every pair, also of other datasets, which may have the same prompts
        self._guilty: dict[str, str] = {}  # texts with EOS, and their prompts

    def watch(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts, counted. Raises InputError at their end if a text contains EOS."""
        report = self.report
        for prompt in prompts:
            examples = [example.texts for example in list_examples(prompt)]
            form = find_format(prompt.text, rendered=prompt.rendered)
            if report.prompt_formats.setdefault(prompt.dataset, form) != form:
                report.prompt_formats[prompt.dataset] = RAW
            self._count_texts(prompt.text, examples)
            _count_joined(report, prompt, examples)
            self._guilty |= _find_eos(prompt, examples, self.encode)
            self.digest.update(repr((prompt.text, prompt.responses, prompt.examples)).encode())
            report.prompts += 1
            report.examples += len(examples)
            yield prompt
        _refuse_eos(self._guilty, self.encode)

    def _count_texts(self, prompt_text: str, examples: Sequence[dict[str, str]]) -> None:
        report, seen = self.report, self._seen
        for texts in examples:
            report.empty_responses += not all(text.strip() for text in texts.values())
            if len(texts) == 2:
                pair, reverse = (hash((prompt_text, *order)) for order in (texts.values(), reversed(texts.values())))
                report.duplicated_pairs += pair in seen  # pyright: ignore[reportOperatorIssue]  # None only at the end
                reversed_earlier = reverse in seen and reverse != pair
                report.contradictory_pairs += reversed_earlier  # pyright: ignore[reportOperatorIssue]  # None at the end
                seen.add(pair)

    def count_tokens(self, prompts: PromptTable, *, max_length: int, max_prompt_length: int) -> SplitReport:
        """The report, with the tokens of at most `SAMPLE_SIZE` examples of the stored prompts.

        The other texts are tokenized in the background during training.
        """
        report, encode = self.report, self.encode
        ends = np.cumsum(prompts.counts)
        drawn: Sequence[int] = range(report.examples)
        if report.examples > SAMPLE_SIZE:
            drawn = random.Random(0).sample(drawn, SAMPLE_SIZE)
        report.tokenized = len(drawn)
        digest = _digest_vocabulary(encode.tokenizer)
        lengths = []
        for start in range(0, len(drawn), TOKENIZED_AT_ONCE):
            numbers = np.array(drawn[start : start + TOKENIZED_AT_ONCE])
            places = np.searchsorted(ends, numbers, side="right")
            indices = numbers - (ends - prompts.counts)[places]
            sample = read_examples(prompts, zip(places.tolist(), indices.tolist(), strict=True))
            ids = encode(text for example in sample for text in (example.prompt.text, *example.texts.values()))
            for example in sample:
                texts = (example.prompt.text, *example.texts.values())
                digest.update(repr([ids[text] for text in texts]).encode())
                lengths.append(_count_tokens(report, example, ids, encode.tokenizer, max_length, max_prompt_length))
        report.token_digest = digest.hexdigest()
        if lengths:
            report.mean_prompt_tokens = mean(counts[0] for counts in lengths)
            report.mean_chosen_tokens = mean(counts[1] for counts in lengths)
        if lengths and len(lengths[0]) == 3:
            report.mean_rejected_tokens = mean(rejected for *_, rejected in lengths)
            report.chosen_longer = mean(chosen > rejected for _, chosen, rejected in lengths)
        else:
            report.duplicated_pairs = report.contradictory_pairs = report.identical_pairs = None
        return report


def _count_joined(report: SplitReport, prompt: Prompt, examples: Sequence[dict[str, str]]) -> None:
    """Count the examples in which the prompt's last word and a response's first run together.

    Prompts rendered by a chat template, and scripts without spaces, do not count."""
    if prompt.rendered or not _joins_words(prompt.text[-1:]):
        return
    for texts in examples:
        joined = [text for text in texts.values() if _joins_words(text[:1])]
        report.joined_words += bool(joined)
        if joined and not report.joined_example:
            report.joined_example = prompt.text[-40:] + joined[0][:40]


def _joins_words(character: str) -> bool:
    """Return whether a prompt ending with this character, or a response beginning with it, needs a space there."""
    return bool(character) and not character.isspace() and unicodedata.east_asian_width(character) not in "WF"


def _find_eos(prompt: Prompt, examples: Sequence[dict[str, str]], encode: TextEncoder) -> dict[str, str]:
    """{text with EOS: its prompt} for a prompt's examples; empty for a rendered chat, where EOS ends turns."""
    if prompt.rendered:
        return {}
    eos, eos_id = encode.tokenizer.eos_token, encode.tokenizer.eos_token_id
    distinct = dict.fromkeys(text for texts in examples for text in (prompt.text, *texts.values()))
    return {text: prompt.text for text in distinct if eos in text and eos_id in encode([text])[text]}


def _refuse_eos(guilty: Mapping[str, str], encode: TextEncoder) -> None:
    """Refuse texts with EOS: raises InputError if there are any."""
    if guilty:
        text, prompt_text = next(iter(guilty.items()))
        raise InputError(
            f"{len(guilty)} text{'s contain' if len(guilty) > 1 else ' contains'} the EOS token "
            f"{encode.tokenizer.eos_token!r}, which would end it early; clean the data. The first: {text[:300]!r}, "
            f"for the prompt {prompt_text[-200:]!r}"
        )


def _digest_vocabulary(tokenizer: Any) -> Any:
    """Beginning of a digest that differs between tokenizers that give different token ids, whatever their files."""
    return hashlib.sha256(repr((tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))).encode())


def _count_tokens(
    report: SplitReport,
    example: TextExample,
    ids: Mapping[str, list[int]],
    tokenizer: Any,
    max_length: int,
    max_prompt_length: int,
) -> tuple[int, ...]:
    """Add an example's token counts to the report. Returns the truncated lengths of its prompt and responses."""
    prompt, _, texts = example
    prompt_ids, full = ids[prompt.text], [ids[text] for text in texts.values()]
    with_eos = [[*response, tokenizer.eos_token_id] for response in full]
    cut_prompt, cut = truncate(prompt_ids, with_eos, prompt.truncation_mode, max_length, max_prompt_length)
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
    """Data of a trainer: the prompts of both splits, their tokenizer, and the preflight."""

    tokenizer: Any
    encode: TextEncoder
    train: PromptTable
    test: PromptTable
    report: Preflight
    digest: str = ""  # of the training data, in order
    test_digest: str = ""

    @property
    def n_examples(self) -> int:
        """Number of examples of both splits, of which each has a number: first those of `train`, then of `test`."""
        return int(self.train.counts.sum() + self.test.counts.sum())

    @property
    def identity(self) -> tuple[str, ...]:
        """Digests of all texts, and of token ids before truncation."""
        reports = self.report.train, self.report.test
        return self.digest, self.test_digest, *(report.token_digest for report in reports)

    @classmethod
    def open(
        cls,
        place: Path,
        tokenizer: Any,
        *,
        online: bool,
        batch_size: int,
        n_epochs: int | None,
        n_examples: int | None,
    ) -> TrainingData:
        """Open a table. `online`: training examples are prompts."""
        facts = read_facts(place)["facts"]
        reports = {split: SplitReport(**facts["reports"][split]) for split in SPLITS}
        epoch = reports["train"].prompts if online else reports["train"].examples
        size = {"batch_size": batch_size, "n_epochs": n_epochs, "n_examples": n_examples}
        updates, dropped = count_updates(epoch, **size)
        preflight = Preflight(**reports, updates=updates, dropped_examples=dropped, epoch=epoch)
        train, test = (PromptTable(place / f"{split}.arrow") for split in SPLITS)
        encode = TextEncoder(tokenizer, largest=facts["largest"])
        return cls(tokenizer, encode, train, test, preflight, *(facts["digests"][split] for split in SPLITS))


class DatasetOptions(NamedTuple):
    """The settings that the content of a table depends on, with the datasets themselves and the tokenizer."""

    names: list[str]
    dataset_sources: Mapping[str, Any]
    trains_on: str
    online: bool  # also has the messages of chats
    max_length: int
    max_prompt_length: int


def build_table(
    place: Path,
    options: DatasetOptions,
    tokenizer: Any,
    get_dataset: GetDataset,
    *,
    cache_dir: str | None,
    silent: bool,
) -> dict[str, Any]:
    """Write both splits to a directory, and count them. Raises InputError for data that is unusable."""
    encode, notes, reports, digests = TextEncoder(tokenizer), [], {}, {}
    for split in SPLITS:
        prompts = iterate_prompts(
            get_dataset,
            options.names,
            split,
            trains_on=options.trains_on,
            with_messages=options.online,
            notes=notes,
            silent=silent,
            cache_dir=cache_dir,
            dataset_sources=options.dataset_sources,
            tokenizer=tokenizer,
        )
        counter, path = SplitCounter(encode), place / f"{split}.arrow"
        write_prompts(path, counter.watch(prompts))
        lengths = {"max_length": options.max_length, "max_prompt_length": options.max_prompt_length}
        reports[split] = asdict(counter.count_tokens(PromptTable(path), **lengths))
        digests[split] = counter.digest.hexdigest()[:32]
        if not reports[split]["examples"]:
            raise InputError(f"the {split} split of {', '.join(options.names)} has no examples")
    return {"reports": reports, "digests": digests, "largest": encode.largest, "notes": notes}


def make_key(
    options: DatasetOptions, tokenizer: Any, get_dataset: GetDataset, identify: Identify, cache_dir: str | None
) -> str | None:
    """Name of a table, by everything that it is made from; None if a source cannot be identified."""
    datasets = [identify(name, cache_dir, options.dataset_sources) for name in options.names]
    encodes = identify_tokenizer(tokenizer)
    if None in datasets or encodes is None or not inspect.isfunction(inspect.unwrap(get_dataset)):
        return None
    loader = inspect.unwrap(get_dataset)
    code = [Path(loader.__code__.co_filename), *sorted(Path(__file__).parent.glob("*.py"))]
    loaders = [hashlib.sha256(file.read_bytes()).hexdigest() for file in code]
    made_from = [options._replace(dataset_sources={}), datasets, encodes, loaders]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def prepare_data(
    options: DatasetOptions,
    tokenizer: Any,
    *,
    get_dataset: GetDataset,
    identify: Identify,
    batch_size: int,
    batch_parts: int = 1,
    cache_dir: str | None,
    folder: str | Path,
    scratch: Path | None = None,
    silent: bool,
) -> Path:
    """Find the table of the data in `folder`, or build it; print what its loaders have to say unless `silent`.

    With `scratch` a new table goes there.

    Raises InputError for data that is unusable or too little; the batch size that it suggests is a multiple of
    `batch_parts`.
    """
    find_key = partial(make_key, options, tokenizer, get_dataset, identify, cache_dir)
    key, built = find_key(), False

    def build(place: Path) -> tuple[dict[str, Any], bool]:
        nonlocal built
        built, facts = True, build_table(place, options, tokenizer, get_dataset, cache_dir=cache_dir, silent=silent)
        return facts, find_key() == key  # else a file was changed while it was read

    place = find_or_build(Path(folder) / "examples", key, build, scratch=scratch)
    release_freed_memory()  # of the texts as Python strings
    facts = read_facts(place)["facts"]
    if not (silent or built):
        print("".join(f"{note}\n" for note in facts["notes"]), end="")
    report = facts["reports"]["train"]
    if (n := report["prompts" if options.online else "examples"]) < batch_size:
        fix = f"set batch_size={n - n % batch_parts} or add data"
        if n < batch_parts:
            fix = f"add data, for it is a multiple of gradient_accumulation_steps * processes = {batch_parts}"
        raise InputError(
            f"the train split of {', '.join(options.names)} has {count(n, 'example')}, too few for one batch of "
            f"batch_size={batch_size}: {fix}"
        )
    return place


def load_data(plan: Plan, get_dataset: GetDataset, identify: Identify, *, silent: bool = False) -> TrainingData:
    """Load the data of a run: tokenizer, prompts of both splits and the preflight.

    `get_dataset` loads a dataset by name, and `identify` tells its states apart. Every process of a run must call
    this: one per machine finds or builds the table, and all of them map it.
    """
    if not silent:
        print(f"reading the data of {', '.join(plan.data.datasets)}", flush=True)
    cache_dir, trusts = plan.run.cache_dir, plan.model.trust_remote_code
    tokenizer = load_tokenizer(plan.model.tokenizer, cache_dir=cache_dir, trust_remote_code=trusts)
    options = DatasetOptions(
        plan.data.datasets,
        plan.data.dataset_sources,
        trains_on=plan.loss.trains_on,
        online=plan.online is not None,
        max_length=plan.data.max_length,
        max_prompt_length=plan.data.max_prompt_length,
    )
    with tempfile.TemporaryDirectory() as scratch:  # what is mapped there stays until it is let go
        prepare = partial(
            prepare_data,
            options,
            tokenizer,
            get_dataset=get_dataset,
            identify=identify,
            batch_size=plan.data.batch_size,
            batch_parts=plan.data.gradient_accumulation_steps * plan.dims.data_size,
            cache_dir=cache_dir,
            folder=plan.run.local_dir,
            scratch=Path(scratch) if plan.run.dry_run else None,  # which leaves nothing behind
            silent=silent,
        )
        place = Path(once_per_machine(lambda: str(prepare()), silence_secs=plan.run.collective_timeout_secs))
        size = {"batch_size": plan.data.batch_size, "n_epochs": plan.data.n_epochs, "n_examples": plan.data.n_examples}
        data = TrainingData.open(place, tokenizer, online=options.online, **size)
    if not silent:
        print(data.report.tell(plan.data.batch_size), flush=True)
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
