"""The preflight: finds or builds a run's data, and refuses unusable data."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dpo.data.asking import CHAT, DATASETS_IN_HH_FORMAT
from dpo.data.counts import Preflight, SplitCounter, SplitReport, count_updates
from dpo.data.examples import TextExample, list_examples, tokenize
from dpo.data.near_duplicates import find_near_duplicates
from dpo.data.problems import BadRecordsError, explain_refusal
from dpo.data.schema import PreferenceData
from dpo.data.table import (
    FOLDER,
    ROWS_PER_BATCH,
    SPLITS,
    Prompt,
    PromptTable,
    explaining_table,
    find_or_build,
    iterate_prompts,
    read_facts,
    write_prompts,
)
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import DATE_MACRO, find_bos_warnings, identify_tokenizer, load_tokenizer
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.plan import DataPlan, Plan
from dpo.system.host import release_freed_memory
from dpo.system.waiting import check_alike, once_per_machine

GetDataset = Callable[..., PreferenceData]  # loads a dataset by name: `preference_datasets.get_dataset`
Identify = Callable[..., Any]  # `preference_datasets.identify_dataset`


@dataclass
class TrainingData:
    """A trainer's data: prompts of both splits, their tokenizer and counts."""

    tokenizer: Any
    encode: TextEncoder
    train: PromptTable
    test: PromptTable
    report: Preflight
    digest: str = ""  # of the examples of `train`, in order
    test_digest: str = ""

    @property
    def n_examples(self) -> int:
        """Number of examples in both splits."""
        return int(self.train.counts.sum() + self.test.counts.sum())

    @property
    def identity(self) -> tuple[str, ...]:
        """Digests of examples and how they are truncated, and of token ids before truncation."""
        return self.digest, self.test_digest, self.report.train.token_digest, self.report.test.token_digest

    @classmethod
    def open(
        cls, table: Path, facts: Mapping[str, Any], tokenizer: Any, plan: DataPlan, *, online: bool
    ) -> TrainingData:
        """Open a table.

        In an `online` run each prompt counts as one training example.
        """
        reports = {split: SplitReport(**facts["reports"][split]) for split in SPLITS}
        examples_per_epoch = reports["train"].prompts if online else reports["train"].examples
        updates, dropped_examples = count_updates(
            examples_per_epoch, batch_size=plan.batch_size, n_epochs=plan.n_epochs, n_examples=plan.n_examples
        )
        return cls(
            tokenizer=tokenizer,
            encode=TextEncoder(tokenizer, largest=facts["largest"]),
            train=PromptTable(table / "train.arrow"),
            test=PromptTable(table / "test.arrow"),
            report=Preflight(
                **reports,
                updates=updates,
                dropped_examples=dropped_examples,
                examples_per_epoch=examples_per_epoch,
            ),
            digest=facts["digests"]["train"],
            test_digest=facts["digests"]["test"],
        )


class DatasetOptions(NamedTuple):
    """The settings that the content of a table depends on."""

    names: list[str]
    dataset_sources: Mapping[str, Any]
    trains_on: str
    online: bool  # whether pairs are drawn, so that prompts suffice
    max_length: int
    max_prompt_length: int
    unpair: bool = False
    list_pairs: str = "all"
    with_margins: bool = False
    chat: str = "auto"
    truncation: str = "auto"
    new_tokens: int = 0  # that an online run draws
    bad_records: str = "refuse"


