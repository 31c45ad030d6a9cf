"""The first steps of a command, before imports that take time or open files."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def open_standard_streams() -> None:
    """Open closed standard streams on nothing, here and in processes started later.

    Some daemons start a process without them. Otherwise the next file that somebody opens would be standard output,
    and Python has no stream to print to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the one that was closed
            os.set_inheritable(number, True)
            stream = os.fdopen(number, mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Log(io.FileIO):
    """A file of which nobody is told that it cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:  # a full disk, a terminal that was closed, a pipe that nobody reads
            written = None
        return memoryview(data).nbytes if written is None else written


def print_whatever_happens() -> None:
    """Keep printing from ever failing, and so from ending a run.

    Not on a full disk, nor in a pipe that nobody reads, nor with characters that have no encoding.
    """
    for name in ("stdout", "stderr"):
        former = getattr(sys, name)
        try:
            raw = _Log(former.fileno(), "w", closefd=False)
        except io.UnsupportedOperation:  # of a program that runs this one and keeps what it prints
            continue
        options = {"encoding": former.encoding, "line_buffering": former.line_buffering or former.write_through}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **options))
