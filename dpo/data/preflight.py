"""The preflight: finds or builds a run's data before it starts.

It refuses data that the run cannot train on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dpo.data.asking import CHAT
from dpo.data.counts import Preflight, SplitCounter, SplitReport, count_updates
from dpo.data.schema import PreferenceData
from dpo.data.table import SPLITS, PromptTable, find_or_build, iterate_prompts, read_facts, write_prompts
from dpo.data.tokenization import TextEncoder
from dpo.data.tokenizer import find_bos_warnings, identify_tokenizer, load_tokenizer
from dpo.errors import InputError
from dpo.numbers import count
from dpo.settings.plan import DataPlan, Plan
from dpo.system.host import release_freed_memory
from dpo.system.waiting import once_per_machine

GetDataset = Callable[..., PreferenceData]  # loads a dataset by name
Identify = Callable[..., Any]  # a JSON value that changes with a dataset's content, or None


@dataclass
class TrainingData:
    """A trainer's data: prompts of both splits, their tokenizer and counts."""

    tokenizer: Any
    encode: TextEncoder
    train: PromptTable
    test: PromptTable
    report: Preflight
    digest: str = ""  # of the training data, in order
    test_digest: str = ""

    @property
    def n_examples(self) -> int:
        """Number of examples of both splits.

        Each has a number: first those of `train`, then those of `test`.
        """
        return int(self.train.counts.sum() + self.test.counts.sum())

    @property
    def identity(self) -> tuple[str, ...]:
        """Digests of all texts, and of token ids before truncation."""
        reports = self.report.train, self.report.test
        return self.digest, self.test_digest, *(report.token_digest for report in reports)

    @classmethod
    def open(
        cls, place: Path, facts: Mapping[str, Any], tokenizer: Any, plan: DataPlan, *, online: bool
    ) -> TrainingData:
        """Open a table. `online`: training examples are prompts."""
        reports = {split: SplitReport(**facts["reports"][split]) for split in SPLITS}
        per_epoch = reports["train"].prompts if online else reports["train"].examples
        size = {"batch_size": plan.batch_size, "n_epochs": plan.n_epochs, "n_examples": plan.n_examples}
        updates, dropped = count_updates(per_epoch, **size)
        preflight = Preflight(**reports, updates=updates, dropped_examples=dropped, examples_per_epoch=per_epoch)
        train, test = (PromptTable(place / f"{split}.arrow") for split in SPLITS)
        encode = TextEncoder(tokenizer, largest=facts["largest"])
        return cls(tokenizer, encode, train, test, preflight, *(facts["digests"][split] for split in SPLITS))


class DatasetOptions(NamedTuple):
    """The settings that the content of a table depends on."""

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
    """Write both splits to a directory, and count them.

    Raises InputError for data that is unusable.
    """
    encode, notes, reports, digests = TextEncoder(tokenizer), [], {}, {}
    sources = {"dataset_sources": options.dataset_sources, "cache_dir": cache_dir, "tokenizer": tokenizer}
    wanted = {"trains_on": options.trains_on, "with_messages": options.online, "notes": notes}
    lengths = {"max_length": options.max_length, "max_prompt_length": options.max_prompt_length}
    for split in SPLITS:
        prompts = iterate_prompts(get_dataset, options.names, split, silent=silent, **wanted, **sources)
        counter, path = SplitCounter(encode), place / f"{split}.arrow"
        write_prompts(path, counter.watch(prompts))
        reports[split] = asdict(counter.count_tokens(PromptTable(path), **lengths))
        digests[split] = counter.digest.hexdigest()[:32]
        if not reports[split]["examples"]:
            raise InputError(f"the {split} split of {', '.join(options.names)} has no examples")
    return {"reports": reports, "digests": digests, "largest": encode.largest, "notes": notes}


def make_key(
    options: DatasetOptions, tokenizer: Any, get_dataset: GetDataset, identify: Identify, cache_dir: str | None
) -> str | None:
    """Name of a table, a digest of everything it is made from.

    None if a source cannot be identified.
    """
    datasets = [identify(name, cache_dir, options.dataset_sources) for name in options.names]
    encodes, loader = identify_tokenizer(tokenizer), inspect.unwrap(get_dataset)
    if None in datasets or encodes is None or not inspect.isfunction(loader):
        return None
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
) -> tuple[Path, dict[str, Any]]:
    """Find or build the table of the data; return its facts too.

    It is in `folder`; a new one goes to `scratch` if given. Prints what the loaders have to say unless `silent`. Raises
    InputError for data that is unusable or too little; the batch size that it suggests is a multiple of `batch_parts`.
    """

    def find_key() -> str | None:
        return make_key(options, tokenizer, get_dataset, identify, cache_dir)

    key = find_key()

    def build(place: Path) -> tuple[dict[str, Any], bool]:
        facts = build_table(place, options, tokenizer, get_dataset, cache_dir=cache_dir, silent=silent)
        return facts, find_key() == key  # they differ if a file was changed while it was read

    place, is_new = find_or_build(Path(folder) / "examples", key, build, scratch=scratch)
    release_freed_memory()  # of the texts as Python strings
    facts = read_facts(place)["facts"]
    if not (silent or is_new):  # of a new table the loaders have printed the notes
        print("".join(f"{note}\n" for note in facts["notes"]), end="")
    if (n := facts["reports"]["train"]["prompts" if options.online else "examples"]) < batch_size:
        fix = f"set batch_size={n - n % batch_parts} or add data"
        if n < batch_parts:
            fix = f"add data, for it is a multiple of gradient_accumulation_steps * processes = {batch_parts}"
        raise InputError(
            f"the train split of {', '.join(options.names)} has {count(n, 'example')}, too few for one batch of "
            f"batch_size={batch_size}: {fix}"
        )
    return place, facts


def load_data(plan: Plan, get_dataset: GetDataset, identify: Identify, *, silent: bool = False) -> TrainingData:
    """Load the data of a run.

    `get_dataset` loads a dataset by name, and `identify` tells its states apart. Every process of a run must call this:
    one per machine finds or builds the table, and all of them map it.
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
    with tempfile.TemporaryDirectory() as scratch:  # a table that is mapped outlives its removed files

        def prepare() -> str:
            place, facts = prepare_data(
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
            return json.dumps([str(place), facts])

        place, facts = json.loads(once_per_machine(prepare, silence_secs=plan.run.collective_timeout_secs))
        data = TrainingData.open(Path(place), facts, tokenizer, plan.data, online=options.online)
    if not silent:
        print(data.report.describe(plan.data.batch_size), flush=True)
        formats = data.report.train.prompt_formats
        for warning in find_chat_warnings(tokenizer, formats) + find_bos_warnings(tokenizer, data.train[0].text):
            print(f"warning: {warning}", flush=True)
    return data


def find_chat_warnings(tokenizer: Any, formats: Mapping[str, str]) -> list[str]:
    """A warning if a chat model's tokenizer gets text, not messages.

    `formats` has each dataset's form.
    """
    names = [name for name, form in formats.items() if form != CHAT]
    if not names or not getattr(tokenizer, "chat_template", None):
        return []
    hold = f"{' and '.join(names)} hold{'s' * (len(names) == 1)}"
    return [
        f"the tokenizer has a chat template, and {hold} text, which is used as it is: a chat model would learn in "
        f"another form than it is asked in. Give messages, [{{role: user, content: ...}}], in place of text; a base "
        f"model may learn from text"
    ]
