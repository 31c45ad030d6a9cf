"""The report of runs: `report.html`, and its curves as PNG files.

The page is a single file that needs no network and runs no code: every text is escaped, and its content policy forbids
scripts and requests, because samples and settings come from models and users. The template is `page.html.jinja`.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis import summary
from dpo.analysis.curves import COLORS, LIGHT, Picture, draw_all
from dpo.analysis.findings import find_all
from dpo.analysis.measures import Cost, MarginParts, margin_parts, measure_cost
from dpo.analysis.rules import WARNING, Finding
from dpo.analysis.runs import Run, read_runs
from dpo.errors import InputError
from dpo.numbers import figure, shortened, signed
from dpo.system.plain_files import make_directory, replacing
from dpo.system.run_directory import REPORT

if TYPE_CHECKING:
    from dpo.analysis.ledger import FindTexts, LedgerSummary

EVALUATION_SETTINGS = ("datasets", "n_eval_examples")  # equal in all runs whose evaluations are compared
FIRST_SAMPLES = 4  # shown before the reader asks for more
LEDGER_PAIRS = 5  # pairs in each list
TITLE_END = "· training report</title>".encode()  # in each page, which is known by it


class Section(NamedTuple):
    """The page's content for one run."""

    run: Run
    color: str  # CSS variable of its curves' colour
    about: str
    verdict: str
    tiles: dict[str, summary.Tile]  # by label
    warnings: list[Finding]
    notes: list[Finding]
    margin: MarginParts | None
    margin_bars: list[tuple[str, float, str]]
    settings: list[summary.Row]
    ledger: LedgerSummary | None


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    find_texts: FindTexts | None = None,
    ended: bool = False,
) -> Path:
    """Write the report of some run directories into `out`.

    Returns the page's path.

    `find_texts` finds the texts of a ledger's pairs. `ended` says that the
    runs have ended, though they may still hold their locks.

    Raises InputError for a path that is not a run's, and if `out` cannot be written or has other files of these names.
    """
    contents = read_runs(runs, ended=ended)
    page = out / REPORT.name
    try:
        make_directory(out)
        pictures = list(draw_all(contents))
        files = {f"{picture.name}.png": picture.png for picture in pictures}
        taken = [name for name in (page.name, *files) if os.path.lexists(out / name)]
        if taken and not _is_report(page):
            raise InputError(f"{out} has {', '.join(taken)}, not of a report: give another directory with --out")
        html = render(contents, pictures, find_texts)
        # the page first, as it says whose the other files are
        for name, content in {page.name: html.encode("utf-8", "replace"), **files}.items():
            with replacing(out / name) as unfinished:
                unfinished.write_bytes(content)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error}; choose another directory with --out") from error
    return page


def _is_report(page: Path) -> bool:
    """Return whether a file is a page of `render`."""
    return page.is_file() and TITLE_END in page.read_bytes()


def render(
    runs: Sequence[Run],
    pictures: Sequence[Picture],
    find_texts: FindTexts | None = None,
) -> str:
    """Render the page of runs as HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["svg_uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    jinja.filters |= {"shortened": shortened, "figure": figure, "signed": signed}
    costs = [measure_cost(run) for run in runs]
    sections = [_make_section(i, run, costs[i], find_texts) for i, run in enumerate(runs)]
    context: dict[str, Any] = {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "sections": sections,
        "columns": dict.fromkeys(label for section in sections for label in section.tiles),
        "colors": COLORS,
        "pictures": pictures,
        "samples": summary.collect_samples(runs),
        "drawn": summary.collect_drawn(runs),
        "n_first": FIRST_SAMPLES,
        "settings": summary.setting_rows(runs),
        "data": summary.data_rows(runs),
        "machines": summary.machine_rows(runs, costs),
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "several": len(runs) > 1,
        "best": _find_best(sections),
    }
    return jinja.get_template("page.html.jinja").render(context)


def _make_section(i: int, run: Run, cost: Cost, find_texts: FindTexts | None) -> Section:
    findings = find_all(run)
    margin = margin_parts(run)
    return Section(
        run,
        color=f"--plot-{i % len(LIGHT.colors)}",
        about=summary.describe_run(run),
        verdict=summary.give_verdict(run, findings),
        tiles={tile.label: tile for tile in summary.make_tiles(run, cost)},
        warnings=[finding for finding in findings if finding.level == WARNING],
        notes=[finding for finding in findings if finding.level != WARNING],
        margin=margin,
        margin_bars=summary.list_margin_parts(margin),
        settings=summary.setting_rows([run], all_settings=True),
        ledger=summarize_ledger(run, find_texts),
    )


def summarize_ledger(run: Run, find_texts: FindTexts | None = None) -> LedgerSummary | None:
    """Summarize a run's ledger, with texts if `find_texts` is given.

    None without a ledger.
    """
    if run.ledger is None:
        return None
    from dpo.analysis.ledger import summarize  # needs pyarrow, which most runs do not

    ledger = summarize(run.ledger, top=LEDGER_PAIRS).explain_missing_pairs(run)
    if find_texts is not None:
        ledger = ledger.find_texts(run, find_texts)
    # drawn pairs, which have scores, have their texts in the ledger; all others need texts from the datasets
    texts_from_data = [pair.texts for pair in ledger.listed if pair.scores is None]
    if texts_from_data and not any(texts_from_data):
        command = f"python -m scripts.ledger {run.path} shows texts that can be loaded"
        ledger = replace(ledger, note=f"{ledger.note}; {command}" if ledger.note else command)
    return ledger


def _find_best(sections: Sequence[Section]) -> set[tuple[Path, str]]:
    """Find (run, label) of the best tiles among comparable ones.

    Tiles of one label are comparable if their runs agree in the settings that the value depends on.
    """
    comparable: dict[tuple[str, str], dict[Path, float]] = {}  # ranks of runs, by label and settings
    for section in sections:
        for label, tile in section.tiles.items():
            if section.run.config and math.isfinite(tile.rank_by):
                settings = [section.run.setting(key) for key in (*EVALUATION_SETTINGS, *tile.depends_on)]
                ranks = comparable.setdefault((label, json.dumps(settings, sort_keys=True)), {})
                ranks[section.run.path] = tile.rank_by
    best = set()
    for (label, _), ranks in comparable.items():
        if len(ranks) > 1:  # a single run is not the best of anything
            highest = max(ranks.values())
            best |= {(path, label) for path, rank in ranks.items() if rank == highest}
    return best
