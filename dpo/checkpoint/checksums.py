"""Checksums of files, computed while writing and verified in parallel.

Checksums are computed from the bytes as they are written, so that the file need not be read again. The SHA-256 of a
whole file, which `sha256sum` prints, can only be computed sequentially. So each block of BLOCK bytes also has its own
checksum, and all cores verify blocks in parallel.
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
SYNC_EVERY = 2**30  # bytes between two syncs, so that the last sync need not write the whole file
LARGE_PIECE = 2**20  # bytes; pieces of at least this size are hashed in threads, and files are read in such pieces


class HashedFile:
    """A new file, written by appending as `torch.save` does, with its checksums.

    `progress` is called after every block.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None) -> None:
        self._file, self._progress = path.open("wb"), progress
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="hash")  # file hash, block hash, sync
        self._file_hash, self._block_hash = hashlib.sha256(), hashlib.sha256()  # of the file and its current block
        self._block_digests: list[str] = []
        self._n_bytes = 0
        self._syncing: Future[None] | None = None

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        self._file.close()

    def write(self, data: Any) -> int:
        """Append bytes; the caller may free `data` afterwards."""
        data = memoryview(data).cast("B")
        remaining = data
        while remaining:
            piece = remaining[: BLOCK - self._n_bytes % BLOCK]  # to the end of the current block
            remaining = remaining[len(piece) :]
            self._append(piece)
            self._n_bytes += len(piece)
            if self._n_bytes % BLOCK == 0:
                self._block_digests.append(self._block_hash.hexdigest())
                self._block_hash = hashlib.sha256()
                self._progress()
            if self._n_bytes % SYNC_EVERY == 0:
                self.flush()
                self._syncing = self._threads.submit(os.fdatasync, self._file.fileno())
        return len(data)

    def _append(self, piece: memoryview) -> None:
        """Write and hash a piece, in parallel if it is large."""
        if len(piece) < LARGE_PIECE:
            self._file.write(piece)
            self._file_hash.update(piece)
            self._block_hash.update(piece)
            return
        updates = [self._threads.submit(sha256.update, piece) for sha256 in (self._file_hash, self._block_hash)]
        try:
            self._file.write(piece)
        finally:
            wait(updates)  # also after an error, as the caller may then free the memory of `piece`

    def flush(self) -> None:
        """Wait for the sync in the background, then flush."""
        if self._syncing is not None:
            self._syncing.result()  # raises the error of a failed sync, which the system reports only once
        self._file.flush()

    def sync(self) -> tuple[dict[str, Any], list[str]]:
        """Sync the complete file to the disk.

        Returns its checksum and size, and the checksums of its blocks.
        """
        self.flush()
        os.fsync(self._file.fileno())
        block_digests = list(self._block_digests)
        if self._n_bytes % BLOCK:  # the last block is shorter
            block_digests.append(self._block_hash.hexdigest())
        return {"sha256": self._file_hash.hexdigest(), "bytes": self._n_bytes}, block_digests


class Block(NamedTuple):
    """A part of a file and its expected checksum."""

    path: Path
    start: int
    n_bytes: int
    sha256: str

    def is_right(self) -> bool:
        """Return whether the block is complete and its checksum matches."""
        block_hash, n_unread = hashlib.sha256(), self.n_bytes
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while n_unread:
                piece = file.read(min(n_unread, LARGE_PIECE))
                if not piece:  # the file is shorter, so the checksum will not match
                    break
                block_hash.update(piece)
                n_unread -= len(piece)
        return block_hash.hexdigest() == self.sha256


def split_into_blocks(path: Path, n_bytes: int, checksums: Sequence[str]) -> list[Block]:
    """The blocks of a file of `n_bytes`.

    Raises ValueError unless there is one checksum for each block.
    """
    if len(checksums) != math.ceil(n_bytes / BLOCK):
        raise ValueError(f"{len(checksums)} checksums for {n_bytes} bytes")
    starts = range(0, n_bytes, BLOCK)
    return [
        Block(path, start, min(BLOCK, n_bytes - start), checksum)
        for start, checksum in zip(starts, checksums, strict=True)
    ]


def find_wrong(blocks: Sequence[Block], progress: Callable[[], None] = lambda: None) -> Block | None:
    """The first block whose checksum does not match, if any."""
    threads = ThreadPoolExecutor(thread_name_prefix="verify")
    try:
        for block, is_right in zip(blocks, threads.map(Block.is_right, blocks), strict=True):
            if not is_right:
                return block
            progress()
    finally:
        threads.shutdown(cancel_futures=True)
    return None
