"""A run's directory is its own, and holds no secrets."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tqdm
import yaml
from support.faults import start_run
from support.pytests import refused, slow
from support.runs import ROOT, read_json, read_rows

from dpo.errors import WarningLine
from dpo.system.host import harden_stdio
from dpo.system.run_directory import RunLog, check_holds_no_run, get_local_dir, lock_run_dir, write_run_facts


@pytest.mark.parametrize("error", [KeyError, OSError])  # of Python before 3.13, and of later ones
def test_a_user_without_a_name_as_in_a_container_has_a_directory(error, tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=error))
    assert get_local_dir([str(tmp_path)]) == f"{tmp_path}/{os.getuid()}"


def test_a_new_directory_holds_config_and_environment(run_dir, monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "not for the record")

    run_dir.mkdir()
    write_run_facts(run_dir, {"lr": 1e-6, "api_key": "abc"})

    assert sorted(file.name for file in run_dir.iterdir()) == ["config.yaml", "env.json"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == {"lr": 1e-6, "api_key": "REDACTED"}
    assert "not for the record" not in (run_dir / "env.json").read_text()
    record = read_json(run_dir / "env.json")
    assert {"torch", "transformers", "datasets", "numpy"} <= record["packages"].keys()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert record["git_commit"] == (head.stdout.strip() or None)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(
    "name", [".lock", "config.yaml", "step-8", ".step-8.dpo-tmp", "samples.txt", "report", "log.txt", "metrics.jsonl"]
)
def test_a_run_does_not_begin_where_something_else_has_a_name_of_its_own(name, resume, run_dir, run):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")  # nothing of the run has this name
    (run_dir / name).write_text("{}")
    is_checkpoint = (name, resume) == ("step-8", "auto")
    message = "finds no complete checkpoint" if is_checkpoint else f"already holds a run \\({name}\\), or other files"
    for dry_run in ("true", "false"):
        with refused(message):
            run("run", f"resume={resume or 'null'}", f"dry_run={dry_run}")
    assert {path.name for path in run_dir.iterdir()} - {".lock"} == {"notes.txt", name} - {".lock"}
    assert (run_dir / name).read_text() == "{}"


@pytest.mark.parametrize("resume", ["null", "auto"])
def test_a_file_is_no_directory_for_a_run(resume, run_dir, run):
    run_dir.touch()
    for dry_run in ("true", "false"):
        with refused(f"local_run_dir={run_dir} cannot be written: .*Not a directory"):
            run("run", f"resume={resume}", f"dry_run={dry_run}")


def test_what_a_run_left_that_did_not_train_is_no_obstacle_but_a_checkpoint_is(tmp_path):
    write_run_facts(tmp_path, {"lr": 1})
    (tmp_path / "report").mkdir()
    check_holds_no_run(tmp_path)
    (tmp_path / "step-8").mkdir()  # its logs were moved away
    with refused(r"already holds a run \(step-8\)"):
        check_holds_no_run(tmp_path)


@pytest.mark.parametrize(
    ("made_before", "overrides", "why"),
    [
        ((), ("n_epochs=1", "batch_size=4096", "eval_every=4096"), "too few for one batch"),
        (("RUNS/run",), ("model.archive=nowhere",), "nowhere"),  # refused before the data is read
        (("RUNS/run", "RUNS/run/mine"), ("model.archive=nowhere",), "nowhere"),
    ],
)
def test_a_refused_run_leaves_nothing_that_was_not_there(run, tmp_path, made_before, overrides, why):
    for name in made_before:
        (tmp_path / name).mkdir(parents=True)
    with refused(why):
        run("run", f"local_run_dir={tmp_path}/RUNS/run", *overrides)
    root = tmp_path / "RUNS"
    left = {str(path.relative_to(tmp_path)) for path in [root, *root.rglob("*")] if path.exists()}
    assert left == {*made_before, *(["RUNS"] if made_before else [])}


def test_the_time_of_a_resumed_run_has_what_came_before_its_checkpoint(tmp_path):
    write_run_facts(tmp_path, {})
    record = read_json(tmp_path / "env.json")
    assert record["seconds_before"] == 0
    started = datetime.fromisoformat(record["started"]).timestamp()
    for before, saved_after in ((100, 100), (130, 30)):
        write_run_facts(tmp_path, {}, former=("id", started + saved_after))
        assert read_json(tmp_path / "env.json")["seconds_before"] == pytest.approx(before, abs=2)
    (other := tmp_path / "other").mkdir()
    write_run_facts(other, {}, former=("id", started))  # another run's checkpoint, copied
    assert read_json(other / "env.json")["seconds_before"] is None


def test_a_directory_is_one_run_at_a_time_and_free_again_when_it_ends(tmp_path):
    held = lock_run_dir(tmp_path)
    with refused(f"local_run_dir={tmp_path} is locked by process {os.getpid()} on "):
        lock_run_dir(tmp_path)
    held.close()
    lock_run_dir(tmp_path).close()


def test_a_lock_that_a_refused_run_removes_does_not_count_as_held(tmp_path):
    held = lock_run_dir(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock_run_dir, tmp_path)
        time.sleep(0.2)
        (tmp_path / ".lock").unlink()
        held.close()
        with waiting.result(), refused("is locked by process"):
            lock_run_dir(tmp_path)


# --- what rank 0 prints ------------------------------------------------------------------------------------------


def test_a_bar_leaves_no_redraws_and_a_secret_no_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    log = RunLog()
    log.begin()
    assert log.take_pending() == {"warnings.jsonl": ""}  # a run without warnings has the file too
    log.begin()
    print("before the directory, with sk-0123456789")
    print(WarningLine("of sk-0123456789"), "a line", sep="\n")
    print("warning: of a library")
    log.open(tmp_path)
    for _ in tqdm.tqdm(range(3), file=sys.stderr, miniters=1, mininterval=0):
        pass
    log.close()
    print("after the run")
    first, *lines, last = (tmp_path / "log.txt").read_text().splitlines()
    assert first == "before the directory, with REDACTED"
    assert lines == ["warning: of REDACTED", "a line", "warning: of a library"]
    assert read_rows(tmp_path / "warnings.jsonl") == [{"warning": "of REDACTED"}]
    assert ("3/3" in last, "1/3" in last) == (True, False)


def log_as_a_library() -> None:
    from dpo.data import preflight

    load = preflight.load_tokenizer

    def load_and_log(*args, **kwargs):
        logging.getLogger("library").warning("of a library")
        return load(*args, **kwargs)

    preflight.load_tokenizer = load_and_log


@pytest.mark.parametrize("processes", [[], slow(["trainer=FSDPTrainer", "world_size=2"])])
def test_a_run_has_its_text_from_the_first_line_to_the_last_and_a_resume_appends(command, run_dir, processes):
    text = ""
    for n_examples in (8, 12):
        run = start_run(command("run", *processes, "resume=auto", f"n_examples={n_examples}"), log_as_a_library)
        assert run.wait() == 0, run.text
        before, text, printed = text, (run_dir / "log.txt").read_text(), run.text.splitlines()
        assert "of a library" in printed
        assert text.startswith(before)
        assert text.removeprefix(before).splitlines()[0] == printed[0]
        assert set(printed) <= set(text.removeprefix(before).splitlines())


def test_the_lock_of_a_lost_machine_is_taken_over_by_its_own_job_alone(tmp_path, monkeypatch, printed):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with lock_run_dir(tmp_path):
        for other in ("another", "none"):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
            with refused("is locked by process"):
                lock_run_dir(tmp_path)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        with lock_run_dir(tmp_path):
            assert "is taken from process" in printed()
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
            with refused("is locked by process"):
                lock_run_dir(tmp_path)


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.3, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        lock_run_dir(tmp_path).close()
    (tmp_path / ".lock").write_text("p")  # as on a full disk
    check_holds_no_run(tmp_path)


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "mark"),
    [(True, "", "\033[33m{}\033[0m"), (True, "1", "{}"), (False, "", "{}")],
)
def test_warnings_and_errors_have_colors_on_a_terminal_alone(is_terminal, no_color, mark, monkeypatch, tmp_path):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("dpo.system.host._RedactedText.isatty", lambda self: is_terminal)
    with (tmp_path / "out").open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        harden_stdio()
        print("warning: hot\na warning: cold\nerror: x", flush=True)
    shown = f"{mark.format('warning')}: hot\na warning: cold\n{mark.format('error')}: x\n"
    assert (tmp_path / "out").read_text() == shown


def test_a_run_that_would_not_fit_on_the_disk_is_refused_unless_told_otherwise(run, monkeypatch):
    monkeypatch.setattr("dpo.training.start.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with refused(r"the run's files take about .* on disk, where 1e-06 GB are free: .*; or set check_disk=false"):
        run("run", "n_examples=4")
    run("run", "n_examples=4", "check_disk=false")
