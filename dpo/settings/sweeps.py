"""Jobs of a sweep: names of their directories, a table of results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpo.numbers import count
from dpo.settings.command_line import parse_key
from dpo.system.redaction import redact
from dpo.system.run_directory import SWEEP

LONGEST_GROUP = 128  # characters that W&B allows
LONGEST_NAME = 100  # characters; file systems allow 255, but W&B and others append some
QUALITIES = (("rewards_eval/accuracies", max), ("loss/eval", min))  # the first one that was measured counts
BESIDE = ("rewards_eval/margins", "loss/eval")  # of the same evaluation: few test pairs are often all ranked right


@dataclass
class Job:
    number: int
    overrides: list[str]
    directory: Path | None = None
    is_finished: bool = False

    @property
    def name(self) -> str:
        """A unique file name from number and overrides, without secrets."""
        text = re.sub(r"[^\w.=,+-]+", "_", ",".join(self.shown), flags=re.ASCII).strip("_")
        return f"{self.number}_{text}"[:LONGEST_NAME].rstrip("_.") if text else str(self.number)

    @property
    def shown(self) -> list[str]:
        return [redact(override).lstrip("+~") for override in self.overrides]

    def summarize(self) -> dict[str, Any]:
        """Its entry in `sweep.json`, with its best evaluation after an update."""
        summary = {
            "job": self.number,
            "overrides": self.shown,
            "finished": self.is_finished,
            "metric": None,
            "best": None,
            "metrics": {},
            "examples": None,
            "directory": str(self.directory),
        }
        lines = _read_evaluations(self.directory / "metrics.jsonl") if self.directory else []
        for metric, better in QUALITIES:
            if measured := [line for line in lines if line.get(metric) is not None]:
                best = better(measured, key=lambda line: line[metric])
                shown = {name: best[name] for name in (metric, *BESIDE) if best.get(name) is not None}
                summary |= {"metric": metric, "best": best[metric], "metrics": shown, "examples": best["examples"]}
                break
        return summary


class Sweep:
    """Jobs that this process runs one after the other."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.folder = Path()  # of the sweep's own files

    def begin_job(self, config: Any, hydra_config: Any) -> None:
        """Give a job a directory named after its overrides.

        It is inside the directory given for the sweep, or, without one, a new one under `local_dirs`.
        """
        constant = set(hydra_config.job.config.override_dirname.exclude_keys)
        overrides = {override: parse_key(override) for override in hydra_config.overrides.task}
        job = Job(hydra_config.job.num, [override for override, key in overrides.items() if key not in constant])
        is_given = "local_run_dir" in overrides.values()
        config.local_run_dir = f"{os.path.expanduser(config.local_run_dir)}{'/' if is_given else '_'}{job.name}"
        job.directory = Path(config.local_run_dir)
        folder = job.directory.parent if is_given else Path(hydra_config.sweep.dir)
        config.wandb.group = config.wandb.group or redact(folder.name)[-LONGEST_GROUP:]
        if not config.dry_run:
            self.folder = folder
            self.jobs.append(job)

    def end_job(self) -> None:
        if self.jobs:  # a dry run has none
            self.jobs[-1].is_finished = True

    def report(self) -> None:
        """Print the table and write `sweep.json`, however the sweep ended.

        Jobs that ran elsewhere, under another launcher of Hydra, are not in it.
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
            print(f"the same in {file}")


def _read_evaluations(log: Path) -> list[dict[str, Any]]:
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed job may leave part of a line
    return [entry for entry in entries if entry["split"] == "eval" and entry["examples"] > 0]


def as_table(summaries: Sequence[dict[str, Any]]) -> str:
    rows = [("job", "overrides", "best evaluation", "directory")]
    for summary in summaries:
        best = "none"
        if summary["best"] is not None:
            values = ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
            best = f"{values} after {count(summary['examples'], 'example')}"
        ending = "" if summary["finished"] else " (not finished)"
        rows.append((str(summary["job"]), " ".join(summary["overrides"]), best, summary["directory"] + ending))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
