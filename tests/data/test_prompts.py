"""Stored prompts are the ones that were stored, in memory or on a disk, and leave no file behind."""

from __future__ import annotations

import hashlib
import resource

import pytest
from support.runs import GOLDEN

from dpo.data import prompts
from dpo.data.examples import iterate_examples
from dpo.data.preflight import prepare_data
from dpo.data.prompts import Prompt, store_prompts
from dpo.data.tokenizer import load_tokenizer
from dpo.errors import RunError
from preference_datasets import get_dataset, load_prompts

ODD = [
    Prompt("a", [" b", " c", " b"], [(0, 1), (2, 1)], " b", "keep_end", False, 0),
    Prompt('"\\\n\u2028\0é漢🙂', ["", "\r\n"], [(1, 0)], "none of them", "keep_start", True, 1),
    Prompt("no pair", [" alone"], [], " alone", "keep_start", False, 2),
]
CHAT = Prompt("<user>é", [" b"], [], " b", "keep_start", True, 3, messages=[{"role": "user", "content": "é"}])


@pytest.mark.parametrize("in_memory", [2**28, 100, 0])
def test_prompts_come_back_as_they_were(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(prompts, "IN_MEMORY", in_memory)
    stored = store_prompts(iter(ODD), tmp_path / "new")

    assert list(stored) == ODD
    assert (len(stored), stored[-1], stored[1:]) == (3, ODD[2], ODD[1:])
    with pytest.raises(IndexError):
        stored[3]
    assert type(stored[0].pairs[0]) is tuple
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # on the disk, but under no name
    assert (tmp_path / "new").exists() == (in_memory < 2**28)


def test_messages_are_stored_beside_a_prompt_that_has_them(tmp_path):
    stored = store_prompts(iter([*ODD, CHAT]), tmp_path)

    assert list(stored) == [*ODD, CHAT]
    without = store_prompts(iter(ODD), tmp_path)
    assert stored._bytes[: without.where.size] == without._bytes[: without.where.size]  # which take no more room
    assert b"user" not in without._bytes[: without.where.size].replace(CHAT.text.encode(), b"")


def test_others_open_them_where_they_are(tmp_path):
    stored = store_prompts(iter(ODD), tmp_path)
    assert list(prompts.StoredPrompts(stored.where)) == ODD


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "IN_MEMORY", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RunError, match=rf"cannot be written to {tmp_path}, after .*File too large.*free"):
            store_prompts((ODD[0]._replace(text="x" * 1000) for _ in range(100)), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_local_directory_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "IN_MEMORY", 0)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=rf"cannot be written to {tmp_path}/file/folder, .*Not a directory"):
        store_prompts(iter(ODD), tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("names", "digest", "order"),
    [
        (["hh"], "6a176ed5561d19029de53ed716873481", "54e0bbd01367ed8f85c1a72b8ba7b78c"),
        pytest.param(
            ["demo", "hh"],
            "403ecbfca7592074ab25a1eac3ca7a93",
            "d7b6eefd80bc9f7ccd5b2d0ba6b8e7b7",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_digest_and_order_of_three_epochs_are_those_of_lists_of_prompts(names, digest, order, tmp_path):
    """The numbers of hh alone were taken when prompts were lists, which runs of that time continue from; those with
    demo when its texts last changed."""
    data = prepare_data(
        names, load_tokenizer(str(GOLDEN / "tiny-llama")), get_dataset=get_dataset, sft_mode=False,
        batch_size=2, max_length=64, max_prompt_length=32, n_epochs=2, n_examples=None,
        cache_dir=None, folder=tmp_path, silent=True,
        dataset_sources={"hh": str(GOLDEN / "words")},
    )  # fmt: skip
    assert data.digest == digest

    found = []
    for source in (data.train, load_prompts(names, "train", dataset_sources={"hh": str(GOLDEN / "words")})):
        seen = hashlib.sha256()
        options = {"batch_size": 4, "shuffle": True, "sft_mode": False, "n_epochs": 3, "n_examples": None, "seed": 7}
        for rows in iterate_examples(source, **options):
            for prompt, _, texts in rows:
                assert source[prompt.number] == prompt
                seen.update(repr((prompt.text, texts)).encode())
        found.append(seen.hexdigest()[:32])
    assert found == [order, order]
