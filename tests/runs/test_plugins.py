"""The plugin of docs/plugins.md trains, on one process and several, and is part of what a resume checks."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pytests import refused, succeeded
from support.runs import ROOT, read_code, read_json, read_metrics, run_python, run_script, small_run, write_rows

from dpo import plugins
from dpo.plugins import run_plugins
from dpo.system.users_code import hash_code

PLUGIN = read_code(ROOT / "docs" / "plugins.md")
# Each weight is in a group of its own.
PLUGIN = PLUGIN.replace("super().__init__(params", "super().__init__([{'params': [weight]} for weight in params]")
EXITS = """\
import sys
import dpo.plugins
from dpo.reporting.events import Callback


class Exit(Callback):
    def on_update(self, update):
        sys.exit(0)


dpo.plugins.add_callback("exit", Exit)
"""
ALL = ("plugins=[my.py]", "loss=cpo", "loss.beta=2.0", "optimizer=Lion", "lr=1e-4")


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "my.py").write_text("from helper import *\n" + PLUGIN)
    (tmp_path / "helper.py").write_text("")
    votes = [
        {"question": f"Which is larger, {i} or {i + 1}?", "a": str(i), "b": str(i + 1), "votes_a": i % 3, "votes_b": 1}
        for i in range(60)
    ]
    write_rows(tmp_path / "votes.jsonl", votes)
    return tmp_path


def train(folder: Path, *overrides: str, run: Callable = run_script) -> subprocess.CompletedProcess[str]:
    options = [o for o in small_run(folder, folder / "run") if not o.startswith(("dataset", "lr=", "loss"))]
    return run(str(ROOT / "train.py"), *options, *overrides, cwd=folder)


def test_a_plugin_adds_a_loss_an_optimizer_a_callback_a_dataset_and_a_reader(folder):
    data = ("datasets=[sums,mine]", "dataset_sources.mine.path=votes.jsonl", "dataset_sources.mine.reader=votes")
    refused = train(folder, *ALL, *data, "loss.nll_weight=much", "loss.gamma=1")
    succeeded(train(folder, *ALL, *data))

    sentences = ["loss.gamma does not exist with loss=cpo", "loss.nll_weight=much must be a number"]
    assert (refused.returncode, sorted(refused.stderr.splitlines()[1:])) == (2, [f"  - {line}" for line in sentences])
    losses = [line["loss/train"] for line in read_metrics(folder / "run", "train")]
    logged = [line.split(",") for line in (folder / "run" / "losses.csv").read_text().splitlines()]
    assert [float(value) for _, value in logged] == losses
    counts = read_json(folder / "run" / "preflight.json")
    assert counts["train"]["examples"] + counts["test"]["examples"] == 50 + 40  # of 60 rows with votes 20 are ties


@pytest.mark.slow
def test_a_run_with_a_plugins_loss_is_exported_and_judged_without_the_plugin(folder):
    succeeded(train(folder, *ALL, "datasets=[sums]", "n_examples=8", "export=true"))
    assert (folder / "run" / "LATEST" / "hf" / "config.json").exists()
    (folder / "my.py").unlink()
    write_rows(folder / "asked.jsonl", [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}])
    judged = ["run", "--judge", "human", "--max-new-tokens", "4"]
    refused = run_python("-m", "dpo", "evaluate", *judged, cwd=folder, PYTHONPATH=str(ROOT))
    assert (refused.returncode, "or pass --prompts" in refused.stderr) == (2, True)
    for command in (["export", "run", "out"], ["evaluate", *judged, "--prompts", "asked.jsonl"], ["report", "run"]):
        succeeded(run_python("-m", "dpo", *command, cwd=folder, PYTHONPATH=str(ROOT)))


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_code(folder):
    sums = (*ALL, "datasets=[sums]")
    succeeded(train(folder, *sums, "n_examples=8", "trainer=FSDPTrainer", "world_size=2", run=run_python))
    (folder / "helper.py").write_text("changed = True")
    changed = train(folder, *sums, "n_examples=16", "resume=auto")
    (folder / "helper.py").write_text("")
    succeeded(train(folder, *sums, "n_examples=16", "resume=auto"))

    assert changed.returncode == 2
    assert "the code of plugins has changed since" in changed.stderr
    assert len((folder / "run" / "losses.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", r"my.py cannot be run: ZeroDivisionError: division by zero \(.*my.py, line 1\)"),
        ("import dpo.plugins as p\np.add_loss('dpo', p.LOSSES['dpo'].fn)", "loss 'dpo': this name is taken"),
        (
            "import dpo.plugins as p\np.add_optimizer('AdamW', object)",
            "the optimizers AdamW have names of built-in ones",
        ),
        ("import dpo.plugins as p\np.add_dataset('demo', list)", "the datasets demo have names of built-in ones"),
        (
            "import dpo.plugins as p\np.add_loss('mine', lambda scores, *, beta: 0)",
            "loss mine: its option beta must have a type",
        ),
    ],
)
def test_a_plugin_that_fails_is_refused_with_its_line(folder, code, reason):
    (folder / "my.py").write_text(code)
    result = train(folder, "plugins=[my.py]", "loss=sft", "datasets=[demo]")
    assert result.returncode == 2
    assert re.search(reason, result.stderr)


def test_a_dataset_that_fails_is_refused_with_its_name(folder):
    (folder / "my.py").write_text("import dpo.plugins as p\np.add_dataset('mine', lambda split: 1 / 0)")
    result = train(folder, "plugins=[my.py]", "loss=sft", "datasets=[mine]")
    assert result.returncode == 2
    assert re.search(r"dataset mine of a plugin: ZeroDivisionError: .* \(.*my.py, line 2\)", result.stderr)


def test_a_plugin_that_has_failed_runs_once_it_is_mended(tmp_path, monkeypatch):
    for table in ("READERS", "_digests"):
        monkeypatch.setattr(f"dpo.plugins.{table}", {})
    plugin = tmp_path / "mended.py"
    plugin.write_text("1 / 0")
    with refused("division by zero"):
        run_plugins([str(plugin)])
    plugin.write_text("import dpo.plugins\ndpo.plugins.add_reader('mended', dict)")
    run_plugins([str(plugin)])
    assert {"mended": dict} == plugins.READERS


def test_directories_beside_a_plugin_are_no_obstacle_and_a_fifo_is_refused(folder):
    for name in ("wandb", "mine"):
        (folder / name).mkdir()
    (folder / "helper").mkdir()  # beside helper.py
    (folder / "my.py").write_text("import wandb\nimport mine.part\nimport helper\n" + PLUGIN)
    digests = {hash_code(folder / "my.py")}
    for changed in ("mine/part.py", "helper.py"):
        (folder / changed).write_text("changed = True")
        digests.add(hash_code(folder / "my.py"))
    assert len(digests) == 3
    os.mkfifo(folder / "pipe.py")
    with refused("pipe.py is not a regular file"):
        run_plugins([str(folder / "pipe.py")])


def test_a_callback_that_exits_is_a_failure(folder):
    (folder / "my.py").write_text(EXITS)
    result = train(folder, "plugins=[my.py]", "loss=sft", "datasets=[demo]", "n_examples=4", "do_first_eval=false")
    assert result.returncode == 1
    assert "error: a plugin or other code of yours called sys.exit(0)" in result.stderr
