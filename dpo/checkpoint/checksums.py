"""Checksums of files: taken while a file is written, so that none is read for them; compared later, many at once.

The SHA-256 of a whole file, which `sha256sum` gives too, can only be computed from beginning to end. So a file's blocks
of BLOCK bytes have checksums of their own, which all cores compare at once.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 2**26  # bytes; what manifests hold depends on it
SYNC_EVERY = 2**30  # bytes; so that no single sync, the last one neither, takes as long as the whole file
IN_THREADS = 2**20  # bytes from which on a thread of its own is worth its start


def no_progress() -> None:
    """What is called after each block if nobody wants to know."""


class HashedFile:
    """A new file that can only be appended to, as `torch.save` does, and its checksums."""

    def __init__(self, path: Path, progress: Callable[[], None] = no_progress) -> None:
        self._file, self._progress = path.open("wb"), progress
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="hash")  # of the whole, of a block, for syncing
        self._whole, self._block = hashlib.sha256(), hashlib.sha256()
        self._blocks: list[str] = []
        self._n_bytes = 0
        self._syncing: Future[None] | None = None

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        self._file.close()

    def write(self, data: Any) -> int:
        """Append bytes; nothing refers to `data` afterwards."""
        data = memoryview(data).cast("B")
        left = data
        while left:
            piece = left[: BLOCK - self._n_bytes % BLOCK]
            self._append(piece)
            left = left[len(piece) :]
        return len(data)

    def _append(self, piece: memoryview) -> None:
        if len(piece) < IN_THREADS:
            self._whole.update(piece)
            self._block.update(piece)
            self._file.write(piece)
        else:
            hashing = [self._threads.submit(digest.update, piece) for digest in (self._whole, self._block)]
            try:
                self._file.write(piece)
            finally:
                wait(hashing)
        self._n_bytes += len(piece)
        if self._n_bytes % BLOCK == 0:
            self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = hashlib.sha256()
        if self._n_bytes % SYNC_EVERY == 0:
            self._finish_syncing()
            self._file.flush()
            self._syncing = self._threads.submit(os.fdatasync, self._file.fileno())
        self._progress()

    def _finish_syncing(self) -> None:
        """Raise what went wrong in the last sync: the system tells it only once."""
        if self._syncing is not None:
            self._syncing.result()

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> tuple[dict[str, Any], list[str]]:
        """Bring all that was written to the disk; checksum and size, and the checksums of the blocks."""
        self._finish_syncing()
        self._file.flush()
        os.fsync(self._file.fileno())
        rest = [self._block.hexdigest()] * (self._n_bytes % BLOCK > 0)
        return {"sha256": self._whole.hexdigest(), "bytes": self._n_bytes}, self._blocks + rest


class Part(NamedTuple):
    """A part of a file and the checksum that it should have."""

    path: Path
    start: int
    n_bytes: int
    sha256: str

    def is_right(self) -> bool:
        """Whether the part is there and has its checksum."""
        digest, left = hashlib.sha256(), self.n_bytes
        buffer = memoryview(bytearray(min(left, 2**20)))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left and (n := file.readinto(buffer[:left])):
                digest.update(buffer[:n])
                left -= n
        return digest.hexdigest() == self.sha256


def parts_of(path: Path, n_bytes: int, sha256: str, blocks: Sequence[str] | None) -> list[Part]:
    """A file of that size as its blocks; as one part if their checksums are not known.

    Raises ValueError if there are not as many checksums as blocks.
    """
    if blocks is None:
        return [Part(path, 0, n_bytes, sha256)]
    if len(blocks) != math.ceil(n_bytes / BLOCK):
        raise ValueError(f"{len(blocks)} checksums for {n_bytes} bytes")
    starts = range(0, n_bytes, BLOCK)
    return [Part(path, s, min(BLOCK, n_bytes - s), digest) for s, digest in zip(starts, blocks, strict=True)]


def find_wrong(parts: Sequence[Part], progress: Callable[[], None] = no_progress) -> Part | None:
    """The first part that has not its checksum, of parts that several threads read at a time; None if all have."""
    with ThreadPoolExecutor(thread_name_prefix="verify") as threads:
        answers = [threads.submit(part.is_right) for part in parts]
        try:
            for part, answer in zip(parts, answers, strict=True):
                if not answer.result():
                    return part
                progress()
        finally:
            threads.shutdown(cancel_futures=True)
    return None
