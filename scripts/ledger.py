"""The hardest pairs of a ledger, and likely wrong labels.

    python -m scripts.ledger RUN [--top 10] [--no-texts] [--json] [--trust-remote-code]

For runs with `ledger=true`, also while they train or after a kill. The texts of pairs come from the run's datasets, if
these can be loaded here; the texts of pairs that an online run drew are in the ledger. docs/metrics.md explains the
counts. Exit status: 0, or 2 if RUN has no ledger. Changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.errors import InputError
from dpo.numbers import count, figure, signed
from scripts import add_trust_option

if TYPE_CHECKING:
    from dpo.analysis.ledger import LedgerSummary, Pair
    from dpo.analysis.runs import Run

LONGEST_TEXT = 300  # characters
SPLITS = {"train": "train", "eval": "test"}  # a split's name in a ledger: its name in a dataset


def find_texts(run: Run, pairs: Sequence[Pair], *, trust_remote_code: bool = False) -> Mapping[str, Mapping[str, str]]:
    """Find the texts of pairs in the run's datasets, by `pair.example`.

    Custom data also needs a tokenizer, as it may hold chats. A tokenizer's own code runs only with
    `trust_remote_code`, whatever the run's config says. Raises InputError if the config is unusable, or the data cannot
    be loaded.
    """
    from dpo.data.examples import text_digest  # tokenizers and datasets take seconds to import
    from dpo.data.table import iterate_prompts
    from dpo.data.tokenizer import load_tokenizer
    from dpo.settings.recorded import plan_recorded
    from preference_datasets import BUILT_IN, get_dataset

    digests: dict[tuple[str, str], set[str]] = {}  # of the wanted pairs, by split and dataset
    for pair in pairs:
        digests.setdefault((SPLITS[pair.split], pair.dataset), set()).add(pair.example)
    has_custom_data = any(dataset not in BUILT_IN for _, dataset in digests)
    if not run.config:
        problems = [problem for problem in run.problems if problem.startswith("config.yaml")]
        raise InputError(problems[0] if problems else "config.yaml is empty")
    tokenizer_keys = ("model.name_or_path", "model.tokenizer_name_or_path") if has_custom_data else ()
    keys = ("local_dirs", "dataset_sources", "list_pairs", *tokenizer_keys)
    plan = plan_recorded({"local_run_dir": str(run.path), **run.config}, where="config.yaml", prefixes=keys)
    cache_dir, sources = plan.run.cache_dir, plan.data.dataset_sources
    options: dict[str, Any] = {"silent": True, "cache_dir": cache_dir, "dataset_sources": sources}
    if has_custom_data:
        tokenizer = load_tokenizer(plan.model.tokenizer, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
        options["tokenizer"] = tokenizer
    texts = {}
    for (split, dataset), wanted_digests in digests.items():
        # pairs or ranked lists, as a ledger has only examples with margins
        trains_on = run.objective.trains_on
        data = get_dataset(dataset, split, trains_on=trains_on, **options)
        for prompt in iterate_prompts([(dataset, data)], trains_on, list_pairs=plan.data.list_pairs):
            for index in range(len(prompt.examples)):
                responses = prompt.texts(index)
                digest = text_digest(prompt.text, responses)
                if digest in wanted_digests:
                    texts[digest] = {"prompt": prompt.text, **responses}
    return texts


def make_lines(summary: LedgerSummary, note: str | None = None) -> list[str]:
    """Format a summary, without control characters that could change the terminal."""
    visits, examples = count(summary.rows, "visit"), count(summary.examples, "example")
    lines = [
        f"{visits} of {examples}, of which {count(summary.truncated, 'is', 'are')} truncated.",
        *("", f"Pairs that never flip: {summary.n_never_flipped:,} of {count(summary.n_seen_again, 'pair')} that were "
        "seen at least twice had a margin never above 0.", *_list_pairs(summary.never_flipped)),
        *("", f"Suspected label noise: {count(summary.n_suspected_noise, 'pair')} never ranked right, and wrong by at "
        "least the median size of margins at that time.", *_list_pairs(summary.suspected_noise)),
    ]  # fmt: skip
    if note:
        lines.append(note)
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines]


def _list_pairs(pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        scores = "" if pair.scores is None else f"; scores: chosen {pair.scores[0]:.3g}, rejected {pair.scores[1]:.3g}"
        yield (
            f"  {pair.example} {pair.dataset} ({pair.split}), {count(pair.visits, 'visit')}: margin "
            f"{signed(pair.first_margin)} at first, {signed(pair.last_margin)} at last; on average "
            f"{figure(pair.relative_margin, 2)} times the median size of margins at that time{scores}"
        )
        for name, text in (pair.texts or {}).items():
            yield f"    {name:<9} {shorten(text, keep_end=name == 'prompt')}"


def add_texts(summary: LedgerSummary, run: Run, *, trust_remote_code: bool) -> tuple[LedgerSummary, str | None]:
    """Put texts into the listed pairs, and say why some are missing."""
    wanted = [pair for pair in (*summary.never_flipped, *summary.suspected_noise) if pair.texts is None]
    texts: Mapping[str, Mapping[str, str]] = {}
    try:
        texts = find_texts(run, wanted, trust_remote_code=trust_remote_code) if wanted else {}
    except (InputError, OSError) as error:
        return summary, f"Texts are not shown: {error}"
    examples = {pair.example for pair in wanted}
    n_missing = len(examples - texts.keys())
    note = f"The run's datasets have changed, and lack {n_missing} of these {count(len(examples), 'pair')}"
    return replace_texts(summary, lambda pair: pair.texts or texts.get(pair.example)), note if n_missing else None


def replace_texts(summary: LedgerSummary, find: Callable[[Pair], Mapping[str, str] | None]) -> LedgerSummary:
    lists = {name: getattr(summary, name) for name in ("never_flipped", "suspected_noise")}
    return dataclasses.replace(
        summary, **{name: [dataclasses.replace(p, texts=find(p)) for p in pairs] for name, pairs in lists.items()}
    )


def shorten(text: str, *, keep_end: bool) -> str:
    """Put a text on one line, shortened at one end if long."""
    text = " ".join(text.split())
    if len(text) <= LONGEST_TEXT:
        return text
    return f"... {text[-LONGEST_TEXT:]}" if keep_end else f"{text[:LONGEST_TEXT]} ..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="pairs in each list (default: 10)")
    parser.add_argument(
        "--no-texts", action="store_true", help="leave the texts out; the run's datasets are not loaded"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_trust_option(parser)
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top {options.top} must be 1 or more")

    from dpo.analysis.ledger import summarize
    from dpo.analysis.ledger_file import read_ledger
    from dpo.analysis.runs import read_config

    try:
        table = read_ledger(options.run)
    except InputError as error:
        parser.error(str(error))
    if table is None:
        parser.error(f"{options.run} has no ledger.parquet: give the directory of a run with ledger=true")
    run = read_config(options.run)
    summary, note = summarize(table, top=options.top), None
    if options.no_texts:
        summary = replace_texts(summary, lambda pair: None)
    else:
        summary, note = add_texts(summary, run, trust_remote_code=options.trust_remote_code)
    if not run.objective.has_margins:
        loss = run.objective
        note = f"loss={loss.name} trains on {loss.trains_on}: without pairs there are no margins to rank."
    if options.json:
        print(json.dumps({**dataclasses.asdict(summary), "note": note}, indent=2))
    else:
        print("\n".join(make_lines(summary, note)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
