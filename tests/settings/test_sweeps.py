"""A sweep's jobs: names of their directories, and what a failed one costs."""

from __future__ import annotations

import re

import pytest
import yaml
from support.runs import train

from dpo.settings.command_line import parse
from dpo.settings.sweeps import LONGEST_NAME, Job


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["loss.beta=0.1", "seed=3"], "2_loss.beta=0.1,seed=3"),
        ([], "2"),
        (["datasets=[hh,shp]"], "2_datasets=_hh,shp"),
        (["++dataset_sources.mine=/data/../x y"], "2_dataset_sources.mine=_data_.._x_y"),
        (["model.name_or_path=é/ü"], "2_model.name_or_path="),
        (["exp_name='$(touch x);`y`'"], "2_exp_name=_touch_x_y"),
        (["wandb.api_key=s3cr3t"], "2_wandb.api_key=REDACTED"),
        (["a=https://me:pass@host/x"], "2_a=https_REDACTED_host_x"),
    ],
)
def test_a_name_has_the_varied_overrides_in_characters_of_any_file_system(overrides, name):
    assert Job(2, overrides).name == name
    assert re.fullmatch(r"[\w.=,+-]+", Job(2, overrides).name, re.ASCII)


def test_no_secret_of_the_environment_is_in_a_name_not_even_cut_off(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    assert Job(0, ["exp_name=tok-0123456789"]).name == "0_exp_name=REDACTED"
    long = Job(0, ["exp_name=" + "x" * 85 + "tok-0123456789"]).name
    assert "tok" not in long


def test_names_are_short_and_different():
    names = {Job(number, ["exp_name=" + "x" * 500]).name for number in range(12)}
    assert len(names) == 12
    assert max(map(len, names)) == LONGEST_NAME


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_writes_nothing(command, tmp_path):
    result = train("-m", *command("sweep", "seed=0,1", "dry_run=true", f"hydra.sweep.dir={tmp_path}/hydra"))
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "sweep").exists()


def test_jobs_get_the_keys_that_do_not_vary():
    line = parse(["-m", "loss=dpo", "loss.beta=0.1,0.5", "seed=range(0,3)", "dataset_sources.mine=/a", "~lr"])
    told = line.arguments[-1]
    assert told == "hydra.job.config.override_dirname.exclude_keys=['loss','dataset_sources.mine','lr']"
    assert not any("exclude_keys" in argument for argument in parse(["loss=dpo", "seed=1"]).arguments)


@pytest.mark.slow
@pytest.mark.parametrize("has_run_dir", [True, False])
def test_a_failed_job_costs_no_other_one_and_is_named_in_the_last_line(has_run_dir, command, tmp_path):
    rates = ("optimizer=SGD", "warmup_steps=0", "max_grad_norm=1e30", "lr=1e+30,0.001")  # the first ends on NaN
    settings = command("sweep", "n_examples=8", "seed=0", *rates, f"hydra.sweep.dir={tmp_path}/hydra")
    if not has_run_dir:
        settings = [o for o in settings if not o.startswith("local_run_dir=")]
    result = train("-m", *settings, LOGNAME="somebody")

    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: 1 of 2 jobs of the sweep failed: 0_lr=1e+30"
    runs = sorted((tmp_path / "sweep").iterdir() if has_run_dir else (tmp_path / "somebody").glob("test*"))
    names = [re.sub(r"^test_\d{4}-.*\d{6}_", "", run.name) for run in runs]
    assert names == ["0_lr=1e+30", "1_lr=0.001"]
    assert [(run / "LATEST").exists() for run in runs] == [False, True]
    assert yaml.safe_load((runs[1] / "config.yaml").read_text())["local_run_dir"] == str(runs[1])


def test_all_jobs_are_checked_before_the_first_starts(command, tmp_path):
    result = train("-m", *command("sweep", "lr=1e-2,nan", f"hydra.sweep.dir={tmp_path}/hydra"))
    assert result.returncode == 2
    assert "lr=nan" in result.stderr
    assert not (tmp_path / "sweep").exists()
