"""The pages of an evaluation: its result, and the form in which people judge."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpo.analysis.page import fill_template
from dpo.judging.answers import Pair
from dpo.judging.judges import Verdict, is_shown_swapped
from dpo.numbers import percent
from dpo.system.plain_files import check_own, write_file

# files of an evaluation, and how each begins; pairs were once known by `id`
FORM = {  # where people judge
    "judge.html": ".*<title>Which answer is better\\?</title>",
    "pairs.jsonl": r'\{"(id|pair)": "\w{16}", "prompt": ',
}
RESULT = {  # by the kind of the judge
    "evaluation-{}.html": ".* against .* · evaluation</title>",
    "evaluation-{}.json": r'\{\s*"policy": ',
    "judged-{}.jsonl": r'\{"pair": "\w{16}", "prompt": ',
}
MOST_SHOWN = 100  # pairs on the page; the files have all


def check_files(folder: Path, kind: str) -> None:
    """Raise InputError if files of others would be replaced."""
    files = FORM if kind == "human" else RESULT
    for name, mark in files.items():
        check_own(folder / name.format(kind), mark)


def write_result(file: Path, facts: Mapping, pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> None:
    """Write the page of a result, on which losses come first, as they say most."""
    words = {1.0: "wins", 0.5: "ties", 0.0: "loses", None: "no verdict"}
    cards = []
    for pair, verdict in zip(pairs, verdicts, strict=True):
        cards.append((words.get(verdict.score, "wins in one order, ties in the other"), pair, verdict))
    cards.sort(key=lambda card: math.inf if card[2].score is None else card[2].score)
    _write(file, "result.html.jinja", facts=facts, cards=cards[:MOST_SHOWN], n_pairs=len(pairs), percent=percent)


def write_form(file: Path, pairs: Sequence[Pair], drawn: Mapping) -> None:
    """Write a page on which people judge without knowing whose answer is on which side, and its pairs as JSON lines.

    `drawn` has the options with which the answers were drawn; each verdict gets them.
    """
    rows = []
    for pair in pairs:
        left = pair.first.text.strip()
        right = pair.second.text.strip()
        if is_shown_swapped(pair):
            left, right = right, left
        rows.append({"pair": pair.id, "prompt": pair.question, "left": left, "right": right})
    write_file(file.with_name("pairs.jsonl"), "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    _write(file, "form.html.jinja", pairs=_write_script(rows), drawn=_write_script(drawn), n_pairs=len(pairs))


def _write_script(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")  # `<` could end the script


def _write(file: Path, template: str, **context: Any) -> None:
    html = fill_template(Path(__file__).with_name(template), context)
    write_file(file, html.encode("utf-8", "replace"))
