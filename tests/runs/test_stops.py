"""A stop signal ends a run at any step of its start, also inside a library that swallows exceptions."""

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from support.faults import SHARDED, STATUS, call_before, start_interpreter, start_run
from support.pytests import slow
from support.runs import ROOT, read_metrics

from dpo.checkpoint.files import find_checkpoints

NAME = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}
STEPS = {
    "directory": "dpo.checkpoint.resume:lock_run_dir",
    "tokenizer": "transformers:AutoTokenizer.from_pretrained",
    "dataset": "dpo.data.preflight:prepare_data",
    "model": "transformers:PreTrainedModel.from_pretrained",
    "optimizer": "torch.optim:Optimizer.__init__",
    "first evaluation": "dpo.training.evaluation:Evaluator.metrics",
}
QUICK = ("dataset", "model", "first evaluation")


def assert_stopped_before_training(number: int, status: int, said: str, run_dir: Path) -> None:
    assert status == STATUS[number], said
    assert said.rstrip().endswith(f"stopped by {NAME[number]}: nothing to save"), said
    assert "Traceback" not in said
    assert not (run_dir / "metrics.jsonl").exists() or read_metrics(run_dir, "train") == []
    assert find_checkpoints(run_dir) == []


def run_with_signal(step: str, number: int, overrides: list[str]) -> tuple[int, str]:
    """Status and output of a run with a signal at this step, which swallows the handler's exception."""
    run = start_run(overrides, partial(call_before, STEPS[step], partial(signal.raise_signal, number)))
    return run.wait(), run.text


@pytest.mark.parametrize("step", [s if s in QUICK else slow(s) for s in STEPS])
def test_a_signal_at_a_step_of_the_start_ends_the_run_there(step, command, run_dir):
    number = list(STATUS)[len(step) % 3]
    status, said = run_with_signal(step, number, command("run"))
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
        ("torch", signal.SIGTERM, "swallowed"),
        slow("transformers", signal.SIGTERM, "raised"),
    ],
)
def test_a_signal_during_imports_is_one_sentence(module, number, fate, command):
    arguments = [module, str(int(number)), fate, *command("run")]
    process = start_interpreter("-c", INTERPRETER, *arguments, PYTHONPATH=str(ROOT))
    out, err = process.communicate(timeout=200)
    assert err == f"stopped by {NAME[number]}: nothing to save\n"
    assert "stopping" not in out
    assert process.returncode == STATUS[number]


def ask_both_ranks() -> None:
    """Stop both ranks, each in a call that swallows exceptions."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK")) == "0":
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.slow
def test_of_several_processes_none_goes_on(command, run_dir):
    began = time.monotonic()
    run = start_run(command("run", *SHARDED), partial(call_before, STEPS["model"], ask_both_ranks))
    assert_stopped_before_training(signal.SIGTERM, run.wait(), run.text, run_dir)
    assert run.text.count("SIGTERM") == 2  # acknowledged once, and the last sentence
    assert time.monotonic() - began < 40


def test_a_rank_that_waits_for_the_others_in_a_call_that_runs_no_handler_is_killed(command):
    overrides = [o for o in command("run", *SHARDED) if not o.startswith("world_size")]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        process = start_run(overrides, **rank)
        silent.settimeout(100)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_run_that_has_a_checkpoint_says_how_to_continue(run, command, run_dir):
    run("run", "n_examples=8")
    status, said = run_with_signal("model", signal.SIGINT, command("run", "resume=auto"))
    assert status == 130
    way_on = f"rerun the same command with local_run_dir={run_dir} resume=auto to continue"
    assert said.endswith(f"stopped by Ctrl-C: {way_on}\n")
    assert len(read_metrics(run_dir, "train")) == 2


def fill_output() -> None:
    """Let standard output and error be on a full disk."""
    for number in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), SHARDED])
def test_output_that_cannot_be_written_ends_no_run(more, command, run_dir):
    """The disk is full, or nobody reads the pipe."""
    assert start_run(command("run", *more), fill_output).wait() == 0
    assert len(find_checkpoints(run_dir)) > 0


def close_streams() -> None:
    for number in (0, 1, 2):
        os.close(number)


@pytest.mark.slow
def test_a_run_of_several_processes_trains_without_streams(command, run_dir):
    assert start_interpreter("train.py", *command("run", *SHARDED), prepare=close_streams).wait(100) == 0
    assert len(find_checkpoints(run_dir)) > 0


def test_a_bad_command_line_has_its_status_without_streams():
    closed = start_interpreter("train.py", "loss=none_such", prepare=close_streams)
    assert closed.wait(60) == 2
