"""Checksums taken while writing are the file's, and damage is found."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest
import torch

from dpo.checkpoint import checksums
from dpo.checkpoint.checksums import Block, HashedFile, find_wrong, split_into_blocks

SMALL = 2**12  # bytes of a block


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", SMALL)
    monkeypatch.setattr(checksums, "SYNC_EVERY", 2 * SMALL)
    monkeypatch.setattr(checksums, "LARGE_PIECE", 2**10)


def write(path: Path, *pieces: bytes) -> tuple[dict, list[str]]:
    with HashedFile(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        return file.sync()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (4096,), (4097,), (100, 3996, 1), (9000, 1, 5000), (8192, 8192)])
def test_the_checksums_are_those_of_the_file_and_of_its_blocks(sizes, tmp_path):
    pieces = [os.urandom(size) for size in sizes]
    content = b"".join(pieces)
    whole, blocks = write(tmp_path / "file", *pieces)
    assert (tmp_path / "file").read_bytes() == content
    assert whole == {"sha256": sha256(content), "bytes": len(content)}
    assert blocks == [sha256(content[i : i + SMALL]) for i in range(0, len(content), SMALL)]


def test_torch_saves_by_appending_alone_and_nothing_is_read_again(tmp_path):
    state = {"large": torch.randn(100, 300), "view": torch.randn(64, 64).t(), "small": torch.zeros(3), "text": "a" * 99}
    with HashedFile(tmp_path / "file.pt") as file:  # has no seek, and no way to read
        torch.save(state, file)
        whole, _ = file.sync()
    assert whole["sha256"] == sha256((tmp_path / "file.pt").read_bytes())
    torch.testing.assert_close(torch.load(tmp_path / "file.pt", weights_only=True)["view"], state["view"])


def test_a_long_file_is_synced_on_the_way_and_a_sync_that_fails_is_an_error(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append("all"))
    write(tmp_path / "file", *[bytes(SMALL)] * 7)
    assert [size if size == "all" else size >= (n + 1) * 2 * SMALL for n, size in enumerate(synced)] == [
        *(True, True, True, "all")
    ]

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", bytes(3 * SMALL))


def test_a_flipped_bit_is_found_in_every_block(tmp_path):
    path, content = tmp_path / "file", os.urandom(5 * SMALL + 17)
    whole, digests = write(path, content)
    blocks = split_into_blocks(path, whole["bytes"], digests)
    assert find_wrong(blocks) is None
    for n, block in enumerate(blocks):
        flipped = bytearray(content)
        flipped[n * SMALL + 16] ^= 1
        path.write_bytes(flipped)
        assert find_wrong(blocks) == block
    path.write_bytes(content[: 2 * SMALL + 1])
    assert find_wrong(blocks) == blocks[2]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        find_wrong(blocks)


def test_blocks_are_compared_at_the_same_time(tmp_path, monkeypatch):
    running = []

    def slow(block: Block) -> bool:
        running.append(block)
        deadline = time.monotonic() + 10
        while len(running) < 4 and time.monotonic() < deadline:  # each waits for three others
            time.sleep(0.001)
        return len(running) >= 4

    monkeypatch.setattr(Block, "is_right", slow)
    assert find_wrong([Block(tmp_path / "file", n, 1, "") for n in range(4)]) is None


def test_each_block_is_progress(tmp_path):
    said = []
    with HashedFile(tmp_path / "file", lambda: said.append("written")) as file:
        file.write(bytes(3 * SMALL + 1))
        whole, digests = file.sync()
    find_wrong(split_into_blocks(tmp_path / "file", whole["bytes"], digests), lambda: said.append("compared"))
    assert said == ["written"] * 3 + ["compared"] * 4
