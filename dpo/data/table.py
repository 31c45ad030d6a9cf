"""Prompts with their responses, in Arrow files that all processes map.

So texts are in memory once per machine. A table is a directory `examples/KEY` of a local directory: `train.arrow`,
`test.arrow`, and `facts.json` with counts taken while it was built and the checksums of all three. It is built beside
its place and renamed, so a directory whose name has no leading dot is complete; whoever opens one verifies it. Tables
may be deleted at any time: the next run builds anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa

from dpo.data.schema import Messages, PreferenceData
from dpo.data.tokenization import TruncationMode
from dpo.errors import InputError, RunError
from dpo.losses import ROLES
from dpo.system.plain_files import read_json, remove

FACTS = "facts.json"
SPLITS = ("train", "test")
ABANDONED_SECS = 24 * 3600  # a directory still being built after this time was left by a killed process
ROWS_PER_BATCH = 1000
SCHEMA = pa.schema(
    {
        "text": pa.large_string(),
        "responses": pa.list_(pa.large_string()),
        "examples": pa.list_(pa.struct({role: pa.int32() for role in ROLES})),
        "truncation_mode": pa.string(),
        "rendered": pa.bool_(),
        "dataset": pa.string(),
        "messages": pa.large_string(),  # as JSON
    }
)


class Prompt(NamedTuple):
    """A prompt with its responses, and the examples made of them."""

    text: str
    responses: list[str]
    examples: list[dict[str, int]]  # by role: indices into responses
    truncation_mode: TruncationMode
    rendered: bool  # by a chat template, so special tokens in the text are intended
    number: int = 0  # index in its split
    dataset: str = ""
    messages: Messages | None = None  # from which the text was rendered

    def texts(self, index: int) -> dict[str, str]:
        """The responses of an example by role."""
        return {role: self.responses[i] for role, i in self.examples[index].items()}


def iterate_prompts(
    get_dataset: Callable[..., PreferenceData],
    names: Sequence[str],
    split: str,
    *,
    trains_on: str,
    with_messages: bool = False,
    notes: list[str] | None = None,
    **dataset_options: Any,
) -> Iterator[Prompt]:
    """Yield the prompts of several datasets, one dataset after another.

    Examples are of the kind `trains_on` (a key of `TRAINS_ON`). The loaders' notes are added to `notes`.
    """
    numbers = count()
    for name in names:
        data = get_dataset(name, split, trains_on=trains_on, **dataset_options)
        if notes is not None:
            notes += data.notes
        for text, responses, examples in data.take(trains_on):
            messages = data.messages.pop(text, None)  # removed like the prompt, to free memory
            yield Prompt(
                text,
                responses,
                examples,
                data.truncation_mode,
                data.rendered,
                number=next(numbers),
                dataset=name,
                messages=messages if with_messages else None,
            )


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts to an Arrow file, a few at a time."""
    remaining = iter(prompts)
    with pa.ipc.new_file(str(path), SCHEMA) as writer:
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            rows = [p._asdict() | {"messages": p.messages and json.dumps(p.messages)} for p in batch]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))
    pa.default_memory_pool().release_unused()  # it keeps freed memory, here as much as the texts take


class PromptTable(Sequence[Prompt]):
    """The prompts of a split, in a mapped Arrow file.

    A `Prompt` is made whenever it is asked for. `counts` has the number of examples per prompt, in memory.
    """

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in self._table["examples"].chunks]
        self.counts = np.concatenate([np.zeros(0, dtype=np.int32), *lengths])

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]  # handles negative indices, and raises IndexError
        row = {name: self._table[name][number].as_py() for name in SCHEMA.names}
        row["examples"] = [{role: i for role, i in example.items() if i is not None} for example in row["examples"]]
        row["messages"] = row["messages"] and json.loads(row["messages"])
        return Prompt(**row, number=number)


def find_or_build(
    folder: Path,
    key: str | None,
    build: Callable[[Path], tuple[Mapping[str, Any], bool]],
    *,
    scratch: Path | None = None,
) -> tuple[Path, bool]:
    """Find the table `key` in `folder`, or build it.

    Returns its place, and whether it was built. It is built in `scratch` if given, else in `folder`. `build` writes
    both splits into a directory; it returns the facts, and whether `key` still identifies the data that it read. A
    table without a key is always built, and named after its content. Raises RunError if nothing can be written.
    """
    if key is not None and is_whole(folder / key):
        return folder / key, False
    folder = scratch or folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        built = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        try:
            facts, is_named = build(built)
            files = {f"{split}.arrow": _hash(built / f"{split}.arrow") for split in SPLITS}
            content = {"facts": facts, "files": files}
            text = json.dumps(content | {"sha256": _hash_facts(content)}, indent=1)
            (built / FACTS).write_text(text + "\n", encoding="utf-8")
            place = folder / (key if key is not None and is_named else f"content-{_hash_facts(content)[:32]}")
            return _publish(built, place), True
        finally:
            remove(built)  # if it was not renamed
    except OSError as error:
        raise RunError(
            f"the texts of the data cannot be written to {folder} ({error}): free some space, or put a directory on "
            f"another disk first in local_dirs"
        ) from error


def _publish(built: Path, place: Path) -> Path:
    """Rename a built table into place, unless another process was first.

    A damaged table there is removed, and renaming tried again, until there is a whole one.
    """
    while True:
        try:
            return built.rename(place)
        except OSError as error:
            is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
            if not is_taken:
                raise
        if is_whole(place):  # built by another process
            return place
        with suppress(FileNotFoundError):  # another process has moved the damaged table away
            remove(place.rename(built.with_name(f"{built.name}.damaged")))


def remove_leftovers(folder: Path) -> None:
    """Remove directories of processes that were killed while building.

    Only after `ABANDONED_SECS`, as a process may still be building in a younger one.
    """
    for directory in folder.glob(".*"):
        with suppress(FileNotFoundError):  # another process has removed it
            if time.time() - directory.stat().st_mtime > ABANDONED_SECS:
                remove(directory)


def read_facts(place: Path) -> dict[str, Any]:
    """Read the counts taken when a table was built.

    Raises InputError or OSError if the file cannot be read or was changed.
    """
    content = read_json(place / FACTS)
    if not isinstance(content, dict) or content.pop("sha256", None) != _hash_facts(content):
        raise InputError(f"{place / FACTS} is damaged")
    return content


def is_whole(place: Path) -> bool:
    """Return whether a table is there, with the right checksums."""
    try:
        files = read_facts(place)["files"]
        return all(_hash(place / name) == digest for name, digest in files.items())
    except (InputError, OSError):
        return False


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_facts(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
