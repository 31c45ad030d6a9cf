"""The command line: options, overrides, nothing that names code, and the jobs of a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from support.runs import train
from support.trainers import compose as compose_run

import train as train_script
from dpo.errors import InputError
from dpo.settings import plan
from dpo.settings.command_line import LONGEST_NAME, check_command_line, check_line, parse, place_job
from dpo.settings.files import fill
from dpo.settings.plan import resolve
from trainers import BasicTrainer


def problems_of(*arguments: str) -> list[str]:
    return check_line(parse(["exp_name=x", "model.name_or_path=gpt2", *arguments]))[1]


@pytest.mark.parametrize("option", ["--multi", "--config-path=/tmp", "--config-name=x", "-cn", "--run"])
def test_abbreviated_and_refused_options_are_one_sentence(option):
    with pytest.raises(InputError, match=f"^{option.split('=')[0]} is not an option here"):
        parse([option, "exp_name=x"])


def test_options_come_first_and_keep_their_values(tmp_path):
    (own := tmp_path / "it's mine").mkdir()
    line = parse(["loss=sft", "--cfg", "job", "dataset_sources.mine=/data", f"--config-dir={own}"])
    overrides = ["loss=sft", "++dataset_sources.mine=/data", f"hydra.searchpath=['file://{tmp_path}/it\\'s mine']"]
    assert line.arguments == ["--cfg", "job", *overrides]
    assert not line.is_sweep


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "dataset_sources.my_token=s3cr3t-value"],
        ["wandb.api_key='s3cr3t-value"],
        ["-m", "dataset_sources.m='https://user:s3cr3t-value@host/x'"],
        ["wandb.api_key", "=", "s3cr3t-value"],
        ["+wandb={api_key: s3cr3t-value"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_where_it_would_be_written_and_never_printed(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        check_command_line([*arguments, "exp_name=x"])
    assert ending.value.code == 2
    assert "s3cr3t" not in "".join(capsys.readouterr())


def write(directory: Path, content: str) -> Path:
    (directory / "experiment").mkdir(exist_ok=True)
    (directory / "experiment" / "mine.yaml").write_text(content)
    return directory


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("hydra:\n  callbacks:\n    c:\n      _target_: os.mkdir\n", "hydra.callbacks.c._target_"),
        ("hydra:\n  callbacks:\n    c:\n      - '${oc.create:\"{_target_: os.mkdir}\"}'\n", "hydra.callbacks.c"),
        ("hydra:\n  sweeper:\n    params:\n      +more: evil\n", "hydra.sweeper.params.+more"),
        ("hydra:\n  job:\n    env_set:\n      PATH: /evil\n", "hydra.job.env_set.PATH"),
        (
            "defaults:\n  - /more: e${oc.env:NOBODY,vil}\n",
            "hydra.callbacks.c._target_",
        ),  # chosen in a way that no text shows
        ("online:\n  function: evil.py:f\n", "online.function"),
        ("model:\n  trust_remote_code: true\n", "model.trust_remote_code"),
    ],
)
def test_own_config_files_cannot_name_code(content, key, tmp_path):
    own = write(tmp_path, f"# @package _global_\n{content}")
    (tmp_path / "experiment" / "x.yaml").write_text("{}\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "evil.yaml").write_text("# @package hydra.callbacks.c\n_target_: os.mkdir\n")
    for choice in (["experiment=mine"], ["-m", "+experiment@_global_=x,mine"]):
        found = "\n".join(problems_of("-cd", str(own), *choice))
        assert f"--config-dir: {key}" in found
        assert "may not be set in a config file, as it can name code to run" in found
    assert problems_of("-cd", str(own)) == []  # it is not chosen


def test_code_that_the_command_line_names_is_run_beside_own_config_files(tmp_path):
    own = write(tmp_path, "# @package _global_\ndefaults:\n  - override /online: online\nonline:\n  scorer: function\n")
    (tmp_path / "rewards.py").touch()
    line = ("-cd", str(own), "+experiment=mine", "exp_name=x", "loss=dpo", "loss.beta=0.1", "model=pythia28")
    line = (*line, f"online.function={tmp_path / 'rewards.py'}:f", "model.trust_remote_code=true")
    assert problems_of(*line) == []


@pytest.mark.parametrize("way", ["command line", "reference's constructor"])
def test_a_process_makes_its_plan_once_and_hands_it_on(way, command, tiny_llama, tmp_path, monkeypatch):
    resolved, config = [], compose_run(tmp_path, "run", "n_examples=4", "loss=sft")
    # `resolve` calls this, whoever imported it
    monkeypatch.setattr(plan, "fill", lambda given: resolved.append(given) or fill(given))
    if way == "command line":
        train_script.run(check_command_line(command("run", "n_examples=4", "loss=sft"))[1])
        train_script.RUN_LOG.close()
    else:
        BasicTrainer(tiny_llama, config, config.seed, config.local_run_dir).train()
    assert len(resolved) == 1


# --- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("++loss.beta=0.1,++seed=3", "2_loss.beta=0.1,seed=3"),
        ("", "2"),
        ("++dataset_sources.mine=/data/../x y", "2_dataset_sources.mine=_data_.._x_y"),
        ("++exp_name='$(touch x);`y`'", "2_exp_name=_touch_x_y"),
        ("++lr=1e+30", "2_lr=1e+30"),
    ],
)
def test_a_jobs_directory_is_named_after_its_overrides_in_characters_of_any_file_system(overrides, name):
    job = {"job": {"num": 2, "override_dirname": overrides}, "sweep": {"dir": "elsewhere"}}
    placed = place_job(resolve(OmegaConf.create({"local_run_dir": "runs"})), OmegaConf.create(job))
    assert Path(placed.run.local_run_dir) == Path("runs") / name
    job["job"]["override_dirname"] = "x" * 500
    placed = place_job(resolve(OmegaConf.create({"local_run_dir": "runs"})), OmegaConf.create(job))
    assert len(Path(placed.run.local_run_dir).name) == LONGEST_NAME


def test_hydra_is_told_which_keys_are_the_same_in_all_jobs():
    line = parse(["-m", "loss=dpo", "loss.beta=0.1,0.5", "seed=range(0,3)", "dataset_sources.mine=/a"])
    told = line.arguments[-1]
    assert told == "hydra.job.config.override_dirname.exclude_keys=['loss','dataset_sources.mine']"


def test_all_jobs_are_checked_before_the_first_starts():
    assert problems_of("-m", "loss=dpo,ipo", "loss.beta=0.1", "lr=1e-2,nan,-1") == [
        "lr=nan must be a number above 0",
        "lr=-1 must be a number above 0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("has_run_dir", [True, False])
def test_a_failed_job_costs_no_other_one(has_run_dir, command, tmp_path):
    rates = ("optimizer=SGD", "warmup_steps=0", "max_grad_norm=1e30", "lr=1e+30,0.001")  # the first ends on NaN
    settings = command("sweep", "n_examples=8", "seed=0", *rates, f"hydra.sweep.dir={tmp_path}/hydra")
    if not has_run_dir:
        settings = [o for o in settings if not o.startswith("local_run_dir=")]
    result = train("-m", *settings, LOGNAME="somebody")

    assert result.returncode == 1
    assert "this job failed for the reason above" in result.stderr
    runs = sorted((tmp_path / "sweep").iterdir() if has_run_dir else (tmp_path / "somebody").glob("test*"))
    names = [re.sub(r"^test_\d{4}-.*\d{6}_", "", run.name) for run in runs]
    assert names == ["0_lr=1e+30", "1_lr=0.001"]
    assert [(run / "LATEST").exists() for run in runs] == [False, True]
    assert yaml.safe_load((runs[1] / "config.yaml").read_text())["local_run_dir"] == str(runs[1])
