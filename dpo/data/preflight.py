"""Finds or builds a run's data, counts it, and refuses unusable data."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from dpo.data.custom import DataOptions
from dpo.data.examples import encode_examples, list_examples
from dpo.data.loading import identify_dataset, load_splits
from dpo.data.prompt_forms import CHAT
from dpo.data.report import SplitCounter, SplitReport, encode_in_batches
from dpo.data.schema import BAD, SPLITS, WARNING_SHARE, Prompt, Split, write_lines
from dpo.data.table import PromptTable, is_whole, make_checksum, number_prompts, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import identify_tokenizer, load_tokenizer
from dpo.errors import InputError, RunError, WarningLine
from dpo.numbers import count
from dpo.redaction import redact
from dpo.settings.keys import PACKAGE_DIR
from dpo.settings.places import BUILT_IN
from dpo.settings.plan import Plan
from dpo.system.host import release_freed_memory
from dpo.system.plain_files import read_json, remove, write_json
from dpo.system.run_directory import PROBLEMS
from dpo.system.users_code import hash_files
from dpo.system.waiting import check_alike, once_per_machine

FOLDER = "dpo-examples"  # where tables are, in a directory of `local_dirs`
TEMPORARY = ".dpo-table-"  # prefix of the directory in which a table is built
N_SHOWN = 3  # examples in a dry run and in the report


def count_updates(examples: int, *, batch_size: int, n_epochs: int | None, n_examples: int | None) -> int:
    """Count the batches of `iterate_examples`; `examples`, the number in an epoch, fill at least one."""
    limits = []
    if n_epochs is not None:
        limits.append(n_epochs * (examples // batch_size))
    if n_examples is not None:
        limits.append(-(-n_examples // batch_size))  # rounded up, as batches are whole
    return min(limits)


@dataclass
class TrainingData:
    tokenizer: Any
    encode: TextEncoder
    train: PromptTable
    test: PromptTable
    reports: dict[str, SplitReport]  # by split
    facts: Mapping  # what `build_table` counted
    examples_per_epoch: int  # in an online run every prompt is one example
    updates: int  # in the whole run

    @property
    def identity(self) -> tuple[str, ...]:
        """Digests of the prompts and of the token ids of both splits, which are equal for runs with the same data."""
        train, test = self.reports.values()
        return train.digest, test.digest, train.token_digest, test.token_digest

    @classmethod
    def open(cls, table: Path, tokenizer: Any, plan: Plan) -> TrainingData:
        """Map a table, and read the counts that were taken when it was built."""
        facts = read_json(table / "facts.json")
        reports = {split: SplitReport(**facts[split]) for split in SPLITS}
        per_epoch = reports["train"].prompts if plan.online else reports["train"].examples
        updates = count_updates(
            per_epoch, batch_size=plan.data.batch_size, n_epochs=plan.data.n_epochs, n_examples=plan.data.n_examples
        )
        return cls(
            tokenizer,
            TextEncoder(tokenizer, largest_id=facts["largest"]),
            PromptTable(table / "train.jsonl"),
            PromptTable(table / "test.jsonl"),
            reports,
            facts,
            per_epoch,
            updates,
        )

    def longest(self, max_length: int) -> int:
        """Most tokens of a prompt with one response, or `max_length` if only a sample was tokenized."""
        reports = self.reports.values()
        return max(max_length if report.tokenized < report.examples else report.longest for report in reports)

    def write_counts(self, path: Path) -> None:
        """Write the counts and notes to `path`, and a line for each problem to a file beside it."""
        facts = {**self.facts, "updates": self.updates, "examples_per_epoch": self.examples_per_epoch}
        write_lines(path.with_name(PROBLEMS), facts.pop("problems"))
        write_json(path, redact(facts))


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
        table = once_per_machine(lambda: str(prepare_data(plan, tokenizer, scratch=Path(folder))))
        data = TrainingData.open(Path(table), tokenizer, plan)
        facts = {
            "data or tokenizer": repr(data.identity),
            "chat template": str(getattr(tokenizer, "chat_template", None)),
            "tokenizer": str(identify_tokenizer(tokenizer)),
        }
        check_alike(facts)
    check_fits(plan, data)
    if not silent:
        lines = [*data.facts["notes"], *map(WarningLine, data.facts["warnings"])]
        for split, report in data.reports.items():
            lines += report.describe(split)
        lines.append(f"{count(data.updates, 'update')} of {count(plan.data.batch_size, 'example')} will run")
        n_left_out = data.examples_per_epoch % plan.data.batch_size
        if n_left_out and plan.data.n_examples is None:
            lines.append(f"an epoch leaves out {count(n_left_out, 'example')}, too few for a batch")
        print(*lines, *map(WarningLine, find_warnings(plan, data)), sep="\n", flush=True)
    return data


def prepare_data(plan: Plan, tokenizer: Any, *, scratch: Path) -> Path:
    """Find a run's whole table, or build one, and return its directory.

    It is built in `local_dir`, or in `scratch` for a dry run, or for data that cannot be identified. Raises RunError if
    it cannot be written.
    """
    key = make_key(plan, tokenizer)
    folder = Path(plan.run.local_dir, FOLDER)
    for table in sorted(folder.glob(f"{key}-*")):  # none, if the key is None
        if is_whole(table):
            return table
    if key is None or plan.run.dry_run:
        folder = scratch
    try:
        folder.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
        try:
            write_json(directory / "facts.json", build_table(directory, plan, tokenizer))
            if make_key(plan, tokenizer) != key:
                datasets = ", ".join(plan.data.datasets)
                raise InputError(f"the data of {datasets} has changed while it was read: start again")
            name = directory.name.replace(TEMPORARY, f"{key}-{make_checksum(directory)}-")
            return directory.rename(folder / name)
        finally:
            remove(directory)  # does nothing if the directory was renamed
            release_freed_memory()  # the loaders' texts were Python strings
    except OSError as error:
        raise RunError(
            f"the texts of the data cannot be written to {folder} ({error}): free some space, or name another disk "
            f"first in local_dirs"
        ) from error


def build_table(directory: Path, plan: Plan, tokenizer: Any) -> dict[str, Any]:
    """Write both splits to a directory; return their counts, and the loaders' notes."""
    datasets = plan.data.datasets
    options = DataOptions.of(plan)
    encode = TextEncoder(tokenizer)
    facts: dict[str, Any] = {"notes": [], "warnings": [], "problems": []}
    test_splits = []

    def load_train_splits() -> Iterator[tuple[str, Split]]:
        """Load one dataset after another, so that the texts of few are in memory; keep the test splits."""
        for name in datasets:
            sources = plan.data.dataset_sources
            loaded = load_splits(name, tokenizer, sources, cache_dir=plan.run.cache_dir, **options._asdict())
            test_splits.append((name, loaded[1]))
            yield name, loaded[0]

    training = None  # digests of the training texts
    # once the train table is written, `test_splits` is complete
    for split, splits in zip(SPLITS, (load_train_splits(), test_splits), strict=True):
        counter = SplitCounter(encode, options, training)
        report = counter.report
        numbered = number_prompts(_take_notes(splits, counter, facts), keep_all=options.trains_on == "prompts")
        if options.truncation == "drop":
            numbered = _drop_long(numbered, counter)
        elif options.truncation != "auto":
            numbered = (prompt._replace(truncation_mode=options.truncation) for prompt in numbered)
        path = directory / f"{split}.jsonl"
        report.digest = write_prompts(path, counter.count_texts(numbered))
        counter.count_tokens(PromptTable(path))
        training = counter.digests
        facts[split] = asdict(report)
        facts["problems"] += ({"split": split, **problem} for problem in counter.problems)
    return {**facts, "largest": encode.largest_id}


