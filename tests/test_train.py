"""The command line: what it accepts and refuses, what a run leaves.

`train` and `run_python` are subprocesses; `main` is the same script in this process, for what does not need its own.
"""

from __future__ import annotations

import glob
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from support.runs import GOLDEN, ROOT, read_metrics, run_python, train, write_rows

from dpo.settings.command_line import help_text
from dpo.system.signals import SIGNALS

SCRIPT = str(ROOT / "train.py")
TINY = (
    f"model.name_or_path={GOLDEN / 'tiny-llama'}",
    "model.reference_dtype=float32",
    "exp_name=test",
    "eval_batch_size=4",
    "n_eval_examples=4",
    "n_eval_model_samples=4",
    "max_length=48",
    "max_prompt_length=32",
)
DPO = ("loss=dpo", "loss.beta=0.1")


def hh_rows(n: int) -> list[dict[str, str]]:
    prompts = [f"\n\nHuman: Where is the key number {i}?\n\nAssistant:" for i in range(n)]
    return [{"chosen": f"{p} On the desk.", "rejected": f"{p} Go away{'!' * (i % 4)}"} for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """16 training pairs and 4 test pairs in HH's format."""
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "train.jsonl", hh_rows(20)[:16])
    write_rows(folder / "test.jsonl", hh_rows(20)[16:])
    return folder


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def main(monkeypatch, capsys):
    """`python train.py OVERRIDES` in this process, on the tiny Llama, W&B off."""

    def call(*overrides: str, tiny: tuple[str, ...] = TINY) -> Result:
        options = [o for o in overrides if o == "-m"]  # Hydra wants them first
        rest = [o for o in overrides if o != "-m"]
        monkeypatch.setattr(sys, "argv", [SCRIPT, *options, *tiny, "wandb.enabled=false", *rest])
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        capsys.readouterr()
        status, handlers = 0, {number: signal.getsignal(number) for number in SIGNALS}
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture
def trained(main, data, tmp_path):
    """The directory and the output of a finished run on `data`."""

    def call(*overrides: str, run: str = "run") -> tuple[Path, str]:
        silent = ("sample_during_eval=false", "self_test=false", "do_first_eval=false")
        result = main(f"dataset_sources.hh={data}", f"local_run_dir={tmp_path / run}", *silent, *overrides)
        assert result.returncode == 0, result.stderr
        return tmp_path / run, result.stdout

    return call


# --- without training ----------------------------------------------------------------------------------------------


def imported_by(*arguments: str, **environment: str) -> tuple[set[str], subprocess.CompletedProcess]:
    """The modules that a command imports, and its result."""
    result = run_python("-X", "importtime", SCRIPT, *arguments, **environment)
    return set(re.findall(r"\| +(\S+)$", result.stderr, flags=re.MULTILINE)), result


def assert_quick(imported: set[str]) -> None:
    if not glob.glob("/dev/nvidia*"):  # torch counts the GPUs
        assert "hydra" in imported
        assert not {"torch", "numpy", "transformers", "datasets", "wandb"} & imported


@pytest.mark.slow
def test_a_run_imports_only_what_it_uses(data, tmp_path):
    imported, _ = imported_by(
        *TINY,
        *DPO,
        f"dataset_sources.hh={data}",
        "n_examples=4",
        "wandb.enabled=false",
        f"local_run_dir={tmp_path}/run",
    )
    assert "transformers.modeling_layers" in imported
    assert not {"datasets", "pandas", "bs4", "multiprocess", "wandb", "torchvision"} & imported


def test_help_shows_every_key_with_its_comment_without_torch():
    imported, result = imported_by("--help", "loss=dpo")

    assert_quick(imported)
    assert (result.returncode, result.stdout) == (0, f"{help_text()}\n")
    assert (ROOT / "config" / "config.yaml").read_text().split("\ndefaults:")[0] in result.stdout


