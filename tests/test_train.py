"""The command line: what it accepts and refuses, what a run leaves."""

import glob
import re
import subprocess

import pytest
import torch
import yaml
from support.pytests import succeeded
from support.runs import ROOT, assert_documented, read_metrics, run_python, train

from dpo.checkpoint.files import read_state
from dpo.reporting.ledger import Ledger
from dpo.reporting.table import list_logs
from dpo.settings.keys import KEYS

SCRIPT = str(ROOT / "train.py")
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
def test_a_run_imports_only_what_it_uses(command):
    imported, _ = imported_by(*command("run", "n_examples=4"))
    assert "transformers.modeling_layers" in imported
    assert not {"datasets", "pandas", "bs4", "multiprocess", "wandb", "torchvision"} & imported


def test_help_shows_every_key_with_its_comment_without_torch():
    imported, result = imported_by("--help", "loss=dpo")

    assert_quick(imported)
    assert result.returncode == 0
    assert [key for key in KEYS if f"\n{key.rpartition('.')[2]}:" not in result.stdout.replace("\n  ", "\n")] == []
    assert "# conservative DPO: assumed fraction of flipped labels" in result.stdout


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
    starts = (
        "bad configuration:",
        "  - unknown key exp_nam: did you mean exp_name?",
        "  - model=pythia2 is unknown: did you mean pythia28?",
        "  - unknown key lrr: did you mean lr?",
        "  - optimizer=AdmW: did you mean AdamW? It must be one of Adadelta, Adafactor",
        "  - lr=-1 must be a number above 0",
        "  - exp_name is not set",
        "  - loss.beta is not set",
    )
    for line, start in zip(result.stderr.splitlines(), starts, strict=True):
        assert line.startswith(start)
    assert list(tmp_path.iterdir()) == []


# --- whole runs ----------------------------------------------------------------------------------------------------

OF_EVERY_RUN = {".lock", "config.yaml", "env.json", "preflight.json", "examples.jsonl", "log.txt", "warnings.jsonl"}


def test_a_run_writes_all_it_promises_and_another_starts_from_it(command, tmp_path):
    first = succeeded(train(*command("a", "n_examples=16", "sample_during_eval=true", "n_eval_model_samples=4")))

    run = tmp_path / "a"
    *_, directory, verdict = first.stdout.splitlines()
    assert directory == f"run directory: {run}"
    assert verdict.startswith("The model changed: ")
    logs = {*list_logs()} - {*Ledger.files, *Ledger.derived}
    assert {p.name for p in run.iterdir()} == OF_EVERY_RUN | logs | {"step-8", "step-16", "LATEST", "BEST"}
    assert_documented(run)

    succeeded(train(*command("b", "n_examples=4", f"model.archive={run}", "lr=1e-30")))

    # The policy starts where the first run ended, and so does its reference.
    (before, _) = read_metrics(tmp_path / "b", "eval")
    begin, *_, last = read_metrics(run, "eval")
    assert before["logps_eval/chosen"] == pytest.approx(last["logps_eval/chosen"], rel=1e-5)
    assert begin["logps_eval/chosen"] != pytest.approx(last["logps_eval/chosen"], rel=1e-3)
    assert before["rewards_eval/margins"] == 0
    trained, again = (read_state(tmp_path / name / "LATEST" / "policy.pt") for name in "ab")
    torch.testing.assert_close(again, trained)


def test_debug_writes_no_checkpoints_and_no_wandb(command, run_dir):
    succeeded(train(*command("run", "debug=true", "wandb.enabled=true", "n_examples=4")))
    assert {p.name for p in run_dir.iterdir()} - {*list_logs()} == OF_EVERY_RUN
    assert read_metrics(run_dir, "train")
