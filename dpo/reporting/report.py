"""Report of a run (`report=true`), written by a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dpo.reporting.events import Callback, Evaluation, RunContext, Sample
from dpo.system.run_directory import REPORT

ROOT = Path(__file__).resolve().parents[2]
LAST_SECS = 120  # longest time to wait for the last report


class ReportWriter(Callback):
    """Callback that runs `python -m dpo.analysis.page` in the background.

    Training neither waits for that process nor fails with it. There is one at a time: if it still runs at an
    evaluation, the next report includes that evaluation. Only a failure of the last report is logged.
    """

    _process: subprocess.Popen | None = None

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return super().is_wanted(context) and context.plan.run.report

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.samples_follow:
            self._begin()

    def on_samples(self, n_examples: int, samples: Sequence[Sample]) -> None:
        self._begin()

    def _begin(self, *options: str) -> None:
        """Begin to write a report, unless one is being written."""
        if self._process is None or self._process.poll() is not None:
            run_dir = self.context.run_dir.absolute()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dpo.analysis.page", str(run_dir), str((run_dir / REPORT).parent), *options],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches only the run, which then ends this process
            )

    def _finish(self, seconds: float) -> bool:
        """Wait for a report, at most so long, and return whether it was written."""
        is_written = False
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                is_written = self._process.wait(seconds) == 0
            self._process.kill()
            self._process.wait()
        return is_written

    def on_end(self) -> None:
        """Write the last report, and log its path."""
        self._finish(seconds=0)  # that report lacks the run's end
        self._begin("--ended")
        run_dir = self.context.run_dir
        failed = f"warning: the report was not written; python -m scripts.report {run_dir} writes it, or says why not"
        self.context.log(f"report: {run_dir / REPORT}" if self._finish(LAST_SECS) else failed)
