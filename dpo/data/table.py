"""Prompts with their responses, in files that all processes map, so that texts are in memory once per machine.

A table is a directory `dpo-examples/KEY-...` with JSON lines, and where they end, for each split. `facts.json` has
counts, and a checksum that every run verifies. Tables may be deleted at any time: the next run builds a new one.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.data.schema import Messages, PreferenceData, Record, TruncationMode
from dpo.errors import InputError, RunError
from dpo.system.plain_files import check_readable, read_json, remove, write_json

FOLDER = "dpo-examples"  # in a directory of `local_dirs`
TEMPORARY = ".dpo-table-"  # what temporary names begin with
SPLITS = ("train", "test")
Facts = Mapping  # counts taken while a table is built


class Prompt(NamedTuple):
    text: str
    responses: list[str]
    examples: list[dict[str, int]]  # each maps a role to an index into `responses`
    truncation_mode: TruncationMode
    rendered: bool  # by a chat template, so special tokens in the text are intended
    index_in_split: int = 0
    dataset: str = ""
    messages: Messages | None = None  # from which the text was rendered
    weights: list[float] | None = None  # of the examples; None: 1
    margins: list[float] | None = None  # of the examples
    rows: list[int] | None = None  # numbers of the examples' records in their source
    tools: list | None = None  # that the messages may call
    # for each response, alternately where a part that is not scored begins and ends; None: all text is scored
    cuts: list[list[int]] | None = None
    apart: bool = True  # as the reference code tokenizes prompt and response; otherwise as one text

    @property
    def written(self) -> str:
        """What the user wrote."""
        if self.messages is None:
            return self.text
        return "\n\n".join(message.get("content") or "" for message in self.messages)

    def roles(self, example_index: int) -> dict[str, int]:
        """Empty for a prompt without examples."""
        return self.examples[example_index] if self.examples else {}

    def texts(self, example_index: int) -> dict[str, str]:
        return {role: self.responses[i] for role, i in self.roles(example_index).items()}

    @property
    def pieces(self) -> list[list[str]]:
        """Each response in pieces, scored and not scored in turn; the first may be empty."""
        return [
            [response[start:end] for start, end in pairwise((0, *cuts, len(response)))]
            for response, cuts in zip(self.responses, self.cuts or [[]] * len(self.responses), strict=True)
        ]


def iterate_prompts(
    datasets: Iterable[tuple[str, PreferenceData]], trains_on: str, *, list_pairs: str = "all"
) -> Iterator[Prompt]:
    """Take the prompts out of named datasets, one after another, with examples of a kind:

    - "pairs": the pairs, and those that `list_pairs` makes of lists; equal scores make none
    - "prompts": the same, but a prompt whose lists make no pair is kept
    - "lists": the lists, and each pair as a list of two
    - "labels": the labelled responses, and both responses of each pair
    - "targets": the prompt's target if there are pairs or lists, otherwise each of its responses
    """
    index = 0
    for name, data in datasets:
        for text in list(data):  # removed, as a second copy of all texts might not fit into memory
            entry = data.pop(text)
            records = entry.get("records") or [Record(text, entry["responses"], entry["pairs"])]
            has_lists = any(record.scores for record in records)
            if trains_on == "targets" and (has_lists or entry["pairs"]):  # the target comes from the last record
                last = records[-1]
                cuts = last.cuts[last.best : last.best + 1]
                records = [last._replace(responses=[entry["sft_target"]], scores=(), cuts=cuts)]
            made, responses, cuts = [], [], []
            for record in records:
                for example in record.list_examples(trains_on, list_pairs):
                    made.append((record, {role: len(responses) + i for role, i in example.items()}))
                responses += record.responses
                cuts += record.cuts or [[]] * len(record.responses)
            if not made and (trains_on == "labels" or (has_lists and trains_on != "prompts")):
                continue
            of_examples = {
                f"{key}s": [getattr(record, key) for record, _ in made] for key in ("weight", "margin", "row")
            }
            yield Prompt(
                text,
                responses,
                [example for _, example in made],
                data.truncation_mode,
                data.rendered,
                index_in_split=index,
                dataset=name,
                messages=records[-1].messages,
                tools=[*records[-1].tools] or None,
                cuts=cuts if any(cuts) else None,
                apart=data.apart,
                **{name: values for name, values in of_examples.items() if values and None not in values},
            )
            index += 1


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> str:
    """Write JSON lines, and beside them their ends and numbers of examples; return a digest."""
    index, digest = [], hashlib.sha256()
    with path.open("wb") as file:
        file.write(b"\n")  # an empty file cannot be mapped
        for prompt in prompts:
            line = json.dumps(prompt._asdict(), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
            digest.update(line)
            file.write(line)
            index.append((file.tell(), len(prompt.examples)))
    np.save(path.with_suffix(".npy"), np.array(index, dtype=np.int64).reshape(-1, 2))
    return digest.hexdigest()[:32]


class PromptTable(Sequence[Prompt]):
    """Prompts in a memory-mapped file, decoded at each access; `counts` has the number of examples per prompt."""

    def __init__(self, path: Path):
        self._lines = np.memmap(path, dtype=np.uint8, mode="r")
        ends, self.counts = np.load(path.with_suffix(".npy")).T
        self._limits = np.concatenate([[1], ends])

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # handles negative indices, and raises IndexError
        line = self._lines[self._limits[index] : self._limits[index + 1]]
        return Prompt(**json.loads(line.tobytes()))


def find_or_build(
    folder: Path, key: str | None, build: Callable[[Path], Facts], *, scratch: Path | None = None
) -> Path:
    """Find the table named `key` in `folder`, or build it there, or in `scratch`.

    `build` returns what it counted. Raises RunError if it cannot write.
    """
    tables = sorted(folder.glob(f"{key}-*")) if key else ()
    if found := next((table for table in tables if is_whole(table)), None):
        return found
    parent = scratch or folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        try:
            facts = build(directory)
            content = {"facts": facts, "sha256": _make_digest(directory, facts)}
            write_json(directory / "facts.json", content)
            return directory.rename(parent / directory.name.replace(TEMPORARY, f"{key}-"))
        finally:
            remove(directory)  # does nothing if the directory was renamed
    except OSError as error:
        raise RunError(
            f"the texts of the data cannot be written to {parent} ({error}): free some space, or name "
            f"another disk first in local_dirs"
        ) from error


def read_facts(table: Path) -> Facts:
    return read_json(table / "facts.json")["facts"]


def is_whole(table: Path) -> bool:
    """Whether a table's files are as they were when it was built."""
    with suppress(InputError, OSError):
        content = read_json(table / "facts.json")
        return isinstance(content, dict) and content.get("sha256") == _make_digest(table, content.get("facts"))
    return False


def _make_digest(table: Path, facts: Any) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in (f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "npy")):
        check_readable(table / name)
        with (table / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