def build_table(
    directory: Path,
    options: DatasetOptions,
    tokenizer: Any,
    get_dataset: GetDataset,
    *,
    cache_dir: str | None,
    silent: bool,
) -> dict[str, Any]:
    """Write both splits to a directory; return what was counted meanwhile.

    Raises InputError for unusable data.
    """
    encode, notes, reports, digests = TextEncoder(tokenizer), [], {}, {}
    held_out: dict[str, PreferenceData] = {}
    trains_on = "prompts" if options.online else options.trains_on
    for split in SPLITS:
        counter, path = SplitCounter(encode, trains_on=trains_on), directory / f"{split}.arrow"
        prompts = iterate_prompts(
            get_dataset,
            options.names,
            split,
            trains_on=trains_on,
            unpair=options.unpair,
            list_pairs=options.list_pairs,
            with_margins=options.with_margins,
            notes=notes,
            left_out=counter.bad_records,
            held_out=held_out,
            # the following are options of `get_dataset`
            silent=silent,
            dataset_sources=options.dataset_sources,
            cache_dir=cache_dir,
            tokenizer=tokenizer,
            chat=options.chat,
            **({} if options.bad_records == "refuse" else {"bad_records": options.bad_records}),
        )
        if options.truncation == "drop":
            prompts = _drop_long(prompts, counter, options.max_length, options.new_tokens)
        elif options.truncation != "auto":
            mode: Any = options.truncation
            prompts = (prompt._replace(truncation_mode=mode) for prompt in prompts)
        write_prompts(path, counter.watch(prompts), trains_on=trains_on)
        report = counter.count_tokens(
            PromptTable(path), max_length=options.max_length, max_prompt_length=options.max_prompt_length
        )
        reports[split] = asdict(report)
        if split == "test":
            train = PromptTable(directory / "train.arrow")
            reports[split] |= find_near_duplicates(train, PromptTable(path), tokenizer)
        digests[split] = counter.digest.hexdigest()[:32]
        counted = "prompts" if options.online else "examples"
        if not reports[split][counted]:
            n = reports[split]["too_long"]
            too_long = f" but {n:,} that are too long: raise max_length, or choose truncation=auto" if n else ""
            raise InputError(f"the {split} split of {', '.join(options.names)} has no {counted}{too_long}")
    return {"reports": reports, "digests": digests, "largest": encode.largest, "notes": notes}


def _drop_long(prompts: Iterable[Prompt], counter: SplitCounter, max_length: int, new_tokens: int) -> Iterator[Prompt]:
    """Leave out examples that exceed `max_length`, and prompts that lose all examples."""
    remaining = iter(prompts)
    while batch := list(islice(remaining, ROWS_PER_BATCH)):
        examples = [each for prompt in batch for each in list_examples(prompt) or [TextExample(prompt, 0, {}, [])]]
        kept: dict[int, list[int]] = {prompt.index_in_split: [] for prompt in batch}
        for (prompt, index, *_), tokens in zip(examples, tokenize(examples, counter.encode), strict=True):
            longest = max([new_tokens, *(sum(map(len, pieces)) + 1 for pieces in tokens.responses)])
            is_long = len(tokens.prompt) + longest > max_length
            counter.count_example("too_long", is_long, prompt, index)
            if not is_long:
                kept[prompt.index_in_split].append(index)
        for prompt in batch:
            indices = kept[prompt.index_in_split]
            if prompt.examples and indices:
                by_example = {name: getattr(prompt, name) for name in ("examples", "weights", "margins", "rows")}
                chosen = {name: all_ and [all_[i] for i in indices] for name, all_ in by_example.items()}
                prompt = prompt._replace(**chosen)
            if indices:
                yield prompt


def list_code(loader: Path) -> list[Path]:
    """List a loader's file and all modules of ours that loaders import."""
    package = Path(__file__).parents[1]
    folders = [package, *(package / name for name in ("data", "losses", "settings", "system"))]
    return [loader, *(file for folder in folders for file in sorted(folder.glob("*.py")))]


