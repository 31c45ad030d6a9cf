"""The paper's datasets, as the reference code reads them: HH, SHP and Stack Exchange."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TypedDict

import numpy as np

from dpo.data.schema import ASSISTANT, Row, get_field, naming_place
from dpo.errors import InputError
from dpo.redaction import shorten
from dpo.system.pool import map_chunks

QUESTIONS_PER_WORKER = 5000  # a few seconds of work, more than it takes to start a worker


class Entry(TypedDict):
    responses: list[str]
    pairs: list[tuple[int, int]]  # (better, worse), indices into responses
    sft_target: str


Entries = dict[str, Entry]  # by prompt
NamedRows = Iterable[tuple[str, Row]]  # rows, each after the words that name it in messages


def add_responses(entries: Entries, prompt: str, responses: Sequence[str], scores: Sequence[float] = (1, 0)) -> Entry:
    """Add responses, and each pair of them, to a prompt's entry. Return the entry.

    The response with the higher score is better; if scores are equal, the later one. The caller sets the entry's
    `sft_target`.
    """
    entry = entries.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
    first = len(entry["responses"])
    entry["responses"] += responses
    for earlier, later in combinations(range(len(responses)), 2):
        pair = (first + earlier, first + later)
        entry["pairs"].append(pair if scores[earlier] > scores[later] else pair[::-1])
    return entry


def extract_anthropic_prompt(prompt_and_response: str) -> str:
    """Return a dialogue up to and including its last `\\n\\nAssistant:`."""
    before, marker, _ = prompt_and_response.rpartition(ASSISTANT)
    if not marker:
        raise InputError(f"no {ASSISTANT!r} in {shorten(prompt_and_response)}: not a dialogue in Anthropic's format")
    return before + marker


def strings_match_up_to_spaces(str_a: str, str_b: str) -> bool:
    """Return whether, without spaces, one text begins with the other."""
    a = str_a.replace(" ", "")
    b = str_b.replace(" ", "")
    return a.startswith(b) or b.startswith(a)


def strip_html_tags(html_string: str) -> str:
    """Convert Stack Exchange HTML to text as the reference code does.

    Top-level `p` (only the text directly in it), `pre > code` and `code` remain, with a blank line between them.
    """
    from bs4 import BeautifulSoup

    parts = []
    for element in BeautifulSoup(html_string, "html.parser").find_all(["p", "pre", "code"], recursive=False):
        if element.name == "p":
            parts.append("".join(element.find_all(string=True, recursive=False)))
            continue
        blocks = element.find_all("code") if element.name == "pre" else [element]
        for block in blocks:
            parts.append(f"<code>{block.get_text()}</code>")
    return "\n\n".join(parts)


def read_hh(rows: NamedRows) -> Entries:
    """Read Anthropic's dialogues, a pair per row; the SFT target is the chosen response of a prompt's last row.

    A rejected dialogue loses as many characters as the chosen one's prompt has, as in the reference code.
    """
    entries: Entries = {}
    for place, row in rows:
        with naming_place(place):
            chosen = get_field(row, "chosen")
            rejected = get_field(row, "rejected")
            prompt = extract_anthropic_prompt(chosen)
        n_prompt = len(prompt)
        entry = add_responses(entries, prompt, [chosen[n_prompt:], rejected[n_prompt:]])
        entry["sft_target"] = chosen[n_prompt:]
    return entries


def read_shp(rows: NamedRows) -> Entries:
    """Read pairs whose scores differ at least twofold; a prompt's SFT target is the reply with the highest score."""
    entries: Entries = {}
    scores = {}  # by prompt and response
    for place, row in rows:
        with naming_place(place):
            prompt = f"\n\nHuman: {get_field(row, 'history')}\n\nAssistant:"
            a = " " + get_field(row, "human_ref_A")
            b = " " + get_field(row, "human_ref_B")
            score_a = get_field(row, "score_A", int, float)
            score_b = get_field(row, "score_B", int, float)
            label = get_field(row, "labels", int)  # 1 if the first response is better, else 0
            if not (score_a and score_b):
                raise InputError(f"neither score_A={score_a} nor score_B={score_b} may be 0: their ratio counts")
        if max(score_a / score_b, score_b / score_a) < 2:
            continue
        add_responses(entries, prompt, [a, b], (label, 1 - label))
        scores.setdefault((prompt, a), score_a)  # a repeated text keeps its first score
        scores.setdefault((prompt, b), score_b)
    for prompt, entry in entries.items():
        entry["sft_target"] = max(entry["responses"], key=lambda response: scores[prompt, response])
    return entries


def _read_questions(rows: NamedRows) -> Entries:
    """Read questions, each with every pair of its answers; if scores are equal, the later answer is preferred.

    Of the rows with the same question the last one counts.
    """
    entries: Entries = {}
    for place, row in rows:
        with naming_place(place):
            question = get_field(row, "question")
            answers = get_field(row, "answers", list)
            if not answers:
                raise InputError("answers is empty")
            responses = [" " + strip_html_tags(get_field(answer, "text")) for answer in answers]
            scores = [get_field(answer, "pm_score", int, float) for answer in answers]
        prompt = f"\n\nHuman: {strip_html_tags(question)}\n\nAssistant:"
        # index() finds the first score of a repeated text, which counts
        target = max(responses, key=lambda response: scores[responses.index(response)])
        entries[prompt] = add_responses({}, prompt, responses, scores)
        entries[prompt]["sft_target"] = target
    return entries


def read_se(rows: Sequence[Row], split: str, path: str, *, silent: bool) -> Entries:
    """Read a split of Stack Exchange, whose source `path` has only one.

    Its rows are shuffled with seed 42, and the first 1 % are our test split.
    """
    order = np.random.default_rng(42).permutation(len(rows))  # the same as datasets.Dataset.shuffle(seed=42)
    n_test = len(rows) // 100
    indices = order[:n_test] if split == "test" else order[n_test:]
    named_rows = ((f"record {i + 1} of {path}", rows[i]) for i in indices)
    entries: Entries = {}
    for questions in map_chunks(
        _read_questions, named_rows, len(indices), f"Processing {path}", QUESTIONS_PER_WORKER, silent=silent
    ):
        entries.update(questions)
    return entries
