"""The files of a checkpoint: complete or absent, checked against their manifest, written in the background, pruned.

A checkpoint is a directory `step-EXAMPLES` of `policy.pt`, `optimizer.pt`, `scheduler.pt`, and, to continue from,
`trainer.pt` and `random.pt`. Each is `{"step_idx": examples, "state": state_dict, "metrics": means or None}`: data.
`manifest.json` has the size and SHA-256 of each and of its blocks, and facts that a continuation is checked against.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dpo.checkpoint.checksums import HashedFile, find_wrong, no_progress, parts_of
from dpo.checkpoint.contents import MANIFEST as MANIFEST_SHAPE
from dpo.checkpoint.contents import as_now, find_odd, find_odd_part
from dpo.errors import InputError, RunError
from dpo.system.plain_files import check_link, check_readable, remove

MANIFEST = "manifest.json"
PARTS = ("policy", "optimizer", "scheduler", "trainer", "random")
STEP = re.compile(r"step-(\d+)")
ALWAYS_KEPT = 2  # newest checkpoints that pruning leaves: one of them may prove damaged


class DamagedCheckpoint(InputError):
    """A directory that is no complete checkpoint; the message says what is wrong with it."""


def write_checkpoint(
    directory: Path,
    states: Iterable[tuple[str, Any]],
    *,
    step_idx: int,
    metrics: Mapping | None,
    facts: Mapping,
    progress: Callable[[], None] = no_progress,
) -> None:
    """Write `NAME.pt` for each (name, state) and the manifest, under a temporary name that is renamed at the end.

    Each file is synced before the manifest is written, and each state freed before the next is asked for; `progress` is
    called after every block of a file. Raises RunError if the disk does not take it; then nothing is left behind, and
    what was there before still is.
    """
    temporary, former = (directory.with_name(f".{directory.name}.{kind}") for kind in ("tmp", "former"))
    try:
        with _explaining(directory):
            remove(temporary)  # left behind by a killed run
            temporary.mkdir(parents=True)
        files, blocks = {}, {}
        for name, state in states:  # what asking for it raises is no fault of the disk
            part = f"{name}.pt"
            with _explaining(directory), HashedFile(temporary / part, progress) as file:
                torch.save({"step_idx": step_idx, "state": state, "metrics": metrics}, file)
                files[part], blocks[part] = file.sync()
            del state
        with _explaining(directory):
            with HashedFile(temporary / MANIFEST) as file:
                manifest = {"examples": step_idx, "files": files, "blocks": blocks, **facts}
                file.write(json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1).encode())
                file.sync()
            sync_directory(temporary)
            if os.path.lexists(directory):  # saved again at the same step: a rename cannot replace a full directory
                remove(former)
                directory.rename(former)
            temporary.rename(directory)
            sync_directory(directory.parent)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a disk that is full should not stay so


@contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError when a write fails
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # the writer hides it
        reason = str(cause).strip().split("\n")[0]
        raise RunError(f"checkpoint {directory} could not be written ({reason}); earlier ones are whole") from error


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's other entries."""
    entries = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, target: Path) -> None:
    """Make `link` (LATEST, BEST) a symbolic link to `target`, a directory beside it, in one atomic step."""
    check_link(link)  # a copy that followed links made it a directory
    temporary = link.with_name(f".{link.name}.tmp")
    remove(temporary)
    temporary.symlink_to(target.name, target_is_directory=True)
    temporary.replace(link)
    sync_directory(link.parent)


