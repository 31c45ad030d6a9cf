"""A loss, a callback, a key, a metric and a command are added as CONTRIBUTING.md says."""

import csv
import importlib
import math
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from support.records import context_in, start
from support.runs import ROOT, read_metrics, run_python, small_run

from dpo.checkpoint.files import read_state
from dpo.reporting.events import Callback
from dpo.reporting.files import Appender
from dpo.reporting.table import CALLBACKS
from dpo.reporting.terminal import Progress

BLOCK = re.compile(r"```(python|yaml)\n(.*?)```", re.DOTALL)
FUNCTION, ROW, YAML = (textwrap.dedent(code) for _, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()))
CSV_CALLBACK = '''\
"""`losses.csv`: the loss of each update, and the norm of the weights after it."""


import torch

from dpo.parallel.sharding import full_tensor
from dpo.reporting.events import RunContext, Update
from dpo.reporting.files import Appender


class CsvWriter(Appender):
    files = ("losses.csv",)

    @classmethod
    def is_wanted(cls, context: RunContext) -> bool:
        return True

    def on_update(self, update: Update) -> None:
        norms = [full_tensor(weight.detach()).norm() for weight in self.context.policy.parameters()]
        norm = torch.stack(norms).norm().item()
        self.append("losses.csv", [f"{update.number},{update.metrics['loss/train']!r},{norm!r}"])
'''


def insert(file: Path, before: str, text: str) -> None:
    """Insert a text before another one, which occurs once."""
    content = file.read_text()
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before))


# For each file: the text before which something is inserted, and what.
KEY_METRIC_AND_ROW = {
    "settings/keys.py": ("    nan_policy: ", "    lr_unit: Positive\n"),
    "config/config.yaml": ("# factor of lr. none: ", "# what lr_in_units counts\nlr_unit: 1.0\n\n"),
    "trainers.py": ('            "lr": lr,\n', '            "lr_in_units": lr / self.plan.training.lr_unit,\n'),
    "commands/__init__.py": ('    "verify": ', '    "units": "the lr of each update, in units",\n'),
}
COMMAND = '''\
"""Print the lr of each update, in units."""

import json
from pathlib import Path

from dpo.commands import command, make_parser


@command
def main(arguments) -> None:
    parser = make_parser("units", __doc__)
    parser.add_argument("run", type=Path)
    lines = (parser.parse_args(arguments).run / "metrics.jsonl").read_text().splitlines()
    print(*[json.loads(line).get("lr_in_units") for line in lines])
'''


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "dpo", project / "dpo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "trainers.py", "preference_datasets.py", "utils.py"):
        shutil.copy(ROOT / name, project)
    return project


@pytest.fixture
def extended_project(project) -> Path:
    """A copy with the new loss and the new callback."""
    with (project / "dpo" / "losses" / "formulas.py").open("a") as formulas:
        formulas.write("\n\n" + FUNCTION)
    losses = project / "dpo" / "losses" / "__init__.py"
    insert(losses, '    "dpo": Loss(formulas.dpo, takes_offset=True),\n', ROW.removeprefix("LOSSES = {\n"))
    (project / "dpo" / "config" / "loss" / "cpo.yaml").write_text(YAML)
    (project / "dpo" / "reporting" / "csv_writer.py").write_text(CSV_CALLBACK)
    table = project / "dpo" / "reporting" / "table.py"
    insert(table, "from dpo.reporting.files", "from dpo.reporting.csv_writer import CsvWriter\n")
    insert(table, '    "files": FileLogger,\n', '    "csv": CsvWriter,\n')
    return project


