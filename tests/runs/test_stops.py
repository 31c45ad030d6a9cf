"""A run that is asked to stop stops, at every step of its start, even inside a library that swallows exceptions.

With nothing to save it says that in one sentence; where there is a checkpoint, how to continue.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.faults import Run
from support.runs import ROOT, make_environment, read_metrics, small_run
from support.warm import Python

from dpo.checkpoint.files import find_checkpoints

STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
NAME = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}
STEPS = {
    "directory": "dpo.checkpoint.resume:open_run",
    "seed": "transformers:set_seed",
    "tokenizer": "transformers:AutoTokenizer.from_pretrained",
    "dataset": "dpo.data.preflight:prepare_data",
    "config of the model": "transformers:AutoConfig.from_pretrained",
    "model": "transformers:AutoModelForCausalLM.from_pretrained",
    "reference": "trainers:load_reference",
    "optimizer": "torch.optim:Optimizer.__init__",
    "batches": "trainers:BasicTrainer._make_batches",
    "self-test": "trainers:self_test",
    "first evaluation": "dpo.training.evaluation:Evaluator.metrics",
}


def assert_stopped_before_training(number: int, status: int, said: str, run_dir: Path) -> None:
    assert status == STATUS[number], said
    assert said.rstrip().endswith(f"stopped by {NAME[number]}: nothing to save"), said
    assert "Traceback" not in said
    assert "saving a checkpoint" not in said
    assert "resume=" not in said
    assert not (run_dir / "metrics.jsonl").exists() or read_metrics(run_dir, "train") == []
    assert find_checkpoints(run_dir) == []


# the call goes on whatever the signal raises
SWALLOWED = """
import runpy, signal, sys
from support.faults import swallow_signal_in

place, number = sys.argv[1:3]
signal.signal(signal.SIGINT, signal.default_int_handler)  # wherever the tests run
swallow_signal_in(place, int(number))
sys.argv[:] = ["train.py", *sys.argv[3:]]
runpy.run_path("train.py", run_name="__main__")
"""


def run_swallowing(step: str, number: int, *overrides: str) -> tuple[int, str]:
    """The status of a run in which the signal comes at this step, and all that it printed."""
    environment = make_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    arguments = "-c", SWALLOWED, STEPS[step], str(int(number)), *overrides
    process = Python(*arguments, environment=environment, merge=True, session=True)
    said, _ = process.communicate(timeout=200)
    return process.returncode, said


@pytest.mark.parametrize("step", STEPS)
def test_a_signal_at_a_step_of_the_start_ends_the_run_there(step, rows, tmp_path):
    number, run_dir = list(STATUS)[len(step) % 3], tmp_path / "run"
    status, said = run_swallowing(step, number, *small_run(rows, run_dir))
    assert_stopped_before_training(number, status, said, run_dir)


INTERPRETER = """
import contextlib, runpy, signal, sys

module, number, swallowing, *arguments = sys.argv[1:]

def ask(event, details):
    if event == "import" and details[0] == module:
        with contextlib.suppress(BaseException) if swallowing == "swallowed" else contextlib.nullcontext():
            signal.raise_signal(int(number))

sys.addaudithook(ask)
sys.argv[:] = ["train.py", *arguments]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "number", "fate"),
    [
        ("hydra", signal.SIGINT, "raised"),
        ("hydra", signal.SIGTERM, "swallowed"),
        ("dpo.settings.validation", signal.SIGTERM, "raised"),
        ("torch", signal.SIGTERM, "swallowed"),
        ("torch", signal.SIGINT, "raised"),
        ("transformers", signal.SIGTERM, "raised"),
        ("torch.optim", signal.SIGINT, "swallowed"),
    ],
)
def test_a_signal_during_imports_is_one_sentence(module, number, fate, rows, tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETER, module, str(int(number)), fate, *small_run(rows, tmp_path / "run")],
        cwd=ROOT,
        env=make_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr == f"stopped by {NAME[number]}: nothing to save\n"
    assert "stopping" not in process.stdout
    assert process.returncode == STATUS[number]


# both ranks are asked, by their parent, while each is in a call that swallows exceptions
ASKED_TOGETHER = """
import os, runpy, signal, sys, time
from support.faults import call_before

def ask():
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK")) == "0":
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)

call_before(os.environ["PLACE"], ask)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
SHARDED = ("trainer=FSDPTrainer", "world_size=2", "eval_batch_size=8", "n_eval_examples=8", "n_examples=40")


@pytest.mark.parametrize("step", ["seed", "model", pytest.param("self-test", marks=pytest.mark.slow)])
def test_of_several_processes_none_goes_on(step, rows, tmp_path):
    run_dir = tmp_path / "run"
    environment = make_environment(PLACE=STEPS[step], PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    process = Python(
        "-c", ASKED_TOGETHER, *small_run(rows, run_dir, *SHARDED), environment=environment, merge=True, session=True
    )
    began = time.monotonic()
    said, _ = process.communicate(timeout=120)
    assert_stopped_before_training(signal.SIGTERM, process.returncode, said, run_dir)
    assert said.count("SIGTERM") == 2  # acknowledged once, and the last sentence
    assert time.monotonic() - began < 40


def test_a_rank_that_waits_for_the_others_in_a_call_that_runs_no_handler_is_killed(rows, tmp_path):
    overrides = [o for o in small_run(rows, tmp_path / "run", *SHARDED) if not o.startswith("world_size")]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        process = Python("train.py", *overrides, environment=make_environment(**rank), merge=True)
        silent.settimeout(100)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_run_that_has_a_checkpoint_says_how_to_continue(rows, tmp_path):
    run_dir = tmp_path / "run"
    assert Run(small_run(rows, run_dir, "n_examples=8"), tmp_path / "log").wait() == 0
    status, said = run_swallowing("model", signal.SIGINT, *small_run(rows, run_dir, "resume=auto"))
    assert status == 130
    way_on = f"stopped by Ctrl-C: rerun the same command with local_run_dir={run_dir} resume=auto to continue\n"
    assert said.endswith(way_on)
    assert len(read_metrics(run_dir, "train")) == 2


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_change_nothing(closed, rows, tmp_path):
    """As under some daemons: `>&-`, `2>&-`."""
    run_dir = tmp_path / "run"
    process = start_interpreter(small_run(rows, run_dir, "n_examples=8"), lambda: [os.close(n) for n in closed])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert ("run directory:" in out) == (1 not in closed)
    assert len(find_checkpoints(run_dir)) == 1


def start_interpreter(overrides: list[str], prepare) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", *overrides],
        cwd=ROOT,
        env=make_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


@pytest.mark.parametrize("more", [(), SHARDED])
def test_output_that_cannot_be_written_ends_no_run(more, rows, tmp_path):
    """On a full disk, or a pipe that nobody reads."""
    run_dir = tmp_path / "run"

    def fill() -> None:
        for number in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)

    process = start_interpreter(small_run(rows, run_dir, *more), fill)
    assert process.wait(120) == 0
    assert len(find_checkpoints(run_dir)) > 0


def test_a_bad_command_line_has_its_status_without_streams(tmp_path):
    closed = start_interpreter(["loss=none_such"], lambda: [os.close(n) for n in (0, 1, 2)])
    assert closed.wait(60) == 2
