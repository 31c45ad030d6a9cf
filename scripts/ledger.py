"""The hardest pairs of a ledger, and likely wrong labels.

    python -m scripts.ledger RUN [--top 10]

For runs with `ledger=true`, also while they train or after a kill. The texts of pairs come from the run's datasets, if
these can be loaded here; the texts of pairs that an online run drew are in the ledger. docs/metrics.md explains the
counts. Exit status: 0, or 2 if RUN has no ledger. Changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpo.analysis.ledger import Pair, read_ledger, summarize
from dpo.analysis.runs import Run, read_config
from dpo.errors import InputError
from dpo.numbers import count, figure, signed

LONGEST_TEXT = 300  # characters
SPLITS = {"train": "train", "eval": "test"}  # a split's name in a ledger: its name in a dataset


def find_texts(run: Run, pairs: Sequence[Pair]) -> dict[str, Mapping[str, str]]:
    """Find the texts of pairs in the run's datasets; InputError if the data cannot be loaded."""
    from dpo.data.examples import text_digest  # tokenizers and datasets take seconds to import
    from dpo.data.table import iterate_prompts
    from dpo.data.tokenizer import load_tokenizer
    from dpo.settings.recorded import plan_recorded
    from preference_datasets import BUILT_IN, get_dataset

    has_custom_data = any(pair.dataset not in BUILT_IN for pair in pairs)  # which may hold chats
    tokenizer_keys = ("model.name_or_path", "model.tokenizer_name_or_path") if has_custom_data else ()
    keys = ("local_dirs", "dataset_sources", "list_pairs", *tokenizer_keys)
    plan = plan_recorded({"local_run_dir": str(run.path), **run.config}, where="config.yaml", prefixes=keys)
    trains_on, cache_dir = run.objective.trains_on, plan.run.cache_dir
    options: dict[str, Any] = {"silent": True, "cache_dir": cache_dir, "dataset_sources": plan.data.dataset_sources}
    if has_custom_data:
        options["tokenizer"] = load_tokenizer(plan.model.tokenizer, cache_dir=cache_dir)
    wanted, texts = {pair.example for pair in pairs}, {}
    for split, dataset in dict.fromkeys((pair.split, pair.dataset) for pair in pairs):
        data = get_dataset(dataset, SPLITS[split], trains_on=trains_on, **options)
        for prompt in iterate_prompts([(dataset, data)], trains_on, list_pairs=plan.data.list_pairs):
            for index in range(len(prompt.examples)):
                responses = prompt.texts(index)
                if (digest := text_digest(prompt.text, responses)) in wanted:
                    texts[digest] = {"prompt": prompt.text, **responses}
    return texts


def list_pairs(pairs: Sequence[Pair], texts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """List pairs with their texts."""
    for pair in pairs:
        scores = "" if pair.scores is None else "; scores: chosen {:.3g}, rejected {:.3g}".format(*pair.scores)
        yield (
            f"  {pair.example} {pair.dataset} ({pair.split}), {count(pair.visits, 'visit')}: margin "
            f"{signed(pair.first_margin)} at first, {signed(pair.last_margin)} at last; on average "
            f"{figure(pair.relative_margin, 2)} times the median size of margins at that time{scores}"
        )
        for name, text in texts.get(pair.example, {}).items():
            line = " ".join(text.split())
            if len(line) > LONGEST_TEXT:
                line = f"... {line[-LONGEST_TEXT:]}" if name == "prompt" else f"{line[:LONGEST_TEXT]} ..."
            yield f"    {name:<9} {line}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="pairs in each list (default: 10)")
    options = parser.parse_args(arguments)
    try:
        table = read_ledger(options.run)
    except InputError as error:
        parser.error(str(error))
    run, summary = read_config(options.run), summarize(table, top=options.top)
    pairs = [*summary.never_flipped, *summary.suspected_noise]
    texts, notes = {pair.example: pair.texts for pair in pairs if pair.texts is not None}, []
    if missing := [pair for pair in pairs if pair.example not in texts]:
        try:
            texts |= find_texts(run, missing)
            if any(pair.example not in texts for pair in missing):
                notes.append("The run's datasets have changed, and lack some of these pairs.")
        except (InputError, OSError) as error:
            notes.append(f"Texts are not shown: {error}")
    lines = [
        f"{count(summary.rows, 'visit')} of {count(summary.examples, 'example')}, of which "
        f"{count(summary.truncated, 'is', 'are')} truncated.",
        "",
        f"Pairs that never flip: {summary.n_never_flipped:,} of {count(summary.n_seen_again, 'pair')} that were seen "
        f"at least twice had a margin never above 0.",
        *list_pairs(summary.never_flipped, texts),
        "",
        f"Suspected label noise: {count(summary.n_suspected_noise, 'pair')} never ranked right, and wrong by at least "
        f"the median size of margins at that time.",
        *list_pairs(summary.suspected_noise, texts),
        *notes,
    ]
    for line in lines:
        print("".join(c if c.isprintable() else " " for c in line))  # other characters could change the terminal
    return 0


if __name__ == "__main__":
    sys.exit(main())