def find_checkpoints(run_dir: Path) -> list[Path]:
    """The `step-N` of a run, newest first."""
    found = [path for path in run_dir.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def tidy(run_dir: Path) -> None:
    """Clear up after a run that was killed while it wrote; what it had moved aside to save anew comes back."""
    for former in run_dir.glob(".step-*.former"):
        directory = run_dir / former.name.removeprefix(".").removesuffix(".former")
        if not os.path.lexists(directory):
            former.rename(directory)
    for kind in ("tmp", "former", "pruned"):
        for rest in run_dir.glob(f".step-*.{kind}"):
            remove(rest)
    for link in ("LATEST", "BEST"):
        remove(run_dir / f".{link}.tmp")


def step_of(directory: Path) -> int:
    """The examples after which a `step-N` was saved."""
    return int(directory.name.removeprefix("step-"))


def check_complete(directory: Path, progress: Callable[[], None] = no_progress) -> dict[str, Any]:
    """The manifest of a checkpoint, every byte of which was compared, by several threads; `progress` is called after
    every block. Raises DamagedCheckpoint if it is not whole."""
    manifest = _read_manifest(directory)
    blocks = manifest.get("blocks", {})
    parts = []
    try:
        for name, expected in manifest["files"].items():
            check_readable(directory / name, DamagedCheckpoint)
            if (directory / name).stat().st_size != expected["bytes"]:
                raise DamagedCheckpoint(f"{directory / name} is not as it was written")
            parts += parts_of(directory / name, expected["bytes"], expected["sha256"], blocks.get(name))
        if wrong := find_wrong(parts, progress):
            raise DamagedCheckpoint(f"{wrong.path} is not as it was written")
    except (OSError, ValueError) as error:
        raise _as_damage(directory, error) from error
    return manifest


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        check_readable(path, DamagedCheckpoint)
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{directory} has no manifest") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _as_damage(directory, error) from error
    if odd := find_odd(manifest, MANIFEST_SHAPE):
        raise DamagedCheckpoint(f"{path}: {odd}")
    if manifest["sha256"] != digest_of(manifest):
        raise DamagedCheckpoint(f"{path} is not as it was written")
    if strange := {f"{part}.pt" for part in PARTS} ^ manifest["files"].keys():
        raise DamagedCheckpoint(f"{path} is wrong about {', '.join(sorted(strange))}")
    return manifest


def _as_damage(directory: Path, error: Exception) -> DamagedCheckpoint:
    return error if isinstance(error, DamagedCheckpoint) else DamagedCheckpoint(f"{directory} cannot be read ({error})")


def check_contents(directory: Path, progress: Callable[[], None] = no_progress) -> None:
    """Raises DamagedCheckpoint unless every part holds what such a part does. No tensor is read for it."""
    for name in PARTS:
        read_part(directory, name)
        progress()


def read_part(directory: Path, name: str) -> Any:
    """The state of a part, of the types and under the keys that it must have, as `read_state` gives it."""
    path = directory / f"{name}.pt"
    state = as_now(name, read_state(path))
    if odd := find_odd_part(name, state):
        raise DamagedCheckpoint(f"{path} is no state of a run: {odd}")
    return state


def read_state(path: Path) -> Any:
    """The `state` in a checkpoint's file, read as data. Raises DamagedCheckpoint, whatever else is in it.

    Tensors are the file's own pages, which the system reads when they are wanted and gives up when memory is short:
    what stays must be copied, for the file may go.
    """
    try:
        check_readable(path, DamagedCheckpoint)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_be_mapped(path))
    except (MemoryError, DamagedCheckpoint):
        raise
    except pickle.UnpicklingError as error:  # its message advises to run the code
        raise DamagedCheckpoint(f"{path} is damaged or holds more than data, which was not loaded") from error
    except Exception as error:  # reading bytes that were damaged or made up can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise DamagedCheckpoint(f"{path} cannot be read: {reason}") from error
    if not isinstance(content, Mapping) or "state" not in content:
        raise DamagedCheckpoint(f"{path} holds no 'state'")
    return content["state"]


def _can_be_mapped(path: Path) -> bool:
    """Whether the bytes of tensors lie in the file as they are: not in torch's format before 1.6, nor compressed."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in file.infolist())


def prune(run_dir: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest and what BEST and LATEST name; never one of the last two."""
    named = {os.path.realpath(run_dir / link) for link in ("BEST", "LATEST")}
    for directory in find_checkpoints(run_dir)[max(keep, ALWAYS_KEPT) :]:
        if os.path.realpath(directory) not in named:
            doomed = directory.with_name(f".{directory.name}.pruned")
            remove(doomed)
            directory.rename(doomed)  # at no time is there a half of it
            shutil.rmtree(doomed, ignore_errors=True)  # what is left goes when the run is next continued


class BackgroundWriter:
    """Runs one write at a time in a thread; what goes wrong in it is raised by the next call."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write when the one before has ended."""
        self.wait()
        self._running = self._pool.submit(write)

    def check(self) -> None:
        """Raise what went wrong, if the write has ended."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written."""
        running, self._running = self._running, None
        if running is not None:
            running.result()


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_in(value)
