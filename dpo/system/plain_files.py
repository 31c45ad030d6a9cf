"""Files that are files: who opens a FIFO waits for ever, and what is written to a link goes elsewhere."""

from __future__ import annotations

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
    """Raises `error` if there is something that is no file, nor a link to one, and OSError if there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise error(f"{path} is {KINDS[stat.S_IFMT(mode)]} where a file belongs")


def check_writable(path: Path) -> None:
    """Raises InputError if there is something that is no file itself: writing would wait, fail or go elsewhere."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {KINDS[stat.S_IFMT(mode)]} where a file belongs: move it away")


def check_link(path: Path) -> None:
    """Raises InputError if there is something that is no symbolic link."""
    if os.path.lexists(path) and not path.is_symlink():
        kind = KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a file")
        raise InputError(f"{path} is {kind} where a link to a step-N belongs: remove it")


def remove(path: Path) -> None:
    """Remove whatever is there: a directory with all that is in it, but nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
