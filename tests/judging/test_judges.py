"""Judges: what a reply, a file and a score say of a pair."""

import json

import pytest
from support.pytests import refused
from support.runs import write_rows

from dpo.data.schema import Prompt
from dpo.judging.answers import Pair
from dpo.judging.judges import (
    QUESTION_FOLDER,
    Verdict,
    is_shown_swapped,
    make_file_judge,
    make_server_judge,
    read_template,
    read_verdict,
    read_verdicts,
)
from dpo.judging.page import write_result
from dpo.models.answers import Answer


def make_pair(first: str, second: str, question: str = "Why?") -> Pair:
    prompt = Prompt(question, [], [])
    return Pair(prompt, question, Answer(first, (), ended=True), Answer(second, (), ended=True))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("A is clearer.\nMore helpful: A", 1),
        ('Both.\nPreferred: "B"', 0),
        ("Equal.\n**Better: tie**", 0.5),
        ("A says more.\n\nAnswer B.", 0),
        ("Better: A\n\nI hope that this helps.", 1),
        ("Better: A\nNo, on reflection:\nBetter: B", 0),
        ("Final choice: [[A]]", 1),
        ("A and B say the same.", None),
        ("Response A:\nHello\nResponse B:\nHi", None),
        ("A is longer. More helpful response: B (slightly)", 0),
        ("Comparison: both answer.\nMore helpful: B\nShorter answer: A", 0),
        ("More helpful: A, because it is shorter", 1),
        *[(reply, None) for reply in ("Worse: A", "Not better: A", "Confidence: B")],
        ("I must say which answer is better: A or B.\n\nB", 0),
        *[(f"Verdict: {tie}", 0.5) for tie in ("a tie", "A tie.", "Tie")],
        ("Winner: a narrow win for B", None),
        ("Verdict: A and B are equally good", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_from_the_line_that_has_it(reply, score):
    assert read_verdict(reply) == score


class Biased:
    """A server that prefers the longer answer, or else the one that is shown first."""

    def __init__(self) -> None:
        self.questions = []

    def ask_all(self, questions):
        self.questions += questions
        return list(map(self.reply, questions))

    def reply(self, question):
        if "fail" in question:
            return TimeoutError("timed out")
        if "[Answer " not in question:
            return "A"
        a, b = (part.partition("\n[")[0].strip() for part in question.split("[Answer ")[1:3])
        return "Better: ???" if "odd" in question else f"Better: {'B' if len(b) > len(a) else 'A'}"


def test_both_orders_are_one_verdict_and_a_judge_who_follows_the_order_gives_a_tie():
    server = Biased()
    judge = make_server_judge(server, read_template("helpful"))
    pairs = [
        make_pair("long answer", "short"),
        make_pair("short", "long answer"),
        make_pair("equal", "alike"),
        make_pair("odd", "x"),
        make_pair("fail", "x"),
    ]
    verdicts = judge(pairs)
    assert [verdict.score for verdict in verdicts] == [1, 0, 0.5, None, None]
    assert [verdict.is_flipped for verdict in verdicts] == [False, False, True, False, False]
    assert verdicts[4].reason == "timed out"
    assert len(server.questions) == 10


def test_a_text_with_the_name_of_a_place_stays_as_it_is():
    server = Biased()
    make_server_judge(server, "{prompt} | {a} | {b}")([make_pair("{b}", "{prompt}", "{a}?")])
    assert server.questions == ["{a}? | {b} | {prompt}", "{a}? | {prompt} | {b}"]


def test_templates_are_ours_or_a_file_with_all_places(tmp_path):
    for file in QUESTION_FOLDER.glob("*.txt"):
        read_template(file.stem)
    (tmp_path / "mine.txt").write_text("{prompt} {a}")
    with refused(r"lacks \{b\}"):
        read_template(str(tmp_path / "mine.txt"))


def test_verdicts_of_people_are_by_side_and_what_they_skipped_does_not_count(tmp_path):
    pairs = [make_pair(f"first {i}", f"second {i}") for i in range(20)]
    assert 4 < sum(map(is_shown_swapped, pairs)) < 16
    lines = [{"pair": pair.id, "better": "right" if is_shown_swapped(pair) else "left"} for pair in pairs[:18]]
    lines[17]["better"] = "tie"
    (tmp_path / "verdicts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    judge = make_file_judge(str(tmp_path / "verdicts.jsonl"))
    assert [verdict.score for verdict in judge(pairs)] == [1] * 17 + [0.5, None, None]
    (tmp_path / "verdicts.jsonl").write_text('{"pair": "x", "better": "A"}\n')
    with refused(r"line 1 of .* is not a verdict: write"):
        make_file_judge(str(tmp_path / "verdicts.jsonl"))


def test_verdicts_on_other_answers_are_named_as_such(tmp_path):
    file = write_rows(tmp_path / "verdicts.jsonl", [{"pair": "0" * 16, "better": "left", "drawn": {"seed": 1}}])
    with refused("the verdicts of .*verdicts.jsonl are on other answers: draw these again"):
        make_file_judge(str(file))([make_pair("a", "b")])
    assert read_verdicts(str(file))["0" * 16]["drawn"] == {"seed": 1}
    for content in (b"\xff", b"[" * 100_000, b"[]", b'{"drawn": 3}', b'{"pair": "a", "better": []}'):
        file.write_bytes(content)
        with refused("is not a verdict|cannot be read"):
            read_verdicts(str(file))


def test_the_page_says_what_happens_in_each_order_of_the_answers(tmp_path):
    pairs = [make_pair("Here", f"There {score}") for score in (0.25, 0.75)]
    facts = {"policy": "ours", "other": "theirs", "settings": {}, "sentences": [], "rates": {}}
    page = write_result(tmp_path, "server", facts, {}, pairs, [Verdict(0.25), Verdict(0.75)]).read_text()
    assert page.index("loses in one order, ties in the other") < page.index("wins in one order, ties in the other")
