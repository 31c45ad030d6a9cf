"""Report of a run (`report=true`), written by a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dpo.reporting.events import Callback, Evaluation, RunContext, Sample
from dpo.system.run_directory import REPORT

ROOT = Path(__file__).resolve().parents[2]
LAST_SECS = 120  # longest time to wait for a report


class ReportWriter(Callback):
    """Callback that runs `python -m dpo.analysis` in the background.

    Training neither waits for that process nor fails with it. There is one at a time: if it still runs at an
    evaluation, the next report includes that evaluation. Only a failure of the last report is logged.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._process: subprocess.Popen | None = None
        self._failure = ""  # why there is no report

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.logging.report

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.samples_follow:
            self._update()

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        self._update()

    def _update(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._finish(LAST_SECS)
            self._begin()

    def on_end(self) -> None:
        """Write the last report, and log its path."""
        self._finish(0)  # kills a report that was started at an evaluation, as that report lacks the run's end
        self._begin("--ended")
        self._finish(LAST_SECS)
        run_dir = self.context.run_dir
        failure = f"warning: the report was not written: {self._failure}; to write it, run python -m scripts.report"
        self.context.log(f"{failure} {run_dir}" if self._failure else f"report: {run_dir / REPORT}")

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
                start_new_session=True,  # so that Ctrl-C reaches only the run, which then ends this process
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
            for unfinished in (self.context.run_dir / REPORT).parent.glob(f".*.dpo.*.{process.pid}.tmp"):
                unfinished.unlink()
            self._failure = f"it took more than {secs} s"
            return
        if process.returncode:
            lines = [line for line in errors.decode("utf-8", "replace").split("\n") if line.strip()]
            # the last line of a traceback is its message
            self._failure = lines[-1][:300] if lines else f"exit status {process.returncode}"
