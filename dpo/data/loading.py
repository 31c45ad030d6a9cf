"""Loads the splits of a dataset by name: the paper's, the demo, a plugin's, or custom data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpo.data.columns import N_INSPECTED, recognize
from dpo.data.custom import DataOptions, get_custom
from dpo.data.demo import make_demo
from dpo.data.published import Entries, read_hh, read_se, read_shp
from dpo.data.schema import SPLITS, Prompt, Row, Split, TruncationMode, hold_out
from dpo.data.sources import has_split, identify_source, load_rows
from dpo.errors import InputError, one_sentence
from dpo.numbers import count
from dpo.plugins import DATASETS, READERS
from dpo.settings.places import BUILT_IN, Source, find_source
from dpo.settings.plan import Plan
from dpo.system.users_code import run_users_code

ENTRY_READERS = {"hh": read_hh, "shp": read_shp}  # for datasets with a file or Hub split for each of our splits
CUT_AT_END = ("shp", "se")  # datasets whose prompts lose their end, as in the reference code


def get_dataset(
    name: str, split: str, silent: bool = False, cache_dir: str | None = None, dataset_sources: Mapping | None = None
) -> Entries:
    """Load a split of a built-in dataset as `{prompt: {responses, pairs, sft_target}}`.

    Pairs are (better, worse) indices of responses. `dataset_sources[name]` says where the dataset is.
    """
    if name not in BUILT_IN:
        raise InputError(f"dataset {name!r} is not one of {', '.join(BUILT_IN)}: read it with get_batch_iterator")
    source = find_source(name, dataset_sources or {})
    if name == "demo":
        if source.path:
            raise InputError(f"dataset_sources.demo={source.path} has no effect: use another name for the dataset")
        return make_demo(split)
    if name == "se":
        return read_se(load_rows(source, "train", cache_dir), split, source.path, silent=silent)
    rows = enumerate(load_rows(source, split, cache_dir), start=1)
    return ENTRY_READERS[name]((f"record {number} of {source.path} ({split})", row) for number, row in rows)


def load_splits(
    name: str,
    tokenizer: Any,
    sources: Mapping,
    *,
    splits: Sequence[str] = SPLITS,
    cache_dir: str | None = None,
    silent: bool = False,
    **options: Any,
) -> list[Split]:
    """Load splits of a dataset; the options are those of `DataOptions`.

    A dataset without a test split is read once, and divided by `hold_out(holdout)`.
    """
    data_options = DataOptions(**options)
    holdout = data_options.holdout
    source = find_source(name, sources)
    place = source.label or name

    def read(split: str) -> Split:
        prompts = Split()
        if name in BUILT_IN:
            prompts = _make_split(name, get_dataset(name, split, silent, cache_dir, sources), data_options)
        elif rows := read_rows(name, source, split, cache_dir):  # a plugin may return none
            origin = place if source.has_no_splits else f"{place} ({split})"
            prompts = get_custom(rows, origin, tokenizer, source.columns, name=name, **options)
        if not prompts:
            raise InputError(f"dataset {name!r} ({place}) has no examples in its {split} split: add some")
        if data_options.with_margins and not any(prompt.margins for prompt in prompts.values()):
            raise InputError(
                f"loss.offset_by_margin=true needs the margin of each pair, and dataset {name} has none: add a column "
                f"margin, or name yours with dataset_sources.{name}.columns.margin=COLUMN"
            )
        return prompts

    if _has_test_split(name, source, cache_dir):
        loaded = [read(split) for split in splits]
        if holdout:
            loaded[0].notes.append(f"holdout={holdout} has no effect on {name}, which has a test split")
        return loaded
    train = read("train")
    n = len(train)
    test = hold_out(train, holdout)
    if not train:
        raise InputError(
            f"dataset {name} ({place}) has {count(n, 'different prompt')}, and the test split takes all: add some, or "
            f"set a smaller holdout"
        )
    test.notes.append(f"test split of {name}: {len(test):,} of {count(n, 'prompt')}; holdout=NUMBER gives another")
    divided = {"train": train, "test": test}
    return [divided[split] for split in splits]


def _has_test_split(name: str, source: Source, cache_dir: str | None) -> bool:
    """Whether a dataset has a test split of its own."""
    if not source.path:
        return name in BUILT_IN or _call_plugin(name, lambda: DATASETS[name]("test") is not None)
    if source.has_no_splits:
        return name == "se"  # it makes its own test split
    return name in BUILT_IN or has_split(source, "test", cache_dir)


def _make_split(name: str, entries: Entries, options: DataOptions) -> Split:
    """Make prompts of a built-in dataset's entries, with the examples that `get_custom` would make.

    An example maps roles to indices of responses. Options other than `trains_on` and `unpair` are for custom data.
    Raises InputError for a loss of labels without `unpair`, as all built-in datasets have pairs.
    """
    options.check_pairs(name)
    mode: TruncationMode = "keep_start" if name in CUT_AT_END else "keep_end"
    split = Split()
    for text, entry in entries.items():
        responses = entry["responses"]
        examples = [{"chosen": better, "rejected": worse} for better, worse in entry["pairs"]]
        if options.trains_on == "targets":
            responses, examples = [entry["sft_target"]], [{"chosen": 0}]
        elif options.trains_on == "labels":  # with `unpair`, each response of a pair becomes an example
            examples = [{role: index} for example in examples for role, index in example.items()]
        split[text] = Prompt(text, responses, examples, mode)
    return split


def read_rows(
    name: str, source: Source, split: str, cache_dir: str | None = None, *, limit: int | None = None
) -> Sequence[Row]:
    """Load the rows of a split from its source, or from the plugin that has the dataset.

    If the source names a plugin's reader, this function makes each row from one of the source's. Rows for which it
    returns None are left out, and an error stands in place of a row for which it fails.
    """
    if not source.path:
        return _call_plugin(name, lambda: list(DATASETS[name](split) or ()))
    rows = load_rows(source, split, cache_dir, limit=limit)
    if source.reader is None:
        return rows
    converted = []
    for row in rows:
        try:
            converted.append(row if isinstance(row, InputError) else READERS[source.reader](row))
        except Exception as error:  # the user's code may raise anything
            converted.append(InputError(f"reader {source.reader}: {type(error).__name__}: {one_sentence(error)}"))
    return [row for row in converted if row is not None]


def _call_plugin(name: str, function: Callable) -> Any:
    return run_users_code(function, InputError, f"dataset {name} of a plugin", None)


def check_columns(plan: Plan) -> None:
    """Raise InputError if local data lacks columns that the loss needs; the first records are read, or else all."""
    for name in plan.data.datasets:
        source = find_source(name, plan.data.dataset_sources)
        if name in BUILT_IN or not source.path or source.local is None:
            continue
        options = {"name": name, "origin": source.label, "trains_on": DataOptions.of(plan).trains_on}
        for limit in (N_INSPECTED, None):  # a later record may have the missing columns
            rows = read_rows(name, source, "train", limit=limit)
            try:
                if rows:  # a plugin's reader may leave out all of them
                    recognize(rows, source.columns, **options)
                    break
            except InputError:
                if limit is None:
                    raise


def identify_dataset(name: str, cache_dir: str | None, sources: Mapping) -> Any:
    """Make a JSON value that changes with a dataset's content; None if that cannot be known."""
    source = find_source(name, sources)
    if source.path:
        return identify_source(source, cache_dir)
    return name if name in BUILT_IN else None  # the demo changes only with the code
