import glob
import itertools
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dpo.errors import InputError, explaining, one_sentence

LONGEST_MARK = 2**14  # characters


def check_readable(path: Path) -> None:
    """Raise InputError unless it is or links to a regular file: opening a FIFO would block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path} is not a regular file")


def check_own(path: Path, mark: str) -> None:
    """Raise InputError for what is there, unless it begins as a pattern says that a file of ours does, or is empty."""
    if not os.path.lexists(path):
        return
    if path.is_file():
        with path.open("rb") as file:
            beginning = file.read(LONGEST_MARK).decode(errors="replace")
        if not beginning or re.match(mark, beginning, re.DOTALL):
            return
    raise InputError(f"{path} is none of the files that this command writes: move it away, or give another directory")


def read_json(path: Path, parse: Callable = json.loads) -> Any:
    """Raises InputError for an invalid file."""
    check_readable(path)
    try:
        return parse(path.read_bytes().decode("utf-8"))
    except Exception as error:  # PyYAML raises an IndexError for `!!int ""`, for instance
        raise InputError(f"{path} cannot be read: {one_sentence(error)}") from error


def read_yaml(path: Path) -> Any:
    return read_json(path, yaml.safe_load)


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair as JSON spells it


def list_wrong(values: Mapping, form: Mapping) -> list[str]:
    """The names of the values that are not of the types in `form`."""
    return [name for name, kind in form.items() if name in values and not isinstance(values[name], kind)]


def remove(path: Path) -> None:
    """Remove what exists; of a symbolic link, not the target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path, name: str | None = None) -> Path:
    """Rename to PATH.old or `name`, with .1, .2 and so on if that is taken."""
    name = name or f"{path.name}.old"
    names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
    return path.rename(next(new for new in map(path.with_name, names) if not os.path.lexists(new)))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a path atomically by what the body writes to the yielded path beside it."""
    prefix = f".{path.name}.dpo.{socket.gethostname()}."
    temporary = path.with_name(f"{prefix}{os.getpid()}.tmp")  # others may be replacing `path` too
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):  # of processes of this host that were killed
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
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def read_lines(path: Path, mark: str, form: Mapping[str, type]) -> Iterator[dict]:
    """Yield the objects of JSON lines to which `append_line` adds, if there is such a file.

    A last line that was cut off, as by a kill, is removed. InputError for a file that does not begin as `mark` says, or
    a line that is no object with values of the types in `form`.
    """
    check_own(path, mark)
    if path.exists():
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        os.truncate(path, end)
        for number, line in enumerate(content[:end].splitlines(), start=1):
            where = f"line {number} of {path} cannot be read: move the file away, so that it is written anew"
            with explaining((ValueError, RecursionError), lambda why, where=where: InputError(f"{where} ({why})")):
                value = json.loads(line)
                if not isinstance(value, dict) or form.keys() - value.keys() or list_wrong(value, form):
                    raise ValueError(f"it needs {', '.join(form)}")
                yield value


def append_line(path: Path, value: Any) -> None:
    with path.open("ab") as file:
        file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
