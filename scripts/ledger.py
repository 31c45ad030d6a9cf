"""What the ledger of a run says: pairs that never flip, suspected label noise, margin against length, drift by dataset.

    python -m scripts.ledger RUN [--top 10] [--no-texts] [--json]

For runs with `ledger=true`, also while they train or after a kill. The texts come from the run's datasets, if they can
be loaded here. docs/metrics.md says what is counted. Exit status: 0, or 2 if RUN has no ledger. Changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.errors import InputError

if TYPE_CHECKING:
    from dpo.analysis.ledger import LedgerSummary, Lengths, Pair, Period

SPLITS = {"train": "train", "eval": "test"}  # in a ledger, in a dataset
Texts = Mapping[str, Mapping[str, str]]  # of examples: prompt, chosen, rejected


def find_texts(run_dir: Path, pairs: Iterable[Pair]) -> Texts:
    """The texts of pairs, from the datasets of the run. Raises InputError if they cannot be loaded."""
    import yaml

    from dpo.data.examples import text_digest
    from dpo.data.prompts import iterate_prompts
    from dpo.data.tokenizer import load_tokenizer
    from dpo.system.paths import get_cache_dir
    from preference_datasets import BUILT_IN, get_dataset

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise InputError(f"{path} is missing")
    config, wanted, texts = yaml.safe_load(path.read_text(encoding="utf-8")), {}, {}
    for pair in pairs:
        wanted.setdefault((SPLITS[pair.split], pair.dataset), set()).add(pair.example)
    cache_dir, model = get_cache_dir(config["local_dirs"]), config["model"]
    options = {"silent": True, "cache_dir": cache_dir, "dataset_sources": config["dataset_sources"]}
    if any(name not in BUILT_IN for _, name in wanted):  # own data may be chats, which a tokenizer renders
        name = model["tokenizer_name_or_path"] or model["name_or_path"]
        options["tokenizer"] = load_tokenizer(name, cache_dir=cache_dir)  # whose code is not run, whoever's run it is
    for (split, name), digests in wanted.items():
        for prompt in iterate_prompts(get_dataset, [name], split, **options):
            for responses in prompt.examples(sft_mode=False):
                digest = text_digest(prompt.text, responses.values())
                if digest in digests:
                    texts[digest] = {"prompt": prompt.text, **responses}
    return texts


def tell_pairs(pairs: Sequence[Pair], texts: Texts) -> list[str]:
    """A line for each pair, and lines for its texts, of long ones the part that matters."""
    lines = []
    for p in pairs:
        margins = f"{p.first_margin:+.3f} at first, {p.last_margin:+.3f} at last"
        lines.append(
            f"  {p.example} {p.dataset} ({p.split}), {p.visits} visit{'s' * (p.visits != 1)}: margin {margins}, "
            f"{p.relative_margin:+.1f} times the typical one"
        )
        for name, text in texts.get(p.example, {}).items():
            shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
            cut = f"... {shown[-300:]}" if name == "prompt" else f"{shown[:300]} ..."
            lines.append(f"    {name:<9} {shown if len(shown) <= 300 else cut}")
    return lines


def tell_lengths(lengths: Sequence[Lengths]) -> list[str]:
    lines = []
    for of_split in lengths:
        r = "undefined" if of_split.correlation is None else f"{of_split.correlation:+.2f}"
        lines += [f"  {of_split.split}: correlation {r}", f"    {'tokens':>12} {'pairs':>9} {'margin':>9} {'right':>7}"]
        lines += [f"    {c.difference:>12} {c.pairs:>9,} {c.margin:>+9.3f} {c.right:>7.1%}" for c in of_split.classes]
    return lines


def tell_drift(periods: Sequence[Period]) -> list[str]:
    columns = ("loss", "margin", "right", "policy_chosen", "policy_rejected", "chosen_change", "rejected_change")
    lines = [f"  {'':<22} {'updates':>15} {'visits':>9}" + "".join(f" {name:>15}" for name in columns)]
    for p in periods:
        updates = f"{p.first_update}" if p.first_update == p.last_update else f"{p.first_update} to {p.last_update}"
        values = ("" if (v := getattr(p, name)) is None else f"{v:.4g}" for name in columns)
        lines.append(
            f"  {f'{p.dataset} ({p.split})':<22} {updates:>15} {p.visits:>9,}" + "".join(f" {v:>15}" for v in values)
        )
    return lines


def tell(summary: LedgerSummary, texts: Texts) -> list[str]:
    """The lines to print; of pairs, if there are any whose policy had changed."""
    n_rows, n_examples, n_cut = summary.rows, summary.examples, summary.truncated
    lines = [f"{n_rows:,} visits of {n_examples:,} examples, of which {n_cut:,} are truncated", ""]
    if summary.lengths:
        lines += [
            f"Pairs that never flip: {summary.n_never_flipped:,} of {summary.n_seen_again:,} with at least two visits "
            f"after the first update were wrong (margin 0 or less) at each of them",
            *tell_pairs(summary.never_flipped, texts),
            "",
            f"Suspected label noise: {summary.n_suspected_noise:,} pairs were never right, and wrong by more than the "
            f"typical margin of their time",
            *tell_pairs(summary.suspected_noise, texts),
            "",
            "Margin against length, chosen minus rejected tokens, at the last visits",
            *tell_lengths(summary.lengths),
            "",
        ]
    return [*lines, "Drift by dataset: means; a change is policy minus reference", *tell_drift(summary.drift)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="pairs in each list (default: 10)")
    parser.add_argument("--no-texts", action="store_true", help="do not load the run's datasets for the texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    asked = parser.parse_args(arguments)
    from dpo.analysis.ledger import read_ledger, summarize

    if asked.top < 1:
        parser.error(f"--top {asked.top} must be 1 or more")
    try:
        table = read_ledger(asked.run)
    except InputError as error:
        parser.error(str(error))
    if table is None:
        parser.error(f"{asked.run} has no ledger.parquet: give the directory of a run with ledger=true")
    summary = summarize(table, top=asked.top)
    texts: Texts = {}
    note, listed = None, [*summary.never_flipped, *summary.suspected_noise]
    if listed and not asked.no_texts:
        try:
            texts = find_texts(asked.run, listed)
            if missing := {pair.example for pair in listed} - texts.keys():
                note = f"its datasets have changed, and lack {len(missing)} of these pairs"
        except InputError as error:
            note = f"texts are not shown: {error}"
    if asked.json:
        found: dict[str, Any] = dataclasses.asdict(summary)
        for pair in (*found["never_flipped"], *found["suspected_noise"]):
            pair["texts"] = texts.get(pair["example"])
        print(json.dumps(found | {"note": note}, indent=2))
        return 0
    print("\n".join([*tell(summary, texts), *([note] if note else [])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
