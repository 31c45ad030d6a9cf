"""Whatever ends a run, nothing that was saved is lost, and continued it is the run that nobody disturbed, bit for bit.

Every fault happens to a real process. `python -m benchmarks.soak` does the same at random, many times.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.faults import Run, kill_after_update, kill_at_step_of_saving, limit_file_size
from support.runs import ROOT, assert_gone, make_environment, read_metrics, small_run, train
from support.warm import Python

from benchmarks.soak import find_differences, find_workers
from dpo.checkpoint.files import check_complete, find_checkpoints

SHARDED = ("trainer=FSDPTrainer", "world_size=2", "eval_batch_size=8", "n_eval_examples=8", "n_examples=40")


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory) -> Path:
    """The run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run = Run(small_run(rows, run_dir, "keep_checkpoints=2"), run_dir.parent / "log")
    assert run.wait() == 0, run.log.read_text()
    return run_dir


@pytest.fixture(scope="module")
def whole_sharded(rows, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = train(*small_run(rows, run_dir, *SHARDED))
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.fixture
def start(rows, tmp_path):
    """Start a run into `tmp_path / "run"`, with a fault."""

    def begin(*overrides: str, fault=None, arguments=()) -> Run:
        overrides = small_run(rows, tmp_path / "run", "keep_checkpoints=2", *overrides)
        return Run(overrides, tmp_path / "log", fault, *arguments)

    return begin


def is_whole_after(start, whole: Path, run_dir: Path, *overrides: str) -> None:
    """All that is there under its own name is complete, and continued it is the undisturbed run."""
    for directory in find_checkpoints(run_dir):
        check_complete(directory)
    again = start("resume=auto", *overrides)
    assert again.wait() == 0, again.log.read_text()
    assert find_differences(whole, run_dir) == []
    rest = {path.name for path in run_dir.iterdir() if path.name.startswith(".")}
    assert rest == {".lock"}


@pytest.mark.parametrize(
    "update", [0, pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_killed_in_the_middle_of_an_update(update, start, whole, tmp_path):
    run = start(fault=kill_after_update, arguments=(update,))
    assert run.wait() == -signal.SIGKILL
    assert len(read_metrics(tmp_path / "run", "train")) == update
    is_whole_after(start, whole, tmp_path / "run")


# A save brings 5 files, their manifest and their directory to the disk, renames it and points LATEST and BEST to
# it; the third removes the first checkpoint. These are all such steps of three saves, and of the export after them: 6
# files, their directory, its name and the directory above. `make test` kills at a few.
STEPS = range(1, 42)
CORNERS = (8, 12, 32, 36)


@pytest.mark.parametrize("step", [s if s in CORNERS else pytest.param(s, marks=pytest.mark.slow) for s in STEPS])
def test_killed_at_every_step_of_a_save(step, start, whole, tmp_path):
    run = start(fault=kill_at_step_of_saving, arguments=(step,))
    assert run.wait() == -signal.SIGKILL, run.log.read_text()
    is_whole_after(start, whole, tmp_path / "run")
    exported = {path.name for path in (tmp_path / "run" / "LATEST" / "hf").iterdir()}
    assert exported == {path.name for path in (whole / "LATEST" / "hf").iterdir()}
    assert list((tmp_path / "run").glob("step-*/.*")) == []


@pytest.mark.slow
def test_killed_again_and_again_while_it_continues(start, whole, tmp_path):
    for update in range(1, 6):
        run = start("resume=auto", "save_every=4", fault=kill_after_update, arguments=(update,))
        assert run.wait() == -signal.SIGKILL, run.log.read_text()
    is_whole_after(start, whole, tmp_path / "run")


def test_a_full_disk_is_one_sentence_and_costs_nothing_that_was_saved(start, whole, tmp_path):
    first = start("n_examples=8")
    assert first.wait() == 0
    run = start("resume=auto", fault=limit_file_size, arguments=(500_000,))
    assert run.wait() == 1
    assert re.search(r"checkpoint \S+step-16 could not be written \(.*\); earlier ones are intact", run.log.read_text())
    assert {path.name for path in find_checkpoints(tmp_path / "run")} == {"step-8"}
    is_whole_after(start, whole, tmp_path / "run")


@pytest.mark.slow
def test_a_full_file_system_is_noticed_too(rows, start, whole, tmp_path):
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3500k", "none", str(disk)]  # one checkpoint and a half
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        run = start()
        assert run.wait() == 1, run.log.read_text()
        assert "No space left on device" in run.log.read_text()
        assert [path.name for path in find_checkpoints(disk)] == ["step-8"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)  # somebody made room
        is_whole_after(start, whole, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] if n == signal.SIGUSR1 else []) for n in STATUS]
)
def test_asked_to_stop_it_saves_and_exits_with_the_signals_status(number, start, tmp_path):
    run = start("n_examples=4000", "eval_every=40")
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(read_metrics(tmp_path / "run", "train")) < 3:
        time.sleep(0.01)
    os.kill(run.process.pid, number)
    assert run.wait() == STATUS[number], run.log.read_text()
    updates = read_metrics(tmp_path / "run", "train")
    newest = find_checkpoints(tmp_path / "run")[0]
    assert newest.name == f"step-{updates[-1]['examples']}"
    check_complete(newest)
    again = start("resume=auto", f"n_examples={updates[-1]['examples'] + 8}")
    assert again.wait() == 0, again.log.read_text()
    assert [line["updates"] for line in read_metrics(tmp_path / "run", "train")] == list(range(1, len(updates) + 3))


