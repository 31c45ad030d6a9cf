"""Report of a run (`report=true`), written by a process beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dpo.reporting.events import Callback, Evaluation, RunContext
from dpo.system.run_directory import REPORT

ROOT = Path(__file__).resolve().parents[2]
LAST_SECS = 120  # the longest that the end of a run waits for its last report


class ReportWriter(Callback):
    """Runner of `python -m dpo.analysis` in the background.

    Training neither waits for it nor fails with it.

    One process at a time: if one is still running at an evaluation, the next report includes that evaluation. A failure
    is told at the end, where the last report would fail as well.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._process: subprocess.Popen | None = None
        self._failure = ""  # why there is no report

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.report

    def on_evaluation(self, evaluation: Evaluation) -> None:
        is_running = self._process is not None and self._process.poll() is None
        if not is_running:
            self._finish(LAST_SECS)
            self._begin()

    def on_end(self) -> None:
        """Write the last report, and log its path."""
        self._finish(0)  # a report that an evaluation began lacks the end: it is killed
        self._begin("--ended")
        self._finish(LAST_SECS)
        run_dir = self.context.run_dir
        if self._failure:
            self.context.log(f"warning: no report: {self._failure}; python -m scripts.report {run_dir} writes one")
        else:
            self.context.log(f"report: {run_dir / REPORT}")

    def _begin(self, *options: str) -> None:
        run_dir = self.context.run_dir.absolute()
        command = [sys.executable, "-m", "dpo.analysis", str(run_dir), str((run_dir / REPORT).parent), *options]
        self._failure = ""
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
            self._failure = str(error)

    def _finish(self, secs: float) -> None:
        """Wait for the process at most `secs`, then kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            _, errors = process.communicate(timeout=secs)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            for unfinished in (self.context.run_dir / REPORT).parent.glob(f".*.{process.pid}"):
                unfinished.unlink()
            self._failure = f"it took more than {secs} s"
            return
        if process.returncode:
            lines = [line for line in errors.decode("utf-8", "replace").split("\n") if line.strip()]
            self._failure = lines[-1][:300] if lines else f"exit status {process.returncode}"
