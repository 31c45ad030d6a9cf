"""Checks that a path is a regular file: opening a FIFO blocks forever, and writing through a link goes elsewhere."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from pathlib import Path

from dpo.errors import InputError

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_readable(path: Path, error: type[InputError] = InputError) -> None:
    """Raises `error` if the path is neither a file nor a link to one, and OSError if nothing is there."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise error(f"{path} is {KINDS[stat.S_IFMT(mode)]}; a regular file is expected")


def check_writable(path: Path) -> None:
    """Raises InputError if the path exists and is not itself a file: writing would block, fail or go elsewhere."""
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
    """Remove whatever is there: a directory with its contents; a link, but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, word: str = "old") -> Path:
    """Rename a file or directory to NAME.WORD, or NAME.WORD.1 and so on where that is taken. Returns the new path."""
    names = (path.with_name(f"{path.name}.{word}" + f".{n}" * (n > 0)) for n in itertools.count())
    return path.rename(next(name for name in names if not os.path.lexists(name)))