# --- in several processes ------------------------------------------------------------------------------------------


def start_sharded(rows: Path, run_dir: Path, *overrides: str) -> Python:
    return start_python("train.py", *small_run(rows, run_dir, *SHARDED, *overrides))


def start_python(*arguments: str, **environment: str) -> Python:
    """As in a terminal: Ctrl-C goes to the command and all that it starts."""
    return Python(*arguments, environment=make_environment(**environment), session=True, merge=True)


def start_interpreter(*arguments: str, **environment: str) -> subprocess.Popen:
    """The same with nothing imported; its workers are spawned."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=make_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_updates(run_dir: Path, n: int, process: Python | subprocess.Popen) -> None:
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b'"train"') < n:
        assert process.poll() is None, process.communicate(timeout=1)[0]
        time.sleep(0.002)


def continue_sharded(rows: Path, run_dir: Path, whole: Path) -> None:
    result = train(*small_run(rows, run_dir, *SHARDED, "resume=auto"))
    assert result.returncode == 0, result.stderr
    assert find_differences(whole, run_dir) == []


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_ends_the_run_which_continues(rank, rows, whole_sharded, tmp_path):
    process = start_sharded(rows, tmp_path / "run")
    wait_for_updates(tmp_path / "run", 3, process)
    os.kill(children_of(process.pid)[rank], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert re.search(r"rank \d was killed by SIGKILL", said)
    continue_sharded(rows, tmp_path / "run", whole_sharded)


@pytest.mark.slow  # 30 s of waiting; that a worker that hangs ends all is in test_launching
def test_a_rank_that_hangs_ends_the_run_within_the_timeout_and_it_continues(rows, whole_sharded, tmp_path):
    process = start_sharded(rows, tmp_path / "run", "collective_timeout_secs=5")
    wait_for_updates(tmp_path / "run", 3, process)
    os.kill(children_of(process.pid)[1], signal.SIGSTOP)
    started = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "did not answer within collective_timeout_secs=5" in said
    assert time.monotonic() - started < 40
    continue_sharded(rows, tmp_path / "run", whole_sharded)


def test_the_launcher_passes_a_signal_on_and_all_exit_with_143(rows, whole_sharded, tmp_path):
    process = start_sharded(rows, tmp_path / "run")
    wait_for_updates(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert said.count("SIGTERM: stopping, after what was trained is saved\n") == 1
    go_on = f"rerun the same command with local_run_dir={tmp_path / 'run'} resume=auto to continue"
    assert said.count(go_on) == 1
    continue_sharded(rows, tmp_path / "run", whole_sharded)


@pytest.mark.slow  # its interpreters start anew; that the launcher passes a signal on is the test before it
def test_ctrl_c_on_a_terminal_saves_in_several_processes_that_all_get_it(rows, whole_sharded, tmp_path):
    process = start_interpreter("train.py", *small_run(rows, tmp_path / "run", *SHARDED))
    wait_for_updates(tmp_path / "run", 2, process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.count("Ctrl-C: stopping, after what was trained is saved; press Ctrl-C again") == 1
    assert said.count("stopped by Ctrl-C: rerun the same command") == 1
    assert "Traceback" not in said
    continue_sharded(rows, tmp_path / "run", whole_sharded)


def test_ctrl_c_while_settings_are_checked_ends_at_once_without_a_traceback(rows, tmp_path):
    script = (
        "import runpy, sys, time, dpo.settings.command_line\n"
        "dpo.settings.command_line.parse = lambda arguments: print('checks', flush=True) or time.sleep(600)\n"
        "sys.argv[0] = 'train.py'\n"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    process = start_interpreter("-c", script, *small_run(rows, tmp_path / "run"), PYTHONPATH=str(ROOT))
    assert process.stdout.readline() == "checks\n"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "stopped by Ctrl-C: nothing to save\n")


ENDLESS_SAVE = """
import os, runpy, sys, time, trainers
from dpo.checkpoint import saver
saver.write_checkpoint = lambda *_, **__: time.sleep(600)
clip, slow = trainers.BasicTrainer.clip_gradient, int(os.environ["SLOW_UPDATE"])
trainers.BasicTrainer.clip_gradient = lambda self: time.sleep(600) if self.state.batch_counter == slow else clip(self)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("eval_every", "slow_update"),
    [
        pytest.param(40000, 40000, id="while it saves"),
        pytest.param(8, 3, marks=pytest.mark.slow, id="in an update, beside a save"),
    ],
)
def test_a_second_ctrl_c_ends_at_once_and_saves_nothing(eval_every, slow_update, rows, tmp_path):
    overrides = small_run(rows, tmp_path / "run", "n_examples=40000", f"eval_every={eval_every}")
    process = start_python("-c", ENDLESS_SAVE, *overrides, SLOW_UPDATE=str(slow_update))
    wait_for_updates(tmp_path / "run", 3, process)
    os.killpg(process.pid, signal.SIGINT)
    while "Ctrl-C: stopping" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert said.endswith("aborted: nothing more is saved\n")
    assert find_checkpoints(tmp_path / "run") == []


@pytest.mark.slow
def test_workers_end_with_their_parent_and_the_run_continues(rows, whole_sharded, tmp_path):
    process = start_interpreter("train.py", *small_run(rows, tmp_path / "run", *SHARDED))
    wait_for_updates(tmp_path / "run", 3, process)
    workers = find_workers(process.pid)
    process.kill()
    process.communicate(timeout=20)  # the workers hold its output open
    assert len(workers) == 2
    assert_gone(workers)
    continue_sharded(rows, tmp_path / "run", whole_sharded)


@pytest.mark.slow
def test_torchrun_restarts_a_crashed_run_which_continues_by_itself(rows, whole_sharded, tmp_path):
    overrides = [
        o for o in small_run(rows, tmp_path / "run", *SHARDED, "resume=auto") if not o.startswith("world_size")
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = start_interpreter(*torchrun, "train.py", *overrides)
    wait_for_updates(tmp_path / "run", 3, process)
    [victim, *_] = [pid for pid in children_of(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert find_differences(whole_sharded, tmp_path / "run") == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
