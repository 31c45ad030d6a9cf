"""The first steps of a command, before imports that take time or open files."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def open_standard_streams() -> None:
    """Open closed standard streams on the null device, here and in processes started later.

    Some daemons start a process without them. Then the next file to be opened would become standard output, and Python
    would have no stream to print to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the one that was closed
            os.set_inheritable(number, True)
            stream = os.fdopen(number, mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Log(io.FileIO):
    """A file that hides write errors."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:  # a full disk, a terminal that was closed, a pipe that nobody reads
            written = None
        return memoryview(data).nbytes if written is None else written


def print_whatever_happens() -> None:
    """Keep printing from ever failing, and so from ending a run.

    It does not fail on a full disk, in a pipe that nobody reads, or for characters without an encoding.
    """
    for name in ("stdout", "stderr"):
        former = getattr(sys, name)
        try:
            raw = _Log(former.fileno(), "w", closefd=False)
        except io.UnsupportedOperation:  # the stream of a program that runs this one and captures its output
            continue
        options = {"encoding": former.encoding, "line_buffering": former.line_buffering or former.write_through}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **options))
