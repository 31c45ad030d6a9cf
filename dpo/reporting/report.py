"""Report of a training run (`report=true`), written by a separate process so that training does not wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dpo.reporting.events import Callback, Evaluation, RunContext
from dpo.system.run_directory import REPORT

ROOT = Path(__file__).resolve().parents[2]
LAST_SECS = 120  # the longest that the end of a run waits for the last report


class ReportWriter(Callback):
    """Runner of `python -m dpo.analysis` in the background: training neither waits for it nor fails with it.

    One process at a time: if one is still running at an evaluation, the next report includes that evaluation.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._process: subprocess.Popen | None = None
        self._failed = False

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.report

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if self._has_ended():
            self._begin()

    def on_end(self) -> None:
        """Write the last report, and log its path."""
        self._stop()  # its report would lack the end
        self._begin("--ended")
        try:
            if self._process is not None:
                self._process.wait(LAST_SECS)
        except subprocess.TimeoutExpired:
            self._warn(f"it took more than {LAST_SECS} s")
            self._stop()
        if self._has_ended() and not self._failed:
            self.context.log(f"report: {self.context.run_dir / REPORT}")

    def _begin(self, *options: str) -> None:
        run_dir = self.context.run_dir.absolute()
        command = [sys.executable, "-m", "dpo.analysis", str(run_dir), str((run_dir / REPORT).parent), *options]
        self._failed = False
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C reaches only the run, which then ends it in order
            )
        except OSError as error:
            self._warn(str(error))

    def _has_ended(self) -> bool:
        """Return whether no report is being written. Warns once if the last one failed."""
        if self._process is None:
            return True
        status = self._process.poll()
        if status is None:
            return False
        if status:
            lines = self._process.stderr.read().decode("utf-8", "replace").split("\n")
            self._warn(next((line for line in reversed(lines) if line.strip()), f"exit status {status}")[:300])
        self._forget()
        return True

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for part in (self.context.run_dir / REPORT).parent.glob(f".*.{self._process.pid}"):
                part.unlink()  # an unfinished file
            self._forget()

    def _forget(self) -> None:
        self._process.stderr.close()
        self._process = None

    def _warn(self, why: str) -> None:
        self._failed = True
        self.context.log(f"warning: no report: {why}; python -m scripts.report {self.context.run_dir} writes one")