def test_the_composed_config_can_be_shown_before_it_is_complete():
    imported, result = imported_by("--cfg", "job", "loss=ipo", "lr=1e-6")

    assert_quick(imported)
    shown = yaml.safe_load(result.stdout)
    assert list(shown["loss"].items())[:2] == [("name", "ipo"), ("beta", "???")]
    assert (float(shown["lr"]), shown["exp_name"]) == (1e-6, "???")


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_bad_command_line_gets_every_problem_at_once_and_status_2(tmp_path):
    problems = ("exp_nam=x", "model=pythia2", "lrr=1", "optimizer=AdmW", "loss=dpo", "lr=-1")
    result = train(*problems, cwd=tmp_path)

    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "bad configuration:"
    for line, start in zip(
        lines[1:],
        [
            "unknown key exp_nam: did you mean exp_name?",
            "model=pythia2 is not one of blank_model, ",
            "unknown key lrr: did you mean lr?",
            "exp_name is not set",
            "lr=-1 must be a number above 0",
            "optimizer=AdmW must be one of Adadelta, Adafactor",
            "loss.beta is not set",
        ],
        strict=True,
    ):
        assert line.startswith(f"  - {start}")
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_used_is_one_message_and_status_2(main, tmp_path):
    write_rows(tmp_path / "data" / "train.jsonl", [*hh_rows(8), {"chosen": "x"}])
    write_rows(tmp_path / "data" / "test.jsonl", hh_rows(8))

    result = main(f"dataset_sources.hh={tmp_path / 'data'}", f"local_run_dir={tmp_path / 'run'}")

    assert result.returncode == 2
    (message,) = result.stderr.splitlines()
    place = rf"record 9 of {tmp_path}/data/train\.jsonl \(line 9\): rejected is missing"
    assert re.search(f"^error: .*{place}", message)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- whole runs ----------------------------------------------------------------------------------------------------


def test_a_run_writes_all_it_promises_and_another_starts_from_it(main, tmp_path):
    demo = ("model=demo", "datasets=[demo]", *TINY[1:], "max_length=96", "max_prompt_length=88", "lr=1e-4")
    options = ("n_examples=16", "eval_every=8", "warmup_steps=0", "do_first_sampling=true")
    first = train(*demo, *DPO, *options, f"local_run_dir={tmp_path}/a")

    assert first.returncode == 0, first.stderr
    run = tmp_path / "a"
    *_, directory, verdict = first.stdout.splitlines()
    assert directory == f"run directory: {run}"
    assert verdict.startswith("The model changed: ")
    files = {".lock", "config.yaml", "env.json", "preflight.json", "log.txt"}
    files |= {"metrics.jsonl", "samples.jsonl", "samples.txt", "answers.jsonl"}
    assert {p.name for p in run.iterdir()} == files | {"step-8", "step-16", "LATEST", "BEST"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    own = {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}
    assert list(config["loss"].items())[:4] == list(own.items())
    assert config["model"]["name_or_path"] == str(ROOT / "demo")
    env = json.loads((run / "env.json").read_text())
    assert {"torch", "transformers"} <= env["packages"].keys()
    assert env["started"] <= env["ended"]
    assert json.loads((run / "preflight.json").read_text())["updates"] == 4
    assert "4 updates of 4 examples will run" in first.stdout
    assert [m["examples"] for m in read_metrics(run, "train")] == [4, 8, 12, 16]
    assert [m["examples"] for m in read_metrics(run, "eval")] == [0, 8, 16]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [s["examples"] for s in samples] == [0] * 4 + [8] * 4 + [16] * 4
    assert all(s["prompt"] and isinstance(s["policy"], str) and isinstance(s["reference"], str) for s in samples)
    assert os.readlink(run / "LATEST") == "step-16"
    assert os.readlink(run / "BEST") in ("step-8", "step-16")
    policy = torch.load(run / "LATEST" / "policy.pt", weights_only=True)

    second = main(
        *demo[:2], *demo[3:], "n_examples=4", "sample_during_eval=false", f"model.archive={run}",
        "loss=dpo", "loss.beta=0.1", "lr=1e-30", f"local_run_dir={tmp_path}/b", tiny=("model.reference_dtype=float32",),
    )  # fmt: skip

    assert second.returncode == 0, second.stderr
    (before, after) = read_metrics(tmp_path / "b", "eval")
    # the policy starts where the first run ended, and so does its reference
    last = read_metrics(run, "eval")[-1]
    assert before["logps_eval/chosen"] == pytest.approx(last["logps_eval/chosen"], rel=1e-5)
    assert read_metrics(run, "eval")[0]["logps_eval/chosen"] != pytest.approx(last["logps_eval/chosen"], rel=1e-3)
    assert (before["rewards_eval/margins"], after["examples"]) == (0, 4)
    again = torch.load(tmp_path / "b" / "LATEST" / "policy.pt", weights_only=True)
    assert all(torch.allclose(again["state"][name], value) for name, value in policy["state"].items())


# --- keys and what they do -----------------------------------------------------------------------------------------


def test_debug_writes_no_checkpoints_and_no_wandb(trained):
    run, _ = trained("debug=true", "wandb.enabled=true", "n_examples=4")
    files = {".lock", "config.yaml", "env.json", "preflight.json", "metrics.jsonl", "log.txt"}
    assert {p.name for p in run.iterdir()} == files
