"""A run is read as far as its directory goes."""

import fcntl

import pytest
from support.pytests import refused
from support.records import evaluation, sample, update, write_run
from support.runs import change_json

from dpo.analysis.page import list_results
from dpo.analysis.runs import read_run, read_runs

LINES = [evaluation(0, 0.69), update(1), update(2), evaluation(2, 0.6)]


def test_a_complete_run(run_dir):
    run = read_run(write_run(run_dir, LINES, samples=[sample(8, "yes", "no"), {"examples": 8, "prompt": ""}]))

    assert (run.name, run.objective.name, run.problems) == ("made", "dpo", [])
    assert list_results(run)["State"] == "complete, 2 of 2 updates"
    assert run.eval["loss/eval"].tolist() == [0.69, 0.6]
    assert run.samples == [sample(8, "yes", "no")]


def test_ties_before_training_are_no_accuracy(tmp_path):
    ties, after = ({**evaluation(at, 0.69), "rewards_eval/accuracies": share} for at, share in ((0, 0.0), (2, 0.5)))
    first = read_run(write_run(tmp_path / "first", [ties]))
    assert "Held-out accuracy" not in list_results(first)
    both = read_run(write_run(tmp_path / "both", [ties, after]))
    assert both.eval.points("rewards_eval/accuracies")[1].tolist() == [0.5]


def test_the_state_of_a_run_is_told_by_its_lock_and_by_what_it_left(tmp_path):
    folder = write_run(tmp_path, LINES[:3], updates=10)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "still training"
        change_json(folder / "env.json", ended="2026-11-22T08:00:00+00:00")
        assert read_run(folder).state == "stopped"
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and still has it
    assert list_results(read_run(folder))["State"] == "stopped, 2 of 10 updates"
    (folder / "nonfinite-3").mkdir()
    assert read_run(folder).state == "aborted"


def test_a_half_written_last_line_is_left_out_and_an_odd_one_before_it_is_a_problem(tmp_path):
    folder = write_run(tmp_path, LINES)
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"split": "train", "exam')
    run = read_run(folder)
    assert (len(run.train.lines), run.problems) == (2, [])

    (folder / "metrics.jsonl").write_bytes(b'\xff\xfe\n[1]\n{"split": 3}\n' + whole.encode())
    run = read_run(folder)
    assert len(run.train.lines) == 2
    assert run.problems == ["metrics.jsonl: 3 lines cannot be read"]


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "preflight.json"])
@pytest.mark.parametrize("content", [None, b"\xff{[", b"[1]\n"])
def test_a_file_that_is_missing_or_damaged_is_a_problem_and_the_rest_is_read(name, content, run_dir):
    folder = write_run(run_dir, LINES, samples=[sample(8, "yes")])
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    run = read_run(folder)
    assert [problem.split(" ")[0] for problem in run.problems] == [name]
    list_results(run)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("nowhere", "nowhere does not exist"),
        ("file", "file is not a run: pass the directory of a run"),
        ("run/step-8", "run/step-8 is not a run: pass the directory of a run"),
    ],
)
def test_another_path_is_refused_in_one_sentence(run_dir, tmp_path, where, reason):
    folder = write_run(run_dir, LINES)
    (folder / "step-8").mkdir()
    (tmp_path / "file").touch()
    with refused(reason):
        read_run(tmp_path / where)


def test_a_run_is_read_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-secret")
    run = read_run(write_run(tmp_path, LINES, config={"exp_name": "0123456789abcdef-secret"}))
    assert run.name == run.config["exp_name"] == "REDACTED"


def test_runs_are_told_apart_and_each_is_read_once(tmp_path):
    a, b = (write_run(tmp_path / folder, LINES, config={"exp_name": name}) for folder, name in (("x", "a"), ("y", "b")))
    assert [run.name for run in read_runs([a, b, a / "." / ""])] == ["a", "b"]
    write_run(b, LINES, config={"exp_name": "a"})
    assert [run.name for run in read_runs([a, b])] == [str(a), str(b)]


@pytest.mark.parametrize(
    ("env", "hours"),
    [
        ({}, "0.00222 (2 CPUs)"),
        ({"gpus": ["H100"] * 8}, "0.00889 (8 GPUs)"),
        ({"gpus": ["H100"] * 8, "processes": 16}, "0.0178 (16 GPUs)"),  # of which a machine sees 8
    ],
)
def test_time_and_hours_worked_by_hand(env, hours, tmp_path):
    """Two updates of 4 examples at 2 examples a second."""
    results = list_results(read_run(write_run(tmp_path, LINES, env=env)))
    assert results["Time of updates"] == "0:00:04"
    assert hours in (results.get("CPU-hours"), results.get("GPU-hours"))
