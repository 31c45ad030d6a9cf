"""The jobs of a sweep: their directories and a table of results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpo.numbers import count
from dpo.settings.choices import HELD_OUT_SCORE
from dpo.settings.command_line import parse_key
from dpo.system.redaction import redact
from dpo.system.run_directory import SWEEP

LONGEST_GROUP = 128  # characters of a group's name that W&B allows
LONGEST_NAME = 100  # characters; file systems allow 255, but W&B and other programs append some
# metrics that rank a job's evaluations, and whether max or min is best; the first that the job logged is used
RANKING = (
    (HELD_OUT_SCORE, max),
    ("rewards_eval/accuracies", max),
    ("rewards_eval/auc", max),
    ("loss/eval", min),
)
# metrics shown beside the accuracy, which is often 1 for several jobs if there are few test pairs
SHOWN_BESIDE = ("rewards_eval/margins", "loss/eval")


@dataclass
class Job:
    """A job of a sweep: one run with its own overrides."""

    number: int
    overrides: list[str]
    directory: Path | None = None
    is_finished: bool = False

    @property
    def name(self) -> str:
        """A unique file name made of number and overrides, without secrets."""
        text = re.sub(r"[^\w.=,+-]+", "_", ",".join(self.redacted_overrides), flags=re.ASCII).strip("_")
        return f"{self.number}_{text}"[:LONGEST_NAME].rstrip("_.") if text else str(self.number)

    @property
    def redacted_overrides(self) -> list[str]:
        return [redact(override).lstrip("+~") for override in self.overrides]

    def summarize(self) -> dict[str, Any]:
        """Make the job's entry in `sweep.json`, with its best evaluation.

        The evaluation before the first update does not count.
        """
        summary = {
            "job": self.number,
            "overrides": self.redacted_overrides,
            "finished": self.is_finished,
            "metric": None,
            "best": None,
            "metrics": {},
            "examples": None,
            "directory": str(self.directory),
        }
        evaluations = _read_evaluations(self.directory / "metrics.jsonl") if self.directory else []
        for metric, choose in RANKING:
            with_metric = [evaluation for evaluation in evaluations if evaluation.get(metric) is not None]
            if with_metric:
                best = choose(with_metric, key=lambda evaluation: evaluation[metric])
                shown = {name: best[name] for name in (metric, *SHOWN_BESIDE) if best.get(name) is not None}
                summary |= {"metric": metric, "best": best[metric], "metrics": shown, "examples": best["examples"]}
                break
        return summary


class Sweep:
    """Jobs that this process runs one after the other."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.folder = Path()  # of the sweep's own files

    def begin_job(self, config: Any, hydra_config: Any) -> None:
        """Give a job a directory named after its swept overrides.

        If the command line has `local_run_dir`, the job's directory is inside that directory. If not, it is a new
        directory under `local_dirs`.
        """
        fixed_keys = set(hydra_config.job.config.override_dirname.exclude_keys)  # the same in all jobs
        overrides = list(hydra_config.overrides.task)
        job = Job(hydra_config.job.num, [override for override in overrides if parse_key(override) not in fixed_keys])
        has_run_dir = any(parse_key(override) == "local_run_dir" for override in overrides)
        separator = "/" if has_run_dir else "_"
        config.local_run_dir = f"{os.path.expanduser(config.local_run_dir)}{separator}{job.name}"
        job.directory = Path(config.local_run_dir)
        folder = job.directory.parent if has_run_dir else Path(hydra_config.sweep.dir)
        config.wandb.group = config.wandb.group or redact(folder.name)[-LONGEST_GROUP:]
        if not config.dry_run:
            self.folder = folder
            self.jobs.append(job)

    def end_job(self) -> None:
        if self.jobs:  # a dry run has none
            self.jobs[-1].is_finished = True

    def report(self) -> None:
        """Print the table of results and write it to `sweep.json`.

        Jobs that another launcher of Hydra ran in other processes are not in the table.
        """
        if not self.jobs:
            return
        summaries = [job.summarize() for job in self.jobs]
        print(as_table(summaries))
        file = self.folder / SWEEP
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"warning: {file} cannot be written: {error}")
        else:
            print(f"this table is also in {file}")


def _read_evaluations(log: Path) -> list[dict[str, Any]]:
    """Read the evaluations of a run after its first update."""
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed job may leave part of a line
    return [entry for entry in entries if entry["split"] == "eval" and entry["examples"] > 0]


def as_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Format the summaries of jobs as a table, one row for each."""
    rows = [("job", "overrides", "best evaluation", "directory")]
    for summary in summaries:
        if summary["best"] is None:
            best = "none"
        else:
            values = ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
            best = f"{values} after {count(summary['examples'], 'example')}"
        ending = "" if summary["finished"] else " (not finished)"
        rows.append((str(summary["job"]), " ".join(summary["overrides"]), best, summary["directory"] + ending))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
