"""A checkpoint is complete or absent, and what is damaged is recognised."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import weakref
import zipfile
from pathlib import Path

import pytest
import torch
from support.runs import PARTS, ROOT, run_script

from dpo.checkpoint.files import (
    BackgroundWriter,
    DamagedCheckpoint,
    check_complete,
    find_checkpoints,
    hash_manifest,
    point,
    prune,
    read_state,
    tidy,
    write_checkpoint,
)
from dpo.errors import RunError


def test_checkpoint_files_hold_the_references_keys_and_load_as_plain_data(tmp_path):
    weight = torch.randn(4, 4)
    states = {"policy": {"lm_head.weight": weight}, "scheduler": {"last_epoch": 3}}
    write_checkpoint(tmp_path / "run" / "step-8", states.items(), step_idx=8, metrics={"loss/eval": 0.5}, facts={})

    assert sorted(os.listdir(tmp_path / "run")) == ["step-8"]
    assert sorted(os.listdir(tmp_path / "run" / "step-8")) == ["manifest.json", "policy.pt", "scheduler.pt"]
    content = torch.load(tmp_path / "run" / "step-8" / "policy.pt", weights_only=True)
    assert list(content) == ["step_idx", "state", "metrics"]
    assert (content["step_idx"], content["metrics"]) == (8, {"loss/eval": 0.5})
    assert torch.equal(content["state"]["lm_head.weight"], weight)


def test_one_state_is_freed_before_the_next_is_gathered(tmp_path):
    alive = weakref.WeakSet()

    def states():
        for name in ("policy", "optimizer", "scheduler"):
            assert not alive
            state = {"a": torch.zeros(1)}
            alive.add(state["a"])
            yield name, state
            del state

    write_checkpoint(tmp_path / "step-8", states(), step_idx=8, metrics=None, facts={})
    assert len(os.listdir(tmp_path / "step-8")) == 4


def test_a_directory_that_is_saved_again_holds_only_the_new_files(tmp_path):
    write_checkpoint(
        tmp_path / "step-8", {"policy": {"a": 1}, "optimizer": {}}.items(), step_idx=8, metrics=None, facts={}
    )
    write_checkpoint(tmp_path / "step-8", {"policy": {"a": 2}}.items(), step_idx=8, metrics=None, facts={})

    assert sorted(os.listdir(tmp_path / "step-8")) == ["manifest.json", "policy.pt"]
    assert torch.load(tmp_path / "step-8" / "policy.pt")["state"] == {"a": 2}


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
import torch
from dpo.checkpoint.files import write_checkpoint

class Killer:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

run = Path(sys.argv[1])
write_checkpoint(run / "step-8", {"policy": {"a": torch.ones(1)}}.items(), step_idx=8, metrics=None, facts={})
states = {"policy": {"a": torch.zeros(1)}, "optimizer": {"a": torch.zeros(1), "b": Killer()}}
write_checkpoint(run / sys.argv[2], states.items(), step_idx=16, metrics=None, facts={})
"""


@pytest.mark.parametrize("name", ["step-16", "step-8"])
def test_a_kill_while_saving_leaves_only_what_was_complete(name, tmp_path):
    result = run_script("-c", KILLED_WHILE_SAVING, str(tmp_path), name, PYTHONPATH=str(ROOT))

    assert result.returncode == -signal.SIGKILL, result.stderr
    assert sorted(n for n in os.listdir(tmp_path) if not n.startswith(".")) == ["step-8"]
    assert torch.load(tmp_path / "step-8" / "policy.pt")["state"]["a"].item() == 1


class CannotBeSaved:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_says_so_and_keeps_the_former_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "step-8", {"policy": {"a": 1}}.items(), step_idx=8, metrics=None, facts={})
    for name in ("step-8", "step-16"):
        states = {"policy": {}, "optimizer": CannotBeSaved()}
        with pytest.raises(RunError, match=r"could not be written \(.*No space left.*; earlier ones are intact"):
            write_checkpoint(tmp_path / name, states.items(), step_idx=8, metrics=None, facts={})

    assert os.listdir(tmp_path) == ["step-8"]  # no half-written files that keep a full disk full
    assert torch.load(tmp_path / "step-8" / "policy.pt")["state"] == {"a": 1}


