"""The datasets as `{prompt: {responses, pairs, sft_target}}`, and the reference's batch iterator.

`hh`, `shp` and `se` are the paper's; `demo` is ours; any other name is the user's own data (see `dpo/data/custom.py`).
Modules that only `se` needs are imported where they are used, for a quick start.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tqdm

from dpo.data import preflight
from dpo.data.collation import (
    PaddedBatch,
    get_collate_fn,  # noqa: F401  (the reference has it here)
    padded_batch,
    tokenize_batch_element,  # noqa: F401  (the reference has it here)
)
from dpo.data.columns import ColumnsError, find_columns
from dpo.data.custom import get_own
from dpo.data.demo import get_demo
from dpo.data.examples import iterate_examples, read_examples
from dpo.data.preflight import TrainingData
from dpo.data.schema import PreferenceData, get_field
from dpo.data.sources import HUB_IDS, identify_source, load_rows
from dpo.data.table import iterate_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError
from dpo.settings.places import Source
from dpo.settings.plan import Plan

if TYPE_CHECKING:
    import datasets

ROWS_PER_WORKER = 5000  # rows of Stack Exchange, a few seconds of work: more than it takes to start a worker


def _progress(rows: Sequence, name: str, silent: bool) -> Iterable:
    # disable=None shows the bar only on a terminal
    return tqdm.tqdm(rows, desc=f"Processing {name}", disable=True if silent else None)


def extract_anthropic_prompt(prompt_and_response: str) -> str:
    """The dialogue up to and including its last `\\n\\nAssistant:`."""
    marker = "\n\nAssistant:"
    start = prompt_and_response.rfind(marker)
    if start < 0:
        raise InputError(f"no {marker!r} in {prompt_and_response[:200]!r}: not a dialogue in Anthropic's format")
    return prompt_and_response[: start + len(marker)]


def strings_match_up_to_spaces(str_a: str, str_b: str) -> bool:
    """Return whether two texts are equal except for spaces.

    They are compared up to the length of the shorter one.
    """
    shorter, longer = sorted((text.replace(" ", "") for text in (str_a, str_b)), key=len)
    return longer.startswith(shorter)


def strip_html_tags(html_string: str) -> str:
    """Convert Stack Exchange HTML to text.

    Keeps top-level `p` (its direct text only), `pre > code` and `code` elements, in order, with a blank line between
    them. Code stays inside `<code>`; everything else (lists, quotes, links) is dropped.
    """
    from bs4 import BeautifulSoup, NavigableString

    parts = []
    for element in BeautifulSoup(html_string, "html.parser").children:
        if isinstance(element, NavigableString):
            continue
        if element.name == "p":
            parts.append("".join(str(child) for child in element.children if isinstance(child, NavigableString)))
        elif element.name == "pre":
            parts.extend(f"<code>{code.get_text()}</code>" for code in element.find_all("code"))
        elif element.name == "code":
            parts.append(f"<code>{element.get_text()}</code>")
    return "\n\n".join(parts)


def get_hh(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(HUB_IDS["hh"])
) -> PreferenceData:
    """Anthropic's helpful and harmless dialogues: one pair per row.

    A prompt's SFT target is the chosen response of its last row.
    """
    data = PreferenceData(truncation_mode="keep_end")
    diverged = 0
    for number, row in enumerate(_progress(load_rows(source, split, cache_dir), "HH", silent), start=1):
        where = f"record {number} of {source.path} ({split})"
        chosen, rejected = (get_field(row, key, where) for key in ("chosen", "rejected"))
        try:
            prompt = extract_anthropic_prompt(chosen)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        diverged += not rejected.startswith(prompt)
        data.add_pair(prompt, chosen[len(prompt) :], rejected[len(prompt) :])
    if diverged:
        data.notes.append(
            f"HH {split}: in {diverged} rows the rejected dialogue does not begin with the chosen one's prompt; it is "
            f"cut like the others"
        )
    return data


def get_shp(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(HUB_IDS["shp"])
) -> PreferenceData:
    """Stanford Human Preferences: pairs of replies whose scores differ at least twofold.

    A prompt's SFT target is the reply with the highest score.
    """
    data = PreferenceData(truncation_mode="keep_start")
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for number, row in enumerate(_progress(load_rows(source, split, cache_dir), "SHP", silent), start=1):
        where = f"record {number} of {source.path} ({split})"
        prompt = f"\n\nHuman: {get_field(row, 'history', where)}\n\nAssistant:"
        responses = [" " + get_field(row, f"human_ref_{side}", where) for side in "AB"]
        score_a, score_b = (get_field(row, f"score_{side}", where, (int, float)) for side in "AB")
        label = get_field(row, "labels", where, int)
        if not (score_a and score_b):
            raise InputError(f"{where}: score_A={score_a} and score_B={score_b} must not be 0 to have a ratio")
        if max(score_a / score_b, score_b / score_a) < 2:
            continue
        data.add_pair(prompt, *responses, better=0 if label == 1 else 1)  # label 1 means that A is preferred
        for response, score in zip(responses, (score_a, score_b), strict=True):
            scores[prompt].setdefault(response, score)  # a repeated text keeps its first score
    for prompt, entry in data.items():
        entry["sft_target"] = max(entry["responses"], key=scores[prompt].__getitem__)
    return data


def _strip_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check a Stack Exchange row and convert its HTML to text.

    Raises InputError for a damaged row.
    """
    get_field(row, "question", where)
    if not get_field(row, "answers", where, list):
        raise InputError(f"{where}: answers is empty")
    for answer in row["answers"]:
        get_field(answer, "text", where)
        get_field(answer, "pm_score", where, (int, float))
    answers = [{**answer, "text": strip_html_tags(answer["text"])} for answer in row["answers"]]
    return {**row, "question": strip_html_tags(row["question"]), "answers": answers}


