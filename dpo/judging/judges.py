"""Judges, which say of two answers to a prompt whether the first or the second is better."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from dpo.system.plain_files import read_json

TEMPLATES = Path(__file__).parent / "templates"
# the end of a line with a verdict: the letter alone, as "a" is also an article, and perhaps a reason
CHOSEN = (
    r"[^\w\n]*(?i:(?:answer|response|summary) )?(A|B|(?i:(?:a )?tie|neither))"
    r"[^\w\n]*(?:\([^)\n]*\)|(?:because|as|since) .*)?[^\w\n]*$"
)
LABELS = r"(?i:(?<!not )\b(?:better|preferred|more helpful|winner|verdict|choice)\b)"
LABELLED = re.compile(rf"{LABELS}[\w ]*[^\w\n]*:{CHOSEN}", re.MULTILINE)
SCORES = {"a": 1.0, "b": 0.0, "tie": 0.5, "a tie": 0.5, "neither": 0.5}  # of the answer that is shown as A


class Verdict(NamedTuple):
    score: float | None  # 1: the first answer is better, 0: the second, 0.5: neither; None: no valid verdict
    is_flipped: bool = False  # whether the two orders of the answers had different winners
    reason: str = ""  # what the judge said, or why there is no verdict


Judge = Callable[[Sequence[Pair]], list[Verdict]]


# --- scores of each answer --------------------------------------------------------------------------------------------


def make_scoring_judge(**online: Any) -> Judge:
    """A reward model or a function of the user, as online training has them; the answer with the higher score wins."""
    plan = resolve({"online": {"name": "online", **online}})
    raise_problems([problem for problem in find_problems(plan) if problem.key.startswith("online.")])
    scorer = load_scorer(plan, choose_device(), rows=16)

    def judge(pairs: Sequence[Pair]) -> list[Verdict]:
        prompts = [pair.prompt for pair in pairs]
        firsts = scorer(prompts, [pair.first for pair in pairs])
        seconds = scorer(prompts, [pair.second for pair in pairs])
        return [
            Verdict(0.5 + 0.5 * ((a > b) - (a < b)), reason=f"scores {a:.4g} and {b:.4g}")
            for a, b in zip(firsts, seconds, strict=True)
        ]

    return judge


# --- a language model behind a server ---------------------------------------------------------------------------------


def make_server_judge(server: Server, template: str) -> Judge:
    """Asks for each pair in both orders, which count as one verdict."""

    def judge(pairs: Sequence[Pair]) -> list[Verdict]:
        in_order = [_fill_in(template, pair.question, pair.first, pair.second) for pair in pairs]
        reversed_ = [_fill_in(template, pair.question, pair.second, pair.first) for pair in pairs]
        replies = server.ask_all([*in_order, *reversed_])
        return [_combine(*both) for both in zip(replies[: len(pairs)], replies[len(pairs) :], strict=True)]

    return judge


def _fill_in(template: str, question: str, a: Answer, b: Answer) -> str:
    texts = {"prompt": question, "a": a.text.strip(), "b": b.text.strip()}
    return re.sub(r"\{(prompt|a|b)\}", lambda found: texts[found[1]], template)


def _combine(in_order: str | Exception, reversed_: str | Exception) -> Verdict:
    """Of a pair that was shown in its order, and reversed."""
    for reply in (in_order, reversed_):
        if isinstance(reply, Exception):
            return Verdict(None, reason=str(reply))
    first, second = (read_verdict(str(reply)) for reply in (in_order, reversed_))
    if first is None or second is None:
        return Verdict(None, reason=f"no verdict in {str(in_order if first is None else reversed_)[-200:]!r}")
    score = (first + 1 - second) / 2
    return Verdict(score, is_flipped={first, 1 - second} == {0, 1}, reason=str(in_order).strip())


def read_verdict(reply: str) -> float | None:
    """The score of answer A, by the last labelled line or else the last line; None if neither names a winner."""
    chosen = LABELLED.findall(reply) or re.findall(f"^{CHOSEN}", reply.strip().rpartition("\n")[2])
    return SCORES[chosen[-1].lower()] if chosen else None


def read_template(name: str) -> str:
    """One of ours by name, or a file; InputError if it lacks a place for the prompt or an answer."""
    file = TEMPLATES / f"{name}.txt"
    path = file if file.exists() else Path(name).expanduser()
    ours = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.txt")))
    with explaining(OSError, lambda why: InputError(f"--template {name} is none of {ours}, and no file: {why}")):
        text = read_json(path, str)
    if missing := [place for place in ("{prompt}", "{a}", "{b}") if place not in text]:
        raise InputError(f"--template {name} lacks {', '.join(missing)}, where the texts are to be")
    return text


# --- people -----------------------------------------------------------------------------------------------------------


def is_shown_swapped(pair: Pair) -> bool:
    """Whether people see the second answer on the left."""
    return random.Random(f"blind {pair.id}").random() < 0.5


def read_drawn(file: str) -> dict:
    """The options that the verdicts of a page carry, with which their answers were drawn."""
    # `make_file_judge` says what is wrong
    with suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        lines = filter(str.strip, read_json(Path(file), str.splitlines))
        return dict(json.loads(next(lines, "{}")).get("drawn", {}))
    return {}


def make_file_judge(file: str) -> Judge:
    """Verdicts of people, or of a program, as `human` saves them: {"pair": ID, "better": "left", "right" or "tie"}."""
    verdicts: dict[str, str] = {}
    with explaining(OSError, lambda why: InputError(f"--judge verdicts:{file} cannot be read: {why}")):
        lines = read_json(Path(file), str.splitlines)
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            verdict: Mapping[str, str] = json.loads(line)
            verdicts[verdict["pair"]] = verdict["better"]
            if verdict["better"] not in ("left", "right", "tie"):
                raise ValueError
        except (ValueError, LookupError, TypeError, RecursionError):
            wanted = '{"pair": ID, "better": "left"}, or "right" or "tie"'
            raise InputError(f"line {number} of {file} is no verdict: write {wanted}") from None

    def judge(pairs: Sequence[Pair]) -> list[Verdict]:
        judged = []
        if verdicts and not verdicts.keys() & {pair.id for pair in pairs}:
            raise InputError(f"the verdicts of {file} are on other answers: draw these again, with the same options")
        for pair in pairs:
            better = verdicts.get(pair.id)
            winner = {"left": 1.0, "right": 0.0, "tie": 0.5, None: None}[better]
            if winner is not None and is_shown_swapped(pair):
                winner = 1 - winner
            judged.append(Verdict(winner, reason="" if better else "not judged"))
        return judged

    return judge
