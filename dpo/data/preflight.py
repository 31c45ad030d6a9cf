"""Finds or builds a run's data, counts it, and refuses unusable data."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dpo.data.custom import DataOptions
from dpo.data.examples import encode_examples, list_examples, read_examples
from dpo.data.loading import identify_dataset, load_splits
from dpo.data.prompt_forms import CHAT
from dpo.data.report import TOKENIZED_AT_ONCE, SplitCounter, SplitReport
from dpo.data.schema import BAD, SPLITS, BadRecordsError, Prompt, Split, explain_refusal, write_lines
from dpo.data.table import FOLDER, Facts, PromptTable, find_or_build, number_prompts, read_facts, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import identify_tokenizer, load_tokenizer
from dpo.errors import InputError, WarningLine
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

N_SHOWN = 3  # examples in a dry run and in the report


@dataclass
class Preflight:
    """Counts and notes on a run's data, which are printed before training and written to preflight.json."""

    train: SplitReport
    test: SplitReport
    notes: list[str]  # printed sentences about what was noticed when the datasets were loaded
    updates: int  # in the whole run
    examples_per_epoch: int  # in an online run every prompt is one example

    def longest(self, max_length: int) -> int:
        """Most tokens of a prompt with one response, or `max_length` if only a sample was tokenized."""
        splits = (self.train, self.test)
        return max(max_length if split.tokenized < split.examples else split.longest for split in splits)

    def describe(self, batch_size: int) -> list[str]:
        updates = f"{count(self.updates, 'update')} of {count(batch_size, 'example')} will run"
        return [*self.notes, *self.train.describe("train"), *self.test.describe("test"), updates]

    def write(self, path: Path) -> None:
        """Write the counts to `path`, and a line for each problem to a file beside it."""
        facts = asdict(self)
        columns = ("split", "dataset", "record", "problem", "reason")
        problems = [(split, *problem) for split in SPLITS for problem in facts[split].pop("problems")]
        write_lines(path.with_name(PROBLEMS), (dict(zip(columns, problem, strict=True)) for problem in problems))
        write_json(path, redact(facts))


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> int:
    """Count the batches of `iterate_examples`; `examples` is the number of examples in an epoch."""
    per_epoch = examples // batch_size
    limits = [] if n_epochs is None else [n_epochs * per_epoch]
    limits += [] if n_examples is None else [-(-n_examples // batch_size)]  # rounded up, as batches are whole
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
        """Digests of the prompts and of the token ids of both splits, which are equal for runs with the same data."""
        train, test = self.report.train, self.report.test
        return train.digest, test.digest, train.token_digest, test.token_digest

    @classmethod
    def open(cls, table: Path, tokenizer: Any, plan: Plan) -> TrainingData:
        """Map a table, and read the counts that were taken when it was built."""
        facts = read_facts(table)
        notes = [*facts["notes"], *map(WarningLine, facts["warnings"])]
        train, test = (SplitReport(**facts[split]) for split in SPLITS)
        per_epoch = train.prompts if plan.online else train.examples
        updates = count_updates(
            per_epoch, batch_size=plan.data.batch_size, n_epochs=plan.data.n_epochs, n_examples=plan.data.n_examples
        )
        return cls(
            tokenizer,
            TextEncoder(tokenizer, largest_id=facts["largest"]),
            PromptTable(table / "train.jsonl"),
            PromptTable(table / "test.jsonl"),
            Preflight(train, test, notes, updates, per_epoch),
        )


def load_data(plan: Plan, *, silent: bool = False) -> TrainingData:
    """Load a run's data. All processes must call this: one per machine finds or builds the table, and all map it."""
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
        warnings = map(WarningLine, find_warnings(plan, data))
        print(*data.report.describe(plan.data.batch_size), *warnings, sep="\n", flush=True)
    return data


def prepare_data(plan: Plan, tokenizer: Any, *, scratch: Path, silent: bool = True) -> Path:
    """Find a run's table, or build it, and return its directory.

    It is built in `local_dir`, or in `scratch` for a dry run, or for data that cannot be identified.
    """

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
    """Write both splits to a directory; return their counts, and the loaders' notes.

    Raises InputError for a split with nothing to train on.
    """
    datasets = plan.data.datasets
    options = DataOptions.of(plan)
    encode = TextEncoder(tokenizer)
    limits = {"max_length": options.max_length, "max_prompt_length": options.max_prompt_length}
    train_counter = SplitCounter(encode, trains_on=options.trains_on, **limits)
    test_counter = SplitCounter(encode, trains_on=options.trains_on, training=train_counter.digests, **limits)
    counters = {"train": train_counter, "test": test_counter}
    notes = []
    test_splits = []

    def load_train_splits() -> Iterator[tuple[str, Split]]:
        """Load one dataset after another, and yield its train split; keep its test split, notes and problems."""
        for name in datasets:
            loaded = load_splits(
                name,
                tokenizer,
                plan.data.dataset_sources,
                silent=silent,
                cache_dir=plan.run.cache_dir,
                **options._asdict(),
            )
            for split, counter in zip(loaded, counters.values(), strict=True):
                notes.extend(split.notes)
                counter.report.problems += [(name, number, BAD, reason) for number, reason in split.bad_records]
            test_splits.append((name, loaded[1]))
            yield name, loaded[0]

    # once the train table is written, all datasets are loaded, and `test_splits` is complete
    for split, splits in zip(SPLITS, (load_train_splits(), test_splits), strict=True):
        prompts = number_prompts(splits, keep_all=options.trains_on == "prompts")
        counter = counters[split]
        if options.truncation == "drop":
            prompts = _drop_long(prompts, counter, options)
        elif options.truncation != "auto":
            prompts = (prompt._replace(truncation_mode=options.truncation) for prompt in prompts)
        path = directory / f"{split}.jsonl"
        report = counter.report
        report.digest = write_prompts(path, counter.count_texts(prompts))
        counter.count_tokens(PromptTable(path))
        if not (report.prompts if plan.online else report.examples):
            too_long = f"{report.too_long:,} are too long: raise max_length, or set truncation=auto"
            why = too_long if report.too_long else "lists of equal scores give none: add other records"
            raise InputError(f"the {split} split of {', '.join(datasets)} has nothing to train on: {why}")
    facts = {split: asdict(counter.report) for split, counter in counters.items()}
    warnings = [note.message for note in notes if isinstance(note, WarningLine)]
    plain = [note for note in notes if not isinstance(note, WarningLine)]
    return {**facts, "notes": plain, "warnings": warnings, "largest": encode.largest_id}


def _drop_long(prompts: Iterable[Prompt], counter: SplitCounter, options: DataOptions) -> Iterator[Prompt]:
    """Yield the prompts without the examples that exceed `max_length`; prompts that lose all examples are left out.

    An example is as long as its prompt with the longest response, or with `new_tokens` if these are more. The prompts
    of an online run may have no examples; such a prompt counts as one. Prompts are numbered anew.
    """
    remaining = iter(prompts)
    n_kept = 0  # prompts so far
    while batch := list(islice(remaining, TOKENIZED_AT_ONCE)):
        examples = [example for prompt in batch for example in list_examples(prompt) or [(prompt, 0)]]
        encoded = encode_examples(examples, counter.encode, max_length=sys.maxsize, max_prompt_length=sys.maxsize)
        # by prompt, the indices of the examples that are kept
        kept: dict[int, list[int]] = {prompt.index_in_split: [] for prompt in batch}
        for (prompt, index), example in zip(examples, encoded, strict=True):
            if len(example.prompt) + max([options.new_tokens, *map(len, example.responses)]) > options.max_length:
                counter.report.count("too_long", prompt, index)
            else:
                kept[prompt.index_in_split].append(index)
        for prompt in batch:
            indices = kept[prompt.index_in_split]
            if not indices:
                continue
            fields = {}
            for name in ("examples", "weights", "margins", "rows"):
                if values := getattr(prompt, name):
                    fields[name] = [values[i] for i in indices]
            yield prompt._replace(index_in_split=n_kept, **fields)
            n_kept += 1


def make_key(plan: Plan, tokenizer: Any) -> str | None:
    """Make a digest of all that a table depends on; None if a dataset or the tokenizer cannot be identified."""
    states = [identify_dataset(name, plan.run.cache_dir, plan.data.dataset_sources) for name in plan.data.datasets]
    tokenizer_digest = identify_tokenizer(tokenizer)
    if None in states or tokenizer_digest is None:
        return None
    made_from = [
        plan.data.datasets,
        DataOptions.of(plan),
        states,
        tokenizer_digest,
        hash_files(PACKAGE_DIR.rglob("*.py")),  # another version of the code may read the same data differently
    ]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def check_fits(plan: Plan, data: TrainingData) -> None:
    """Raise InputError for data that this run cannot train on."""
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
        raise InputError(
            f"the train split of {datasets} has {count(report.examples_per_epoch, 'example')}, too few for one batch "
            f"of batch_size={batch_size}: set batch_size={report.examples_per_epoch} or add data"
        )
    if plan.online and plan.n_offline and (n_without := int((data.train.counts == 0).sum())):
        raise InputError(
            f"online.mix_offline={plan.online.mix_offline} trains on the data's pairs, and {n_without:,} of "
            f"{count(len(data.train), 'training prompt')} have none: use data with pairs, or set online.mix_offline=0"
        )


def list_first_examples(plan: Plan, data: TrainingData) -> list[dict[str, str]]:
    """Decode the first example of each of the first training prompts as the model sees it; return its texts by role."""
    limits = {"max_length": plan.data.max_length, "max_prompt_length": plan.data.max_prompt_length}
    decode = data.encode.tokenizer.decode
    ids = [(prompt_index, 0) for prompt_index in range(min(N_SHOWN, len(data.train)))]
    shown = []
    for example in encode_examples(read_examples(data.train, ids), data.encode, **limits):
        texts = [
            decode(list(part), clean_up_tokenization_spaces=False) for part in (example.prompt, *example.responses)
        ]
        shown.append(redact(dict(zip(("prompt", *example.roles), texts, strict=True))))
    return shown


def find_warnings(plan: Plan, data: TrainingData) -> Iterator[str]:
    """Yield warnings about data that can be trained on, but perhaps not as the user means it."""
    tokenizer, train = data.tokenizer, data.report.train
    unrendered = [name for name, prompt_format in train.prompt_formats.items() if prompt_format != CHAT]
    if unrendered and getattr(tokenizer, "chat_template", None):
        yield (
            f"the text of {' and '.join(unrendered)} is used without the tokenizer's chat template: for a chat model, "
            f"use messages, or set chat=always"
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
