"""The files of a checkpoint, a directory `step-N` after N examples: written, verified, pruned.

Each part of a run has a file `NAME.pt`, without pickled objects: `{"step_idx": N, "state": state_dict, "metrics": means
or None}`. In a sharded checkpoint, every process writes its parts of tensors to other files (`dpo.checkpoint.shards`).
`manifest.json` lists all files with size and SHA-256, and facts with which a resumed run is compared.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError

from dpo.checkpoint.shards import SHARDS, list_shards, read_parts, write_parts
from dpo.errors import InputError, RunError, explaining
from dpo.parallel.sharding import Parts
from dpo.system.plain_files import check_readable, list_wrong_types, move_aside, read_json, remove, replacing

MANIFEST = "manifest.json"
STEP = re.compile(r"step-\d+")
# These end the hidden names that a checkpoint has
TEMPORARY_ENDING = "dpo-tmp"  # while it is written or removed
FORMER_ENDING = "dpo-former"  # until its replacement is complete
EXPORTED = "hf"  # directory in the run's last checkpoint, with an export of it; the manifest does not list it
WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # raised by data of an unexpected form
ANOTHER_DISK = "ranks write it on different disks, and checkpoint_format=sharded needs one that all share"
MIN_KEPT = 2  # number of newest checkpoints that pruning never removes: the last one may be corrupt
MANIFEST_FORM = {  # the types of facts that are read, and not only compared
    "files": dict,
    "config": dict,
    "model": dict,
    "updates": int,
    "best_at": (int, NoneType),
    "run": (str, NoneType),
    "chat_template": (str, dict, NoneType),
}


class WrittenFile(dict):
    """What `describe_file` says of a file of a checkpoint that another process has written."""


class DamagedCheckpoint(InputError):
    """A checkpoint is not as it was written; the message says what differs."""


def write_checkpoint(
    directory: Path, states: Iterable[tuple], *, step_idx: int, metrics: Mapping | None, facts: Mapping
) -> None:
    """Write a checkpoint so that `directory` is complete or not there; what it replaces is kept until the end.

    `states` are pairs of a name and a state, which becomes the file `NAME.pt`, or NAME if it is bytes; for a file that
    `write_shard` has written, the pair is what it returned. `step_idx` is the number of examples trained on. Raises
    RunError if writing fails, or if this run did not write what is there.
    """
    if os.path.lexists(directory) and not was_written_by(directory, facts.get("run")):
        raise RunError(f"checkpoint {directory} would replace what this run did not write: move it away")
    temporary = _find_temporary(directory)
    former = directory.with_name(f".{directory.name}.{FORMER_ENDING}")
    try:
        with _explaining(directory):
            remove(temporary)  # left behind by a killed run
            temporary.mkdir(parents=True)
        files = {}
        for name, state in states:  # outside `_explaining`, which is for errors of writing, not of gathering a state
            with _explaining(directory):
                path = temporary / name
                if isinstance(state, WrittenFile):
                    if not path.exists() or path.stat().st_size != state["bytes"]:
                        raise OSError(ANOTHER_DISK)
                    files[name] = state
                    continue
                if isinstance(state, bytes):
                    path.write_bytes(state)
                else:
                    path = temporary / f"{name}.pt"
                    torch.save({"step_idx": step_idx, "state": state, "metrics": metrics}, path)
                sync(path)
                files[path.name] = describe_file(path)
            del state  # freed before the next state is gathered
        with _explaining(directory):
            manifest = {"examples": step_idx, "files": files, **facts}
            path = temporary / MANIFEST
            path.write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}, indent=1))
            sync(path)
            sync(temporary)
            if os.path.lexists(directory):  # saved again at this step: a rename cannot replace a non-empty directory
                remove(former)
                directory.rename(former)
            temporary.rename(directory)
            sync(directory.parent)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # exists only after a failure


def write_shard(directory: Path, name: str, parts: Parts) -> tuple[str, WrittenFile]:
    """Write this process's parts of tensors to a file of the checkpoint that rank 0 is writing.

    Returns the file's name and facts, for the `states` of `write_checkpoint`. Raises RunError.
    """
    path = _find_temporary(directory) / name
    with _explaining(directory):
        if not path.parent.exists():
            raise OSError(ANOTHER_DISK)
        write_parts(path, parts)
        sync(path)
        return name, WrittenFile(describe_file(path))


def _find_temporary(directory: Path) -> Path:
    """Return the name that a checkpoint has while it is written or removed."""
    return directory.with_name(f".{directory.name}.{TEMPORARY_ENDING}")


def _explaining(directory: Path) -> AbstractContextManager:
    """Raise RunError for errors of writing the checkpoint; its message says whether there are earlier ones."""

    def explain(why: str) -> RunError:
        then = "there is no earlier one"
        if find_checkpoints(directory.parent):
            then = "earlier ones are intact, and resume=auto continues"
        return RunError(f"checkpoint {directory} could not be written: {why}; {then}")

    return explaining((OSError, RuntimeError, SafetensorError), explain)


def write_state(path: Path, content: Mapping) -> None:
    """Write a file like those of a checkpoint; raise InputError if that would damage a run's own checkpoint.

    `content` has the keys `step_idx`, `state` and `metrics`.
    """
    if (path.parent / MANIFEST).exists():
        raise InputError(f"{path.parent} has the checksums of the run's own checkpoint: choose another dir_name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(content, unfinished)


def describe_file(path: Path) -> dict:
    """Return a file's SHA-256 and its size in bytes, as the manifest has them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def hash_manifest(manifest: Mapping) -> str:
    """Return the SHA-256 of a manifest without its entry `sha256`, which holds this value."""
    entries = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_link(link: Path, target: Path) -> None:
    """Set a link (LATEST, BEST) to a sibling directory, atomically."""
    if link.is_dir() and not link.is_symlink():  # as `cp -rL` and object storage make of a link
        move_aside(link)
    with replacing(link) as temporary:
        temporary.symlink_to(target.name, target_is_directory=True)
    sync(link.parent)


