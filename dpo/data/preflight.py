"""Finds or builds a run's data, counts it, and refuses unusable data."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dpo.data.asking import CHAT, HH, RAW, is_dialogue
from dpo.data.examples import ExampleId, encode_examples, list_examples, read_examples
from dpo.data.loading import find_kind, identify_dataset, load_splits
from dpo.data.near_duplicates import find_near_duplicates
from dpo.data.schema import (
    BAD,
    SPLITS,
    WARNED_FROM,
    BadRecordsError,
    Prompt,
    Split,
    explain_refusal,
    naming,
    write_lines,
)
from dpo.data.table import (
    FOLDER,
    Facts,
    PromptTable,
    find_or_build,
    number_prompts,
    read_facts,
    write_prompts,
)
from dpo.data.tokenization import TextEncoder, find_control, refuse_eos
from dpo.data.tokenizer import identify_tokenizer, load_tokenizer
from dpo.errors import InputError
from dpo.losses import TRAINS_ON
from dpo.numbers import count
from dpo.redaction import redact
from dpo.settings.keys import PACKAGE_DIR
from dpo.settings.places import BUILT_IN
from dpo.settings.plan import Plan
from dpo.system.host import release_freed_memory
from dpo.system.plain_files import write_json
from dpo.system.run_directory import PROBLEMS
from dpo.system.users_code import hash_files
from dpo.system.waiting import check_alike, once_per_machine

SAMPLE_SIZE = 4_000  # examples whose tokens are counted, of a split with more than COUNTED_WHOLE
COUNTED_WHOLE = 10_000
N_SHOWN = 3  # examples in a dry run and in the report
TOKENIZED_AT_ONCE = 1000  # examples; bounds the memory of their token ids
# Fields of the data and chat sections that cannot change a table: how its examples are batched, and what the digests
# of datasets and tokenizer tell.
NOT_IN_A_TABLE = (
    *("batch_size", "eval_batch_size", "gradient_accumulation_steps", "n_epochs", "n_examples", "n_eval_examples"),
    *("num_workers", "layout", "dataset_sources", "chat_template", "chat_template_args", "chat_template_date"),
)
CONTRARY = {"chosen": "rejected", "rejected": "chosen"}
COUNTS = (  # that the terminal shows
    *("desirable", "undesirable", "empty_responses", "duplicated_pairs", "contradictory_pairs"),
    *("contradictory_labels", "identical_pairs", "control_tokens", "too_long"),
    *("truncated_prompts", "truncated_responses", "pairs_cut_alike", "tokens_across_limits"),
)
WARNINGS = {  # of these counts: what happens, and what changes it
    "empty_responses": "a response is empty: remove the record, unless you mean it",
    "truncated_prompts": "the prompt is cut: raise max_length and max_prompt_length, or choose truncation",
    "truncated_responses": "a response is cut and loses its end: raise max_length, or give truncation=drop",
    "identical_pairs": "both responses are the same, as written or as rendered, which teaches nothing: remove "
    "the pair, or choose another template",
    "pairs_cut_alike": "both responses are the same after cutting, which teaches nothing: raise max_length",
    "too_long": "the example is longer than max_length and is left out: raise max_length, or give truncation=auto",
}


@dataclass
class SplitReport:
    """Counts over a split, lengths in tokens; the fields after `tokenized` are of a random sample of a large split."""

    prompts: int = 0
    examples: int = 0
    empty_responses: int = 0  # examples with a response of only whitespace and EOS
    duplicated_pairs: int = 0  # pairs that repeat an earlier pair of their prompt
    contradictory_pairs: int = 0  # pairs that reverse an earlier pair of their prompt
    contradictory_labels: int = 0  # responses that have the other label in an earlier example of their prompt
    too_long: int = 0  # examples that truncation=drop has left out
    identical_pairs: int = 0  # same texts on both sides: no gradient under DPO
    control_tokens: int = 0  # strings of special tokens in texts that are used as they are
    prompts_like_train: int | None = None  # of the test split: prompts that training has too
    answers_in_train: int | None = None  # of the test split: examples with an answer of train
    like_train: list[dict[str, str]] = field(default_factory=list)  # the first of both
    effective_examples: float | None = None  # so many of equal weight have means as exact; None: no weights
    desirable: int = 0  # labelled examples by their label
    undesirable: int = 0
    tokenized: int = 0  # examples that the following fields are over
    tokens_across_limits: int = 0  # examples of a user with a token across prompt and response, which are cut first
    truncated_prompts: int = 0  # examples with a truncated prompt
    truncated_responses: int = 0  # examples with a truncated response, which loses its EOS
    pairs_cut_alike: int = 0  # same tokens on both sides, of different texts
    longest: int = 0  # most tokens of a prompt with one response
    mean_chosen_tokens: float | None = None
    mean_rejected_tokens: float | None = None
    chosen_longer: float | None = None  # fraction of pairs or lists; far from 0.5, length alone predicts the preference
    prompt_formats: dict[str, str] = field(default_factory=dict)  # by dataset: one of `asking.MEANINGS`
    problems: list[tuple[str, int, str, str]] = field(default_factory=list)  # dataset, record, problem and reason
    digest: str = ""  # of all that the examples are made of, in order
    token_digest: str = ""  # of the vocabulary and of the examples' token ids

    def count(self, name: str, prompt: Prompt, index: int) -> None:
        setattr(self, name, getattr(self, name) + 1)
        if prompt.rows:
            self.problems.append((prompt.dataset, prompt.rows[index], name.replace("_", " ").removesuffix("s"), ""))

    def describe(self, split: str) -> Iterator[str]:
        prompts = count(self.prompts, "prompt")
        what = f"{count(self.examples, 'example')} of {prompts}" if self.examples else f"{prompts} without responses"
        parts = [f"{split}: {what}"]
        parts += [f"{name.replace('_', ' ')}: {n:,}" for name in COUNTS if (n := getattr(self, name))]
        if self.tokenized < self.examples:
            parts.append(f"tokens are counted in a random sample of {self.tokenized:,}")
        if self.chosen_longer is not None:
            parts.append(f"chosen is longer in {self.chosen_longer:.0%}")
        yield "; ".join(parts)
        for name, warning in WARNINGS.items():
            n = getattr(self, name)
            of_texts = {"empty_responses": self.examples, "identical_pairs": self.examples}
            total = {"too_long": self.examples + n, **of_texts}.get(name, self.tokenized)
            if n and n >= WARNED_FROM * total:
                yield f"warning: in {n:,} of {count(total, 'example')} ({split}) {warning}"

    def find_leaks(self) -> Iterator[str]:
        found = (
            (self.prompts_like_train, self.prompts, "prompts equal a training prompt"),
            (self.answers_in_train, self.examples, "examples have an answer of the training split"),
        )
        leaks = [f"{n:,} of {total:,} held-out {what}" for n, total, what in found if n and n >= WARNED_FROM * total]
        if leaks:
            held_out, training = self.like_train[0].values()
            yield (
                f"{' and '.join(leaks)}, so held-out results are too good: {held_out!r} is held out, and {training!r} "
                f"trained on; put what belongs together into one split"
            )


class SplitCounter:
    """Counts all texts of a split, then the tokens of a small split or of a sample."""

    def __init__(self, encode: TextEncoder, *, trains_on: str = "pairs", **limits: int):
        self.encode, self.trains_on, self.limits = encode, trains_on, limits
        self.report = SplitReport()
        self._weights = array("d")
        self._seen: set[int] = set()  # hashes of examples of all datasets, which may have prompts in common
        self._late: set[ExampleId] = set()  # examples that truncation might leave without a scored token

    def count_texts(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts unchanged; raises InputError for a text that contains EOS."""
        report, tokenizer = self.report, self.encode.tokenizer
        for prompt in prompts:
            if not prompt.rendered and (prompt.examples or self.trains_on == "prompts"):
                # a prompt that is one text with its response may be a chat that the user has rendered
                used = {prompt.responses[i] for example in prompt.examples for i in example.values()}
                with naming(f"dataset {prompt.dataset}, prompt {prompt.text[-80:]!r}"):
                    refuse_eos([*used, *[prompt.text] * prompt.apart], tokenizer)
            if not (prompt.rendered or prompt.apart):
                texts = (prompt.text, *prompt.responses)
                report.control_tokens += sum(len(find_control(tokenizer).findall(text)) for text in texts)
            report.prompts += 1
            prompt_format = CHAT if prompt.rendered else HH if is_dialogue(prompt.text) else RAW
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
            if len(texts) == 2 and texts["chosen"] == texts["rejected"]:
                report.count("identical_pairs", prompt, index)
            if own in self._seen and len(texts) == 2:
                report.count("duplicated_pairs", prompt, index)
            if contrary in self._seen and contrary != own:
                report.count("contradictory_pairs" if len(texts) == 2 else "contradictory_labels", prompt, index)
            self._seen.add(own)

    def count_tokens(self, prompts: PromptTable) -> None:
        """Count tokens; raises InputError for a response that truncation leaves without a scored token."""
        report, tokenizer = self.report, self.encode.tokenizer
        # the digest has the vocabulary, as tokenizers may give different tokens one id
        vocabulary = (tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(repr(vocabulary).encode())
        scored = []  # tokens of each example's responses, by role
        # in an online run, a prompt without examples counts as one example
        counts = np.maximum(prompts.counts, 1) if self.trains_on == "prompts" else prompts.counts
        numbers = range(int(counts.sum()))
        if len(numbers) > COUNTED_WHOLE:
            numbers = {*random.Random(0).sample(numbers, SAMPLE_SIZE)}
        ids = ((prompt, index) for prompt, n in enumerate(counts.tolist()) for index in range(n))
        sample_ids = sorted({example for number, example in enumerate(ids) if number in numbers} | self._late)
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
                is_alike = example.roles == TRAINS_ON["pairs"] and example.responses[0] == example.responses[1]
                if is_alike and len({*prompt.texts(index).values()}) == 2:
                    report.count("pairs_cut_alike" if example.response_is_cut else "identical_pairs", prompt, index)
                longest = len(example.prompt) + max(map(len, example.responses), default=0)
                report.longest = max(report.longest, longest)
                scored.append(dict(zip(example.roles, example.n_scored, strict=True)))
        report.tokenized, report.token_digest = len(sample_ids), digest.hexdigest()
        chosen, rejected = ([n_scored[role] for n_scored in scored if role in n_scored] for role in CONTRARY)
        longer = [each["chosen"] > each["rejected"] for each in scored if each.keys() >= CONTRARY.keys()]
        report.mean_chosen_tokens, report.mean_rejected_tokens, report.chosen_longer = (
            fmean(values) if values else None for values in (chosen, rejected, longer)
        )
        if self._weights:
            weights = np.array(self._weights) / max(self._weights)  # at most 1, so their squares do not overflow
            report.effective_examples = float(weights.sum() ** 2 / (weights**2).sum())


@dataclass
class Preflight:
    train: SplitReport
    test: SplitReport
    notes: list[str]  # of the loaders
    updates: int
    examples_per_epoch: int  # in an online run every prompt is one example

    def longest(self, max_length: int) -> int:
        """Most tokens of a prompt with one response, or `max_length` if only a sample was tokenized."""
        splits = (self.train, self.test)
        return max(max_length if split.tokenized < split.examples else split.longest for split in splits)

    def describe(self, batch_size: int) -> list[str]:
        updates = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        return [*self.notes, *self.train.describe("train"), *self.test.describe("test"), updates]

    def write(self, path: Path) -> None:
        facts, keys = asdict(self), ("split", "dataset", "record", "problem", "reason")
        problems = [(split, *problem) for split in SPLITS for problem in facts[split].pop("problems")]
        write_lines(path.with_name(PROBLEMS), (dict(zip(keys, each, strict=True)) for each in problems))
        write_json(path, redact(facts))


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> int:
    """Count the batches of `iterate_examples`; `examples` is the number of examples in an epoch."""
    per_epoch = examples // batch_size
    limits = [] if n_epochs is None else [n_epochs * per_epoch]
    limits += [] if n_examples is None else [-(-n_examples // batch_size)]
    return min(limits) if per_epoch else 0


@dataclass
class TrainingData:
    tokenizer: Any
    encode: TextEncoder
    train: PromptTable
    test: PromptTable
    report: Preflight

    @property
    def identity(self) -> tuple[str, ...]:
        """Digests of examples and how they are truncated, and of their token ids."""
        train, test = self.report.train, self.report.test
        return train.digest, test.digest, train.token_digest, test.token_digest

    @classmethod
    def open(cls, table: Path, tokenizer: Any, plan: Plan) -> TrainingData:
        facts = read_facts(table)
        train, test = (SplitReport(**facts[split]) for split in SPLITS)
        per_epoch = train.prompts if plan.online else train.examples
        updates = count_updates(
            per_epoch, batch_size=plan.data.batch_size, n_epochs=plan.data.n_epochs, n_examples=plan.data.n_examples
        )
        return cls(
            tokenizer,
            TextEncoder(tokenizer, largest=facts["largest"]),
            PromptTable(table / "train.jsonl"),
            PromptTable(table / "test.jsonl"),
            Preflight(train, test, facts["notes"], updates, per_epoch),
        )


def load_data(plan: Plan, *, silent: bool = False) -> TrainingData:
    """Every process must call this: one of each machine finds or builds the table, and all of them map it."""
    if not silent:
        print(f"reading the data of {', '.join(plan.data.datasets)}", flush=True)
    tokenizer = load_tokenizer(
        plan.model.tokenizer,
        cache_dir=plan.run.cache_dir,
        trust_remote_code=plan.model.trust_remote_code,
        chat=plan.chat,
    )
    with tempfile.TemporaryDirectory() as folder:  # a mapped table stays readable after its files are removed
        scratch = Path(folder)
        table = once_per_machine(lambda: str(prepare_data(plan, tokenizer, scratch=scratch, silent=silent)))
        data = TrainingData.open(Path(table), tokenizer, plan)
        template = str(getattr(tokenizer, "chat_template", None))
        facts = {"data or tokenizer": repr(data.identity), "chat template": template}
        check_alike({**facts, "tokenizer": str(identify_tokenizer(tokenizer))})
    check_fits(plan, data)
    if not silent:
        warnings = (f"warning: {warning}" for warning in find_warnings(plan, data))
        print(*data.report.describe(plan.data.batch_size), *warnings, sep="\n", flush=True)
    return data


def prepare_data(plan: Plan, tokenizer: Any, *, scratch: Path, silent: bool = True) -> Path:
    """Find or build a run's table, in `local_dir`, or in `scratch` for a dry run or data that cannot be identified."""

    def build(directory: Path) -> Facts:
        facts = build_table(directory, plan, tokenizer, silent=silent)
        if make_key(plan, tokenizer) != key:
            raise InputError(f"the data of {', '.join(plan.data.datasets)} has changed while it was read: start again")
        return facts

    key = make_key(plan, tokenizer)
    folder = Path(plan.run.local_dir)
    is_kept = key is not None and not plan.run.dry_run
    try:
        return find_or_build(folder / FOLDER, key, build, scratch=None if is_kept else scratch)
    except BadRecordsError as error:
        raise explain_refusal(error, None if plan.run.dry_run else folder, plan.run.exp_name) from error
    finally:
        release_freed_memory()  # the loaders' texts were Python strings


def build_table(directory: Path, plan: Plan, tokenizer: Any, *, silent: bool = True) -> Facts:
    """Write both splits to a directory; return their counts, and the loaders' notes."""
    data = plan.data
    encode = TextEncoder(tokenizer)
    trains_on = find_kind(plan)
    limits = {"max_length": data.max_length, "max_prompt_length": data.max_prompt_length}
    counters = {split: SplitCounter(encode, trains_on=trains_on, **limits) for split in SPLITS}
    notes = []
    test_splits = []

    def load_train_splits() -> Iterator[tuple[str, Split]]:
        for name in data.datasets:
            loaded = load_splits(
                name,
                tokenizer,
                data.dataset_sources,
                silent=silent,
                cache_dir=plan.run.cache_dir,
                holdout=data.holdout,
                trains_on=trains_on,
                with_margins=plan.loss.needs_margins,
                unpair=data.unpair,
                list_pairs=data.list_pairs,
                chat=plan.chat.chat,
                bad_records=data.bad_records,
            )
            for split, counter in zip(loaded, counters.values(), strict=True):
                notes.extend(split.notes)
                counter.report.problems += [(name, number, BAD, reason) for number, reason in split.bad_records]
            test_splits.append((name, loaded[1]))
            yield name, loaded[0]

    tables = {}
    for split, splits in zip(SPLITS, (load_train_splits(), test_splits), strict=True):
        prompts = number_prompts(splits, keep_all=trains_on == "prompts")
        counter = counters[split]
        if data.truncation == "drop":
            prompts = _drop_long(prompts, counter, plan)
        elif data.truncation != "auto":
            prompts = (prompt._replace(truncation_mode=data.truncation) for prompt in prompts)
        path = directory / f"{split}.jsonl"
        report = counter.report
        report.digest = write_prompts(path, counter.count_texts(prompts))
        tables[split] = PromptTable(path)
        counter.count_tokens(tables[split])
        if not (report.prompts if plan.online else report.examples):
            too_long = f"{report.too_long:,} are too long: raise max_length, or set truncation=auto"
            why = too_long if report.too_long else "lists of equal scores give none: add other records"
            raise InputError(f"the {split} split of {', '.join(data.datasets)} has nothing to train on: {why}")
    facts = {split: asdict(counter.report) for split, counter in counters.items()}
    facts["test"] |= find_near_duplicates(tables["train"], tables["test"], tokenizer)
    return {**facts, "notes": notes, "largest": encode.largest}


def _drop_long(prompts: Iterable[Prompt], counter: SplitCounter, plan: Plan) -> Iterator[Prompt]:
    """Leave out examples that exceed `max_length`, and prompts that lose all examples."""
    remaining = iter(prompts)
    new_tokens = plan.online.max_new_tokens if plan.online else 0
    while batch := list(islice(remaining, TOKENIZED_AT_ONCE)):
        examples = [example for prompt in batch for example in list_examples(prompt) or [(prompt, 0)]]
        encoded = encode_examples(examples, counter.encode, max_length=sys.maxsize, max_prompt_length=sys.maxsize)
        kept: dict[int, list[int]] = {prompt.index_in_split: [] for prompt in batch}
        for (prompt, index), example in zip(examples, encoded, strict=True):
            if len(example.prompt) + max([new_tokens, *map(len, example.responses)]) > plan.data.max_length:
                counter.report.count("too_long", prompt, index)
            else:
                kept[prompt.index_in_split].append(index)
        for prompt in batch:
            indices = kept[prompt.index_in_split]
            if not indices:
                continue
            of_examples = {}
            for name in ("examples", "weights", "margins", "rows"):
                if values := getattr(prompt, name):
                    of_examples[name] = [values[i] for i in indices]
            yield prompt._replace(**of_examples)


def make_key(plan: Plan, tokenizer: Any) -> str | None:
    """Make a digest of all that a table depends on; None if a dataset or the tokenizer cannot be identified."""
    states = [identify_dataset(name, plan.run.cache_dir, plan.data.dataset_sources) for name in plan.data.datasets]
    tokenizer_digest = identify_tokenizer(tokenizer)
    if None in states or tokenizer_digest is None:
        return None
    settings = {**plan.data._asdict(), **plan.chat._asdict()}
    for name in NOT_IN_A_TABLE:
        del settings[name]
    made_from = [
        settings,
        states,
        tokenizer_digest,
        find_kind(plan),
        plan.loss.needs_margins,
        plan.online.max_new_tokens if plan.online else None,
        hash_files(PACKAGE_DIR.rglob("*.py")),
    ]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def check_fits(plan: Plan, data: TrainingData) -> None:
    report, datasets, batch_size = data.report, ", ".join(plan.data.datasets), plan.data.batch_size
    for split, counts in (("train", report.train), ("test", report.test)):
        place = f"the {split} split of {datasets}"
        if plan.loss.mismatched and counts.prompts < 2:
            raise InputError(
                f"{place} has 1 prompt, and loss={plan.loss.name} combines each prompt with a response to another: "
                f"give 2 or more in each split, such as by holdout=2"
            )
        if not plan.loss.takes_weights and counts.effective_examples is not None:
            raise InputError(
                f"{place} has a column weight, and loss={plan.loss.name} takes none: remove the column, or set loss=dpo"
            )
    train = report.train
    if 0 < train.examples <= train.identical_pairs + train.pairs_cut_alike and (plan.n_offline or not plan.online):
        raise InputError(
            f"in all {count(train.examples, 'pair')} of the train split of {datasets} both responses are the same, as "
            f"written, rendered or cut to max_length"
        )
    if report.examples_per_epoch < batch_size:
        n_parts = plan.data.gradient_accumulation_steps * plan.dims.data_size
        largest = report.examples_per_epoch // n_parts * n_parts  # a batch has equal parts
        raise InputError(
            f"the train split of {datasets} has {count(report.examples_per_epoch, 'example')}, too few for one batch "
            f"of batch_size={batch_size}: {f'set batch_size={largest} or ' if largest else ''}add data"
        )
    if plan.online and plan.n_offline and (n_without := int((data.train.counts == 0).sum())):
        raise InputError(
            f"online.mix_offline={plan.online.mix_offline} trains on the data's pairs, and {n_without:,} of "
            f"{count(len(data.train), 'training prompt')} have none: give data with pairs, or online.mix_offline=0"
        )


def list_first_examples(plan: Plan, data: TrainingData) -> list[dict[str, str]]:
    """The first examples as the model sees them: the prompt, and responses by role."""
    limits = {"max_length": plan.data.max_length, "max_prompt_length": plan.data.max_prompt_length}
    decode = data.encode.tokenizer.decode
    ids = [(i, 0) for i in range(min(N_SHOWN, len(data.train)))]
    shown = []
    for example in encode_examples(read_examples(data.train, ids), data.encode, **limits):
        texts = [
            decode(list(part), clean_up_tokenization_spaces=False) for part in (example.prompt, *example.responses)
        ]
        shown.append(redact(dict(zip(("prompt", *example.roles), texts, strict=True))))
    return shown


def find_warnings(plan: Plan, data: TrainingData) -> Iterator[str]:
    tokenizer, train = data.tokenizer, data.report.train
    texts = [name for name, prompt_format in train.prompt_formats.items() if prompt_format != CHAT]
    if texts and getattr(tokenizer, "chat_template", None):
        yield (
            f"the text of {' and '.join(texts)} is used without the tokenizer's chat template: for a chat model, give "
            f"messages, or set chat=always"
        )
    bos = tokenizer.bos_token
    adds_bos = bool(bos) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos and not data.train[0].text.startswith(bos):
        yield (
            f"this tokenizer would begin every text with {bos!r}, but training adds no special tokens, so prompts lack "
            f"it: write it into the prompts, as docs/faq.md says"
        )
    if bool(train.desirable) != bool(train.undesirable):
        yield "all labels of the train split are alike, and a loss of labels learns from both kinds: add the other"
    if {*plan.data.datasets} - BUILT_IN.keys():  # nobody can change what published splits share
        yield from data.report.test.find_leaks()
