"""Checksums taken while a file is written are those of the file, and every damage to any block of it is found."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest
import torch

from dpo.checkpoint import checksums
from dpo.checkpoint.checksums import HashedFile, Part, find_wrong, split_into_blocks

SMALL_BLOCK = 2**12


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(checksums, "SYNC_EVERY", 2 * SMALL_BLOCK)
    monkeypatch.setattr(checksums, "IN_THREADS", 2**10)


def write(path: Path, *pieces: bytes) -> tuple[dict, list[str]]:
    with HashedFile(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        return file.sync()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (4096,), (4097,), (100, 3996, 1), (9000, 1, 5000), (8192, 8192)])
def test_the_checksums_are_those_of_the_file_and_of_its_blocks(sizes, small_blocks, tmp_path):
    pieces = [os.urandom(size) for size in sizes]
    content = b"".join(pieces)

    whole, blocks = write(tmp_path / "file", *pieces)

    assert (tmp_path / "file").read_bytes() == content
    assert whole == {"sha256": sha256(content), "bytes": len(content)}
    assert blocks == [sha256(content[i : i + SMALL_BLOCK]) for i in range(0, len(content), SMALL_BLOCK)]


def test_torch_saves_by_appending_alone_and_nothing_is_read_again(small_blocks, tmp_path, monkeypatch):
    state = {"large": torch.randn(100, 300), "view": torch.randn(64, 64).t(), "small": torch.zeros(3), "text": "a" * 99}
    reads = []
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: reads.append(arguments))

    with HashedFile(tmp_path / "file.pt") as file:  # which has no seek, and no way to read
        torch.save(state, file)
        whole, _ = file.sync()

    assert reads == []
    assert whole["sha256"] == sha256((tmp_path / "file.pt").read_bytes())
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(loaded["large"], state["large"])
    assert torch.equal(loaded["view"], state["view"])


def test_what_was_written_reaches_the_disk_bit_by_bit(small_blocks, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append("all"))
    write(tmp_path / "file", *[bytes(SMALL_BLOCK)] * 7)
    assert synced[-1] == "all"
    assert len(synced) == 4
    assert all(size >= (n + 1) * 2 * SMALL_BLOCK for n, size in enumerate(synced[:3]))


def test_a_disk_that_fails_while_it_syncs_in_between_is_an_error(small_blocks, tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", bytes(3 * SMALL_BLOCK))


def expected_of(path: Path) -> list[Part]:
    whole, blocks = write(path, os.urandom(5 * SMALL_BLOCK + 17))
    return split_into_blocks(path, whole["bytes"], blocks)


@pytest.mark.parametrize("block", range(6))
def test_a_flipped_bit_is_found_in_every_block(block, small_blocks, tmp_path):
    parts = expected_of(tmp_path / "file")
    assert find_wrong(parts) is None
    content = bytearray((tmp_path / "file").read_bytes())
    content[block * SMALL_BLOCK + 16] ^= 1
    (tmp_path / "file").write_bytes(content)

    assert find_wrong(parts) == parts[block]


def test_a_file_that_is_too_short_is_wrong_and_one_that_is_gone_an_error(small_blocks, tmp_path):
    parts = expected_of(tmp_path / "file")
    os.truncate(tmp_path / "file", 2 * SMALL_BLOCK + 1)
    assert find_wrong(parts) == parts[2]
    (tmp_path / "file").unlink()
    with pytest.raises(FileNotFoundError):
        find_wrong(parts)


def test_blocks_are_compared_at_the_same_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    running = []

    def slow(part: Part) -> bool:
        running.append(part)
        deadline = time.monotonic() + 10
        while len(running) < 4 and time.monotonic() < deadline:  # each waits for three others
            time.sleep(0.001)
        return len(running) >= 4

    monkeypatch.setattr(Part, "is_right", slow)
    assert find_wrong([Part(tmp_path / "file", n, 1, "") for n in range(4)]) is None


def test_each_block_is_progress(small_blocks, tmp_path):
    said = []
    with HashedFile(tmp_path / "file", lambda: said.append("written")) as file:
        file.write(bytes(3 * SMALL_BLOCK + 1))
        whole, blocks = file.sync()
    parts = split_into_blocks(tmp_path / "file", whole["bytes"], blocks)
    find_wrong(parts, lambda: said.append("compared"))
    assert said == ["written"] * 3 + ["compared"] * 4
