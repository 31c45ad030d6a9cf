"""A sweep's jobs: names of their directories, the table at the end."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from support.runs import train

from dpo.settings.command_line import parse
from dpo.settings.sweeps import LONGEST_NAME, Job, Sweep


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


def log(directory, *lines: dict) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def sweep_of(folder, *overrides: list[str]) -> Sweep:
    sweep = Sweep()
    sweep.folder, sweep.jobs = folder, [Job(number, varied) for number, varied in enumerate(overrides)]
    return sweep


def evaluation(examples: int, **metrics: float | None) -> dict:
    return {"split": "eval", "examples": examples, "updates": 1} | metrics


def test_the_best_evaluation_is_the_highest_accuracy_or_the_lowest_loss_after_training_began(tmp_path, capsys):
    accuracy = "rewards_eval/accuracies"
    dpo = [evaluation(n, **{accuracy: a, "loss/eval": 1.0}) for n, a in ((0, 0.9), (8, 0.5), (16, 0.75), (24, None))]
    log(tmp_path / "dpo", {"split": "train", "examples": 4, accuracy: 1.0}, *dpo)
    log(tmp_path / "sft", *(evaluation(n, **{"loss/eval": a}) for n, a in ((0, 1.0), (8, 3.0), (16, 2.0))))
    sweep = sweep_of(tmp_path / "sweep", ["loss=dpo"], ["loss=sft"], ["lr=1"])
    for job, name in zip(sweep.jobs, ("dpo", "sft", "nothing"), strict=True):
        job.directory, job.is_finished = tmp_path / name, name == "dpo"

    sweep.report()

    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [(f["metric"], f["best"], f["examples"]) for f in found] == [
        (accuracy, 0.75, 16),
        ("loss/eval", 2.0, 16),
        (None, None, None),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "overrides", "best", "evaluation", "directory"]
    assert "loss=dpo   rewards_eval/accuracies 0.75, loss/eval 1 after 16 examples  " in lines[1]
    assert lines[3].endswith(f"{tmp_path}/nothing (not finished)")
    assert len({line.index(str(tmp_path)) for line in lines[1:4]}) == 1  # aligned
    assert lines[4] == f"this table is also in {tmp_path}/sweep/sweep.json"
    assert lines[1].startswith("0    loss=dpo")


def test_an_online_job_is_ranked_by_its_held_out_score(tmp_path):
    scores = ((8, 2.0), (16, 3.0))
    log(
        tmp_path / "job",
        *(evaluation(n, **{"online_eval/score": s, "rewards_eval/accuracies": 1 / n}) for n, s in scores),
    )
    summary = Job(0, [], tmp_path / "job").summarize()
    assert (summary["metric"], summary["best"], summary["examples"]) == ("online_eval/score", 3.0, 16)


def test_a_job_on_labels_is_ranked_by_what_its_weights_do_not_scale(tmp_path):
    values = ((8, 0.6, 0.1), (16, 0.8, 0.9))
    log(tmp_path / "job", *(evaluation(n, **{"rewards_eval/auc": auc, "loss/eval": loss}) for n, auc, loss in values))
    summary = Job(0, [], tmp_path / "job").summarize()
    assert (summary["metric"], summary["best"], summary["examples"]) == ("rewards_eval/auc", 0.8, 16)


def test_a_table_that_cannot_be_written_and_a_line_that_was_cut_off_cost_nothing(tmp_path, capsys):
    log(tmp_path / "job", evaluation(8, **{"loss/eval": 2.0}))
    with (tmp_path / "job" / "metrics.jsonl").open("a") as file:
        file.write('{"split": "eval", "exam')
    (tmp_path / "file").touch()
    sweep = sweep_of(tmp_path / "file", ["lr=1"])
    sweep.jobs[0].directory = tmp_path / "job"
    sweep.report()
    said = capsys.readouterr().out
    assert "loss/eval 2 after 8 examples" in said
    assert f"warning: {tmp_path}/file/sweep.json cannot be written: " in said


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
def test_a_sweep_into_one_directory_names_its_jobs_and_ends_with_a_table(command, tmp_path):
    settings = command("sweep", "n_examples=8", "loss.beta=0.1,0.5", "seed=0", f"hydra.sweep.dir={tmp_path}/hydra")
    result = train("-m", *settings)

    assert result.returncode == 0, result.stderr
    names = ["0_loss.beta=0.1", "1_loss.beta=0.5"]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == [*names, "sweep.json"]
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [(job["overrides"], job["finished"]) for job in found] == [
        (["loss.beta=0.1"], True),
        (["loss.beta=0.5"], True),
    ]
    for name, job in zip(names, found, strict=True):
        assert job["directory"] == f"{tmp_path}/sweep/{name}"
        assert (
            yaml.safe_load((tmp_path / "sweep" / name / "config.yaml").read_text())["local_run_dir"] == job["directory"]
        )
    *_, title, first, second, where = result.stdout.splitlines()
    assert title.startswith("job  overrides")
    assert (first.split()[:2], second.split()[:2]) == (["0", "loss.beta=0.1"], ["1", "loss.beta=0.5"])
    assert where == f"this table is also in {tmp_path}/sweep/sweep.json"


@pytest.mark.slow
def test_a_sweep_that_ends_early_has_its_table_too_and_without_a_directory_names_its_jobs_as_well(command, tmp_path):
    settings = command("x", "n_examples=8", "batch_size=4,30", f"hydra.sweep.dir={tmp_path}/hydra", "eval_every=40")
    settings = [o for o in settings if not o.startswith("local_run_dir=")]
    result = train("-m", *settings, LOGNAME="somebody")

    assert result.returncode == 2
    assert "too few for one batch of batch_size=30" in result.stderr
    runs = sorted((tmp_path / "somebody").glob("test*"))
    assert [re.sub(r"_\d{4}-.*\d{6}_", "|", run.name) for run in runs] == [
        "test|0_batch_size=4",
        "test|1_batch_size=30",
    ]
    found = json.loads((tmp_path / "hydra" / "sweep.json").read_text())
    assert [job["finished"] for job in found] == [True, False]
    assert result.stdout.splitlines()[-2].endswith("(not finished)")
