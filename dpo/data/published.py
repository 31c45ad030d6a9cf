"""The paper's datasets, as the reference code reads them: HH, SHP and Stack Exchange."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypedDict

import numpy as np
import tqdm

from dpo.data.schema import ASSISTANT, Row, get_field, naming
from dpo.data.sources import load_rows
from dpo.errors import InputError
from dpo.settings.places import BUILT_IN, Source
from dpo.system.pool import map_chunks

QUESTIONS_PER_WORKER = 5000  # a few seconds of work, more than it takes to start a worker


class Entry(TypedDict):
    responses: list[str]
    pairs: list[tuple[int, int]]  # (better, worse), indices into responses
    sft_target: str


Entries = dict[str, Entry]  # by prompt


def add_responses(entries: Entries, prompt: str, responses: Sequence[str], pair: tuple[int, int]) -> None:
    """Add responses, and a pair of them, to a prompt's entry."""
    entry = entries.setdefault(prompt, {"responses": [], "pairs": [], "sft_target": ""})
    n_earlier = len(entry["responses"])
    better, worse = pair
    entry["responses"] += responses
    entry["pairs"].append((n_earlier + better, n_earlier + worse))


def _read_rows(source: Source, split: str, cache_dir: str | None, name: str, silent: bool) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a split, each with its place for messages."""
    # with None, silent unless stderr is a terminal
    bar = tqdm.tqdm(load_rows(source, split, cache_dir), f"Processing {name}", disable=silent or None)
    for number, row in enumerate(bar, start=1):
        yield row, f"record {number} of {source.path} ({split})"


def extract_anthropic_prompt(prompt_and_response: str) -> str:
    """Return a dialogue up to and including its last `\\n\\nAssistant:`."""
    before, marker, _ = prompt_and_response.rpartition(ASSISTANT)
    if not marker:
        raise InputError(f"no {ASSISTANT!r} in {prompt_and_response[:200]!r}: not a dialogue in Anthropic's format")
    return before + marker


def strings_match_up_to_spaces(str_a: str, str_b: str) -> bool:
    """Return whether, without spaces, one text begins with the other."""
    shorter, longer = sorted((text.replace(" ", "") for text in (str_a, str_b)), key=len)
    return longer.startswith(shorter)


def strip_html_tags(html_string: str) -> str:
    """Convert Stack Exchange HTML to text as the reference code does.

    Top-level `p` (only the text directly in it), `pre > code` and `code` remain, with a blank line between them.
    """
    from bs4 import BeautifulSoup, NavigableString

    parts = []
    for element in BeautifulSoup(html_string, "html.parser").children:
        if isinstance(element, NavigableString):
            continue
        if element.name == "p":
            parts.append("".join(str(child) for child in element.children if isinstance(child, NavigableString)))
        elif element.name == "pre":
            parts.extend(f"<code>{code.get_text()}</code>" for code in element.find_all("code"))
        elif element.name == "code":
            parts.append(f"<code>{element.get_text()}</code>")
    return "\n\n".join(parts)


def get_hh(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["hh"])
) -> Entries:
    """Load Anthropic's dialogues, a pair per row; the SFT target is the chosen response of a prompt's last row.

    A rejected dialogue loses as many characters as the chosen one's prompt has, as in the reference code.
    """
    entries: Entries = {}
    for row, where in _read_rows(source, split, cache_dir, "HH", silent):
        with naming(where):
            chosen = get_field(row, "chosen")
            rejected = get_field(row, "rejected")
            prompt = extract_anthropic_prompt(chosen)
        responses = [chosen[len(prompt) :], rejected[len(prompt) :]]
        add_responses(entries, prompt, responses, (0, 1))
        entries[prompt]["sft_target"] = responses[0]
    return entries


def get_shp(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["shp"])
) -> Entries:
    """Load pairs whose scores differ at least twofold; a prompt's SFT target is the reply with the highest score."""
    entries: Entries = {}
    scores = defaultdict(dict)  # by prompt and response
    for row, where in _read_rows(source, split, cache_dir, "SHP", silent):
        with naming(where):
            prompt = f"\n\nHuman: {get_field(row, 'history')}\n\nAssistant:"
            responses = [" " + get_field(row, f"human_ref_{side}") for side in "AB"]
            score_a = get_field(row, "score_A", int, float)
            score_b = get_field(row, "score_B", int, float)
            label = get_field(row, "labels", int)
            if not (score_a and score_b):
                raise InputError(f"neither score_A={score_a} nor score_B={score_b} may be 0: their ratio counts")
        if max(score_a / score_b, score_b / score_a) < 2:
            continue
        add_responses(entries, prompt, responses, (0, 1) if label == 1 else (1, 0))  # label 1 means that A is preferred
        for response, score in zip(responses, (score_a, score_b), strict=True):
            scores[prompt].setdefault(response, score)  # a repeated text keeps its first score
    for prompt, entry in entries.items():
        entry["sft_target"] = max(entry["responses"], key=scores[prompt].__getitem__)
    return entries


def _read_questions(placed_rows: Sequence[tuple[Row, str]]) -> list[tuple[str, Entry]]:
    prompts = []
    for row, where in placed_rows:
        with naming(where):
            question, answers = get_field(row, "question"), get_field(row, "answers", list)
            if not answers:
                raise InputError("answers is empty")
            responses = [" " + strip_html_tags(get_field(answer, "text")) for answer in answers]
            scores = [get_field(answer, "pm_score", int, float) for answer in answers]
        pairs = [  # (better, worse)
            (earlier, later) if scores[earlier] > scores[later] else (later, earlier)
            for earlier, later in combinations(range(len(scores)), 2)
        ]
        # the first score of a repeated text counts: a dict keeps a key's last value, so go backwards
        first_score = dict(zip(reversed(responses), reversed(scores), strict=True))
        target = max(responses, key=first_score.__getitem__)
        entry = {"responses": responses, "pairs": pairs, "sft_target": target}
        prompts.append((f"\n\nHuman: {strip_html_tags(question)}\n\nAssistant:", entry))
    return prompts


def get_se(
    split: str, silent: bool = False, cache_dir: str | None = None, source: Source = Source(BUILT_IN["se"])
) -> Entries:
    """Load every pair of a question's answers; of equal scores the later answer is preferred.

    The source's one split is shuffled with seed 42, and its first 1 % is our test split. A repeated question's last row
    counts.
    """
    rows = load_rows(source, "train", cache_dir)
    order = np.random.default_rng(42).permutation(len(rows))  # the same as datasets.Dataset.shuffle(seed=42)
    n_test = int(len(rows) * 0.01)
    row_indices = order[:n_test] if split == "test" else order[n_test:]
    selected = [rows[i] for i in row_indices] if isinstance(rows, list) else rows.select(row_indices)
    placed_rows = zip(selected, (f"record {i + 1} of {source.path}" for i in row_indices), strict=True)
    entries: Entries = {}
    for prompts in map_chunks(
        _read_questions, placed_rows, len(row_indices), "Processing SE", QUESTIONS_PER_WORKER, silent=silent
    ):
        entries.update(prompts)
    return entries