def make_key(
    options: DatasetOptions, tokenizer: Any, get_dataset: GetDataset, identify: Identify, cache_dir: str | None
) -> str | None:
    """Make the name of a table, a digest of its inputs.

    None if a dataset, the tokenizer or the loader cannot be identified.
    """
    dataset_states = [identify(name, cache_dir, options.dataset_sources) for name in options.names]
    tokenizer_digest = identify_tokenizer(tokenizer)
    loader = inspect.unwrap(get_dataset)
    if None in dataset_states or tokenizer_digest is None or not inspect.isfunction(loader):
        return None
    code_files = list_code(Path(loader.__code__.co_filename))
    code_digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in code_files]
    # the states of the datasets say more than their sources, which are left out
    made_from = [options._replace(dataset_sources={}), dataset_states, tokenizer_digest, code_digests]
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
) -> tuple[Path, dict[str, Any]]:
    """Find or build the table; return its directory and facts.

    The table is in `folder/dpo-examples`, but a new table is put into `scratch`, if given. Prints the loaders' notes
    unless `silent`. Raises InputError for data that is unusable or too small; the batch size that the message suggests
    is a multiple of `batch_parts`.
    """
    find_key = partial(make_key, options, tokenizer, get_dataset, identify, cache_dir)
    key = find_key()

    def build(directory: Path) -> tuple[dict[str, Any], bool]:
        facts = build_table(directory, options, tokenizer, get_dataset, cache_dir=cache_dir, silent=silent)
        key_is_valid = find_key() == key  # the key changes if a file was changed while it was read
        return facts, key_is_valid

    table, is_new = find_or_build(Path(folder) / FOLDER, key, build, scratch=scratch)
    release_freed_memory()  # the loaders' texts were Python strings
    with explaining_table(table):
        facts = read_facts(table)["facts"]
    if not (silent or is_new):  # the loaders of a new table have printed the notes already
        print("".join(f"{note}\n" for note in facts["notes"]), end="")
    train_report = facts["reports"]["train"]
    n_examples = train_report["prompts"] if options.online else train_report["examples"]
    if n_examples < batch_size:
        fix = "add data"
        if largest := n_examples - n_examples % batch_parts:
            fix = f"set batch_size={largest} or add data"
        elif batch_parts > 1:
            fix += f"; the batch size must be a multiple of gradient_accumulation_steps * processes = {batch_parts}"
        raise InputError(
            f"the train split of {', '.join(options.names)} has {count(n_examples, 'example')}, too few for one batch "
            f"of batch_size={batch_size}: {fix}"
        )
    return table, facts


def load_data(plan: Plan, get_dataset: GetDataset, identify: Identify, *, silent: bool = False) -> TrainingData:
    """Load the data of a run; every process must call this.

    One process of each machine finds or builds the table, and all of them map it.
    """
    if not silent:
        print(f"reading the data of {', '.join(plan.data.datasets)}", flush=True)
    cache_dir = plan.run.cache_dir
    tokenizer = load_tokenizer(
        plan.model.tokenizer,
        cache_dir=cache_dir,
        trust_remote_code=plan.model.trust_remote_code,
        chat=plan.chat,
    )
    if (
        not silent
        and plan.chat.template_date != date.today().isoformat()
        and DATE_MACRO in str(tokenizer.chat_template)
    ):
        print(f"the chat template writes the date {plan.chat.template_date}, with which the run began")
    options = DatasetOptions(
        plan.data.datasets,
        plan.data.dataset_sources,
        trains_on=plan.loss.trains_on,
        online=plan.online is not None,
        max_length=plan.data.max_length,
        max_prompt_length=plan.data.max_prompt_length,
        unpair=plan.data.unpair,
        list_pairs=plan.data.list_pairs,
        with_margins=plan.loss.needs_margins,
        chat=plan.data.chat,
        truncation=plan.data.truncation,
        new_tokens=plan.online.max_new_tokens if plan.online else 0,
        bad_records=plan.data.bad_records,
    )
    with tempfile.TemporaryDirectory() as scratch:  # a mapped table stays readable after its files are removed

        def prepare() -> str:
            try:
                table, facts = prepare_data(
                    options,
                    tokenizer,
                    get_dataset=get_dataset,
                    identify=identify,
                    batch_size=plan.data.batch_size,
                    batch_parts=plan.data.gradient_accumulation_steps * plan.dims.data_size,
                    cache_dir=cache_dir,
                    folder=plan.run.local_dir,
                    scratch=Path(scratch) if plan.run.dry_run else None,  # a dry run leaves nothing behind
                    silent=silent,
                )
            except BadRecordsError as error:
                folder = None if plan.run.dry_run else Path(plan.run.local_dir)
                raise explain_refusal(error, folder, plan.run.exp_name) from error
            _check_loss_fits(plan, facts["reports"])
            return json.dumps([str(table), facts])

        table, facts = json.loads(once_per_machine(prepare))
        data = TrainingData.open(Path(table), facts, tokenizer, plan.data, online=options.online)
    names = [f"{kind}{split} data" for kind in ("", "token ids of the ") for split in ("training", "test")]
    template = str(getattr(tokenizer, "chat_template", None))
    check_alike({**dict(zip(names, data.identity, strict=True)), "chat template": template})
    if plan.online and plan.n_offline and (n_without := int((data.train.counts == 0).sum())):
        raise InputError(
            f"online.mix_offline={plan.online.mix_offline} trains on the data's pairs, and {n_without:,} of "
            f"{count(len(data.train), 'training prompt')} have none: give data with pairs, or online.mix_offline=0"
        )
    if not silent:
        report, own_leaks = data.report, []
        if not DATASETS_IN_HH_FORMAT.issuperset(plan.data.datasets):  # nobody can change what published splits share
            own_leaks = report.test.find_leaks()
        warnings = [
            *find_chat_warnings(tokenizer, report.train.prompt_formats),
            *find_bos_warnings(tokenizer, data.train[0].text),
            *find_weight_warnings(report.train, plan.loss.options),
            *own_leaks,
        ]
        print(report.describe(plan.data.batch_size), *(f"warning: {text}" for text in warnings), sep="\n", flush=True)
    return data


