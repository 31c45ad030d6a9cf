"""The findings of a ledger: pairs that never flip, suspected label noise, margin against length, drift by dataset.

    python -m scripts.ledger RUN [--top 10] [--no-texts] [--json] [--trust-remote-code]

For runs with `ledger=true`, also while they train or after a kill. The texts come from the run's datasets, if they can
be loaded here; those of pairs that the policy drew are in the ledger. docs/metrics.md explains the counts. Exit status:
0, or 2 if RUN has no ledger. Changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo.errors import InputError
from scripts.trust import add_trust_option

if TYPE_CHECKING:
    from dpo.analysis.ledger import Pair
    from dpo.analysis.ledger_view import LedgerView, Table, Texts
    from dpo.analysis.runs import Run

CUT = 300  # characters of a text


def find_texts(run: Run, pairs: Sequence[Pair], *, trust_remote_code: bool = False) -> Texts:
    """Find the texts of pairs in the run's datasets. Raises InputError if they cannot be loaded."""
    from dpo.analysis import ledger_texts  # tokenizers and datasets take seconds to import
    from preference_datasets import BUILT_IN, get_dataset

    return ledger_texts.find_texts(
        run, pairs, get_dataset=get_dataset, built_in=BUILT_IN, trust_remote_code=trust_remote_code
    )


def tell(view: LedgerView) -> list[str]:
    """Lines to print, without control characters, which could steer the terminal."""
    lines = [view.text]
    for listed in view.lists:
        lines += ["", f"{listed.title}: {listed.text}"]
        for pair in listed.pairs:
            lines.append(f"  {pair.name}, {pair.margins}")
            lines += [f"    {name:<9} {cut(text, keep_end=name == 'prompt')}" for name, text in pair.texts]
    for table in view.tables:
        lines += ["", table.title, *tell_table(table)]
    lines += [view.note] if view.note else []
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines]


def cut(text: str, *, keep_end: bool) -> str:
    """A text on one line, shortened at its start or end."""
    text = " ".join(text.split())
    if len(text) <= CUT:
        return text
    return f"... {text[-CUT:]}" if keep_end else f"{text[:CUT]} ..."


def tell_table(table: Table) -> list[str]:
    """Lines of a table: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    return [
        "  ".join(["", row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))])
        for row in (table.columns, *table.rows)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="pairs in each list (default: 10)")
    parser.add_argument(
        "--no-texts", action="store_true", help="leave the texts out; the run's datasets are not loaded"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_trust_option(parser)
    asked = parser.parse_args(arguments)
    from dpo.analysis.ledger import summarize
    from dpo.analysis.ledger_file import read_ledger
    from dpo.analysis.ledger_view import load_texts, view_summary
    from dpo.analysis.runs import read_config

    if asked.top < 1:
        parser.error(f"--top {asked.top} must be 1 or more")
    try:
        table = read_ledger(asked.run)
    except InputError as error:
        parser.error(str(error))
    if table is None:
        parser.error(f"{asked.run} has no ledger.parquet: give the directory of a run with ledger=true")
    summary = summarize(table, top=asked.top)
    find = partial(find_texts, trust_remote_code=asked.trust_remote_code)
    texts, note = ({}, "") if asked.no_texts else load_texts(read_config(asked.run), summary, find)
    if asked.json:
        found: dict[str, Any] = dataclasses.asdict(summary)
        for pair in (*found["never_flipped"], *found["suspected_noise"]):
            pair["texts"] = texts.get(pair["example"])
        print(json.dumps(found | {"note": note or None}, indent=2))
        return 0
    print("\n".join(tell(view_summary(summary, texts, note))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
