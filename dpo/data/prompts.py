"""Prompts with their responses, and a store of prompts in a memory-mapped file shared by processes."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, overload

import numpy as np

from dpo.data.schema import Messages, PreferenceData
from dpo.data.tokenization import TruncationMode
from dpo.errors import RunError

IN_MEMORY = 2**28  # bytes; more records than this are stored on disk


class Prompt(NamedTuple):
    """A prompt with its responses, pairs and SFT target."""

    text: str
    responses: list[str]
    pairs: list[tuple[int, int]]
    sft_target: str
    truncation_mode: TruncationMode
    rendered: bool  # by a chat template: special tokens in the text are intended
    number: int = 0  # its index in its split
    dataset: str = ""  # the name of its dataset
    messages: Messages | None = None  # that were rendered

    def examples(self, sft_mode: bool) -> list[dict[str, str]]:
        """Texts of each example: every pair, or the SFT target; without pairs every response is a target."""
        if sft_mode:
            return [{"chosen": target} for target in ([self.sft_target] if self.pairs else self.responses)]
        return [{"chosen": self.responses[a], "rejected": self.responses[b]} for a, b in self.pairs]


def iterate_prompts(
    get_dataset: Callable[..., PreferenceData],
    names: Sequence[str],
    split: str,
    *,
    with_messages: bool = False,
    **dataset_options: Any,
) -> Iterator[Prompt]:
    """Yield the prompts of several datasets, one dataset after another.

    Each prompt is dropped once yielded: a second copy of all texts might not fit into memory.
    """
    number = 0
    for name in names:
        data = get_dataset(name, split, **dataset_options)
        kind = {"truncation_mode": data.truncation_mode, "rendered": data.rendered, "dataset": name}
        for text in list(data):
            messages = data.messages.pop(text, None)
            kept = messages if with_messages else None
            yield Prompt(text, **data.pop(text), **kind, number=number, messages=kept)
            number += 1


class PromptFile(NamedTuple):
    """Location of stored prompts for other processes of this machine, while the storing process runs."""

    path: str
    n: int
    size: int  # bytes of the records; their ends follow


class StoredPrompts(Sequence[Prompt]):
    """Prompts decoded on demand from a memory-mapped file, whose memory all processes share.

    Records are JSON, so that the file holds only data.
    """

    def __init__(self, where: PromptFile) -> None:
        self.n, self.size = where.n, where.size
        self._file = open(where.path, "rb")  # noqa: SIM115  (open as long as others may want it)
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = np.frombuffer(self._bytes, dtype=np.int64, count=self.n + 1, offset=self.size)

    @property
    def where(self) -> PromptFile:
        return PromptFile(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", self.n, self.size)

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[number] for number in range(self.n)[place]]
        number = range(self.n)[place]  # handles negative indices, and raises IndexError
        start, end = self._ends[number : number + 2].tolist()
        text, responses, pairs, target, mode, rendered, dataset, *rest = json.loads(self._bytes[start:end])
        target = responses[target] if isinstance(target, int) else target
        pairs = [(a, b) for a, b in pairs]
        return Prompt(text, responses, pairs, target, mode, rendered, number, dataset, *rest)


def store_prompts(prompts: Iterable[Prompt], folder: str | Path) -> StoredPrompts:
    """Store prompts in an unnamed file, in memory, or in `folder` if they are large.

    The file disappears with its processes. Raises RunError if it cannot be written.
    """
    ends, records = array("q", [0]), _Records(Path(folder))
    for prompt in prompts:
        record = _encode(prompt)
        records.write(record)
        ends.append(ends[-1] + len(record))
    records.write(ends.tobytes(), flush=True)
    return StoredPrompts(PromptFile(f"/proc/self/fd/{records.file.fileno()}", len(ends) - 1, ends[-1]))


class _Records:
    """A file kept in memory while it is small."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size, self.in_memory = folder, 0, True
        self.file: IO[bytes] = open(os.memfd_create("prompts"), "w+b")  # noqa: SIM115

    def write(self, data: bytes, *, flush: bool = False) -> None:
        self.size += len(data)
        try:
            if self.in_memory and self.size > IN_MEMORY:
                self._move_to_disk()
            self.file.write(data)
            if flush:
                self.file.flush()
        except OSError as error:
            raise RunError(
                f"the texts of the data cannot be written to {self.folder}, after {self.size / 1e9:.2f} GB ({error}): "
                f"free some space, or put a directory on another disk first in local_dirs"
            ) from error

    def _move_to_disk(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        beside, self.in_memory = tempfile.TemporaryFile(dir=self.folder), False  # noqa: SIM115
        self.file.flush()
        self.file.seek(0)
        shutil.copyfileobj(self.file, beside, 2**20)
        self.file.close()
        self.file = beside


def _encode(prompt: Prompt) -> bytes:
    """Encode a prompt as a record; a target that is a response is stored as that response's index."""
    target = prompt.sft_target
    place = prompt.responses.index(target) if target in prompt.responses else target
    kind = prompt.truncation_mode, prompt.rendered, prompt.dataset
    messages = [] if prompt.messages is None else [prompt.messages]
    record = [prompt.text, prompt.responses, prompt.pairs, place, *kind, *messages]
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
