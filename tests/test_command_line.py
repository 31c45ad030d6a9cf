"""What of a command line reaches Hydra: known options, overrides that it can apply, and nothing that names code."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT, train

from command_line import find_problems, parse
from redaction import redact


def problems_of(*arguments: str) -> list[str]:
    return find_problems(parse([*arguments]), ROOT / "config", lambda config: [])


@pytest.mark.parametrize(
    "option",
    ["--multi", "--multiru", "--config-path=/tmp", "--config-name=x", "-cp", "-cn", "--run", "--experimental-rerun"],
)
def test_abbreviated_and_refused_options_are_one_sentence(option):
    with pytest.raises(ValueError, match=f"^{option.split('=')[0]} is not an option here"):
        parse([option, "exp_name=x"])


def test_options_come_first_and_keep_their_values():
    line = parse(["loss=sft", "--cfg", "job", "-m", "dataset_sources.mine=/data", "--config-dir=/mine"])
    assert line.arguments[:-1] == [
        "--cfg",
        "job",
        "-m",
        "--config-dir=/mine",
        "loss=sft",
        "++dataset_sources.mine=/data",
    ]
    assert line.is_sweep
    assert line.config_dir == "/mine"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["loss=1"], "loss=1 is not one of dpo, ipo, sft"),
        (["model=1"], "model=1 is not one of blank_model"),
        (["=3"], "NAME =3: write NAME=VALUE, with no spaces around ="),
        (["lr", "=", "3"], "lr =: write lr=VALUE, with no spaces around ="),
        (["lr"], "lr is not an override: write NAME=VALUE"),
        (["--cfg", "job", "loss.betta=1"], "unknown key loss.betta: did you mean loss.beta?"),
    ],
)
def test_what_hydra_cannot_apply_is_one_sentence(arguments, problem):
    [found] = problems_of(*arguments)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "dataset_sources.my_token=s3cr3t-value"],
        ["-m", "wandb.api_key=s3cr3t-value"],
        ["wandb.api_key='s3cr3t-value"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_where_it_would_be_written_and_never_printed(arguments):
    result = train(*arguments, "exp_name=x")
    assert result.returncode == 2
    assert "s3cr3t" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("wandb.api_key=abc is wrong", "wandb.api_key=REDACTED is wrong"),
        ("++dataset_sources.my_token='a b'", "++dataset_sources.my_token=REDACTED"),
        ("api_key=${oc.env:NAME}", "api_key=${oc.env:NAME}"),
        ("max_tokens=5, lr=1", "max_tokens=5, lr=1"),
    ],
)
def test_values_of_secret_names_are_redacted_inside_texts(text, redacted):
    assert redact(text) == redacted


def write(directory: Path, content: str) -> Path:
    (directory / "experiment").mkdir(exist_ok=True)
    (directory / "experiment" / "mine.yaml").write_text(content)
    return directory


def test_own_experiment_files_are_composed(tmp_path):
    own = write(tmp_path, "# @package _global_\ndefaults:\n  - override /loss: dpo\nlr: 1e-5\nloss:\n  beta: 0.2\n")
    result = train(f"--config-dir={own}", "--cfg", "job", "+experiment=mine", "exp_name=x", "model=demo")
    assert result.returncode == 0, result.stderr
    assert "lr: 1.0e-05" in result.stdout
    assert "beta: 0.2" in result.stdout


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("hydra:\n  callbacks:\n    c:\n      _target_: os.mkdir\n", "hydra.callbacks.c._target_ names code to run"),
        ("model:\n  deep:\n    - _target_: os.mkdir\n", "model.deep._target_ names code to run"),
        ("hydra:\n  job:\n    env_set:\n      PATH: /evil\n", "hydra.job.env_set.PATH could name code to run"),
        ("# @package hydra.callbacks\nc: 1\n", "puts its keys among Hydra's own"),
        ("defaults:\n  - /x@hydra.callbacks: y\n", "defaults puts /x@hydra.callbacks among Hydra's own keys"),
        ("defaults:\n  - override /hydra/job_logging: evil\n", "hydra/job_logging could name code to run"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_own_config_files_that_could_run_code_are_refused(content, problem, tmp_path):
    [found] = problems_of("-cd", str(write(tmp_path, content)), "exp_name=x")
    assert problem in found
    assert str(tmp_path / "experiment" / "mine.yaml") in found


def test_own_config_files_are_looked_at_behind_links_too(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", "a:\n  _target_: os.mkdir\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment").symlink_to(tmp_path / "elsewhere" / "experiment")
    [found] = problems_of(f"--config-dir={tmp_path / 'mine'}", "+experiment=mine", "exp_name=x")
    assert "a._target_ names code to run" in found


def test_an_own_config_directory_that_is_not_there_is_one_sentence():
    assert problems_of("--config-dir=/nowhere", "exp_name=x") == ["--config-dir /nowhere is not a directory"]
