"""A checkpoint is complete or absent, and what is damaged is recognised."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import PARTS, flip_a_bit, read_json, write_steps

from dpo.checkpoint import files
from dpo.checkpoint.files import DamagedCheckpoint, check_complete, find_checkpoints, prune, set_link, tidy
from dpo.errors import RunError, one_sentence


def write_checkpoint(directory: Path, states: Any, *, step_idx: int = 8, metrics: Any = None, **facts: Any) -> Path:
    states = states.items() if isinstance(states, dict) else states
    files.write_checkpoint(directory, states, step_idx=step_idx, metrics=metrics, facts=facts)
    return directory


def read(directory: Path, part: str = "policy") -> Any:
    return torch.load(directory / f"{part}.pt", weights_only=True)["state"]


# --- written -------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_saved_again_holds_only_the_new_files(tmp_path):
    write_checkpoint(tmp_path / "step-8", {"policy": {"a": 1}, "optimizer": {}})
    saved = write_checkpoint(tmp_path / "step-8", {"policy": {"a": 2}})
    assert sorted(os.listdir(saved)) == ["manifest.json", "policy.pt"]
    assert read(saved) == {"a": 2}


class CannotBeSaved:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_says_so_and_keeps_the_former_checkpoint(tmp_path):
    saved = write_checkpoint(tmp_path / "step-8", {"policy": {"a": 1}})
    then = "earlier ones are intact, and resume=auto continues"
    for name in ("step-8", "step-16"):
        with pytest.raises(RunError, match="could not be written: the disk is full; " + then):
            write_checkpoint(tmp_path / name, {"policy": {}, "optimizer": CannotBeSaved()})
    assert os.listdir(tmp_path) == ["step-8"]  # no half-written files that keep a full disk full
    assert read(saved) == {"a": 1}

    def states():
        yield "policy", {"a": 1}
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):  # not the disk's fault
        write_checkpoint(tmp_path / "step-16", states())
    assert os.listdir(tmp_path) == ["step-8"]


@pytest.mark.parametrize("n_seen", [None, 3])
def test_a_checkpoint_whose_shards_are_on_another_disk_is_not_written(n_seen, tmp_path):
    def states():
        if n_seen:
            (tmp_path / ".step-8.dpo-tmp" / "shard").write_bytes(bytes(n_seen))
        yield "shard", files.WrittenFile({"bytes": 4})

    with pytest.raises(RunError, match="ranks write it on different disks"):
        write_checkpoint(tmp_path / "step-8", states())
    assert os.listdir(tmp_path) == []


def test_a_directory_that_a_copy_has_in_place_of_a_link_is_moved_aside(tmp_path):
    (tmp_path / "LATEST" / "mine").mkdir(parents=True)
    for step in (8, 16):
        set_link(tmp_path / "LATEST", tmp_path / f"step-{step}")
    assert (tmp_path / "LATEST").readlink() == Path("step-16")
    assert (tmp_path / "LATEST.old" / "mine").exists()


# --- recognised ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, flip_a_bit, lambda file: os.truncate(file, file.stat().st_size - 1), lambda f: f.write_bytes(b"")],
)
def test_every_damage_to_every_file_is_recognised(damage, tmp_path):
    for n, part in enumerate([*(f"{part}.pt" for part in PARTS), "manifest.json"]):
        [saved] = write_steps(tmp_path, n, updates=2)
        manifest = check_complete(saved)
        assert (manifest["examples"], manifest["updates"]) == (n, 2)
        assert manifest["files"].keys() == {f"{part}.pt" for part in PARTS}
        damage(saved / part)
        with pytest.raises(DamagedCheckpoint, match=f"step-{n}"):
            check_complete(saved)


def test_a_manifest_that_does_not_describe_its_checkpoint_is_damage(tmp_path):
    [saved] = write_steps(tmp_path, 8, updates=2)
    manifest = read_json(saved / "manifest.json")
    changed = [json.dumps(manifest | change) for change in ({"updates": 3}, {"examples": 9}, {"files": {}}, {"new": 1})]
    for content in (*changed, "", "null", "[]", "{}", '{"files": null}', "[" * 100_000):
        (saved / "manifest.json").write_text(content)
        with pytest.raises(DamagedCheckpoint, match="step-8"):
            check_complete(saved)


def test_after_a_kill_temporary_files_are_removed_and_a_checkpoint_being_replaced_is_restored(tmp_path):
    write_steps(tmp_path, 8, 16)
    (tmp_path / "step-8").rename(tmp_path / ".step-8.dpo-former")  # killed before the new one was in place
    for rest in (".step-16.dpo-former", ".step-24.dpo-tmp", ".step-4.dpo-tmp"):
        (tmp_path / rest).mkdir()
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-16", "step-8"]
    check_complete(tmp_path / "step-8")


def test_pruning_keeps_the_newest_the_best_and_never_fewer_than_two(tmp_path):
    write_steps(tmp_path, 8, 16, 24, 32, 40)
    set_link(tmp_path / "BEST", tmp_path / "step-8")
    set_link(tmp_path / "LATEST", tmp_path / "step-40")

    prune(tmp_path, 3, None)
    assert sorted(p.name for p in find_checkpoints(tmp_path)) == ["step-24", "step-32", "step-40", "step-8"]
    prune(tmp_path, 1, None)
    assert sorted(p.name for p in find_checkpoints(tmp_path)) == ["step-32", "step-40", "step-8"]


@pytest.mark.parametrize("foreign", ["another run's", "another program's", "a link", "a file"])
def test_what_this_run_did_not_write_is_neither_pruned_nor_replaced(foreign, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for step in (1, 8):
        place = tmp_path / f"step-{step}"
        if foreign == "another run's":
            write_checkpoint(place, {"policy": {}}, run="a")
        elif foreign == "another program's":
            place.mkdir()
            (place / "manifest.json").write_text("{}")
        elif foreign == "a link":
            place.symlink_to(write_checkpoint(tmp_path / "elsewhere" / f"step-{step}", {"policy": {}}, run="b"))
        else:
            place.touch()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("step-*")}
    for step in (16, 24, 32):
        write_checkpoint(tmp_path / f"step-{step}", {"policy": {}}, run="b")

    prune(tmp_path, 2, "b")
    with pytest.raises(RunError, match=r"step-8 would replace what this run did not write"):
        write_checkpoint(tmp_path / "step-8", {"policy": {"a": 1}}, run="b")

    assert {path: path.lstat().st_mtime_ns for path in before} == before
    assert sorted(p.name for p in find_checkpoints(tmp_path)) == ["step-1", "step-24", "step-32", "step-8"]


@pytest.mark.parametrize(
    ("message", "is_full"),
    [
        ("[Errno 28] No space left on device", True),
        ("unexpected pos 25771392 vs 25771284", True),
        ("I/O error: File too large (os error 27)", True),
        ("I/O error: Disk quota exceeded (os error 122)", True),
        ("inline_container.cc:747] open file failed with strerror: Is a directory", False),
        ("413 Client Error: File too large", False),  # of a server
    ],
)
def test_a_full_disk_is_told_from_other_failures(message, is_full):
    assert (one_sentence(OSError(message)) == "the disk is full") == is_full