def test_files_then_manifest_then_names_reach_the_disk_and_only_then_the_name_that_counts(tmp_path, monkeypatch):
    done = []

    def noting(call, what):
        def noted(*arguments):
            name = os.readlink(f"/proc/self/fd/{arguments[0]}") if isinstance(arguments[0], int) else arguments[1]
            done.append(f"{what} {Path(name).relative_to(tmp_path)}")
            return call(*arguments)

        return noted

    monkeypatch.setattr(os, "fsync", noting(os.fsync, "sync"))
    monkeypatch.setattr(os, "rename", noting(os.rename, "rename to"))
    write_checkpoint(tmp_path / "step-8", {"a": {}, "b": {}}.items(), step_idx=8, metrics=None, facts={})
    point(tmp_path / "LATEST", tmp_path / "step-8")

    parts = [f"sync .step-8.tmp{name}" for name in ("/a.pt", "/b.pt", "/manifest.json", "")]
    assert done == [*parts, "rename to step-8", "sync .", "sync ."]


def test_what_goes_wrong_while_a_state_is_gathered_is_not_blamed_on_the_disk(tmp_path):
    def states():
        yield "policy", {"a": 1}
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        write_checkpoint(tmp_path / "step-8", states(), step_idx=8, metrics=None, facts={})
    assert os.listdir(tmp_path) == []


def test_a_link_is_moved_without_a_moment_in_which_it_is_missing(tmp_path):
    targets = [tmp_path / "step-8", tmp_path / "step-16"]
    for target in targets:
        target.mkdir()
    point(tmp_path / "LATEST", targets[0])
    seen, stop = set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.add(os.readlink(tmp_path / "LATEST") if os.path.lexists(tmp_path / "LATEST") else None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(2000):
        point(tmp_path / "LATEST", targets[i % 2])
    stop.set()
    watcher.join()

    assert seen == {"step-8", "step-16"}  # relative, so that a run can be moved
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-16", "step-8"]


# --- recognised ----------------------------------------------------------------------------------------------------


def write(run_dir: Path, *steps: int) -> list[Path]:
    for step in steps:
        states = {part: {"a": torch.arange(50.0)} for part in PARTS}
        write_checkpoint(run_dir / f"step-{step}", states.items(), step_idx=step, metrics=None, facts={"updates": 2})
    return [run_dir / f"step-{step}" for step in steps]


def test_a_whole_checkpoint_gives_its_manifest_and_states(tmp_path):
    [saved] = write(tmp_path, 8)

    manifest = check_complete(saved)

    assert (manifest["examples"], manifest["updates"]) == (8, 2)
    assert manifest["files"].keys() == {f"{part}.pt" for part in PARTS}
    assert torch.equal(read_state(saved / "optimizer.pt")["a"], torch.arange(50.0))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("part", [*(f"{part}.pt" for part in PARTS), "manifest.json"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, lambda file: file.write_bytes(b"")])
def test_every_damage_to_every_file_is_recognised(damage, part, tmp_path):
    [saved] = write(tmp_path, 8)
    damage(saved / part)

    with pytest.raises(DamagedCheckpoint, match="step-8"):
        check_complete(saved)


@pytest.mark.parametrize(("key", "value"), [("updates", 3), ("examples", 9), ("files", None), ("more", 1)])
def test_a_manifest_that_says_something_else_is_damage(key, value, tmp_path):
    [saved] = write(tmp_path, 8)
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, key: value}))

    with pytest.raises(DamagedCheckpoint, match="step-8"):
        check_complete(saved)


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{}", '{"files": null}', '{"files": {}}', '{"files": "policy.pt"}', "[" * 100_000],
)
def test_a_manifest_of_another_form_is_damage(content, tmp_path):
    [saved] = write(tmp_path, 8)
    (saved / "manifest.json").write_text(content)

    with pytest.raises(DamagedCheckpoint, match="step-8"):
        check_complete(saved)