def _take_notes(splits: Iterable[tuple[str, Split]], counter: SplitCounter, facts: dict) -> Iterator[tuple[str, Split]]:
    """Yield datasets' splits, with their bad records added to the counter's problems, and their notes to `facts`."""
    for name, prompts in splits:
        for number, reason in prompts.bad_records:
            counter.add_problem(name, number, BAD, reason)
        for note in prompts.notes:
            if isinstance(note, WarningLine):
                facts["warnings"].append(note.message)
            else:
                facts["notes"].append(note)
        yield name, prompts


def _drop_long(prompts: Iterable[Prompt], counter: SplitCounter) -> Iterator[Prompt]:
    """Yield the prompts without the examples that exceed `max_length`; prompts that lose all examples are left out.

    An example is as long as its prompt with the longest response, or with `new_tokens` if these are more. The prompts
    of an online run may have no examples; such a prompt counts as one. Prompts are numbered anew.
    """
    options = counter.options
    examples = chain.from_iterable(list_examples(prompt) or [(prompt, 0)] for prompt in prompts)
    encoded = encode_in_batches(examples, counter.encode, max_length=sys.maxsize, max_prompt_length=sys.maxsize)
    n_kept = 0  # prompts so far
    for prompt, group in groupby(encoded, key=lambda each: each[0][0]):
        kept = []  # indices of the prompt's examples
        for (_, index), example in group:
            if len(example.prompt) + max([options.new_tokens, *map(len, example.responses)]) > options.max_length:
                counter.count("too_long", prompt, index)
            else:
                kept.append(index)
        if kept:
            fields = {}
            for name in ("examples", "weights", "margins", "rows"):
                if values := getattr(prompt, name):
                    fields[name] = [values[i] for i in kept]
            yield prompt._replace(index_in_split=n_kept, **fields)
            n_kept += 1


