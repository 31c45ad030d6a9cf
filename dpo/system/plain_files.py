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
    level = [[value]]
    for _ in range(DEEPEST + 1):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, (dict, list))]
    if level:
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
    """Remove a path, if it exists; not what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, name: str | None = None) -> Path:
    """Rename a file or directory, by default to PATH.old.

    Where the name is taken, .1 and so on is added. Returns the new path.
    """
    paths = (path.with_name((name or f"{path.name}.old") + f".{n}" * (n > 0)) for n in itertools.count())
    return path.rename(next(path for path in paths if not os.path.lexists(path)))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Inside, write to the path given, which then replaces `path`.

    It may become a file or a directory. It is beside `path`, and named after this host and process, as others may be
    writing there too. Removes what killed processes of this host left.
    """
    start = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(start)}*.tmp"):
        process = left.name.removeprefix(start).removesuffix(".tmp")
        if process == str(os.getpid()) or (process.isdecimal() and not Path("/proc", process).exists()):
            remove(left)
    beside = path.with_name(f"{start}{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    finally:
        with suppress(OSError):
            remove(beside)