def vouch(directory: Path, **changes: object) -> None:
    """Change a manifest, and let its own checksum say that it was so written."""
    manifest = json.loads((directory / "manifest.json").read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not None}
    (directory / "manifest.json").write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}))


@pytest.mark.parametrize(
    "blocks", [3, [], {"policy.pt": 3}, {"policy.pt": []}, {"policy.pt": [1]}, {"policy.pt": {}}, None]
)
def test_odd_checksums_of_blocks_are_damage(blocks, tmp_path):
    [saved] = write(tmp_path, 8)
    vouch(saved, blocks=blocks)
    with pytest.raises(DamagedCheckpoint, match="step-8"):
        check_complete(saved)


def test_a_state_is_mapped_and_not_read_where_the_format_allows(tmp_path):
    [saved] = write(tmp_path, 8)
    old, packed = tmp_path / "old.pt", tmp_path / "packed.pt"
    torch.save({"state": {"a": torch.arange(50.0)}}, old, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(saved / "policy.pt") as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for entry in plain.infolist():
            file.writestr(entry.filename, plain.read(entry))

    for path, mapped in ((saved / "policy.pt", True), (old, False), (packed, False)):
        state = read_state(path)
        assert torch.equal(state["a"], torch.arange(50.0))
        assert (str(path) in Path("/proc/self/maps").read_text()) == mapped
        state["a"][0] = 7  # a page of our own: the file stays
        assert read_state(path)["a"][0] == 0


def test_checkpoints_come_newest_first_by_number(tmp_path):
    write(tmp_path, 8, 128, 16)
    for other in ("step-x", ".step-256.tmp", "step-8.old", "LATEST"):
        (tmp_path / other).mkdir()

    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-128", "step-16", "step-8"]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_after_a_kill_the_rest_is_cleared_and_what_was_moved_aside_comes_back(tmp_path):
    write(tmp_path, 8, 16)
    (tmp_path / "step-8").rename(tmp_path / ".step-8.former")  # killed before the new one was in place
    for rest in (".step-16.former", ".step-24.tmp", ".step-4.pruned"):
        (tmp_path / rest).mkdir()

    tidy(tmp_path)

    assert sorted(os.listdir(tmp_path)) == ["step-16", "step-8"]
    check_complete(tmp_path / "step-8")


def test_pruning_keeps_the_newest_the_best_and_never_fewer_than_two(tmp_path):
    steps = write(tmp_path, 8, 16, 24, 32, 40)
    point(tmp_path / "BEST", steps[0])
    point(tmp_path / "LATEST", steps[-1])

    prune(tmp_path, 3)
    assert sorted(p.name for p in find_checkpoints(tmp_path)) == ["step-24", "step-32", "step-40", "step-8"]
    prune(tmp_path, 1)
    assert sorted(p.name for p in find_checkpoints(tmp_path)) == ["step-32", "step-40", "step-8"]


def test_one_write_runs_at_a_time_and_its_failure_is_raised_by_the_next_call():
    writer, running, most, may_end = BackgroundWriter(), [], [], threading.Event()

    def write_slowly() -> None:
        running.append(1)
        most.append(len(running))
        assert may_end.wait(60)
        running.pop()

    def fail() -> None:
        raise RunError("no space")

    def check_until_it_fails() -> None:
        for _ in range(1000):
            writer.check()
            time.sleep(0.01)

    writer.start(write_slowly)  # does not wait
    may_end.set()
    writer.start(write_slowly)
    writer.start(fail)
    assert most == [1, 1]
    with pytest.raises(RunError, match="no space"):
        check_until_it_fails()
    writer.check()  # told once
    writer.start(fail)
    with pytest.raises(RunError, match="no space"):
        writer.wait()
