"""Datasets as `{prompt: {responses, pairs, sft_target}}`, and the reference code's batch iterator.

`hh`, `shp` and `se` are the paper's, `demo` is made up here; any other name is custom data.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import tqdm

from dpo.data import preflight
from dpo.data.collation import (
    PaddedBatch,
    get_collate_fn,
    make_rows,
    tokenize_batch_element,  # noqa: F401  (the reference code has it here)
)
from dpo.data.columns import N_INSPECTED, recognize
from dpo.data.custom import get_custom
from dpo.data.demo import get_demo
from dpo.data.examples import iterate_examples, read_examples
from dpo.data.preflight import TrainingData
from dpo.data.schema import ASSISTANT, Entry, PreferenceData, Row, get_field, naming
from dpo.data.sources import identify_source, load_rows
from dpo.data.table import iterate_prompts
from dpo.data.tokenization import TextEncoder
from dpo.errors import InputError, one_sentence
from dpo.numbers import count
from dpo.plugins import DATASETS, READERS, find_digests
from dpo.settings.places import BUILT_IN, Source, store_rows
from dpo.settings.plan import Plan
from dpo.system.pool import map_chunks

ROWS_PER_WORKER = 5000  # of Stack Exchange: a few seconds of work, more than it takes to start a worker


def _read_rows(source: Source, split: str, cache_dir: str | None, name: str, silent: bool) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a split, each with its place for messages."""
    # with None, silent unless stderr is a terminal
    bar = tqdm.tqdm(load_rows(source, split, cache_dir), f"Processing {name}", disable=silent or None)
    for number, row in enumerate(bar, start=1):
        yield row, f"record {number} of {source.path} ({split})"


def extract_anthropic_prompt(prompt_and_response: str) -> str:
    """Return a dialogue up to and including its last `\\n\\nAssistant:`."""
    before, marker, _ = prompt_and_response.rpartition(ASSISTANT)
    if not marker:
        raise InputError(f"no {ASSISTANT!r} in {prompt_and_response[:200]!r}: not a dialogue in Anthropic's format")
    return before + marker


def strings_match_up_to_spaces(str_a: str, str_b: str) -> bool:
    """Return whether, without spaces, one text begins with the other."""
    shorter, longer = sorted((text.replace(" ", "") for text in (str_a, str_b)), key=len)
    return longer.startswith(shorter)


def strip_html_tags(html_string: str) -> str:
    """Convert Stack Exchange HTML to text as the reference code does.

    Top-level `p` (only the text directly in it), `pre > code` and `code` remain, with a blank line between them.
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
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["hh"])
) -> PreferenceData:
    """Load Anthropic's dialogues, a pair per row; the SFT target is the chosen response of a prompt's last row.

    A rejected dialogue loses as many characters as the chosen one's prompt has, as in the reference code.
    """
    data = PreferenceData(truncation_mode="keep_end")
    for row, where in _read_rows(source, split, cache_dir, "HH", silent):
        with naming(where):
            chosen, rejected = (get_field(row, key) for key in ("chosen", "rejected"))
            prompt = extract_anthropic_prompt(chosen)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        data.add(prompt, [chosen, rejected], [(0, 1)], chosen)
    return data


def get_shp(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["shp"])
) -> PreferenceData:
    """Load pairs whose scores differ at least twofold; a prompt's SFT target is the reply with the highest score."""
    data = PreferenceData(truncation_mode="keep_start")
    scores = defaultdict(dict)  # by prompt and response
    for row, where in _read_rows(source, split, cache_dir, "SHP", silent):
        with naming(where):
            prompt = f"\n\nHuman: {get_field(row, 'history')}\n\nAssistant:"
            responses = [" " + get_field(row, f"human_ref_{side}") for side in "AB"]
            score_a, score_b = (get_field(row, f"score_{side}", int, float) for side in "AB")
            label = get_field(row, "labels", int)
            if not (score_a and score_b):
                raise InputError(f"neither score_A={score_a} nor score_B={score_b} may be 0: their ratio counts")
        if max(score_a / score_b, score_b / score_a) < 2:
            continue
        data.add(prompt, responses, [(0, 1) if label == 1 else (1, 0)], None)  # label 1 means that A is preferred
        for response, score in zip(responses, (score_a, score_b), strict=True):
            scores[prompt].setdefault(response, score)  # a repeated text keeps its first score
    for prompt, entry in data.items():
        entry["sft_target"] = max(entry["responses"], key=scores[prompt].__getitem__)
    return data


