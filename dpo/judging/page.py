"""The pages of an evaluation: its result, and the form in which people judge."""

import json
import math
from pathlib import Path

from dpo.analysis.page import fill_template
from dpo.data.schema import write_lines
from dpo.judging.answers import Pair
from dpo.judging.judges import Verdict, is_shown_swapped
from dpo.system.plain_files import check_own, write_file

# The pattern with which each file of an evaluation begins, by name; older versions wrote `id` in place of `pair`.
FORM = {  # where people judge
    "judge.html": ".*<title>Which answer is better\\?</title>",
    "pairs.jsonl": r'\{"(id|pair)": "\w{16}", "prompt": ',
}
RESULT = {  # {} is the kind of judge, and OTHER if it is given
    "evaluation-{}.html": ".* against .* · evaluation</title>",
    "evaluation-{}.json": r'\{\s*"policy": ',
    "judged-{}.jsonl": r'\{"pair": "\w{16}", "prompt": ',
}
MOST_SHOWN = 100  # pairs on the page; the files have all


def check_files(folder: Path, name: str) -> None:
    """Raise InputError if a file of the result `name`, or of the form, would replace a file that is not ours."""
    files = FORM if name == "human" else RESULT
    for file, mark in files.items():
        check_own(folder / file.format(name), mark)


def write_result(
    folder: Path, name: str, facts: dict, numbers: dict, pairs: list[Pair], verdicts: list[Verdict]
) -> Path:
    """Write the files of a result, and return the path of its page.

    The page shows `facts`, and the pairs with the first model's losses on top, as these say most. The JSON file has
    `facts` and `numbers`.
    """
    words = {
        1.0: "wins",
        0.75: "wins in one order, ties in the other",
        0.5: "ties",
        0.25: "loses in one order, ties in the other",
        0.0: "loses",
        None: "no verdict",
    }
    cards = []  # (outcome, pair, verdict)
    lines = []
    for pair, verdict in zip(pairs, verdicts, strict=True):
        cards.append((words[verdict.score], pair, verdict))
        lines.append({"pair": pair.id, "prompt": pair.question, **verdict._asdict()})
    # Cards are sorted by score; those without a verdict come last.
    cards.sort(key=lambda card: math.inf if card[2].score is None else card[2].score)
    page = folder / f"evaluation-{name}.html"  # so that results of several judges and models stay
    context = {"facts": facts, "cards": cards[:MOST_SHOWN], "n_pairs": len(pairs)}
    write_file(page, fill_template("judging/result.html.jinja", context))
    write_lines(folder / f"judged-{name}.jsonl", lines)
    write_file(page.with_suffix(".json"), json.dumps({**facts, **numbers}, indent=2).encode())
    return page


def write_form(file: Path, pairs: list[Pair], drawn: dict) -> None:
    """Write a page on which people judge without knowing which model's answer is on the left, and pairs as JSON lines.

    `drawn` has the options with which the answers were drawn. The page saves them with each verdict, so that
    `dpo evaluate --judge verdicts:FILE` finds the same answers.
    """
    rows = []
    for pair in pairs:
        left = pair.first.text.strip()
        right = pair.second.text.strip()
        if is_shown_swapped(pair):
            left, right = right, left
        rows.append({"pair": pair.id, "prompt": pair.question, "left": left, "right": right})
    write_lines(file.with_name("pairs.jsonl"), rows)
    write_file(file, fill_template("judging/form.html.jinja", {"pairs": rows, "drawn": drawn}))