def _strip_in_processes(rows: datasets.Dataset, where: str) -> datasets.Dataset:
    """Apply `_strip_row` to all rows, on all CPUs if worthwhile; cached."""
    workers = min(len(os.sched_getaffinity(0)), len(rows) // ROWS_PER_WORKER)
    if workers < 2:
        return rows.map(_strip_row, fn_kwargs={"where": where})
    import multiprocess  # used by datasets for its workers

    # forkserver: children must not inherit this process's GPU, threads or lock on its run directory
    before = multiprocess.get_start_method(allow_none=True)
    multiprocess.set_start_method("forkserver", force=True)
    multiprocess.set_forkserver_preload([__name__])
    try:
        return rows.map(_strip_row, num_proc=workers, fn_kwargs={"where": where})
    finally:
        multiprocess.set_start_method(before, force=True)


def get_se(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(HUB_IDS["se"])
) -> PreferenceData:
    """Stack Exchange: every pair of a question's answers.

    A tie counts as (later, earlier). The source has one split, `train`: shuffled with seed 42, its first 1 % is our
    test split. A repeated question keeps its last row.
    """
    rows = load_rows(source, "train", cache_dir)
    order = np.random.default_rng(42).permutation(len(rows))  # the same as datasets.Dataset.shuffle(seed=42)
    n_test = int(len(rows) * 0.01)
    order = order[:n_test] if split == "test" else order[n_test:]
    if not isinstance(rows, list):  # from the Hub, ten million rows of HTML: convert on every core, and cache
        stripped: Any = _strip_in_processes(rows.select(order), source.path)
    else:
        stripped = (_strip_row(rows[i], f"record {i + 1} of {source.path}") for i in order)

    data = PreferenceData(truncation_mode="keep_start")
    for row in _progress(stripped, "SE", silent):
        responses = [" " + answer["text"] for answer in row["answers"]]
        scores = [answer["pm_score"] for answer in row["answers"]]
        index_pairs = itertools.combinations(range(len(scores)), 2)  # (earlier, later)
        first_score = dict(zip(reversed(responses), reversed(scores), strict=True))  # a repeated text keeps its first
        data[f"\n\nHuman: {row['question']}\n\nAssistant:"] = {
            "responses": responses,
            "pairs": [(i, j) if scores[i] > scores[j] else (j, i) for i, j in index_pairs],
            "sft_target": max(responses, key=first_score.__getitem__),
        }
    return data


LOADERS: dict[str, Callable[..., PreferenceData]] = {"hh": get_hh, "shp": get_shp, "se": get_se}
BUILT_IN = (*LOADERS, "demo")  # these need no entry in dataset_sources


def get_dataset(
    name: str,
    split: str,
    silent: bool = False,
    cache_dir: str | None = None,
    dataset_sources: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    trains_on: str = "pairs",
) -> PreferenceData:
    """Load a split of a dataset as `{prompt: {responses, pairs, sft_target}}`.

    Per prompt: responses, a list of str; pairs (better, worse) of indices into it; and the SFT target, a str.

    `dataset_sources[name]` redirects a built-in dataset and is required for any other name. `tokenizer` renders the
    user's own data if it has chat messages; such data needs the columns of what a loss `trains_on`. A source without
    splits, such as one file, is split by prompt: a tenth, at least one, drawn with seed 42, is the test split. Raises
    InputError for an unknown name, a missing split, a row without a field, and empty data.
    """
    value = (dataset_sources or {}).get(name)
    if name == "demo":
        if value is not None:
            raise InputError(
                f"dataset_sources.demo={value}: the demo data is generated; choose another name for your own data"
            )
        return get_demo(split)
    if value is None and name not in HUB_IDS:
        known = ", ".join(BUILT_IN)
        raise InputError(f"dataset {name!r} is not one of {known}; for own data give dataset_sources.{name}=PATH_OR_ID")
    source = Source.parse(name, HUB_IDS[name] if value is None else value)
    if name in LOADERS:
        data = LOADERS[name](split, silent=silent, cache_dir=cache_dir, source=source)
    else:
        data = _load_own(name, split, source, cache_dir, tokenizer, trains_on)
    if source.has_no_splits and name != "se":  # se makes its own test split
        data = _hold_out(data, name, split, source)
    if not data:
        raise InputError(f"dataset {name} ({source.path}) has no examples in its {split} split")
    first = next(iter(data.values()))
    assert {"responses", "pairs", "sft_target"} <= set(first), f"{name} gives {set(first)}"
    if not silent:
        print("".join(f"{note}\n" for note in data.notes), end="")
    return data


def _load_own(
    name: str, split: str, source: Source, cache_dir: str | None, tokenizer: Any, trains_on: str
) -> PreferenceData:
    rows, origin = load_rows(source, split, cache_dir), source.path
    if not source.has_no_splits:
        origin += f" ({split})"
    try:
        return get_own(rows, origin, tokenizer, source.columns, name=name, trains_on=trains_on)
    except ColumnsError as error:
        if split == "train" or source.has_no_splits:
            raise
        columns, train_columns = find_columns(rows), find_columns(load_rows(source, "train", cache_dir))
        if columns.keys() == train_columns.keys():
            raise
        raise InputError(
            f"{origin} has the columns {', '.join(columns)}, and its train split has {', '.join(train_columns)}: name "
            f"the columns of both splits alike"
        ) from error


def _hold_out(data: PreferenceData, name: str, split: str, source: Source) -> PreferenceData:
    """One split of a source without splits."""
    part = data.select_split(split)
    if len(data) == 1 and not part:
        raise InputError(
            f"dataset {name} ({source.path}) has no examples in its train split, as its only prompt is held out as "
            f"test split: add prompts, or give a directory of train and test files"
        )
    if split == "test":  # the notes on the records themselves are printed with the train split
        share = f"{len(part):,} of {len(data):,}"
        part.notes = [f"test split of {name}: a tenth of the prompts of {source.path}, at least one: {share}"]
    return part


def identify_dataset(name: str, cache_dir: str | None, dataset_sources: Mapping[str, Any]) -> Any:
    """A JSON value that changes with a dataset's content.

    None if that is not known, as for loaders that are not ours.
    """
    if LOADERS.get(name, get_own).__module__ not in (__name__, get_own.__module__):
        return None
    value = dataset_sources.get(name) or HUB_IDS.get(name)
    return name if value is None else [name, identify_source(Source.parse(name, value), cache_dir)]


def load_data(plan: Plan, *, silent: bool = False) -> TrainingData:
    """Load the data of a run: see `dpo.data.preflight.load_data`."""
    return preflight.load_data(plan, get_dataset, identify_dataset, silent=silent)


def get_batch_iterator(
    names: Sequence[str],
    tokenizer: Any,
    split: str = "train",
    batch_size: int = 1,
    shuffle: bool = True,
    max_length: int = 512,
    max_prompt_length: int = 128,
    sft_mode: bool = False,
    n_epochs: int | None = None,
    n_examples: int | None = None,
    seed: int = 0,
    silent: bool = False,
    cache_dir: str | None = None,
    dataset_sources: Mapping[str, Any] | None = None,
) -> Iterator[PaddedBatch]:
    """Load the datasets, tokenize, and yield batches, as the reference does.

    The order is that of `iterate_examples`. As in the reference, batches of both splits are whole, and with
    `n_examples` alone the data is repeated. The trainers evaluate differently, on each example once (`iterate_once`).
    Raises InputError if neither `n_epochs` nor `n_examples` is given, or no epoch would fill a single batch.
    """
    if n_epochs is None and n_examples is None:
        raise InputError("give n_epochs or n_examples: without either the batches would never end")
    options: dict[str, Any] = {"cache_dir": cache_dir, "dataset_sources": dataset_sources, "tokenizer": tokenizer}
    options |= {"silent": silent, "trains_on": "targets" if sft_mode else "pairs"}
    prompts = list(iterate_prompts(get_dataset, names, split, **options))
    counts = [len(prompt.examples) for prompt in prompts]
    available = sum(counts)
    if available < batch_size:
        raise InputError(f"the {split} split has {available} examples, too few for one batch of {batch_size}")
    encode = TextEncoder(tokenizer)
    order = {"batch_size": batch_size, "shuffle": shuffle, "n_epochs": n_epochs, "n_examples": n_examples, "seed": seed}
    lengths = {"max_length": max_length, "max_prompt_length": max_prompt_length}
    for places in iterate_examples(counts, **order):
        yield padded_batch(read_examples(prompts, places), encode, **lengths)