def _read_questions(placed_rows: Sequence[tuple[Row, str]]) -> list[tuple[str, Entry]]:
    prompts = []
    for row, where in placed_rows:
        with naming(where):
            question, answers = get_field(row, "question"), get_field(row, "answers", list)
            if not answers:
                raise InputError("answers is empty")
            responses = [" " + strip_html_tags(get_field(answer, "text")) for answer in answers]
            scores = [get_field(answer, "pm_score", int, float) for answer in answers]
        pairs = [  # (better, worse)
            (earlier, later) if scores[earlier] > scores[later] else (later, earlier)
            for earlier, later in combinations(range(len(scores)), 2)
        ]
        # the first score of a repeated text counts: a dict keeps a key's last value, so go backwards
        first_score = dict(zip(reversed(responses), reversed(scores), strict=True))
        target = max(responses, key=first_score.__getitem__)
        entry = {"responses": responses, "pairs": pairs, "sft_target": target}
        prompts.append((f"\n\nHuman: {strip_html_tags(question)}\n\nAssistant:", entry))
    return prompts


def get_se(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["se"])
) -> PreferenceData:
    """Load every pair of a question's answers; of equal scores the later answer is preferred.

    The source's one split is shuffled with seed 42, and its first 1 % is our test split. A repeated question's last row
    counts.
    """
    rows = load_rows(source, "train", cache_dir)
    order = np.random.default_rng(42).permutation(len(rows))  # the same as datasets.Dataset.shuffle(seed=42)
    n_test = int(len(rows) * 0.01)
    row_indices = order[:n_test] if split == "test" else order[n_test:]
    selected = [rows[i] for i in row_indices] if isinstance(rows, list) else rows.select(row_indices)  # of the Hub
    placed_rows = zip(selected, (f"record {i + 1} of {source.path}" for i in row_indices), strict=True)
    data = PreferenceData(truncation_mode="keep_start")
    for prompts in map_chunks(
        _read_questions, placed_rows, len(row_indices), "Processing SE", ROWS_PER_WORKER, silent=silent
    ):
        data.update(prompts)
    return data


LOADERS: dict[str, Callable[..., PreferenceData]] = {"hh": get_hh, "shp": get_shp, "se": get_se}


def get_dataset(
    name: str,
    split: str,
    silent: bool = False,
    cache_dir: str | None = None,
    dataset_sources: Mapping | None = None,
    tokenizer: Any = None,
    holdout: float | None = None,
    **options: Any,
) -> PreferenceData:
    """Load a split as `{prompt: {responses, pairs, sft_target}}`; pairs are (better, worse) indices of responses.

    `dataset_sources[name]` says where a dataset is, or has its rows. Without splits, `hold_out(holdout)` makes the test
    split, which comes with the train split as `held_out`. Tokenizer and options are those of `get_custom`.
    """
    configured = store_rows({"dataset_sources": dataset_sources or {}})["dataset_sources"]
    place = configured.get(name) or BUILT_IN.get(name)
    if name in DATASETS and not configured.get(name):
        return _get_added(name, split, tokenizer, holdout, options)
    if place == "":  # the demo
        return get_demo(split)
    if place is None:
        raise InputError(
            f"dataset {name!r} is not one of {', '.join(BUILT_IN)}; for custom data give "
            f"dataset_sources.{name}=DIR_FILE_OR_HUB_ID"
        )
    source = Source.parse(name, place)
    if name in LOADERS:
        data = LOADERS[name](split, silent=silent, cache_dir=cache_dir, source=source)
    else:
        origin = source.label if source.has_no_splits else f"{source.label} ({split})"
        rows = _read(load_rows(source, split, cache_dir), source.reader)
        data = get_custom(rows, origin, tokenizer, source.columns, name=name, **options)
    if source.has_no_splits and name != "se":  # se makes its own test split
        return _split(data, split, holdout, f"{name} ({source.label})")
    if not data:
        raise InputError(f"dataset {name!r} ({source.path}) has no examples in its {split} split: add some")
    return data


