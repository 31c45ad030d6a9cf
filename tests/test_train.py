"""The command line: what it accepts and refuses, what a run leaves."""

import glob
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from support.runs import GOLDEN, ROOT, find_undocumented, read_metrics, read_rows, run_python, train, write_rows

from dpo.reporting.ledger import Ledger
from dpo.reporting.table import list_logs
from dpo.settings.keys import KEYS

SCRIPT = str(ROOT / "train.py")
SMALL = "eval_batch_size=4 n_eval_examples=4 n_eval_model_samples=4 max_length=48 max_prompt_length=32"
TINY = (f"model.name_or_path={GOLDEN / 'tiny-llama'}", "model.reference_dtype=float32", "exp_name=test", *SMALL.split())
DPO = ("loss=dpo", "loss.beta=0.1")


def write_pairs(folder: Path) -> Path:
    """Write 16 training pairs and 4 test pairs in HH's format."""
    prompts = [f"\n\nHuman: Where is the key number {i}?\n\nAssistant:" for i in range(20)]
    rows = [{"chosen": f"{p} On the desk.", "rejected": f"{p} Go away{'!' * (i % 4)}"} for i, p in enumerate(prompts)]
    write_rows(folder / "train.jsonl", rows[:16])
    write_rows(folder / "test.jsonl", rows[16:])
    return folder


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
def test_a_run_imports_only_what_it_uses(tmp_path):
    data, run = f"dataset_sources.hh={write_pairs(tmp_path)}", f"local_run_dir={tmp_path}/run"
    imported, _ = imported_by(*TINY, *DPO, data, run, "n_examples=4", "wandb.enabled=false")
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
        "  - model=pythia2 is not one of blank_model, ",
        "  - unknown key lrr: did you mean lr?",
        "  - exp_name is not set",
        "  - lr=-1 must be a number above 0",
        "  - optimizer=AdmW must be one of Adadelta, Adafactor",
        "  - loss.beta is not set",
    )
    for line, start in zip(result.stderr.splitlines(), starts, strict=True):
        assert line.startswith(start)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_used_is_one_message_and_status_2(tmp_path):
    with (write_pairs(tmp_path) / "train.jsonl").open("a") as file:
        file.write('{"chosen": "x"}\n')
    result = train(*TINY, f"dataset_sources.hh={tmp_path}", f"local_run_dir={tmp_path / 'run'}", "wandb.enabled=false")

    assert result.returncode == 2
    *_, message = result.stderr.splitlines()
    assert re.search(rf"^error: .*record 17 of {tmp_path}.*: rejected is missing", message)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- whole runs ----------------------------------------------------------------------------------------------------

OF_EVERY_RUN = {".lock", "config.yaml", "env.json", "preflight.json", "log.txt"}


def test_a_run_writes_all_it_promises_and_another_starts_from_it(tmp_path):
    demo = ("model=demo", "datasets=[demo]", *TINY[1:], "max_length=96", "max_prompt_length=88", "lr=1e-4")
    options = ("n_examples=16", "eval_every=8", "warmup_steps=0", "do_first_sampling=true")
    first = train(*demo, *DPO, *options, f"local_run_dir={tmp_path}/a")

    assert first.returncode == 0, first.stderr
    run = tmp_path / "a"
    *_, directory, verdict = first.stdout.splitlines()
    assert directory == f"run directory: {run}"
    assert verdict.startswith("The model changed: ")
    logs = {*list_logs()} - {*Ledger.files, *Ledger.derived}
    assert {p.name for p in run.iterdir()} == OF_EVERY_RUN | logs | {"step-8", "step-16", "LATEST", "BEST"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    own = {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}
    assert list(config["loss"].items())[:4] == list(own.items())
    assert config["model"]["name_or_path"] == str(ROOT / "dpo" / "demo_model")
    env = json.loads((run / "env.json").read_text())
    assert {"torch", "transformers"} <= env["packages"].keys()
    assert env["started"] <= env["ended"]
    assert json.loads((run / "preflight.json").read_text())["updates"] == 4
    assert "4 updates of 4 examples will run" in first.stdout
    assert [m["examples"] for m in read_metrics(run, "train")] == [4, 8, 12, 16]
    assert [m["examples"] for m in read_metrics(run, "eval")] == [0, 8, 16]
    assert find_undocumented(run) == set(), "docs/metrics.md lacks these metrics"
    samples = read_rows(run / "samples.jsonl")
    assert [s["examples"] for s in samples] == [0] * 4 + [8] * 4 + [16] * 4
    assert all(s["prompt"] and isinstance(s["policy"], str) and isinstance(s["reference"], str) for s in samples)
    assert os.readlink(run / "LATEST") == "step-16"
    assert os.readlink(run / "BEST") in ("step-8", "step-16")
    policy = torch.load(run / "LATEST" / "policy.pt", weights_only=True)

    start = (*DPO, "n_examples=4", "sample_during_eval=false", f"model.archive={run}", "lr=1e-30")
    second = train(*demo[:-1], *start, f"local_run_dir={tmp_path}/b")

    assert second.returncode == 0, second.stderr
    (before, after) = read_metrics(tmp_path / "b", "eval")
    # the policy starts where the first run ended, and so does its reference
    last = read_metrics(run, "eval")[-1]
    assert before["logps_eval/chosen"] == pytest.approx(last["logps_eval/chosen"], rel=1e-5)
    assert read_metrics(run, "eval")[0]["logps_eval/chosen"] != pytest.approx(last["logps_eval/chosen"], rel=1e-3)
    assert (before["rewards_eval/margins"], after["examples"]) == (0, 4)
    again = torch.load(tmp_path / "b" / "LATEST" / "policy.pt", weights_only=True)
    assert all(torch.allclose(again["state"][name], value) for name, value in policy["state"].items())


def test_debug_writes_no_checkpoints_and_no_wandb(tmp_path):
    data, run = f"dataset_sources.hh={write_pairs(tmp_path)}", tmp_path / "run"
    result = train(*TINY, data, f"local_run_dir={run}", "debug=true", "wandb.enabled=true", "n_examples=4")
    assert result.returncode == 0, result.stderr
    assert {p.name for p in run.iterdir()} - {*list_logs()} == OF_EVERY_RUN
    assert read_metrics(run, "train")