def make_key(plan: Plan, tokenizer: Any) -> str | None:
    """Make a digest of all that a table depends on; None if a dataset or the tokenizer cannot be identified."""
    sources = plan.data.dataset_sources
    states = [identify_dataset(name, plan.run.cache_dir, sources) for name in plan.data.datasets]
    states.append(identify_tokenizer(tokenizer))
    if None in states:
        return None
    code = hash_files(PACKAGE_DIR.rglob("*.py"))  # another version of the code may read the same data differently
    made_from = [plan.data.datasets, DataOptions.of(plan), states, code]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def check_fits(plan: Plan, data: TrainingData) -> None:
    """Raise InputError for data that this run cannot train on."""
    loss, batch_size, datasets = plan.loss, plan.data.batch_size, ", ".join(plan.data.datasets)
    for split, report in data.reports.items():
        place = f"the {split} split of {datasets}"
        if not (report.prompts if plan.online else report.examples):
            why = "lists of equal scores give none: add other records"
            if report.too_long:
                why = f"{report.too_long:,} are too long: raise max_length, or set truncation=auto"
            raise InputError(f"{place} has nothing to train on: {why}")
        if loss.mismatched and report.prompts < 2:
            raise InputError(
                f"{place} has 1 prompt, and loss={loss.name} combines each prompt with a response to another: set "
                f"holdout=2, or add prompts"
            )
        if not loss.takes_weights and report.effective_examples is not None:
            raise InputError(
                f"{place} has a column weight, and loss={loss.name} takes none: remove it, or set loss=dpo"
            )
    place = f"the train split of {datasets}"
    train = data.reports["train"]
    if 0 < train.examples <= train.identical_pairs + train.pairs_cut_alike and (plan.n_offline or not plan.online):
        raise InputError(
            f"in all pairs of {place} both responses are the same, as written, rendered or cut to max_length"
        )
    if data.examples_per_epoch < batch_size:
        raise InputError(
            f"{place} has {data.examples_per_epoch} examples, too few for one batch of batch_size={batch_size}: set "
            f"batch_size={data.examples_per_epoch} or add data"
        )
    if plan.online and plan.n_offline and (n_without := int((data.train.counts == 0).sum())):
        raise InputError(
            f"online.mix_offline={plan.online.mix_offline} trains on the data's pairs, and {n_without:,} of "
            f"{len(data.train):,} prompts of {place} have none: use data with pairs, or set online.mix_offline=0"
        )


def list_first_examples(plan: Plan, data: TrainingData) -> list[dict[str, str]]:
    """Decode the first example of each of the first training prompts as the model sees it; return its texts by role."""
    limits = {"max_length": plan.data.max_length, "max_prompt_length": plan.data.max_prompt_length}
    first = [(prompt, 0) for prompt in data.train[:N_SHOWN]]
    shown = []
    for example in encode_examples(first, data.encode, **limits):
        texts = {}
        for role, part in zip(("prompt", *example.roles), (example.prompt, *example.responses), strict=True):
            texts[role] = data.tokenizer.decode(list(part), clean_up_tokenization_spaces=False)
        shown.append(redact(texts))
    return shown


def find_warnings(plan: Plan, data: TrainingData) -> Iterator[str]:
    """Yield warnings about data that can be trained on, but perhaps not as the user means it."""
    tokenizer = data.tokenizer
    train, test = data.reports.values()
    warmup = plan.training.warmup_steps
    if warmup and warmup >= data.updates:
        yield f"warmup_steps={warmup} takes all updates, and lr is never reached: set it to {data.updates // 10}"
    unrendered = [name for name, prompt_format in train.prompt_formats.items() if prompt_format != CHAT]
    if unrendered and getattr(tokenizer, "chat_template", None):
        yield (
            f"the text of {' and '.join(unrendered)} is used without the tokenizer's chat template: for a chat model, "
            f"use messages, or set chat=always"
        )
    bos = tokenizer.bos_token
    adds_bos = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos and not data.train[0].text.startswith(bos):
        yield (
            f"this tokenizer would begin every text with {bos!r}, but training adds no special tokens: write it into "
            f"the prompts, as docs/faq.md says"
        )
    if bool(train.desirable) != bool(train.undesirable):
        yield "all labels of the train split are alike, and a loss of labels learns from both kinds: add the other"
    if {*plan.data.datasets} <= BUILT_IN.keys():
        return  # nobody can change what published splits share
    for n, total, what in (
        (test.prompts_like_train, test.prompts, "prompts equal a training prompt"),
        (test.answers_in_train, test.examples, "examples have an answer of the training split"),
    ):
        if n and n >= WARNING_SHARE * total:
            yield (
                f"{n:,} of {total:,} held-out {what}, so held-out results look too good: move duplicates into one split"
            )
