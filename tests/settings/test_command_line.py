"""The command line: options, overrides, nothing that names code, and the jobs of a sweep."""

import shlex
from pathlib import Path

import pytest
import yaml
from support.commands import find_refusals
from support.runs import train
from support.trainers import compose as compose_run

import train as train_script
from dpo.commands import main as dpo_command
from dpo.settings import plan
from dpo.settings.command_line import check_command_line, parse
from trainers import BasicTrainer

NEEDED = "exp_name=x model.name_or_path=gpt2"


@pytest.mark.parametrize("option", ["--multi", "--config-path=/tmp", "--config-name=x", "--experimental-rerun=x"])
def test_options_that_are_abbreviated_or_can_run_code_are_refused(option):
    [problem] = find_refusals(f"{option} exp_name=x")
    assert problem.startswith(f"{option.split('=')[0]} is not an option here")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "dataset_sources.my_token=s3cr3t-value"],
        ["wandb.api_key='s3cr3t-value"],
        ["-m", "wandb.notes='https://user:s3cr3t-value@host/x'", "wandb.notes=b"],  # the last one counts
        ["-m", "dataset_sources.m='https://user:s3cr3t-value@host/x'"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_where_it_would_be_written_and_never_printed(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        check_command_line([*arguments, "exp_name=x"])
    assert ending.value.code == 2
    assert "s3cr3t" not in "".join(capsys.readouterr())


def write_experiment(directory: Path, content: str) -> str:
    """Write `experiment/mine.yaml` to a directory whose name needs quotes; return its option."""
    (folder := directory / "it's mine" / "experiment").mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"# @package _global_\n{content}")
    return shlex.quote(f"--config-dir={folder.parent}")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("hydra:\n  callbacks:\n    c:\n      _target_: os.mkdir\n", "hydra.callbacks.c._target_"),
        ("hydra:\n  callbacks:\n    c:\n      - '${oc.create:\"{_target_: os.mkdir}\"}'\n", "hydra.callbacks.c"),
        ("hydra:\n  sweeper:\n    params:\n      +more: evil\n", "hydra.sweeper.params.+more"),
        ("hydra:\n  job:\n    env_set:\n      PATH: /evil\n", "hydra.job.env_set.PATH"),
        ("defaults:\n  - /more: e${oc.env:NOBODY,vil}\n", "hydra.callbacks.c._target_"),  # no text shows the choice
        ("online:\n  function: evil.py:f\n", "online.function"),
        ("model:\n  trust_remote_code: true\n", "model.trust_remote_code"),
        ("plugins: [evil.py]\n", "plugins"),
    ],
)
def test_own_config_files_cannot_name_code(content, key, tmp_path):
    own, folder = write_experiment(tmp_path, content), tmp_path / "it's mine"
    (folder / "experiment" / "x.yaml").write_text("{}\n")
    (folder / "more").mkdir()
    (folder / "more" / "evil.yaml").write_text("# @package hydra.callbacks.c\n_target_: os.mkdir\n")
    for choice in ("experiment=mine", "-m +experiment@_global_=x,mine")[: 2 if "online" in key else 1]:  # slow
        found = "\n".join(find_refusals(f"{NEEDED} {own} {choice}"))
        assert f"--config-dir: {key}" in found
        assert "can name code to run, so no config file may set it" in found
    assert find_refusals(f"{NEEDED} {own}") == []  # it is not chosen


def test_code_that_the_command_line_names_is_run_beside_own_config_files(tmp_path):
    own = write_experiment(tmp_path, "defaults:\n  - override /online: online\nonline:\n  scorer: function\n")
    code = "online.function=rewards.py:f model.trust_remote_code=true"
    assert find_refusals(f"{NEEDED} {own} +experiment=mine loss=dpo loss.beta=0.1 {code}") == []


@pytest.mark.parametrize("way", ["command line", "reference's constructor"])
def test_a_process_counts_gpus_for_its_plan_once_and_hands_it_on(way, command, tiny_llama, tmp_path, monkeypatch):
    counted = []
    config = compose_run(tmp_path, "run", "n_examples=4", "loss=sft")
    monkeypatch.setattr(plan, "count_gpus", lambda: counted.append(1) or 0)
    if way == "command line":
        train_script.run(check_command_line(command("run", "n_examples=4", "loss=sft"))[1])
        train_script.RUN_LOG.close()
    else:
        BasicTrainer(tiny_llama, config, config.seed, config.local_run_dir).train()
    assert len(counted) == 1


