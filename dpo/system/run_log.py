"""`log.txt` of a run's directory: what rank 0 prints.

It holds standard output and standard error of Python, not of libraries in C. Redraws of progress bars are left out.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpo.errors import InputError, RunError
from dpo.system.redaction import redact
from dpo.system.run_directory import RUN_LOG
from dpo.system.signals import Stopped


class RunLog:
    """Copies finished lines to a run's `log.txt`.

    Until `open` is called, they are kept in memory, as a run that is refused leaves no directory behind.
    """

    def __init__(self) -> None:
        self._kept, self._unfinished = "", ""
        self._file = -1

    def hand_over(self) -> str:
        """Return, and forget, the text that is not written yet."""
        kept, self._kept = self._kept, ""
        return kept

    def begin(self, kept: str = "") -> None:
        """Record from now on; `kept` was printed before."""
        self.close()
        self._kept, self._unfinished = kept, ""
        for name in ("stdout", "stderr"):
            setattr(sys, name, RecordedStream(getattr(sys, name), self))

    def open(self, run_dir: str | Path) -> None:
        """Append to the log in a run's directory, from now on."""
        if self._file < 0:
            path = Path(run_dir) / RUN_LOG
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.add("")

    def close(self) -> None:
        """End the record, and leave the streams as they were."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, RecordedStream):
                setattr(sys, name, stream.screen)

    def add(self, text: str) -> None:
        """Take printed text, of whole lines or parts of lines."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        # a bar draws itself again after a carriage return: its last state is a line
        self._kept += "".join(redact(line.rstrip("\r").rpartition("\r")[2]) + "\n" for line in lines)
        if self._file >= 0:
            with suppress(OSError):  # a full disk must not end a run
                # unbuffered, as a signal may come any time
                os.write(self._file, self.hand_over().encode("utf-8", "backslashreplace"))


class RecordedStream:
    """A standard stream whose text a log gets too; a progress bar is drawn on its `screen`."""

    def __init__(self, screen: Any, log: RunLog) -> None:
        self.screen, self._log = screen, log

    def write(self, text: str) -> int:
        self._log.add(text)
        return self.screen.write(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)


@contextmanager
def exiting_on_failure(log: RunLog) -> Iterator[None]:
    """Context that ends the process after a failure that is no bug: with one sentence, and the status that fits."""
    try:
        yield
    except (InputError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if error.__cause__ is not None:  # a library's error: the log has all of it
            log.add(traceback.format_exc())
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C changes nothing
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
