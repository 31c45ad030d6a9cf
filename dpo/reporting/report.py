"""The report at the end of a run, written in a process of its own."""

import subprocess

from dpo.errors import WarningLine, one_sentence
from dpo.reporting.events import Callback
from dpo.system.host import python_process_options
from dpo.system.run_directory import REPORT

LONGEST_SECS = 120  # the process that writes the report is killed after this time


class ReportWriter(Callback):
    """Runs `dpo report` at the end of a run. If that fails or hangs, the run only warns."""

    switch = "report"

    def on_end(self) -> None:
        try:
            subprocess.run(
                **python_process_options("-m", "dpo", "report", str(self.run_dir), OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                start_new_session=True,  # so that Ctrl-C reaches only the run
                timeout=LONGEST_SECS,
                check=True,
            )
        except OSError as error:  # the process could not start
            why = one_sentence(error)
        except subprocess.TimeoutExpired:
            why = "it took too long"
        except subprocess.CalledProcessError as error:
            last_line = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            why = last_line.removeprefix("error: ") or one_sentence(error)
        else:
            self.log(f"report: {self.run_dir / REPORT}")
            return
        self.log(WarningLine(f"the report was not written: {why}; try dpo report {self.run_dir}"))