def _check_loss_fits(plan: Plan, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the loss can train on these data."""
    for split, report in reports.items():
        place = f"the {split} split of {', '.join(plan.data.datasets)}"
        if plan.loss.mismatched and report["prompts"] < 2:
            raise InputError(
                f"{place} has 1 prompt, and loss={plan.loss.name} combines each prompt with a response to another "
                f"prompt: give 2 prompts or more in each split; if the data is one file, a tenth of its prompts is the "
                f"test split, so the file needs 20"
            )
        if not plan.loss.takes_weights and report["effective_examples"] is not None:
            raise InputError(
                f"{place} has a column weight, and loss={plan.loss.name} compares the examples of a batch, so it takes "
                f"no weights: remove the column, or choose another loss, such as loss=dpo"
            )


def find_weight_warnings(report: SplitReport, options: Mapping[str, Any]) -> list[str]:
    """Return a warning about labels of one kind, or unbalanced weights.

    All desirable examples together should weigh 1 to 4/3 times as much as all undesirable examples (arXiv 2402.01306,
    section 4). In data with weights, an example counts as its weight.
    """
    desirable, undesirable = (options.get(f"{label}_weight", 1) for label in ("desirable", "undesirable"))
    if report.desirable is None or not (desirable and undesirable):  # there are no labels, or one kind has weight 0
        return []
    if not (report.desirable and report.undesirable):
        missing = "undesirable" if report.desirable else "desirable"
        return [f"the train split has no {missing} response, and a loss of labels learns from both kinds: add some"]
    sums = (report.desirable_weights or report.desirable, report.undesirable_weights or report.undesirable)
    ratio = desirable * sums[0] / (undesirable * sums[1])
    if "desirable_weight" not in options or 0.99 <= ratio <= 1.01 * 4 / 3:  # the advised weights are rounded
        return []
    return [
        f"the desirable responses weigh {ratio:.3g} times as much as the undesirable responses, and the paper of KTO "
        f"advises 1 to 4/3: try loss.desirable_weight from {desirable / ratio:.3g} to {4 / 3 * desirable / ratio:.3g}"
    ]


def find_chat_warnings(tokenizer: Any, formats: Mapping[str, str]) -> list[str]:
    """Return a warning about text for a tokenizer with a chat template.

    `formats` has the prompt format of each dataset.
    """
    names = [name for name, prompt_format in formats.items() if prompt_format != CHAT]
    if not names or not getattr(tokenizer, "chat_template", None):
        return []
    verb = "holds" if len(names) == 1 else "hold"
    return [
        f"the tokenizer has a chat template, but {' and '.join(names)} {verb} text, which is used as it is: a chat "
        f"model would be trained without the template with which it is prompted later. For a chat model, give messages "
        f"in place of text, [{{role: user, content: ...}}], or chat=always for texts of your own; for a base model, "
        f"text is fine"
    ]
