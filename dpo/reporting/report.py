"""The report at the end of a run."""

from dpo.errors import WarningLine, one_sentence
from dpo.reporting.events import Callback
from dpo.system.run_directory import REPORT


class ReportWriter(Callback):
    """Writes the report at the end of a run. If that fails, the run only warns."""

    switch = "report"

    def on_end(self) -> None:
        try:
            from dpo.analysis.page import write_report  # here, as no broken library may end the run

            self.log(f"report: {write_report([self.run_dir], self.run_dir / REPORT.parent)}")
        except Exception as error:  # no failure may end a run that has trained
            self.log(WarningLine(f"the report was not written: {one_sentence(error)}; try dpo report {self.run_dir}"))