def _get_added(name: str, split: str, tokenizer: Any, holdout: float | None, options: Mapping) -> PreferenceData:
    """A plugin's dataset."""
    rows, test_rows = (DATASETS[name](part) for part in ("train", "test"))
    rows = list(rows if split == "train" or test_rows is None else test_rows)
    data = get_custom(rows, f"{name} ({split})", tokenizer, name=name, **options)
    return _split(data, split, holdout, name) if test_rows is None else data


def _split(data: PreferenceData, split: str, holdout: float | None, what: str) -> PreferenceData:
    n, test = len(data), data.hold_out(holdout)
    if not data:
        fix = "add some" if holdout is None else f"holdout={holdout} takes all of them: give less"
        raise InputError(f"dataset {what} has {count(n, 'different prompt')}, too few to hold some out: {fix}")
    test.notes.append(f"test split of {what}: {len(test):,} of {count(n, 'prompt')}; holdout=NUMBER gives another")
    return data if split == "train" else test


def _read(rows: Sequence, reader: str | None) -> Sequence:
    """Rows as a plugin's reader makes them, with its error in place of a row that it cannot read."""
    if reader is None:
        return rows

    def read(row: Any) -> Any:
        try:
            return row if isinstance(row, Exception) else READERS[reader](row)
        except Exception as error:  # of the user's code
            return InputError(f"reader {reader}: {type(error).__name__}: {one_sentence(error)}")

    return [made for row in rows if (made := read(row)) is not None]


def check_columns(plan: Plan) -> None:
    """Raise InputError if local data lacks columns that the loss needs."""
    trains_on = "prompts" if plan.online else plan.loss.trains_on
    for name, value in plan.data.dataset_sources.items():
        if not value or name in LOADERS or name not in plan.data.datasets:
            continue
        source = Source.parse(name, value)
        if source.local is None:
            continue
        options = {
            "name": name,
            "origin": source.label,
            "trains_on": trains_on,
            "with_margins": plan.loss.needs_margins,
        }
        try:
            recognize(_read(load_rows(source, "train", limit=N_INSPECTED), source.reader), source.columns, **options)
        except InputError:
            recognize(_read(load_rows(source, "train"), source.reader), source.columns, **options)


def identify_dataset(name: str, cache_dir: str | None, dataset_sources: Mapping) -> Any:
    """Make a JSON value that changes with a dataset's content; None for a loader of the user."""
    loader = LOADERS.get(name, get_custom)
    source = dataset_sources.get(name) or BUILT_IN.get(name)
    if loader.__module__ not in (__name__, get_custom.__module__) or source is None:
        return None
    if not source:  # the demo, whose content changes only with the code
        return name
    parsed = Source.parse(name, source)
    return [name, identify_source(parsed, cache_dir), *([parsed.reader, find_digests()] if parsed.reader else [])]


def load_data(plan: Plan, *, silent: bool = False) -> TrainingData:
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
    dataset_sources: Mapping | None = None,
) -> Iterator[PaddedBatch]:
    """Yield tokenized batches in the order of `iterate_examples`, as the reference code does.

    With `n_examples` alone the data is repeated. Trainers do not use it.
    """
    if n_epochs is None and n_examples is None:
        raise InputError("give n_epochs or n_examples: without either the batches would never end")
    trains_on = "targets" if sft_mode else "pairs"
    datasets = (
        (name, get_dataset(name, split, silent, cache_dir, dataset_sources, tokenizer, trains_on=trains_on))
        for name in names
    )
    prompts = list(iterate_prompts(datasets, trains_on))
    counts = [len(prompt.examples) for prompt in prompts]
    if sum(counts) < batch_size:
        raise InputError(
            f"the {split} split has {sum(counts)} examples, too few for one batch of batch_size={batch_size}"
        )
    encode, collate = TextEncoder(tokenizer), get_collate_fn(tokenizer)
    for example_ids in iterate_examples(
        counts, batch_size=batch_size, shuffle=shuffle, n_epochs=n_epochs, n_examples=n_examples, seed=seed
    ):
        examples = read_examples(prompts, example_ids)
        yield collate(make_rows(examples, encode, max_length=max_length, max_prompt_length=max_prompt_length))
