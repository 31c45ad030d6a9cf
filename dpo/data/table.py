"""Prompts with their responses, in files that all processes map, so that texts are in memory once per machine.

A table is a directory `dpo-examples/KEY-CHECKSUM-...`. For each split it has a file of JSON lines, and one with the
positions at which they end. `facts.json` has counts. The checksum in the table's name is verified by every run. Tables
may be deleted at any time: the next run builds a new one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dpo.data.schema import Prompt, Split
from dpo.errors import InputError
from dpo.system.plain_files import check_readable


def number_prompts(splits: Iterable[tuple[str, Split]], *, keep_all: bool = False) -> Iterator[Prompt]:
    """Take the prompts out of one split of each dataset, and number them from 0 across all datasets.

    Prompts without examples are left out, unless `keep_all`.
    """
    index = 0
    for name, split in splits:
        for text in list(split):  # prompts are removed, as a second copy of all texts might not fit into memory
            prompt = split.pop(text)
            if not prompt.examples and not keep_all:
                continue
            cuts = prompt.cuts if prompt.cuts and any(prompt.cuts) else None  # None: all text is scored
            yield prompt._replace(index_in_split=index, dataset=name, cuts=cuts)
            index += 1


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> str:
    """Write prompts to `path` as JSON lines, and return a digest of them.

    A file .npy beside `path` has an int64 array (prompts, 2): where each line ends, in bytes, and its number of
    examples.
    """
    index = []
    digest = hashlib.sha256()
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
        # line i is between the limits i and i + 1; the file begins with a newline
        self._offsets = np.concatenate([[1], ends])

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # handles negative indices, and raises IndexError
        line = self._lines[self._offsets[index] : self._offsets[index + 1]]
        return Prompt(**json.loads(line.tobytes()))


def is_whole(table: Path) -> bool:
    """Whether a table's files are as they were when it was built: the table's name has their checksum."""
    with suppress(InputError, OSError):
        return make_checksum(table) in table.name
    return False


def make_checksum(table: Path) -> str:
    """Make a digest of a table's files; InputError or OSError if one cannot be read."""
    digest = hashlib.sha256()
    for name in ("facts.json", "train.jsonl", "train.npy", "test.jsonl", "test.npy"):
        check_readable(table / name)
        with (table / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