@pytest.mark.slow
def test_a_loss_and_a_callback_that_are_added_train_and_resume(extended_project, rows, tmp_path):
    run_dir, other_dir = tmp_path / "run", tmp_path / "elsewhere"
    options = small_run(rows, run_dir, "loss=cpo", "loss.beta=2.0", "save_every=8")
    options = [option for option in options if "n_examples" not in option]
    other_options = [*(option for option in options if "local_run_dir" not in option), f"local_run_dir={other_dir}"]

    def train(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python("train.py", *arguments, cwd=extended_project)

    refused = train(*options, "n_examples=8", "loss.nll_weight=much")
    first = train(*options, "n_examples=12")
    shutil.rmtree(run_dir / "step-12")  # so that the run continues from its checkpoint after 2 updates
    second = train(*options, "n_examples=16", "resume=auto")
    third = train(*other_options, f"resume={run_dir}", "n_examples=20", "trainer=FSDPTrainer", "world_size=2")

    assert (refused.returncode, "loss.nll_weight=much must be a number" in refused.stderr) == (2, True)
    assert [run.returncode for run in (first, second, third)] == [0, 0, 0], first.stderr + second.stderr + third.stderr
    for folder, n_updates in ((run_dir, 4), (other_dir, 5)):
        updates = read_metrics(folder, "train")
        assert [line["updates"] for line in updates] == [*range(1, n_updates + 1)]
        for line in updates:
            # -log sigmoid is convex, so its mean is at least its value at the mean margin; the SFT term is added
            lower_bound = math.log1p(math.exp(-line["rewards_train/margins"])) - line["logps_train/chosen"]
            assert line["loss/train"] >= lower_bound - 1e-4
        with (folder / "losses.csv").open(newline="") as file:
            rows = [[float(value) for value in row] for row in csv.reader(file)]
        assert [row[:2] for row in rows] == [[line["updates"], line["loss/train"]] for line in updates]
        weights = read_state(folder / "LATEST" / "policy.pt").values()
        assert rows[-1][2] == pytest.approx(torch.stack([weight.norm() for weight in weights]).norm().item(), rel=1e-6)


def test_a_key_a_metric_and_a_command_that_are_added_work(project, rows, tmp_path):
    for file, (before, text) in KEY_METRIC_AND_ROW.items():
        insert(project / "dpo" / file, before, text)
    (project / "dpo" / "commands" / "units.py").write_text(COMMAND)
    options = small_run(rows, tmp_path / "run", "n_examples=8", "warmup_steps=0")

    refused = run_python("train.py", *options, "lr_unit=-1", cwd=project)
    trained = run_python("train.py", *options, "lr_unit=5e-4", cwd=project)
    printed = run_python("-m", "dpo", "units", str(tmp_path / "run"), cwd=project)

    assert refused.stderr == "bad configuration:\n  - lr_unit=-1 must be a number above 0\n"
    assert trained.returncode == 0, trained.stderr
    assert [line["lr_in_units"] for line in read_metrics(tmp_path / "run", "train")] == [2, 2]
    assert printed.stdout == "None 2.0 2.0 None\n"  # before and after the updates are evaluations


def test_every_callback_is_in_the_table():
    def list_kinds(kind: type[Callback]) -> set[type[Callback]]:
        return {kind}.union(*map(list_kinds, kind.__subclasses__()))

    for file in (ROOT / "dpo" / "reporting").glob("*.py"):
        importlib.import_module(f"dpo.reporting.{file.stem}")
    ours = {kind for kind in list_kinds(Callback) if kind.__module__.startswith("dpo.")}
    lacking = ours - {Callback, Appender, Progress, *CALLBACKS.values()}
    assert lacking == set(), f"CALLBACKS in dpo/reporting/table.py lacks {lacking}"


def test_an_appender_of_another_rank_leaves_the_files_to_rank_0(tmp_path):
    class Writer(Appender):
        files = ("rows.csv",)

    (tmp_path / "rows.csv").write_text("1\n2\n")
    writer = start(Writer(context_in(tmp_path, rank=1)), {"log_bytes": {"rows.csv": 2}})  # as a run that is resumed
    writer.append("rows.csv", ["3"])
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("rows.csv", "1\n2\n")]
