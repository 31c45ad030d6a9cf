"""What of a command line reaches Hydra: known options, overrides that it can apply, and nothing that names code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.runs import ROOT, train

from dpo.losses import LOSSES
from dpo.settings.command_line import find_problems, parse
from dpo.system.redaction import redact


def problems_of(*arguments: str) -> list[str]:
    return find_problems(parse(["exp_name=x", "model.name_or_path=gpt2", *arguments]), ROOT / "config")


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["loss=1"], f"loss=1 is not there; `ls config/loss` shows all {len(LOSSES)}"),
        (["loss=dppo"], "loss=dppo is not there: did you mean dpo, sppo or dpop? `ls config/loss` shows all"),
        (["loss=dppo", "loss.beta=0.1"], "loss=dppo is not there"),  # whether there is a beta is not known
        (["model=1"], "model=1 is not there; `ls config/model` shows all"),
        (["loss=kto"], "loss=kto is not there: did you mean bco or apo_zero? `ls config/loss` shows all"),
        (["model=Pythia28"], "model=Pythia28 is not there: did you mean pythia28? `ls config/model` shows all"),
        (["model=pythia2.8"], "model=pythia2.8 is not there: did you mean pythia28, "),
        (
            ["model=gpt2"],
            "model=gpt2 is not there: did you mean gptj or gpt2-xl? `ls config/model` shows all "
            f"{len(list((ROOT / 'config' / 'model').glob('*.yaml')))}; a model of the Hub is model.name_or_path=gpt2",
        ),
        (
            ["model=/my/model"],
            "model=/my/model: model names a file of config/model; a directory or Hub id is "
            "model.name_or_path=/my/model",
        ),
        (
            ["model=me/my-model"],
            "model=me/my-model: model names a file of config/model; a directory or Hub id is "
            "model.name_or_path=me/my-model",
        ),
        (
            ["model=tests"],
            "model=tests: model names a file of config/model; a directory or Hub id is model.name_or_path=tests",
        ),
        (["model=EleutherAI/pythia-2.8b"], "model=EleutherAI/pythia-2.8b: here it is model=pythia28"),
        (["lora=/my/adapter"], "lora=/my/adapter: an adapter to start from is model.archive=/my/adapter lora=lora"),
        (["lora=lorra"], "lora=lorra is not one of lora, none, qlora: did you mean lora or qlora?"),
        (["=3"], "NAME =3: write NAME=VALUE, with no spaces around ="),
        (["lr", "=", "3"], "lr =: write lr=VALUE, with no spaces around ="),
        (["lr"], "lr is not an override: write NAME=VALUE"),
        (["-m", "model=glob(*)"], "model=glob(*): glob() does not work here; name the options"),
        (["n_examples=8", "=3"], "NAME =3: write NAME=VALUE, with no spaces around ="),
        (["Lr=1"], "unknown key Lr: did you mean lr?"),
        (["model.name_or_path=~/x"], "model.name_or_path=~/x: ~ is not expanded here; write the whole path"),
        (["datasets=[~/x.csv]"], "datasets=[~/x.csv]: ~ is not expanded here; write the whole path"),
        (
            ["datasets=/data/my rows (1).csv"],
            "datasets=/data/my rows (1).csv: some of its characters mean something to Hydra: "
            "write 'datasets=\"/data/my rows (1).csv\"'",
        ),
        (
            ["datasets=[/data/é.csv]"],
            "datasets=[/data/é.csv]: some of its characters mean something to Hydra: "
            "write 'datasets=[\"/data/é.csv\"]'",
        ),
        (
            ["datasets=/data/we ird (1) é,x.jsonl"],
            "datasets=/data/we ird (1) é,x.jsonl: some of its characters mean something to Hydra: "
            "write 'datasets=\"/data/we ird (1) é,x.jsonl\"'",
        ),
        (["hydra.sweeper.params.x=1"], "hydra.sweeper.params.x=1 is not a valid override"),
        (["loss=sft", "loss.beta=1"], "loss.beta does not exist here: it belongs to any loss but sft"),
        (["loss=sft", "loss.wpo=true"], "loss.wpo does not exist here: it belongs to any loss but orpo, sft, simpo"),
        (["loss=simpo", "loss.ld_alpha=0"], "loss.ld_alpha does not exist here: it belongs to any loss but orpo, sft"),
        (["loss=orpo", "loss.gamma=1"], "loss.gamma does not exist here: it belongs to loss=mix and loss=simpo"),
        (["--cfg", "job", "loss.betta=1"], "unknown key loss.betta: did you mean loss.beta?"),
    ],
)
def test_what_hydra_cannot_apply_is_one_sentence(arguments, problem):
    [found] = problems_of(*arguments)
    assert found.startswith(problem)


def test_a_path_that_is_there_is_told_with_its_quotes_even_with_a_comma(tmp_path):
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
    ("content", "key"),
    [
        ("hydra:\n  callbacks:\n    c:\n      _target_: os.mkdir\n", "hydra.callbacks.c._target_"),
        ("hydra:\n  callbacks:\n    c:\n      - '${oc.create:\"{_target_: os.mkdir}\"}'\n", "hydra.callbacks.c"),
        ("hydra:\n  callbacks: ${evil}\nevil: {}\n", "hydra.callbacks"),
        ("hydra:\n  sweeper:\n    params:\n      +more: evil\n", "hydra.sweeper.params.+more"),
        ("hydra:\n  job:\n    env_set:\n      PATH: /evil\n", "hydra.job.env_set.PATH"),
        ("hydra:\n  job_logging:\n    handlers:\n      console:\n        (): os.mkdir\n", "hydra.job_logging.handlers"),
        ("online:\n  function: evil.py:f\n", "online.function"),
        ("model:\n  trust_remote_code: true\n", "model.trust_remote_code"),
    ],
)
def test_own_config_files_that_could_run_code_are_refused(content, key, tmp_path):
    own = write(tmp_path, f"# @package _global_\n{content}")
    [found] = problems_of("-cd", str(own), "+experiment=mine", "exp_name=x")
    assert found.startswith(f"--config-dir {own}: {key}")
    assert found.endswith("may be set on the command line alone, if at all")
    assert problems_of("-cd", str(own), "exp_name=x") == []  # it is not chosen


def test_code_that_the_command_line_names_is_run_beside_own_config_files(tmp_path):
    own = write(tmp_path, "# @package _global_\ndefaults:\n  - override /online: online\nonline:\n  scorer: function\n")
    (tmp_path / "rewards.py").touch()
    line = ("-cd", str(own), "+experiment=mine", "exp_name=x", "loss=dpo", "loss.beta=0.1", "model=pythia28")
    assert problems_of(*line, f"online.function={tmp_path / 'rewards.py'}:f", "model.trust_remote_code=true") == []


@pytest.mark.parametrize(
    "content",
    ["# @package hydra.callbacks\nc: 1\n", "# @package _global_\ndefaults:\n  - /evil@hydra.callbacks.c: mine\n"],
)
def test_own_config_files_that_go_among_hydras_own_keys_are_refused(content, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "mine.yaml").write_text("_target_: os.mkdir\n")
    found = problems_of("-cd", str(write(tmp_path, content)), "+experiment=mine", "exp_name=x")
    assert any("hydra.callbacks.c" in problem for problem in found)


def test_defaults_of_own_files_that_depend_on_time_or_environment_are_refused(tmp_path):
    own = write(tmp_path, "# @package _global_\ndefaults:\n  - /more: s${now:%S}\n")
    [found] = problems_of("-cd", str(own), "+experiment=mine", "exp_name=x")
    assert "its defaults may refer to other choices, not to resolvers" in found


@pytest.mark.parametrize("group", ["exp.x", "experiment@dataset_sources.b"])
def test_a_group_with_dots_is_looked_at_in_every_job(group, tmp_path):
    folder = tmp_path / group.partition("@")[0]
    folder.mkdir()
    (folder / "a.yaml").write_text("{}\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "evil.yaml").write_text("# @package _global_\nhydra:\n  callbacks:\n    c: {a: 1}\n")
    (folder / "b.yaml").write_text("# @package _global_\ndefaults:\n  - /more@_global_: evil\n")
    found = problems_of("-m", f"--config-dir={tmp_path}", f"+{group}=a,b", "exp_name=x")
    assert any("hydra.callbacks.c.a" in problem for problem in found)


def test_every_job_of_a_sweep_over_own_files_is_looked_at(tmp_path):
    write(tmp_path, "# @package _global_\nlr: 1e-5\n")
    (tmp_path / "experiment" / "worse.yaml").write_text("# @package _global_\nhydra:\n  callbacks:\n    c: {a: 1}\n")
    line = ["-m", f"--config-dir={tmp_path}", "+experiment=mine,worse", "seed=1,2", "exp_name=x"]
    assert [
        problem
        for problem in problems_of(*line)
        if "hydra.callbacks.c.a may be set on the command line alone" in problem
    ]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("fifo", "is a FIFO; a regular file is expected"), ("device", "is a device; a regular file is expected")],
)
def test_own_config_files_that_are_no_files_are_refused(kind, problem, tmp_path):
    file = tmp_path / "x.yaml"
    os.mkfifo(file) if kind == "fifo" else file.symlink_to("/dev/zero")
    assert problems_of(f"--config-dir={tmp_path}", "exp_name=x") == [f"{file} {problem}"]


def test_own_config_files_are_looked_at_behind_links_too(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", "# @package _global_\nhydra:\n  callbacks:\n    c: {a: 1}\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment").symlink_to(tmp_path / "elsewhere" / "experiment")
    [found] = problems_of(f"--config-dir={tmp_path / 'mine'}", "+experiment=mine", "exp_name=x")
    assert "hydra.callbacks.c.a may be set on the command line alone" in found


@pytest.mark.parametrize("arguments", [["--config-dir"], ["--config-dir="], ["-cd"]])
def test_an_own_config_directory_must_be_named(arguments):
    with pytest.raises(ValueError, match="needs a directory"):
        parse(arguments)


def test_an_own_config_directory_that_is_not_there_is_one_sentence():
    assert problems_of("--config-dir=/nowhere", "exp_name=x") == ["--config-dir /nowhere is not a directory"]
