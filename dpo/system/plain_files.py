"""Files that are checked before they are read or replaced, and written whole or not at all."""

import glob
import json
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dpo.errors import InputError, explaining

LONGEST_MARK = 2**14  # bytes at the beginning of a file that `check_own` compares


def resolve_path(path: str | Path) -> Path:
    """Return an absolute path without links. Path's own methods raise for loops of links, and for unknown users."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def check_readable(path: Path) -> None:
    """Raise InputError unless the path is a regular file or links to one: opening a FIFO would block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path} is not a regular file")


def check_own(path: Path, mark: str) -> None:
    """Raise InputError if another program's file is at the path, which the caller is about to write.

    A file is one of ours if it is empty or begins with the regular expression `mark`.
    """
    if not os.path.lexists(path):
        return
    if path.is_file():
        with path.open("rb") as file:
            beginning = file.read(LONGEST_MARK).decode(errors="replace")
        if not beginning or re.match(mark, beginning, re.DOTALL):
            return
    raise InputError(f"{path} is none of the files that this command writes: move it away, or choose another directory")


def read_json(path: Path) -> Any:
    return _parse_file(path, json.loads)


def read_yaml(path: Path) -> Any:
    return _parse_file(path, yaml.safe_load)


def read_text(path: Path) -> str:
    return _parse_file(path, str)


def _parse_file(path: Path, parse: Callable) -> Any:
    """Return what `parse` makes of a file's text; raise InputError for an invalid file, FileNotFoundError for none."""
    check_readable(path)
    # PyYAML raises an IndexError for `!!int ""`, for instance.
    with explaining(Exception, lambda why: InputError(f"{path} cannot be read: {why}")):
        return parse(path.read_bytes().decode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # backslashreplace writes a lone surrogate, which UTF-8 cannot encode, as JSON escapes it
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def list_wrong_types(values: Mapping, form: Mapping) -> list[str]:
    """List the names whose value is not of the type, or types, that `form` has for it; a missing value is not wrong."""
    return [name for name, kind in form.items() if name in values and not isinstance(values[name], kind)]


def has_form(value: Any, form: Mapping) -> bool:
    """Whether a value is a mapping that has all names in `form`, with values of these types."""
    return isinstance(value, Mapping) and form.keys() <= value.keys() and not list_wrong_types(value, form)


def remove(path: Path) -> None:
    """Remove a file or directory, if it exists; of a symbolic link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, name: str | None = None) -> Path:
    """Rename to PATH.old, or to `name` beside it, with .1, .2 and so on if that is taken; return the new path."""
    name = name or f"{path.name}.old"
    target = path.with_name(name)
    number = 0
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{name}.{number}")
    return path.rename(target)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a path atomically by what the body of the `with` writes to the yielded path beside it.

    If the body raises, the path stays as it was.
    """
    prefix = f".{path.name}.dpo.{socket.gethostname()}."
    temporary = path.with_name(f"{prefix}{os.getpid()}.tmp")  # other processes may be replacing `path` too
    # Remove what killed processes of this host have left.
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


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


class JsonLinesStore:
    """A file of JSON lines, each with a `key`, and in memory these lines by key; several threads may add lines.

    A last line that is incomplete, because a process was killed, is cut off the file. Raises InputError for a file that
    does not begin with the pattern `mark`, or a line that is not an object with a key and the types in `form`.
    """

    def __init__(self, path: Path, mark: str, form: Mapping[str, type]):
        check_own(path, mark)
        self.path = path
        self.lines = {}
        self._lock = threading.Lock()
        if not path.exists():
            return
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        os.truncate(path, end)
        for number, text in enumerate(content[:end].splitlines(), start=1):
            try:
                line = json.loads(text)
                if not has_form(line, {"key": str, **form}):
                    raise ValueError(f"it needs key, {', '.join(form)}")
            except (ValueError, RecursionError) as error:
                raise InputError(f"line {number} of {path} cannot be read: move the file away ({error})") from error
            self.lines[line["key"]] = line

    def add(self, key: str, **values: Any) -> None:
        line = {"key": key, **values}
        with self._lock, self.path.open("ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self.lines[key] = line
