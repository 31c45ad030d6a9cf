"""Regular files: checked before they are opened, parsed, replaced atomically.

Opening a FIFO blocks forever, and writing through a link goes elsewhere.
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

DEEPEST = 100  # levels of JSON and YAML; deeper nesting would crash code that walks through it
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_readable(path: Path) -> None:
    """Raises InputError for anything but a file or a link to one."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {KINDS[stat.S_IFMT(mode)]}; a regular file is expected")


def read_json(path: Path) -> Any:
    """Read an untrusted JSON file. Raises InputError if it is invalid."""
    return _read(path, "JSON", json.loads)


def read_yaml(path: Path) -> Any:
    """Read an untrusted YAML file. Raises InputError if it is invalid.

    Aliases are refused, as a few lines of them can make gigabytes.
    """
    return _read(path, "YAML", _parse_yaml)


def _read(path: Path, form: str, parse: Callable[[str], Any]) -> Any:
    check_readable(path)
    try:
        value = parse(path.read_bytes().decode("utf-8"))
        _check_depth(value)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{path} is not {form} that can be read: {one_sentence(error)}") from error
    return value


def _parse_yaml(text: str) -> Any:
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has aliases (*NAME)")
    return yaml.safe_load(text)


def _check_depth(value: Any) -> None:
    containers: list[Any] = [[value]]  # those of one level
    for _ in range(DEEPEST + 1):
        children = (child for c in containers for child in (c.values() if isinstance(c, dict) else c))
        containers = [child for child in children if isinstance(child, (dict, list))]
    if containers:
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def check_writable(path: Path) -> None:
    """Raises InputError for anything but a file or a free place."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {KINDS[stat.S_IFMT(mode)]}; a regular file is expected: move it away")


def check_link(path: Path) -> None:
    """Raises InputError if the path exists and is not a symbolic link."""
    if os.path.lexists(path) and not path.is_symlink():
        kind = KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a file")
        raise InputError(f"{path} is {kind}; a symbolic link to a step-N is expected: remove it")


def remove(path: Path) -> None:
    """Remove a file, link or directory, if it exists.

    What a link points to is kept.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, name: str | None = None) -> Path:
    """Rename a file or directory, by default to PATH.old.

    Where the name is taken, .1 and so on is added. Returns the new path.
    """
    name = name or f"{path.name}.old"
    names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
    return path.rename(next(new for new in map(path.with_name, names) if not os.path.lexists(new)))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Inside, write to the path given, which then replaces `path`.

    The path given may become a file or a directory. It is beside `path`, and named after this host and process, as
    other processes may be replacing `path` too. Removes what killed processes of this host left.
    """
    start = f".{path.name}.{socket.gethostname()}."
    for leftover in path.parent.glob(f"{glob.escape(start)}*.tmp"):
        process = leftover.name.removeprefix(start).removesuffix(".tmp")
        if process == str(os.getpid()) or (process.isdecimal() and not Path("/proc", process).exists()):
            remove(leftover)
    beside = path.with_name(f"{start}{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    finally:
        with suppress(OSError):
            remove(beside)
