"""Checksums of files: computed while a file is written, so that it is not read again, and verified in parallel.

The SHA-256 of a whole file, as printed by `sha256sum`, can only be computed sequentially. So each block of BLOCK bytes
has its own checksum, and all cores verify blocks in parallel.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 2**26  # bytes; part of the manifest's format
SYNC_EVERY = 2**30  # bytes; so that the last sync need not write the whole file
IN_THREADS = 2**20  # bytes; smaller pieces are hashed in the calling thread


def no_progress() -> None:
    """The default progress callback: does nothing."""


class HashedFile:
    """A new append-only file, sufficient for `torch.save`, with its checksums."""

    def __init__(self, path: Path, progress: Callable[[], None] = no_progress) -> None:
        self._file, self._progress = path.open("wb"), progress
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="hash")  # file hash, block hash, sync
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
        """Append bytes; keeps no reference to `data`."""
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
        """Wait for the last sync and raise its error, which the system reports only once."""
        if self._syncing is not None:
            self._syncing.result()

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> tuple[dict[str, Any], list[str]]:
        """Sync the file to the disk. Returns its checksum and size, and the checksums of its blocks."""
        self._finish_syncing()
        self._file.flush()
        os.fsync(self._file.fileno())
        rest = [self._block.hexdigest()] * (self._n_bytes % BLOCK > 0)
        return {"sha256": self._whole.hexdigest(), "bytes": self._n_bytes}, self._blocks + rest


class Part(NamedTuple):
    """A part of a file and its expected checksum."""

    path: Path
    start: int
    n_bytes: int
    sha256: str

    def is_right(self) -> bool:
        """Return whether the part is complete and its checksum matches."""
        digest, left = hashlib.sha256(), self.n_bytes
        buffer = memoryview(bytearray(min(left, 2**20)))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left and (n := file.readinto(buffer[:left])):
                digest.update(buffer[:n])
                left -= n
        return digest.hexdigest() == self.sha256


def split_into_blocks(path: Path, n_bytes: int, checksums: Sequence[str]) -> list[Part]:
    """The blocks of a file of `n_bytes`. Raises ValueError unless there is one checksum for each."""
    if len(checksums) != math.ceil(n_bytes / BLOCK):
        raise ValueError(f"{len(checksums)} checksums for {n_bytes} bytes")
    starts = range(0, n_bytes, BLOCK)
    return [Part(path, s, min(BLOCK, n_bytes - s), digest) for s, digest in zip(starts, checksums, strict=True)]


def find_wrong(parts: Sequence[Part], progress: Callable[[], None] = no_progress) -> Part | None:
    """The first part whose checksum does not match, None if all match; several threads read at a time."""
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