def parse_step(directory: Path) -> int:
    """Return the N of a checkpoint `step-N`: the number of examples trained on."""
    return int(directory.name.removeprefix("step-"))


def find_checkpoints(run_dir: Path) -> list[Path]:
    """List the directories of a run that are named like checkpoints, newest first; their files may be damaged."""
    checkpoints = [path for path in run_dir.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(checkpoints, key=parse_step, reverse=True)


def was_written_by(directory: Path, run: str | None) -> bool:
    """Return whether the run with this id wrote a checkpoint; False if its manifest is damaged or it is only a link."""
    try:
        return not directory.is_symlink() and read_manifest(directory).get("run") == run
    except (OSError, *WRONG_FORM):
        return False


def prune(run_dir: Path, keep: int, run: str | None) -> None:
    """Remove the checkpoints that the run with the id `run` wrote, except the `keep` newest, BEST and LATEST."""
    linked = {os.path.realpath(run_dir / link) for link in ("BEST", "LATEST")}
    own_checkpoints = [directory for directory in find_checkpoints(run_dir) if was_written_by(directory, run)]
    for directory in own_checkpoints[max(keep, MIN_KEPT) :]:
        if os.path.realpath(directory) not in linked:
            pruned = _find_temporary(directory)
            remove(pruned)
            directory.rename(pruned)  # so that a `step-N` is complete even if the removal is interrupted
            shutil.rmtree(pruned, ignore_errors=True)  # `tidy` removes what is left


def tidy(run_dir: Path) -> None:
    """Clean up after a process was killed while saving; restore a checkpoint that was about to be replaced."""
    for former in run_dir.glob(f".step-*.{FORMER_ENDING}"):
        directory = run_dir / former.stem.removeprefix(".")
        if not os.path.lexists(directory):
            former.rename(directory)
    for pattern in (
        f".step-*.{TEMPORARY_ENDING}",
        f".step-*.{FORMER_ENDING}",
        f"step-*/.{EXPORTED}.dpo.*.tmp",  # an unfinished export, as `replacing` names it
    ):
        for leftover in run_dir.glob(pattern):
            remove(leftover)


def check_complete(directory: Path, *, only: Collection[str] | None = None) -> dict:
    """Verify every byte of all files, or of the files `only`; return the manifest, or raise DamagedCheckpoint."""
    try:
        manifest = read_manifest(directory)
        for name, facts in manifest["files"].items():
            path = directory / name
            if only is None or name in only:
                check_readable(path)
                # The size is compared first, as it takes no time.
                if path.stat().st_size != facts["bytes"] or describe_file(path) != facts:
                    raise DamagedCheckpoint(f"{path}: checksum mismatch")
    except DamagedCheckpoint:
        raise
    except (OSError, *WRONG_FORM) as error:
        raise DamagedCheckpoint(f"{directory} cannot be read ({error})") from error
    return manifest


def read_manifest(directory: Path) -> dict:
    """Read a manifest; raise DamagedCheckpoint if it is missing, was changed, or has values of unexpected types."""
    path = directory / MANIFEST
    with explaining(FileNotFoundError, lambda _: DamagedCheckpoint(f"{directory} has no manifest")):
        manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("sha256") != hash_manifest(manifest):
        raise DamagedCheckpoint(f"{path}: checksum mismatch")
    # A manifest without "files" is wrong too, as None is no dict.
    wrong = list_wrong_types({"files": None, **manifest}, MANIFEST_FORM)
    templates = manifest.get("chat_template")
    if isinstance(templates, dict):
        wrong += list_wrong_types(templates, dict.fromkeys(templates, str))
    if wrong:
        raise DamagedCheckpoint(f"{path} has values of another type than a run writes: {', '.join(wrong)}")
    outside = sorted(name for name in manifest["files"] if Path(name).name != name)
    if outside:
        raise DamagedCheckpoint(f"{path} lists files outside its directory: {', '.join(outside)}")
    return manifest


def read_state(path: Path) -> Any:
    """Return the state in a part's file, whose tensors are mapped from it (`read_file`)."""
    return read_file(path)["state"]


def read_file(path: Path) -> Mapping:
    """Return the content of a part's file: `step_idx`, `state` and `metrics`. Raises DamagedCheckpoint.

    Tensors are mapped from the file, or from shards: copy those that you keep, as the files may be deleted.
    """
    for file in (path, *list_shards(path)):
        check_readable(file)
    problem = f"{path} is damaged, or has code besides data; nothing was loaded"
    # Damaged or forged bytes can raise anything; torch's message would advise to run the code in them.
    with explaining(Exception, lambda _: DamagedCheckpoint(problem)):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, Mapping) or "state" not in content:
        raise DamagedCheckpoint(f"{path} has no 'state'")
    problem = f"{path} needs the {SHARDS} of its checkpoint, which are damaged"
    with explaining(Exception, lambda why: DamagedCheckpoint(f"{problem}: {why}")):
        return {**content, "state": read_parts(content["state"], path)}