def test_what_follows_from_a_changed_value_agrees_with_it():
    former = plan.make_plan({"trainer": "FSDPTrainer", "fsdp_frozen_weights": "sharded"}, world_size=2)
    changed = former.change("fsdp_frozen_weights", "whole").change("model.policy_dtype", "bfloat16")
    assert (changed.values["fsdp_frozen_weights"], changed.fsdp.fsdp_frozen_weights) == ("whole", "whole")
    assert (former.compute_dtype, changed.compute_dtype, changed.dims) == ("float32", "bfloat16", former.dims)


@pytest.mark.parametrize(
    ("choice", "average"),
    [
        ("loss=sft", "mean"),
        ("loss=sft loss.average=sum", "sum"),
        ("loss=ipo loss.beta=0.1", False),  # IPO has an option of this name too
        ("loss=mix loss.weights.dpo=1", False),
        ("loss=dpo loss.beta=0.1", None),
    ],
)
def test_what_an_experiment_sets_for_a_loss_has_no_effect_on_another_one(choice, average):
    _, found = check_command_line([*NEEDED.split(), "experiment=modern", *choice.split()])
    assert found.loss.options.get("average") == average
    assert found.values.get("loss.average") == average


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_all_jobs_are_checked_before_the_first_starts():
    assert find_refusals(f"{NEEDED} -m loss=dpo,ipo loss.beta=0.1 lr=1e-2,nan,-1") == [
        "lr=nan must be a number above 0",
        "lr=-1 must be a number above 0",
    ]


def test_a_sweep_under_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    [problem] = find_refusals(f"{NEEDED} -m loss=dpo loss.beta=0.1,0.5")
    assert problem.startswith("under a launcher only the first job of a sweep")


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
    assert [run.name.rpartition("_")[2] for run in runs] == ["0", "1"]
    assert [(run / "LATEST").exists() for run in runs] == [False, True]
    assert yaml.safe_load((runs[1] / "config.yaml").read_text())["local_run_dir"] == str(runs[1])


# --- models and commands ----------------------------------------------------------------------------------------------


def test_model_takes_a_directory_or_hub_id_but_first_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("my model", "gpt2-large"):
        (tmp_path / name).mkdir()

    def find_model(option: str) -> tuple:
        _, plan = check_command_line([option, "exp_name=x"])
        return plan.model.name_or_path, plan.model.reference_dtype

    assert find_model("model=my model") == find_model('model="my model"') == ("my model", None)
    assert find_model("model=Qwen/Some-1B") == ("Qwen/Some-1B", None)
    assert find_model("model=gpt2-large")[0] == "gpt2-large"
    assert '++model.name_or_path="./a","./b"' in parse(["-m", "model=./a,./b"]).overrides
    said = capsys.readouterr().err.splitlines()
    assert said[2] == 'model=Qwen/Some-1B is taken for model.name_or_path="Qwen/Some-1B"'
    assert said[3] == "model=gpt2-large is taken for its config; the directory is model=./gpt2-large"


@pytest.mark.parametrize(("file", "name"), [("2024_pairs.csv", "_2024_pairs"), ("données.csv", "donn_es")])
def test_the_columns_of_a_file_with_any_name_can_be_set(file, name, tmp_path):
    (tmp_path / file).touch()
    columns = f"dataset_sources.{name}.columns={{prompt: question}}"
    _, plan = check_command_line([f'datasets="{tmp_path}/{file}"', columns, "loss=sft", "model=demo", "exp_name=x"])
    assert plan.data.datasets == [name]
    assert plan.data.dataset_sources[name] == {"path": f"{tmp_path}/{file}", "columns": {"prompt": "question"}}


@pytest.mark.parametrize(
    ("command", "says"),
    [("trian", "did you mean train?"), ("loss=dpo", "settings go to dpo train"), (".", "such as dpo report .")],
)
def test_a_slip_in_the_name_of_a_command_gets_what_to_type(command, says, capsys):
    assert dpo_command([command]) == 2
    assert says in capsys.readouterr().err.splitlines()[0]
