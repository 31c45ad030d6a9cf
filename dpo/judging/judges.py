"""Judges, which decide which of two answers to a prompt is better."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpo.errors import InputError, explaining
from dpo.judging.answers import Pair
from dpo.judging.server import Server
from dpo.models.answers import Answer
from dpo.models.scoring import load_scorer
from dpo.settings.plan import resolve
from dpo.settings.validation import find_problems, raise_problems
from dpo.system.host import choose_device
from dpo.system.plain_files import has_form, read_text

QUESTION_FOLDER = Path(__file__).parent / "templates"
# This pattern matches the end of a line with a verdict: the winner, and perhaps a reason. A and B must be capitals, as
# "a" is also an article.
VERDICT_END = (
    r"[^\w\n]*(?i:(?:answer|response|summary) )?(A|B|(?i:(?:a )?tie|neither))"
    r"[^\w\n]*(?:\([^)\n]*\)|(?:because|as|since) .*)?[^\w\n]*$"
)
VERDICT_LABELS = r"(?i:(?<!not )\b(?:better|preferred|more helpful|winner|verdict|choice)\b)"
LABELLED_VERDICT = re.compile(rf"{VERDICT_LABELS}[\w ]*[^\w\n]*:{VERDICT_END}", re.MULTILINE)
# By winner, scores of the answer that is shown as A, or on the left.
SCORES = {"a": 1.0, "b": 0.0, "tie": 0.5, "a tie": 0.5, "neither": 0.5}
SIDE_SCORES = {"left": 1.0, "right": 0.0, "tie": 0.5}


class Verdict(NamedTuple):
    score: float | None  # 1: the first answer is better, 0: the second, 0.5: neither; None: no valid verdict
    is_flipped: bool = False  # whether the two orders of the answers had different winners
    reason: str = ""  # what the judge said, or why there is no verdict


Judge = Callable[[list[Pair]], list[Verdict]]


# --- scores of each answer --------------------------------------------------------------------------------------------


def make_scoring_judge(**online: Any) -> Judge:
    """Make a judge that scores each answer; the answer with the higher score wins.

    `online` has keys of the config's section `online`, which name a reward model or a function of the user.
    """
    plan = resolve({"online": {"name": "online", **online}})
    raise_problems([problem for problem in find_problems(plan) if problem.key.startswith("online.")])
    scorer = load_scorer(plan, choose_device(), rows=16)

    def judge(pairs: list[Pair]) -> list[Verdict]:
        prompts = [pair.prompt for pair in pairs]
        firsts = scorer(prompts, [pair.first for pair in pairs])
        seconds = scorer(prompts, [pair.second for pair in pairs])
        verdicts = []
        for first, second in zip(firsts, seconds, strict=True):
            score = 0.5 if first == second else float(first > second)
            verdicts.append(Verdict(score, reason=f"scores {first:.4g} and {second:.4g}"))
        return verdicts

    return judge


# --- a language model behind a server ---------------------------------------------------------------------------------


def make_server_judge(server: Server, template: str) -> Judge:
    """Make a judge that asks a server about each pair in both orders, and combines the two replies to one verdict."""

    def judge(pairs: list[Pair]) -> list[Verdict]:
        questions = [_fill_in(template, pair.question, pair.first, pair.second) for pair in pairs]
        questions += [_fill_in(template, pair.question, pair.second, pair.first) for pair in pairs]
        replies = server.ask_all(questions)
        return list(map(_combine, replies[: len(pairs)], replies[len(pairs) :]))

    return judge


def _fill_in(template: str, question: str, a: Answer, b: Answer) -> str:
    texts = {"prompt": question, "a": a.text.strip(), "b": b.text.strip()}
    # All fields are replaced at once, as a question or an answer may itself contain {a}.
    return re.sub(r"\{(prompt|a|b)\}", lambda field: texts[field[1]], template)


def _combine(in_order: str | Exception, reversed_: str | Exception) -> Verdict:
    """Make a verdict on a pair from the replies to its two orders; its score is None if a reply names no winner."""
    scores = []  # by reply, those of the answer that was shown as A
    for reply in (in_order, reversed_):
        if isinstance(reply, Exception):
            return Verdict(None, reason=str(reply))
        score = read_verdict(reply)
        if score is None:
            return Verdict(None, reason=f"no verdict in {reply[-200:]!r}")
        scores.append(score)
    first_score = scores[0]
    first_score_reversed = 1 - scores[1]  # in this order, the first answer was B
    is_flipped = {first_score, first_score_reversed} == {0, 1}
    return Verdict((first_score + first_score_reversed) / 2, is_flipped, str(in_order).strip())


def read_verdict(reply: str) -> float | None:
    """Return answer A's score from the last labelled verdict, or else the last line; None if neither names a winner."""
    winners = LABELLED_VERDICT.findall(reply) or re.findall(f"^{VERDICT_END}", reply.strip().rpartition("\n")[2])
    return SCORES[winners[-1].lower()] if winners else None


def read_template(name: str) -> str:
    """Read one of our templates by name, or a file. Raises InputError if it lacks the field of one of the texts."""
    ours = {file.stem: file for file in sorted(QUESTION_FOLDER.glob("*.txt"))}
    problem = f"--template {name} is neither a file nor one of {', '.join(ours)}"
    with explaining(OSError, lambda why: InputError(f"{problem}: {why}")):
        text = read_text(ours.get(name, Path(name).expanduser()))
    if missing := [field for field in ("{prompt}", "{a}", "{b}") if field not in text]:
        raise InputError(f"--template {name} lacks {', '.join(missing)}, where the texts are to be")
    return text


# --- people -----------------------------------------------------------------------------------------------------------


def is_shown_swapped(pair: Pair) -> bool:
    """Whether people see the second answer on the left; this is random, but always the same for a pair."""
    return random.Random(f"blind {pair.id}").random() < 0.5


def read_verdicts(file: str) -> dict[str, dict]:
    """Read verdicts, {"pair": ID, "better": "left", "right" or "tie"} in each line; return them by the pair's id.

    Verdicts that people save on a page also have `drawn`, the options with which the answers were drawn.
    """
    verdicts = {}
    with explaining(OSError, lambda why: InputError(f"--judge verdicts:{file} cannot be read: {why}")):
        lines = read_text(Path(file)).splitlines()
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            verdict = {"drawn": {}, **json.loads(line)}
        except (ValueError, TypeError, RecursionError):
            verdict = {}
        is_complete = has_form(verdict, {"pair": str, "better": str, "drawn": dict})
        if not is_complete or verdict["better"] not in SIDE_SCORES:
            wanted = '{"pair": ID, "better": "left"}, or "right" or "tie"'
            raise InputError(f"line {number} of {file} is not a verdict: write {wanted}")
        verdicts[verdict["pair"]] = verdict
    return verdicts


def make_file_judge(file: str) -> Judge:
    """Make a judge that looks up verdicts in a file; pairs that the file lacks get a verdict without a score."""
    saved = read_verdicts(file)

    def judge(pairs: list[Pair]) -> list[Verdict]:
        if saved and not saved.keys() & {pair.id for pair in pairs}:
            raise InputError(f"the verdicts of {file} are on other answers: draw these again, with the same options")
        verdicts = []
        for pair in pairs:
            verdict = Verdict(None, reason="not judged")
            if pair.id in saved:
                left_score = SIDE_SCORES[saved[pair.id]["better"]]
                verdict = Verdict(1 - left_score if is_shown_swapped(pair) else left_score)
            verdicts.append(verdict)
        return verdicts

    return judge
