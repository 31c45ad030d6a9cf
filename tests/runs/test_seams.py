"""A loss and a callback are added as CONTRIBUTING.md says."""

from __future__ import annotations

import csv
import math
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from support.runs import ROOT, read_metrics, run_python, small_run

BLOCK = re.compile(r"```(python|yaml)\n(.*?)```", re.DOTALL)
FUNCTION, ROW, YAML = (
    textwrap.dedent(code) for _, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
)
CSV = '''\
"""`losses.csv`: the loss of each update."""

from __future__ import annotations

from dpo.reporting.events import Update
from dpo.reporting.files import LogWriter


class CsvWriter(LogWriter):
    files = ("losses.csv",)

    def on_update(self, update: Update) -> None:
        self.append("losses.csv", [f"{update.number},{update.metrics['loss/train']!r}"])
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
    with (project / "dpo" / "losses" / "formulas.py").open("a", encoding="utf-8") as formulas:
        formulas.write("\n\n" + FUNCTION)
    insert(
        project / "dpo" / "losses" / "__init__.py", '    "dpo": Loss(formulas.dpo),\n', ROW.removeprefix("LOSSES = {\n")
    )
    (project / "config" / "loss" / "cpo.yaml").write_text(YAML)
    (project / "dpo" / "reporting" / "csv_writer.py").write_text(CSV)
    table = project / "dpo" / "reporting" / "table.py"
    insert(table, "from dpo.reporting.files", "from dpo.reporting.csv_writer import CsvWriter\n")
    insert(table, '    "files": FileLogger,\n', '    "csv": CsvWriter,\n')
    return project


@pytest.mark.slow
def test_a_loss_is_a_function_a_row_and_a_file_and_a_watcher_a_class_and_a_row(copy, rows, tmp_path):
    run_dir = tmp_path / "run"
    asked = [o for o in small_run(rows, run_dir, "loss=cpo", "loss.beta=2.0", "save_every=8") if "n_examples" not in o]
    refused = run_python("train.py", *asked, "n_examples=8", "loss.nll_weight=much", cwd=copy)
    first = run_python("train.py", *asked, "n_examples=12", cwd=copy)
    shutil.rmtree(run_dir / "step-12")
    second = run_python("train.py", *asked, "n_examples=16", "resume=auto", cwd=copy)
    elsewhere = [f"local_run_dir={tmp_path / 'elsewhere'}", f"resume={run_dir}", "n_examples=20"]
    third = run_python("train.py", *(o for o in asked if "local_run_dir" not in o), *elsewhere, cwd=copy)

    assert (refused.returncode, refused.stderr) == (
        2,
        "bad configuration:\n  - loss.nll_weight=much must be a number\n",
    )
    assert [run.returncode for run in (first, second, third)] == [0, 0, 0], first.stderr + second.stderr + third.stderr
    for folder, n_updates in ((run_dir, 4), (tmp_path / "elsewhere", 5)):  # the first from the checkpoint after 2
        updates = read_metrics(folder, "train")
        assert [line["updates"] for line in updates] == [*range(1, n_updates + 1)]
        for line in updates:  # the loss is convex: its mean is at least that of the mean margin, and SFT comes on top
            of_margin = math.log1p(math.exp(-line["rewards_train/margins"]))
            assert line["loss/train"] >= of_margin - line["logps_train/chosen"] - 1e-4
        with (folder / "losses.csv").open(newline="") as file:
            found = [(int(number), float(loss)) for number, loss in csv.reader(file)]
        assert found == [(line["updates"], line["loss/train"]) for line in updates]
