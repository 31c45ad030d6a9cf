"""The report of runs: `report.html`, and its curves as PNG files.

The page is a single file that needs no network and runs no code: every text is escaped, and its content policy forbids
scripts and requests, because samples and settings come from models and users. The template is `page.html.jinja`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis import summary
from dpo.analysis.curves import COLORS, LIGHT, Picture, draw_all
from dpo.analysis.measures import Cost, measure_cost
from dpo.analysis.rules import WARNING, find_all
from dpo.analysis.runs import Run, read_runs
from dpo.errors import InputError
from dpo.numbers import shortened
from dpo.system.plain_files import make_directory, replacing
from dpo.system.run_directory import REPORT

if TYPE_CHECKING:
    from dpo.analysis.ledger import FindTexts, LedgerSummary

PARTS_OF_ONE_RUN = ("about", "verdict", "findings", "samples", "drawn", "ledger", "all_settings", "machine")
FIRST_SAMPLES = 4  # shown before the reader asks for more
LEDGER_PAIRS = 5  # pairs in each list
TITLE_END = "· training report</title>".encode()  # in each page, which is known by it


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    find_texts: FindTexts | None = None,
    ended: bool = False,
) -> Path:
    """Write the report of some run directories into `out`.

    Returns the page's path.

    `find_texts` finds the texts of a ledger's pairs. `ended` says that the runs have ended, though they may still hold
    their locks.

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
    """Render the page of a run, or of several compared, as HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["svg_uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    jinja.filters["shortened"] = shortened
    costs = [measure_cost(run) for run in runs]
    tiles = [
        {tile.label: tile for tile in summary.make_tiles(run, cost)} for run, cost in zip(runs, costs, strict=True)
    ]
    context = dict.fromkeys(PARTS_OF_ONE_RUN) | {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "runs": runs,
        "several": len(runs) > 1,
        "run_colors": [f"--plot-{i % len(LIGHT.colors)}" for i in range(len(runs))],  # of the curves, as CSS variables
        "tiles": tiles,
        "columns": dict.fromkeys(label for tiles_of_run in tiles for label in tiles_of_run),
        "colors": COLORS,
        "pictures": pictures,
        "n_first": FIRST_SAMPLES,
        "settings": summary.setting_rows(runs) if any(run.config for run in runs) else None,
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    if len(runs) == 1:
        context |= _describe_run(runs[0], costs[0], find_texts)
    return jinja.get_template("page.html.jinja").render(context)


def _describe_run(run: Run, cost: Cost, find_texts: FindTexts | None) -> dict[str, Any]:
    """Make what only the page of a single run has."""
    findings = find_all(run)
    n_warnings = len(run.warnings) + sum(finding.level == WARNING for finding in findings)
    return {
        "about": summary.describe_run(run),
        "verdict": summary.give_verdict(run, n_warnings),
        "findings": findings,
        "samples": summary.collect_samples(run),
        "drawn": summary.collect_drawn(run),
        "ledger": summarize_ledger(run, find_texts),
        "all_settings": summary.all_settings(run),
        "machine": summary.machine_rows(run, cost),
    }


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
