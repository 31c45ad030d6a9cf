"""The command line before Hydra: options, overrides, nothing that names code."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import hydra
import pytest
from support.runs import ROOT, train

from dpo.settings.command_line import GuardedLoader, check_command_line, find_line_problems, parse
from dpo.system.redaction import redact


def problems_of(*arguments: str) -> list[str]:
    return find_line_problems(parse(["exp_name=x", "model.name_or_path=gpt2", *arguments]))


@pytest.mark.parametrize(
    "option",
    ["--multi", "--multiru", "--config-path=/tmp", "--config-name=x", "-cp", "-cn", "--run", "--experimental-rerun"],
)
def test_abbreviated_and_refused_options_are_one_sentence(option):
    with pytest.raises(ValueError, match=f"^{option.split('=')[0]} is not an option here"):
        parse([option, "exp_name=x"])


def test_options_come_first_and_keep_their_values():
    line = parse(["loss=sft", "--cfg", "job", "dataset_sources.mine=/data", "--config-dir=/it's mine"])
    overrides = ["loss=sft", "++dataset_sources.mine=/data", "hydra.searchpath=['file:///it\\'s mine']"]
    assert line.arguments == ["--cfg", "job", *overrides]
    assert not line.is_sweep
    assert line.config_dir == "/it's mine"


def test_a_fixed_option_of_a_swept_group_is_forced_as_the_default_lacks_it():
    line = parse(["-m", "loss=dpo,ipo", "loss.beta=0.1", "seed=1"])
    assert line.arguments[1:-1] == ["loss=dpo,ipo", "++loss.beta=0.1", "seed=1"]
    assert "loss.beta=0.1,0.2" in parse(["-m", "loss=dpo,ipo", "loss.beta=0.1,0.2"]).arguments


def test_an_existing_path_is_printed_with_its_quotes_even_with_a_comma(tmp_path):
    file = tmp_path / "my rows (1),x.jsonl"
    file.touch()
    [found] = problems_of(f"datasets={file}")
    assert found.endswith(f"write 'datasets=\"{file}\"'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "dataset_sources.my_token=s3cr3t-value"],
        ["-m", "wandb.api_key=s3cr3t-value"],
        ["wandb.api_key='s3cr3t-value"],
        ["-m", "dataset_sources={my_token: s3cr3t-value}"],
        ["-m", "+authToken=s3cr3t-value"],
        ["-m", "dataset_sources.m='https://user:s3cr3t-value@host/x'"],
        ["-m", "+wandb.api_key=${oc.decode:'s3cr3t-value'}"],
        ["wandb.api_key=x, s3cr3t-value"],
        ["wandb.api_key:s3cr3t-value"],
        ["wandb.api_key", "=", "s3cr3t-value"],
        ["wandb.api_key=", "s3cr3t-value"],
        ["wandb.api_key", "=s3cr3t-value"],
        ["+wandb={api_key: s3cr3t-value"],
        ["+wandb.api_key@x=s3cr3t-value"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_where_it_would_be_written_and_never_printed(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        check_command_line([*arguments, "exp_name=x"])
    assert ending.value.code == 2
    assert "s3cr3t" not in "".join(capsys.readouterr())


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


@pytest.fixture
def guarded(monkeypatch, capsys):
    """Compose a command with the guard, and return what it prints."""
    monkeypatch.setattr("hydra._internal.hydra.ConfigLoaderImpl", GuardedLoader)

    def compose_guarded(*arguments: str) -> str:
        with hydra.initialize_config_dir(str(ROOT / "config"), version_base="1.3"), suppress(SystemExit):
            hydra.compose("config", parse(["exp_name=x", *arguments]).arguments)
        return capsys.readouterr().err

    return compose_guarded


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
def test_own_config_files_cannot_name_code(content, key, guarded, tmp_path):
    own = write(tmp_path, f"# @package _global_\n{content}")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "evil.yaml").write_text("# @package hydra.callbacks.c\n_target_: os.mkdir\n")
    assert f"--config-dir: {key}" in (found := guarded("-cd", str(own), "+experiment=mine"))
    assert "may not be set in a config file, as it can name code to run" in found
    assert guarded("-cd", str(own)) == ""  # it is not chosen


def test_code_that_the_command_line_names_is_run_beside_own_config_files(guarded, tmp_path):
    own = write(tmp_path, "# @package _global_\ndefaults:\n  - override /online: online\nonline:\n  scorer: function\n")
    (tmp_path / "rewards.py").touch()
    line = ("-cd", str(own), "+experiment=mine", "exp_name=x", "loss=dpo", "loss.beta=0.1", "model=pythia28")
    line = (*line, f"online.function={tmp_path / 'rewards.py'}:f", "model.trust_remote_code=true")
    assert problems_of(*line) == []
    assert guarded(*line) == ""


@pytest.mark.slow
def test_no_job_of_a_sweep_runs_if_own_files_name_code_in_one(command, tmp_path):
    own, more = tmp_path / "own" / "experiment", tmp_path / "own" / "more"
    own.mkdir(parents=True)
    more.mkdir()
    (own / "a.yaml").write_text("path: of/a-hub\n")
    (own / "b.yaml").write_text("# @package _global_\ndefaults:\n  - /more@_global_: evil\n")
    (more / "evil.yaml").write_text("# @package _global_\nhydra:\n  callbacks:\n    c: {a: 1}\n")
    sweep = ("+experiment@dataset_sources.b=a,b", "n_examples=4", f"hydra.sweep.dir={tmp_path}/sweeps")
    result = train("-m", f"--config-dir={tmp_path / 'own'}", *command("run", *sweep))
    assert result.returncode == 2
    assert "hydra.callbacks.c.a may not be set in a config file" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_own_config_files_that_are_no_files_are_refused(kind, tmp_path):
    file = tmp_path / "x.yaml"
    os.mkfifo(file) if kind == "FIFO" else file.symlink_to("/dev/zero")
    assert problems_of(f"--config-dir={tmp_path}") == [f"{file} is a {kind}; a regular file is expected"]


@pytest.mark.parametrize("arguments", [["--config-dir"], ["--config-dir="], ["-cd"]])
def test_an_own_config_directory_must_be_named(arguments):
    with pytest.raises(ValueError, match="needs a directory"):
        parse(arguments)


def test_an_own_config_directory_that_is_not_there_is_one_sentence():
    assert problems_of("--config-dir=/nowhere", "exp_name=x") == ["--config-dir /nowhere is not a directory"]
