"""The jobs of a sweep: their directories, and which of them failed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpo.numbers import count
from dpo.settings.command_line import parse_key
from dpo.system.redaction import redact

LONGEST_GROUP = 128  # characters of a group's name that W&B allows
LONGEST_NAME = 100  # characters; file systems allow 255, but W&B and other programs append some
FAILED = (1, 2)  # exit statuses of a job after which the sweep goes on; a stop signal ends it


@dataclass
class Job:
    """A job of a sweep: one run with its own overrides."""

    number: int
    overrides: list[str]

    @property
    def name(self) -> str:
        """A unique file name made of number and overrides, without secrets."""
        overrides = ",".join(redact(override).lstrip("+~") for override in self.overrides)
        text = re.sub(r"[^\w.=,+-]+", "_", overrides, flags=re.ASCII).strip("_")
        return f"{self.number}_{text}"[:LONGEST_NAME].rstrip("_.") if text else str(self.number)


class Sweep:
    """Jobs that this process runs one after the other."""

    def __init__(self) -> None:
        self.n_jobs = 0
        self.unfinished: list[str] = []  # names of jobs

    def run_job(self, config: Any, hydra_config: Any, run: Callable[[Any], None]) -> None:
        """Run a job in its own directory; go on after its failure."""
        name = place_job(config, hydra_config)
        self.n_jobs += 1
        self.unfinished.append(name)
        try:
            run(config)
        except SystemExit as error:
            if error.code not in FAILED:
                raise
        else:  # any other error is a bug, which Hydra prints when all jobs have run
            self.unfinished.remove(name)

    def end(self) -> None:
        """Exit with status 1 if a job has failed, and name it."""
        if self.unfinished:
            failed = f"{len(self.unfinished)} of {count(self.n_jobs, 'job')}"
            print(f"error: {failed} of the sweep failed: {', '.join(self.unfinished)}", file=sys.stderr)
            sys.exit(1)


def place_job(config: Any, hydra_config: Any) -> str:
    """Give a job a directory named after its swept overrides.

    If the command line has `local_run_dir`, the job's directory is inside that directory. If not, it is a new directory
    under `local_dirs`. Returns the job's name.
    """
    fixed_keys = set(hydra_config.job.config.override_dirname.exclude_keys)  # the same in all jobs
    overrides = list(hydra_config.overrides.task)
    job = Job(hydra_config.job.num, [override for override in overrides if parse_key(override) not in fixed_keys])
    has_run_dir = any(parse_key(override) == "local_run_dir" for override in overrides)
    separator = "/" if has_run_dir else "_"
    config.local_run_dir = f"{os.path.expanduser(config.local_run_dir)}{separator}{job.name}"
    folder = Path(config.local_run_dir).parent if has_run_dir else Path(hydra_config.sweep.dir)
    config.wandb.group = config.wandb.group or redact(folder.name)[-LONGEST_GROUP:]
    return job.name
