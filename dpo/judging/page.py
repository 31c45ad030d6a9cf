"""The pages of an evaluation: its result, and the form in which people judge."""

import json
import math
from pathlib import Path

from dpo.analysis.page import fill_template
from dpo.judging.answers import Pair
from dpo.judging.judges import Verdict, is_shown_swapped
from dpo.system.plain_files import check_own, write_file

# Each file of an evaluation begins with its pattern; older versions wrote `id` in place of `pair`.
FORM = {  # where people judge
    "judge.html": ".*<title>Which answer is better\\?</title>",
    "pairs.jsonl": r'\{"(id|pair)": "\w{16}", "prompt": ',
}
RESULT = {  # by the kind of the judge
    "evaluation-{}.html": ".* against .* · evaluation</title>",
    "evaluation-{}.json": r'\{\s*"policy": ',
    "judged-{}.jsonl": r'\{"pair": "\w{16}", "prompt": ',
}
PAGE_FOLDER = Path(__file__).parent
MOST_SHOWN = 100  # pairs on the page; the files have all


def check_files(folder: Path, kind: str) -> None:
    """Raise InputError if a file that is not ours has the name of one that this kind of judge writes."""
    files = FORM if kind == "human" else RESULT
    for name, mark in files.items():
        check_own(folder / name.format(kind), mark)


def write_result(
    folder: Path, kind: str, facts: dict, numbers: dict, pairs: list[Pair], verdicts: list[Verdict]
) -> Path:
    """Write the files of a result, and return the page.

    The page shows `facts`, and the pairs that the first model loses first, as they say most. The JSON file also has
    `numbers`.
    """
    words = {1.0: "wins", 0.5: "ties", 0.0: "loses", None: "no verdict"}
    cards = []  # (outcome, pair, verdict)
    lines = ""
    for pair, verdict in zip(pairs, verdicts, strict=True):
        cards.append((words.get(verdict.score, "wins in one order, ties in the other"), pair, verdict))
        lines += json.dumps({"pair": pair.id, "prompt": pair.question, **verdict._asdict()}) + "\n"
    # Cards are sorted by score; those without a verdict come last.
    cards.sort(key=lambda card: math.inf if card[2].score is None else card[2].score)
    page = folder / f"evaluation-{kind}.html"  # one judge does not replace the result of another
    context = {"facts": facts, "cards": cards[:MOST_SHOWN], "n_pairs": len(pairs)}
    write_file(page, fill_template(PAGE_FOLDER / "result.html.jinja", context))
    write_file(folder / f"judged-{kind}.jsonl", lines.encode())
    write_file(page.with_suffix(".json"), json.dumps({**facts, **numbers}, indent=2).encode())
    return page


def write_form(file: Path, pairs: list[Pair], drawn: dict) -> None:
    """Write a page on which people judge without knowing whose answer is on which side, and its pairs as JSON lines.

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
    write_file(file.with_name("pairs.jsonl"), "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    write_file(file, fill_template(PAGE_FOLDER / "form.html.jinja", {"pairs": rows, "drawn": drawn}))
