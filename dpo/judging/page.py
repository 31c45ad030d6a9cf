"""The pages of an evaluation: its result, and the form in which people judge."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dpo.analysis import page
from dpo.judging.answers import Pair
from dpo.judging.judges import Verdict, is_shown_swapped
from dpo.numbers import percent
from dpo.system.plain_files import check_own, write_file

# files of an evaluation, by the kind of its judge, and how each begins; pairs were once known by `id`
FORM = {
    "judge.html": ".*<title>Which answer is better\\?</title>",
    "pairs.jsonl": r'\{"(id|pair)": "\w{16}", "prompt": ',
}
RESULT = {
    "evaluation-{}.html": ".* against .* · evaluation</title>",
    "evaluation-{}.json": r'\{\s*"policy": ',
    "judged-{}.jsonl": r'\{"pair": "\w{16}", "prompt": ',
}
MOST_SHOWN = 100  # pairs on the page; the files have all


def check_files(folder: Path, kind: str) -> None:
    """Raise InputError if files of others would be replaced."""
    for name, mark in (FORM if kind == "human" else RESULT).items():
        check_own(folder / name.format(kind), mark)


def write_result(file: Path, facts: Mapping, pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> None:
    """Losses first, as they say most."""
    order = sorted(range(len(pairs)), key=lambda i: (verdicts[i].score is None, verdicts[i].score or 0))
    words = {1.0: "wins", 0.5: "ties", 0.0: "loses", None: "no verdict"}
    cards = [
        (words.get(verdicts[i].score, "wins in one order, ties in the other"), pairs[i], verdicts[i])
        for i in order[:MOST_SHOWN]
    ]
    _write(file, "result.html.jinja", facts=facts, cards=cards, n_pairs=len(pairs), percent=percent)


def write_form(file: Path, pairs: Sequence[Pair], drawn: Mapping) -> None:
    """A page on which people judge without knowing whose answer is on which side, and its pairs as JSON lines.

    `drawn` has the options with which the answers were drawn; each verdict gets them.
    """
    shown = []
    for pair in pairs:
        left, right = (pair.second, pair.first) if is_shown_swapped(pair) else (pair.first, pair.second)
        shown.append({"pair": pair.id, "prompt": pair.question, "left": left.text.strip(), "right": right.text.strip()})
    write_file(file.with_name("pairs.jsonl"), "".join(f"{json.dumps(pair)}\n" for pair in shown).encode())
    # in a script, where `<` could end it
    scripts = {name: json.dumps(value).replace("<", "\\u003c") for name, value in (("pairs", shown), ("drawn", drawn))}
    _write(file, "form.html.jinja", **scripts, n_pairs=len(pairs))


def _write(file: Path, template: str, **values: Any) -> None:
    folders = [Path(__file__).parent, Path(page.__file__).parent]
    jinja = Environment(loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    write_file(file, jinja.get_template(template).render(values).encode("utf-8", "replace"))
