"""View of a ledger: pairs that never flip, suspected label noise, margin against length, drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpo.analysis.runs import Run
from dpo.errors import InputError
from dpo.wording import count, figure, percent, shortened, signed

if TYPE_CHECKING:
    from dpo.analysis.ledger import LedgerSummary, Pair

TOP = 5  # pairs in each list

Texts = Mapping[str, Mapping[str, str]]  # of examples: prompt, chosen, rejected
FindTexts = Callable[[Run, Sequence["Pair"]], Texts]
"""Function that finds the texts of a run's pairs. Raises InputError if they cannot be loaded."""


class Listed(NamedTuple):
    """A pair and its texts, if they are known."""

    name: str
    margins: str
    texts: list[tuple[str, str]]


class PairList(NamedTuple):
    title: str
    text: str
    pairs: list[Listed]


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


class LedgerView(NamedTuple):
    text: str
    lists: list[PairList]
    tables: list[Table]
    note: str


def view_ledger(run: Run, find_texts: FindTexts | None = None) -> LedgerView | None:
    """View of a run's ledger, with texts if `find_texts` can load them; None without a ledger."""
    if run.ledger is None:
        return None
    from dpo.analysis.ledger import summarize

    found = summarize(run.ledger, top=TOP)
    texts, note = load_texts(run, found, find_texts)
    of_data = [pair for pair in (*found.never_flipped, *found.suspected_noise) if pair.texts is None]
    if of_data and not any(pair.example in texts for pair in of_data):
        note = f"{note}{'; ' if note else ''}python -m scripts.ledger {run.path} shows texts that can be loaded"
    return view_summary(found, texts, note)


def load_texts(run: Run, found: LedgerSummary, find_texts: FindTexts | None) -> tuple[Texts, str]:
    """Texts of the listed pairs, and a note that explains why any are missing.

    Texts of drawn pairs are in the ledger; `find_texts` finds the others.
    """
    listed = [*found.never_flipped, *found.suspected_noise]
    drawn = {pair.example: pair.texts for pair in listed if pair.texts is not None}
    asked = [pair for pair in listed if pair.texts is None]
    if not asked or find_texts is None:
        return drawn, ""
    try:
        texts = find_texts(run, asked)
    except (InputError, OSError) as error:
        return drawn, f"Texts are not shown: {error}"
    wanted = {pair.example for pair in asked}
    missing = wanted - texts.keys()
    note = (
        f"Its datasets have changed, and lack {len(missing)} of these {count(len(wanted), 'pair')}" if missing else ""
    )
    return {**drawn, **texts}, note


def view_summary(found: LedgerSummary, texts: Texts, note: str) -> LedgerView:
    """Present a ledger's summary in words and tables."""
    visits, examples = count(found.rows, "visit"), count(found.examples, "example")
    text = f"{visits} of {examples}, of which {count(found.truncated, 'is', 'are')} truncated."
    return LedgerView(text, _lists(found, texts), [*_lengths(found), *_drift(found)], note)


def _lists(found: LedgerSummary, texts: Texts) -> list[PairList]:
    if not found.lengths:
        return []  # no pairs, or no visit after the first update
    never = (
        f"{found.n_never_flipped:,} of {count(found.n_seen_again, 'pair')} that were seen at least twice "
        f"{'was' if found.n_never_flipped == 1 else 'were'} wrong each time: with a margin never above 0."
    )
    drawn = any(pair.texts is not None for pair in found.suspected_noise)
    advice = " Look whether the scorer is right about those that were drawn." if drawn else ""
    if any(pair.texts is None for pair in found.suspected_noise):
        advice = f" Look whether their labels are swapped.{advice}"
    noise = (
        f"{count(found.n_suspected_noise, 'pair was', 'pairs were')} never right, and wrong by more than the typical "
        f"margin of their time.{advice}"
    )
    return [
        PairList("Pairs that never flip", never, [_listed(pair, texts) for pair in found.never_flipped]),
        PairList("Suspected label noise", noise, [_listed(pair, texts) for pair in found.suspected_noise]),
    ]


def _listed(pair: Pair, texts: Texts) -> Listed:
    margins = (
        f"{count(pair.visits, 'visit')}: margin {signed(pair.first_margin)} at first, "
        f"{signed(pair.last_margin)} at last, {figure(pair.relative_margin, 2)} times the typical one"
    )
    if pair.scores is not None:
        margins += f"; scores {figure(pair.scores[0])} and {figure(pair.scores[1])}"
    named = [(name, shortened(text)) for name, text in texts.get(pair.example, {}).items()]
    return Listed(f"{pair.example} {pair.dataset} ({pair.split})", margins, named)


def _lengths(found: LedgerSummary) -> list[Table]:
    tables = []
    for of_split in found.lengths:
        r = "" if of_split.correlation is None else f", correlation {signed(of_split.correlation, 2)}"
        rows = [[c.difference, f"{c.pairs:,}", signed(c.margin), percent(c.right)] for c in of_split.classes]
        columns = ("chosen minus rejected tokens", "pairs", "mean margin", "ranked right")
        tables.append(Table(f"Margin against length, {of_split.split}{r}", columns, rows))
    return tables


def _drift(found: LedgerSummary) -> list[Table]:
    """Table of drift: with pairs, margins and the change of both sides; else loss and log-probabilities."""
    has_pairs = any(period.margin is not None for period in found.drift)
    wanted = ("loss", "margin", "right", "chosen_change", "rejected_change") if has_pairs else ("loss", "policy_chosen")
    rows = []
    for p in found.drift:
        updates = (
            f"{p.first_update:,}" if p.first_update == p.last_update else f"{p.first_update:,} to {p.last_update:,}"
        )
        values = ("" if (value := getattr(p, name)) is None else figure(value) for name in wanted)
        rows.append([f"{p.dataset} ({p.split})", updates, f"{p.visits:,}", *values])
    names = ("dataset", "updates", "visits", *(name.replace("_", " ") for name in wanted))
    return [Table("Drift by dataset, means over the visits; a change is policy minus reference", names, rows)]
