"""Regular files: checks before opening, parsing, and atomic replacement.

Files are checked because opening a FIFO blocks forever, and writing through a symbolic link changes another file.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dpo.errors import InputError, one_sentence


def check_readable(path: Path) -> None:
    """Raise InputError unless the path is or links to a regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path} is not a regular file")


def check_writable(path: Path) -> None:
    """Raise InputError if the path exists and is not a regular file."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise InputError(f"{path} is not a regular file: move {path} away")


def check_link(path: Path) -> None:
    """Raise InputError if the path exists and is not a symbolic link."""
    if os.path.lexists(path) and not path.is_symlink():
        raise InputError(f"{path} is not a symbolic link to a step-N directory: remove {path}")


def make_directory(path: Path) -> None:
    """Make a directory; raise InputError for a link, as what is written there would be elsewhere."""
    if path.is_symlink():
        raise InputError(f"{path} is not a directory: move {path} away")
    path.mkdir(parents=True, exist_ok=True)


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Read an untrusted JSON file; raise InputError if it is invalid."""
    check_readable(path)
    try:
        return parse(path.read_bytes().decode("utf-8"))
    except Exception as error:  # PyYAML raises an IndexError for `!!int ""`, for instance
        raise InputError(f"{path} cannot be read: {one_sentence(error)}") from error


def read_yaml(path: Path) -> Any:
    """Read an untrusted YAML file; raise InputError if it is invalid."""
    return read_json(path, yaml.safe_load)


def remove(path: Path) -> None:
    """Remove a file, directory or symbolic link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, name: str | None = None) -> Path:
    """Rename a file or directory to PATH.old or `name`, with .1, .2 and so on if that is taken."""
    name = name or f"{path.name}.old"
    names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
    return path.rename(next(new for new in map(path.with_name, names) if not os.path.lexists(new)))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a path atomically by the file or directory that the body writes to the yielded path beside it.

    The yielded path's name has this host and process, as others may be replacing `path` too. Removes temporary files
    that killed processes of this host left.
    """
    prefix = f".{path.name}.dpo.{socket.gethostname()}."
    temporary = path.with_name(f"{prefix}{os.getpid()}.tmp")
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        process_id = leftover.name.removeprefix(prefix).removesuffix(".tmp")
        if leftover == temporary or not Path("/proc", process_id).exists():
            remove(leftover)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            remove(temporary)
