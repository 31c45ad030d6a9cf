"""Whatever ends a run, what was saved continues bit for bit.

Every fault happens to a real process.
"""

import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.faults import (
    SHARDED,
    STATUS,
    fail_to_sample,
    kill_after_update,
    kill_at_step_of_saving,
    kill_rank_at_step_of_saving,
    limit_file_size,
    start_interpreter,
    start_run,
)
from support.pytests import slow, succeeded
from support.runs import assert_alike, find_differences, read_metrics, train
from support.warm import Python
from transformers import AutoModelForCausalLM

from dpo.checkpoint import saver
from dpo.checkpoint.files import check_complete, find_checkpoints
from dpo.commands.consolidate import main as consolidate
from dpo.models.export import export

PRUNED = ("keep_checkpoints=2", "export=true")
SLOW = pytest.mark.slow


@pytest.fixture
def whole(finished) -> Path:
    """The run that nobody disturbed."""
    return finished(*PRUNED)


@pytest.fixture
def whole_sharded(finished) -> Path:
    return finished(*SHARDED)


@pytest.fixture
def start(command):
    """Start a run into `run_dir`, with a fault."""
    return lambda *overrides, fault=None: start_run(command("run", *PRUNED, *overrides), fault)


def assert_continues(start, whole: Path, run_dir: Path) -> None:
    """Checkpoints are complete, and continued they give the undisturbed run."""
    for directory in find_checkpoints(run_dir):
        check_complete(directory)
    again = start("resume=auto")
    assert again.wait() == 0, again.text
    assert find_differences(whole, run_dir) == []
    assert {path.name for path in run_dir.iterdir() if path.name.startswith(".")} == {".lock"}


# test_invariance.py kills a run with checkpoints in `make test`
@pytest.mark.parametrize("update", [slow(0), 1, slow(3), slow(5)])
def test_a_run_that_is_killed_in_an_update_continues_or_starts_again(update, start, whole, run_dir):
    run = start(fault=partial(kill_after_update, update))
    assert run.wait() == -signal.SIGKILL
    assert len(read_metrics(run_dir, "train")) == update
    assert_continues(start, whole, run_dir)


# A save brings 5 files, their manifest and their directory to the disk, renames it and points LATEST and BEST to
# it; the third removes the first checkpoint. These are all such steps of three saves and of the export after them.
# `make test` kills at a few.
STEPS = range(1, 34)
CORNERS = (12, 32)


@pytest.mark.parametrize("step", [s if s in CORNERS else slow(s) for s in STEPS])
def test_a_run_that_is_killed_at_any_step_of_a_save_continues(step, start, whole, run_dir):
    run = start(fault=partial(kill_at_step_of_saving, step))
    assert run.wait() == -signal.SIGKILL, run.text
    assert_continues(start, whole, run_dir)
    exported = {path.name for path in (run_dir / "LATEST" / "hf").iterdir()}
    assert exported == {path.name for path in (whole / "LATEST" / "hf").iterdir()}
    assert list(run_dir.glob("step-*/.*")) == []


IN_SHARDS = (*SHARDED, "checkpoint_format=sharded")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [slow(step) for step in range(1, 28, 3)])
def test_a_rank_that_is_killed_at_a_step_of_a_sharded_save_costs_no_checkpoint(step, rank, command, finished, run_dir):
    run = start_run(command("run", *IN_SHARDS), partial(kill_rank_at_step_of_saving, rank, step))
    is_killed = run.wait() == 1
    assert is_killed == ("was killed by SIGKILL" in run.text), run.text
    for directory in find_checkpoints(run_dir):
        check_complete(directory)
    succeeded(train(*command("run", *IN_SHARDS, "resume=auto")))
    assert find_differences(finished(*IN_SHARDS), run_dir) == []


@pytest.mark.slow
def test_a_run_killed_in_a_save_goes_on_with_three_processes_then_cut_over_two(command, finished, run_dir, tmp_path):
    """Consolidated and exported, its model answers as that of a run without any of it."""
    # with RMSprop, some rounding errors become whole steps
    settings = (*IN_SHARDS, "resume=auto", "world_size=4", "optimizer=SGD", "optimizer_args.momentum=0.9", "lr=0.03")
    run = start_run(command("run", *settings), partial(kill_rank_at_step_of_saving, 1, 4))
    assert run.wait() == 1
    assert [path.name for path in find_checkpoints(run_dir)] == ["step-8"]
    run = start_run(command("run", *settings, "world_size=3"), partial(kill_after_update, 7))
    assert run.wait() == 1
    assert len(find_checkpoints(run_dir)) > 1  # the last save may not have been complete
    succeeded(train(*command("run", *settings, "trainer=TensorParallelTrainer", "world_size=2")))
    whole = finished(*settings)
    assert_alike(run_dir, whole)
    consolidate([str(run_dir), str(run_dir / "whole")])
    consolidate([str(run_dir), str(tmp_path / "model"), "--hf"])
    tokens = torch.arange(2, 40)[None]
    expected = AutoModelForCausalLM.from_pretrained(export(whole, tmp_path / "whole"))(tokens).logits
    for folder in (tmp_path / "model", export(run_dir / "whole", tmp_path / "exported")):
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("ranks", "processes"), [((0,), ()), slow((0, 1), SHARDED), slow((0,), SHARDED), slow((1,), SHARDED)], ids=str
)
def test_a_failing_sample_is_a_warning_on_all_ranks_alike_or_ends_the_run_soon(ranks, processes, start, run_dir):
    options = (*processes, "sample_during_eval=true", "do_first_sampling=false", "n_examples=8", "export=false")
    begin = time.monotonic()
    run = start(*options, "collective_timeout_secs=300", fault=partial(fail_to_sample, *ranks))
    status = run.wait()
    assert time.monotonic() - begin < 150  # not as long as a collective may take
    check_complete(run_dir / "step-8")
    if len(ranks) == 2 or not processes:
        assert status == 0, run.text
        assert "warning: no samples after 8 examples: ArithmeticError" in run.text
        return
    assert status == 1
    said = f"rank {ranks[0]}: this process alone could not draw samples: "
    assert f"{said}ArithmeticError no such token; resume=auto continues, and sample_during_eval=false" in run.text
    again = start(*options, "resume=auto", "sample_during_eval=false")
    assert again.wait() == 0, again.text


