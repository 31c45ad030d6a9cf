"""A loss and a callback are added to a copy of the project as CONTRIBUTING.md says, and no other line changes."""

from __future__ import annotations

import csv
import math
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from support.runs import ROOT, metrics_of, run_python, small_run

BLOCK = re.compile(r"```(python|yaml)\n(.*?)```", re.DOTALL)
FUNCTION, ROW, YAML = (
    textwrap.dedent(code) for _, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
)
CSV = '''\
"""`losses.csv`: the loss of each update."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any

from dpo.reporting.events import Callback, Update


class CsvWriter(Callback):
    """One line per update; what was written after the checkpoint of a resumed run is written again."""

    def on_start(self) -> None:
        self.file = (self.context.run_dir / "losses.csv").open("a", newline="")
        os.truncate(self.file.fileno(), getattr(self, "size", 0))

    def on_update(self, update: Update) -> None:
        csv.writer(self.file).writerow([update.number, update.metrics["loss/train"]])
        self.file.flush()

    def on_end(self) -> None:
        self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"size": os.fstat(self.file.fileno()).st_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = state["size"]
'''


def insert(file: Path, before: str, text: str) -> None:
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before), encoding="utf-8")


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project with both."""
    project = tmp_path / "project"
    for name in ("dpo", "config"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "trainers.py", "preference_datasets.py", "utils.py"):
        shutil.copy(ROOT / name, project)
    insert(project / "dpo" / "losses.py", "LOSSES = {\n", FUNCTION + "\n\n")
    insert(project / "dpo" / "losses.py", '    "dpo": Loss(_dpo),\n', ROW.removeprefix("LOSSES = {\n"))
    (project / "config" / "loss" / "simpo.yaml").write_text(YAML)
    (project / "dpo" / "reporting" / "csv_writer.py").write_text(CSV)
    table = project / "dpo" / "reporting" / "table.py"
    insert(table, "from dpo.reporting.files", "from dpo.reporting.csv_writer import CsvWriter\n")
    insert(table, '    "files": FileLogger,\n', '    "csv": CsvWriter,\n')
    return project


def test_a_loss_is_a_function_a_row_and_a_file_and_a_watcher_a_class_and_a_row(copy, rows, tmp_path):
    run_dir = tmp_path / "run"
    asked = [
        o for o in small_run(rows, run_dir, "loss=simpo", "loss.beta=2.0", "save_every=8") if "n_examples" not in o
    ]
    refused = run_python("train.py", *asked, "n_examples=8", "loss.gamma=much", cwd=copy)
    first = run_python("train.py", *asked, "n_examples=12", cwd=copy)
    shutil.rmtree(run_dir / "step-12")
    second = run_python("train.py", *asked, "n_examples=16", "resume=auto", cwd=copy)

    assert (refused.returncode, refused.stderr) == (2, "bad configuration:\n  - loss.gamma=much must be a number\n")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    updates = metrics_of(run_dir, "train")
    assert [line["updates"] for line in updates] == [1, 2, 3, 4]  # from the checkpoint after 8 examples
    for line in updates:  # the loss of a pair is at least that of the mean margin: it is convex
        assert line["loss/train"] >= math.log1p(math.exp(1.0 - line["rewards_train/margins"])) - 1e-6
    with (run_dir / "losses.csv").open(newline="") as file:
        assert [(int(n), float(loss)) for n, loss in csv.reader(file)] == [
            (line["updates"], line["loss/train"]) for line in updates
        ]
