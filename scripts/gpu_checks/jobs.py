"""Runs a check in its own process, and leaves no process behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.gpu_checks.child import run_check
from scripts.gpu_checks.common import ROOT, Setting, find_status, redirect

MARK = "GPU_CHECK_JOB"  # environment variable of all processes that a check starts
LAST_LINES = 12  # of the log, shown for a check without a verdict


class Job:
    """On a GPU a fresh interpreter; otherwise forked from this process, which has imported all that checks need."""

    def __init__(self, run: str, setting: Setting, *, limit: float) -> None:
        self.setting, self.limit, self.mark = setting, limit, uuid.uuid4().hex
        self.log, self.start = Path(setting.folder) / "log", time.monotonic()
        self.ended_by: str | None = None
        self.process: Any = None
        if limit <= 0:
            self.ended_by = "not run: the time for all checks is used up"
        elif setting.gpu:
            command = [sys.executable, "-m", "scripts.gpu_checks.child", run, json.dumps(setting._asdict())]
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: self.mark},
                                                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                start_new_session=True)  # fmt: skip
        else:
            self.process = get_context("fork").Process(target=_run_forked, args=(run, setting, self.log, self.mark))
            self.process.start()

    @property
    def status(self) -> int | None:
        return find_status(self.process)

    def is_over(self) -> bool:
        """Whether it has ended; kills it if its time limit has passed."""
        if self.ended_by is None and self.status is None and time.monotonic() - self.start > self.limit:
            self.ended_by = f"not finished within {self.limit:.0f} s"
        over = self.ended_by is not None or self.status is not None
        if over:
            self.end()
        return over

    def end(self) -> None:
        """Kill it and all processes that it started."""
        if self.process is None:
            return
        for pid in self._processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while self.status is None:
            time.sleep(0.01)

    def _processes(self) -> list[int]:
        """The processes of its session, and those in other sessions with the mark in their environment."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal() or int(folder.name) == os.getpid():
                continue
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                if session == self.process.pid or mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def result(self) -> dict[str, Any]:
        """State, seconds, figure, details and, without a verdict, the end of its log."""
        file = Path(self.setting.folder) / "result.json"
        if self.ended_by is None and file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
        else:
            found = {"state": "failed", "figure": self.ended_by or self._how_it_died(), "details": {}}
        log = "" if found.pop("judged", False) or found["state"] == "skipped" else self._last_lines()
        return {**found, "seconds": round(time.monotonic() - self.start, 1), "log": log}

    def _how_it_died(self) -> str:
        status = self.status
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"its process {how} and gave no result"

    def _last_lines(self) -> str:
        from dpo.system.redaction import redact

        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return redact("\n".join(line[:200] for line in lines[-LAST_LINES:]))


def _run_forked(run: str, setting: Setting, log: Path, mark: str) -> None:
    os.setsid()
    redirect(log)
    os.environ[MARK] = mark
    run_check(run, setting)