def test_a_full_disk_is_one_sentence_and_costs_nothing_that_was_saved(start, whole, run_dir, run):
    run("run", *PRUNED, "n_examples=8")
    full = start("resume=auto", fault=partial(limit_file_size, 500_000))
    assert full.wait() == 1
    assert re.search(
        r"checkpoint \S+step-16 could not be written: the disk is full; earlier ones are intact", full.text
    )
    assert {path.name for path in find_checkpoints(run_dir)} == {"step-8"}
    assert_continues(start, whole, run_dir)


@pytest.mark.parametrize("number", [n if n == signal.SIGINT else slow(n) for n in STATUS])
def test_asked_to_stop_it_saves_and_exits_with_the_signals_status(number, start, run_dir):
    run = start("n_examples=4000", "eval_every=40")
    wait_for_updates(run_dir, 3, run)
    run.send_signal(number)
    assert run.wait() == STATUS[number], run.text
    updates = read_metrics(run_dir, "train")
    newest = find_checkpoints(run_dir)[0]
    assert newest.name == f"step-{updates[-1]['examples']}"
    check_complete(newest)
    again = start("resume=auto", f"n_examples={updates[-1]['examples'] + 8}")
    assert again.wait() == 0, again.text
    assert [line["updates"] for line in read_metrics(run_dir, "train")] == list(range(1, len(updates) + 3))


def save_for_ever() -> None:
    saver.write_checkpoint = lambda *_, **__: time.sleep(600)


def test_a_second_ctrl_c_ends_at_once_and_saves_nothing(start, run_dir):
    process = start("n_examples=40000", "eval_every=40000", fault=save_for_ever)
    wait_for_updates(run_dir, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    while "Ctrl-C: stopping" not in process.text:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130, process.text
    assert process.text.endswith("aborted: nothing more is saved\n")
    assert find_checkpoints(run_dir) == []


# --- in several processes ------------------------------------------------------------------------------------------


def wait_for_updates(run_dir: Path, n: int, process: Python | subprocess.Popen) -> None:
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b'"train"') < n:
        assert process.poll() is None, process.communicate(timeout=1)[0]
        time.sleep(0.002)


@pytest.fixture
def assert_continues_sharded(command, whole_sharded, run_dir):
    def assert_it() -> None:
        succeeded(train(*command("run", *SHARDED, "resume=auto")))
        assert find_differences(whole_sharded, run_dir) == []

    return assert_it


@SLOW  # that a launcher ends and names a worker that is killed is in test_launching.py
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_which_continues(rank, command, assert_continues_sharded, run_dir):
    process = start_run(command("run", *SHARDED))
    wait_for_updates(run_dir, 3, process)
    os.kill(children_of(process.pid)[rank], signal.SIGKILL)
    assert process.wait(60) == 1, process.text
    assert re.search(r"rank \d was killed by SIGKILL", process.text)
    assert_continues_sharded()


def test_the_launcher_passes_a_signal_on_and_all_exit_with_143(command, assert_continues_sharded, run_dir):
    process = start_run(command("run", *SHARDED))
    wait_for_updates(run_dir, 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, process.text
    assert process.text.count("SIGTERM: stopping after saving what was trained\n") == 1
    go_on = f"rerun the same command with local_run_dir={run_dir} resume=auto to continue"
    assert process.text.count(go_on) == 1
    assert_continues_sharded()


@SLOW  # its interpreters start anew; that the launcher passes a signal on is the test before it
def test_ctrl_c_on_a_terminal_saves_in_several_processes_that_all_get_it(command, assert_continues_sharded, run_dir):
    process = start_interpreter("train.py", *command("run", *SHARDED))
    wait_for_updates(run_dir, 2, process)
    os.killpg(process.pid, signal.SIGINT)
    said = "".join(process.communicate(timeout=60))
    assert process.returncode == 130, said
    assert said.count("Ctrl-C: stopping after saving what was trained; press Ctrl-C again") == 1
    assert said.count("stopped by Ctrl-C: rerun the same command") == 1
    assert "Traceback" not in said
    assert_continues_sharded()


@SLOW
def test_torchrun_restarts_a_crashed_run_which_continues_by_itself(command, whole_sharded, run_dir):
    overrides = [o for o in command("run", *SHARDED, "resume=auto") if not o.startswith("world_size")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = start_interpreter(*torchrun, "train.py", *overrides)
    wait_for_updates(run_dir, 3, process)
    [victim, *_] = [pid for pid in children_of(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    said = "".join(process.communicate(timeout=120))
    assert process.returncode == 0, said
    assert find_differences(whole_sharded, run_dir) == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
